// Tokens on their way to experts that lie on other ranks, and back. Every rank along `ep` has tokens of its
// own and some of the experts; rows travel by one uneven all-to-all each way, whose gradients take the way
// back. Ranks without tokens, and without a loss that depends on them, take part in forward and in backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "isograd/group.hpp"
#include "parallel/expert/exchange.hpp"

namespace isograd {
// The tokens of one micro-batch in one layer.
struct Journey {
  Group::Rows sent, received;       // rows to and from each rank
  std::vector<std::int64_t> begin;  // [own experts + 1]: of the rows here, by own expert
  at::Tensor arrival;  // [rows here] int64: which of the received rows lies at a place, by expert
  at::Tensor place;    // the other way round
};

class ExpertDispatch {
 public:
  // `experts` are dealt to the ranks of `ep` in order, as evenly as possible. ConfigError: more ranks than
  // experts.
  ExpertDispatch(Group ep, std::int64_t experts);

  std::int64_t first_expert() const { return first_; }
  std::int64_t own_experts() const { return own_[static_cast<std::size_t>(ep_.rank())]; }

  // Collective. `begin` [experts + 1]: this rank's rows by expert. Ranks tell one another how many each has
  // for each expert, once for both ways; of several parts of the tokens all in one message.
  Journey plan(const std::vector<std::int64_t>& begin);
  std::vector<Journey> plan(const std::vector<std::vector<std::int64_t>>& begins);
  // rows [R, hidden] by expert, of this rank's tokens -> the rows of this rank's experts, of all ranks'
  // tokens.
  at::Tensor to_experts(const at::Tensor& rows, const Journey& journey) const;
  // What the experts made of them, back to where they came from and in the order that they had there.
  at::Tensor back(const at::Tensor& rows, const Journey& journey) const;

  // The same in halves: what is computed before the arrival runs while the rows are on their way.
  Exchange depart(const at::Tensor& rows, const Journey& journey) const;
  at::Tensor arrive(Exchange& exchange, const Journey& journey) const;
  Exchange depart_back(const at::Tensor& rows, const Journey& journey) const;

 private:
  // counts [ranks, experts], of the rows that go this way.
  Journey journey_of(const std::vector<std::int64_t>& begin, const at::Tensor& counts) const;

  Group ep_;
  std::vector<std::int64_t> own_;  // experts of each rank
  std::int64_t first_ = 0;
};

}  // namespace isograd
