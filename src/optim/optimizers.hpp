// Divides a bucket into runs for an update: each has one weight decay and is small enough to share among
// threads.
#pragma once

#include <vector>

#include "isograd/optimizer.hpp"

namespace isograd {

struct Run {
  Range range;  // in the bucket's held elements, the first of which is 0
  bool decays = false;
  std::int64_t missed = 0;  // of all updates so far, by its parameters
};

// Tracks the parameters whose state an optimizer keeps, and the updates that each has missed.
class UpdateCounter {
 public:
  // Before anything is done with `buckets`: ConfigError unless they are those of the calls before, of which
  // further ones may follow; their parameters have missed all `updates` so far.
  void look(const std::vector<Bucket>& buckets, std::int64_t updates);
  void count_update(const std::vector<Bucket>& buckets);  // of which frozen parameters get nothing
  const Optimizer::Missed& missed() const { return missed_; }
  void set_missed(Optimizer::Missed missed) { missed_ = std::move(missed); }

 private:
  struct Place {
    std::string name;
    std::int64_t offset;
  };
  std::vector<std::vector<Place>> known_;  // by bucket and slot
  Optimizer::Missed missed_;
};

// Runs that cover the held part of the bucket, from 0 to held.size(), except slots that are not trained.
// Padding belongs to the slot before it: zero gradients and zero values stay zero under every update. The
// runs depend on the bucket alone, not on the number of threads or on the held part.
std::vector<Run> runs_of(const Bucket& bucket, std::int64_t most_elements = 1 << 16,
                         const Optimizer::Missed& missed = {});

// Calls `pass(run)` for all runs, on the threads of this rank.
void for_each_run(const Bucket& bucket, const Optimizer::Missed& missed,
                  const std::function<void(const Run&)>& pass);

// Runs whose scalars differ in weight decay alone, joined: a device has threads of its own and takes few long
// passes rather than many short ones.
struct LongRun {
  Range range;
  std::vector<Range> decaying{};  // parts of it
  std::int64_t missed = 0;
};
std::vector<LongRun> long_runs_of(const Bucket& bucket, const Optimizer::Missed& missed = {});

// One zero tensor per bucket, in the type of its master; created on first use.
void ensure_state(std::vector<at::Tensor>& state, const std::vector<Bucket>& buckets);

}  // namespace isograd
