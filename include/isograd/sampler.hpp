// Which samples of one's own data set each rank sees in each step, for people who do not train on text.
#pragma once

#include "isograd/cxx20.hpp"

#include <cstdint>
#include <vector>

namespace isograd {

struct SamplerOptions {
  std::int64_t samples = 0;           // of the data set
  std::int64_t samples_per_step = 1;  // the global batch, over all ranks
  int rank = 0;
  int size = 1;
  std::uint64_t seed = 0;
  bool shuffle = true;  // each epoch anew, by (seed, epoch) and never by rank
  // How a step is dealt out. The step's samples are the same either way, and so is the gradient.
  enum class Deal {
    kBlock,  // rank r gets a contiguous part; parts differ by at most one sample
    kStride  // rank r gets the r-th of every `size` samples
  } deal = Deal::kBlock;
  // Leaves out the last step of an epoch where it is short. Nothing in isograd needs it: a short step has the
  // gradient of what is in it, ranks without samples take part with zeros.
  bool drop_last = false;
};

// An epoch is a permutation of the samples, cut into steps; the last one may be short. Every sample comes
// once an epoch: nothing is repeated to make ranks even (museum B25), nothing is left out unless drop_last
// asks for it. Steps do not depend on the number of ranks, so that a run continues on another.
class Sampler {
 public:
  // ConfigError: options out of range, or drop_last with fewer samples than a step takes.
  explicit Sampler(const SamplerOptions& options);

  struct Position {
    std::int64_t epoch = 0;
    std::int64_t step = 0;  // within the epoch
  };
  std::int64_t steps_per_epoch() const;
  // Indices of this rank's samples of the next step, possibly none; crosses into the next epoch by itself.
  std::vector<std::int64_t> next();
  Position position() const { return position_; }  // of the step that next() returns
  void seek(Position position);                    // ConfigError: no such step

 private:
  void shuffle();

  SamplerOptions options_;
  Position position_;
  std::int64_t shuffled_epoch_ = -1;
  std::vector<std::int64_t> order_;  // of shuffled_epoch_
};

}  // namespace isograd
