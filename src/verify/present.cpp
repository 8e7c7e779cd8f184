#include "verify/present.hpp"

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/print.hpp"
#include "base/shell.hpp"
#include "report/report.hpp"

namespace isograd {
namespace {

// How much of its allowance a parameter used; a number that is not finite comes first.
double share(const Comparison& comparison) {
  if (std::isnan(comparison.error)) return HUGE_VAL;
  return comparison.error > 0 ? comparison.error / comparison.allowed : 0;
}

bool claimed(const Grade& grade) { return grade.state != Grade::State::kNotClaimed; }

// The comparison that the shown table claims of one parameter: E1's where E1 is claimed, else E2's.
const Comparison& shown(const ParameterVerdict& parameter, const LayoutVerdict& layout) {
  return claimed(layout.e1) ? parameter.exact : parameter.rounded;
}

bool good(const ParameterVerdict& parameter, const LayoutVerdict& layout) {
  return (!claimed(layout.e1) || parameter.exact.passed) &&
         (!claimed(layout.e2) || parameter.rounded.passed) && parameter.repeats && parameter.replicas_agree &&
         parameter.owners_least == 1 && parameter.owners_most == 1;
}

// The least first: what failed, then what uses most of its bounds.
auto badness(const ParameterVerdict& parameter, const LayoutVerdict& layout) {
  return std::make_tuple(good(parameter, layout), claimed(layout.e1) ? -share(parameter.exact) : 0.0,
                         claimed(layout.e2) ? -share(parameter.rounded) : 0.0);
}

std::vector<const ParameterVerdict*> worst_first(const LayoutVerdict& layout) {
  std::vector<const ParameterVerdict*> order;
  for (const auto& parameter : layout.parameters) order.push_back(&parameter);
  std::stable_sort(order.begin(), order.end(),
                   [&](auto* a, auto* b) { return badness(*a, layout) < badness(*b, layout); });
  return order;
}

std::string scientific(double value) {
  if (std::isnan(value)) return "nan";
  return value == 0 ? "0" : fmt::format("{:.1e}", value);
}

std::string ratio_cell(double ratio) { return std::isnan(ratio) ? "-" : fmt::format("{:.9g}", ratio); }

std::vector<std::string> cells(const ParameterVerdict& parameter, const LayoutVerdict& layout) {
  const Comparison& comparison = shown(parameter, layout);
  std::vector<std::string> row = {
      parameter.name, std::to_string(parameter.elements), ratio_cell(comparison.ratio),
      std::isnan(comparison.cosine) ? "-" : fmt::format("{:.9g}", comparison.cosine)};
  for (const auto& [grade, one] : {std::pair{&layout.e1, &parameter.exact}, {&layout.e2, &parameter.rounded}})
    if (claimed(*grade)) {
      row.push_back(scientific(one->error));
      row.push_back(scientific(one->allowed));
    }
  if (claimed(layout.e3))
    row.push_back(!parameter.replicas_agree ? "ranks differ" : parameter.repeats ? "yes" : "no");
  row.push_back(good(parameter, layout) ? "pass" : "FAIL");
  return row;
}

std::vector<std::string> columns(const Verdict& verdict, const LayoutVerdict& layout) {
  std::vector<std::string> names = {"parameter", "elements", "ratio", "cosine"};
  for (const auto& [grade, precision] :
       {std::pair{&layout.e1, std::string("fp64")}, {&layout.e2, verdict.precision}})
    if (claimed(*grade)) {
      names.push_back("error " + precision);
      names.push_back("allowed");
    }
  if (claimed(layout.e3)) names.push_back("same bits");
  names.push_back("verdict");
  return names;
}

std::string aligned(std::vector<std::vector<std::string>> rows) {
  return text_table(std::move(rows), {.indent = 2});
}

// Figures that were not recorded are left out.
std::string figures_row(const std::string& name, std::size_t width, const StepFigures& figures) {
  std::string text = fmt::format("  {:<{}}", printable(name), width);
  const auto number = [&](const char* what, double value) {
    if (!std::isnan(value)) text += fmt::format("  {} {:.12g}", what, value);
  };
  const auto count = [&](const char* what, std::int64_t value) {
    if (value != kNotRecorded) text += fmt::format("  {} {}", what, value);
  };
  number("loss", figures.loss);
  count("targets", figures.targets);
  count("tokens", figures.tokens);
  number("norm", figures.norm);
  number("before the clip", figures.unclipped_norm);
  number("clip", figures.clip_coefficient);
  return text + "\n";
}

std::string percent(double error) {
  return error >= 1e-3 ? fmt::format("{:.2g} %", 100 * error) : scientific(error);
}

// Where several layouts were tried: the one that used most of its allowance.
const LayoutVerdict* worst_layout(const Verdict& verdict) {
  const LayoutVerdict* worst = nullptr;
  const auto used = [](const LayoutVerdict& layout) {
    return layout.e1.allowed > 0 ? layout.e1.error / layout.e1.allowed : HUGE_VAL;
  };
  for (const auto& layout : verdict.layouts)
    if (!worst || (!layout.passed && worst->passed) ||
        (layout.passed == worst->passed && used(layout) > used(*worst)))
      worst = &layout;
  return worst;
}

using json = nlohmann::ordered_json;

// JSON has no NaN and no infinity: the library writes them as null.
json to_json(const Grade& grade) {
  json object = {{"state", state_name(grade.state)}, {"bound", grade.bound}};
  if (grade.state == Grade::State::kNotClaimed) return object;
  object["failed"] = grade.failed;
  if (!grade.worst.empty()) object["worst"] = grade.worst;
  if (grade.allowed > 0) {
    object["error"] = grade.error;
    object["allowed"] = grade.allowed;
  }
  if (grade.scale.tested)
    object["scale"] = {
        {"error", grade.scale.error}, {"allowed", grade.scale.allowed}, {"passed", grade.scale.passed}};
  object["finds"] = {{"uniform_scale", grade.uniform_found},
                     {"single_scale", grade.single_found},
                     {"least_in", grade.single_least}};
  object["held_to_floor"] = grade.by_floor;
  object["unseen"] = grade.unseen;
  return object;
}

json to_json(const StepFigures& figures) {
  const auto count = [](std::int64_t value) { return value == kNotRecorded ? json(nullptr) : json(value); };
  json object = {{"loss", figures.loss},
                 {"targets", count(figures.targets)},
                 {"tokens", count(figures.tokens)},
                 {"norm", figures.norm},
                 {"clip_coefficient", figures.clip_coefficient}};
  if (!std::isnan(figures.unclipped_norm)) object["unclipped_norm"] = figures.unclipped_norm;
  return object;
}

json to_json(const ParameterVerdict& parameter, const LayoutVerdict& layout) {
  const Comparison& comparison = shown(parameter, layout);
  return {{"name", parameter.name},
          {"ratio", comparison.ratio},
          {"cosine", comparison.cosine},
          {"error", comparison.error},
          {"allowed", comparison.allowed},
          {"passed", good(parameter, layout)},
          {"elements", parameter.elements},
          {"norm", parameter.norm},
          {"run_precision",
           {{"ratio", parameter.rounded.ratio},
            {"cosine", parameter.rounded.cosine},
            {"error", parameter.rounded.error},
            {"allowed", parameter.rounded.allowed},
            {"one_process_error", parameter.alone_error}}},
          {"scale_found", comparison.scale_found},
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

std::string words(const Trajectory& trajectory) {
  return fmt::format("parameters after {}: error {} of {} allowed{}", updates_of(trajectory),
                     scientific(trajectory.error), scientific(trajectory.allowed),
                     trajectory.worst.empty() ? "" : ", worst " + trajectory.worst);
}

std::vector<std::string> resolution_of(const Grade& grade) {
  std::vector<std::string> lines;
  if (!claimed(grade)) return lines;
  if (grade.scale.tested)
    lines.push_back(fmt::format("scale of the whole gradient: off by {}, {} allowed{}",
                                scientific(grade.scale.error), scientific(grade.scale.allowed),
                                grade.scale.passed ? "" : " (FAIL)"));
  if (grade.failed == 0 && grade.scale.passed && !grade.single_least.empty())
    lines.push_back(fmt::format(
        "finds an error of scale from {} in all parameters, from {} in a single one (least in {})",
        percent(grade.uniform_found), percent(grade.single_found), grade.single_least));
  if (!grade.by_floor.empty()) {
    std::string line = fmt::format(
        "{} of the parameters have next to no gradient and are held to a floor instead of their own norm: {}",
        grade.by_floor.size(), list_names(grade.by_floor));
    if (!grade.unseen.empty())
      line += fmt::format("; of {} even a lost gradient or another sign would not show: {}",
                          grade.unseen.size(), list_names(grade.unseen));
    lines.push_back(std::move(line));
  }
  return lines;
}

std::string traffic(const LayoutVerdict& layout) {
  std::string text = fmt::format("{:.0f} bytes sent by rank 0 in the step", layout.bytes_moved);
  if (layout.bytes_needed > 0) text += fmt::format(", its formula says {:.0f}", layout.bytes_needed);
  return text;
}

std::string choices(const LayoutVerdict& layout) {
  const auto& [tokens, flipped, wrong, layer, margin] = layout.choices;
  std::string text = fmt::format("{} of {} choices of experts are near ties that rounding turned: replayed",
                                 flipped - wrong, tokens);
  if (flipped > wrong) text += fmt::format(", with {} of the margin allowed", percent(margin));
  if (wrong > 0) text += fmt::format("; {} are others than the oracle's (FAIL)", wrong);
  return text;
}

ReportTable meshes_table(const Verdict& verdict) {
  const MeshesTried& meshes = verdict.meshes;
  ReportTable table;
  if (meshes.tried.empty()) return table;
  std::int64_t failed = 0;
  for (const auto& mesh : meshes.tried) {
    failed += mesh.failed > 0;
    table.rows.push_back(
        {mesh.name, mesh.failed == 0 ? "yes" : "NO", mesh.finding.empty() ? "-" : mesh.finding});
  }
  for (const std::string& name : meshes.left)
    table.rows.push_back({name, "not run", "its axes and pairs of axes are those of others"});
  for (const std::string& why : meshes.refused) table.rows.push_back({"others", "not possible", why});
  table.title = fmt::format("Meshes of {} ranks, for this model and batch", verdict.ranks);
  table.columns = {"mesh", "proved", "why"};
  table.summary =
      fmt::format("{} of {} that are possible were run, {} of these are proved{}", meshes.tried.size(),
                  meshes.admissible, static_cast<std::int64_t>(meshes.tried.size()) - failed,
                  meshes.left.empty() ? std::string() : fmt::format("; {} are left out", meshes.left.size()));
  table.passed = failed == 0;
  return table;
}

// A dot for each parameter and layout, in the order of the parameters; of many parameters the worst.
template <class Of, class Value>
Chart dots(const Verdict& verdict, std::string title, std::string y_label, bool log_y, Of&& of,
           Value&& value) {
  constexpr std::size_t kMost = 300;
  std::vector<std::string> names;
  std::map<std::string, double> worst;  // by name: a layout that failed early may have none, or others
  for (const auto& layout : verdict.layouts)
    for (const auto& parameter : layout.parameters) {
      const auto [place, fresh] = worst.try_emplace(parameter.name, 0);
      if (fresh) names.push_back(parameter.name);
      const double error = of(parameter, layout).error;
      place->second = std::isnan(error) ? HUGE_VAL : std::max(place->second, error);
    }
  std::vector<std::string> shown = names;
  std::ranges::stable_sort(shown, std::greater(), [&](const std::string& name) { return worst[name]; });
  if (shown.size() > kMost) y_label += fmt::format(", the {} worst of {} parameters", kMost, shown.size());
  shown.resize(std::min(shown.size(), kMost));
  std::erase_if(names, [&](const auto& name) { return std::ranges::count(shown, name) == 0; });
  Chart chart{.title = std::move(title),
              .x_label = "parameter, by its place in the model",
              .y_label = std::move(y_label),
              .series = {{.name = "within the bound", .points = {}}, {.name = "outside", .points = {}}},
              .lines = false,
              .log_y = log_y};
  for (std::size_t i = 0; i < names.size(); ++i)
    for (const auto& layout : verdict.layouts)
      for (const auto& parameter : layout.parameters) {
        if (parameter.name != names[i]) continue;
        const Comparison& comparison = of(parameter, layout);
        chart.series[comparison.passed ? 0 : 1].points.push_back(
            {static_cast<double>(i + 1), value(comparison),
             fmt::format("{}, {}: error {} of {} allowed, ratio {:.9g}", parameter.name, layout.name,
                         scientific(comparison.error), scientific(comparison.allowed), comparison.ratio)});
      }
  return chart;
}

Chart error_chart(const Verdict& verdict, std::string title, bool exact) {
  static constexpr double kLeast = 1e-17;  // below the unit round-off of fp64; an error of 0 is drawn there
  return dots(
      verdict, std::move(title), "over the gradient's length", true,
      [&](const ParameterVerdict& p, const LayoutVerdict&) -> const Comparison& {
        return exact ? p.exact : p.rounded;
      },
      [](const Comparison& comparison) {
        return std::isnan(comparison.error) ? NAN : std::max(comparison.error, kLeast);
      });
}

Chart ratio_chart(const Verdict& verdict) {
  double furthest = 0;
  for (const auto& layout : verdict.layouts)
    for (const auto& parameter : layout.parameters)
      furthest = std::fmax(furthest, std::abs(shown(parameter, layout).ratio - 1));
  // Ratios that are all but equal to 1 are drawn by how far they are from it.
  const bool near = furthest < 1e-3;
  Chart chart = dots(verdict, "Ratios", near ? "distance from 1" : "to the gradient of one device", near,
                     shown, [&](const Comparison& comparison) {
                       return near ? std::fmax(std::abs(comparison.ratio - 1), 1e-17) : comparison.ratio;
                     });
  if (!near) chart.marks = {{"the same gradient", 1}};
  return chart;
}

std::string recorded(double value) {
  return std::isnan(value) ? "not recorded" : fmt::format("{:.9g}", value);
}
std::string count(std::int64_t value) {
  return value == kNotRecorded ? "not recorded" : std::to_string(value);
}

bool any_claims(const Verdict& verdict, Grade LayoutVerdict::*grade) {
  for (const auto& layout : verdict.layouts)
    if ((layout.*grade).state != Grade::State::kNotClaimed) return true;
  return false;
}

// The answer to the title, for somebody who reads nothing else.
std::string answer(const Verdict& verdict, const Wording& wording) {
  if (verdict.layouts.empty() || verdict.layouts[0].parameters.empty())
    return "No answer: nothing could be compared.";
  std::int64_t all = 0, outside = 0, layouts = 0;
  for (const auto& layout : verdict.layouts) {
    layouts += !layout.passed;
    for (const auto& parameter : layout.parameters) {
      ++all;
      outside += !good(parameter, layout);
    }
  }
  if (verdict.passed)
    return fmt::format("Yes. All {} gradients compared are those of {}, as far as rounding allows.", all,
                       wording.right);
  std::string text =
      outside == 0 ? std::string("No: the gradients agree, but something else does not.")
                   : fmt::format("No. {} of {} gradients are not those of {}.", outside, all, wording.right);
  if (verdict.layouts.size() > 1 && layouts > 0)
    text += fmt::format(" {} of {} layouts are wrong.", layouts, verdict.layouts.size());
  return text;
}

// The meaning of a class of mistakes, in plain words.
std::string meaning_of(const std::string& id) {
  for (const auto& diagnosis : kDiagnoses)
    if (id == diagnosis.id) return diagnosis.meaning;
  return {};
}

// Once for each kind of finding, in the order of these.
std::vector<std::pair<std::string, std::string>> changes_of(const Wording& wording) {
  std::vector<std::pair<std::string, std::string>> changes;
  for (const Finding& finding : wording.findings) {
    const auto change = wording.changes.find(finding.id);
    if (change == wording.changes.end() || change->second.empty()) continue;
    if (std::ranges::none_of(changes, [&](const auto& one) { return one.first == finding.id; }))
      changes.emplace_back(*change);
  }
  return changes;
}

void explain(Report& report, const Verdict& verdict, const Wording& wording) {
  report.prose(
      "What this page shows",
      {"A training step computes a gradient: for every number in the model, how it should change. Spread "
       "over several processes, the step must end with the gradient that one process would have computed on "
       "the whole batch. Often it does not: something is averaged twice, counted twice or left out, and "
       "training goes on, a little wrong, without an error message.",
       fmt::format(
           "Here one step was compared with {}, parameter by parameter. The ratio says by what the "
           "expected gradient would have to be multiplied to come closest to the one found: 1 is right, "
           "1/2 or 4 is a wrong scale. The error is the distance between the two in units of the "
           "expected gradient's length; what is allowed is what rounding can do. {}",
           wording.subject.empty() ? "the same step made by one process with 64-bit numbers"
                                   : wording.reference,
           verdict.passed ? "All of it lies within that."
                          : "What lies outside is marked, and named above as far as the numbers tell."),
       "In these words: a parameter is a named group of the model's numbers. A rank is one of the processes "
       "that work together; a layout is the way in which they divide the work. Targets are the tokens that "
       "the loss is about."});
}

constexpr std::pair<const char*, Grade LayoutVerdict::*> kClaims[] = {
    {"E1 exact arithmetic", &LayoutVerdict::e1},
    {"E2 within rounding", &LayoutVerdict::e2},
    {"E3 same bits again", &LayoutVerdict::e3}};

// A line for each of several layouts.
void layouts(Report& report, const Verdict& verdict) {
  ReportTable table{.title = "Layouts", .summary = "", .columns = {"verdict", "layout"}, .rows = {}};
  table.summary =
      "The error of the worst parameter of each, in units of the expected gradient's length; \"finds from\": the "
      "smallest error of scale in a single parameter that would show.";
  for (const auto& [grade, precision] :
       {std::pair{&LayoutVerdict::e1, std::string("fp64")}, {&LayoutVerdict::e2, verdict.precision}})
    if (any_claims(verdict, grade))
      table.columns.insert(table.columns.end(), {"error " + precision, "allowed", "finds from"});
  if (any_claims(verdict, &LayoutVerdict::e3)) table.columns.push_back("same bits");
  for (const auto& layout : verdict.layouts) {
    table.rows.push_back({layout.passed ? "pass" : "FAIL", layout.name});
    auto& row = table.rows.back();
    for (const auto& grade : {&LayoutVerdict::e1, &LayoutVerdict::e2}) {
      const Grade& one = layout.*grade;
      if (any_claims(verdict, grade))
        row.insert(row.end(), {one.worst.empty() ? "-" : scientific(one.error),
                               one.allowed > 0 ? scientific(one.allowed) : "-",
                               one.single_least.empty() ? "-" : percent(one.single_found)});
    }
    if (any_claims(verdict, &LayoutVerdict::e3))
      row.push_back(!claimed(layout.e3) ? "-" : layout.e3.state == Grade::State::kPassed ? "yes" : "NO");
  }
  report.table(std::move(table));
}

// The bounds once each, then what is found in each layout.
void grades(Report& report, const Verdict& verdict) {
  ReportTable table;
  table.title = "What is claimed";
  table.columns = {"state", "layout", "claim", "outside", "found"};
  std::vector<std::string> bounds;
  for (const auto& [name, grade] : kClaims) {
    std::map<std::string, std::vector<std::string>> layouts_of;
    for (const auto& layout : verdict.layouts) layouts_of[(layout.*grade).bound].push_back(layout.name);
    for (const auto& [bound, names] : layouts_of)
      bounds.push_back(fmt::format(
          "{}{}: {}.", name, layouts_of.size() > 1 ? " (" + list_names(names) + ")" : std::string(), bound));
  }
  for (const auto& layout : verdict.layouts) {
    for (const auto& [name, of] : kClaims) {
      const Grade& grade = layout.*of;
      std::vector<std::string> said;
      if (claimed(grade) && grade.allowed > 0)
        said.push_back(fmt::format("worst error {} of {} allowed{}", scientific(grade.error),
                                   scientific(grade.allowed),
                                   grade.worst.empty() ? std::string() : " in " + grade.worst));
      for (auto& line : resolution_of(grade)) said.push_back(std::move(line));
      table.rows.push_back({state_name(grade.state), layout.name, name,
                            claimed(grade) ? std::to_string(grade.failed) : "-",
                            said.empty() ? "-" : fmt::format("{}", fmt::join(said, "; "))});
    }
    for (const auto& trajectory : layout.trajectories)
      table.rows.push_back(
          {trajectory.passed ? "pass" : "fail", layout.name, "after updates", "-", words(trajectory)});
    if (layout.bytes_moved > 0) table.rows.push_back({"-", layout.name, "traffic", "-", traffic(layout)});
  }
  report.table(std::move(table));
  report.prose("The bounds", std::move(bounds));
}

void steps(Report& report, const Verdict& verdict, const Wording& wording) {
  ReportTable table;
  table.title = "The step";
  table.columns = {"", "loss", "targets", "tokens", "gradient norm", "clip coefficient"};
  const auto row = [&](const std::string& name, const StepFigures& figures) {
    table.rows.push_back({name, recorded(figures.loss), count(figures.targets), count(figures.tokens),
                          recorded(figures.norm), recorded(figures.clip_coefficient)});
  };
  row(wording.reference, verdict.oracle);
  for (const auto& layout : verdict.layouts) {
    if (!wording.subject.empty()) {
      row(layout.name, layout.exact);
      continue;
    }
    row(layout.name + ", fp64", layout.exact);
    if (layout.e2.state != Grade::State::kNotClaimed)
      row(layout.name + ", " + verdict.precision, layout.rounded);
  }
  report.table(std::move(table));
}

}  // namespace

const char* state_name(Grade::State state) {
  switch (state) {
    case Grade::State::kPassed: return "pass";
    case Grade::State::kFailed: return "fail";
    case Grade::State::kNotClaimed: return "not claimed";
  }
  return "";
}

std::string updates_of(const Trajectory& trajectory) {
  return fmt::format("{} update{} of {}", trajectory.updates, trajectory.updates == 1 ? "" : "s",
                     trajectory.optimizer);
}

namespace {

// Those that a verdict is about; beyond eight, to_text() lists them.
std::string layouts_of(const Verdict& verdict) {
  std::vector<std::string> names;
  for (const auto& layout : verdict.layouts)
    if (layout.passed == verdict.passed && !layout.name.empty()) names.push_back(layout.name);
  if (names.empty()) return {};
  std::string text = names.size() > 8 ? fmt::format(" under {} layouts", names.size())
                                      : fmt::format(" under {}", fmt::join(names, ", "));
  if (names.size() < verdict.layouts.size()) text += fmt::format(" (of {} layouts)", verdict.layouts.size());
  return text;
}

}  // namespace

Wording verify_wording(const Verdict& verdict) {
  Wording wording{.left = fmt::format("{} rank{}", verdict.ranks, verdict.ranks == 1 ? "" : "s"),
                  .right = "1 device",
                  .reference = "one process, fp64",
                  .subject = {},
                  .layouts = layouts_of(verdict)};
  if (!verdict.layouts.empty()) {
    const auto& parameters = verdict.layouts[0].parameters;
    const auto zero = std::count_if(parameters.begin(), parameters.end(),
                                    [](const ParameterVerdict& parameter) { return parameter.norm == 0; });
    if (zero > 0)
      wording.notices.push_back(fmt::format(
          "one process has a gradient of zero for {} of {} parameters in this step: little is proven of them",
          zero, parameters.size()));
  }
  wording.findings = verdict.findings;
  if (!wording.findings.empty()) return wording;
  for (const auto& statement : verdict.diagnosis)
    wording.findings.push_back({.id = {}, .sentence = statement, .evidence = {}});
  return wording;
}

Wording compare_wording(const DumpComparison& comparison, const DumpNames& names, const std::string& alone,
                        const std::string& mean) {
  std::map<std::string, std::string> changes;
  for (const Finding& finding : comparison.findings)
    changes[finding.id] = change_of(finding.which.empty() ? finding.id : finding.id + " " + finding.which,
                                    mean, comparison.peers);
  return {.left = names.found,
          .right = names.expected,
          .reference = names.expected,
          .subject = "dump " + names.found,
          .findings = comparison.findings,
          .notices = comparison.notices,
          .command = "isograd compare " + shell_words({names.found, names.expected}) +
                     (alone.empty() ? "" : " --alone " + shell_words({alone})),
          .changes = std::move(changes)};
}

std::string parity_line(const Verdict& verdict, const Wording& wording) {
  const LayoutVerdict* layout = worst_layout(verdict);
  const bool open = wording.findings.size() == 1 && wording.findings[0].id == finding_id::unresolved;
  std::string line = fmt::format("parity {}: {} {} {}{}", verdict.passed ? "PASS" : "FAIL", wording.left,
                                 verdict.passed ? "="
                                 : open         ? "not shown to be"
                                                : "!=",
                                 wording.right, wording.layouts);
  std::string joint = "; worst error";
  if (layout && claimed(layout->e1) && !layout->e1.worst.empty()) {
    line += fmt::format("{} {} of {:g} allowed (fp64, {})", joint, scientific(layout->e1.error),
                        layout->e1.allowed, layout->e1.worst);
    joint = ",";
  }
  if (layout && claimed(layout->e2) && !layout->e2.worst.empty())
    line += fmt::format("{} {} of {} allowed ({}, {})", joint, scientific(layout->e2.error),
                        scientific(layout->e2.allowed), verdict.precision, layout->e2.worst);
  // Within rounding alone much may pass: the line says what.
  if (layout && (verdict.passed || open) && !claimed(layout->e1) && claimed(layout->e2) &&
      !layout->e2.single_least.empty())
    line += fmt::format("; finds an error of scale from {} in all parameters, from {} in a single one ({})",
                        percent(layout->e2.uniform_found), percent(layout->e2.single_found),
                        layout->e2.single_least);
  if (layout && verdict.passed && claimed(layout->e3)) line += "; same bits twice";
  if (!wording.findings.empty()) line += "; " + wording.findings[0].sentence;
  return printable(line);
}

std::string to_text(const Verdict& verdict, const Wording& wording, std::size_t rows) {
  std::string text = parity_line(verdict, wording) + "\n";
  for (const auto& notice : wording.notices) text += "note: " + printable(notice) + "\n";
  if (!verdict.loss.empty() && verdict.loss != "token mean")
    text += "compared under the loss that was declared: " + printable(verdict.loss) + "\n";
  // Among many layouts, only the failed ones, else the worst, are shown in full.
  const bool many = verdict.layouts.size() > 4;
  const LayoutVerdict* worst = worst_layout(verdict);
  std::vector<std::vector<std::string>> passed;
  std::vector<std::string> after;  // which updates
  for (const auto& layout : verdict.layouts) {
    if (many && layout.passed && &layout != worst) {
      passed.push_back(
          {layout.name, scientific(layout.e1.error), claimed(layout.e2) ? scientific(layout.e2.error) : "-"});
      // Problems joined into one verdict follow the same paths.
      for (const auto& trajectory : layout.trajectories)
        passed.back().push_back(scientific(trajectory.error));
      if (passed.size() == 1)
        for (const auto& trajectory : layout.trajectories) after.push_back(updates_of(trajectory));
      continue;
    }
    text += "\n";
    text += printable(wording.subject.empty()
                          ? fmt::format("layout {}, {} ranks, one step", layout.name, verdict.ranks)
                          : wording.subject);
    if (verdict.oracle.targets != kNotRecorded) text += fmt::format(" of {} targets", verdict.oracle.targets);
    text += "\n";
    std::vector<std::vector<std::string>> table{columns(verdict, layout)};
    std::size_t hidden = 0;
    for (const auto* parameter : worst_first(layout)) {
      if (table.size() <= rows || !good(*parameter, layout))
        table.push_back(cells(*parameter, layout));
      else
        ++hidden;
    }
    text += aligned(table);
    if (hidden) text += fmt::format("  and {} more, all passed\n", hidden);
    const std::size_t width = std::max<std::size_t>(18, wording.reference.size());
    text += figures_row(wording.reference, width, verdict.oracle);
    if (!wording.subject.empty()) {
      text += figures_row(layout.name, width, layout.exact);
    } else {
      text += figures_row("layout, fp64", width, layout.exact);
      if (claimed(layout.e2))
        text += figures_row(fmt::format("layout, {}", verdict.precision), width, layout.rounded);
    }
    for (const auto& [name, grade] : {std::pair{"E1", &layout.e1}, {"E2", &layout.e2}, {"E3", &layout.e3}}) {
      text += fmt::format("  {} {:<11} {}", name, state_name(grade->state), printable(grade->bound));
      text += '\n';
      for (const auto& line : resolution_of(*grade)) text += "     " + line + "\n";
    }
    for (const auto& trajectory : layout.trajectories)
      text += fmt::format("  {:<14} {}\n", trajectory.passed ? "pass" : "fail", printable(words(trajectory)));
    if (layout.choices.tokens > 0) text += "  " + choices(layout) + "\n";
    if (layout.bytes_moved > 0) text += "  " + traffic(layout) + "\n";
  }
  if (!passed.empty()) {
    std::vector<std::string> head{"passed as well", "error fp64", "error " + verdict.precision};
    for (const auto& updates : after) head.push_back("after " + updates);
    passed.insert(passed.begin(), std::move(head));
    text += "\n" + aligned(passed);
  }
  if (ReportTable meshes = meshes_table(verdict); !meshes.rows.empty()) {
    meshes.rows.insert(meshes.rows.begin(), std::move(meshes.columns));
    text += "\n" + meshes.title + ": " + printable(meshes.summary) + "\n" + aligned(std::move(meshes.rows));
  }
  for (const std::string& guilty : verdict.meshes.guilty) text += "axes: " + printable(guilty) + "\n";
  for (const auto& finding : wording.findings) {
    text += fmt::format("diagnosis{}: {}\n", finding.id.empty() ? "" : " (" + finding.id + ")",
                        printable(finding.sentence));
    for (const auto& evidence : finding.evidence) text += "  evidence: " + printable(evidence) + "\n";
  }
  for (const auto& [id, change] : changes_of(wording))
    text += fmt::format("change ({}): {}\n", id, printable(change));
  return text;
}

ReportTable to_table(const Verdict& verdict) {
  ReportTable table;
  table.title = "Parity with one process";
  table.summary = fmt::format("{} ({:.1f} s)", parity_line(verdict), verdict.seconds);
  table.passed = verdict.passed;
  table.headline = answer(verdict, verify_wording(verdict));
  if (verdict.layouts.empty()) return table;
  table.columns = columns(verdict, verdict.layouts[0]);
  const bool several = verdict.layouts.size() > 1;
  if (several) table.columns.insert(table.columns.begin(), "layout");
  // The verdict first: on a narrow screen the rest is scrolled to.
  const auto last_first = [](auto& row) { std::rotate(row.rbegin(), row.rbegin() + 1, row.rend()); };
  last_first(table.columns);
  std::vector<std::pair<const ParameterVerdict*, const LayoutVerdict*>> order;
  for (const auto& layout : verdict.layouts)
    for (const auto* parameter : worst_first(layout)) order.emplace_back(parameter, &layout);
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return badness(*a.first, *a.second) < badness(*b.first, *b.second);
  });
  for (const auto& [parameter, layout] : order) {
    auto row = cells(*parameter, *layout);
    if (several) row.insert(row.begin(), layout->name);
    last_first(row);
    table.rows.push_back(std::move(row));
  }
  return table;
}

std::string parity_line(const Verdict& verdict) { return parity_line(verdict, verify_wording(verdict)); }
std::string to_text(const Verdict& verdict, std::size_t rows) {
  return to_text(verdict, verify_wording(verdict), rows);
}
std::string to_json(const Verdict& verdict) { return to_json(verdict, verify_wording(verdict)); }

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
                                       {"error", trajectory.error},
                                       {"allowed", trajectory.allowed},
                                       {"passed", trajectory.passed}});
    if (layout.bytes_moved > 0) entry["bytes_moved"] = layout.bytes_moved;
    if (layout.bytes_needed > 0) entry["bytes_needed"] = layout.bytes_needed;
    if (layout.choices.tokens > 0)
      entry["choices_of_experts"] = {{"made", layout.choices.tokens},
                                     {"flipped", layout.choices.flipped},
                                     {"wrong", layout.choices.wrong},
                                     {"margin", layout.choices.margin}};
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
    if (const auto change = wording.changes.find(finding.id);
        change != wording.changes.end() && !change->second.empty())
      findings.back()["change"] = change->second;
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

