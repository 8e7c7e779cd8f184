// Schedules of pipeline stages, as data: what each rank computes of which micro-batch, in which order. Made,
// read, checked and simulated without a model and without ranks.
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
    kBackward,         // of what the stage was given and of its parameters, at once
    kBackwardInputs,   // of what the stage was given; its parameters' follow
    kBackwardWeights,  // of its parameters
    // What a stage made of a micro-batch to the rank of the next stage, and the gradient of what it was given
    // to the rank of the one before. A send ends at once, a receive when what was sent is there.
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

// Stages 0 to stages - 1 in the order of the forward, each on one rank; a rank has one or several.
struct PipelineTable {
  std::string name;
  int stages = 1, micro_batches = 1;
  std::vector<int> rank_of_stage{};
  std::vector<std::vector<PipelineAction>> ranks{};  // each rank's actions, in order

  bool operator==(const PipelineTable&) const = default;
};

// "one-after-another", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v".
std::vector<std::string> pipeline_schedules();

// The table of a schedule for so many ranks, stages on each rank, and micro-batches. Every stage adds the
// gradients of micro-batches up in their order, so that all these schedules give the same bits. Without
// transfers. Stage s lies on rank s mod `ranks`, but under zb-v, which lays the second half back: there rank
// r has stages r and 2 ranks - 1 - r.
//   one-after-another  one micro-batch at a time through all stages and back: the naive twin
//   gpipe              all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)
//   1f1b               as many forwards as keep the later ranks busy, then a backward after each forward
//                      (Narayanan et al. 2019, PipeDream; its flush form, arXiv 2006.09503)
//   interleaved        the same with several stages on each rank (Narayanan et al. 2021, arXiv 2104.04473,
//                      section 2.2); needs two or more, and a multiple of the ranks as micro-batches
//   zb-h1              1f1b whose backward is cut in two, so that gradients of weights fill the bubbles, with
//                      1f1b's memory (Qi et al. 2024, arXiv 2401.10241)
//   zb-v               two stages on each rank, laid in a V, likewise cut (Qi et al. 2024, arXiv 2405.15362)
// ConfigError: no such schedule, numbers below 1, more than 4 million forwards, stages on a rank or
// micro-batches that it does not admit (which it does is named).
PipelineTable make_pipeline(const std::string& schedule, int ranks, int stages_of_rank, int micro_batches);

// The table with each send behind the action that makes what is sent, and each receive before the one that
// needs it.
PipelineTable with_transfers(const PipelineTable& table);

// Whether it cuts backwards in two.
bool has_halves(const PipelineTable& table);

// "2F0": the forward of micro-batch 0 in stage 2. B backward, I and W of inputs and of weights, SEND_F and
// RECV_F what goes to the next stage, SEND_B and RECV_B what comes back: PyTorch's way to write them.
std::string to_text(const PipelineAction& action);

// {"name": ..., "stages": 4, "micro_batches": 8, "ranks": [["0F0", ...], ...]}
std::string to_json(const PipelineTable& table);
// The table that a text says, checked. ConfigError: what is no such text, and what check_pipeline() refuses.
// `where` names the text in errors.
PipelineTable pipeline_from_json(const std::string& text, const std::string& where);

// ConfigError that names the first contradiction: a stage on several ranks or on none, an action of a stage
// or micro-batch that there is none of, one that is missing or there twice, a backward before its forward, a
// send without its receive, a rank that waits for ever (what it waits for, and what the rank that should send
// it waits for).
void check_pipeline(const PipelineTable& table);

// Of each stage, 0 or 1e-100 to 1e100 in any unit. `transfer`: from the end of what makes a tensor to its
// arrival on another rank, while both compute.
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
  std::vector<double> busy;    // of each rank
  std::vector<int> most_live;  // micro-batches of stages whose activations a rank keeps at a time, at most
  // The memory of these, in units of what one forward keeps: those between the halves of their backward count
  // `between_halves` each.
  std::vector<double> most_kept;

  double bubble() const;  // the part of all ranks' time in which they wait
};

// As check_pipeline(), and the timeline. Takes time in proportion to the actions. `between_halves`: what a
// micro-batch keeps between the halves of its backward (inputs of products, and the gradients of their
// outputs), in units of what its forward kept: M_W / M_B of Qi et al., "Zero Bubble Pipeline Parallelism"
// (2023), section 3.
PipelineTimeline simulate(const PipelineTable& table, const PipelineTimes& times, double between_halves = 1);

// The timeline as text, a line for each stage of at most 160 columns behind its name; and as a picture.
std::string to_picture(const PipelineTable& table, const PipelineTimeline& timeline);
inline constexpr double kPictureWidth = 1000;  // pixels
std::string to_svg(const PipelineTable& table, const PipelineTimeline& timeline);

// Pipeline parallelism: the layers of a model in stages on the ranks along `pp`, which hold the same batch
// and compute one loss, each micro-batch of it going from stage to stage and its gradient back.

