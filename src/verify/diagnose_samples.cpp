// Whether two dumps are of one step: parameters, samples, counts, the start.
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "verify/compared_step.hpp"

namespace isograd {

std::vector<Finding> diagnose_names(const RunPair& pair) {
  std::vector<Finding> findings;
  const auto by_name = [](const StepDump& dump) {
    std::map<std::string, at::Tensor> map;
    for (const auto& [name, tensor] : dump.gradients) map[name] = tensor;
    return map;
  };
  const auto found = by_name(pair.found), expected = by_name(pair.expected);
  std::vector<std::string> missing, extra, reshaped;
  for (const auto& [name, tensor] : expected) {
    const auto match = found.find(name);
    if (match == found.end())
      missing.push_back(name);
    else if (match->second.sizes() != tensor.sizes())
      reshaped.push_back(fmt::format("{} [{}], expected [{}]", name,
                                     fmt::join(match->second.sizes().vec(), ", "),
                                     fmt::join(tensor.sizes().vec(), ", ")));
  }
  for (const auto& [name, tensor] : found)
    if (!expected.count(name)) extra.push_back(name);
  if (!reshaped.empty())
    findings.push_back(
        {"parameters_reshaped",
         fmt::format("{} parameters have another shape: {}", reshaped.size(), list_names(reshaped)),
         {}});
  // One old name fits one new one by shape: renamed; otherwise missing.
  if (missing.size() == extra.size() && !missing.empty()) {
    std::multiset<std::vector<std::int64_t>> old_shapes, new_shapes;
    for (const auto& name : missing) old_shapes.insert(expected.at(name).sizes().vec());
    for (const auto& name : extra) new_shapes.insert(found.at(name).sizes().vec());
    if (old_shapes == new_shapes) {
      findings.push_back({"parameters_renamed",
                          fmt::format("{} parameters have other names: found {}, expected {}", missing.size(),
                                      list_names(extra), list_names(missing)),
                          {"the shapes are the same"}});
      return findings;
    }
  }
  if (!missing.empty() || !extra.empty())
    findings.push_back(
        {"parameters_missing",
         fmt::format("not on both sides: {}{}{}", missing.empty() ? "" : "missing " + list_names(missing),
                     missing.empty() || extra.empty() ? "" : "; ",
                     extra.empty() ? "" : "not expected " + list_names(extra)),
         {}});
  return findings;
}

bool counted_several_times(const StepDump& found, const StepDump& expected) {
  const std::int64_t own = found.figures.targets, wanted = expected.figures.targets;
  if (found.samples.empty() || found.samples != expected.samples || wanted <= 0) return false;
  const Grid grid(found.axes);
  const auto times = [&](const AxisSet& along) { return own == wanted * grid.size(along); };
  for (const auto& [name, size] : grid.axes())
    if (size > 1 && times({name})) return true;
  return own > wanted && (times(present(grid, kContextAxes)) || times(grid.names()));
}

// kNotRecorded where it is not known.
static std::int64_t targets_of(const StepDump& dump) {
  if (dump.figures.targets != kNotRecorded || dump.counts.empty()) return dump.figures.targets;
  std::int64_t sum = 0;
  for (const auto& rank : dump.counts)
    for (const auto count : rank) sum += count;
  return sum;
}

std::vector<Finding> diagnose_samples(const StepDump& found, const StepDump& expected) {
  if (!found.samples.empty() && !expected.samples.empty() && found.samples != expected.samples) {
    std::map<std::int64_t, int> extra;
    for (auto id : found.samples) ++extra[id];
    for (auto id : expected.samples) --extra[id];
    const std::set<std::int64_t> known(expected.samples.begin(), expected.samples.end());
    std::vector<std::string> twice, strange, missing;
    for (const auto& [id, count] : extra) {
      if (count < 0) missing.push_back(std::to_string(id));
      if (count > 0) (known.count(id) ? twice : strange).push_back(std::to_string(id));
    }
    if (strange.empty() && missing.empty())
      return {{"sample_twice",
               fmt::format("{} samples count more than once: ids {}", twice.size(), list_names(twice)),
               {fmt::format("{} ids seen, expected {}", found.samples.size(), expected.samples.size())}}};
    return {{"other_batch",
             fmt::format("the runs did not see the same samples: {} ids too often, {} missing, {} not in the "
                         "batch",
                         twice.size(), missing.size(), strange.size()),
             {twice.empty() ? "" : "too often: " + list_names(twice),
              missing.empty() ? "" : "missing: " + list_names(missing),
              strange.empty() ? "" : "not in the batch: " + list_names(strange)}}};
  }
  const auto &f = found.figures, &e = expected.figures;
  if (counted_several_times(found, expected)) return {};  // the same samples: a matter of the gradient
  const std::int64_t own = targets_of(found), wanted = targets_of(expected);
  if (own < 0 || wanted < 0 || own == wanted) return {};
  const bool ids = !found.samples.empty() && !expected.samples.empty();
  const auto of = [](std::int64_t targets, std::int64_t tokens) {
    return tokens == kNotRecorded ? fmt::format("{} targets", targets)
                                  : fmt::format("{} targets of {} tokens", targets, tokens);
  };
  Finding finding{ids ? "other_targets" : "other_batch",
                  fmt::format("counts differ: {}, expected {}", of(own, f.tokens), of(wanted, e.tokens)),
                  {}};
  if (!ids) {
    finding.evidence.emplace_back(
        "no sample ids on both sides: record them (\"samples\") to tell other samples from other targets");
    return {finding};
  }
  finding.sentence = "the same samples, but other targets: " + finding.sentence;
  const auto samples = static_cast<std::int64_t>(
      std::set<std::int64_t>(expected.samples.begin(), expected.samples.end()).size());
  if (own == f.tokens || own == e.tokens)
    finding.evidence.emplace_back(
        "every token counts: padding, prompts or each document's last one carry loss");
  if (own - wanted == samples)
    finding.evidence.push_back(fmt::format(
        "one more for each of {} samples: the first label counts, or labels are not shifted", samples));
  if (wanted - own == samples)
    finding.evidence.push_back(
        fmt::format("one fewer for each of {} samples: labels are shifted twice", samples));
  if (finding.evidence.empty())
    finding.evidence.push_back(
        fmt::format("{} {} than expected: {}", std::abs(own - wanted), own > wanted ? "more" : "fewer",
                    own > wanted ? "padding or prompts carry loss" : "targets are masked or cut off"));
  return {finding};
}

std::vector<Finding> diagnose_counts(const StepDump& dump, const char* side) {
  const std::int64_t reported = dump.figures.targets;
  const auto contradicts = [](std::string text) -> std::vector<Finding> {
    return {{"other_targets", std::move(text), {}}};
  };
  if (targets_of(dump) == 0)  // beside a gradient: one that is zero everywhere is no step to compare
    return contradicts(
        fmt::format("0 targets are reported{}, which make no loss and no gradient; there is one", side));
  if (dump.figures.tokens != kNotRecorded && reported > dump.figures.tokens)
    return contradicts(fmt::format("{} targets of {} tokens are reported{}: each target is a token", reported,
                                   dump.figures.tokens, side));
  if (reported == kNotRecorded || dump.counts.empty()) return {};
  std::int64_t sum = 0;
  for (const auto& rank : dump.counts)
    for (const auto count : rank) sum += count;
  if (sum == reported) return {};
  return contradicts(
      fmt::format("{} targets are reported{}, but the counts of ranks and micro-batches add up to {}; the "
                  "gradient is right",
                  reported, side, sum));
}

// Checksums by the names of their parameters; where they are not as many, by their places.
static std::map<std::string, std::uint64_t> start_of(const StepDump& dump, const StepDump::RankView& rank) {
  std::map<std::string, std::uint64_t> start;
  const bool named = rank.initial.size() == dump.gradients.size();
  for (std::size_t i = 0; i < rank.initial.size(); ++i)
    start[named ? dump.gradients[i].first : std::to_string(i)] = rank.initial[i];
  return start;
}

// What is other than on the first rank that says, or than in the reference.
static std::vector<Finding> diagnose_start_of(const StepDump& dump, const char* side,
                                              const std::map<std::string, std::uint64_t>& reference) {
  auto first = reference;
  std::set<std::string> parameters;
  std::vector<std::string> ranks;
  for (std::size_t r = 0; r < dump.ranks.size(); ++r) {
    const auto own = start_of(dump, dump.ranks[r]);
    if (first.empty()) first = own;
    bool differs = false;
    for (const auto& [name, hash] : own) {
      const auto other = first.find(name);
      if (other == first.end() || other->second == hash) continue;
      parameters.insert(name);
      differs = true;
    }
    if (differs) ranks.push_back(std::to_string(r));
  }
  if (parameters.empty()) return {};
  const auto in_order = std::find_if(dump.gradients.begin(), dump.gradients.end(), [&](const auto& gradient) {
    return parameters.contains(gradient.first);
  });
  return {
      {"initial_parameters_differ",
       fmt::format("{} of {} parameters differ over the ranks{} before the step, first {}: nothing else was "
                   "compared",
                   parameters.size(), first.size(), side,
                   in_order == dump.gradients.end() ? *parameters.begin() : in_order->first),
       {fmt::format("other bits on ranks {}: initialisation depends on the rank or the layout",
                    list_names(ranks))}}};
}

std::vector<Finding> diagnose_start(const StepDump& found, const StepDump& expected) {
  std::map<std::string, std::uint64_t> theirs;
  // The same values have other bits in another precision.
  if (found.precision == expected.precision)
    for (const auto& rank : expected.ranks)
      if (theirs.empty()) theirs = start_of(expected, rank);
  if (auto own = diagnose_start_of(found, "", theirs); !own.empty()) return own;
  return diagnose_start_of(expected, " of the reference", {});
}

}  // namespace isograd
