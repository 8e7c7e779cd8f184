// Flash attention of the stand-in GPU (standin_gpu.cpp): LibTorch has it for GPUs alone. By the definition,
// in fp32, and as strict as the real one about what it is given.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

namespace {

struct Flash {
  at::Tensor q, k, v, weights, log_sums;  // [B, H, ...]
  double scale = 1;
  std::int64_t groups = 1;

  // q [B, M, H, D], k and v [B, N, Hkv, D]
  Flash(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, bool causal,
        std::optional<double> given)
      : scale(given.value_or(1 / std::sqrt(static_cast<double>(queries.size(3))))),
        groups(queries.size(2) / keys.size(2)) {
    for (const at::Tensor& each : {queries, keys, values})
      TORCH_CHECK(each.is_cuda() && each.dim() == 4 && each.stride(3) == 1 && each.size(3) % 8 == 0 &&
                      (each.scalar_type() == at::kBFloat16 || each.scalar_type() == at::kHalf),
                  "stand-in GPU: flash attention of ", each.scalar_type(), " ", each.sizes(), " on ",
                  each.device());
    q = heads(queries);
    k = heads(keys.repeat_interleave(groups, 2));
    v = heads(values.repeat_interleave(groups, 2));
    at::Tensor scores = at::matmul(q, k.transpose(2, 3)).mul_(scale);
    if (causal)
      scores.masked_fill_(at::ones({q.size(2), k.size(2)}, scores.options().dtype(at::kBool)).triu_(1),
                          -std::numeric_limits<double>::infinity());
    log_sums = at::logsumexp(scores, {3});
    weights = (scores - log_sums.unsqueeze(3)).exp_();
  }
  static at::Tensor heads(const at::Tensor& x) { return x.to(at::kFloat).transpose(1, 2); }
  // [B, H, N, D] -> [B, N, Hkv, D], over the query heads that share a key head
  at::Tensor of_keys(const at::Tensor& x, const at::Tensor& like) const {
    return x.transpose(1, 2)
        .reshape({x.size(0), x.size(2), x.size(1) / groups, groups, x.size(3)})
        .sum(3)
        .to(like.scalar_type());
  }
};

using Perhaps = const std::optional<at::Tensor>&;

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> flash(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Perhaps, Perhaps, c10::SymInt, c10::SymInt,
    double, bool causal, bool, std::optional<double> scale, std::optional<c10::SymInt>,
    std::optional<c10::SymInt>, Perhaps, Perhaps, Perhaps, std::optional<std::int64_t>) {
  const Flash flash(q, k, v, causal, scale);
  const at::Tensor out = at::matmul(flash.weights, flash.v).transpose(1, 2).to(q.scalar_type()).contiguous();
  return {out, flash.log_sums, at::empty({2}, q.options().dtype(at::kUInt64)), at::empty({}, q.options()),
          at::empty({0}, q.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& log_sums, const at::Tensor&, const at::Tensor&, c10::SymInt,
    c10::SymInt, double, bool causal, const at::Tensor&, const at::Tensor&, std::optional<double> scale,
    std::optional<c10::SymInt>, std::optional<c10::SymInt>) {
  TORCH_CHECK(at::globalContext().deterministicAlgorithms(),
              "stand-in GPU: flash attention would add gradients in an order that changes from run to run");
  const Flash flash(q, k, v, causal, scale);
  TORCH_CHECK(log_sums.is_contiguous() && log_sums.scalar_type() == at::kFloat &&
                  log_sums.sizes() == flash.log_sums.sizes(),
              "stand-in GPU: flash attention with log-sums ", log_sums.scalar_type(), " ", log_sums.sizes());
  const at::Tensor g = Flash::heads(gradient);
  const at::Tensor mean = (g * Flash::heads(out)).sum(3, true);
  const at::Tensor of_scores =
      (at::matmul(g, flash.v.transpose(2, 3)) - mean).mul_(flash.weights).mul_(flash.scale);
  return {at::matmul(of_scores, flash.k).transpose(1, 2).to(q.scalar_type()),
          flash.of_keys(at::matmul(of_scores.transpose(2, 3), flash.q), k),
          flash.of_keys(at::matmul(flash.weights.transpose(2, 3), g), v)};
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_flash_attention_forward", &flash);
  library.impl("_flash_attention_backward", &flash_backward);
}

}  // namespace
