#include "verify/compare_dumps.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "isograd/error.hpp"
#include "verify/compare.hpp"

namespace isograd {
namespace {

at::ScalarType type_of(const std::string& precision) {
  if (precision == "fp64") return at::kDouble;
  return precision == "bf16" || precision == "fp16" ? at::kBFloat16 : at::kFloat;
}

std::set<std::string> names_of(const StepDump& dump) {
  std::set<std::string> names;
  for (const auto& [name, gradient] : dump.gradients) names.insert(name);
  return names;
}

// Wrappers put one prefix before all names ("module."): what is left without it are the model's own.
std::string common_prefix(const StepDump& found, const StepDump& expected) {
  const std::set<std::string> wanted = names_of(expected);
  const std::string& first = found.gradients[0].first;
  for (std::size_t dot = first.find('.'); dot != std::string::npos; dot = first.find('.', dot + 1)) {
    const std::string prefix = first.substr(0, dot + 1);
    const auto fits = [&](const auto& item) {
      return item.first.starts_with(prefix) && wanted.contains(item.first.substr(prefix.size()));
    };
    if (!wanted.contains(first) && std::all_of(found.gradients.begin(), found.gradients.end(), fits))
      return prefix;
  }
  return {};
}

bool close(double value, double expected, double relative) {
  return std::isnan(value) || std::isnan(expected) ||  // not recorded
         value == expected || std::abs(value - expected) <= relative * std::abs(expected);
}

bool same_count(std::int64_t found, std::int64_t expected) {
  return found == kNotRecorded || expected == kNotRecorded || found == expected;
}

struct Limits {
  Bounds bounds;
  double error = 0;  // of every parameter, where there is no run of one process in the same precision
  bool exact = false;
};

Limits limits_of(const StepDump& found, const StepDump& expected) {
  const at::ScalarType types[] = {type_of(found.precision), type_of(expected.precision)};
  const at::ScalarType coarse = types[0] == at::kBFloat16 || types[1] == at::kBFloat16 ? at::kBFloat16
                                : types[0] == at::kFloat || types[1] == at::kFloat     ? at::kFloat
                                                                                       : at::kDouble;
  int ranks = 1;
  for (const auto& [axis, size] : found.axes) ranks *= size;
  ranks = std::max(ranks, static_cast<int>(found.counts.size()));
  std::size_t rounds = 1;
  for (const auto& own : found.counts) rounds = std::max(rounds, own.size());
  Limits limits;
  limits.bounds = bounds_for(coarse, ranks, static_cast<std::int64_t>(rounds));
  limits.exact = coarse == at::kDouble;
  limits.error = limits.exact ? limits.bounds.exact : limits.bounds.ratio_limit;
  return limits;
}

// Grades and the figures; the parameters are compared already.
void judge(LayoutVerdict& layout, const StepDump& expected, const Limits& limits, bool with_alone,
           const std::string& precision) {
  grade(layout, expected.figures, precision, limits.exact, limits.bounds);
  const StepFigures &f = layout.exact, &e = expected.figures;
  layout.figures_agree = same_count(f.targets, e.targets) && same_count(f.tokens, e.tokens) &&
                         close(f.loss, e.loss, limits.error) && close(f.norm, e.norm, limits.error) &&
                         close(f.clip_coefficient, e.clip_coefficient, limits.error);
  const bool passed = layout.figures_agree && (limits.exact ? layout.e1.failed : layout.e2.failed) == 0;
  const auto state = passed ? Grade::State::kPassed : Grade::State::kFailed;
  if (limits.exact) {
    layout.e1.state = state;
    layout.e2 = {.state = Grade::State::kNotClaimed, .bound = "both dumps are in fp64", .worst = {}};
  } else {
    layout.e1 = {.state = Grade::State::kNotClaimed,
                 .bound = "a dump in " + precision + " says nothing of exact arithmetic",
                 .worst = {}};
    layout.e2.state = state;
    if (!with_alone)
      layout.e2.bound = fmt::format(
          "{}: |g - g64| <= {:g} s for each parameter, the limit of a ratio; what rounding alone does is not "
          "known without a dump of one process in {} (--alone)",
          precision, limits.error, precision);
  }
  layout.e3 = {.state = Grade::State::kNotClaimed, .bound = "one dump shows one run", .worst = {}};
  layout.passed = passed;
}

}  // namespace

RunAgain again_from_shares(const StepDump& expected) {
  if (expected.shares.empty() || expected.counts.empty()) return {};
  double targets = 0;
  for (const auto& rank : expected.counts)
    for (const auto count : rank) targets += static_cast<double>(count);
  return [&expected, targets](const Experiment& experiment) -> std::optional<RunPair> {
    Experiment recorded;
    recorded.only_rank = experiment.only_rank;
    recorded.only_micro_batch = experiment.only_micro_batch;
    recorded.reference_only = true;
    if (experiment.only_rank < 0 || experiment.only_micro_batch < 0 || !experiment.reference_only ||
        recorded.text() != experiment.text())
      return std::nullopt;
    const auto rank = static_cast<std::size_t>(experiment.only_rank);
    const auto micro_batch = static_cast<std::size_t>(experiment.only_micro_batch);
    if (rank >= expected.shares.size() || micro_batch >= expected.shares[rank].size() ||
        expected.shares[rank][micro_batch].empty())
      return std::nullopt;
    // Alone, its mean is over its own targets.
    const auto own = static_cast<double>(expected.counts[rank][micro_batch]);
    RunPair pair;
    for (const auto& [name, share] : expected.shares[rank][micro_batch])
      pair.expected.gradients.emplace_back(name, share * (targets / own));
    return pair;
  };
}

DumpComparison compare_dumps(StepDump found, const StepDump& expected, const DumpNames& names,
                             const std::optional<StepDump>& alone) {
  ISOGRAD_INVARIANT(!found.gradients.empty() && !expected.gradients.empty(), "a dump without a gradient");
  DumpComparison result;
  if (const std::string prefix = common_prefix(found, expected); !prefix.empty()) {
    for (auto* tensors : {&found.gradients, &found.applied})
      for (auto& [name, tensor] : *tensors) name = name.substr(prefix.size());
    result.notices.push_back(
        fmt::format("all names of {} begin with \"{}\"; compared without it", names.found, prefix));
  }
  if (alone) {
    const bool fits = names_of(*alone) == names_of(expected) && type_of(expected.precision) == at::kDouble;
    if (!fits)
      throw ConfigError({.where = "--alone",
                         .found = type_of(expected.precision) == at::kDouble
                                      ? "other parameters than in " + names.expected
                                      : names.expected + " in " + expected.precision,
                         .expected = "one process in the precision of the run, beside one process in fp64",
                         .action = "Write both dumps with the same program"});
  }
  const Limits limits = limits_of(found, expected);

  std::vector<at::Tensor> wanted;
  for (const auto& [name, gradient] : expected.gradients) wanted.push_back(gradient.to(at::kDouble));
  const auto scales = error_scales(wanted);
  std::map<std::string, at::Tensor> own, by_one;
  for (const auto& [name, gradient] : found.gradients) own[name] = gradient.to(at::kDouble);
  if (alone)
    for (const auto& [name, gradient] : alone->gradients) by_one[name] = gradient.to(at::kDouble);

  LayoutVerdict layout;
  layout.name = names.found;
  layout.exact = layout.rounded = found.figures;
  bool names_agree = names_of(found) == names_of(expected);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const std::string& name = expected.gradients[i].first;
    const auto place = own.find(name);
    if (place == own.end() || place->second.sizes() != wanted[i].sizes()) {
      names_agree = false;
      continue;
    }
    ParameterVerdict parameter;
    parameter.name = name;
    parameter.elements = wanted[i].numel();
    parameter.norm = wanted[i].norm().item<double>();
    Bounds bounds = limits.bounds;
    bounds.exact = limits.error;
    parameter.exact = compare_exact(place->second, wanted[i], scales[i], bounds);
    parameter.rounded = parameter.exact;
    if (alone && !limits.exact && by_one.at(name).sizes() == wanted[i].sizes()) {
      parameter.alone_error = relative_error(by_one.at(name), wanted[i], scales[i]);
      parameter.rounded =
          compare_rounded(place->second, wanted[i], scales[i], parameter.alone_error, limits.bounds);
    }
    layout.parameters.push_back(std::move(parameter));
  }
  const std::string precision = limits.exact                              ? "fp64"
                                : type_of(found.precision) == at::kDouble ? expected.precision
                                                                          : found.precision;
  judge(layout, expected, limits, alone.has_value(), precision);

