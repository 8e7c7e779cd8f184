// What a rank throws because another one has failed and said why: the other one reports it.
// `of_operation`: what failed there was an operation (a rank was lost, hung or disagreed), so that it matters
// what this rank waited in; not a file or a model.
#pragma once

#include <utility>

#include "isograd/error.hpp"

namespace isograd {

// Whether an operation of this thread has ended because another rank failed or left its group. What the
// thread throws then, under whatever name its callers pass it on, is a consequence of that rank's error.
inline thread_local bool ended_by_another_rank = false;

class RelayedError : public PeerError {
 public:
  explicit RelayedError(ErrorText text, bool of_operation = false)
      : PeerError(std::move(text)), of_operation_(of_operation) {
    ended_by_another_rank = true;
  }
  bool of_operation() const { return of_operation_; }

 private:
  bool of_operation_;
};

}  // namespace isograd
