// Data parallelism: ranks see different parts of the batch, and gradients are summed over the ranks. The
// strategy decides whether a rank keeps all of the parameters, gradients and optimizer state, or a shard.
#pragma once

#include "isograd/error.hpp"

#include <torch/nn/module.h>

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
  // Behaviour. No option changes the gradient.
  // Refuses ranks whose models differ (names, shapes, dtypes, values); names the first difference.
  bool check_parameters = true;
  // ZeRO stage (Rajbhandari et al. 2020). 0: every rank keeps everything. 1: the optimizer's state is sharded
  // along the axes `sharded`; gradients are reduce-scattered and updated parameters gathered. 2: gradients
  // are sharded too; each micro-batch's are reduced at once, so that every rank must make equally many
  // micro-batches. Stage 3 shards parameters too: fully_shard().
  int stage = 0;
  // Data axes along which ranks keep shards. Ranks along the other data axes (usually dp_replicate) are
  // replicas. Axes that the mesh does not have are ignored.
  AxisSet sharded = kShardedAxes;
  // The ranks along `sharded` share one copy of the parameters in common memory. Each updates its shard in
  // place and nothing is gathered; state is sharded as in stage 1. ConfigError where the backend has no such
  // memory.
  bool share_parameters = false;
  // Keeps and reduces gradients of bf16 parameters in fp32. Off: in bf16, with half the memory and traffic;
  // every addition of a micro-batch is rounded, and a reduction accumulates in fp32 and rounds once.
  bool fp32_gradients = true;
  // Stage 2 keeps whole gradients until the last micro-batch: one reduction per step, at stage 1's memory.
  bool reduce_once = false;
  // For parameters on a device other than the CPU: the rank's summed gradients, master weights and optimizer
  // state are kept in host memory. The CPU computes norms and updates; publish_parameters() copies the update
  // to the device and overwrites what others wrote to the parameters in between. ConfigError with parameters
  // in host memory.
  bool offload = false;

  // Speed
  std::int64_t bucket_bytes = 25 << 20;       // of gradients
  std::int64_t first_bucket_bytes = 1 << 20;  // of the first bucket to be complete; 0: like the others
  bool overlap = true;  // reduce a bucket as soon as its gradients are complete, inside backward
  // With overlap: from the second step on, buckets are reduced in the order in which they became complete in
  // the first. Memory does not move, and no bit depends on it.
  bool learn_order = true;
  // Names of all parameters in the order in which buckets are filled, as bucket_order() returns it; empty:
  // the reverse of `parameters`. The norm is summed by bucket, so its last bit depends on this order.
  std::vector<std::string> order{};
};

// A strategy for summing each parameter's gradient over ranks, along the axes that the parameter needs. In a
// step:
//   begin_backward(last)   before each micro-batch's backward; after the `last` one gradients may be reduced
//   finish_reduction()     afterwards every bucket's gradients hold the sum over all ranks
//   publish_parameters()   after the optimizer's update: every rank has every rank's update
// A rank without micro-batches calls only the last two and contributes zeros, unless
// needs_even_micro_batches().
//
// The model's own tensors, and whatever shares their memory (detach(), views), stay where the layout put
// them. Values are written with write(), or in place between steps, the same on every rank: masters follow.
// ConfigError where ranks wrote different values, or share one copy (each would apply the write). Writes
// through data() are not seen; detach() shares the memory and autograd's counter. Setting requires_grad off
// between steps, on all ranks, freezes a parameter: no gradient, no update, no decay, until it is on again.
//
// A step may be abandoned before its update with zero_gradients(), by all ranks in the same micro-batch, also
// after a backward that threw. In different micro-batches: call finish_reduction() first, unless
// needs_even_micro_batches().
class DataParallel {
 public:
  virtual ~DataParallel() = default;
  // Zeroes all gradients and cancels reductions in flight.
  virtual void zero_gradients() = 0;
  virtual void begin_backward(bool last) = 0;
  virtual void finish_reduction() = 0;
  // As finish_reduction(); also calls `reduced` with each bucket as soon as its gradients are final and still
  // in the cache. `squares`: owned_squares(bucket), if the reduction computed them.
  using Reduced = std::function<void(const Bucket&, std::optional<double> squares)>;
  virtual void finish_reduction_with(const Reduced& reduced);
  virtual void publish_parameters() {}
  // True: something is exchanged in each micro-batch, so every rank must make equally many (empty ones if
  // needed).
  virtual bool needs_even_micro_batches() const { return false; }
  // Stable: buckets never move or change. Parameters unfrozen later get new buckets, appended.
  virtual std::vector<Bucket>& buckets() = 0;
  // Indices into buckets(), in the order of their reduction.
  virtual std::vector<std::size_t> launch_order();
  // Its axes say what each group of ranks does: counts are summed over mesh().counting(); norms, stops and
  // reports over mesh().all(); a bucket over the axes that it carries.
  virtual const Mesh& mesh() const = 0;
  // Bytes that this rank has sent in the layout's groups since they were made (Group::traffic), without the
  // one exchange that learns the order of buckets.
  virtual std::int64_t bytes_sent();
  // Seconds that this rank has waited for others or for data since the layout was made: communication that
  // was not hidden behind computation.
  virtual double exposed_seconds() const { return 0; }

