// Schedules of pipeline stages, as data: what each rank computes of which micro-batch, in which order. Made,
// read, checked and simulated without a model and without ranks.
#pragma once

#include "isograd/cxx20.hpp"

#include <cstdint>
#include <string>
#include <vector>

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

}  // namespace isograd
