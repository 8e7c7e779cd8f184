// Data parallelism: ranks see different parts of the batch, and gradients are summed over the ranks.
#pragma once

#include "isograd/error.hpp"

#include <torch/nn/module.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/parameters.hpp"
#include "isograd/world.hpp"

namespace isograd {

struct DataParallelOptions {
  // Behaviour. No option changes the gradient. Refuses ranks whose models differ, naming the first
  // difference.
  bool check_parameters = true;
  // ZeRO stage (Rajbhandari et al. 2020). 0: nothing is sharded. 1: the optimizer's state. 2: gradients too,
  // reduced in each micro-batch, so ranks make equally many. 3: fully_shard().
  int stage = 0;
  // Data axes along which ranks keep shards; along the others they are replicas. Missing axes are ignored.
  AxisSet sharded = kShardedAxes;
  // The ranks along `sharded` share one copy of the parameters and each updates its shard in place; state is
  // sharded as in stage 1. ConfigError: no such memory.
  bool share_parameters = false;
  // Keeps and reduces gradients of bf16 parameters in fp32. Off: in bf16, with half the memory and traffic
  // and a rounding per micro-batch; a reduction accumulates in fp32 and rounds once.
  bool fp32_gradients = true;
  // Stage 2 keeps whole gradients until the last micro-batch: one reduction per step, at stage 1's memory.
  bool reduce_once = false;
  // Keeps a rank's summed gradients, masters and state of parameters on a device in host memory; the CPU
  // computes norms and updates, publish_parameters() copies them back. ConfigError: no device.
  bool offload = false;

  // Speed
  std::int64_t bucket_bytes = 25 << 20;       // of gradients
  std::int64_t first_bucket_bytes = 1 << 20;  // of the first bucket to be complete; 0: like the others
  bool overlap = true;  // reduce a bucket as soon as its gradients are complete, inside backward
  // With overlap: reduce in the order in which buckets became complete in the first step; the same bits.
  bool learn_order = true;
  // Parameters in the order in which buckets are filled (bucket_order()); the norm's last bit depends on it.
  std::vector<std::string> order{};
};

// The values that a layout holds on this rank, between steps: for checkpoints, sampling, reports and tests.
class HeldValues {
 public:
  virtual ~HeldValues() = default;
  // Stable: buckets never move or change. Parameters unfrozen later get new buckets, appended.
  virtual std::vector<Bucket>& buckets() = 0;
  // Counts are summed over counting(), norms, stops and reports over all(), a bucket over its own axes.
  virtual const Mesh& mesh() const = 0;

  // Gathers `shard`, [held.size()] on each rank, into [numel] on all. Collective unless bucket.whole().
  at::Tensor gather_whole(const Bucket& bucket, const at::Tensor& shard);
  // While the result lives, the model's tensors are whole. Collective where sharded, elsewhere null.
  virtual std::shared_ptr<const void> whole_parameters() {
    take_over_writes({});
    return nullptr;
  }
  // Whole parameters in the model's order. Collective, and copies, where something is sharded; else views.
  struct View {
    std::string name;
    at::Tensor parameter;  // model dtype
    at::Tensor master;
    at::Tensor gradient;
  };
  std::vector<View> views();
  // Buckets of parameters that were frozen from the beginning, and frozen ones that stay in the model.
  struct Frozen {
    std::vector<const Bucket*> buckets{};
    std::vector<NamedParameter> tensors{};
  };
  virtual Frozen frozen() { return {}; }

  // Masters and shards take over values that were written in place since the last call. Each step, views(),
  // write() and save_checkpoint() begin with it. ConfigError where ranks share one copy.
  virtual void take_over_writes(const std::set<std::string>& /*excluded*/) {}
  // ConfigError that names a parameter unless all ranks took over the same; before each update and
  // checkpoint. Collective where something was written; PeerError where other ranks have written nothing.
  virtual void compare_writes() {}

  std::vector<std::string> bucket_order();  // parameters, bucket by bucket: DataParallelOptions::order
  virtual std::vector<std::size_t> launch_order();  // indices into buckets(), in the order of reduction
  virtual std::int64_t bytes_sent();                // in the layout's groups (Group::traffic)
  // Seconds that this rank has waited for others or for data: communication that was not hidden.
  virtual double exposed_seconds() const { return 0; }
};

// For backwards that are recorded once and replayed (CUDA graphs), which run no hooks.
class ReplayedBackward {
 public:
  virtual ~ReplayedBackward() = default;
  virtual bool gradients_can_be_replayed() { return false; }  // hooks only note what arrived
  // Which gradients a backward adds to and which it writes; restored after one that was recorded, not run.
  virtual std::vector<std::uint64_t> gradient_places() const { return {}; }
  virtual void restore_places(const std::vector<std::uint64_t>& /*places*/) {}
  virtual void arrive_again() {}  // notes the arrival of all gradients
  virtual bool all_gradients_arrived() const { return false; }
};

// A strategy for summing each parameter's gradient over the ranks that its placement names. In a step:
//   zero_gradients()       also cancels reductions in flight
//   begin_backward(last)   before each micro-batch's backward; after the `last` one gradients may be reduced
//   finish_reduction()     afterwards every bucket's gradients hold the sum over all ranks
//   publish_parameters()   after the optimizer's update: every rank has every rank's update
// A rank without micro-batches calls only the last two and contributes zeros, unless
// needs_even_micro_batches(). A step may be abandoned before its update with zero_gradients(), by all ranks
// in the same micro-batch; in different ones only after finish_reduction().
//
// The model's own tensors, and what shares their memory, stay where the layout put them. Values are written
// with write(), or in place between steps, the same on every rank (not through data()). Setting requires_grad
// off between steps, on all ranks, freezes a parameter: no gradient, update or decay until it is on again.
class DataParallel : public HeldValues, public ReplayedBackward {
 public:
  virtual void zero_gradients() = 0;
  virtual void begin_backward(bool last) = 0;
  virtual void finish_reduction() = 0;
  // Also calls `reduced` with each final bucket. `squares`: owned_squares(bucket), if the reduction has them.
  using Reduced = std::function<void(const Bucket&, std::optional<double> squares)>;
  virtual void finish_reduction_with(const Reduced& reduced);
  virtual void publish_parameters() {}
  // True: each micro-batch exchanges something, so every rank must make equally many (empty ones if needed).
  virtual bool needs_even_micro_batches() const { return false; }

