// Task: data and the family of models that learns from it, which is all that the trainer, checkpoints, resume
// and verify know of a kind of run. A new kind is a subclass of each of the two classes below and a TaskKind
// (config_table.hpp).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "isograd/context_parallel.hpp"
#include "isograd/data.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/loss.hpp"
#include "isograd/model.hpp"
#include "isograd/step.hpp"
#include "isograd/trainer.hpp"
#include "report/report.hpp"
#include "train/build.hpp"
#include "train/config.hpp"

namespace isograd {

// A further loss term in plain code: Σ over micro-batches of `sum` / what `mean` counts in the step.
struct PlainTerm {
  std::string name;
  double weight = 1;
  Mean mean = Mean::kNone;  // kNone, kTargets or kTokens
  // Knows the whole step, before the first sum() of it. Not given: needs nothing.
  std::function<void(const MicroBatches& whole)> prepare{};
  std::function<at::Tensor(const Batch& batch)> sum{};
};

// One model of the task's family. Functions that it returns are valid as long as it lives.
class TaskModel {
 public:
  virtual ~TaskModel() = default;
  virtual NamedTensors named() = 0;  // parameters; tied ones once
  // State that forward changes and that all ranks must have alike: a running mean, a queue.
  virtual NamedTensors buffers() const { return {}; }
  // Writes the run's initial value of a parameter into zero-filled `values` of its shape.
  virtual void initialize(const std::string& name, at::Tensor& values) const = 0;
  // The model as units for layouts that shard parameters. From now on its blocks run inside their units.
  virtual ModelUnits make_units() = 0;
  // Sums of the losses of a micro-batch, not yet inside the root's unit.
  virtual ForwardLossTerms loss() = 0;
  // Plain versions, for verify, of the terms behind the first one, in loss()'s order.
  virtual std::vector<PlainTerm> plain_terms() { return {}; }
  // The input of the loss, [T_local, ...]: logits, predictions. Differentiable.
  virtual at::Tensor outputs(const Batch& batch) = 0;
  // Moves parameters that have values; those on the meta device are created where the layout is told to.
  virtual void to(at::Device /*device*/) {}
  // config.json, model.safetensors and what else goes into a checkpoint. `weights`: those of named(), whole.
  virtual void write(const std::filesystem::path& directory, const TensorStream& weights) = 0;

  // ---- model parallelism ----
  // Placements of the whole model's parameters on a grid. Pure.
  virtual Layout::Named placements(const Grid& grid) = 0;
  // Keeps this rank's parts of the parameters and lets forward communicate. Collective; before a layout is
  // made, with the model's values the same on all ranks, or none.
  virtual Layout cut(const Mesh& mesh) = 0;
  // Attention over the mesh's context ranks; whole batches (the oracle's) still within one.
  virtual void attend_over(const Mesh& mesh) = 0;
  // The pipeline that steps go through, after cut(). Null: one stage.
  virtual const Pipeline* pipeline() const { return nullptr; }

