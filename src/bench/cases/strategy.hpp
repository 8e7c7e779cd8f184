// The layouts that the benchmarks compare.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/expert_parallel.hpp"
#include "isograd/model.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "isograd/step.hpp"
#include "isograd/tensor_parallel.hpp"
#include "isograd/world.hpp"

namespace isograd {

struct Strategy {
  std::string name;   // --strategy
  std::string title;  // for people
  DataParallelOptions options{};
  std::string peer = "ddp";  // which of PyTorch's wrappers keeps as much on each rank: "ddp" or "fsdp2"
  bool standard = true;      // part of a run without --strategy
  // What ranks hold together: matrices, of one batch that all see (`bench tensor`), or experts, of batches of
  // their own (`bench expert`), or layers, of one batch (`bench pipeline`).
  enum class Together {
    kNothing,
    kWholeTokens,
    kSequenceParallel,
    kExperts,
    kStages
  } together = Together::kNothing;
  std::string schedule{};                                   // of stages
  ExpertOverlap overlap = ExpertParallelOptions().overlap;  // of experts
  TensorOverlap tensor_overlap = TensorOverlap::kNone;

  bool one_batch() const { return together != Together::kNothing && together != Together::kExperts; }
};

const std::vector<Strategy>& strategies();
const Strategy& find_strategy(const std::string& name);  // ConfigError names them

// What a step of a model needs under a strategy.
struct Prepared {
  std::unique_ptr<DataParallel> layout;
  ForwardLossTerms forward;
  StepOptions options{};
  std::shared_ptr<Pipeline> pipeline{};
};
Prepared prepare(const Strategy& strategy, DecoderLM& model, const World& world);  // collective

}  // namespace isograd