void write_verify_page(const Verdict& verdict, const Wording& wording, const std::filesystem::path& file) {
  Report report("Is this the gradient of one device?",
                wording.subject.empty()
                    ? fmt::format("{} against {}, one whole step", wording.left, wording.reference)
                    : fmt::format("{} against {}", wording.left, wording.right));
  report.verdict(verdict.passed, answer(verdict, wording));
  report.fact("targets in the step", count(verdict.oracle.targets));
  report.fact("loss", recorded(verdict.oracle.loss));
  report.fact("gradient norm", recorded(verdict.oracle.norm));
  report.fact("precision of the run", verdict.precision);
  if (!verdict.loss.empty()) report.fact("loss is a", verdict.loss);
  if (verdict.seconds > 0) report.fact("took", fmt::format("{:.1f} s", verdict.seconds));
  std::vector<std::pair<std::string, std::vector<std::string>>> findings;
  for (const auto& finding : wording.findings) {
    std::vector<std::string> lines = finding.evidence;
    if (const std::string meaning = meaning_of(finding.id); !meaning.empty())
      lines.insert(lines.begin(), fmt::format("{}: {}", finding.id, meaning));
    findings.emplace_back(finding.sentence, std::move(lines));
  }
  for (const std::string& guilty : verdict.meshes.guilty)
    findings.insert(findings.begin(), {guilty, {"by which of the meshes below went wrong"}});
  if (!findings.empty()) report.list("What is wrong, and the evidence for it", std::move(findings));
  std::vector<std::pair<std::string, std::vector<std::string>>> changes;
  for (auto& [id, change] : changes_of(wording)) changes.push_back({std::move(change), {id}});
  if (!changes.empty()) report.list("What to change", std::move(changes));
  explain(report, verdict, wording);
  if (ReportTable meshes = meshes_table(verdict); !meshes.rows.empty()) report.table(std::move(meshes));
  if (!wording.notices.empty()) report.prose("Before comparing", wording.notices);

  const bool several = verdict.layouts.size() > 1;
  if (several) layouts(report, verdict);
  // Where all is right nobody need look at each of the numbers.
  const auto folded_if = [&](bool fold, const char* title, auto&& sections) {
    if (fold) report.fold(title);
    sections();
    if (fold) report.unfold();
  };
  folded_if(verdict.passed, "Errors and ratios, drawn", [&] {
    if (any_claims(verdict, &LayoutVerdict::e1))
      report.chart(error_chart(verdict, "Errors in exact arithmetic (fp64)", true));
    if (any_claims(verdict, &LayoutVerdict::e2))
      report.chart(error_chart(
          verdict, fmt::format("Errors in {}, the precision of the run", verdict.precision), false));
    report.chart(ratio_chart(verdict));
    report.prose("",
                 {"Charts have a dot for each parameter and layout; point at one for its name and numbers."});
  });

  ReportTable parameters = to_table(verdict);
  parameters.title = "Parameters, worst first";
  parameters.summary.clear();
  const std::size_t most_rows = verdict.passed ? 100 : 500;
  if (parameters.rows.size() > most_rows) {
    parameters.summary = fmt::format("The first {} of {} rows; the JSON verdict has them all.", most_rows,
                                     parameters.rows.size());
    parameters.rows.resize(most_rows);
  }
  report.table(std::move(parameters));
  folded_if(several && verdict.passed, "What each layout claims, and its step", [&] {
    grades(report, verdict);
    steps(report, verdict, wording);
  });
  report.text("In one line", parity_line(verdict, wording));
  if (!wording.command.empty()) report.text("To see it again", wording.command);
  if (!wording.configuration.empty()) report.folded("Configuration", wording.configuration);
  report.write(file);
}

}  // namespace isograd
