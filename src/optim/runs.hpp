// How an update walks over a bucket: pieces with one weight decay, small enough to share among threads.
#pragma once

#include <vector>

#include "isograd/parameters.hpp"

namespace isograd {

struct Run {
  Range range;
  bool decays = false;
};

// Covers the bucket from 0 to numel. Padding goes with the slot before it: zero gradients and zero values
// stay zero under every update. The cut does not depend on the number of threads.
std::vector<Run> runs_of(const BucketPlan& plan);

// Calls `pass(run)` for all runs, on the threads of this rank.
void for_each_run(const BucketPlan& plan, const std::function<void(const Run&)>& pass);

// One zero tensor per bucket, in the type of the bucket's master; made at the first call.
void ensure_state(std::vector<at::Tensor>& state, const std::vector<Bucket>& buckets);

}  // namespace isograd
