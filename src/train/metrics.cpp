#include "train/metrics.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <nlohmann/json.hpp>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/paths.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

template <typename Number>
void put(nlohmann::ordered_json& json, const char* name, const std::optional<Number>& value) {
  if (!value) return;
  if constexpr (std::is_same_v<Number, double>) {
    if (!std::isfinite(*value)) {
      json[name] = nullptr;  // JSON has no NaN and no infinity
      return;
    }
  }
  json[name] = *value;
}

template <typename Number>
void get(const nlohmann::json& json, const char* name, std::optional<Number>& value) {
  const auto found = json.find(name);
  if (found == json.end()) return;
  if (found->is_null())
    value = std::numeric_limits<Number>::has_quiet_NaN ? std::numeric_limits<Number>::quiet_NaN() : Number{};
  else
    value = found->get<Number>();
}

std::vector<TermValue> named_values(const nlohmann::json& json) {
  std::vector<TermValue> values;
  for (const auto& [name, value] : json.items())
    values.push_back({name, value.is_null() ? std::nan("") : value.get<double>()});
  return values;
}

// The rows before a resume, without those of later steps, which the resume makes obsolete.
std::vector<MetricRow> kept_rows(const MetricsOptions& options) {
  std::vector<MetricRow> rows;
  if (options.first_step == 0 || !fs::exists(options.json_log)) return rows;
  for (auto& row : read_metrics(options.json_log))
    if (row.step <= options.first_step) rows.push_back(std::move(row));
  return rows;
}

using OpenFile = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

// Two runs that write one log would lose each other's rows, so the log is locked where files can be locked.
// A write lock needs write permission, which flock() does not; a read lock would keep users out of their
// own log.
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
  nlohmann::ordered_json json;
  json["step"] = row.step;
  put(json, "loss", row.loss);
  put(json, "perplexity", row.perplexity);
  put(json, "norm", row.norm);
  put(json, "clip_coefficient", row.clip_coefficient);
  for (const TermValue& part : row.part_norms)
    put(json["norms"], part.name.c_str(), std::optional(part.value));
  for (const ClippedGroup& group : row.clipped) {
    auto& own = json["clip_groups"][group.pattern];
    put(own, "norm", std::optional(group.norm));
    put(own, "clip_coefficient", std::optional(group.coefficient));
  }
  put(json, "learning_rate", row.learning_rate);
  put(json, "tokens", row.tokens);
  put(json, "targets", row.targets);
  put(json, "tokens_per_second", row.tokens_per_second);
  put(json, "mfu", row.mfu);
  put(json, "seconds", row.seconds);
  put(json, "exposed_seconds", row.exposed_seconds);
  put(json, "bytes_across_hosts", row.bytes_across_hosts);
  put(json, "updated", row.updated);
  put(json, "validation_loss", row.validation_loss);
  put(json, "validation_perplexity", row.validation_perplexity);
  put(json, "validation_targets", row.validation_targets);
  if (!row.expert_loads.empty()) json["experts"] = experts_json(row.expert_loads, row.dead);
  for (const TermValue& figure : row.figures)
    put(json["figures"], figure.name.c_str(), std::optional(figure.value));
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
      get(json, "loss", row.loss);
      get(json, "perplexity", row.perplexity);
      get(json, "norm", row.norm);
      get(json, "clip_coefficient", row.clip_coefficient);
      if (const auto norms = json.find("norms"); norms != json.end()) row.part_norms = named_values(*norms);
      if (const auto groups = json.find("clip_groups"); groups != json.end())
        for (const auto& [pattern, own] : groups->items()) {
          std::optional<double> norm, coefficient;
          get(own, "norm", norm), get(own, "clip_coefficient", coefficient);
          row.clipped.push_back({pattern, norm.value_or(0), coefficient.value_or(1)});
        }
      get(json, "learning_rate", row.learning_rate);
      get(json, "tokens", row.tokens);
      get(json, "targets", row.targets);
      get(json, "tokens_per_second", row.tokens_per_second);
      get(json, "mfu", row.mfu);
      get(json, "seconds", row.seconds);
      get(json, "exposed_seconds", row.exposed_seconds);
      get(json, "bytes_across_hosts", row.bytes_across_hosts);
      get(json, "updated", row.updated);
      get(json, "validation_loss", row.validation_loss);
      get(json, "validation_perplexity", row.validation_perplexity);
      get(json, "validation_targets", row.validation_targets);
      if (const auto experts = json.find("experts"); experts != json.end())
        if (const std::string trouble = read_experts(*experts, row.expert_loads, row.dead); !trouble.empty())
          refuse(trouble);
      if (const auto figures = json.find("figures"); figures != json.end())
        row.figures = named_values(*figures);
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
  const auto perplexity = perplexity_of(report.loss);
  events_.scalar("train/loss", event.step, report.loss);
  if (perplexity) events_.scalar("train/perplexity", event.step, *perplexity);
  events_.scalar("train/norm", event.step, report.norm);
  events_.scalar("train/clip_coefficient", event.step, report.clip_coefficient);
  for (const TermValue& part : report.part_norms)
    events_.scalar("train/norm/" + part.name, event.step, part.value);
  for (const ClippedGroup& group : event.clipped) {
    events_.scalar("train/norm/" + group.pattern, event.step, group.norm);
    events_.scalar("train/clip_coefficient/" + group.pattern, event.step, group.coefficient);
  }
  events_.scalar("train/learning_rate", event.step, event.learning_rate);
  events_.scalar("speed/tokens_per_second", event.step, event.tokens_per_second);
  if (event.mfu) events_.scalar("speed/mfu", event.step, *event.mfu);
  events_.scalar("speed/seconds", event.step, event.seconds);
  events_.scalar("speed/exposed_seconds", event.step, event.exposed_seconds);
  if (event.bytes_across_hosts)
    events_.scalar("speed/bytes_across_hosts", event.step, static_cast<double>(*event.bytes_across_hosts));
  idle_.step(event.expert_loads);
  const DeadExperts dead = event.expert_loads.empty() ? DeadExperts() : idle_.dead();
  for (const ExpertLoad& load : event.expert_loads)
    events_.scalar(fmt::format("experts/max_over_mean/layer_{}", load.layer), event.step,
                   load.max_over_mean());
  if (!event.expert_loads.empty())
    events_.scalar("experts/dead", event.step, static_cast<double>(dead.count()));
  append({.step = event.step,
          .loss = report.loss,
          .perplexity = perplexity,
          .norm = report.norm,
          .clip_coefficient = report.clip_coefficient,
          .learning_rate = event.learning_rate,
          .tokens = report.census.tokens,
          .targets = report.census.targets,
          .tokens_per_second = event.tokens_per_second,
          .mfu = event.mfu,
          .seconds = event.seconds,
          .exposed_seconds = event.exposed_seconds,
          .part_norms = report.part_norms,
          .clipped = event.clipped,
          .bytes_across_hosts = event.bytes_across_hosts,
          .updated = report.updated,
          .expert_loads = event.expert_loads,
          .dead = dead});
}