  // Writes whole values, of any type, into parameters by name, also frozen ones, and their masters and
  // shards. Collective, between steps, without whole_parameters(). ConfigError on every rank, before anything
  // is written: an unknown name, another shape, values that differ between ranks.
  void write(const std::vector<std::pair<std::string, at::Tensor>>& values);

 protected:
  friend class StepWork;
  // Whether a backward may run in halves, as MicroBatchWork::backward_inputs and backward_weights do.
  virtual bool splits_backward() const { return true; }
  virtual void check_writable() const {}  // ConfigError where nothing can be written now
  // Drops in-place writes to these parameters: their values are about to be replaced.
  virtual void forget_writes(const std::set<std::string>& /*names*/) {}
};

// Bucketed and overlapped: gradients are views of buckets; one is reduced when its last gradient arrives.
std::unique_ptr<DataParallel> bucketed(TrainableParameters parameters, const Mesh& mesh,
                                       DataParallelOptions options = {});

// Only for its messages: which argument is none of the above.
template <typename Parameters, typename Ranks>
requires(!std::convertible_to<Parameters, TrainableParameters> ||
         !std::convertible_to<Ranks, Mesh>) std::unique_ptr<DataParallel> bucketed(Parameters&&, Ranks&&,
                                                                                   DataParallelOptions = {}) {
  static_assert(std::convertible_to<Parameters, TrainableParameters>,
                "bucketed()'s argument 1, the parameters, is isograd::trainable_parameters(model): names and "
                "tensors, where model->parameters() has no names");
  static_assert(std::convertible_to<Ranks, Mesh>,
                "bucketed()'s argument 2, the ranks, is an isograd::Group or isograd::Mesh: world.group");
  return nullptr;
}

// Naive twin: one all-reduce per parameter after backward. The others are tested against it. Stage 0 only.
std::unique_ptr<DataParallel> naive(TrainableParameters parameters, const Mesh& mesh,
                                    DataParallelOptions options = {});

// Preparing a torch::nn module for data parallelism.

// Returns named_parameters() that require a gradient, tied ones once. Their check is module_check(module).
TrainableParameters trainable_parameters(const ModuleRef& module);

// Throws ConfigError once a submodule in training mode uses statistics of one rank's rows: batch
// normalisation, or instance normalisation that tracks them. Layouts call it before each step.
std::function<void()> module_check(const ModuleRef& module);

enum class InitialValues {
  kFromRankZero,  // parameters and buffers of rank 0 are copied to the others
  kMustAgree      // ConfigError naming the first that differs
};

struct PrepareOptions {
  InitialValues initial = InitialValues::kFromRankZero;
  // Dropout draws from each process's generator, so the loss equals one device's in distribution only.
  bool accept_dropout = false;
};

// Collective, before the layout is made: compares parameters and buffers over the ranks, and copies rank 0's
// values unless they must agree. ConfigError on every rank, naming the first: names, shapes, dtypes or values
// that differ; batch normalisation in training mode (use SyncBatchNorm) or instance normalisation that tracks
// statistics; dropout with p > 0 unless accepted; a tensor with overlapping elements (expand()).
void prepare_module(const ModuleRef& module, Group group,
                    InitialValues initial = InitialValues::kFromRankZero);
void prepare_module(const ModuleRef& module, Group group, const PrepareOptions& options);

// Collective, between steps. ConfigError: the first buffer that differs from rank 0's.
void check_buffers(const ModuleRef& module, Group group);

struct SyncBatchNormOptions {
  std::int64_t channels = 0;
  double epsilon = 1e-5;
  double momentum = 0.1;  // of the running statistics
};

// Batch normalisation (Ioffe & Szegedy 2015) over the rows of all ranks, as one device computes it on the
// whole micro-batch (docs/losses.md). Input [N, C, ...], N rows on this rank, 0 included. Every rank calls it
// equally often, in the same order (StepOptions::even_micro_batches), on a group of its own
// (World::subgroup): its collectives follow forward and backward. Statistics are in fp32 at least; evaluation
// communicates nothing. Names are LibTorch's ("running_var" is unbiased).
class SyncBatchNorm : public torch::nn::Module {
 public:
  SyncBatchNorm(const SyncBatchNormOptions& options, Group group);
  at::Tensor forward(const at::Tensor& input);

  at::Tensor weight, bias, running_mean, running_var, num_batches_tracked;

 private:
  SyncBatchNormOptions options_;
  Group group_;
};

}  // namespace isograd