  // Gathers `shard`, [held.size()] on each rank, into [numel] on all. Collective, unless each rank holds the
  // whole bucket: then it returns the tensor itself.
  at::Tensor gather_whole(const Bucket& bucket, const at::Tensor& shard);

  // While the result lives, the model's own tensors are whole and can be read, for checkpoints and sampling.
  // Collective where parameters are sharded; elsewhere it does nothing and returns null. Release it before
  // the next update.
  virtual std::shared_ptr<const void> whole_parameters() {
    take_over_writes({});
    return nullptr;
  }

  // Writes whole values, of any type and rounded where needed, into parameters by name, frozen ones too, and
  // into their fp32 masters and shards. Collective, between steps, with the same values on all ranks, and
  // while nobody holds whole_parameters(). ConfigError on every rank, before anything is written, where one
  // has an unknown name, another shape or other values.
  void write(const std::vector<std::pair<std::string, at::Tensor>>& values);

  // Takes over values that were written in place since the last call, except to the named parameters, so that
  // masters and shards follow. Each step does so, and views(), whole_parameters(), write() and
  // save_checkpoint() begin with it. Not collective. ConfigError, on a rank that has written, where ranks
  // share one copy.
  virtual void take_over_writes(const std::set<std::string>& /*but_of*/) {}
  // Compares what was taken over since the last call: ConfigError that names a parameter unless all ranks
  // have the same. Each step calls it before its update, and so does save_checkpoint(). Collective where
  // something was written in place; PeerError that names it where other ranks have written nothing.
  virtual void compare_writes() {}

  // For backwards that are recorded once and replayed, which run no hooks. gradients_can_be_replayed(): the
  // layout needs hooks only to know what arrived. gradient_places() describes which gradients a backward adds
  // to and which it writes; restore_places() sets that state again after a backward that was recorded and not
  // run. arrive_again() notes the arrival of all gradients; all_gradients_arrived() is asked after a
  // recording.
  virtual bool gradients_can_be_replayed() { return false; }
  virtual std::vector<std::uint64_t> gradient_places() const { return {}; }
  virtual void restore_places(const std::vector<std::uint64_t>& /*places*/) {}
  virtual void arrive_again() {}
  virtual bool all_gradients_arrived() const { return false; }

  // Whole parameters in the model's order. Collective where something is sharded, and then copies; otherwise
  // views of the buckets.
  struct View {
    std::string name;
    at::Tensor parameter;  // model dtype
    at::Tensor master;
    at::Tensor gradient;
  };
  std::vector<View> views();
  // Names of the parameters, bucket by bucket: DataParallelOptions::order.
  std::vector<std::string> bucket_order();

  // In addition to buckets(): buckets of parameters that were frozen from the beginning, and frozen
  // parameters that stay in the model as they are.
  struct Frozen {
    std::vector<const Bucket*> buckets{};
    std::vector<NamedParameter> tensors{};
  };
  virtual Frozen frozen() { return {}; }

