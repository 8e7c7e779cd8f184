#include "train/metrics.hpp"

#include <fcntl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/paths.hpp"
#include "base/refuse.hpp"

namespace isograd {
namespace {

using LoadRows = std::vector<const MetricRow*>;

// All fields of a row but the step and the loads of experts: the name in the log, the tag of TensorBoard
// (empty: not there; behind a "/": the values' names follow), and the value.
template <class Row, class Each>
void each_field(Row& row, Each&& each) {
  each("loss", "train/loss", row.loss);
  each("perplexity", "train/perplexity", row.perplexity);
  each("norm", "train/norm", row.norm);
  each("clip_coefficient", "train/clip_coefficient", row.clip_coefficient);
  each("norms", "train/norm/", row.part_norms);
  each("clip_groups", "train/", row.clipped);
  each("learning_rate", "train/learning_rate", row.learning_rate);
  each("tokens", "", row.tokens);
  each("targets", "", row.targets);
  each("tokens_per_second", "speed/tokens_per_second", row.tokens_per_second);
  each("mfu", "speed/mfu", row.mfu);
  each("seconds", "speed/seconds", row.seconds);
  each("exposed_seconds", "speed/exposed_seconds", row.exposed_seconds);
  each("bytes_across_hosts", "speed/bytes_across_hosts", row.bytes_across_hosts);
  each("updated", "", row.updated);
  each("validation_loss", "validation/loss", row.validation_loss);
  each("validation_perplexity", "validation/perplexity", row.validation_perplexity);
  each("validation_targets", "", row.validation_targets);
  each("figures", "validation/", row.figures);
}

// JSON has no NaN and no infinity: the library writes them as null.
struct ToJson {
  nlohmann::ordered_json& json;
  template <typename Number>
  void operator()(const char* name, const char*, const std::optional<Number>& value) {
    if (value) json[name] = *value;
  }
  void operator()(const char* name, const char*, const std::vector<TermValue>& values) {
    for (const TermValue& each : values) json[name][each.name] = each.value;
  }
  void operator()(const char* name, const char*, const std::vector<ClippedGroup>& groups) {
    for (const ClippedGroup& group : groups)
      json[name][group.pattern] = {{"norm", group.norm}, {"clip_coefficient", group.coefficient}};
  }
};

struct FromJson {
  const nlohmann::json& json;
  static double number(const nlohmann::json& value) {
    return value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>();
  }
  template <typename Number>
  void operator()(const char* name, const char*, std::optional<Number>& value) {
    const auto found = json.find(name);
    if (found == json.end()) return;
    if constexpr (std::is_same_v<Number, double>)
      value = number(*found);
    else
      value = found->is_null() ? Number{} : found->template get<Number>();
  }
  void operator()(const char* name, const char*, std::vector<TermValue>& values) {
    if (const auto found = json.find(name); found != json.end())
      for (const auto& [key, value] : found->items()) values.push_back({key, number(value)});
  }
  void operator()(const char* name, const char*, std::vector<ClippedGroup>& groups) {
    const auto or_else = [](const nlohmann::json& of, const char* key, double otherwise) {
      return of.contains(key) ? number(of[key]) : otherwise;
    };
    if (const auto found = json.find(name); found != json.end())
      for (const auto& [pattern, own] : found->items())
        groups.push_back({pattern, or_else(own, "norm", 0), or_else(own, "clip_coefficient", 1)});
  }
};

struct ToEvents {
  EventFile& events;
  std::int64_t step;
  template <typename Number>
  void operator()(const char*, const std::string& tag, const std::optional<Number>& value) {
    if (value && !tag.empty()) events.scalar(tag, step, static_cast<double>(*value));
  }
  void operator()(const char*, const std::string& tag, const std::vector<TermValue>& values) {
    for (const TermValue& each : values) events.scalar(tag + each.name, step, each.value);
  }
  void operator()(const char*, const std::string& tag, const std::vector<ClippedGroup>& groups) {
    for (const ClippedGroup& group : groups) {
      events.scalar(tag + "norm/" + group.pattern, step, group.norm);
      events.scalar(tag + "clip_coefficient/" + group.pattern, step, group.coefficient);
    }
  }
};

// The rows before a resume, without those of later steps, which the resume makes obsolete.
std::vector<MetricRow> kept_rows(const MetricsOptions& options) {
  std::vector<MetricRow> rows;
  if (options.first_step == 0 || !fs::exists(options.json_log)) return rows;
  for (auto& row : read_metrics(options.json_log))
    if (row.step <= options.first_step) rows.push_back(std::move(row));
  return rows;
}

using OpenFile = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

// Two runs would lose each other's rows. A write lock needs write permission, which flock() does not; a read
// lock would keep users out of their own log.
void keep_others_out(std::FILE* log, const fs::path& file) {
  struct flock whole {};
  whole.l_type = F_WRLCK, whole.l_whence = SEEK_SET;
  if (!log || ::fcntl(::fileno(log), F_OFD_SETLK, &whole) == 0 || (errno != EAGAIN && errno != EACCES))
    return;
  if (::fcntl(::fileno(log), F_OFD_GETLK, &whole) != 0 || whole.l_type != F_WRLCK) return;
  isograd::refuse(file.string(), "the log of a run that is under way", "a file of this run alone",
                  "Wait for that run, or name another file in run.json_log");
}

}  // namespace

std::string to_json_line(const MetricRow& row) {
  nlohmann::ordered_json json = {{"step", row.step}};
  each_field(row, ToJson{json});
  if (!row.expert_loads.empty()) json["experts"] = experts_json(row.expert_loads, row.dead);
  return json.dump() + "\n";
}

std::vector<MetricRow> read_metrics(const fs::path& file) {
  const std::string text = read_file(file, UINT64_MAX);  // rows, as many as there are
  std::vector<MetricRow> rows;
  std::size_t number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    if (end == std::string::npos) break;  // incomplete line of a killed run: that step was not logged
    ++number;
    const auto refuse = [&](const std::string& found) {
      isograd::refuse(fmt::format("{}:{}", file.string(), number), found,
                      "metrics of an earlier run, one JSON object a line",
                      "Move that file away or name another one in run.json_log");
    };
    try {
      const auto [json, problem] = parse_json(std::string_view(text).substr(begin, end - begin));
      if (!problem.empty()) refuse(problem);
      MetricRow row;
      row.step = json.at("step").get<std::int64_t>();
      each_field(row, FromJson{json});
      if (const auto experts = json.find("experts"); experts != json.end())
        if (const std::string trouble = read_experts(*experts, row.expert_loads, row.dead); !trouble.empty())
          refuse(trouble);
      rows.push_back(row);
    } catch (const nlohmann::json::exception& error) {
      refuse(error.what());
    }
    begin = end + 1;
  }
  return rows;
}

