#include "model/attention/kernel.hpp"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include "kernels/matmul/product.hpp"

namespace isograd {
namespace {

bool goes_by_blocks(const at::Tensor& q) { return q.scalar_type() == at::kFloat && products_by_brgemm(); }

// LibTorch's kernel takes as many query heads as key heads: one group of those that share a key head at a
// time, on views.
struct Groups {
  const Tile& tile;
  std::int64_t count;
  Rows queries{tile.q_row, tile.count, tile.q_length}, keys{tile.k_row, tile.count, tile.k_length};

  at::Tensor of(const at::Tensor& x, std::int64_t group) const {
    return heads_first(x, queries, count, group);
  }
  at::Tensor of_part(const at::Tensor& x, std::int64_t group) const {  // x has only the tile's queries
    return heads_first(x, {0, tile.count, tile.q_length}, count, group);
  }
  at::Tensor of_keys(const at::Tensor& x) const { return heads_first(x, keys); }
};

void put(const at::Tensor& from, at::Tensor to, bool adds) { adds ? to.add_(from) : to.copy_(from); }

// While one lives, backward adds the parts of a query's gradient in one order, so that a step made twice has
// the same bits. The flag is the process's, whose ranks on GPUs are processes.
class InOneOrder {
 public:
  InOneOrder() { set(true, context_.deterministicAlgorithmsWarnOnly(), /*fills=*/false); }
  ~InOneOrder() { set(was_, warns_, fills_); }
  InOneOrder(const InOneOrder&) = delete;
  InOneOrder& operator=(const InOneOrder&) = delete;

 private:
  void set(bool on, bool warns, bool fills) {
    context_.setDeterministicAlgorithms(on, warns);
    context_.setDeterministicFillUninitializedMemory(fills);
  }
  at::Context& context_ = at::globalContext();
  const bool was_ = context_.deterministicAlgorithms(), warns_ = context_.deterministicAlgorithmsWarnOnly(),
             fills_ = context_.deterministicFillUninitializedMemory();
};

}  // namespace

void attend_tile(const Qkv& of, const Tile& tile, const at::Tensor& out, const at::Tensor& log_sums) {
  const auto& [q, k, v] = of;
  if (goes_by_blocks(q)) return blocks::attend(of, tile, out, log_sums);
  const Groups groups{tile, queries_per_key(q, k)};
  for (std::int64_t group = 0; group < groups.count; ++group) {
    const auto [part, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
        groups.of(q, group), groups.of_keys(k), groups.of_keys(v), 0.0, tile.causal);
    put(part, groups.of_part(out, group), false);
    put(sums, groups.of_part(log_sums, group), false);
  }
}

void attend_tile_backward(const Qkv& of, const AttendedGradient& attended, const Tile& tile,
                          const Qkv& gradients, bool adds) {
  const auto& [q, k, v] = of;
  if (goes_by_blocks(q)) return blocks::attend_backward(of, attended, tile, gradients, adds);
  const Groups groups{tile, queries_per_key(q, k)};
  for (std::int64_t group = 0; group < groups.count; ++group) {
    const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        groups.of_part(attended.gradient, group), groups.of(q, group), groups.of_keys(k), groups.of_keys(v),
        groups.of_part(attended.out, group), groups.of_part(attended.log_sums, group), 0.0, tile.causal);
    put(dq, groups.of(gradients.q, group), adds);
    // Over the query heads that share a key head, in order.
    put(dk, groups.of_keys(gradients.k), adds || group > 0);
    put(dv, groups.of_keys(gradients.v), adds || group > 0);
  }
}

namespace fragments {

bool has_kernel(const at::Tensor& q, const at::Tensor& k, bool causal) {
  const auto type = q.scalar_type();
  if (!q.is_cuda() || (type != at::kBFloat16 && type != at::kHalf) || q.size(2) % 8 != 0 || q.size(0) == 0)
    return false;
  // LibTorch knows which GPUs and sizes its kernels take.
  const at::Tensor queries = q.unsqueeze(0).transpose(1, 2), keys = k.unsqueeze(0).transpose(1, 2);
  const auto choice = static_cast<at::SDPBackend>(at::_fused_sdp_choice(
      queries, keys, keys, {}, 0.0, causal, std::nullopt, /*enable_gqa=*/q.size(1) != k.size(1)));
  return choice == at::SDPBackend::flash_attention || choice == at::SDPBackend::cudnn_attention;
}

Attended attend(const Qkv& of, const at::Tensor& cu_seqlens, std::int64_t longest, bool causal) {
  const auto& [q, k, v] = of;
  const auto result =
      at::_flash_attention_forward(q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, causal,
                                   /*return_debug_mask=*/false);
  return {std::get<0>(result), std::get<1>(result), std::get<2>(result), std::get<3>(result)};
}

Qkv attend_backward(const Qkv& of, const at::Tensor& gradient, const Attended& attended,
                    const at::Tensor& cu_seqlens, std::int64_t longest, bool causal) {
  const auto& [q, k, v] = of;
  const InOneOrder guard;
  const auto [dq, dk, dv] = at::_flash_attention_backward(gradient, q, k, v, attended.out, attended.log_sums,
                                                          cu_seqlens, cu_seqlens, longest, longest, 0.0,
                                                          causal, attended.seed, attended.offset);
  return {dq, dk, dv};
}

}  // namespace fragments
}  // namespace isograd