struct PipelineOptions {
  std::string schedule = "1f1b";         // of pipeline_schedules()
  int stages_of_rank = 1;                // as the schedule admits
  std::optional<PipelineTable> table{};  // instead of both
};

// What a rank computes of micro-batch i in its stage `part`, of which `part` counts own_stages(); `last` with
// the rank's last gradients of parameters. The halves are for tables that cut backwards in two: `inputs`
// gives the stage before the gradient of what it has passed on, `weights` of the same micro-batch follows.
struct PipelineWork {
  std::function<void(std::size_t i, std::size_t part)> forward{};
  std::function<void(std::size_t i, bool last, std::size_t part)> backward{};
  std::function<void(std::size_t i, std::size_t part)> inputs{};
  std::function<void(std::size_t i, bool last, std::size_t part)> weights{};
};

// What a rank along `pp` does: its stages' forwards and backwards in the order of the table, and what goes
// between stages. The forward of a step is then that of the stage whose turn it is (stage()): it takes what
// receive() gives instead of the batch's own tokens, unless it is the first, and unless it is the last
// returns terms to which pass_on() of its output is added, a zero whose backward waits for the next stage's
// gradient:
//
//   Pipeline pipeline(mesh, {.schedule = "1f1b"});
//   const ForwardLossTerms forward = [&](const Batch& batch) -> LossTerms {
//     const at::Tensor x = pipeline.is_first() ? embed(batch) : pipeline.receive({-1, width});
//     const at::Tensor y = layers_of(pipeline.stage(), x, batch);
//     return {{"cross_entropy", pipeline.is_last() ? loss_of(y, batch) : pipeline.pass_on(y)}};
//   };
//   Step step(forward, *layout, mean, optimizer, through(pipeline));
//
// A stage passes on one tensor of each micro-batch; integers and masks go without a gradient. A step may be
// given up by all ranks in the same micro-batch (data_parallel.hpp), if none of them waits for one that has
// given it up: the next step takes nothing of it.
//
// The loss is divided once, by counts that are known before the first stage begins: stages' gradients need no
// factor. Ranks with the same batch have as many micro-batches; where a schedule wants a multiple, empty ones
// are added and go through all stages.
class Pipeline {
 public:
  // Collective over the ranks along pp. ConfigError: options that make no table, a table for another number
  // of ranks, one that gives a rank no stage, tables that differ over ranks.
  Pipeline(const Mesh& mesh, PipelineOptions options);

  int stages() const;
  const std::vector<int>& own_stages() const;  // of this rank, ascending
  int rank_of(int stage) const;

  // Whose forward or backward of the step runs; outside of a step, to look at a batch without gradients, the
  // rank's only stage, or that of look_at(). ConfigError there on a rank with several, before it.
  int stage() const;
  bool in_step() const;
  // Outside of a step: the forward that follows is that of this stage, one of the rank's.
  void look_at(int stage);
  bool is_first() const { return stage() == 0; }
  bool is_last() const { return stage() + 1 == stages(); }

  // What the stage before has passed on of this micro-batch. Its gradient goes back there. ConfigError that
  // names both stages where it does not have these sizes, -1 being any; none given: whatever they are; a
  // second call in one forward of a step. PeerError where the stage before is in a later step.
  at::Tensor receive(at::IntArrayRef sizes = {});
  // To the next stage; returns a zero, [] of fp64, for the loss.
  at::Tensor pass_on(const at::Tensor& output);

  // Runs the table of so many micro-batches. As a step's schedule: through() (step.hpp). ConfigError:
  // another number of micro-batches than the table has, or than the schedule admits; a forward that did not
  // receive() or pass_on() what its stage has to.
  void run(std::size_t micro_batches, const PipelineWork& work) const;
  // Of what the number of micro-batches must be a multiple.
  std::size_t micro_batches_of() const;

  // What the ranks along pp did in the last run(): its table and when each action computed, in seconds from
  // the first one's begin; a wait for another stage lies before an action and not in it. Collective over
  // these ranks, the same on each. Nothing before the first step.
  struct Measured {
    PipelineTable table;
    PipelineTimeline timeline;
  };
  std::optional<Measured> measured() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// Layers [begin, begin + count) of each stage: as even as their costs allow, in order. `costs` of the layers;
// `behind` what the last stage does besides (the output). Every stage has a layer. ConfigError: more stages
// than layers.
struct StageLayers {
  std::int64_t begin = 0, count = 0;
};
std::vector<StageLayers> deal_layers(const std::vector<double>& costs, int stages, double behind = 0);

class DecoderLM;

// Leaves each rank the layers of its stages, the first one's the embedding too and the last one's the norm
// and the output; all others become empty tensors. Its forward is from then on that of the stage whose turn
// it is: outputs() gives the last stage's, and before it DecoderOutputs::passed_on. Collective over
// mesh.all(), as cut_decoder(), whose placements are `others`. ConfigError: more stages than layers.
Layout split_decoder(DecoderLM& model, const Mesh& mesh, const std::shared_ptr<Pipeline>& pipeline,
                     Layout::Named others = {});
// The placements that it declares, for stages of these layers. Pure.
Layout::Named stage_placements(DecoderLM& model, const Grid& grid, const std::vector<int>& rank_of_stage,
                               Layout::Named others = {});

// A model of one's own over the stages of a pipeline: a list of modules, each taking what the one before it
// gives. Each rank makes those of its own stages and no others.

// A module that has been made, and how it is called: with what the module before it gave, and the batch.
struct CallableModule {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const at::Tensor& x, const Batch& batch)> forward;
};

