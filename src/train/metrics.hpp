// Machine-readable metrics of a run: JSON lines and TensorBoard event files. Rank 0 only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "isograd/trainer.hpp"
#include "report/event_file.hpp"
#include "report/report.hpp"

namespace isograd {

inline constexpr std::int64_t kDeadAfter = 50;  // logged steps without a token

struct DeadExperts {
  std::int64_t steps = 0;  // the last ones with loads, in which no token chose them: kDeadAfter or all
  std::vector<std::vector<std::int64_t>> by_layer{};  // as many as loads; experts ascending

  std::size_t count() const;
};

// "layer 2: 3 and 7; layer 5: 0", shortened by "and 12 more" if the list is long; "none" if it is empty.
std::string name_dead(const DeadExperts& dead, const std::vector<ExpertLoad>& loads, std::size_t most = 24);

// Counts the steps for which each expert has been idle.
class IdleExperts {
 public:
  void step(const std::vector<ExpertLoad>& loads);  // empty: the step has no counts
  DeadExperts dead() const;

 private:
  std::int64_t steps_ = 0;  // that had loads, of experts as they are now
  std::vector<std::int64_t> layers_{};
  std::vector<std::vector<std::int64_t>> idle_{};  // steps without a token, by layer and expert
};

// The value of "experts" in the JSON log. read_experts() returns a human-readable problem, or nothing.
nlohmann::ordered_json experts_json(const std::vector<ExpertLoad>& loads, const DeadExperts& dead);
std::string read_experts(const nlohmann::json& json, std::vector<ExpertLoad>& loads, DeadExperts& dead);

// A line of the JSON log. A step has all fields except the validation's, an evaluation `step` and those;
// perplexities and MFU where the task has them. What is not finite is null and read back as NaN.
struct MetricRow {
  std::int64_t step = 0;
  std::optional<double> loss = {};              // nats per token
  std::optional<double> perplexity = {};        // exp(loss)
  std::optional<double> norm = {};              // of the whole gradient, before clipping
  std::optional<double> clip_coefficient = {};  // what the gradient was multiplied by
  std::optional<double> learning_rate = {};
  std::optional<std::int64_t> tokens = {};   // of this step, over all ranks
  std::optional<std::int64_t> targets = {};  // those of them that carried loss
  std::optional<double> tokens_per_second = {};
  std::optional<double> mfu = {};              // model FLOPs utilisation, a part of 1 (memory.hpp)
  std::optional<double> seconds = {};          // of this step on rank 0, reading data included
  std::optional<double> exposed_seconds = {};  // of these: communication that no computation hid
  std::vector<TermValue> part_norms = {};      // by name: train.part_norms
  std::vector<ClippedGroup> clipped{};
  std::optional<std::int64_t> bytes_across_hosts = {};
  std::optional<bool> updated = {};
  std::optional<double> validation_loss = {};
  std::optional<double> validation_perplexity = {};
  std::optional<std::int64_t> validation_targets = {};
  std::vector<ExpertLoad> expert_loads = {};  // of this step, by layer; StepEvent
  DeadExperts dead = {};                      // by layer
  std::vector<TermValue> figures = {};        // further figures that the task measures, by name
};

std::string to_json_line(const MetricRow& row);  // ends in a line break

// Rows of a log, without a last incomplete line (of a killed run). ConfigError: a line that is no row.
std::vector<MetricRow> read_metrics(const std::filesystem::path& file);

struct MetricsOptions {
  std::filesystem::path json_log;  // its folder is created; ConfigError while another run writes to it
  std::filesystem::path events_directory;  // of TensorBoard; created
  std::int64_t first_step = 0;  // steps made before this run started; rows of later steps are dropped
  bool perplexity = false;      // exp(loss) is one
};

class Metrics {
 public:
  explicit Metrics(const MetricsOptions& options);
  ~Metrics();
  void step(const StepEvent& event);
  void evaluation(const Evaluation& evaluation);
  // All rows, including those from before a resume. The report draws them.
  const std::vector<MetricRow>& rows() const { return rows_; }

 private:
  void append(MetricRow row);
  std::optional<double> perplexity_of(double loss) const;
  MetricsOptions options_;
  std::vector<MetricRow> rows_;
  std::FILE* log_ = nullptr;
  EventFile events_;
  IdleExperts idle_;
};

// The names of a task's loss and tokens, and of the baseline.
struct ChartWords {
  std::string unit = "nats per token";
  std::string tokens = "tokens";
  std::string baseline = "unigram entropy";
};
// Loss with validation loss, norm, throughput and learning rate. `baseline` is marked in the first unless 0.
std::vector<Chart> training_charts(const std::vector<MetricRow>& rows, double baseline,
                                   const ChartWords& words = {});

// Rows with loads of the same layers and experts as the last such one; none: empty. The next two take at
// least one.
std::vector<const MetricRow*> rows_with_loads(const std::vector<MetricRow>& rows);
Chart load_chart(const std::vector<const MetricRow*>& rows);  // max over mean of layers, over time
ReportTable load_table(const std::vector<const MetricRow*>& rows);

// "at most 1.32 of the mean (layer 3)", and "none" or the names of experts.
std::string last_load(const std::vector<ExpertLoad>& loads);
std::string dead_in_words(const MetricRow& row);

}  // namespace isograd
