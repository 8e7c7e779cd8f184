// Data parallelism: ranks see different parts of the batch, gradients are summed over the ranks. What each
// rank keeps of parameters, gradients and optimizer state is the strategy's business: all of it, or a shard.
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
  // Behaviour. None changes the gradient.
  // Refuse ranks whose models differ (names, shapes, dtypes, values), naming the first difference.
  bool check_parameters = true;
  // ZeRO (Rajbhandari et al. 2020). 0: every rank keeps everything. 1: the optimizer's state is sharded along
  // the axes `sharded`, gradients are reduce-scattered and updated parameters gathered. 2: so are gradients;
  // each micro-batch's are reduced at once, so that every rank must make equally many. Stage 3, which shards
  // parameters too, is fully_shard().
  int stage = 0;
  // Data axes along which ranks may keep shards; along the others, dp_replicate as a rule, are replicas of
  // each. Axes that the mesh does not have are left out.
  AxisSet sharded = kShardedAxes;
  // The ranks along `sharded` keep one copy of the parameters between them, in memory that all reach. Each
  // updates its shard in place, nothing is gathered; state is sharded as in stage 1. ConfigError where the
  // backend has no such memory.
  bool share_parameters = false;
  // Gradients of bf16 parameters are kept and reduced in fp32. Off: in bf16, half the memory and traffic, and
  // every addition of a micro-batch is rounded; a reduction still adds up in fp32 and rounds once.
  bool fp32_gradients = true;
  // Stage 2 keeps whole gradients until the last micro-batch: one reduction a step, for stage 1's memory.
  bool reduce_once = false;
  // With parameters on a device other than the CPU: the summed gradients that a rank holds, the masters and
  // the optimizer's state lie in host memory. The CPU takes norms and updates, publish_parameters() copies
  // the update to the device: what others write to the parameters in between is lost. ConfigError with
  // parameters in host memory, where it all is already.
  bool offload = false;

  // Speed
  std::int64_t bucket_bytes = 25 << 20;       // of gradients
  std::int64_t first_bucket_bytes = 1 << 20;  // the first one to be complete; 0: like the others
  bool overlap = true;  // reduce a bucket as soon as its gradients are complete, inside backward
  // With overlap: once gradients have been summed for the first time, buckets are sent in the order in which
  // they became complete then. Memory does not move, and no bit depends on it.
  bool learn_order = true;
  // Names of all parameters in the order in which buckets are filled, as bucket_order() gives it; empty: the
  // reverse of `parameters`. The norm adds up by bucket, so that its last bit depends on this order.
  std::vector<std::string> order{};
};

