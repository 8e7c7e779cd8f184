// An all-to-all of rows in two halves, for computation between them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "isograd/group.hpp"

namespace isograd {

// Rows on their way. What is computed between start() and finish() runs while they are; autograd runs its
// backward between those of the two, while the gradients are on their way back: it takes nodes in the
// opposite order of their making. Every rank starts and finishes the same exchanges in the same order, with
// gradients enabled or not; a rank without rows, or whose loss depends on none, takes part in both
// directions.
class Exchange {
 public:
  struct State;
  Exchange();
  Exchange(Exchange&&) noexcept;
  Exchange& operator=(Exchange&&) noexcept;
  ~Exchange();

  // Collective over `group`, and so is finish(). `input_rows[r]` of `rows` [R, ...] go to rank r,
  // `output_rows[r]` come from it.
  static Exchange start(Group group, const at::Tensor& rows, Group::Rows output_rows, Group::Rows input_rows);
  at::Tensor finish();  // what came, by rank; once

 private:
  c10::intrusive_ptr<State> state_;
  at::Tensor token_{};  // no elements: it joins the two halves in the graph; undefined: no gradients
};

}  // namespace isograd