// Of a module with forward(Tensor) or forward(Tensor, const Batch&), which give a tensor; or its holder.
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

// One of the list, before it is made.
struct PipelineModule {
  // What the names of its parameters begin with, before a dot. Empty: its place in the list, as
  // torch::nn::Sequential has it.
  std::string name{};
  // Of ranks that are threads one at a time: it must not communicate (make groups before the list).
  std::function<CallableModule()> make;
  // Tensors that were made outside of it and that it may register. One that several modules register is a
  // tied parameter; no other tensor may be in two modules.
  std::vector<at::Tensor> given{};
  double cost = 1;  // of its forward and backward, in a unit of all: stages are dealt by it

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

// pipeline_module<Block>(8, 16): std::make_shared<Block>(8, 16), where and when it is needed;
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
// Of a function that makes a module, as a std::shared_ptr or a holder (torch::nn::Sequential).
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
  // Each module is made with the default generator of the CPU seeded by this and its name, so that its values
  // are the same on every rank and for every number of stages. The generator is put back afterwards; no other
  // thread should draw from it meanwhile.
  std::uint64_t seed = 0;
  std::optional<at::ScalarType> dtype{};  // what modules are converted to; not given: as they are made
  at::Device device = at::kCPU;           // and moved to
  // What the first module is called with; not given: Batch::tokens. Of a batch that fills up a round
  // (empty_batch()) too: its modules run like any others.
  std::function<at::Tensor(const Batch& batch)> input{};
  bool accept_dropout = false;  // as PrepareOptions has it
};

// The modules of a list, made one after another, or those of a rank's stages alone:
//
//   PipelineModel model({pipeline_module<Embedding>(kVocabulary, kHidden), pipeline_module<Block>(kHidden),
//                        pipeline_module<Block>(kHidden), pipeline_module<torch::nn::Linear>(kHidden,
//                        kVocabulary)});
//   const Layout placed = model.split(mesh, {.schedule = "1f1b"});
//   const auto layout = bucketed(model.parameters(), mesh);
//   Step step(model.forward_loss({"cross_entropy"}, loss), *layout, mean, *optimizer,
//   through(model.pipeline()));
//
// Modules stand in stages in the list's order, as even as their costs allow. Parameters are called
// "<module>.<parameter>", for every number of stages. Buffers stay with their module on the ranks that have
// it: they belong to no layout and no checkpoint, and forward must change them alike on all ranks that see
// different data (check_buffers() of modules()). Copies share the modules.
class PipelineModel {
 public:
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
  // Makes nothing. ConfigError: no module, two of one name, a name with a dot, a cost that is not positive.
  explicit PipelineModel(std::vector<PipelineModule> list, PipelineModelOptions options = {});

  // All modules, in this process, as one device has them. ConfigError: after split(), and as split() of each.
  void make_all();

  // Leaves this rank the modules of its stages; those that it has not yet are made, and no others. Collective
  // over mesh.all(), once, before a layout is made. Without ranks along pp every rank has all of them.
  // ConfigError on every rank: fewer modules than stages; lists, or a module's parameters, buffers or values,
  // that differ between ranks; a tensor in two modules that is not `given` to both; a null module, and what
  // prepare_module() refuses of one; and whatever Pipeline refuses.
  Layout split(const Mesh& mesh, PipelineOptions options = {});
  const Pipeline& pipeline() const;  // ConfigError before split()

  // This rank's modules under their names, as children of one module: for train(), eval(), buffers.
  const torch::nn::Module& modules() const;
  torch::nn::Module& modules();
  // This rank's parameters, tied ones once. A tied parameter has the name that it has in the first module
  // that registers it, on whichever rank that is.
  const NamedTensors& named() const;
  // The same for a layout, with all placements and with what is checked before each step.
  TrainableParameters parameters() const;

  struct Outputs {
    at::Tensor output{};     // of the last module, where this rank has it
    at::Tensor passed_on{};  // otherwise: Pipeline::pass_on()
  };
  // The forward of the stage whose turn it is; outside of a step of all of this rank's stages, one after
  // another, collective over the ranks along pp. ConfigError before make_all() or split().
  Outputs outputs(const Batch& batch) const;

  // For a Step: `loss` of the last module's output, and before the last stage what is passed on. `terms`:
  // the names of the terms that `loss` gives, in its order, which every stage must know. ConfigError: none,
  // or a loss with others.
  using LossOfOutput = std::function<LossTerms(const at::Tensor& output, const Batch& batch)>;
  ForwardLossTerms forward_loss(std::vector<std::string> terms, LossOfOutput loss) const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace isograd
