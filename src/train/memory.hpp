// Measures a rank's memory and its traffic, and compares both with the formulas.
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
  std::int64_t other = 0;           // other memory that stays: batches, buffers, staging for collectives
  std::int64_t passing = 0;         // peak of a step above all that: activations, gradients in transit
  std::int64_t sent = 0;            // by collectives, in a step
  std::int64_t gathered = 0, gather_bound = 0;  // of parameters, whole at a time: so far, and at most
  std::optional<Outcome::Sent> to_experts{};    // to other ranks' experts: all-to-alls of a step
};

// Bytes of the storages behind buckets and state, each counted once. Slices count with the whole storage, as
// allocated. Where ranks share one copy of the parameters, on the grid `shared_on`, a rank counts its part.
PersistentBytes measure_kept(const std::vector<Bucket>& buckets, const OptimizerState& state,
                             const Grid* shared_on = nullptr);

// Follows a run. Construct it before the model; call before_step() and after_step() around each step. On a
// GPU it asks LibTorch's allocator of that device and ignores host memory.
class MemoryWatch {
 public:
  explicit MemoryWatch(at::Device device = at::kCPU);
  // Also measures the traffic to other ranks' experts. Call it after the model is laid out, if
  // config.parallel.ep > 1. Collective.
  void follow_experts(const RunConfig& config, const Mesh& mesh, const TaskModel::ShardedExperts& sharded);
  // Wraps the counter so that this rank's choices of experts in a step are kept.
  Counters remembering(Counters counters);
  void before_step(DataParallel& layout);
  // `shared`: ranks share one copy of the parameters. `rounds`: micro-batches, empty ones included.
  // Collective.
  void after_step(DataParallel& layout, Optimizer& optimizer, bool shared, std::int64_t rounds);
  // Figures of the last step.
  const MemoryUse& use() const { return use_; }

 private:
  std::int64_t alive() const;
  std::int64_t peak() const;
  void restart_peak();

  // Measures the exchanges with the ranks of experts.
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
  std::shared_ptr<Experts> experts_{};  // null: experts are not sharded
  MemoryUse use_;
};

// Bytes of a parameter of this type with that many fp32 (fp64: fp64) states.
ElementBytes element_bytes(at::ScalarType parameters, int states);

// "ZeRO stage 2: keeps 4Ψ + 12Ψ/N" and its symbols, "with Ψ = 93 parameters, N = 4"; `more` goes between.
std::string kept_by_formula(const DataParallelPlan& plan, const std::string& more = "");

// The table of `isograd train --memory`: a line for each rank, then the formulas. For a tensor-parallel
// model the formulas are those of rank 0's part. Collective; only rank 0 gets the text.
std::string memory_table(const MemoryUse& use, const DataParallelPlan& plan, const RunConfig& config,
                         DataParallel& layout, Group& group);

using SharedElements = DataParallelPlan::Elements;

// The entry of a plan for elements with these axes. Parameters differ in the axes along which they are summed
// and sharded: sharded along tp, experts along ep, layers along pp. `asked`: axes that may be sharded
// (sharded_axes()).
SharedElements shared_elements(const SyncAxes& sync, const Grid& grid, const AxisSet& asked,
                               std::int64_t numel, std::int64_t whole = 0);

// One entry for each bucket, with or without the padding of flat storage, for traffic_bytes(). For stage 3
// with the elements that stay whole, as the layout reports them.
std::vector<SharedElements> shared_elements(DataParallel& layout, const AxisSet& asked, bool padded);

}  // namespace isograd
