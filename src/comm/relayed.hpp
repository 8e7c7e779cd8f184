// The error of a rank that ends because another rank failed and reported the cause.
// `of_operation`: the failure was an operation (a rank was lost, hung or disagreed), not a file or a model.
// Only then does it matter where this rank waited.
#pragma once

#include <utility>

#include "isograd/error.hpp"

namespace isograd {

// Whether an operation of this thread has ended because another rank failed or left its group. Any error that
// the thread throws afterwards is a consequence of that rank's error.
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
