// The facts that all parts of a plan read, made once: a model on a cluster, and the constants by which it is
// timed.
#pragma once

#include "isograd/model.hpp"
#include "isograd/planner.hpp"
#include "train/config.hpp"

namespace isograd::planner {

enum class Program : std::uint8_t { kIsograd, kNanotron, kOther };

// The only numbers of the planner that are fitted: at most twelve, each with an independent source within a
// factor of two, and the width of the interval around what they predict. `isograd plan --validate` measures
// the widths, which docs/planning.md shows; docs/planning_reference.md shows the constants, and a test
// compares it with them. Each program's law has its own.
struct Constants {
  // Fitted on published runs.
  double share_of_peak = 0.573;      // of a data sheet's FLOP/s, that products reach
  double layer_overhead = 1.968e-3;  // seconds of the host for a layer of a micro-batch
  double share_inside = 0.691,
         share_across = 0.317;             // of a link's bandwidth, inside a host and between hosts
  double allocated = 1.089;                // bytes that an allocator takes for a byte that is kept
  double fixed_bytes = 0.293 * (1 << 30);  // of libraries
  // Taken from their sources as they are.
  double share_of_attention = 0.25;  // of the same peak, by fused attention
  double share_of_memory = 0.85;     // of a data sheet's bytes/s
  double passes = 6;                 // forward and backward move a kept byte as often
  double overlap = 0.38;             // of a backward, that hides the reduction

  // Counted, not fitted: activation bytes of a layer and token by the widths of its tensors, over tp.
  // isograd's are listed (model/kept_tensors.hpp).
  double by_hidden = 20, by_feed_forward = 8;
};
// As they stand in NCCL's src/graph/tuning.cc (5067397c): the start of a ring, seconds, and a tree's
// bandwidth. The steps' latencies are those of Link.
inline constexpr double kRingStart = 6.6e-6, kTreeShare = 0.92;

Constants constants_of(Program program, const Device& device, Precision precision);

// Half widths of intervals, as parts of the value, by what is predicted and where its numbers come from.
struct Widths {
  double memory = 0, seconds = 0;
};
Widths widths_of(Program program, Origin origin, bool experts);

struct Problem {
  const ModelShape& model;
  const Cluster& cluster;
  const Calibration& calibration;
  const Work& work;
  Constants constants{};
  // Whose memory and overhead are predicted. Published rows are other programs'; a plan is always isograd's.
  Program program = Program::kIsograd;
};

// In the order of their enumerations, as in train.dtype and [parallel].
inline constexpr std::array kPrecisionNames = {"float64", "float32", "bfloat16", "float8"};
inline constexpr std::array kOriginNames = {"exact",  "measured",   "calibrated",
                                            "fitted", "data sheet", "assumed"};
inline constexpr std::array kStrategyNames = {"bucketed", "zero1", "zero2", "zero3"};
inline constexpr std::array kScheduleNames = {"none", "1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"};
inline constexpr auto names_of(Precision) { return kPrecisionNames; }
inline constexpr auto names_of(Origin) { return kOriginNames; }
inline constexpr std::array kStrategies = {Strategy::kBucketed, Strategy::kZero1, Strategy::kZero2,
                                           Strategy::kZero3};
inline constexpr std::array kSchedules = {Schedule::kOneFOneB, Schedule::kGPipe, Schedule::kInterleaved,
                                          Schedule::kZeroBubbleH1, Schedule::kZeroBubbleV};  // of pipelines

// Whether it cuts backwards in two.
inline bool has_halves(Schedule schedule) {
  return schedule == Schedule::kZeroBubbleH1 || schedule == Schedule::kZeroBubbleV;
}

// A part of `number` that is the largest of as many as even as can be.
inline std::int64_t most_of(std::int64_t number, std::int64_t parts) { return (number + parts - 1) / parts; }
// Tokens of a micro-batch on the rank with the most.
inline std::int64_t tokens_of(const Work& work, const Candidate& candidate) {
  return most_of(candidate.micro_batch * work.sequence,
                 std::int64_t{candidate.cp_ring} * candidate.cp_ulysses);
}

// A number with its interval, `width` of it to both sides.
inline Estimate within(double value, double width, Origin origin) {
  return {value, value * (1 - width), value * (1 + width), origin};
}

// As texts and pages show them: "12.5 GiB", "3.21 s".
std::string bytes_text(double bytes);
std::string seconds_text(double seconds);
std::string unit_of(double number, const std::string& unit);  // of a law: "data rank" of 1 "data ranks"
// The fastest layout, or the one that lacks the least memory.
inline const Planned* best_of(const Plan& plan) {
  return !plan.top.empty() ? &plan.top.front() : plan.nearest ? &*plan.nearest : nullptr;
}

// Both ways: the planner's shape has no LibTorch type, and rules, stages and kept tensors take the model
// room's.
DecoderConfig decoder_of(const ModelShape& model);
ModelShape shape_of(const DecoderConfig& config, std::string name);
at::ScalarType type_of(Precision precision);

// Both ways: a configuration's step as work, and the keys of [batch], [parallel] and others that work and
// candidate decide. Keys of [parallel] that the planner does not choose get their defaults. The model's stay.
// ConfigError: a run that trains an adapter.
Work work_of(const RunConfig& config);
void set_layout(RunConfig& config, const Cluster& cluster, const Work& work, const Candidate& candidate);

}  // namespace isograd::planner