void Metrics::evaluation(const Evaluation& evaluation) {
  MetricRow row{.step = evaluation.step, .figures = evaluation.figures};
  if (evaluation.targets > 0) {
    row.validation_loss = evaluation.loss;
    row.validation_perplexity = perplexity_of(evaluation.loss);
    row.validation_targets = evaluation.targets;
    events_.scalar("validation/loss", evaluation.step, evaluation.loss);
    if (row.validation_perplexity)
      events_.scalar("validation/perplexity", evaluation.step, *row.validation_perplexity);
  }
  for (const TermValue& figure : evaluation.figures)
    events_.scalar("validation/" + figure.name, evaluation.step, figure.value);
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
  Chart loss{.title = "Loss",
             .x_label = "step",
             .y_label = words.unit,
             .series = {series("training", &MetricRow::loss)},
             .smooth = true};
  if (auto validation = series("validation", &MetricRow::validation_loss); !validation.points.empty())
    loss.series.push_back(std::move(validation));
  if (baseline > 0) loss.marks = {{words.baseline, baseline}};
  return {std::move(loss),
          {.title = "Gradient norm",
           .x_label = "step",
           .y_label = "before clipping",
           .series = {series("norm", &MetricRow::norm)},
           .from_zero = true,
           .smooth = true},
          {.title = "Throughput",
           .x_label = "step",
           .y_label = words.tokens + "/s, all ranks",
           .series = {series(words.tokens + "/s", &MetricRow::tokens_per_second)},
           .from_zero = true,
           .smooth = true},
          {.title = "Learning rate",
           .x_label = "step",
           .y_label = "",
           .series = {series("learning rate", &MetricRow::learning_rate)},
           .from_zero = true}};
}

}  // namespace isograd
