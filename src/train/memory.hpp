// The costs of a run: memory, traffic and FLOPs of a rank, measured and by formula.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/expert_parallel.hpp"
#include "isograd/group.hpp"
#include "isograd/model.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/parameters.hpp"
#include "isograd/trainer.hpp"
#include "layout/cost/meter.hpp"
#include "report/report.hpp"
#include "train/config.hpp"
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

// Bytes of the storages behind buckets and state, each once and whole. On the grid `shared_on` ranks share
// one copy of the parameters: each counts its part. `only`: those on devices of one type.
PersistentBytes measure_kept(const std::vector<Bucket>& buckets, const OptimizerState& state,
                             const Grid* shared_on = nullptr,
                             std::optional<at::DeviceType> only = std::nullopt);

// Follows a run: construct it before the model. On a GPU it asks its allocator and ignores host memory.
class MemoryWatch {
 public:
  explicit MemoryWatch(at::Device device = at::kCPU);
  // With parallel.ep also measures traffic to other ranks' experts; after the model is laid out. Collective.
  void follow_experts(const RunConfig& config, const Mesh& mesh, const TaskModel::ShardedExperts& sharded);
  // Wraps the counter so that this rank's choices of experts in a step are kept.
  Counters remembering(Counters counters);
  void before_step(DataParallel& layout);
  // `shared`: one copy of the parameters. `rounds`: micro-batches, empty ones included. Collective.
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

// "ZeRO stage 2: keeps 4Ψ + 12Ψ/N" and its symbols, "with Ψ = 93 parameters, N = 4"; `more` goes between.
std::string kept_by_formula(const DataParallelPlan& plan, const std::string& more = "", bool offload = false);

// The memory of the ranks, then of the formula, under tp of rank 0's part, for `isograd train --memory`; what
// the formula is, in the summary's lines. Collective; only rank 0 gets it.
struct MemoryShown {
  ReportTable table;
  Bars bars;
};
MemoryShown memory_shown(const MemoryUse& use, const DataParallelPlan& plan, const RunConfig& config,
                         DataParallel& layout, Group& group);

// ---- model FLOPs utilisation ----

// FLOPs of forward and backward of `tokens` tokens with `pairs` attending (query, key) pairs: 6 per token and
// matrix weight, 12 per pair, head and channel (PaLM, 2022, appendix B). Masked pairs, norms, biases and
// recomputation are not counted.
double decoder_flops(const DecoderConfig& shape, double tokens, double pairs);

struct Peak {
  double flops_per_second = 0;  // of all ranks together; 0: not known, or not steady
  std::string source{};         // "measured: products of 512 x 512 matrices in float32"
};

// The median of all times if the medians of the rounds agree within kSteadyPeak, otherwise nothing.
inline constexpr double kSteadyPeak = 1.5;
std::optional<double> steady_time(const std::vector<std::vector<double>>& rounds);

// run.peak_tflops times the ranks; if that is 0, matrix products on all ranks at once, in three rounds of
// some 100 ms. The peak is 0, and `source` says so, if a rank's rounds differ too much. Collective.
Peak find_peak(const RunConfig& config, at::ScalarType dtype, at::Device device, Group& group);

}  // namespace isograd
