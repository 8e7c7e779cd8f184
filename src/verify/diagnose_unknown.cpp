// The gradient is wrong in a way that fits no cause: experiments that take away one suspect at a time.
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "verify/compared_step.hpp"

namespace isograd {
namespace {

// Documents to change: the first and the last of all, and the ends of the middle.
std::vector<std::int64_t> candidates(const ComparedStep& one) {
  const auto& all = one.expected().samples;
  const std::set<std::int64_t> ids(all.begin(), all.end());
  const std::vector<std::int64_t> sorted(ids.begin(), ids.end());
  if (sorted.size() < 2) return {};
  std::vector<std::int64_t> chosen;
  for (const std::size_t place : {std::size_t{0}, sorted.size() / 2, sorted.size() - 1, std::size_t{1}})
    if (std::find(chosen.begin(), chosen.end(), sorted[place]) == chosen.end() && sorted[place] >= 0)
      chosen.push_back(sorted[place]);
  return chosen;
}

std::map<std::string, at::Tensor> by_name(const StepDump::Named& named) {
  return {named.begin(), named.end()};
}

// The parameter whose gradient changes most from one dump to the other; empty: no bit does.
std::pair<std::string, double> change(const StepDump::Named& before, const StepDump::Named& after) {
  std::pair<std::string, double> most;
  const auto other = by_name(after);
  for (const auto& [name, tensor] : before) {
    const auto match = other.find(name);
    if (match == other.end() || tensor.equal(match->second)) continue;
    const double own = (tensor - match->second).abs().max().item<double>();
    if (most.first.empty() || own > most.second) most = {name, own};
  }
  return most;
}

}  // namespace

std::optional<Finding> diagnose_leak(const ComparedStep& one, const RunAgain& again) {
  for (const std::int64_t document : candidates(one)) {
    Experiment setting{.muted_document = document};
    const auto before = again(setting);
    setting.perturbed = true;
    const auto after = before ? again(setting) : std::nullopt;
    if (!after) continue;
    const auto [name, found] = change(before->found.gradients, after->found.gradients);
    const auto [other, expected] = change(before->expected.gradients, after->expected.gradients);
    if (name.empty() || !other.empty()) continue;
    return Finding{
        "documents_leak",
        fmt::format("documents leak in this layout: changing document {}, whose own loss does not count, "
                    "changes the others' gradient of {} by {:.3g}",
                    document, name, found),
        {fmt::format("{}: one process's gradient keeps every bit, the layout's does not", setting.text())}};
  }
  return std::nullopt;
}

std::optional<Finding> diagnose_composition(const ComparedStep& one, const RunAgain& again,
                                            const std::string& subject, std::vector<std::string>& evidence) {
  struct Removal {
    Experiment setting;
    std::string without;
  };
  std::vector<Removal> removals;
  if (one.most_micro_batches() > 1)
    removals.push_back(
        {{.one_micro_batch = true}, fmt::format("accumulation ({})", one.most_micro_batches())});
  const auto& axes = one.found().axes;
  for (std::size_t i = 0; axes.size() > 1 && i < axes.size(); ++i) {
    std::string others;
    for (std::size_t j = 0; j < axes.size(); ++j)
      if (j != i && axes[j].size > 1)
        others += fmt::format("{}{} ({})", others.empty() ? "" : " and ", axes[j].name, axes[j].size);
    if (!others.empty()) removals.push_back({{.only_axis = static_cast<int>(i)}, others});
  }
  std::vector<std::string> needed;  // without each of these all is right
  for (const Removal& removal : removals) {
    auto pair = again(removal.setting);
    if (!pair) continue;
    const ComparedStep other(std::move(*pair), removal.setting, again);
    const bool right = other.same() && other.finite();
    evidence.push_back(fmt::format(
        "{}: {}", text_of(one, removal.setting),
        right ? fmt::format("all {} parameters are right", other.parameters().size())
              : fmt::format("{} of {} parameters off", other.off().size(), other.parameters().size())));
    if (right && std::find(needed.begin(), needed.end(), removal.without) == needed.end())
      needed.push_back(removal.without);
  }
  if (needed.size() == 1) evidence.push_back("it takes " + needed[0] + " to be wrong");
  if (needed.size() < 2) return std::nullopt;
  return Finding{"composition",
                 fmt::format("{} wrong with {} together, right without any one of them", subject,
                             fmt::join(needed, " and ")),
                 evidence};
}

}  // namespace isograd