  // ---- models with experts ----
  // Experts that are sharded along `ep`, and the number of this rank's layers that have them.
  struct ShardedExperts {
    std::int64_t experts = 0, hidden = 0, layers = 0;  // 0 experts: it has none
  };
  virtual ShardedExperts sharded_experts() const { return {}; }
  // Collects statistics of a whole step before its first forward, by passes of `forward`. Null: none are
  // needed.
  virtual LookAhead look_ahead(const ForwardLossTerms& /*forward*/) { return {}; }
  // Counts choices of experts in training forwards from now on: StepOptions::counters. Null: it has none.
  virtual Counters counters() { return {}; }
  // Loads from such counts summed over the ranks; empty if all are 0.
  virtual std::vector<ExpertLoad> expert_loads(const std::vector<double>& /*counters*/) const { return {}; }
  // Called after each update: moves what no gradient moves, by the step's counters of all ranks. Collective.
  virtual void after_update(const std::vector<double>& /*counters*/, DataParallel& /*layout*/) {}
  // The first non-finite tensor since the last call, e.g. "the router logits of layer 3". Empty: not known.
  virtual std::string take_not_finite() { return {}; }
  // DecoderLM::set_choice_of_experts(), where it has experts; false: it has none.
  virtual bool choose_experts(const DecoderLM::ChooseExperts&) { return false; }
};

// A model without values, which come one parameter at a time: no rank need ever hold all of them.
struct ModelToLayOut {
  std::shared_ptr<TaskModel> model{};
  FillValues fill{};
  std::function<void()> check_values{};  // for fill's error, before anything is made; null: there is none
};

// Human-readable facts of a task, and the facts on which the order of its data depends.
struct TaskFacts {
  std::string documents = "documents";  // what samples are called
  std::string tokens = "tokens";        // what they consist of
  std::string unit = "nats per token";  // of the loss
  bool perplexity = false;  // exp(loss) is one: the loss is a mean over tokens of the plain cross entropy
  std::string batch{}, micro_batch{};  // "8 packs of 512 tokens"
  std::int64_t train_documents = 0;
  std::int64_t validation_documents = 0;
  std::int64_t num_tokens = 0;
  std::string tokenizer{};  // TrainingState::tokenizer
  // Values of further keys, by name: a run in which they differ is not the one to be continued.
  std::map<std::string, std::string> order{};
};

// The loss of what has learnt nothing, to compare with. Value 0: there is none.
struct Baseline {
  std::string name{};  // "unigram entropy"
  std::string of{};    // behind value and unit: "of the training text"
  double value = 0;
  bool of_training = true;  // comparable with the training loss; false: with the validation loss alone
};

// Results that a finished run shows, on rank 0.
struct Showing {
  struct Picture {
    std::string title, caption, html;
    double width = 0;  // in pixels, of one that is scrolled rather than scaled down
  };
  std::string text{};  // printed too
  std::vector<Picture> pictures{};
  std::vector<Chart> charts{};
  std::vector<ReportTable> tables{};  // `passed` is not read
  bool print_tables = false;          // at the end of the run too
  std::string early_end{};            // why the run ended before its last step, and how to continue
};

// Keys and their values, in order: the shape of a model.
using ShapeKeys = std::vector<std::pair<std::string, std::string>>;
// These keys of the configuration, separated by blanks.
ShapeKeys values_of(const RunConfig& config, const std::string& keys);

// The first term of TaskModel::loss() in plain code. Neither function given: the cross entropy of logits.
struct PlainLoss {
  std::string name;
  // The loss of each token: DeclaredLoss::per_token.
  std::function<at::Tensor(const Batch& batch, const at::Tensor& outputs)> per_token{};
  // A loss over the rows of all ranks, which is no sum over tokens: DeclaredLoss::global.
  std::function<at::Tensor(const at::Tensor& outputs, const at::Tensor& targets)> global{};
};

class Task {
 public:
  explicit Task(RunConfig config) : config_(std::move(config)) {}
  virtual ~Task() = default;
  const RunConfig& config() const { return config_; }
  std::uint64_t seed() const { return static_cast<std::uint64_t>(config_.run.seed); }
  // The same data under a configuration that splits or trains them differently; nothing is read again.
  virtual std::unique_ptr<Task> under(const RunConfig& config) const = 0;

  // ---- data ----
  std::unique_ptr<BatchLoader> make_loader(int rank, int size) const {
    return loader_of(/*training=*/true, rank, size);
  }
  // Its first step is the whole evaluation: at most train.evaluate_packs packs. Null: nothing is held out.
  std::unique_ptr<BatchLoader> make_validation_loader(int rank, int size) const {
    return loader_of(/*training=*/false, rank, size);
  }
  // Options for splitting a micro-batch over context-parallel ranks: `causal` and `token_cost` of the model.
  virtual CutOptions cut_options() const { return {}; }
  // The model's attention heads and key heads, which Ulysses splits over ranks.
  virtual std::pair<std::int64_t, std::int64_t> heads() const { return {1, 1}; }
  virtual TaskFacts facts() const = 0;
  // Human-readable: the samples of step `step` (from 1), with the rank that takes each.
  std::string describe_step(std::int64_t step, int ranks) const;
  virtual Baseline baseline(Group& /*group*/) const { return {}; }  // collective
  // FLOPs of a step's forward and backward over all ranks (memory.hpp). 0: not counted.
  virtual double step_flops(const BatchLoader&, LoaderPosition) const { return 0; }