 protected:
  friend class StepWork;
  // Whether a backward may run in halves, as MicroBatchWork::backward_inputs and backward_weights do.
  virtual bool splits_backward() const { return true; }
  virtual void check_writable() const {}  // ConfigError where nothing can be written now
  // Drops in-place writes to these parameters: their values are about to be replaced.
  virtual void forget_writes(const std::set<std::string>& /*names*/) {}
};

// Bucketed and overlapped: gradients are views of buckets in shared memory. A bucket is reduced when its last
// gradient arrives in the last micro-batch's backward; later hooks make progress on it.
std::unique_ptr<DataParallel> bucketed(TrainableParameters parameters, const Mesh& mesh,
                                       DataParallelOptions options = {});

// Naive twin: one all-reduce per parameter after backward. The others are tested against it. Stage 0 only.
std::unique_ptr<DataParallel> naive(TrainableParameters parameters, const Mesh& mesh,
                                    DataParallelOptions options = {});

// Preparing a torch::nn module for data parallelism: its parameters, equal initial values on all ranks, and
// checks.

// Returns named_parameters() that require a gradient, tied ones once. Their check is module_check(module).
TrainableParameters trainable_parameters(const torch::nn::Module& module);

// Returns a check that throws ConfigError once a submodule in training mode uses statistics of one rank's
// rows: batch normalisation that train() switched back, or instance normalisation that tracks running
// statistics. Layouts call it before each step.
std::function<void()> module_check(const torch::nn::Module& module);

enum class InitialValues {
  kFromRankZero,  // parameters and buffers of rank 0 are copied to the others
  kMustAgree      // ConfigError naming the first that differs
};

struct PrepareOptions {
  InitialValues initial = InitialValues::kFromRankZero;
  // Accepts dropout. It draws from each process's default generator, so every layout trains with other masks,
  // and the loss equals one device's in distribution only.
  bool accept_dropout = false;
};

// Collective; call it before the layout is made. Compares parameters and buffers over the ranks, and copies
// rank 0's values unless they must agree. (The global random generator gives ranks that are threads different
// numbers, and processes the same ones only if they are seeded alike.) ConfigError on every rank, naming the
// first case:
//   - names, shapes, dtypes, or values that must agree, differ between ranks
//   - batch normalisation in training mode anywhere in the module: it would use statistics of one rank's
//     rows, another function of the batch for every number of ranks. Use SyncBatchNorm.
//   - instance normalisation in training mode that tracks statistics
//   - dropout with p > 0, in any mode, unless it is accepted
//   - a parameter or buffer with overlapping elements (expand()), which no rank could write to
void prepare_module(torch::nn::Module& module, Group group,
                    InitialValues initial = InitialValues::kFromRankZero);
void prepare_module(torch::nn::Module& module, Group group, const PrepareOptions& options);

// Collective, between steps. ConfigError that names the first buffer that differs from rank 0's, e.g. one
// that forward changes by its own rank's rows.
void check_buffers(const torch::nn::Module& module, Group group);

struct SyncBatchNormOptions {
  std::int64_t channels = 0;
  double epsilon = 1e-5;
  double momentum = 0.1;  // of the running statistics
};

// Batch normalisation (Ioffe & Szegedy 2015) over the rows of all ranks: forward and backward compute what
// one device computes on the whole micro-batch. With several micro-batches per step, each has statistics of
// its own, as with gradient accumulation on one device (docs/losses.md). Input [N, C, ...] with N rows on
// this rank, 0 included. Every rank calls it equally often and in the same order
// (StepOptions::even_micro_batches). Give it a group of its own (World::subgroup of all ranks): its
// collectives follow the order of forward and backward, gradient reductions the order of complete buckets.
// Statistics are in fp32 at least. In evaluation mode it uses running statistics and communicates nothing.
// Parameters and buffers have LibTorch's names ("running_var" is of the unbiased variance); a checkpointed
// block counts its rows once.
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