// A strategy for getting the sum over ranks (along the axes that each parameter is summed along) of the
// gradients to where they are used. In a step:
//   begin_backward(last)   before each micro-batch's backward; after the `last` one gradients may be reduced
//   finish_reduction()     afterwards every bucket's gradients hold the sum over all ranks
//   publish_parameters()   after the optimizer's update: every rank has every rank's update
// A rank without micro-batches calls only the last two and takes part with zeros, but see
// needs_even_micro_batches().
//
// The model's own tensors stay where the layout has put them, and so does what shares their memory (detach(),
// views), whether made before the layout or after it. Values are written with write(). In-place operations
// between steps work too, the same on every rank: they are noticed and masters follow, or ConfigError where
// ranks share one copy, to which each would apply it, and where ranks have written other values. Operations
// on data() are not noticed: autograd counts none of them; detach() gives the same memory with its counter.
// Setting requires_grad off between steps freezes a parameter, on all ranks alike: no gradient, no update, no
// decay, until it is set on again. A step may be given up before its update, by all ranks in the same
// micro-batch, with zero_gradients(), also after a backward that threw. In different ones: finish_reduction()
// first, unless needs_even_micro_batches().
class DataParallel {
 public:
  virtual ~DataParallel() = default;
  // Whatever has come since the last step, announced or not, is gone. Ends reductions that are under way.
  virtual void zero_gradients() = 0;
  virtual void begin_backward(bool last) = 0;
  virtual void finish_reduction() = 0;
  // The same; `reduced` is called with each bucket in turn as soon as its gradients are final, while they are
  // in the cache. `squares`: owned_squares(bucket), where the reduction has taken them on its way.
  using Reduced = std::function<void(const Bucket&, std::optional<double> squares)>;
  virtual void finish_reduction_with(const Reduced& reduced);
  virtual void publish_parameters() {}
  // Every rank must make equally many micro-batches (empty ones, if need be): something is exchanged in each.
  virtual bool needs_even_micro_batches() const { return false; }
  // The same as long as the layout lives, and where they were; unfrozen parameters come in further ones at
  // the end.
  virtual std::vector<Bucket>& buckets() = 0;
  // Places in buckets(), in the order in which they are reduced.
  virtual std::vector<std::size_t> launch_order();
  // Whose axes say what each group of ranks does: counts are taken over mesh().counting(), norms, stops and
  // reports over mesh().all(), and what a bucket needs along the axes that it carries.
  virtual const Mesh& mesh() const = 0;
  // Bytes that this rank has sent in the layout's groups since they were made (Group::traffic), but for those
  // that learning the order of buckets costs once.
  virtual std::int64_t bytes_sent();
  // Seconds that this rank has waited for others or for data since the layout was made: communication that
  // was not hidden behind computation.
  virtual double exposed_seconds() const { return 0; }

  // `shard`, [held.size()] on each rank, as [numel] on all. Collective unless held whole: then the tensor
  // itself.
  at::Tensor gather_whole(const Bucket& bucket, const at::Tensor& shard);

  // While the result lives, the model's own tensors can be read and are whole: for checkpoints and sampling.
  // Collective where parameters are sharded; nothing, and null, elsewhere. Let go of it before the next
  // update.
  virtual std::shared_ptr<const void> whole_parameters() {
    take_over_writes({});
    return nullptr;
  }

  // Writes whole values, of any type and rounded where need be, into parameters by name, frozen ones too,
  // with their fp32 masters and into whatever each rank keeps of them. Collective, between steps and while
  // nobody holds whole_parameters(), with the same values on all ranks. ConfigError on every rank, before
  // anything is written, where one has an unknown name, another shape or other values than the others.
  void write(const std::vector<std::pair<std::string, at::Tensor>>& values);

  // Takes over what has been written in place since it was last called, so that masters and shards follow;
  // not what was written to the parameters of these names. Each step does so, and views(),
  // whole_parameters(), write() and save_checkpoint() begin with it. Not collective. ConfigError, on a rank
  // that has written, where ranks share one copy.
  virtual void take_over_writes(const std::set<std::string>& /*but_of*/) {}
  // What was taken over since it was last called is the same on all ranks, or ConfigError that names a
  // parameter. Each step does so before its update, and save_checkpoint(). Collective where something has
  // been written in place, nothing elsewhere; PeerError that names it where other ranks have written nothing.
  virtual void compare_writes() {}

  // For backwards that are recorded once and replayed, which run no hooks: whether this layout needs none but
  // to know what arrived. Then gradient_places() says which gradients a backward adds to and which it writes,
  // in words; restore_places() makes that so again after a backward that was recorded and not run;
  // arrive_again() notes the arrival of all gradients; all_gradients_arrived() is asked after a recording.
  virtual bool gradients_can_be_replayed() { return false; }
  virtual std::vector<std::uint64_t> gradient_places() const { return {}; }
  virtual void restore_places(const std::vector<std::uint64_t>& /*places*/) {}
  virtual void arrive_again() {}
  virtual bool all_gradients_arrived() const { return false; }

  // By parameter, in the model's order, whole. Collective where something is sharded: then copies, otherwise
  // views of what the buckets hold.
  struct View {
    std::string name;
    at::Tensor parameter;  // model dtype
    at::Tensor master;
    at::Tensor gradient;
  };
  std::vector<View> views();
  // Names of the parameters, bucket by bucket: DataParallelOptions::order.
  std::vector<std::string> bucket_order();

