// Pipeline parallelism: schedules as data (made, read, checked and simulated without a model and without
// ranks), their execution, and models in stages.
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
    // Transfers: a stage's output to the next stage's rank, and the gradient of its input to the previous
    // stage's rank. A send ends at once, a receive when the tensor has arrived.
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
// order, so that all these schedules give the same bits. Stage s is on rank s mod `ranks`; under zb-v rank r
// has stages r and 2 ranks - 1 - r.
//   one-after-another  one micro-batch at a time through all stages and back: the naive twin
//   gpipe              all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)
//   1f1b               enough forwards to keep later ranks busy, then a backward after each forward
//                      (Narayanan et al. 2019, PipeDream; its flush form, arXiv 2006.09503)
//   interleaved        1f1b with several stages on each rank (Narayanan et al. 2021, arXiv 2104.04473,
//                      section 2.2); needs two or more, and a multiple of the ranks as micro-batches
//   zb-h1              1f1b with backwards split in two, so that gradients of weights fill the bubbles, with
//                      1f1b's memory (Qi et al. 2024, arXiv 2401.10241)
//   zb-v               two stages on each rank, in a V, also with split backwards (Qi et al. 2024, arXiv
//                      2405.15362)
// ConfigError: an unknown schedule, numbers below 1, more than 4 million forwards, or numbers of stages or
// micro-batches that the schedule does not support (says which it does).
PipelineTable make_pipeline(const std::string& schedule, int ranks, int stages_of_rank, int micro_batches);

// Adds transfers: each send after the action that makes its tensor, each receive before the action that needs
// it.
PipelineTable with_transfers(const PipelineTable& table);

// True where backwards are split in two.
bool has_halves(const PipelineTable& table);

// PyTorch's notation. "2F0": forward of micro-batch 0 in stage 2. B is backward; I and W are the halves for
// inputs and weights; SEND_F and RECV_F go to the next stage, SEND_B and RECV_B to the previous one.
std::string to_text(const PipelineAction& action);

// {"name": ..., "stages": 4, "micro_batches": 8, "ranks": [["0F0", ...], ...]}
std::string to_json(const PipelineTable& table);
// Parses and checks a table. ConfigError: text that is no table, and what check_pipeline() refuses. Errors
// call the text `where`.
PipelineTable pipeline_from_json(const std::string& text, const std::string& where);

// ConfigError that names the first contradiction: a stage on several ranks or on none, an unknown stage or
// micro-batch, an action that is missing or duplicated, a backward before its forward, a send without its
// receive, a rank that waits forever (for what, and what its sender waits for).
void check_pipeline(const PipelineTable& table);

// Durations per stage, 0 or 1e-100 to 1e100 in any unit. `transfer`: from the end of the action that makes a
// tensor to its arrival on another rank, while both compute.
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
  // By rank: peak memory of these, in units of what one forward keeps; between the two halves of its backward
  // a micro-batch counts `between_halves`.
  std::vector<double> most_kept;

  double bubble() const;  // fraction of all ranks' time that is spent waiting
};

// Checks the table as check_pipeline() does and computes the timeline, in time proportional to the actions.
// `between_halves`: what a micro-batch keeps between the halves of its backward (inputs of products, and
// gradients of their outputs), in units of what its forward kept: M_W / M_B of Qi et al., "Zero Bubble
// Pipeline Parallelism" (2023), section 3.
PipelineTimeline simulate(const PipelineTable& table, const PipelineTimes& times, double between_halves = 1);

// Draws the timeline as text (one line per stage, at most 160 columns after its name) or as SVG.
std::string to_picture(const PipelineTable& table, const PipelineTimeline& timeline);
inline constexpr double kPictureWidth = 1000;  // pixels
std::string to_svg(const PipelineTable& table, const PipelineTimeline& timeline);

// ---- running a table: ranks along `pp` hold the same batch and compute one loss ----

struct PipelineOptions {
  std::string schedule = "1f1b";         // of pipeline_schedules()
  int stages_of_rank = 1;                // a number that the schedule supports
  std::optional<PipelineTable> table{};  // replaces both
};

