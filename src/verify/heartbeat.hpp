// Waiting for work that only some ranks do, without tripping the group's timeout.
#pragma once

#include <cstdint>

#include "isograd/group.hpp"

namespace isograd {

// Ranks that work alone call tick() after each piece of it; every rank calls finish() when it has nothing
// (more) to do. Each call is one small collective, so nobody waits longer than the longest piece.
class Heartbeat {
 public:
  explicit Heartbeat(Group& group) : group_(group) {}

  void tick() { somebody_works(true); }
  void finish() {
    while (somebody_works(false)) {
    }
  }

 private:
  bool somebody_works(bool this_rank) {
    if (group_.size() == 1) return this_rank;
    at::Tensor works = at::full({1}, this_rank ? 1 : 0, at::kLong);
    group_.all_reduce(works, ReduceOp::kMax);
    return works.item<std::int64_t>() != 0;
  }

  Group& group_;
};

}  // namespace isograd
