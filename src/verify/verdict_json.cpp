// A verdict as JSON.
#include <cmath>
#include <nlohmann/json.hpp>

#include "verify/present.hpp"

namespace isograd {
namespace {

using json = nlohmann::ordered_json;

// JSON has no NaN and no infinity: a number that is not finite is written as null.
json number_or_null(double value) {
  return std::isfinite(value) ? json(value) : json(nullptr);
}

json to_json(const Grade& grade) {
  json object = {{"state", state_name(grade.state)}, {"bound", grade.bound}};
  if (grade.state == Grade::State::kNotClaimed) return object;
  object["failed"] = grade.failed;
  if (!grade.worst.empty()) object["worst"] = grade.worst;
  if (grade.allowed > 0) {
    object["error"] = number_or_null(grade.error);
    object["allowed"] = grade.allowed;
  }
  if (grade.scale.tested)
    object["scale"] = {{"error", number_or_null(grade.scale.error)},
                       {"allowed", number_or_null(grade.scale.allowed)},
                       {"passed", grade.scale.passed}};
  object["finds"] = {{"uniform_scale", number_or_null(grade.uniform_found)},
                     {"single_scale", number_or_null(grade.single_found)},
                     {"least_in", grade.single_least}};
  object["held_to_floor"] = grade.by_floor;
  object["unseen"] = grade.unseen;
  return object;
}

json to_json(const StepFigures& figures) {
  const auto count = [](std::int64_t value) { return value == kNotRecorded ? json(nullptr) : json(value); };
  json object = {{"loss", number_or_null(figures.loss)},
                 {"targets", count(figures.targets)},
                 {"tokens", count(figures.tokens)},
                 {"norm", number_or_null(figures.norm)},
                 {"clip_coefficient", number_or_null(figures.clip_coefficient)}};
  if (!std::isnan(figures.unclipped_norm)) object["unclipped_norm"] = figures.unclipped_norm;
  return object;
}

json to_json(const ParameterVerdict& parameter, const LayoutVerdict& layout) {
  const Comparison& comparison = shown(parameter, layout);
  return {{"name", parameter.name},
          {"ratio", number_or_null(comparison.ratio)},
          {"cosine", number_or_null(comparison.cosine)},
          {"error", number_or_null(comparison.error)},
          {"allowed", comparison.allowed},
          {"passed", good(parameter, layout)},
          {"elements", parameter.elements},
          {"norm", number_or_null(parameter.norm)},
          {"run_precision",
           {{"ratio", number_or_null(parameter.rounded.ratio)},
            {"cosine", number_or_null(parameter.rounded.cosine)},
            {"error", number_or_null(parameter.rounded.error)},
            {"allowed", number_or_null(parameter.rounded.allowed)},
            {"one_process_error", number_or_null(parameter.alone_error)}}},
          {"scale_found", number_or_null(comparison.scale_found)},
          {"held_to_floor", parameter.by_floor},
          {"same_bits", parameter.repeats},
          {"replicas_agree", parameter.replicas_agree},
          {"owners", {parameter.owners_least, parameter.owners_most}},
          {"checksum", fmt::format("{:016x}", parameter.checksum)}};
}

json to_json(const MeshesTried& meshes) {
  json tried = json::array();
  for (const auto& mesh : meshes.tried) {
    json axes = json::object();
    for (const Axis& axis : mesh.axes) axes[axis.name] = axis.size;
    tried.push_back({{"mesh", mesh.name},
                     {"axes", axes},
                     {"proved", mesh.failed == 0},
                     {"layouts", mesh.layouts},
                     {"failed", mesh.failed},
                     {"finding", mesh.finding}});
  }
  return {{"admissible", meshes.admissible},
          {"tried", tried},
          {"not_run", meshes.left},
          {"not_admissible", meshes.refused},
          {"guilty", meshes.guilty}};
}

}  // namespace

std::string to_json(const Verdict& verdict, const Wording& wording) {
  json grades = json::object(), parameters = json::array(), steps = json::object();
  for (const auto& layout : verdict.layouts) {
    json entry = {{"E1", to_json(layout.e1)},
                  {"E2", to_json(layout.e2)},
                  {"E3", to_json(layout.e3)},
                  {"figures_agree", layout.figures_agree}};
    entry["passed"] = layout.passed;
    for (const auto& trajectory : layout.trajectories)
      entry["trajectories"].push_back({{"optimizer", trajectory.optimizer},
                                       {"updates", trajectory.updates},
                                       {"worst", trajectory.worst},
                                       {"error", number_or_null(trajectory.error)},
                                       {"allowed", number_or_null(trajectory.allowed)},
                                       {"passed", trajectory.passed}});
    if (layout.bytes_moved > 0) entry["bytes_moved"] = layout.bytes_moved;
    if (layout.bytes_needed > 0) entry["bytes_needed"] = layout.bytes_needed;
    if (layout.choices.tokens > 0)
      entry["choices_of_experts"] = {{"made", layout.choices.tokens},
                                     {"flipped", layout.choices.flipped},
                                     {"wrong", layout.choices.wrong},
                                     {"margin", number_or_null(layout.choices.margin)}};
    if (verdict.layouts.size() == 1)
      grades = entry;
    else
      grades[layout.name] = entry;
    for (const auto* parameter : worst_first(layout)) {
      json row = to_json(*parameter, layout);
      row["layout"] = layout.name;
      parameters.push_back(std::move(row));
    }
    steps[layout.name] = {{"fp64", to_json(layout.exact)}, {verdict.precision, to_json(layout.rounded)}};
  }
  steps["oracle"] = to_json(verdict.oracle);
  json diagnosis = json::array(), findings = json::array();
  for (const auto& finding : wording.findings) {
    diagnosis.push_back(finding.sentence);
    findings.push_back({{"id", finding.id}, {"sentence", finding.sentence}, {"evidence", finding.evidence}});
  }
  json document = {{"verdict", verdict.passed ? "pass" : "fail"},
                   {"grades", grades},
                   {"parameters", parameters},
                   {"diagnosis", diagnosis},
                   {"findings", findings},
                   {"notices", wording.notices},
                   {"command", wording.command},
                   {"ranks", verdict.ranks},
                   {"loss", verdict.loss},
                   {"precision", verdict.precision},
                   {"step", steps},
                   {"parameters_agree", verdict.parameters_agree},
                   {"batch_agrees", verdict.batch_agrees},
                   {"samples", verdict.samples},
                   {"documents_apart", verdict.documents_apart},
                   {"seconds", verdict.seconds}};
  if (!verdict.meshes.tried.empty()) document["meshes"] = to_json(verdict.meshes);
  return document.dump(2, ' ', false, json::error_handler_t::replace);
}

}  // namespace isograd