// Callbacks: computation of micro-batch i in stage number `part` of own_stages(); `last` marks the rank's
// last gradients of parameters. The halves are for tables that split backwards: `inputs` gives the previous
// stage its gradient; `weights` of the same micro-batch follows.
struct PipelineWork {
  std::function<void(std::size_t i, std::size_t part)> forward{};
  std::function<void(std::size_t i, bool last, std::size_t part)> backward{};
  std::function<void(std::size_t i, std::size_t part)> inputs{};
  std::function<void(std::size_t i, bool last, std::size_t part)> weights{};
};

// One rank along `pp`: runs its stages' forwards and backwards in the order of the table, and transfers
// tensors between stages. In a step, a forward is that of the current stage() of this rank. Unless that is
// the first stage, it takes the output of receive() instead of the batch's tokens. Unless it is the last, it
// returns terms that include pass_on(output), a zero whose backward waits for the next stage's gradient:
//
//   Pipeline pipeline(mesh, {.schedule = "1f1b"});
//   const ForwardLossTerms forward = [&](const Batch& batch) -> LossTerms {
//     const at::Tensor x = pipeline.is_first() ? embed(batch) : pipeline.receive({-1, width});
//     const at::Tensor y = layers_of(pipeline.stage(), x, batch);
//     return {{"cross_entropy", pipeline.is_last() ? loss_of(y, batch) : pipeline.pass_on(y)}};
//   };
//   Step step(forward, *layout, mean, optimizer, through(pipeline));
//
// A stage passes on one tensor per micro-batch; integers and masks go without a gradient. All ranks may
// abandon a step in the same micro-batch (data_parallel.hpp) if none of them waits for one that has abandoned
// it; the next step uses nothing of it.
//
// The loss is divided once, by counts that are known before the first stage begins: gradients of stages need
// no factor. Ranks with the same batch have equally many micro-batches; where a schedule needs a multiple,
// empty ones are added and go through all stages.
class Pipeline {
 public:
  // Collective over the ranks along pp. ConfigError: invalid options, a table for another number of ranks or
  // with a rank without stages, tables that differ between ranks.
  Pipeline(const Mesh& mesh, PipelineOptions options);

  int stages() const;
  const std::vector<int>& own_stages() const;  // of this rank, ascending
  int rank_of(int stage) const;

  // The stage whose forward or backward runs. Outside of a step, for looking at a batch without gradients:
  // the rank's only stage, or that of look_at() (ConfigError on a rank with several without it).
  int stage() const;
  bool in_step() const;
  // Outside of a step: the next forward is that of this stage of the rank.
  void look_at(int stage);
  bool is_first() const { return stage() == 0; }
  bool is_last() const { return stage() + 1 == stages(); }

  // Returns the previous stage's output for this micro-batch; its gradient goes back there. ConfigError that
  // names both stages where it does not have these sizes (-1: any; not given: not checked), and on a second
  // call in one forward of a step. PeerError where the previous stage is in a later step.
  at::Tensor receive(at::IntArrayRef sizes = {});
  // Sends to the next stage; returns a zero, [] of fp64, for the loss.
  at::Tensor pass_on(const at::Tensor& output);

  // Runs the table. As a step's schedule, use through() (step.hpp). ConfigError: a number of micro-batches
  // that the table or schedule does not have; a forward that did not call receive() or pass_on() as its stage
  // must.
  void run(std::size_t micro_batches, const PipelineWork& work) const;
  // The number of micro-batches must be a multiple of this.
  std::size_t micro_batches_of() const;

