// The facts that all parts of a plan read, made once: a model on a cluster, and the constants by which it is
// timed.
#pragma once

#include "isograd/model.hpp"
#include "isograd/planner.hpp"
#include "plan/constants.hpp"
#include "train/config.hpp"

namespace isograd::planner {

struct Problem {
  const ModelShape& model;
  const Cluster& cluster;
  const Calibration& calibration;
  const Work& work;
  Constants constants{};
  // Whose memory and overhead are foretold. Published rows are other programs'; a plan is always isograd's.
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
// Of the micro-batch of a rank with the most.
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