  // ---- model ----
  // Weights from model.load, or fresh ones by (run.seed, parameter name): the same on every rank.
  std::shared_ptr<TaskModel> make_model(at::ScalarType dtype) const;
  // A model of the same shape whose values, all 0, the caller overwrites.
  std::shared_ptr<TaskModel> make_blank_model(at::ScalarType dtype) const;
  // For a layout, with the weights of the checkpoint `directory`; empty: those of make_model(). ConfigError.
  virtual ModelToLayOut make_model_to_lay_out(const std::filesystem::path& directory) const;
  // On the meta device, in the shape of this run or of the checkpoint `directory`, with the latter's other
  // state.
  virtual std::shared_ptr<TaskModel> shape_model(const std::filesystem::path& directory,
                                                 at::ScalarType dtype) const = 0;
  // Shape of a checkpoint's model; empty: of this run's.
  virtual ShapeKeys shape(const std::filesystem::path& directory) const = 0;

  // ---- human-readable results ----
  // Figures of the model in addition to its validation loss, by name. Collective.
  virtual std::vector<TermValue> figures(TaskModel&, DataParallel&) const { return {}; }
  // On rank 0, with the whole model. `comparison`: outcome of the run to compare with, or null.
  virtual bool shows_model() const { return true; }  // by what it computes; else the model need not be whole
  virtual Showing show(TaskModel& model, const Outcome& outcome, const Outcome* comparison) const = 0;

  // ---- for verify ----
  virtual PlainLoss plain_loss() const = 0;
  // The same task with losses that keep nothing between steps. What they would have kept is computed from
  // `trained`, whole values of named(); null: from fresh ones.
  virtual std::unique_ptr<Task> repeatable(const std::vector<at::Tensor>* /*trained*/) const {
    return under(config());
  }
  // A step small enough to be verified while training: a short pack for each rank and one more, so that
  // counts differ and one rank accumulates; other samples at each `step`.
  RunConfig micro_sized(int ranks, std::int64_t step) const;

 private:
  virtual std::unique_ptr<BatchLoader> loader_of(bool training, int rank, int size) const = 0;
  // For describe_step(): all ranks, by rank 0's loader, or rank by rank.
  virtual std::string describe(const BatchLoader& loader, LoaderPosition at, int ranks) const;
  virtual std::string describe_rank(MicroBatches /*own*/, int /*rank*/) const { return {}; }
  // The weights of a directory, whose files are checked first. ConfigError.
  virtual FillValues open_weights(const std::filesystem::path& directory, at::ScalarType dtype) const = 0;
  ModelToLayOut to_fill(const std::filesystem::path& directory, at::ScalarType dtype) const;

  RunConfig config_;
};

// Makes the task of model.kind. Collective; ConfigError on every rank if the data is unusable.
std::unique_ptr<Task> make_task(const RunConfig& config, Group& group);

// Task::shape_model() of the run, reading no weights and only the data that it depends on.
std::shared_ptr<TaskModel> model_without_values(const RunConfig& config);

// The data position of step `step` of a run (from 1).
LoaderPosition position_of_step(const BatchLoader& loader, std::int64_t step);

// How the documents of a micro-batch are cut over the context ranks of `mesh`.
CutOptions cut_options(const Task& task, const Mesh& mesh);
// This rank's parts of the micro-batches that its context ranks share.
MicroBatches own_parts(const Task& task, const Mesh& mesh, MicroBatches micro_batches);

// ---- files of models that no other library knows ----

struct OwnFamily {
  const char* type;  // model_type of its config.json
  const char* run;   // whose checkpoints have such models, for messages: "a video run"
};

// One number of a shape, with its key in config.json.
struct ShapeField {
  std::string key;
  std::variant<std::int64_t*, double*, bool*> value;
};
using ShapeFields = std::vector<ShapeField>;

bool is_own_model(const std::filesystem::path& directory, const OwnFamily& family);  // by its config.json
void write_own_model(const std::filesystem::path& directory, const OwnFamily& family,
                     const ShapeFields& shape, const TensorStream& weights);
// ConfigError naming file and key where something is missing or does not fit.
void read_own_shape(const std::filesystem::path& directory, const OwnFamily& family,
                    const ShapeFields& shape);
// The values of model.safetensors, which must fit the parameters of `describe`, called once there are tensors
// for `layers` layers: a wrong shape must take no memory. ConfigErrors name file and tensor.
FillValues open_own_weights(const std::filesystem::path& directory, std::int64_t layers,
                            const std::function<NamedTensors()>& describe);

}  // namespace isograd
