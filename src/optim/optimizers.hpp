// Divides a bucket into runs for an update, and updates them with LibTorch's operators.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "isograd/optimizer.hpp"
#include "kernels/flat.hpp"

namespace isograd {

// ConfigError at `where`: a pattern that fits no trained parameter, a parameter that two patterns fit.
void check_patterns(const std::string& where, const std::vector<std::string>& patterns,
                    const std::vector<std::pair<std::string, at::Tensor>>& named);

// A parameter's update depends on these in addition to the optimizer's options.
struct Individual {
  bool decays = false;
  std::int64_t missed = 0;  // updates, of all so far
  int group = -1;           // of ParameterGroup; -1: none
  bool operator==(const Individual&) const = default;
};
using IndividualOf = std::function<Individual(const Slot&)>;
inline Individual ungrouped(const Slot& slot) { return {.decays = slot.decays}; }

// A part of a bucket whose parameters are updated alike, small enough to share among threads.
struct Run {
  Range range;  // in the bucket's held elements, the first of which is 0
  Individual of{};
};

// Runs that cover the held part of the bucket, from 0 to held.size(), except slots that are not trained.
// Padding belongs to the slot before it: zero gradients and zero values stay zero under every update. The
// runs depend on the bucket alone, not on the number of threads or on the held part.
std::vector<Run> runs_of(const Bucket& bucket, std::int64_t most_elements = 1 << 16,
                         const IndividualOf& individual = ungrouped);

// Runs whose scalars differ in weight decay alone, joined: a device has threads of its own and takes few long
// passes rather than many short ones.
struct LongRun {
  Range range;
  std::vector<Run> parts{};  // in order, all of it
};
std::vector<LongRun> long_runs_of(const Bucket& bucket, const IndividualOf& individual = ungrouped);

// One zero tensor per bucket, in the type of its master; created on first use.
void ensure_state(std::vector<at::Tensor>& state, const std::vector<Bucket>& buckets);

// The updates of kernels/flat.hpp in LibTorch's operators, for buffers on other devices than the CPU; on the
// CPU too, as their twins.
namespace by_libtorch {

// Numbers that only a device knows: one in fp64 by which gradients are multiplied, as by the scalars' own,
// and one in fp32 that stops the update unless it is 0. Both are undefined where the scalars decide.
struct OnDevice {
  at::Tensor scale{}, stop{};
};

// Updates a run's elements in the type of the master; keep and weight_decay apply to those that decay. AdamW
// uses LibTorch's fused pass, SGD the same expressions as operators, each rounding once.
void adamw(const kernels::AdamW& scalars, Bucket& bucket, at::Tensor& first, at::Tensor& second,
           const LongRun& run, const OnDevice& on_device = {});
// `velocity` is null exactly when momentum is 0.
void sgd(const kernels::Sgd& scalars, Bucket& bucket, at::Tensor* velocity, const LongRun& run);

}  // namespace by_libtorch

}  // namespace isograd
