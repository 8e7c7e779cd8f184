// Pipeline parallelism: the layers of a model in stages on the ranks along `pp`, which hold the same batch
// and compute one loss, each micro-batch of it going from stage to stage and its gradient back.
#pragma once

#include "isograd/cxx20.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "isograd/layout.hpp"
#include "isograd/pipeline_schedule.hpp"

namespace isograd {

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

  // Runs the table of so many micro-batches. As a step's schedule: through() (step_options.hpp). ConfigError:
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

}  // namespace isograd