  // The last run() on all ranks along pp: its table, and when each action computed, in seconds since the
  // first began; waiting for another stage is before an action, not in it. Collective over these ranks, the
  // same on each. Empty before the first step.
  struct Measured {
    PipelineTable table;
    PipelineTimeline timeline;
  };
  std::optional<Measured> measured() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// Assigns layers [begin, begin + count) to each stage: as even as their costs allow, in order, at least one.
// `costs`: of the layers; `behind`: additional cost of the last stage (the output). ConfigError: more stages
// than layers.
struct StageLayers {
  std::int64_t begin = 0, count = 0;
};
std::vector<StageLayers> deal_layers(const std::vector<double>& costs, int stages, double behind = 0);

class DecoderLM;

// Splits a decoder into stages: each rank keeps the layers of its stages, the first stage also the embedding,
// the last one the norm and the output; all others become empty tensors. From then on its forward is that of
// the current stage: outputs() gives the last stage's outputs, or DecoderOutputs::passed_on before it.
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
  // Makes the module. Ranks that are threads call it one at a time, so it must not communicate (make groups
  // before).
  std::function<CallableModule()> make;
  // Existing tensors that the module may register. One that several modules register is a tied parameter; no
  // other tensor may be in two modules.
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

template <typename Module>
concept ModuleHolder = requires {
  typename Module::ContainedType;
};

// pipeline_module<Block>(8, 16) calls std::make_shared<Block>(8, 16) on the ranks that need it;
// pipeline_module<torch::nn::Linear>(8, 16) likewise. Tensors among the arguments are `given`.
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
  // Each module is made with the CPU's default generator seeded by this and its name, so that its values are
  // the same on every rank and for every number of stages. The generator is restored afterwards; no other
  // thread should draw from it meanwhile.
  std::uint64_t seed = 0;
  std::optional<at::ScalarType> dtype{};  // modules are converted to it; not given: they stay as they are
  at::Device device = at::kCPU;           // modules are moved to it
  // Computes the first module's input; not given: Batch::tokens. Also called for padding batches
  // (empty_batch()).
  std::function<at::Tensor(const Batch& batch)> input{};
  bool accept_dropout = false;  // as in PrepareOptions
};

// A model made of the modules of a list; after split(), only those of this rank's stages:
//
//   PipelineModel model({pipeline_module<Embedding>(kVocabulary, kHidden), pipeline_module<Block>(kHidden),
//                        pipeline_module<torch::nn::Linear>(kHidden, kVocabulary)});
//   const Layout placed = model.split(mesh, {.schedule = "1f1b"});
//   const auto layout = bucketed(model.parameters(), mesh);
//   Step step(model.forward_loss({"cross_entropy"}, loss), *layout, mean, *optimizer,
//             through(model.pipeline()));
//
// Stages take modules in the list's order, as even as their costs allow. Parameters are called
// "<module>.<parameter>", for every number of stages. Buffers stay with their module: they belong to no
// layout and no checkpoint, and forward must change them equally on all ranks that see different data
// (check_buffers() of modules()). Copies share the modules.
class PipelineModel {
 public:
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
  // Makes nothing. ConfigError: no module, two of one name, a name with a dot, a cost that is not positive.
  explicit PipelineModel(std::vector<PipelineModule> list, PipelineModelOptions options = {});

  // Makes all modules in this process, for one device. ConfigError: after split(), and as split() for each
  // module.
  void make_all();

  // Keeps the modules of this rank's stages and makes those that do not exist yet. Collective over
  // mesh.all(), once, before a layout is made. Without ranks along pp every rank has all of them. ConfigError
  // on every rank: fewer modules than stages; lists, or a module's parameters, buffers or values, that differ
  // between ranks; a tensor in two modules that is not `given` to both; a null module; what prepare_module()
  // or Pipeline refuses.
  Layout split(const Mesh& mesh, PipelineOptions options = {});
  const Pipeline& pipeline() const;  // ConfigError before split()

  // This rank's modules by name, as children of one module: for train(), eval(), buffers.
  const torch::nn::Module& modules() const;
  torch::nn::Module& modules();
  // This rank's parameters, tied ones once, named after the first module that registers them, on whichever
  // rank that is.
  const NamedTensors& named() const;
  // The same for a layout, with all placements and with the checks before each step.
  TrainableParameters parameters() const;

  struct Outputs {
    at::Tensor output{};     // of the last module, where this rank has it
    at::Tensor passed_on{};  // otherwise: Pipeline::pass_on()
  };
  // Forward of the current stage. Outside of a step: of all stages of this rank, one after another,
  // collective over the ranks along pp. ConfigError before make_all() or split().
  Outputs outputs(const Batch& batch) const;

  // Forward for a Step: `loss` of the last module's output; before the last stage, what is passed on.
  // `terms`: the names of the terms that `loss` returns, in its order, which every stage must know.
  // ConfigError: no terms, or a loss with others.
  using LossOfOutput = std::function<LossTerms(const at::Tensor& output, const Batch& batch)>;
  ForwardLossTerms forward_loss(std::vector<std::string> terms, LossOfOutput loss) const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace isograd
