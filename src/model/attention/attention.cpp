#include "model/attention/attention.hpp"

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/util/ScopeExit.h>

#include <cmath>

#include "base/refuse.hpp"
#include "comm/autograd.hpp"
#include "kernels/matmul/product.hpp"
#include "model/attention/kernel.hpp"

namespace isograd {
namespace {

// Consecutive fragments of one length are one call of a kernel.
std::vector<Tile> tiles_of(const std::vector<std::int64_t>& cu_seqlens, bool causal) {
  std::vector<Tile> tiles;
  for (std::size_t f = 0; f + 1 < cu_seqlens.size(); ++f) {
    const std::int64_t begin = cu_seqlens[f], length = cu_seqlens[f + 1] - begin;
    if (length == 0) continue;
    if (!tiles.empty() && tiles.back().q_length == length)
      ++tiles.back().count;
    else
      tiles.push_back(
          {.q_row = begin, .q_length = length, .k_row = begin, .k_length = length, .causal = causal});
  }
  return tiles;
}

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
           const std::vector<std::int64_t>& cu_seqlens) {
  constexpr const char *kWhere = "variable_length_attention",
                       *kAction = "Pass tensors and cu_seqlens of one batch";
  check_qkv(kWhere, {q, k, v}, q.dim() > 0 ? q.size(0) : 0, "", kAction);
  if (cu_seqlens.empty() || cu_seqlens.front() != 0 || cu_seqlens.back() != q.size(0) ||
      !std::is_sorted(cu_seqlens.begin(), cu_seqlens.end()))
    refuse(kWhere,
           fmt::format("cu_seqlens of {} entries ending in {}", cu_seqlens.size(),
                       cu_seqlens.empty() ? -1 : cu_seqlens.back()),
           fmt::format("ascending from 0 to T = {}", q.size(0)), kAction);
}

at::Tensor rows_of(const at::Tensor& x, const Tile& tile) {
  return x.narrow(0, tile.q_row, tile.count * tile.q_length);
}

Tile all_of(const at::Tensor& q, bool causal) {
  return {.q_row = 0, .q_length = q.size(0), .k_row = 0, .k_length = q.size(0), .causal = causal};
}

// Several fragments may have bounds that the device alone knows, and some may be empty.
bool is_one_fragment(const std::vector<std::int64_t>& cu_seqlens) { return cu_seqlens.size() == 2; }

std::int64_t longest_of(const std::vector<std::int64_t>& cu_seqlens) {
  std::int64_t longest = 0;
  for (std::size_t f = 0; f + 1 < cu_seqlens.size(); ++f)
    longest = std::max(longest, cu_seqlens[f + 1] - cu_seqlens[f]);
  return longest;
}

// [T, T]: −∞ where one token must not see another, by cu_seqlens [F + 1] on the device.
at::Tensor hidden_by(const at::Tensor& cu_seqlens, std::int64_t tokens, bool causal, at::ScalarType type) {
  const at::Tensor places = at::arange(tokens, cu_seqlens.options());
  const at::Tensor fragment = at::bucketize(places, cu_seqlens, /*out_int32=*/true, /*right=*/true);
  at::Tensor hidden = fragment.unsqueeze(1).ne(fragment);
  if (causal) hidden = hidden.logical_or_(places.unsqueeze(1).lt(places));
  return at::zeros({tokens, tokens}, cu_seqlens.options().dtype(type))
      .masked_fill_(hidden, -std::numeric_limits<double>::infinity());
}

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

enum Way : std::int64_t { kCudnn, kFragments, kMask, kTiles, kProducts };

// Neither computes nor keeps a T×T matrix, except where fragments are known on the device alone (`on_device`,
// their cu_seqlens) and no kernel reads them there: then the scores of all tokens, a slice at a time.
class FragmentAttention : public torch::autograd::Function<FragmentAttention> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const std::vector<std::int64_t>& cu_seqlens,
                            const std::optional<at::Tensor>& on_device, bool causal) {
    const Qkv of{q, k, v};
    const Way way = is_one_fragment(cu_seqlens) && cudnn::serves(of, causal) ? kCudnn
                    : on_device && fragments::has_kernel(q, k, causal)       ? kFragments
                    : on_device                                              ? kMask
                    : q.is_cpu()                                             ? kTiles
                                                                             : kProducts;
    ctx->saved_data["cu_seqlens"] = cu_seqlens;
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["way"] = static_cast<std::int64_t>(way);
    if (way == kCudnn || way == kFragments) {
      const fragments::Attended attended =
          way == kCudnn ? cudnn::attend(of, causal)
                        : fragments::attend(of, *on_device, longest_of(cu_seqlens), causal);
      ctx->save_for_backward({q, k, v, attended.out, attended.log_sums, attended.seed, attended.offset,
                              on_device.value_or(at::Tensor())});
      return attended.out;
    }
    at::Tensor out = at::empty(q.sizes(), q.options());
    const auto type = accumulating_type(q.scalar_type());
    if (way == kMask) {
      products::attend_fragments(of, {all_of(q, causal)}, out, products::kScores,
                                 hidden_by(*on_device, q.size(0), causal, type));
      ctx->save_for_backward({q, k, v, *on_device});
      return out;
    }
    const auto tiles = tiles_of(cu_seqlens, causal);
    if (way == kTiles) {
      const at::Tensor log_sums = at::empty({q.size(0), q.size(1)}, q.options().dtype(type));
      for (const Tile& tile : tiles) attend_tile(of, tile, rows_of(out, tile), rows_of(log_sums, tile));
      ctx->save_for_backward({q, k, v, out, log_sums});
    } else {
      products::attend_fragments(of, tiles, out);
      ctx->save_for_backward({q, k, v});
    }
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    ISOGRAD_INVARIANT(!at::GradMode::is_enabled(),
                      "a second derivative of attention, which is not supported");
    const Qkv result = gradients_of(ctx, gradients[0].contiguous());
    return {result.q, result.k, result.v, at::Tensor(), at::Tensor(), at::Tensor()};
  }

 private:
  static Qkv gradients_of(AutogradContext* ctx, const at::Tensor& gradient) {
    const auto saved = ctx->get_saved_variables();
    const Qkv of{saved[0], saved[1], saved[2]};
    const bool causal = ctx->saved_data["causal"].toBool();
    const auto way = static_cast<Way>(ctx->saved_data["way"].toInt());
    const auto cu_seqlens = ctx->saved_data["cu_seqlens"].toIntVector();
    if (way == kCudnn)
      return cudnn::attend_backward(of, gradient, {.out = saved[3], .log_sums = saved[4]}, causal);
    if (way == kFragments)
      return fragments::attend_backward(of, gradient, {saved[3], saved[4], saved[5], saved[6]}, saved[7],
                                        longest_of(cu_seqlens), causal);
    const Qkv result{at::empty(of.q.sizes(), of.q.options()), at::empty(of.k.sizes(), of.k.options()),
                     at::empty(of.v.sizes(), of.v.options())};
    const auto tiles = tiles_of(cu_seqlens, causal);
    if (way == kMask)
      products::attend_fragments_backward(
          of, gradient, {all_of(of.q, causal)}, result, products::kScores,
          hidden_by(saved[3], of.q.size(0), causal, accumulating_type(of.q.scalar_type())));
    else if (way == kProducts)
      products::attend_fragments_backward(of, gradient, tiles, result);
    else
      for (const Tile& tile : tiles)
        attend_tile_backward(of, {rows_of(saved[3], tile), rows_of(saved[4], tile), rows_of(gradient, tile)},
                             tile, result, /*adds=*/false);
    return result;
  }
};

