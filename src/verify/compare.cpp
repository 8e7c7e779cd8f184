#include "verify/compare.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "verify/compared_step.hpp"
#include "verify/resolution.hpp"

namespace isograd {
namespace {

constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();

Comparison compare(const at::Tensor& gradient, const at::Tensor& reference, double scale, double allowed) {
  Comparison result;
  const PairSums sums = pair_sums(gradient, reference);
  const auto root = [](double squares, const at::Tensor& of) {
    return holds(squares) ? std::sqrt(squares) : norm_of(of);
  };
  const double own = root(sums.own, gradient), expected = root(sums.other, reference);
  // Normalizes both first where their squares would over- or underflow.
  const auto cosine = [&] {
    return holds(sums.own) && holds(sums.other)
               ? sums.product / (own * expected)
               : ((gradient / own) * (reference / expected)).sum().item<double>();
  };
  result.cosine = expected > 0 && own > 0 ? cosine() : kNothing;
  result.ratio = !(expected > 0) ? kNothing : own == 0 ? 0 : result.cosine * (own / expected);
  result.error = in_scales(holds(sums.apart) ? std::sqrt(sums.apart) : distance(gradient, reference), scale);
  result.residual =
      expected > 0 ? in_scales(distance(gradient, reference, result.ratio), scale) : result.error;
  result.allowed = allowed;
  result.passed = std::isfinite(result.error) && result.error <= result.allowed;
  result.scale_found = smallest_scale_error(gradient, reference, result.allowed * scale, sums);
  return result;
}

bool close(double value, double expected, double relative) {
  return std::abs(value - expected) <= relative * std::abs(expected);  // false for NaN
}

// Remembers the parameter that used most of its allowance. A NaN counts as the worst.
void note(Grade& grade, const ParameterVerdict& parameter, const Comparison& comparison) {
  const auto share = [](double error, double allowed) { return error > 0 ? error / allowed : 0.0; };
  const double share_now = share(comparison.error, comparison.allowed);
  if (grade.worst.empty() || std::isnan(comparison.error) ||
      (!std::isnan(grade.error) && share_now > share(grade.error, grade.allowed))) {
    grade.worst = parameter.name;
    grade.error = comparison.error;
    grade.allowed = comparison.allowed;
  }
  if (!comparison.passed) ++grade.failed;
}

}  // namespace

double in_scales(double difference, double scale) {
  if (!std::isfinite(scale)) return kNothing;         // nothing is small against it
  return difference == 0 ? 0.0 : difference / scale;  // a gradient that is zero everywhere has s = 0
}

double relative_error(const at::Tensor& gradient, const at::Tensor& reference, double scale) {
  return in_scales(distance(gradient, reference), scale);
}

Bounds bounds_for(at::ScalarType dtype, int ranks, std::int64_t micro_batches) {
  Bounds bounds;
  // bf16 parameters have fp32 gradients: that is the type of the sums.
  bounds.unit_roundoff = dtype == at::kDouble ? 0x1p-53 : 0x1p-24;
  bounds.unit = dtype == at::kBFloat16 ? 0x1p-9 : dtype == at::kHalf ? 0x1p-11 : bounds.unit_roundoff;
  bounds.figures = dtype == at::kBFloat16 || dtype == at::kHalf ? 1e-2 : 1e-4;
  bounds.sum_length =
      static_cast<double>(ranks) * static_cast<double>(std::max<std::int64_t>(1, micro_batches));
  return bounds;
}

std::vector<double> error_scales(const std::vector<at::Tensor>& reference, double floor) {
  std::vector<double> norms;
  for (const auto& gradient : reference) norms.push_back(norm_of(gradient));
  return error_scales(reference, norms, floor);
}

std::vector<double> error_scales(const std::vector<at::Tensor>& reference, const std::vector<double>& norms,
                                 double floor) {
  double elements = 0;
  for (const auto& gradient : reference) elements += static_cast<double>(gradient.numel());
  const double root_mean_square = elements > 0 ? norm_of(norms) / std::sqrt(elements) : 0;
  std::vector<double> scales;
  for (std::size_t i = 0; i < reference.size(); ++i)
    scales.push_back(
        std::max(norms[i], floor * root_mean_square * std::sqrt(static_cast<double>(reference[i].numel()))));
  return scales;
}

bool held_to_floor(double norm, double scale) {
  return norm < scale * (1 - 0x1p-40) || norm == 0;  // the norm may have been added up in another order
}

Comparison compare_exact(const at::Tensor& gradient, const at::Tensor& reference, double scale,
                         const Bounds& bounds) {
  return compare(gradient, reference, scale, bounds.exact);
}

Comparison compare_rounded(const at::Tensor& gradient, const at::Tensor& reference, double scale,
                           double alone_error, const Bounds& bounds) {
  return compare(gradient, reference, scale,
                 kRoundingFactor * alone_error + bounds.unit_roundoff * std::sqrt(bounds.sum_length));
}

double error_that_allows(double error, const Bounds& bounds) {
  return (error - bounds.unit_roundoff * std::sqrt(bounds.sum_length)) / 4;
}

bool unclipped_norms_agree(const StepFigures& figures, const StepFigures& oracle, const Bounds& bounds) {
  return std::isnan(oracle.unclipped_norm) ||
         close(figures.unclipped_norm, oracle.unclipped_norm, bounds.exact);
}

bool figures_agree(const StepFigures& figures, const StepFigures& oracle, const Bounds& bounds) {
  return figures.targets == oracle.targets && figures.tokens == oracle.tokens &&
         close(figures.loss, oracle.loss, bounds.exact) && close(figures.norm, oracle.norm, bounds.exact) &&
         close(figures.clip_coefficient, oracle.clip_coefficient, bounds.exact) &&
         unclipped_norms_agree(figures, oracle, bounds);
}

std::vector<OtherFigure> figures_off(const StepFigures& figures, const StepFigures& oracle,
                                     const StepFigures& alone, const Bounds& bounds) {
  std::vector<OtherFigure> off;
  const auto hold = [&](const char* name, double found, double expected, double one_process) {
    const double allowed =
        std::fmax(bounds.figures * std::abs(expected), kRoundingFactor * std::abs(one_process - expected));
    if (!std::isfinite(found) || !(std::abs(found - expected) <= allowed))
      off.push_back({.name = name, .found = found, .expected = expected, .allowed = allowed});
  };
  hold("loss", figures.loss, oracle.loss, alone.loss);
  hold("norm", figures.norm, oracle.norm, alone.norm);
  if (!std::isnan(oracle.unclipped_norm))
    hold("unclipped_norm", figures.unclipped_norm, oracle.unclipped_norm, alone.unclipped_norm);
  hold("clip_coefficient", figures.clip_coefficient, oracle.clip_coefficient, alone.clip_coefficient);
  const auto count = [&](const char* name, std::int64_t found, std::int64_t expected) {
    if (found != expected)
      off.push_back(
          {.name = name, .found = static_cast<double>(found), .expected = static_cast<double>(expected)});
  };
  count("targets", figures.targets, oracle.targets);
  count("tokens", figures.tokens, oracle.tokens);
  return off;
}

void note_resolution(Grade& grade, const std::vector<ParameterVerdict>& parameters, bool exact) {
  grade.uniform_found = std::numeric_limits<double>::infinity();
  for (const ParameterVerdict& parameter : parameters) {
    const Comparison& comparison = exact ? parameter.exact : parameter.rounded;
    if (parameter.by_floor) {
      grade.by_floor.push_back(parameter.name);
      if (parameter.norm > 0 && comparison.scale_found >= 1) grade.unseen.push_back(parameter.name);
      continue;
    }
    grade.uniform_found = std::min(grade.uniform_found, comparison.scale_found);
    if (comparison.scale_found > grade.single_found || grade.single_least.empty()) {
      grade.single_found = comparison.scale_found;
      grade.single_least = parameter.name;
    }
  }
  if (grade.scale.tested) grade.uniform_found = std::min(grade.uniform_found, grade.scale.found_from);
}

std::optional<Finding> diagnose_resolution(const std::vector<ParameterVerdict>& parameters,
                                           const Grade& grade, bool exact, const std::string& action,
                                           double limit) {
  const bool none = !(grade.uniform_found <= limit);
  std::vector<std::string> names, evidence;
  for (const ParameterVerdict& parameter : parameters) {
    const Comparison& comparison = exact ? parameter.exact : parameter.rounded;
    const double shows = parameter.by_floor ? comparison.allowed : comparison.scale_found;
    if (!none && shows <= limit) continue;
    names.push_back(parameter.name);
    constexpr std::size_t kMost = 5;
    if (evidence.size() < kMost)
      evidence.push_back(fmt::format(
          "{}: {} from {:.2g} % on", parameter.name,
          parameter.by_floor ? "of the floor that it is held to, for want of a gradient, an error shows"
                             : "an error of scale shows",
          100 * shows));
  }
  if (names.empty()) return std::nullopt;
  return Finding{
      finding_id::unresolved,
      fmt::format("nothing is found to be wrong, but an error of scale of {:.0f} % would not show in {} "
                  "of {} parameters: {}. {}",
                  100 * limit, names.size(), parameters.size(), list_names(names), action),
      std::move(evidence)};
}

void grade(LayoutVerdict& layout, const StepFigures& oracle, const std::string& precision, bool exact_run,
           const Bounds& bounds, const WholeScale& scale) {
  layout.e1 = layout.e2 = layout.e3 = {};
  layout.e1.bound = fmt::format(
      "fp64: |g - g64| <= {:g} s for each parameter; counts equal, loss, norm and clip "
      "coefficient to {:g} relative",
      bounds.exact, bounds.exact);
  layout.e2.bound = fmt::format(
      "{}: |g - g64| <= 4 |g1 - g64| + {:.3g} s, g1 one process in {}, u sqrt(W G) = {:.3g}; where fp64 is "
      "right and one g1 does not do, the worst of up to {}, each from parameters an ulp away; scale of the "
      "whole gradient within 4 (u + its standard error + one process's own), u = {:.2g}; counts equal, loss, "
      "norm and clip coefficient to {:g} of themselves or 4 times what one process is off by",
      precision, bounds.unit_roundoff * std::sqrt(bounds.sum_length), precision,
      bounds.unit_roundoff * std::sqrt(bounds.sum_length), kMostDraws, bounds.unit, bounds.figures);
  layout.e3.bound = "the same bits when the step is made again, and on every rank";
  for (const auto& parameter : layout.parameters) {
    note(layout.e1, parameter, parameter.exact);
    if (!exact_run) note(layout.e2, parameter, parameter.rounded);
    if (!parameter.repeats || !parameter.replicas_agree) {
      if (layout.e3.worst.empty()) layout.e3.worst = parameter.name;
      ++layout.e3.failed;
    }
  }
  layout.e2.scale = scale;
  note_resolution(layout.e1, layout.parameters, true);
  if (!exact_run) note_resolution(layout.e2, layout.parameters, false);
  layout.figures_agree = figures_agree(layout.exact, oracle, bounds);
  const auto state = [](bool passed) { return passed ? Grade::State::kPassed : Grade::State::kFailed; };
  layout.e1.state = state(layout.e1.failed == 0 && layout.figures_agree);
  // A run in fp64 has nothing to say within rounding that E1 does not say more sharply.
  layout.e2.state = exact_run ? Grade::State::kNotClaimed
                              : state(layout.e2.failed == 0 && scale.passed && layout.rounded_off.empty());
  layout.e3.state = state(layout.e3.failed == 0);
  layout.passed = layout.e1.state == Grade::State::kPassed && layout.e2.state != Grade::State::kFailed &&
                  layout.e3.state == Grade::State::kPassed;
}

std::string precision_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return "fp64";
    case at::kFloat:
      return "fp32";
    case at::kBFloat16:
      return "bf16";
    default:
      return c10::toString(dtype);
  }
}

}  // namespace isograd
