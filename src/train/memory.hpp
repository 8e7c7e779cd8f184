// Where a rank's memory goes and what it sends, measured, beside what the formulas foretell.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/plan.hpp"
#include "plan/meter.hpp"

namespace isograd {

// Bytes of one rank.
struct MemoryUse {
  PersistentBytes kept;             // stays from step to step, by what it is for
  std::int64_t in_host_memory = 0;  // of it, where the run is on a GPU (parallel.offload)
  std::int64_t other = 0;           // stays besides: batches, buffers, staging for collectives
  std::int64_t passing =
      0;                  // the most that a step holds beyond all that: activations, gradients on their way
  std::int64_t sent = 0;  // by collectives, in a step
  std::int64_t gathered = 0, gather_bound = 0;  // of parameters, whole at a time: so far, and at most
};

// The storages behind what buckets and state refer to, each counted once: what really is allocated, slices'
// surroundings included. Where ranks keep one copy of the parameters between them, on the grid `shared_on`, a
// rank counts its part.
PersistentBytes measure_kept(const std::vector<Bucket>& buckets, const OptimizerState& state,
                             const Grid* shared_on = nullptr);

// Follows a run: made before its model is, before_step() and after_step() around each step. What is on a GPU
// LibTorch's allocator of that device counts; then host memory is left out.
class MemoryWatch {
 public:
  explicit MemoryWatch(at::Device device = at::kCPU);
  void before_step(DataParallel& layout);
  // `shared`: ranks keep one copy of the parameters between them.
  void after_step(DataParallel& layout, Optimizer& optimizer, bool shared);
  // Of the last step.
  const MemoryUse& use() const { return use_; }

 private:
  std::int64_t alive() const;
  std::int64_t peak() const;
  void restart_peak();

  at::Device device_;
  MemoryMeter meter_;
  std::int64_t start_ = 0, alive_ = 0, sent_ = 0;
  MemoryUse use_;
};

// Bytes of a parameter of this type with that many fp32 (fp64: fp64) states.
ElementBytes element_bytes(at::ScalarType parameters, int states);

// "ZeRO stage 2: keeps 4Ψ + 12Ψ/N", and "with Ψ = 93 parameters, N = 4".
std::string kept_by_formula(const DataParallelPlan& plan);
std::string symbols(const DataParallelPlan& plan);

// The table of `isograd train --memory`, a line for each rank, then the formulas: with `cut`, of a model that
// ranks hold together, those of rank 0's part, and none of what is sent. Collective; the text is on rank 0.
std::string memory_table(const MemoryUse& use, const DataParallelPlan& plan, Group& group, bool cut);

}  // namespace isograd
