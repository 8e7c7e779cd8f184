#include "verify/plain_findings.hpp"

#include <algorithm>

#include "verify/compared_step.hpp"
#include "verify/present.hpp"

namespace isograd {

namespace {

// What other updates say of a wrong one: an optimizer without state and one with it.
std::vector<std::string> passed_paths(const LayoutVerdict& layout) {
  std::vector<std::string> lines;
  for (const auto& trajectory : layout.trajectories)
    lines.push_back(fmt::format("{}: {}", updates_of(trajectory), trajectory.passed ? "right" : "wrong"));
  return lines;
}

std::string text_of(const OtherFigure& other) {
  return fmt::format("{} {:.9g}, expected {:.9g} ({:.2g} allowed)", other.name, other.found, other.expected,
                     other.allowed);
}

// What of loss, norm and counts is off in the run's precision alone. A wrong norm makes a wrong coefficient:
// said once.
void add_other_figures(LayoutVerdict& layout, const std::string& precision) {
  const auto has = [&](const std::string& id) {
    return std::any_of(layout.findings.begin(), layout.findings.end(), [&](auto& f) { return f.id == id; });
  };
  for (const OtherFigure& other : layout.rounded_off) {
    const std::string id = other.name == "loss"               ? "loss_differs"
                           : other.name.ends_with("norm")     ? "norm_differs"
                           : other.name == "clip_coefficient" ? "clip_differs"
                                                              : "other_targets";
    if (has(id) || (id == "clip_differs" && has("norm_differs"))) continue;
    layout.findings.push_back(
        {id,
         fmt::format("right in fp64, but in {} another one is reported: {}", precision, text_of(other)),
         {}});
  }
}

}  // namespace

bool is_whole(const LayoutVerdict& layout) {
  for (const auto& parameter : layout.parameters)
    if (parameter.owners_least != 1 || parameter.owners_most != 1) return false;
  for (const auto& trajectory : layout.trajectories)
    if (!trajectory.passed) return false;
  return layout.passed && !layout.parameters.empty();
}

void add_plain_findings(LayoutVerdict& layout, const std::string& precision, bool living) {
  const auto has = [&](const char* id) {
    return std::any_of(layout.findings.begin(), layout.findings.end(), [&](auto& f) { return f.id == id; });
  };
  std::vector<std::string> rounding, replicas, repeats;
  for (const auto& parameter : layout.parameters) {
    if (parameter.exact.passed && layout.e2.state == Grade::State::kFailed && !parameter.rounded.passed)
      rounding.push_back(parameter.name);
    if (!parameter.replicas_agree) replicas.push_back(parameter.name);
    if (!parameter.repeats) repeats.push_back(parameter.name);
  }
  if (!repeats.empty() && !has("not_repeatable"))
    layout.findings.insert(layout.findings.begin(),
                           {"not_repeatable",
                            "the same step made twice gives different bits: " + list_names(repeats),
                            {"in " + precision}});
  if (has("not_repeatable")) return;
  if (!replicas.empty() && layout.findings.empty())
    layout.findings.push_back({"replicas_differ",
                               "the ranks hold different gradients: " + list_names(replicas),
                               {"in " + precision}});
  const bool right_in_fp64 = layout.e1.state == Grade::State::kPassed;
  const bool off = !rounding.empty() || !layout.e2.scale.passed;
  if (living && right_in_fp64 && !off && !layout.rounded_off.empty()) {
    std::vector<std::string> others;
    for (const OtherFigure& other : layout.rounded_off) others.push_back(text_of(other));
    layout.findings.insert(
        layout.findings.begin(),
        {"living_layout_differs",
         "the gradient is right, but the run's own step reports other figures than a fresh "
         "layout: " +
             list_names(others),
         {}});
    return;
  }
  if (living && right_in_fp64 && off) {
    layout.findings.insert(
        layout.findings.begin(),
        {"living_layout_differs",
         fmt::format(
             "a fresh layout has the right gradient, the run's own does not: {}; something went wrong "
             "in it since the start",
             rounding.empty() ? "its scale" : list_names(rounding)),
         {}});
    return;
  }
  if (!rounding.empty())
    layout.findings.push_back(
        {"rounding",
         "right in fp64, outside the rounding bound in the run's precision: " + list_names(rounding),
         {}});
  const WholeScale& scale = layout.e2.scale;
  if (rounding.empty() && !scale.passed && right_in_fp64)
    layout.findings.push_back(
        {"rounding",
         fmt::format("right in fp64, but the scale of the whole gradient is off by {:.3g} in {}, {:.3g} "
                     "allowed: rounding takes it in all parameters alike",
                     scale.error, precision, scale.allowed),
         {}});
  if (right_in_fp64 && !off) add_other_figures(layout, precision);
  for (const auto& trajectory : layout.trajectories)
    if (!trajectory.passed && layout.findings.empty())
      layout.findings.push_back(
          {"optimizer_differs",
           fmt::format(
               "the gradient is right, parameters after {} are not: {} is off by {:.3g} of its way, {:.3g} "
               "allowed",
               updates_of(trajectory), trajectory.worst, trajectory.error, trajectory.allowed),
           passed_paths(layout)});
}

}  // namespace isograd