constexpr std::int64_t kMostTokensOfAMask = 4096;

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Batch& batch,
                     const std::vector<std::int64_t>& cu_seqlens, bool causal) {
  check(q, k, v, cu_seqlens);
  const Qkv of{dense_heads(q), dense_heads(k), dense_heads(v)};
  std::optional<at::Tensor> on_device;
  if (fragments::has_kernel(of.q, of.k, causal))
    on_device = batch.cu_seqlens_on_device.defined() ? batch.cu_seqlens_on_device
                                                     : at::tensor(cu_seqlens, at::kInt).to(q.device());
  else if (batch.bounds_only && q.size(0) <= kMostTokensOfAMask)
    on_device = batch.cu_seqlens_on_device;
  else if (batch.bounds_only)
    refuse("variable_length_attention",
           fmt::format("bounds of fragments, and q {} of {}", c10::str(q.sizes()),
                       c10::toString(q.scalar_type())),
           fmt::format(
               "a type and head_dim whose kernel reads the fragments on the device, or at most {} tokens",
               kMostTokensOfAMask),
           "Leave StepOptions::capture off for this model");
  return FragmentAttention::apply(of.q, of.k, of.v, cu_seqlens, on_device, causal);
}

}  // namespace

void check_qkv(const char* where, const Qkv& qkv, std::int64_t tokens, const std::string& of,
               const char* action) {
  const auto& [q, k, v] = qkv;
  if (q.dim() != 3 || k.dim() != 3 || k.sizes() != v.sizes() || k.size(0) != q.size(0) ||
      k.size(2) != q.size(2) || k.size(1) == 0 || q.size(1) % k.size(1) != 0 || q.size(0) != tokens)
    refuse(where, c10::str("q ", q.sizes(), ", k ", k.sizes(), ", v ", v.sizes()),
           "q [T, H, D], k and v [T, Hkv, D] with H a multiple of Hkv" + of, action);
  if (q.scalar_type() != k.scalar_type() || q.scalar_type() != v.scalar_type() || !q.is_floating_point())
    refuse(where,
           fmt::format("{}, {} and {}", c10::toString(q.scalar_type()), c10::toString(k.scalar_type()),
                       c10::toString(v.scalar_type())),
           "one floating-point dtype", action);
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
  // Adds the parts of a query's gradient in one order, so that a step made twice has the same bits. The flag
  // is the process's, whose ranks on GPUs are processes.
  at::Context& context = at::globalContext();
  const auto set = [&context](bool in_order, bool warns, bool fills) {
    context.setDeterministicAlgorithms(in_order, warns);
    context.setDeterministicFillUninitializedMemory(fills);
  };
  const bool was = context.deterministicAlgorithms(), warns = context.deterministicAlgorithmsWarnOnly(),
             fills = context.deterministicFillUninitializedMemory();
  set(true, warns, /*fills=*/false);
  const auto as_before = c10::make_scope_exit([&] { set(was, warns, fills); });
  const auto [dq, dk, dv] = at::_flash_attention_backward(gradient, q, k, v, attended.out, attended.log_sums,
                                                          cu_seqlens, cu_seqlens, longest, longest, 0.0,
                                                          causal, attended.seed, attended.offset);
  return {dq, dk, dv};
}

}  // namespace fragments

