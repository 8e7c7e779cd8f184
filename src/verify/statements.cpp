#include "verify/statements.hpp"

#include <algorithm>
#include <cmath>

#include "verify/diagnosis.hpp"

namespace isograd {
namespace {

// In fp64 a pure scale error gives its ratio to about 1e-10; this is far above that and far below what tells
// two wrong denominators apart.
constexpr double kSameRatio = 1e-6;

bool same(double a, double b) {
  return std::abs(a - b) <= kSameRatio * std::abs(b);
}

// g = ρ · g64 within the bound that E1 would have given it, with ρ ≠ 1.
bool is_scaled(const ParameterVerdict& parameter) {
  const Comparison& exact = parameter.exact;
  return !exact.passed && !same(exact.ratio, 1) &&
         exact.residual <= exact.allowed * std::fmax(1, std::abs(exact.ratio));
}

std::string names_of(const std::vector<const ParameterVerdict*>& parameters) {
  constexpr std::size_t kShown = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(kShown, parameters.size()); ++i)
    text += (i ? ", " : "") + parameters[i]->name;
  if (parameters.size() > kShown) text += fmt::format(" and {} more", parameters.size() - kShown);
  return text;
}

std::string with_ranks(double ratio, int ranks) {
  const std::string text = ratio_text(ratio);
  if (ranks > 1 && (same(ratio, ranks) || same(ratio * ranks, 1)))
    return fmt::format("{} (the layout has {} ranks)", text, ranks);
  return text;
}

// Parameters outside E1, grouped by the one ratio that explains them; the rest has another direction.
void diagnose_ratios(const LayoutVerdict& layout, int ranks, std::vector<std::string>& statements) {
  std::vector<std::pair<double, std::vector<const ParameterVerdict*>>> groups;
  std::vector<const ParameterVerdict*> turned, broken;
  std::size_t failed = 0, meaningful = 0;
  for (const auto& parameter : layout.parameters) {
    if (parameter.norm > 0) ++meaningful;
    if (parameter.exact.passed) continue;
    ++failed;
    if (!std::isfinite(parameter.exact.error)) {
      broken.push_back(&parameter);
    } else if (!is_scaled(parameter)) {
      turned.push_back(&parameter);
    } else {
      const double ratio = parameter.exact.ratio;
      auto group = std::find_if(groups.begin(), groups.end(), [&](auto& g) { return same(ratio, g.first); });
      if (group == groups.end()) group = groups.insert(groups.end(), {ratio, {}});
      group->second.push_back(&parameter);
    }
  }
  if (!broken.empty())
    statements.push_back(fmt::format("not finite: {} parameters ({})", broken.size(), names_of(broken)));
  for (const auto& [ratio, members] : groups) {
    if (members.size() == meaningful)
      statements.push_back(fmt::format("all parameters scaled by {}", with_ranks(ratio, ranks)));
    else
      statements.push_back(fmt::format("{} of {} parameters scaled by {}: {}", members.size(),
                                       layout.parameters.size(), with_ranks(ratio, ranks),
                                       names_of(members)));
  }
  if (turned.empty()) return;
  const auto by_error = [](const auto* a, const auto* b) { return a->exact.error > b->exact.error; };
  std::sort(turned.begin(), turned.end(), by_error);
  double low = turned[0]->exact.ratio, high = low, cosine = turned[0]->exact.cosine;
  for (const auto* parameter : turned) {
    low = std::fmin(low, parameter->exact.ratio);
    high = std::fmax(high, parameter->exact.ratio);
    cosine = std::fmin(cosine, parameter->exact.cosine);
  }
  statements.push_back(
      fmt::format("unknown pattern: the direction of {} of {} parameters differs; ratios {:.6g} to {:.6g}, "
                  "cosine from {:.6g}, "
                  "largest error {:.3g} of {:.3g} allowed: {}",
                  turned.size(), layout.parameters.size(), low, high, cosine, turned[0]->exact.error,
                  turned[0]->exact.allowed, names_of(turned)));
}

}  // namespace

std::vector<std::string> diagnose(const LayoutVerdict& layout, const StepFigures& oracle, int ranks) {
  std::vector<std::string> statements;
  if (layout.passed) return statements;
  diagnose_ratios(layout, ranks, statements);
  const StepFigures& step = layout.exact;
  if (step.targets != oracle.targets || step.tokens != oracle.tokens)
    statements.push_back(fmt::format("counts differ: {} targets of {} tokens, expected {} of {}",
                                     step.targets, step.tokens, oracle.targets, oracle.tokens));
  const auto figure = [&](const char* name, double found, double expected) {
    if (!(std::abs(found - expected) <= 1e-10 * std::abs(expected)))
      statements.push_back(fmt::format("{} {:.9g}, expected {:.9g}{}", name, found, expected,
                                       expected != 0 && std::isfinite(found)
                                           ? fmt::format(" (ratio {})", ratio_text(found / expected))
                                           : ""));
  };
  figure("loss", step.loss, oracle.loss);
  figure("norm", step.norm, oracle.norm);
  figure("clip coefficient", step.clip_coefficient, oracle.clip_coefficient);

  std::vector<const ParameterVerdict*> rounding, replicas, repeats;
  for (const auto& parameter : layout.parameters) {
    if (parameter.exact.passed && layout.e2.state == Grade::State::kFailed && !parameter.rounded.passed)
      rounding.push_back(&parameter);
    if (!parameter.replicas_agree) replicas.push_back(&parameter);
    if (!parameter.repeats) repeats.push_back(&parameter);
  }
  if (!rounding.empty())
    statements.push_back(fmt::format("right in fp64, outside the rounding bound in the run's precision: {}",
                                     names_of(rounding)));
  if (!replicas.empty())
    statements.push_back(fmt::format("the ranks hold different gradients: {}", names_of(replicas)));
  if (!repeats.empty())
    statements.push_back(fmt::format("the same step made twice gives different bits: {}", names_of(repeats)));
  return statements;
}

}  // namespace isograd
