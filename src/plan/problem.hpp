// The facts that all parts of a plan read, made once: a model on a cluster, and the constants by which it is
// timed.
#pragma once

#include "isograd/model.hpp"
#include "plan/planner.hpp"
#include "plan/constants.hpp"

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

// Both ways: the planner's shape has no LibTorch type, and rules, stages and kept tensors take the model
// room's.
DecoderConfig decoder_of(const ModelShape& model);
ModelShape shape_of(const DecoderConfig& config, std::string name);

}  // namespace isograd::planner
