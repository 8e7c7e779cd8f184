// Pipeline parallelism: schedules as data, their execution, models in stages.
#pragma once

#include "isograd/error.hpp"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "isograd/batch.hpp"
#include "isograd/loss.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

struct PipelineAction {
  enum class Kind : std::uint8_t {
    kForward,
    kBackward,         // gradients of the stage's input and of its parameters
    kBackwardInputs,   // gradient of the stage's input; the parameters' follow
    kBackwardWeights,  // gradients of its parameters
    // Transfers to neighbouring stages' ranks. A send ends at once, a receive when the tensor is there.
    kSendOutput,
    kReceiveInput,
    kSendGradient,
    kReceiveGradient,
  };
  Kind kind = Kind::kForward;
  int stage = 0, micro_batch = 0;

  bool operator==(const PipelineAction&) const = default;
  bool is_transfer() const { return kind >= Kind::kSendOutput; }
};

// Stages 0 to stages - 1 in the order of the forward, each on one rank; a rank has one or more.
struct PipelineTable {
  std::string name;
  int stages = 1, micro_batches = 1;
  std::vector<int> rank_of_stage{};
  std::vector<std::vector<PipelineAction>> ranks{};  // each rank's actions, in order

  bool operator==(const PipelineTable&) const = default;
};

// "one-after-another", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v".
std::vector<std::string> pipeline_schedules();

// Makes the table of a schedule, without transfers. Every stage adds the gradients of micro-batches in their
// order, so that all schedules give the same bits. Stage s is on rank s mod `ranks`; under zb-v rank r has
// stages r and 2 ranks - 1 - r.
//  one-after-another  one micro-batch at a time through all stages and back: the naive twin
//  gpipe              all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)
//  1f1b               a backward after each forward (Narayanan et al. 2019; flush form, arXiv 2006.09503)
//  interleaved        1f1b, two or more stages a rank, micro-batches a multiple of the ranks
//                     (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)
//  zb-h1              1f1b with split backwards: weights' gradients fill bubbles (Qi et al. 2024, 2401.10241)
//  zb-v               two stages a rank, in a V, with split backwards (Qi et al. 2024, arXiv 2405.15362)
// ConfigError: an unknown schedule, numbers below 1, more than 4 million forwards, numbers that it does not
// support.
PipelineTable make_pipeline(const std::string& schedule, int ranks, int stages_of_rank, int micro_batches);

// Adds each send after the action that makes its tensor, each receive before the action that needs it.
PipelineTable with_transfers(const PipelineTable& table);

// True where backwards are split in two.
bool has_halves(const PipelineTable& table);

// PyTorch's notation: "2F0" is the forward of micro-batch 0 in stage 2; B, I, W, SEND_F, RECV_F, SEND_B,
// RECV_B.
std::string to_text(const PipelineAction& action);

// {"name": ..., "stages": 4, "micro_batches": 8, "ranks": [["0F0", ...], ...]}
std::string to_json(const PipelineTable& table);
// ConfigError: text (called `where`) that is no table, and what check_pipeline() refuses.
PipelineTable pipeline_from_json(const std::string& text, const std::string& where);

// ConfigError with the first contradiction: a stage on several ranks or none, an unknown stage or
// micro-batch, a missing or doubled action, a backward before its forward, a send without receive, a rank
// that waits forever (for what, and what its sender waits for).
void check_pipeline(const PipelineTable& table);

// By stage, 0 or 1e-100 to 1e100 in any unit. `transfer`: from the end of an action to its tensor's arrival.
struct PipelineTimes {
  std::vector<double> forward, backward_inputs, backward_weights;
  double transfer = 0;
};
PipelineTimes uniform_times(int stages, double forward = 1, double backward_inputs = 1,
                            double backward_weights = 1, double transfer = 0);

// When each action would begin and end.
struct PipelineTimeline {
  struct Span {
    double begin = 0, end = 0;
  };
  std::vector<std::vector<Span>> spans;  // as PipelineTable::ranks
  double length = 0;
  std::vector<double> busy;    // by rank
  std::vector<int> most_live;  // by rank: peak number of micro-batches (per stage) with kept activations
  // By rank: peak memory in units of a forward's; between the halves of a backward `between_halves`.
  std::vector<double> most_kept;

  double bubble() const;  // fraction of all ranks' time that is spent waiting
};

// Checks as check_pipeline(). `between_halves`: what a micro-batch keeps between the halves of its backward,
// in units of its forward's: M_W / M_B of Qi et al. (2023), section 3.
PipelineTimeline simulate(const PipelineTable& table, const PipelineTimes& times, double between_halves = 1);

// Draws the timeline as text: one line per stage, at most 160 columns after its name.
std::string to_picture(const PipelineTable& table, const PipelineTimeline& timeline);

// ---- running a table: ranks along `pp` hold the same batch and compute one loss ----

struct PipelineOptions {
  std::string schedule = "1f1b";         // of pipeline_schedules()
  int stages_of_rank = 1;                // a number that the schedule supports
  std::optional<PipelineTable> table{};  // replaces both
};

