// How an update walks over a bucket: pieces with one weight decay, small enough to share among threads.
#pragma once

#include <vector>

#include "isograd/parameters.hpp"

namespace isograd {

struct Run {
  Range range;  // in the bucket's held elements, the first of which is 0
  bool decays = false;
};

// Covers what the bucket holds, from 0 to held.size(). Padding goes with the slot before it: zero gradients
// and zero values stay zero under every update. The cut depends on the bucket, not on the number of threads
// or on what is held of it.
std::vector<Run> runs_of(const Bucket& bucket, std::int64_t most_elements = 1 << 16);

// Calls `pass(run)` for all runs, on the threads of this rank.
void for_each_run(const Bucket& bucket, const std::function<void(const Run&)>& pass);

// One zero tensor per bucket, in the type of the bucket's master; made at the first call.
void ensure_state(std::vector<at::Tensor>& state, const std::vector<Bucket>& buckets);

}  // namespace isograd
