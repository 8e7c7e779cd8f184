#include "parallel/tensor/model_seams.hpp"

#include "base/refuse.hpp"
#include "model/fused.hpp"
#include "parallel/tensor/overlap.hpp"

namespace isograd {

ModelSeams stream_seams(const Group& tp, const TensorParallelOptions& options) {
  const TensorOverlap overlap = options.overlap;
  ModelSeams seams;
  seams.use = [tp](const at::Tensor& same) { return isograd::enter(tp, same); };
  if (!options.sequence_parallel) {
    if (overlap == TensorOverlap::kTokens)
      refuse("parallel.tensor_overlap", "tokens, and parallel.sequence_parallel off",
             "tokens that are cut between the products", "Choose weights or none, or cut the tokens");
    seams.enter = [tp](const at::Tensor& x, std::int64_t) { return isograd::enter(tp, x); };
    seams.leave = [tp](const at::Tensor& part) { return isograd::leave(tp, part); };
    if (overlap != TensorOverlap::kNone)
      seams.enter_products = [tp, overlap](const at::Tensor& x, std::int64_t,
                                           const std::vector<at::Tensor>& weights,
                                           const std::vector<at::Tensor>& biases) {
        // Without a gradient of x on any rank there is nothing to sum; the checks are enter()'s.
        if (!x.requires_grad() || seams_are_checked()) return linears(isograd::enter(tp, x), weights, biases);
        return enter_linears(tp, x, {}, weights, biases, overlap);
      };
    return seams;
  }
  seams.enter = [tp](const at::Tensor& x, std::int64_t tokens) {
    return enter_cut(tp, x, split_rows(tokens, tp.size()));
  };
  seams.leave = [tp](const at::Tensor& part) { return leave_cut(tp, part); };
  seams.all_tokens = [tp](const at::Tensor& own, std::int64_t tokens) {
    return gather_tokens(tp, own, split_rows(tokens, tp.size()));
  };
  if (overlap != TensorOverlap::kNone)
    seams.enter_products = [tp, overlap](const at::Tensor& x, std::int64_t tokens,
                                         const std::vector<at::Tensor>& weights,
                                         const std::vector<at::Tensor>& biases) {
      return enter_linears(tp, x, split_rows(tokens, tp.size()), weights, biases, overlap);
    };
  if (overlap == TensorOverlap::kTokens)
    seams.product_leave = [tp](const at::Tensor& x, const at::Tensor& weight) {
      if (seams_are_checked()) return leave_cut(tp, linears(x, {weight}, {at::Tensor()})[0]);  // its checks
      return linear_leave_cut(tp, x, weight, split_rows(x.size(0), tp.size()));
    };
  return seams;
}

}  // namespace isograd
