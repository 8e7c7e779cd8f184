// A verdict as JSON, as one line, as a terminal table and as a table for a run's report.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "isograd/verify.hpp"
#include "verify/diagnosis.hpp"

namespace isograd {
namespace {

using json = nlohmann::ordered_json;

// JSON has no NaN and no infinity: a number that is not finite is written as null.
json number(double value) {
  return std::isfinite(value) ? json(value) : json(nullptr);
}

json to_json(const Grade& grade) {
  json object = {{"state", state_name(grade.state)}, {"bound", grade.bound}};
  if (grade.state == Grade::State::kNotClaimed) return object;
  object["failed"] = grade.failed;
  if (!grade.worst.empty()) object["worst"] = grade.worst;
  if (grade.allowed > 0) {
    object["error"] = number(grade.error);
    object["allowed"] = grade.allowed;
    object["unresolved"] = grade.unresolved;
  }
  return object;
}

json to_json(const StepFigures& figures) {
  return {{"loss", number(figures.loss)},
          {"targets", figures.targets},
          {"tokens", figures.tokens},
          {"norm", number(figures.norm)},
          {"clip_coefficient", number(figures.clip_coefficient)}};
}

json to_json(const ParameterVerdict& parameter) {
  return {{"name", parameter.name},
          {"ratio", number(parameter.exact.ratio)},
          {"cosine", number(parameter.exact.cosine)},
          {"error", number(parameter.exact.error)},
          {"allowed", parameter.exact.allowed},
          {"elements", parameter.elements},
          {"norm", number(parameter.norm)},
          {"run_precision",
           {{"ratio", number(parameter.rounded.ratio)},
            {"cosine", number(parameter.rounded.cosine)},
            {"error", number(parameter.rounded.error)},
            {"allowed", number(parameter.rounded.allowed)},
            {"one_process_error", number(parameter.alone_error)},
            {"resolved", parameter.rounded.resolved}}},
          {"same_bits", parameter.repeats},
          {"replicas_agree", parameter.replicas_agree}};
}

// How much of its allowance a parameter used; a number that is not finite comes first.
double share(const Comparison& comparison) {
  if (std::isnan(comparison.error)) return HUGE_VAL;
  return comparison.error > 0 ? comparison.error / comparison.allowed : 0;
}

bool good(const ParameterVerdict& parameter, const LayoutVerdict& layout) {
  return parameter.exact.passed && parameter.repeats && parameter.replicas_agree &&
         (layout.e2.state == Grade::State::kNotClaimed || parameter.rounded.passed);
}

std::vector<const ParameterVerdict*> worst_first(const LayoutVerdict& layout) {
  std::vector<const ParameterVerdict*> order;
  for (const auto& parameter : layout.parameters) order.push_back(&parameter);
  const bool rounds = layout.e2.state != Grade::State::kNotClaimed;
  const auto key = [&](const ParameterVerdict* p) {
    return std::make_tuple(good(*p, layout), -share(p->exact), rounds ? -share(p->rounded) : 0.0);
  };
  std::stable_sort(order.begin(), order.end(), [&](auto* a, auto* b) { return key(a) < key(b); });
  return order;
}

std::string scientific(double value) {
  if (std::isnan(value)) return "nan";
  return value == 0 ? "0" : fmt::format("{:.1e}", value);
}

std::string ratio_cell(double ratio) {
  return std::isnan(ratio) ? "-" : fmt::format("{:.9g}", ratio);
}

std::vector<std::string> cells(const ParameterVerdict& parameter, const LayoutVerdict& layout) {
  const bool rounds = layout.e2.state != Grade::State::kNotClaimed;
  return {parameter.name,
          std::to_string(parameter.elements),
          ratio_cell(parameter.exact.ratio),
          std::isnan(parameter.exact.cosine) ? "-" : fmt::format("{:.9g}", parameter.exact.cosine),
          scientific(parameter.exact.error),
          scientific(parameter.exact.allowed),
          rounds ? scientific(parameter.rounded.error) : "-",
          rounds ? scientific(parameter.rounded.allowed) : "-",
          !parameter.replicas_agree ? "ranks differ"
          : parameter.repeats       ? "yes"
                                    : "no",
          good(parameter, layout) ? "pass" : "FAIL"};
}

std::vector<std::string> columns(const Verdict& verdict) {
  return {"parameter", "elements",  "ratio",  "cosine", "error fp64", "allowed", "error " + verdict.precision,
          "allowed",   "same bits", "verdict"};
}

// Left-aligned names, right-aligned numbers.
std::string aligned(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> width;
  for (const auto& row : rows) {
    width.resize(std::max(width.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i)
      text += i == 0 ? fmt::format("  {:<{}}", row[i], width[i]) : fmt::format("  {:>{}}", row[i], width[i]);
    text += '\n';
  }
  return text;
}

std::string figures_row(const char* name, const StepFigures& figures) {
  return fmt::format("  {:<22} loss {:.12g}  targets {}  tokens {}  norm {:.12g}  clip {:.12g}\n", name,
                     figures.loss, figures.targets, figures.tokens, figures.norm, figures.clip_coefficient);
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

}  // namespace

const char* state_name(Grade::State state) {
  switch (state) {
    case Grade::State::kPassed:
      return "pass";
    case Grade::State::kFailed:
      return "fail";
    case Grade::State::kNotClaimed:
      return "not claimed";
  }
  return "";
}

std::string to_json(const Verdict& verdict) {
  json grades = json::object(), parameters = json::array(), steps = json::object();
  for (const auto& layout : verdict.layouts) {
    const json entry = {{"E1", to_json(layout.e1)},
                        {"E2", to_json(layout.e2)},
                        {"E3", to_json(layout.e3)},
                        {"figures_agree", layout.figures_agree}};
    if (verdict.layouts.size() == 1)
      grades = entry;
    else
      grades[layout.name] = entry;
    for (const auto* parameter : worst_first(layout)) {
      json row = to_json(*parameter);
      row["layout"] = layout.name;
      parameters.push_back(std::move(row));
    }
    steps[layout.name] = {{"fp64", to_json(layout.exact)}, {verdict.precision, to_json(layout.rounded)}};
  }
  steps["oracle"] = to_json(verdict.oracle);
  json document = {{"verdict", verdict.passed ? "pass" : "fail"},
                   {"grades", grades},
                   {"parameters", parameters},
                   {"diagnosis", verdict.diagnosis},
                   {"ranks", verdict.ranks},
                   {"loss", verdict.loss},
                   {"precision", verdict.precision},
                   {"step", steps},
                   {"parameters_agree", verdict.parameters_agree},
                   {"batch_agrees", verdict.batch_agrees},
                   {"seconds", verdict.seconds}};
  return document.dump(2);
}

std::string parity_line(const Verdict& verdict) {
  const std::string ranks = fmt::format("{} rank{}", verdict.ranks, verdict.ranks == 1 ? "" : "s");
  const LayoutVerdict* layout = worst_layout(verdict);
  std::string line = fmt::format("parity {}: {} {} 1 device", verdict.passed ? "PASS" : "FAIL", ranks,
                                 verdict.passed ? "=" : "!=");
  if (layout && !layout->e1.worst.empty())
    line += fmt::format("; largest error {} of {:g} allowed (fp64, {})", scientific(layout->e1.error),
                        layout->e1.allowed, layout->e1.worst);
  if (layout && layout->e2.state != Grade::State::kNotClaimed && !layout->e2.worst.empty())
    line += fmt::format(", {} of {} allowed ({}, {})", scientific(layout->e2.error),
                        scientific(layout->e2.allowed), verdict.precision, layout->e2.worst);
  if (layout && verdict.passed) line += "; same bits twice";
  if (!verdict.diagnosis.empty()) line += "; " + verdict.diagnosis[0];
  return line;
}

std::string to_text(const Verdict& verdict, std::size_t rows) {
  std::string text = parity_line(verdict) + "\n";
  if (!verdict.loss.empty() && verdict.loss != "token mean")
    text += "compared under the loss that was declared: " + verdict.loss + "\n";
  for (const auto& layout : verdict.layouts) {
    text += fmt::format("\nlayout {}, {} ranks, one step of {} targets\n", layout.name, verdict.ranks,
                        verdict.oracle.targets);
    std::vector<std::vector<std::string>> table{columns(verdict)};
    std::size_t hidden = 0;
    for (const auto* parameter : worst_first(layout)) {
      if (table.size() <= rows)
        table.push_back(cells(*parameter, layout));
      else if (good(*parameter, layout))
        ++hidden;
      else
        table.push_back(cells(*parameter, layout));
    }
    text += aligned(table);
    if (hidden) text += fmt::format("  and {} more, all passed\n", hidden);
    text += figures_row("one process, fp64", verdict.oracle);
    text += figures_row("layout, fp64", layout.exact);
    if (layout.e2.state != Grade::State::kNotClaimed)
      text += figures_row(fmt::format("layout, {}", verdict.precision).c_str(), layout.rounded);
    for (const auto& [name, grade] : {std::pair{"E1", &layout.e1}, {"E2", &layout.e2}, {"E3", &layout.e3}}) {
      text += fmt::format("  {} {:<11} {}", name, state_name(grade->state), grade->bound);
      if (grade->unresolved)
        text += fmt::format(" ({} ratios unresolved, hidden by rounding)", grade->unresolved);
      text += '\n';
    }
  }
  for (const auto& statement : verdict.diagnosis) text += "diagnosis: " + statement + "\n";
  return text;
}

ReportTable to_table(const Verdict& verdict) {
  ReportTable table;
  table.title = "Parity with one process";
  table.summary = parity_line(verdict);
  table.columns = columns(verdict);
  table.passed = verdict.passed;
  const bool several = verdict.layouts.size() > 1;
  if (several) table.columns.insert(table.columns.begin(), "layout");
  for (const auto& layout : verdict.layouts)
    for (const auto* parameter : worst_first(layout)) {
      auto row = cells(*parameter, layout);
      if (several) row.insert(row.begin(), layout.name);
      table.rows.push_back(std::move(row));
    }
  return table;
}

}  // namespace isograd
