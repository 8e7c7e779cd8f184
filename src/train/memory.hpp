// Where a rank's memory goes and what it sends, measured, beside what the formulas foretell.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/expert_parallel.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/parameters.hpp"
#include "isograd/trainer.hpp"
#include "layout/cost/meter.hpp"
#include "train/task.hpp"

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
  std::optional<Outcome::Sent> to_experts{};    // of dealt experts: in a step's all-to-alls
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
  // Once the model is laid out, where config.parallel.ep > 1: what goes to other ranks' experts and back is
  // followed too. Collective.
  void follow_experts(const RunConfig& config, const Mesh& mesh, const TaskModel::DealtExperts& dealt);
  // The same, remembering this rank's choices of experts in a step.
  Tally remembering(Tally tally);
  void before_step(DataParallel& layout);
  // `shared`: ranks keep one copy of the parameters between them. `rounds`: micro-batches, empty ones too.
  // Collective.
  void after_step(DataParallel& layout, Optimizer& optimizer, bool shared, std::int64_t rounds);
  // Of the last step.
  const MemoryUse& use() const { return use_; }

 private:
  std::int64_t alive() const;
  std::int64_t peak() const;
  void restart_peak();

  // What follows the exchanges with the ranks of experts.
  struct Experts {
    Group exchanges, others;  // of the same ranks; the first is what is followed
    ExpertTrafficPlan plan{};
    std::int64_t layers = 0, before = 0;  // times parts of the tokens; bytes before the step
    std::vector<double> choices{};        // of this rank in the last step, by layer and expert
    Outcome::Sent sent(std::int64_t rounds);
  };

  at::Device device_;
  MemoryMeter meter_;
  std::int64_t start_ = 0, alive_ = 0, sent_ = 0;
  std::shared_ptr<Experts> experts_{};  // null: none are dealt
  MemoryUse use_;
};

// Bytes of a parameter of this type with that many fp32 (fp64: fp64) states.
ElementBytes element_bytes(at::ScalarType parameters, int states);

// "ZeRO stage 2: keeps 4Ψ + 12Ψ/N", and "with Ψ = 93 parameters, N = 4".
std::string kept_by_formula(const DataParallelPlan& plan);
std::string symbols(const DataParallelPlan& plan);

// The table of `isograd train --memory`, a line for each rank, then the formulas, of a model that ranks hold
// together along tp those of rank 0's part. Collective; the text is on rank 0.
std::string memory_table(const MemoryUse& use, const DataParallelPlan& plan, const RunConfig& config,
                         DataParallel& layout, Group& group);

// What a rank sends for gradients and parameters in a step, of a layout whose parameters differ in the axes
// along which they are summed and kept in shards: cut along tp, experts along ep, layers along pp.

// Elements of this rank with the same axes. `whole`: of these, what stage 3 gathers once for forward and
// backward together.
struct SummedElements {
  SyncAxes sync;
  std::int64_t numel = 0, whole = 0;
};

// By the axes of each bucket, with the padding of the flat storage or without it; of stage 3 also what stays
// whole as the layout says it.
std::vector<SummedElements> summed_elements(DataParallel& layout, bool padded);

// traffic_bytes() of each, with the shards and replicas that its axes make of the ranks of `grid`: `plan`
// says everything else. `asked`: axes along which shards may lie (sharded_axes()).
TrafficBytes traffic_bytes(const DataParallelPlan& plan, const std::vector<SummedElements>& elements,
                           const Grid& grid, const AxisSet& asked);

}  // namespace isograd
