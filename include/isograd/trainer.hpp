// Trainer: a whole run from a configuration, with validation, checkpoints and reports around its steps.
#pragma once

#include "isograd/error.hpp"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "isograd/optimizer.hpp"
#include "isograd/step.hpp"
#include "isograd/world.hpp"

namespace isograd {

struct RunConfig;  // src/train/config.hpp
class Task;        // src/train/task.hpp: the data and the family of models of the run
class TaskModel;
class Layout;

// For a layer with experts: how often tokens chose each, over all ranks and micro-batches of a step.
struct ExpertLoad {
  std::int64_t layer = 0;
  std::vector<std::int64_t> choices{};  // by expert
  double max_over_mean() const;         // 1 where all get the same; NaN without a choice
};

// The results of one step. The same on all ranks, except `seconds`.
struct StepEvent {
  std::int64_t step = 0;   // steps made, this one included
  std::int64_t total = 0;  // steps of the whole run
  StepReport report;
  double learning_rate = 0;
  double seconds = 0;              // wall clock of this step on this rank, with reading data
  double exposed_seconds = 0;      // part of `seconds`: communication that no computation hid
  double tokens_per_second = 0;    // of all ranks together
  std::optional<double> mfu = {};  // model FLOPs utilisation, 0 to 1; absent where the task counts no FLOPs
  // By layer with experts, ascending. Empty: there is none, or the step had no tokens or was not finite.
  std::vector<ExpertLoad> expert_loads{};
  // For each of train.clip_groups, then the others. Empty: no groups, or nothing was updated.
  std::vector<ClippedGroup> clipped{};
  // Bytes that all ranks together sent between hosts in this step; absent with one host.
  std::optional<std::int64_t> bytes_across_hosts{};
};

// A table for the report, e.g. verify's parity table. Cells are text; the report escapes them.
struct ReportTable {
  std::string title;
  std::string summary;  // one line above the table, also printed at the end of the run
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;
  bool passed = true;      // false: the run ends with exit status 1
  std::string headline{};  // at the top of the report in place of `summary`, for a reader who reads no more
};

// The run after its loop has ended; valid during on_finish only.
struct FinishedRun {
  const RunConfig& config;
  World& world;
  const Task& task;
  TaskModel& model;
  const Layout* placed;  // set where ranks hold one model together (model parallel); null: whole
  std::function<void(const std::string&)> say = {};  // prints a line of progress; set on rank 0 only
  std::function<bool()> interrupted = {};  // true: a signal asks this rank to stop; leave out unfinished work
  double step_seconds = 0;                 // mean over the run's steps; 0: no step was made
  std::int64_t micro_batches = 0;          // the most of one rank in the last step
};

// The run after a step's update. The model is whole while the layout's whole_parameters() are held.
struct RunningRun {
  FinishedRun run;
  DataParallel& layout;
  std::int64_t step;                // steps made
  const ForwardLossTerms& forward;  // the forward that the run's steps differentiate
  const LookAhead& look_ahead;      // StepOptions::look_ahead of the run's steps
};

// All optional. Called on every rank, in this order; an exception ends the run on all ranks.
struct TrainerHooks {
  // Wraps the forward that a step differentiates (e.g. your own loss, or a planted fault).
  std::function<ForwardLossTerms(ForwardLossTerms)> wrap_forward;
  std::function<void(const StepEvent&)> on_step;
  // After each step whose number verify.every or verify.checksums_every divides. Collective; must not change
  // the model. Returns why the run must stop, the same on every rank; empty: continue.
  std::function<std::string(RunningRun&)> check;
  std::function<void(const Evaluation&)> on_evaluation;
  std::function<void(const std::filesystem::path&)> on_checkpoint;
  // After the last step, unless stopped or diverged. May use collectives. Rank 0's tables go into the report.
  std::function<std::vector<ReportTable>(FinishedRun&)> on_finish;
};

struct Outcome {
  enum class End {
    kFinished,  // all steps made
    kStopped,   // a signal asked for it: saved after the same step on all ranks; an orderly end
    kDiverged,  // a loss or gradient that is not finite, with train.on_non_finite = "stop": not saved
    kRefuted,   // TrainerHooks::check found the run to be wrong: not saved
  } end = End::kFinished;
  // A signal other than Ctrl-C ended it before it was finished, and the same command goes on
  // (checkpoint.resume = "auto").
  bool again = false;
  std::int64_t steps = 0;    // made, with those before a resume
  std::int64_t skipped = 0;  // refused because not finite (train.on_non_finite = "skip")
  std::string not_finite;    // what was not finite in the last such step, and where; empty: not known
  std::int64_t empty = 0;    // steps without a valid target since the start or resume
  double loss = 0;           // of the last step
  std::optional<double> validation_loss;  // absent without validation documents
  std::vector<TermValue> figures;         // of the last evaluation
  double baseline = 0;  // loss without learning, from the task: e.g. the entropy of its tokens
  double exposed = 0;   // fraction of this rank's step time spent in communication that was not hidden
  // For context parallelism: a step's highest cost of a ring rank over the mean one.
  struct Balance {
    double mean = 1, worst = 1;  // over the micro-batches
  };
  std::optional<Balance> balance;  // absent without context ranks
  // Bytes that this rank exchanged with other ranks' experts in the last step, with gradients.
  struct Sent {
    std::int64_t bytes = 0, by_formula = 0;
  };
  std::optional<Sent> to_experts;    // with run.memory and parallel.ep
  std::optional<double> mfu;         // over the steps of this run
  double tokens_per_second = 0;      // over the steps of this run, all ranks, without evaluations and saving
  std::string sample;                // generated text, with the prompt; rank 0 only
  std::filesystem::path checkpoint;  // the last complete one; empty: none
  std::filesystem::path report;      // rank 0 only
  std::vector<ReportTable> tables;   // from on_finish; rank 0 only

  // 0: finished or stopped in order. 1: diverged, refuted by a check, or a table did not pass. kStatusAgain:
  // `again`.
  int exit_status() const;
};

// Every rank constructs one with its World and calls run() once. Errors are thrown on every rank, also for a
// run.directory with another run in it. The first SIGINT, SIGTERM or SIGHUP asks for an orderly stop, another
// one a second or more later ends the process. SIGUSR1 and SIGUSR2 do what run.on_signal says.
class Trainer {
 public:
  Trainer(const RunConfig& config, World& world, TrainerHooks hooks = {});
  ~Trainer();
  Outcome run();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace isograd
