#include "model/attention/tiles.hpp"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <limits>
#include <unordered_map>

#include "kernels/matmul/product.hpp"
#include "model/attention/kernel.hpp"

namespace isograd {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

class Tiler {
 public:
  explicit Tiler(bool causal) : causal_(causal) {}

  // Queries of positions a ... a + n - 1 at rows from q, keys of positions c ... c + m - 1 at rows from k.
  void cover(std::int64_t a, std::int64_t n, std::int64_t q, std::int64_t c, std::int64_t m, std::int64_t k) {
    if (n == 0 || m == 0) return;
    if (!causal_ || c + m - 1 <= a) return emit({.q_row = q, .q_length = n, .k_row = k, .k_length = m});
    if (c > a + n - 1) return;
    if (a == c && n == m) return emit({.q_row = q, .q_length = n, .k_row = k, .k_length = m, .causal = true});
    // Cut where one begins or ends inside the other, until a part is one of the three above.
    if (a < c) return cover(c, n - (c - a), q + (c - a), c, m, k);  // earlier queries see none of these keys
    if (a > c) {
      cover(a, n, q, c, a - c, k);
      return cover(a, n, q, a, m - (a - c), k + (a - c));
    }
    if (n < m) return cover(a, n, q, c, n, k);  // later keys are seen by none
    cover(a, m, q, c, m, k);
    cover(a + m, n - m, q + m, c, m, k);
  }

  std::vector<Tile> take() { return std::move(tiles_); }

 private:
  void emit(const Tile& tile) {
    if (!tiles_.empty()) {
      Tile& last = tiles_.back();
      if (last.causal == tile.causal && last.q_length == tile.q_length && last.k_length == tile.k_length &&
          tile.q_row == last.q_row + last.count * last.q_length &&
          tile.k_row == last.k_row + last.count * last.k_length) {
        ++last.count;
        return;
      }
    }
    tiles_.push_back(tile);
  }

  bool causal_;
  std::vector<Tile> tiles_;
};

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

std::vector<Tile> tiles_between(const std::vector<Span>& queries, const std::vector<Span>& keys,
                                bool causal) {
  std::unordered_map<std::int64_t, std::vector<const Span*>> by_document;
  for (const Span& span : keys) by_document[span.document].push_back(&span);
  Tiler tiler(causal);
  for (const Span& query : queries)
    if (const auto found = by_document.find(query.document); found != by_document.end())
      for (const Span* key : found->second)
        tiler.cover(query.position, query.length, query.row, key->position, key->length, key->row);
  return tiler.take();
}

bool sees_any(const std::vector<Span>& queries, const Span& keys, bool causal) {
  if (keys.length == 0) return false;
  for (const Span& query : queries)
    if (query.document == keys.document && query.length > 0 &&
        (!causal || query.position + query.length > keys.position))
      return true;
  return false;
}

at::ScalarType accumulating_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

Attended Attended::nothing(const at::Tensor& q) {
  const auto options = q.options().dtype(accumulating_type(q.scalar_type()));
  return {at::zeros(q.sizes(), options),
          at::full({q.size(0), q.size(1)}, kNothing, options.dtype(at::kDouble))};
}

void merge(const at::Tensor& part, const at::Tensor& log_sums, at::Tensor out, at::Tensor sums) {
  if (sums.eq(kNothing).all().item<bool>()) {
    out.copy_(part);
    sums.copy_(log_sums);
    return;
  }
  const at::Tensor own = log_sums.to(sums.scalar_type()), both = at::logaddexp(sums, own);
  const auto weight = [&](const at::Tensor& of) {
    return (of - both).exp_().unsqueeze(-1).to(out.scalar_type());
  };
  out.mul_(weight(sums));
  out.addcmul_(part.to(out.scalar_type()), weight(own));
  sums.copy_(both);
}

void attend(const Qkv& of, const Tile& tile, Attended& attended) {
  if (!of.q.is_cpu()) return products::attend(of, tile, attended);
  const auto own = [&](const at::Tensor& x) { return x.narrow(0, tile.q_row, tile.count * tile.q_length); };
  const at::Tensor out = own(attended.out), log_sums = own(attended.log_sums);
  const at::Tensor part = at::empty(out.sizes(), of.q.options());
  const at::Tensor part_sums = at::empty(log_sums.sizes(), out.options());
  attend_tile(of, tile, part, part_sums);
  merge(part, part_sums, out, log_sums);
}

void attend_backward(const Qkv& of, const AttendedGradient& attended, const Tile& tile,
                     const Qkv& gradients) {
  if (!of.q.is_cpu()) return products::attend_backward(of, attended, tile, gradients);
  const auto own = [&](const at::Tensor& x) { return x.narrow(0, tile.q_row, tile.count * tile.q_length); };
  attend_tile_backward(
      of, {own(attended.out), own(attended.log_sums).to(gradients.q.scalar_type()), own(attended.gradient)},
      tile, gradients, /*adds=*/true);
}

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