  const bool nothing = std::all_of(wanted.begin(), wanted.end(), [](const at::Tensor& gradient) {
    return gradient.eq(0).all().item<bool>();
  });
  Verdict& verdict = result.verdict;
  verdict.ranks = std::max(1, static_cast<int>(found.counts.size()));
  verdict.precision = precision;
  verdict.oracle = expected.figures;
  verdict.parameters_agree = names_agree;
  verdict.batch_agrees =
      (found.samples.empty() || expected.samples.empty() || found.samples == expected.samples) &&
      same_count(found.figures.targets, expected.figures.targets) &&
      same_count(found.figures.tokens, expected.figures.tokens);
  verdict.passed =
      layout.passed && names_agree && verdict.batch_agrees && !nothing && !layout.parameters.empty();
  layout.passed = verdict.passed;
  verdict.layouts.push_back(std::move(layout));

  result.findings = diagnose({found, expected}, again_from_shares(expected));
  const bool uneven_weights = std::any_of(result.findings.begin(), result.findings.end(),
                                          [](const Finding& finding) { return finding.id == "unknown"; });
  if (uneven_weights && expected.shares.empty())
    result.notices.push_back(
        names.expected +
        " holds no shares of ranks and micro-batches; with them wrong weights can be named "
        "(docs/verify.md)");
  for (const auto& finding : result.findings) verdict.diagnosis.push_back(finding.sentence);
  verdict.findings = result.findings;
  return result;
}

}  // namespace isograd
