#include "train/run_records.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "base/paths.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "base/waiting.hpp"
#include "train/config_table.hpp"
#include "train/presenter.hpp"
#include "train/run_folder.hpp"

namespace isograd {
namespace {

using Field = std::optional<double> MetricRow::*;

struct LastFigures {
  std::int64_t steps = 0;
  std::optional<double> loss{}, validation_loss{}, tokens_per_second{};
  double seconds = 0;
};

LastFigures figures_of(const RunRecord& run) {
  LastFigures last;
  std::vector<double> speeds;
  for (const MetricRow& row : run.rows) {
    last.steps = row.step;
    if (row.loss) last.loss = row.loss;
    if (row.validation_loss) last.validation_loss = row.validation_loss;
    if (row.tokens_per_second) speeds.push_back(*row.tokens_per_second);
    last.seconds += row.seconds.value_or(0);
  }
  if (!speeds.empty()) {
    const auto middle = speeds.begin() + std::ssize(speeds) / 2;
    std::ranges::nth_element(speeds, middle);
    last.tokens_per_second = *middle;
  }
  return last;
}

RunRecord read_run(const std::string& text) {
  const fs::path folder = text;
  std::error_code error;
  if (!fs::is_directory(folder, error))
    refuse(text, fs::exists(folder, error) ? "a file" : "no such folder", "the folder of a run",
           fs::exists(folder, error) ? "Name the folder that it is in" : missing_path_action(folder));
  RunRecord run{.name = text, .config = {}, .rows = {}};
  if (!fs::exists(folder / kRunConfig, error))
    refuse(text, fmt::format("no {} in it", kRunConfig), "the folder of a run, which has one",
           "Name run.directory of a run of isograd train");
  run.config = load_config(folder / kRunConfig);
  const bool moved = run.config.run.json_log.empty();  // its log is in its folder, wherever that is now
  run.rows = read_metrics(moved ? folder / "metrics.jsonl" : json_log_of(run.config));
  if (run.rows.empty())
    refuse(text, "no step in its metrics", "a run that has made one", "Wait for its first step");
  return run;
}

std::string cell(const std::optional<double>& value, const char* form) {
  if (!value) return "–";
  return std::isfinite(*value) ? fmt::format(fmt::runtime(form), *value) : "not finite";
}

}  // namespace

std::vector<RunRecord> read_runs(const std::vector<std::string>& folders) {
  if (folders.size() > kMostRuns)
    refuse("isograd report", fmt::format("{} runs", folders.size()), fmt::format("at most {}", kMostRuns),
           "Name fewer: more curves on one chart cannot be told apart");
  std::vector<RunRecord> runs;
  std::set<fs::path> known;
  std::set<std::string> names;
  for (const std::string& folder : folders) {
    runs.push_back(read_run(folder));
    if (!known.insert(fs::canonical(folder)).second)
      refuse(folder, "a run that is named twice", "different runs", "Leave one of the two out");
    const fs::path path = fs::canonical(folder);
    names.insert(path.filename().string());
  }
  if (names.size() == runs.size())
    for (std::size_t i = 0; i < runs.size(); ++i)
      runs[i].name = fs::canonical(folders[i]).filename().string();
  return runs;
}

ReportTable last_figures(const std::vector<RunRecord>& runs) {
  ReportTable table{.title = "Last figures",
                    .summary = "",
                    .columns = {"run", "steps", "loss", "validation loss", "tokens/s", "time of steps"},
                    .rows = {}};
  for (const RunRecord& run : runs) {
    const LastFigures last = figures_of(run);
    table.rows.push_back({run.name, std::to_string(last.steps), cell(last.loss, "{:.4f}"),
                          cell(last.validation_loss, "{:.4f}"),
                          last.tokens_per_second ? human_count(*last.tokens_per_second) : "–",
                          human_seconds(last.seconds)});
  }
  return table;
}

ReportTable differing_keys(const std::vector<RunRecord>& runs) {
  ReportTable table{.title = "Keys in which they differ", .summary = "", .columns = {"key"}, .rows = {}};
  for (const RunRecord& run : runs) table.columns.push_back(run.name);
  for (const ConfigKey& key : config_keys()) {
    if (key.name == "run.directory" || key.name == "run.json_log") continue;
    std::vector<std::string> row = {key.name};
    for (const RunRecord& run : runs) row.push_back(toml_text(key.get(run.config)));
    if (std::ranges::count(row.begin() + 1, row.end(), row[1]) != std::ssize(runs)) table.rows.push_back(row);
  }
  if (table.rows.empty()) table.summary = "none: their configurations are the same";
  return table;
}

std::vector<Chart> overlaid_charts(const std::vector<RunRecord>& runs) {
  std::vector<Chart> charts;
  const bool text =
      std::ranges::all_of(runs, [](const RunRecord& run) { return run.config.model.kind == "decoder"; });
  const auto add = [&](const char* title, const char* unit, Field field, bool median, bool from_zero) {
    Chart chart{.title = title, .x_label = "step", .y_label = unit, .series = {}, .from_zero = from_zero};
    for (const RunRecord& run : runs) {
      Series series{.name = run.name, .points = {}};
      for (const MetricRow& row : run.rows)
        if (row.*field) series.points.push_back({static_cast<double>(row.step), *(row.*field)});
      if (series.points.empty()) continue;
      if (median) series.points = running_median(series.points);
      chart.series.push_back(std::move(series));
    }
    if (!chart.series.empty()) charts.push_back(std::move(chart));
  };
  add("Loss", text ? "nats per token, running median" : "running median", &MetricRow::loss, true, false);
  add("Validation loss", text ? "nats per token" : "", &MetricRow::validation_loss, false, false);
  add("Gradient norm", "before clipping, running median", &MetricRow::norm, true, true);
  add("Throughput", "tokens/s, all ranks, running median", &MetricRow::tokens_per_second, true, true);
  add("Learning rate", "", &MetricRow::learning_rate, false, true);
  return charts;
}

Report overlaid_page(const std::vector<RunRecord>& runs) {
  std::vector<std::string> names;
  for (const RunRecord& run : runs) names.push_back(run.name);
  Report page("isograd: " + std::to_string(runs.size()) + (runs.size() == 1 ? " run" : " runs"),
              fmt::format("{}", fmt::join(names, ", ")));
  page.table(last_figures(runs));
  for (Chart& chart : overlaid_charts(runs)) page.chart(std::move(chart));
  if (runs.size() > 1) page.table(differing_keys(runs));
  return page;
}

std::string overlaid_text(const std::vector<RunRecord>& runs) {
  const auto text_of = [](const ReportTable& table) {
    TextRows rows = table.rows;
    rows.insert(rows.begin(), table.columns);
    for (auto& row : rows)
      for (auto& each : row) each = printable(each);
    return text_table(std::move(rows));
  };
  std::string text = text_of(last_figures(runs));
  if (runs.size() == 1) return text;
  const ReportTable keys = differing_keys(runs);
  return text + "\n" + (keys.rows.empty() ? keys.title + ": " + keys.summary + "\n" : text_of(keys));
}

std::string overlaid_json(const std::vector<RunRecord>& runs) {
  auto all = nlohmann::ordered_json::array(), keys = nlohmann::ordered_json::object();
  const auto number = [](const std::optional<double>& value) {
    return value && std::isfinite(*value) ? nlohmann::ordered_json(*value) : nlohmann::ordered_json();
  };
  for (const RunRecord& run : runs) {
    const LastFigures last = figures_of(run);
    all.push_back({{"name", run.name},
                   {"steps", last.steps},
                   {"loss", number(last.loss)},
                   {"validation_loss", number(last.validation_loss)},
                   {"tokens_per_second", number(last.tokens_per_second)},
                   {"seconds", last.seconds}});
  }
  for (const auto& row : differing_keys(runs).rows)
    keys[row[0]] = std::vector<std::string>(row.begin() + 1, row.end());
  return nlohmann::ordered_json{{"runs", all}, {"differing_keys", keys}}.dump(
             2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) +
         "\n";
}

}  // namespace isograd
