// The verdict as one HTML page that stands alone.
#include "train/report.hpp"
#include "verify/run.hpp"

namespace isograd {

void write_verify_page(const Verdict& verdict, const std::filesystem::path& file, const std::string& config) {
  Report report("Is this the gradient of one device?",
                fmt::format("{} rank{} against one process in fp64, one whole step", verdict.ranks,
                            verdict.ranks == 1 ? "" : "s"));
  report.verdict(verdict.passed, parity_line(verdict));
  report.fact("targets in the step", std::to_string(verdict.oracle.targets));
  report.fact("loss", fmt::format("{:.9g}", verdict.oracle.loss));
  report.fact("gradient norm", fmt::format("{:.9g}", verdict.oracle.norm));
  report.fact("precision of the run", verdict.precision);
  report.fact("took", fmt::format("{:.1f} s", verdict.seconds));
  if (!verdict.diagnosis.empty()) {
    std::string statements;
    for (const auto& statement : verdict.diagnosis) statements += statement + "\n";
    report.text("What follows from the numbers", statements);
  }
  report.table(to_table(verdict));

  ReportTable grades;
  grades.title = "Grades";
  grades.columns = {"layout", "grade", "state", "outside", "what it claims"};
  for (const auto& layout : verdict.layouts)
    for (const auto& [name, grade] : {std::pair{"E1", &layout.e1}, {"E2", &layout.e2}, {"E3", &layout.e3}})
      grades.rows.push_back(
          {layout.name, name, state_name(grade->state), std::to_string(grade->failed), grade->bound});
  grades.passed = verdict.passed;
  report.table(std::move(grades));

  ReportTable steps;
  steps.title = "The step";
  steps.columns = {"", "loss", "targets", "tokens", "norm", "clip coefficient"};
  const auto row = [&](const std::string& name, const StepFigures& figures) {
    steps.rows.push_back({name, fmt::format("{:.12g}", figures.loss), std::to_string(figures.targets),
                          std::to_string(figures.tokens), fmt::format("{:.12g}", figures.norm),
                          fmt::format("{:.12g}", figures.clip_coefficient)});
  };
  row("one process, fp64", verdict.oracle);
  for (const auto& layout : verdict.layouts) {
    row(layout.name + ", fp64", layout.exact);
    if (layout.e2.state != Grade::State::kNotClaimed)
      row(layout.name + ", " + verdict.precision, layout.rounded);
  }
  report.table(std::move(steps));
  if (!config.empty()) report.folded("Configuration", config);
  report.write(file);
}

}  // namespace isograd