  // Beside buckets(): what the layout keeps of parameters that have been frozen from the beginning, and those
  // that lie in the model as they are.
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
  // Whatever was written in place to these parameters is replaced.
  virtual void forget_writes(const std::set<std::string>& /*names*/) {}
};

// Bucketed and overlapped: gradients are views of buckets in shared memory, a bucket is reduced when its last
// gradient arrives in the last micro-batch's backward, progress is made inside later hooks.
std::unique_ptr<DataParallel> bucketed(TrainableParameters parameters, const Mesh& mesh,
                                       DataParallelOptions options = {});

// The naive twin: one all-reduce per parameter after backward. Obviously right; the others are tested against
// it. Stage 0 only.
std::unique_ptr<DataParallel> naive(TrainableParameters parameters, const Mesh& mesh,
                                    DataParallelOptions options = {});

// A torch::nn module made ready for data parallelism: its parameters, its initial values on all ranks, and
// what in it would break the law.

// named_parameters() that require a gradient, tied ones once. Their check is module_check(module).
TrainableParameters trainable_parameters(const torch::nn::Module& module);

// Keeps the submodules whose statistics are those of one rank's rows while they train. What it returns throws
// ConfigError once one of them is in training mode: batch normalisation that train() has switched back, and
// instance normalisation that tracks running statistics. Layouts call it before each step.
std::function<void()> module_check(const torch::nn::Module& module);

enum class InitialValues {
  kFromRankZero,  // parameters and buffers of rank 0 are copied to the others
  kMustAgree      // ConfigError naming the first that differs
};

struct PrepareOptions {
  InitialValues initial = InitialValues::kFromRankZero;
  // Dropout draws from the default generator of each process, so that every layout trains with other masks:
  // the loss is that of one device in distribution only. On: that is meant.
  bool accept_dropout = false;
};

// Collective; call it before the layout is made. Ranks whose modules differ in names, shapes or dtypes are
// refused on every rank, naming the first difference, and so are unequal values if they must agree: the
// global random generator gives ranks that are threads different numbers, and ranks that are processes the
// same only if they are seeded alike. Buffers are compared and copied like parameters. ConfigError on batch
// normalisation in training mode, anywhere in the module: its statistics are those of one rank's rows, which
// is another function of the batch for every number of ranks. Use SyncBatchNorm. So it is on instance
// normalisation that tracks statistics in training mode, on dropout (of p > 0, in any mode) unless it is
// accepted, and on a parameter or buffer whose elements overlap (expand()), which no rank could write to.
void prepare_module(torch::nn::Module& module, Group group,
                    InitialValues initial = InitialValues::kFromRankZero);
void prepare_module(torch::nn::Module& module, Group group, const PrepareOptions& options);

// Collective, between steps: ConfigError that names the first buffer in which a rank differs from rank 0, as
// one does that forward changes by its own rank's rows.
void check_buffers(const torch::nn::Module& module, Group group);

struct SyncBatchNormOptions {
  std::int64_t channels = 0;
  double epsilon = 1e-5;
  double momentum = 0.1;  // of the running statistics
};

// Batch normalisation (Ioffe & Szegedy 2015) over the rows of all ranks: what one device computes on the
// whole micro-batch, forward and backward. With several micro-batches a step it is that of gradient
// accumulation on one device, where each has statistics of its own, not that of the whole batch in one
// (docs/losses.md). Input [N, C, ...] with N rows on this rank, 0 included; every rank calls it equally often
// and in the same order (StepOptions::even_micro_batches). `group` should be a group of its own
// (World::subgroup of all ranks): its collectives come in the order of forward and backward, those of
// gradients when buckets are complete. Statistics in fp32 at least. In evaluation mode the running statistics
// are used and nothing is communicated. Parameters "weight" and "bias", buffers "running_mean", "running_var"
// (of the unbiased variance) and "num_batches_tracked", as LibTorch's; a checkpointed block counts its rows
// once.
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