Metrics::Metrics(const MetricsOptions& options)
    : options_(options),
      rows_(kept_rows(options)),
      events_(options.events_directory, options.first_step + 1) {
  const fs::path& file = options_.json_log;
  check_replaceable(file);
  keep_others_out(OpenFile(std::fopen(file.c_str(), "r+be"), std::fclose).get(), file);
  if (file.has_parent_path()) make_folders(file.parent_path());
  std::string text;
  for (const auto& row : rows_) text += to_json_line(row);
  write_file(file, text);  // whole or not at all: a kill here does not cost the earlier rows
  OpenFile log(std::fopen(file.c_str(), "abe"), std::fclose);
  if (!log) cannot_write(file);
  keep_others_out(log.get(), file);
  log_ = log.release();
  for (const auto& row : rows_) idle_.step(row.expert_loads);
}

Metrics::~Metrics() {
  if (log_) std::fclose(log_);
}

void Metrics::append(MetricRow row) {
  each_field(row, ToEvents{events_, row.step});
  for (const ExpertLoad& load : row.expert_loads)
    events_.scalar(fmt::format("experts/max_over_mean/layer_{}", load.layer), row.step, load.max_over_mean());
  if (!row.expert_loads.empty())
    events_.scalar("experts/dead", row.step, static_cast<double>(row.dead.count()));
  const std::string line = to_json_line(row);
  rows_.push_back(std::move(row));
  if (std::fwrite(line.data(), 1, line.size(), log_) != line.size() || std::fflush(log_) != 0)
    cannot_write(options_.json_log);
  require_name(log_, options_.json_log);
  events_.flush();
}

