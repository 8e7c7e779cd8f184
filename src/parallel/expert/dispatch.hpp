// Dispatch of tokens to experts on other ranks along `ep`, and combine of what they return: an uneven
// all-to-all each way, whose gradients go the other way. Ranks without tokens take part.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <vector>

#include "isograd/group.hpp"

namespace isograd {

// An all-to-all of rows in two halves. What is computed between start() and finish() overlaps with it, and
// its backward with the exchange of gradients: autograd takes nodes in the opposite order of their making.
// Collective: every rank starts and finishes the same exchanges in the same order.
class Exchange {
 public:
  struct State;
  Exchange();
  Exchange(Exchange&&) noexcept;
  Exchange& operator=(Exchange&&) noexcept;
  ~Exchange();

  // `input_rows[r]` of `rows` [R, ...] go to rank r, `output_rows[r]` come from it.
  static Exchange start(Group group, const at::Tensor& rows, Group::Rows output_rows, Group::Rows input_rows);
  at::Tensor finish();  // the received rows, by rank; once

 private:
  c10::intrusive_ptr<State> state_;
  at::Tensor token_{};  // no elements: joins the two halves in the graph; undefined: no gradients
};

// For one part of a rank's tokens in one layer.
struct DispatchPlan {
  Group::Rows sent, received;       // rows to and from each rank
  std::vector<std::int64_t> begin;  // [own experts + 1]: of the received rows, sorted by own expert
  at::Tensor by_expert;             // [received rows] int64: which row is at a place of that order
  at::Tensor place;                 // the inverse
};

class ExpertDispatch {
 public:
  // Experts are assigned to the ranks of `ep` in order, as evenly as possible. ConfigError: more ranks than
  // experts.
  ExpertDispatch(Group ep, std::int64_t experts);

  std::int64_t first_expert() const { return first_; }
  std::int64_t own_experts() const { return own_[static_cast<std::size_t>(ep_.rank())]; }

  // Collective: one message with the numbers of rows of all parts. `begins`: for each part, this rank's rows
  // by expert, [experts + 1].
  std::vector<DispatchPlan> plan(const std::vector<std::vector<std::int64_t>>& begins) const;
  // rows [R, hidden] of this rank's tokens, by expert -> the rows of this rank's experts.
  Exchange start_dispatch(const at::Tensor& rows, const DispatchPlan& plan) const;
  at::Tensor finish_dispatch(Exchange& exchange, const DispatchPlan& plan) const;
  // The experts' outputs, back in the order of start_dispatch()'s rows: finish() gives them.
  Exchange start_combine(const at::Tensor& rows, const DispatchPlan& plan) const;

 private:
  // counts [ranks, experts], of the rows of this part.
  DispatchPlan plan_of(const std::vector<std::int64_t>& begin, const at::Tensor& counts) const;

  Group ep_;
  std::vector<std::int64_t> own_;  // experts of each rank
  std::int64_t first_ = 0;
};

}  // namespace isograd
