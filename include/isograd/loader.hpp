// What gives a run its batches, of whatever kind its data is.
#pragma once

#include "isograd/cxx20.hpp"

#include <cstdint>

#include "isograd/batch.hpp"

namespace isograd {

// Where a loader stands: enough to resume bit for bit.
struct LoaderPosition {
  std::int64_t epoch = 0;
  std::int64_t step = 0;  // within the epoch
};

// The order of samples is a function of options and seed, not of ranks: what a step holds is the same
// whatever part of it each rank gets.
class BatchLoader {
 public:
  virtual ~BatchLoader() = default;
  virtual std::int64_t steps_per_epoch() const = 0;
  // This rank's micro-batches of the next step; crosses into the next epoch by itself. May be empty on a
  // rank.
  virtual MicroBatches next() = 0;
  // The whole step on one rank, regardless of the loader's rank and size (for the oracle).
  virtual MicroBatches whole_step(LoaderPosition position) const = 0;
  virtual LoaderPosition position() const = 0;     // of the step that next() returns
  virtual void seek(LoaderPosition position) = 0;  // ConfigError: no such step
};

}  // namespace isograd