std::optional<double> Metrics::perplexity_of(double loss) const {
  return options_.perplexity ? std::optional(std::exp(loss)) : std::nullopt;
}

void Metrics::step(const StepEvent& event) {
  const StepReport& report = event.report;
  idle_.step(event.expert_loads);
  append({.step = event.step,
          .loss = report.loss,
          .perplexity = perplexity_of(report.loss),
          .norm = report.norm,
          .clip_coefficient = report.clip_coefficient,
          .learning_rate = event.learning_rate,
          .tokens = report.step_counts.tokens,
          .targets = report.step_counts.targets,
          .tokens_per_second = event.tokens_per_second,
          .mfu = event.mfu,
          .seconds = event.seconds,
          .exposed_seconds = event.exposed_seconds,
          .part_norms = report.part_norms,
          .clipped = event.clipped,
          .bytes_across_hosts = event.bytes_across_hosts,
          .updated = report.updated,
          .expert_loads = event.expert_loads,
          .dead = event.expert_loads.empty() ? DeadExperts() : idle_.dead()});
}

void Metrics::evaluation(const Evaluation& evaluation) {
  MetricRow row{.step = evaluation.step, .figures = evaluation.figures};
  if (evaluation.targets > 0) {
    row.validation_loss = evaluation.loss;
    row.validation_perplexity = perplexity_of(evaluation.loss);
    row.validation_targets = evaluation.targets;
  }
  // A resume may repeat the evaluation that the log ends with.
  if (!rows_.empty() && to_json_line(rows_.back()) == to_json_line(row)) return;
  append(std::move(row));
}

std::vector<Chart> training_charts(const std::vector<MetricRow>& rows, double baseline,
                                   const ChartWords& words) {
  const auto series = [&](std::string name, auto field) {
    Series result{.name = std::move(name), .points = {}};
    for (const auto& row : rows)
      if (row.*field) result.points.push_back({static_cast<double>(row.step), *(row.*field)});
    return result;
  };
  const auto chart = [](const char* title, const std::string& unit, Series shown, bool smooth) {
    return Chart{.title = title,
                 .x_label = "step",
                 .y_label = unit,
                 .series = {std::move(shown)},
                 .from_zero = true,
                 .smooth = smooth};
  };
  Chart loss = chart("Loss", words.unit, series("training", &MetricRow::loss), true);
  loss.from_zero = false;
  if (auto validation = series("validation", &MetricRow::validation_loss); !validation.points.empty())
    loss.series.push_back(std::move(validation));
  if (baseline > 0) loss.marks = {{words.baseline, baseline}};
  return {std::move(loss), chart("Gradient norm", "before clipping", series("norm", &MetricRow::norm), true),
          chart("Throughput", words.tokens + "/s, all ranks",
                series(words.tokens + "/s", &MetricRow::tokens_per_second), true),
          chart("Learning rate", "", series("learning rate", &MetricRow::learning_rate), false)};
}

std::vector<const MetricRow*> rows_with_loads(const std::vector<MetricRow>& rows) {
  LoadRows found;
  const auto same = [](const MetricRow& a, const MetricRow& b) {
    return std::ranges::equal(a.expert_loads, b.expert_loads, [](const ExpertLoad& x, const ExpertLoad& y) {
      return x.layer == y.layer && x.choices.size() == y.choices.size();
    });
  };
  for (auto row = rows.rbegin(); row != rows.rend(); ++row)
    if (!row->expert_loads.empty() && (found.empty() || same(*row, *found.front()))) found.push_back(&*row);
  std::reverse(found.begin(), found.end());
  return found;
}

Chart load_chart(const LoadRows& rows) {
  constexpr std::size_t kMostCurves = 6;
  Chart chart{.title = "Load of experts",
              .x_label = "step",
              .y_label = "most chosen over mean",
              .series = {},
              .marks = {{"even", 1}}};
  const std::size_t layers = rows.back()->expert_loads.size();
  if (layers <= kMostCurves)
    for (const ExpertLoad& load : rows.back()->expert_loads)
      chart.series.push_back({.name = fmt::format("layer {}", load.layer), .points = {}});
  else
    chart.series = {{.name = "highest of the layers", .points = {}}, {.name = "their median", .points = {}}};
  for (const MetricRow* row : rows) {
    std::vector<double> values;
    for (const ExpertLoad& load : row->expert_loads) values.push_back(load.max_over_mean());
    if (layers > kMostCurves) {
      std::sort(values.begin(), values.end());
      values = {values.back(), values[values.size() / 2]};
    }
    for (std::size_t i = 0; i < values.size(); ++i)
      chart.series[i].points.push_back({static_cast<double>(row->step), values[i]});
  }
  return chart;
}

