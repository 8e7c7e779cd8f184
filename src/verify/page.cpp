// The verdict as one HTML page that stands alone and explains itself.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "report/report.hpp"
#include "verify/diagnosis.hpp"
#include "verify/present.hpp"

namespace isograd {
namespace {

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

void grades(Report& report, const Verdict& verdict) {
  ReportTable table;
  table.title = "What is claimed";
  table.columns = {"state", "layout", "claim", "outside", "bound"};
  for (const auto& layout : verdict.layouts) {
    for (const auto& [name, grade] : {std::pair{"E1 exact arithmetic", &layout.e1},
                                      {"E2 within rounding", &layout.e2},
                                      {"E3 same bits again", &layout.e3}}) {
      std::vector<std::string> said = {grade->bound};
      for (auto& line : resolution_of(*grade)) said.push_back(std::move(line));
      table.rows.push_back({state_name(grade->state), layout.name, name,
                            grade->state == Grade::State::kNotClaimed ? "-" : std::to_string(grade->failed),
                            fmt::format("{}", fmt::join(said, "; "))});
    }
    for (const auto& trajectory : layout.trajectories)
      table.rows.push_back(
          {trajectory.passed ? "pass" : "fail", layout.name, "after updates", "-", words(trajectory)});
    if (layout.bytes_moved > 0) table.rows.push_back({"-", layout.name, "traffic", "-", traffic(layout)});
  }
  table.passed = verdict.passed;
  report.table(std::move(table));
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
  if (!findings.empty()) report.list("What is wrong, and what contributes for it", std::move(findings));
  explain(report, verdict, wording);
  if (ReportTable meshes = meshes_table(verdict); !meshes.rows.empty()) report.table(std::move(meshes));
  if (!wording.notices.empty()) report.prose("Before comparing", wording.notices);

  if (any_claims(verdict, &LayoutVerdict::e1))
    report.chart(error_chart(verdict, "Errors in exact arithmetic (fp64)", true));
  if (any_claims(verdict, &LayoutVerdict::e2))
    report.chart(error_chart(
        verdict, fmt::format("Errors in {}, the precision of the run", verdict.precision), false));
  report.chart(ratio_chart(verdict));
  report.prose("",
               {"Charts have a dot for each parameter and layout; point at one for its name and numbers."});

  ReportTable parameters = to_table(verdict);
  parameters.title = "Parameters, worst first";
  parameters.summary.clear();
  constexpr std::size_t kMostRows = 500;
  if (parameters.rows.size() > kMostRows) {
    parameters.summary = fmt::format("The first {} of {} rows; the JSON verdict has them all.", kMostRows,
                                     parameters.rows.size());
    parameters.rows.resize(kMostRows);
  }
  report.table(std::move(parameters));
  grades(report, verdict);
  steps(report, verdict, wording);
  report.text("In one line", parity_line(verdict, wording));
  if (!wording.command.empty()) report.text("To see it again", wording.command);
  if (!wording.configuration.empty()) report.folded("Configuration", wording.configuration);
  report.write(file);
}

}  // namespace isograd
