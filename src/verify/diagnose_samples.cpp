// Whether two dumps are of one step: parameters, samples, counts, the start.
#include <fmt/ranges.h>

#include <map>
#include <set>

#include "verify/case.hpp"

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
  if (dump.figures.targets == kNotRecorded || dump.counts.empty()) return {};
  std::int64_t sum = 0;
  for (const auto& rank : dump.counts)
    for (const auto count : rank) sum += count;
  if (sum == dump.figures.targets) return {};
  return {
      {"other_targets",
       fmt::format("{} targets are reported{}, but the counts of ranks and micro-batches add up to {}; the "
                   "gradient is right",
                   dump.figures.targets, side, sum),
       {}}};
}

std::vector<Finding> diagnose_start(const StepDump& found, const StepDump& expected) {
  if (found.ranks.empty()) return {};
  const auto holder = std::find_if(found.ranks.begin(), found.ranks.end(),
                                   [](const auto& rank) { return !rank.initial.empty(); });
  const bool theirs = !expected.ranks.empty() && !expected.ranks[0].initial.empty();
  if (holder == found.ranks.end()) return {};
  const auto& first = theirs ? expected.ranks[0].initial : holder->initial;
  std::set<std::size_t> parameters;
  std::vector<std::string> ranks;
  for (std::size_t r = 0; r < found.ranks.size(); ++r) {
    const auto& own = found.ranks[r].initial;
    if (own.size() != first.size()) continue;
    bool differs = false;
    for (std::size_t i = 0; i < own.size(); ++i)
      if (own[i] != first[i]) {
        parameters.insert(i);
        differs = true;
      }
    if (differs) ranks.push_back(std::to_string(r));
  }
  if (parameters.empty()) return {};
  const std::size_t i = *parameters.begin();
  return {
      {"initial_parameters_differ",
       fmt::format("{} of {} parameters differ over the ranks before the step, first {}: nothing else was "
                   "compared",
                   parameters.size(), first.size(),
                   i < found.gradients.size() ? found.gradients[i].first : std::to_string(i)),
       {fmt::format("other bits on ranks {}: initialisation depends on the rank or the layout",
                    list_names(ranks))}}};
}

}  // namespace isograd