ReportTable load_table(const LoadRows& rows) {
  const MetricRow &first = *rows.front(), &end = *rows.back();
  const std::size_t recent = std::min<std::size_t>(rows.size(), kDeadAfter);
  ReportTable table{
      .title = "Experts by layer",
      .summary = fmt::format(
          "The most chosen expert's choices over the mean of all; the last columns are of the last "
          "{} logged steps together, with an even share as 1. Dead experts: {}.",
          recent, dead_in_words(end)),
      .columns = {"layer", fmt::format("step {}", first.step), fmt::format("step {}", end.step),
                  fmt::format("last {}", recent), "least chosen", "most chosen", "without a token"},
      .rows = {}};
  for (std::size_t layer = 0; layer < end.expert_loads.size(); ++layer) {
    std::vector<double> shares(end.expert_loads[layer].choices.size());
    for (const MetricRow* row : std::span(rows).last(recent))
      for (std::size_t e = 0; e < shares.size(); ++e)
        shares[e] += static_cast<double>(row->expert_loads[layer].choices[e]);
    const double all = std::accumulate(shares.begin(), shares.end(), 0.0);
    std::string dead;
    for (std::size_t e = 0; e < shares.size(); ++e) {
      if (shares[e] == 0) dead += fmt::format("{}{}", dead.empty() ? "" : ", ", e);
      shares[e] *= all > 0 ? static_cast<double>(shares.size()) / all : 0;
    }
    const auto least = std::ranges::min_element(shares), most = std::ranges::max_element(shares);
    const auto named = [&](const auto& which) {
      return fmt::format("expert {} ({:.2f})", which - shares.begin(), *which);
    };
    table.rows.push_back({std::to_string(end.expert_loads[layer].layer),
                          fmt::format("{:.2f}", first.expert_loads[layer].max_over_mean()),
                          fmt::format("{:.2f}", end.expert_loads[layer].max_over_mean()),
                          fmt::format("{:.2f}", *most), named(least), named(most),
                          dead.empty() ? "none" : dead});
  }
  return table;
}

std::string last_load(const std::vector<ExpertLoad>& loads) {
  const auto most = std::ranges::max_element(loads, {}, &ExpertLoad::max_over_mean);
  return fmt::format("at most {:.2f} of the mean (layer {})", most->max_over_mean(), most->layer);
}

std::string dead_in_words(const MetricRow& row) {
  const std::string steps = fmt::format("in the last {} logged steps", row.dead.steps);
  if (row.dead.count() == 0) return "none, each had tokens " + steps;
  return fmt::format("{}, without a token {}", name_dead(row.dead, row.expert_loads), steps);
}

// ---- loads of experts ----

namespace {

constexpr std::int64_t kMostChoices = std::int64_t{1} << 53;  // of an expert: exact as fp64

// Integers in [0, below); nothing where there is anything else.
std::vector<std::int64_t> choices_below(const nlohmann::json& json, std::int64_t below, bool& fit) {
  std::vector<std::int64_t> values;
  fit = fit && json.is_array();
  for (std::size_t i = 0; fit && i < json.size(); ++i) {
    fit = json[i].is_number_integer();
    if (fit) values.push_back(json[i].get<std::int64_t>());
    fit = fit && values.back() >= 0 && values.back() < below;
  }
  return values;
}

bool ascending(const std::vector<std::int64_t>& values) {
  return std::adjacent_find(values.begin(), values.end(), std::greater_equal<>()) == values.end();
}

}  // namespace

double ExpertLoad::max_over_mean() const {
  const double all = std::accumulate(choices.begin(), choices.end(), 0.0);
  if (all == 0) return std::numeric_limits<double>::quiet_NaN();
  const auto most = static_cast<double>(*std::max_element(choices.begin(), choices.end()));
  return most * static_cast<double>(choices.size()) / all;
}

