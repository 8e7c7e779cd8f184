// A torch::nn module made ready for data parallelism: its parameters, its initial values on all ranks, and
// what in it would break the law.
#pragma once

#include "isograd/cxx20.hpp"

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

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
