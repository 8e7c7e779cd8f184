// Waiting for work that only some ranks do, without tripping the group's timeout.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "isograd/group.hpp"
#include "isograd/verify.hpp"

namespace isograd {

// Ranks that work alone call tick() after each piece of it; every rank calls finish() when it has nothing
// (more) to do. Each call is one small collective, so nobody waits longer than the longest piece. Where any
// rank's `stop` says so, the call throws VerifyStopped on all.
class Heartbeat {
 public:
  explicit Heartbeat(Group& group, std::function<bool()> stop = {}) : group_(group), stop_(std::move(stop)) {}

  void tick() { somebody_works(true); }
  void finish() {
    while (somebody_works(false)) {
    }
  }

 private:
  bool somebody_works(bool this_rank) {
    const bool stops = stop_ && stop_();
    if (group_.size() == 1) {
      if (stops) throw VerifyStopped();
      return this_rank;
    }
    at::Tensor said = at::zeros({2}, at::kLong);
    said[0] = this_rank ? 1 : 0, said[1] = stops ? 1 : 0;
    group_.all_reduce(said, ReduceOp::kMax);
    if (said[1].item<std::int64_t>() != 0) throw VerifyStopped();
    return said[0].item<std::int64_t>() != 0;
  }

  Group& group_;
  std::function<bool()> stop_;
};

}  // namespace isograd