// Computation of micro-batch i in stage number `part` of own_stages(); `last` marks the rank's last gradients
// of parameters. `inputs` and `weights` are the halves of a backward.
struct PipelineWork {
  std::function<void(std::size_t i, std::size_t part)> forward{};
  std::function<void(std::size_t i, bool last, std::size_t part)> backward{};
  std::function<void(std::size_t i, std::size_t part)> inputs{};
  std::function<void(std::size_t i, bool last, std::size_t part)> weights{};
};

// Runs the forwards and backwards of this rank's stages in the order of the table, and transfers tensors
// between stages. A forward is that of the current stage(): unless it is the first it takes receive() instead
// of the batch's tokens; unless the last, it returns terms with pass_on(output), a zero whose backward waits
// for the next stage's gradient:
//
//  Pipeline pipeline(mesh, {.schedule = "1f1b"});
//  const ForwardLossTerms forward = [&](const Batch& batch) -> LossTerms {
//    const at::Tensor x = pipeline.is_first() ? embed(batch) : pipeline.receive({-1, width});
//    const at::Tensor y = layers_of(pipeline.stage(), x, batch);
//    return {{"cross_entropy", pipeline.is_last() ? loss_of(y, batch) : pipeline.pass_on(y)}};
//  };
//  Step step(forward, *layout, mean, optimizer, through(pipeline));
//
// A stage passes on one tensor per micro-batch; integers and masks go without a gradient. Ranks with the same
// batch have equally many micro-batches; where a schedule needs a multiple, empty ones go through all stages.
// All ranks may abandon a step in the same micro-batch (data_parallel.hpp) if none waits for one that has.
class Pipeline {
 public:
  // Collective along pp. ConfigError: invalid options, a table for other ranks or that differs between ranks.
  Pipeline(const Mesh& mesh, PipelineOptions options);

  int stages() const;
  const std::vector<int>& own_stages() const;  // of this rank, ascending
  int rank_of(int stage) const;

  // The stage that runs; outside of a step the rank's only stage, or that of look_at() (ConfigError without).
  int stage() const;
  bool in_step() const;
  // Outside of a step: the next forward is that of this stage of the rank.
  void look_at(int stage);
  bool is_first() const { return stage() == 0; }
  bool is_last() const { return stage() + 1 == stages(); }

  // The previous stage's output for this micro-batch; its gradient goes back. ConfigError naming both stages:
  // other sizes (-1: any; not given: not checked), a second call. PeerError: that stage is in a later step.
  at::Tensor receive(at::IntArrayRef sizes = {});
  // Sends to the next stage; returns a zero, [] of fp64, for the loss.
  at::Tensor pass_on(const at::Tensor& output);

  // Runs the table; as a step's schedule, use through() (step.hpp). ConfigError: a number of micro-batches
  // that it does not have, a forward without its receive() or pass_on().
  void run(std::size_t micro_batches, const PipelineWork& work) const;
  // The number of micro-batches must be a multiple of this.
  std::size_t micro_batches_of() const;

  // The last run() on all ranks along pp: when each action computed, in seconds since the first began,
  // without waiting for other stages. Collective. Empty before the first step.
  struct Measured {
    PipelineTable table;
    PipelineTimeline timeline;
  };
  std::optional<Measured> measured() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// Assigns layers to stages, as even as their costs allow, in order, at least one each. `behind`: additional
// cost of the last stage (the output). ConfigError: more stages than layers.
struct StageLayers {
  std::int64_t begin = 0, count = 0;
};
std::vector<StageLayers> assign_layers(const std::vector<double>& costs, int stages, double behind = 0);

class DecoderLM;

// Splits a decoder into stages: a rank keeps its stages' layers, the first stage the embedding, the last one
// the norm and the output; the rest becomes empty tensors. Its forward is then that of the current stage.
// Collective over mesh.all(), after cut_decoder(), whose placements are `others`. ConfigError: more stages
// than layers.
Layout split_decoder(DecoderLM& model, const Mesh& mesh, const std::shared_ptr<Pipeline>& pipeline,
                     Layout::Named others = {});
// Returns those placements for stages of these layers. Pure.
Layout::Named stage_placements(DecoderLM& model, const Grid& grid, const std::vector<int>& rank_of_stage,
                               Layout::Named others = {});

// ---- your own model in stages: a list of modules, each of which takes the output of the one before ----

// A module that has been made, and its call with the previous module's output and the batch.
struct CallableModule {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const at::Tensor& x, const Batch& batch)> forward;
};

// Wraps a module with forward(Tensor) or forward(Tensor, const Batch&) that returns a tensor; or its holder.
template <typename Module>
CallableModule callable_module(std::shared_ptr<Module> module) {
  static_assert(std::is_base_of_v<torch::nn::Module, Module>, "a stage is made of torch::nn modules");
  CallableModule made{.module = module, .forward = {}};
  if (module)
    made.forward = [module](const at::Tensor& x, const Batch& batch) -> at::Tensor {
      if constexpr (requires { module->forward(x); })
        return module->forward(x);
      else
        return module->forward(x, batch);
    };
  return made;
}
template <typename Module>
CallableModule callable_module(const torch::nn::ModuleHolder<Module>& holder) {
  return callable_module(holder.ptr());
}

