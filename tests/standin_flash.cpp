// Flash attention of the stand-in GPU (standin_gpu.cpp): LibTorch has it for GPUs alone. By the definition,
// in fp32, and as strict as the real one about what it is given.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

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
  at::Tensor out() const { return at::matmul(weights, v).transpose(1, 2).contiguous(); }
  std::array<at::Tensor, 3> gradients(const at::Tensor& gradient, const at::Tensor& out,
                                      const at::Tensor& keys) const {
    const at::Tensor g = heads(gradient), mean = (g * heads(out)).sum(3, true);
    const at::Tensor of_scores = (at::matmul(g, v.transpose(2, 3)) - mean).mul_(weights).mul_(scale);
    return {at::matmul(of_scores, k).transpose(1, 2).to(keys.scalar_type()),
            of_keys(at::matmul(of_scores.transpose(2, 3), q), keys),
            of_keys(at::matmul(weights.transpose(2, 3), g), keys)};
  }
};

using Perhaps = const std::optional<at::Tensor>&;

// x [T, H, ...] by fragment, as batches of one: [1, length, H, ...].
std::vector<at::Tensor> fragments(const at::Tensor& x, const at::Tensor& cu_seqlens, std::int64_t longest) {
  TORCH_CHECK(cu_seqlens.is_cuda() && cu_seqlens.scalar_type() == at::kInt && cu_seqlens.is_contiguous(),
              "stand-in GPU: cu_seqlens ", cu_seqlens.scalar_type(), " on ", cu_seqlens.device());
  const auto* at = static_cast<const std::int32_t*>(cu_seqlens.const_data_ptr());
  std::vector<at::Tensor> parts;
  for (std::int64_t f = 0; f + 1 < cu_seqlens.numel(); ++f) {
    TORCH_CHECK(at[f + 1] - at[f] <= longest, "stand-in GPU: a fragment longer than ", longest);
    parts.push_back(x.narrow(0, at[f], at[f + 1] - at[f]).unsqueeze(0));
  }
  TORCH_CHECK(at[cu_seqlens.numel() - 1] == x.size(0), "stand-in GPU: cu_seqlens of other tokens");
  return parts;
}

struct Whole {
  at::Tensor out;
  std::vector<at::Tensor> log_sums;  // by fragment, [H, length]
};
Whole forward_by_fragment(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& cu_seqlens, std::int64_t longest, bool causal,
                          std::optional<double> scale) {
  const auto qs = fragments(q, cu_seqlens, longest), ks = fragments(k, cu_seqlens, longest),
             vs = fragments(v, cu_seqlens, longest);
  Whole whole;
  std::vector<at::Tensor> outs;
  for (std::size_t f = 0; f < qs.size(); ++f) {
    if (qs[f].size(1) == 0) {
      whole.log_sums.push_back(at::zeros({q.size(1), 0}, q.options().dtype(at::kFloat)));
      continue;
    }
    const Flash flash(qs[f], ks[f], vs[f], causal, scale);
    outs.push_back(flash.out().squeeze(0).to(q.scalar_type()));
    whole.log_sums.push_back(flash.log_sums.squeeze(0));
  }
  whole.out = at::cat(outs);
  return whole;
}
std::array<at::Tensor, 3> backward_by_fragment(const at::Tensor& gradient, const at::Tensor& q,
                                               const at::Tensor& k, const at::Tensor& v,
                                               const at::Tensor& out, const at::Tensor& cu_seqlens,
                                               std::int64_t longest, bool causal,
                                               std::optional<double> scale) {
  const auto gs = fragments(gradient, cu_seqlens, longest), qs = fragments(q, cu_seqlens, longest),
             ks = fragments(k, cu_seqlens, longest), vs = fragments(v, cu_seqlens, longest),
             outs = fragments(out, cu_seqlens, longest);
  std::array<std::vector<at::Tensor>, 3> parts;
  for (std::size_t f = 0; f < qs.size(); ++f) {
    if (qs[f].size(1) == 0) continue;
    const auto own = Flash(qs[f], ks[f], vs[f], causal, scale).gradients(gs[f], outs[f], ks[f]);
    for (std::size_t i = 0; i < 3; ++i) parts[i].push_back(own[i].squeeze(0));
  }
  return {at::cat(parts[0]), at::cat(parts[1]), at::cat(parts[2])};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> flash(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Perhaps cu_q, Perhaps, c10::SymInt longest,
    c10::SymInt, double, bool causal, bool, std::optional<double> scale, std::optional<c10::SymInt>,
    std::optional<c10::SymInt>, Perhaps, Perhaps, Perhaps, std::optional<std::int64_t>) {
  const at::Tensor nothing_drawn = at::empty({2}, q.options().dtype(at::kUInt64)),
                   unused = at::empty({}, q.options()), no_mask = at::empty({0}, q.options());
  if (cu_q) {
    const Whole whole = forward_by_fragment(q, k, v, *cu_q, longest.expect_int(), causal, scale);
    return {whole.out, at::cat(whole.log_sums, 1), nothing_drawn, unused, no_mask};
  }
  const Flash flash(q, k, v, causal, scale);
  return {flash.out().to(q.scalar_type()), flash.log_sums, nothing_drawn, unused, no_mask};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& gradient, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const at::Tensor& out, const at::Tensor& log_sums, const at::Tensor& cu_q, const at::Tensor&,
    c10::SymInt longest, c10::SymInt, double, bool causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale, std::optional<c10::SymInt>, std::optional<c10::SymInt>) {
  TORCH_CHECK(at::globalContext().deterministicAlgorithms(),
              "stand-in GPU: flash attention would add gradients in an order that changes from run to run");
  if (cu_q.defined()) {
    TORCH_CHECK(
        log_sums.scalar_type() == at::kFloat && log_sums.sizes() == at::IntArrayRef({q.size(1), q.size(0)}),
        "stand-in GPU: flash attention with log-sums ", log_sums.scalar_type(), " ", log_sums.sizes());
    const auto own = backward_by_fragment(gradient, q, k, v, out, cu_q, longest.expect_int(), causal, scale);
    return {own[0], own[1], own[2]};
  }
  const Flash flash(q, k, v, causal, scale);
  TORCH_CHECK(log_sums.is_contiguous() && log_sums.scalar_type() == at::kFloat &&
                  log_sums.sizes() == flash.log_sums.sizes(),
              "stand-in GPU: flash attention with log-sums ", log_sums.scalar_type(), " ", log_sums.sizes());
  const auto own = flash.gradients(gradient, out, k);
  return {own[0], own[1], own[2]};
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_flash_attention_forward", &flash);
  library.impl("_flash_attention_backward", &flash_backward);
}

}  // namespace