std::size_t DeadExperts::count() const {
  std::size_t count = 0;
  for (const auto& experts : by_layer) count += experts.size();
  return count;
}

std::string name_dead(const DeadExperts& dead, const std::vector<ExpertLoad>& loads, std::size_t most) {
  std::string text;
  std::size_t named = 0;
  for (std::size_t layer = 0; layer < dead.by_layer.size() && named < most; ++layer) {
    const auto& experts = dead.by_layer[layer];
    const std::size_t here = std::min(experts.size(), most - named);
    if (here > 0) text += fmt::format("{}layer {}: ", text.empty() ? "" : "; ", loads.at(layer).layer);
    for (std::size_t i = 0; i < here; ++i)
      text += fmt::format("{}{}", i == 0 ? "" : i + 1 == experts.size() ? " and " : ", ", experts[i]);
    named += here;
  }
  if (dead.count() > named) text += fmt::format(" and {} more", dead.count() - named);
  return text.empty() ? "none" : text;
}

void IdleExperts::step(const std::vector<ExpertLoad>& loads) {
  if (loads.empty()) return;
  bool same = loads.size() == layers_.size();
  for (std::size_t i = 0; same && i < loads.size(); ++i)
    same = loads[i].layer == layers_[i] && loads[i].choices.size() == idle_[i].size();
  if (!same) {  // another model's log
    steps_ = 0;
    layers_.clear(), idle_.clear();
    for (const ExpertLoad& load : loads) {
      layers_.push_back(load.layer);
      idle_.emplace_back(load.choices.size());
    }
  }
  ++steps_;
  for (std::size_t i = 0; i < loads.size(); ++i)
    for (std::size_t e = 0; e < idle_[i].size(); ++e)
      idle_[i][e] = loads[i].choices[e] > 0 ? 0 : idle_[i][e] + 1;
}

DeadExperts IdleExperts::dead() const {
  DeadExperts dead{.steps = std::min(steps_, kDeadAfter)};
  for (const auto& idle : idle_) {
    auto& experts = dead.by_layer.emplace_back();
    for (std::size_t e = 0; e < idle.size(); ++e)
      if (idle[e] >= dead.steps) experts.push_back(static_cast<std::int64_t>(e));
  }
  return dead;
}

nlohmann::ordered_json experts_json(const std::vector<ExpertLoad>& loads, const DeadExperts& dead) {
  nlohmann::ordered_json json;
  for (const ExpertLoad& load : loads) {
    const double ratio = load.max_over_mean();
    json["layers"].push_back(load.layer);
    json["max_over_mean"].push_back(
        std::isfinite(ratio) ? nlohmann::ordered_json(std::round(ratio * 1e4) / 1e4) : nullptr);
    json["choices"].push_back(load.choices);
  }
  json["dead"] = dead.by_layer;
  json["dead_steps"] = dead.steps;
  return json;
}

std::string read_experts(const nlohmann::json& json, std::vector<ExpertLoad>& loads, DeadExperts& dead) {
  constexpr const char* kMisfit = "loads of experts that do not fit together";
  const nlohmann::json &choices = json.at("choices"), &idle = json.at("dead");
  bool fit = choices.is_array() && idle.is_array();
  const auto layers = choices_below(json.at("layers"), kMostChoices, fit);
  fit = fit && !layers.empty() && ascending(layers) && layers.size() == choices.size() &&
        layers.size() == idle.size();
  for (std::size_t i = 0; fit && i < layers.size(); ++i) {
    loads.push_back({.layer = layers[i], .choices = choices_below(choices[i], kMostChoices, fit)});
    const std::size_t experts = loads.back().choices.size();
    dead.by_layer.push_back(choices_below(idle[i], static_cast<std::int64_t>(experts), fit));
    fit = fit && experts > 0 && ascending(dead.by_layer.back());
  }
  const nlohmann::json& steps = json.at("dead_steps");
  fit = fit && steps.is_number_integer();
  if (fit) dead.steps = steps.get<std::int64_t>();
  return fit && dead.steps >= 0 ? std::string() : kMisfit;
}

}  // namespace isograd