// A module of the list, before it is made.
struct PipelineModule {
  // Prefix of its parameters' names, before a dot. Empty: its index in the list, as in torch::nn::Sequential.
  std::string name{};
  // Makes the module. Ranks that are threads call it one at a time, so it must not communicate.
  std::function<CallableModule()> make;
  // Tensors that the module may register. Only those that several modules are given are tied parameters.
  std::vector<at::Tensor> given{};
  double cost = 1;  // of its forward and backward, in any unit: stages are balanced by it

  PipelineModule called(std::string its_name) && {
    name = std::move(its_name);
    return std::move(*this);
  }
  PipelineModule costing(double its_cost) && {
    cost = its_cost;
    return std::move(*this);
  }
};

// pipeline_module<Block>(8, 16) makes a Block(8, 16) on ranks that need it; tensors among them are `given`.
template <typename Module, typename... Arguments>
PipelineModule pipeline_module(Arguments... arguments) {
  PipelineModule one;
  [[maybe_unused]] const auto note = [&one](const auto& argument) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(argument)>, at::Tensor>)
      if (argument.defined()) one.given.push_back(argument);
  };
  (note(arguments), ...);
  one.make = [... arguments = std::move(arguments)] {
    if constexpr (ModuleHolder<Module>)
      return callable_module(std::make_shared<typename Module::ContainedType>(arguments...));
    else
      return callable_module(std::make_shared<Module>(arguments...));
  };
  return one;
}
// The same for a function that returns a module, as a std::shared_ptr or a holder (torch::nn::Sequential).
template <typename Make>
concept MakesModule = !ModuleHolder<Make> && std::invocable<Make&>;
template <MakesModule Make>
PipelineModule pipeline_module(Make make, std::vector<at::Tensor> given = {}) {
  PipelineModule one;
  one.make = [make = std::move(make)]() mutable { return callable_module(make()); };
  one.given = std::move(given);
  return one;
}

struct PipelineModelOptions {
  // Modules are made with the CPU's default generator seeded by this and their names: the same values on
  // every rank. The generator is restored; no other thread should draw from it meanwhile.
  std::uint64_t seed = 0;
  std::optional<at::ScalarType> dtype{};  // modules are converted to it; not given: they stay as they are
  at::Device device = at::kCPU;           // modules are moved to it
  // The first module's input, also for padding batches (empty_batch()); not given: Batch::tokens.
  std::function<at::Tensor(const Batch& batch)> input{};
  bool accept_dropout = false;  // as in PrepareOptions
};

// A model made of the modules of a list; after split(), only those of this rank's stages. The step gets
// forward_loss() and through(model.pipeline()) (example: docs/pipeline-parallelism.md). Parameters are called
// "<module>.<parameter>" for every number of stages. Buffers stay with their module, outside layouts and
// checkpoints; forward must change them equally on all ranks (check_buffers()). Copies share the modules.
class PipelineModel {
 public:
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
  // Makes nothing. ConfigError: no module, two of one name, a name with a dot, a cost that is not positive.
  explicit PipelineModel(std::vector<PipelineModule> list, PipelineModelOptions options = {});

  // Makes all modules in this process, for one device. ConfigError: after split(), and as split().
  void make_all();

  // Keeps and makes the modules of this rank's stages. Collective over mesh.all(), once, before a layout is
  // made; without ranks along pp every rank has all. ConfigError on every rank: fewer modules than stages;
  // lists, parameters, buffers or values that differ between ranks; a tensor in two modules that is not
  // `given` to both; a null module; what prepare_module() or Pipeline refuses.
  Layout split(const Mesh& mesh, PipelineOptions options = {});
  const Pipeline& pipeline() const;  // ConfigError before split()

  // This rank's modules by name, as children of one module: for train(), eval(), buffers.
  const torch::nn::Module& modules() const;
  torch::nn::Module& modules();
  // This rank's parameters, tied ones once, named after the first module on any rank that registers them.
  const NamedTensors& named() const;
  // The same for a layout, with all placements and with the checks before each step.
  TrainableParameters parameters() const;

  struct Outputs {
    at::Tensor output{};     // of the last module, where this rank has it
    at::Tensor passed_on{};  // otherwise: Pipeline::pass_on()
  };
  // Forward of the current stage; outside of a step, of all this rank's stages, collective along pp.
  Outputs outputs(const Batch& batch) const;

  // For a Step: `loss` of the last module's output, before the last stage what is passed on. `terms`: names
  // of the terms of `loss`, in order (ConfigError: none, or others).
  using LossOfOutput = std::function<LossTerms(const at::Tensor& output, const Batch& batch)>;
  ForwardLossTerms forward_loss(std::vector<std::string> terms, LossOfOutput loss) const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace isograd