at::Tensor variable_length_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const std::vector<std::int64_t>& cu_seqlens, bool causal) {
  return attention(q, k, v, {}, cu_seqlens, causal);
}

at::Tensor variable_length_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                     const Batch& batch, bool causal) {
  return attention(q, k, v, batch, batch.cu_seqlens, causal);
}

at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  const std::int64_t last = q.size(0), all = keys.size(0), heads = q.size(1), key_heads = keys.size(1);
  ISOGRAD_INVARIANT(last <= all && heads % key_heads == 0,
                    c10::str("q ", q.sizes(), ", keys ", keys.sizes()));
  const std::int64_t groups = heads / key_heads, dim = q.size(2);
  const at::Tensor queries = q.reshape({last, key_heads, groups, dim})
                                 .permute({1, 2, 0, 3})
                                 .reshape({key_heads, groups * last, dim});
  at::Tensor scores = at::bmm(queries, keys.permute({1, 2, 0})) / std::sqrt(static_cast<double>(dim));
  scores = scores.view({key_heads, groups, last, all});
  if (last > 1) {
    const at::Tensor future = at::ones({last, all}, scores.options().dtype(at::kBool)).triu(all - last + 1);
    scores = scores.masked_fill(future, -std::numeric_limits<double>::infinity());
  }
  const auto type = accumulating_type(q.scalar_type());
  const at::Tensor weights = at::softmax(scores, -1, type).to(q.scalar_type());
  return at::bmm(weights.view({key_heads, groups * last, all}), values.permute({1, 0, 2}))
      .view({key_heads, groups, last, dim})
      .permute({2, 0, 1, 3})
      .reshape(q.sizes());
}

at::Tensor naive_variable_length_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                           const std::vector<std::int64_t>& cu_seqlens, bool causal) {
  check(q, k, v, cu_seqlens);
  const std::int64_t tokens = q.size(0), groups = queries_per_key(q, k);
  at::Tensor visible = at::zeros({tokens, tokens}, q.options().dtype(at::kBool));
  for (std::size_t f = 0; f + 1 < cu_seqlens.size(); ++f) {
    const std::int64_t begin = cu_seqlens[f], length = cu_seqlens[f + 1] - begin;
    visible.narrow(0, begin, length).narrow(1, begin, length).fill_(true);
  }
  if (causal) visible = visible.tril();
  const at::Tensor keys = k.repeat_interleave(groups, 1), values = v.repeat_interleave(groups, 1);
  const at::Tensor scores = at::einsum("ihd,jhd->hij", {q, keys}) / std::sqrt(static_cast<double>(q.size(2)));
  const auto type = accumulating_type(q.scalar_type());
  const at::Tensor weights = at::softmax(
      scores.masked_fill(visible.logical_not(), -std::numeric_limits<double>::infinity()), -1, type);
  return at::einsum("hij,jhd->ihd", {weights.to(q.scalar_type()), values});
}

}  // namespace isograd
