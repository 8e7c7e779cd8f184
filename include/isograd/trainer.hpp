// Trainer: a whole run from a configuration: data, model, layout, optimizer, the loop around the step,
// validation, checkpoints, what people see. No rule of the law lives here; those are in Step.
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
class Task;        // src/train/task.hpp: the data and the family of models that the run is about
class TaskModel;
class Layout;

// Of a layer with experts: how often tokens chose each, over all ranks and micro-batches of a step.
struct ExpertLoad {
  std::int64_t layer = 0;
  std::vector<std::int64_t> choices{};  // by expert
  double max_over_mean() const;         // 1 where all get the same; NaN without a choice
};

// One step as seen from outside. The same on all ranks, except `seconds`.
struct StepEvent {
  std::int64_t step = 0;   // steps made, this one included
  std::int64_t total = 0;  // steps of the whole run
  StepReport report;
  double learning_rate = 0;
  double seconds = 0;            // wall clock of this step on this rank, reading data included
  double exposed_seconds = 0;    // of these: communication that no computation hid
  double tokens_per_second = 0;  // of all ranks together
  std::optional<double> mfu =
      {};  // model FLOPs utilisation, a part of 1; absent where the task counts no FLOPs
  // Of each layer with experts, ascending. Empty: there is none, or the step had no tokens or was not finite.
  std::vector<ExpertLoad> expert_loads{};
  // By each of train.clip_groups, then the others; empty: there are none, or nothing was updated.
  std::vector<ClippedGroup> clipped{};
  // Sent in this step from one host to another, by all ranks together; absent where there is one host.
  std::optional<std::int64_t> bytes_across_hosts{};
};

// Σ of the validation targets' losses over their number, over all ranks, without gradient.
struct Evaluation {
  std::int64_t step = 0;
  double loss = 0;                   // in the task's unit: nats per token, ...
  std::int64_t targets = 0;          // 0: nothing is held out, there are figures alone
  std::vector<TermValue> figures{};  // what else the task measures of the model
};

// A table for the report, e.g. verify's parity table. Cells are text; the report escapes them.
struct ReportTable {
  std::string title;
  std::string summary;  // one line above the table, also printed at the end of the run
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;
  bool passed = true;  // false: the run ends with exit status 1
};

// What a caller may look at when the loop has ended; valid during on_finish only.
struct FinishedRun {
  const RunConfig& config;
  World& world;
  const Task& task;
  TaskModel& model;
  const Layout* placed;  // where ranks hold the model together, what of it is whose; null: whole
  std::function<void(const std::string&)> say = {};  // a line among the run's progress; rank 0 alone has it
  std::function<bool()> interrupted =
      {};                   // whether a signal asks this rank to stop; what it cuts short is left out
  double step_seconds = 0;  // mean of the run's steps; 0: none was made
};

// What a check may look at after a step's update. The model is whole while whole_parameters() of the layout
// is held.
struct RunningRun {
  FinishedRun run;
  DataParallel& layout;
  std::int64_t step;                // steps made
  const ForwardLossTerms& forward;  // what the run's steps differentiate
  const LookAhead& look_ahead;      // StepOptions::look_ahead of the run's steps
};

// All optional. Called on every rank, in this order; a throw ends the run on all ranks.
struct TrainerHooks {
  // Wraps the forward pass that a step differentiates (a loss of one's own, a fault to be tested).
  std::function<ForwardLossTerms(ForwardLossTerms)> wrap_forward;
  std::function<void(const StepEvent&)> on_step;
  // After each step that verify.every or verify.checksums_every divides. Collective; the model must be left
  // as it is. Returns why the run must stop, the same text on every rank; empty when all is well.
  std::function<std::string(RunningRun&)> check;
  std::function<void(const Evaluation&)> on_evaluation;
  std::function<void(const std::filesystem::path&)> on_checkpoint;
  // After the last step of a run that was neither stopped nor diverged. May use collectives. Rank 0's tables
  // go into the report.
  std::function<std::vector<ReportTable>(FinishedRun&)> on_finish;
};

struct Outcome {
  enum class End {
    kFinished,  // all steps made
    kStopped,   // SIGINT, SIGTERM or SIGHUP: saved after the same step on all ranks; an orderly end
    kDiverged,  // a loss or gradient that is not finite, with train.on_non_finite = "stop": not saved
    kRefuted,   // TrainerHooks::check found the run to be wrong: not saved
  } end = End::kFinished;
  std::int64_t steps = 0;                 // made, those before a resume included
  std::int64_t skipped = 0;               // refused because not finite (train.on_non_finite = "skip")
  std::string not_finite;                 // what was not, in the last such step, and where; empty: not known
  std::int64_t empty = 0;                 // had no valid target since the start or resume
  double loss = 0;                        // of the last step
  std::optional<double> validation_loss;  // absent without validation documents
  std::vector<TermValue> figures;         // of the last evaluation
  double baseline = 0;  // loss of what has learnt nothing, as the task has it: the entropy of its tokens, ...
  double exposed = 0;   // share of the steps' time that communication took, not hidden; this rank
  // Of the cuts over context ranks: a step's highest cost of a ring rank over the mean one.
  struct Balance {
    double mean = 1, worst = 1;  // over the micro-batches
  };
  std::optional<Balance> balance;  // absent without context ranks
  // To other ranks' experts and back, gradients too, in the last step: this rank.
  struct Sent {
    std::int64_t bytes = 0, by_formula = 0;
  };
  std::optional<Sent> to_experts;    // of run.memory with parallel.ep
  std::optional<double> mfu;         // over the steps of this run
  double tokens_per_second = 0;      // over the steps of this run, all ranks, evaluations and saving left out
  std::string sample;                // generated text, prompt included; rank 0 only
  std::filesystem::path checkpoint;  // the last one complete; empty: none
  std::filesystem::path report;      // rank 0 only
  std::vector<ReportTable> tables;   // of on_finish; rank 0 only

  // 0: finished or stopped in order. 1: diverged, refuted by a check, or a table did not pass.
  int exit_status() const;
};

// Every rank constructs one with its World and calls run() once. Errors are thrown on every rank (where the
// group still works), of a run.directory with another run in it too. SIGINT, SIGTERM and SIGHUP are caught:
// the first asks for an orderly stop, a second one a second or more later ends the process at once.
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
