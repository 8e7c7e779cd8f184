// Attention over the context ranks as one autograd node: Ulysses outside, the ring inside.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <optional>

#include "base/refuse.hpp"
#include "comm/autograd.hpp"
#include "isograd/context_parallel.hpp"
#include "isograd/error.hpp"
#include "isograd/group.hpp"
#include "model/attention/attention.hpp"
#include "model/attention/kernel.hpp"
#include "parallel/context/heads.hpp"
#include "parallel/context/ring.hpp"

namespace isograd {
namespace {

const char* const kWhere = "attention over context ranks";

// ---- Ulysses: an all-to-all turns this rank's tokens of all heads into all tokens of this rank's heads ----
// `rows[i]`: tokens of rank i of the group, T_local here, T together. H divides by the group's size; key
// heads divide by it or it by them: then a key head goes to each of the size / Hkv ranks whose queries read
// it. Collective.

// x [T_local, heads, D] -> [size, T_local, heads/size, D], each rank's heads; where there are fewer heads
// than ranks, the one head that each rank reads.
at::Tensor by_rank(const at::Tensor& x, int parts) {
  const std::int64_t heads = x.size(1);
  const at::Tensor enough = heads < parts ? x.repeat_interleave(parts / heads, 1) : x;
  return enough.reshape({x.size(0), parts, std::max<std::int64_t>(1, heads / parts), x.size(2)})
      .transpose(0, 1);
}

Group::Rows equal(const Group& group, const Group::Rows& rows) {
  return Group::Rows(rows.size(), rows[static_cast<std::size_t>(group.rank())]);
}

// [size, T_local, h, D] to [T, h, D]
at::Tensor spread(Group& group, const Group::Rows& rows, const at::Tensor& parts) {
  return group.all_to_all(parts.contiguous().flatten(0, 1), rows, equal(group, rows));
}

// [T, h, D] to [size, T_local, h, D]
at::Tensor collect(Group& group, const Group::Rows& rows, const at::Tensor& x) {
  const at::Tensor all = group.all_to_all(x.contiguous(), equal(group, rows), rows);
  return all.view({group.size(), rows[static_cast<std::size_t>(group.rank())], x.size(1), x.size(2)});
}

// [size, T_local, h, D] to [T_local, size · h, D]
at::Tensor side_by_side(const at::Tensor& parts) {
  return parts.transpose(0, 1).reshape({parts.size(1), parts.size(0) * parts.size(2), parts.size(3)});
}

// [T_local, H, D] and [T_local, Hkv, D] -> [T, H/size, D] and [T, max(1, Hkv/size), D].
Qkv to_heads(Group& ulysses, const Group::Rows& rows, const Qkv& tokens) {
  const int size = ulysses.size();
  const at::Tensor q = by_rank(tokens.q, size), k = by_rank(tokens.k, size), v = by_rank(tokens.v, size);
  const at::Tensor all = spread(ulysses, rows, at::cat({q, k, v}, 2));
  const auto parts = all.split_with_sizes({q.size(2), k.size(2), v.size(2)}, 1);
  return {parts[0].contiguous(), parts[1].contiguous(), parts[2].contiguous()};
}

// Its adjoint, for gradients: copies of a key head are summed, in the order of the ranks.
Qkv from_heads(Group& ulysses, const Group::Rows& rows, const Qkv& gradients, std::int64_t key_value_heads) {
  const at::Tensor all = collect(ulysses, rows, at::cat({gradients.q, gradients.k, gradients.v}, 1));
  const auto parts = all.split_with_sizes({gradients.q.size(1), gradients.k.size(1), gradients.v.size(1)}, 2);
  const auto of_keys = [&](const at::Tensor& x) {
    const at::Tensor heads = side_by_side(x);
    if (heads.size(1) == key_value_heads) return heads;
    return heads.view({heads.size(0), key_value_heads, heads.size(1) / key_value_heads, heads.size(2)})
        .sum(2);
  };
  return {side_by_side(parts[0]), of_keys(parts[1]), of_keys(parts[2])};
}

// Attention's output [T, H/size, D] -> [T_local, H, D], and its gradient the other way.
at::Tensor to_tokens(Group& ulysses, const Group::Rows& rows, const at::Tensor& out) {
  return side_by_side(collect(ulysses, rows, out));
}

at::Tensor from_tokens(Group& ulysses, const Group::Rows& rows, const at::Tensor& gradient) {
  return spread(ulysses, rows, by_rank(gradient, ulysses.size()));
}

// The data of one call, kept for its backward.
struct Call final : torch::CustomClassHolder {
  Call(Group ring_, Group ulysses_) : ring(std::move(ring_)), ulysses(std::move(ulysses_)) {}
  Group ring, ulysses;
  RingPlan plan;
  Group::Rows rows;  // tokens of each Ulysses rank
};

struct Function : torch::autograd::Function<Function> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const c10::intrusive_ptr<Call>& call) {
    Qkv heads{dense_heads(q), dense_heads(k), dense_heads(v)};
    if (call->ulysses.size() > 1) heads = to_heads(call->ulysses, call->rows, heads);
    const Attended attended = ring_attend(call->ring, call->plan, heads);
    const at::Tensor out = attended.out.to(q.scalar_type());
    ctx->save_for_backward(
        {heads.q, heads.k, heads.v, out, attended.log_sums.to(attended.out.scalar_type())});
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    ctx->saved_data["key_value_heads"] = k.size(1);
    return call->ulysses.size() > 1 ? to_tokens(call->ulysses, call->rows, out) : out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    ISOGRAD_INVARIANT(!at::GradMode::is_enabled(),
                      "a second derivative of attention, which is not supported");
    const auto saved = ctx->get_saved_variables();
    const auto capsule = ctx->saved_data["call"].toCapsule();
    Call& call = *static_cast<Call*>(capsule.get());
    const at::Tensor gradient = call.ulysses.size() > 1 ? from_tokens(call.ulysses, call.rows, gradients[0])
                                                        : gradients[0].contiguous();
    Qkv result = ring_attend_backward(call.ring, call.plan, {saved[0], saved[1], saved[2]},
                                      {saved[3], saved[4], gradient});
    if (call.ulysses.size() > 1)
      result = from_heads(call.ulysses, call.rows, result, ctx->saved_data["key_value_heads"].toInt());
    const auto type = saved[0].scalar_type();
    return {result.q.to(type), result.k.to(type), result.v.to(type), at::Tensor()};
  }
};

std::int64_t hash_of(const ContextCut& cut) {
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a over words
  const auto add = [&](std::int64_t word) {
    hash = (hash ^ static_cast<std::uint64_t>(word)) * 1099511628211u;
  };
  for (const std::int64_t end : cut.cu_seqlens) add(end);
  for (const auto& pieces : cut.pieces) {
    add(-1);
    for (const Piece& piece : pieces) add(piece.document), add(piece.begin), add(piece.length);
  }
  return static_cast<std::int64_t>(hash >> 1);
}

// Each ring rank's block: the parts of its Ulysses group one after another.
std::vector<std::vector<Span>> blocks_of(const ContextCut& cut, int ring, int ulysses) {
  std::vector<std::vector<Span>> blocks(static_cast<std::size_t>(ring));
  for (int r = 0; r < ring; ++r) {
    auto& block = blocks[static_cast<std::size_t>(r)];
    std::int64_t row = 0;
    for (int u = 0; u < ulysses; ++u)
      for (const Piece& piece : cut.pieces[static_cast<std::size_t>(r * ulysses + u)]) {
        if (piece.length == 0) continue;
        if (!block.empty() && block.back().document == piece.document &&
            block.back().position + block.back().length == piece.begin)
          block.back().length += piece.length;
        else
          block.push_back({piece.document, piece.begin, piece.length, row});
        row += piece.length;
      }
  }
  return blocks;
}

[[noreturn]] void refuse_attention(std::string found, std::string expected, std::string action) {
  refuse(kWhere, std::move(found), std::move(expected), std::move(action));
}

void check_shapes(const ContextCut& cut, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const std::int64_t tokens = cut.tokens_of(cut.rank);
  check_qkv(kWhere, {q, k, v}, tokens, fmt::format(" and T = {} as the cut says", tokens),
            "Pass tensors of the batch that was cut, of one type");
}

}  // namespace

std::vector<int> possible_ulysses(std::int64_t heads, std::int64_t key_value_heads) {
  std::vector<int> sizes;
  for (std::int64_t size = 1; size <= heads; ++size)
    if (heads % size == 0 && (key_value_heads % size == 0 || size % key_value_heads == 0))
      sizes.push_back(static_cast<int>(size));
  return sizes;
}

void check_ulysses(std::int64_t size, std::int64_t heads, std::int64_t key_value_heads) {
  const auto possible = possible_ulysses(heads, key_value_heads);
  if (std::find(possible.begin(), possible.end(), size) != possible.end()) return;
  std::int64_t below = 1, above = possible.back();
  for (const std::int64_t other : possible) {
    if (other < size) below = std::max(below, other);
    if (other > size) above = std::min(above, other);
  }
  refuse_attention(
      fmt::format("cp_ulysses {} for {} query heads and {} key heads", size, heads, key_value_heads),
      fmt::format("a size that divides the query heads, and the key heads or is a multiple of them: one of "
                  "{}",
                  fmt::join(possible, ", ")),
      above > size ? fmt::format("Use cp_ulysses {} or {}, and cp_ring for the rest", below, above)
                   : fmt::format("Use cp_ulysses {}, and cp_ring for the rest", below));
}

struct ContextAttention::Impl {
  Group context, ring, ulysses;
  bool causal;
  std::shared_ptr<const ContextCut> cut;  // whose plan is kept
  c10::intrusive_ptr<Call> call;

  // Checks that need no other rank.
  void check_own(const Batch& batch, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
    if (!batch.cut)
      refuse_attention(
          fmt::format("a whole batch of {} tokens, for {} context ranks", batch.num_tokens(), context.size()),
          "this rank's part of it", "Cut it first (cut_batch)");
    const ContextCut& given = *batch.cut;
    if (static_cast<int>(given.pieces.size()) != context.size() || given.rank != context.rank())
      refuse_attention(
          fmt::format("rank {}'s part of a batch cut for {} ranks", given.rank, given.pieces.size()),
          fmt::format("rank {}'s part for {} ranks", context.rank(), context.size()),
          "Cut the batch for this context group");
    check_shapes(given, q, k, v);
  }

  // A rank tells the others that it refuses, so that nobody waits for it.
  void check_agreement(const ContextCut* own, const at::Tensor& q, const at::Tensor& k) {
    std::vector<std::int64_t> mine(6);
    if (own)
      mine = {1, q.size(1), k.size(1), q.size(2), static_cast<std::int64_t>(q.scalar_type()), hash_of(*own)};
    const at::Tensor all = context.all_gather(at::tensor(mine, at::kLong));  // [P, 6]
    if (!own) return;
    const auto of = [&](int rank) { return all[rank].const_data_ptr<std::int64_t>(); };
    for (int rank = 0; rank < context.size(); ++rank)
      if (of(rank)[0] == 0)
        refuse_attention(fmt::format("context rank {} refuses its batch or its tensors", rank),
                         "a part of the batch and tensors of its tokens on every context rank",
                         fmt::format("Look at context rank {}'s own error", rank));
    for (int rank = 1; rank < context.size(); ++rank) {
      if (at::equal(all[rank], all[0])) continue;
      const auto tell = [&](const std::int64_t* numbers) {
        return fmt::format("{} query heads, {} key heads of {} {}, cut {:x}", numbers[1], numbers[2],
                           numbers[3], c10::toString(static_cast<at::ScalarType>(numbers[4])), numbers[5]);
      };
      refuse_attention(fmt::format("context rank {}: {}; rank 0: {}", rank, tell(of(rank)), tell(of(0))),
                       "the same heads, dtype and cut on every context rank",
                       "Give every rank the same model and cut the same batch");
    }
  }

  void prepare(const Batch& batch, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    std::optional<ConfigError> problem;
    try {
      check_own(batch, q, k, v);
    } catch (const ConfigError& error) {
      problem = error;
    }
    const auto& given = batch.cut;
    const bool known = given && given == cut;
    if (!known) check_agreement(problem ? nullptr : given.get(), q, k);
    if (problem) throw *problem;
    check_ulysses(ulysses.size(), q.size(1), k.size(1));
    if (known) return;
    auto made = c10::make_intrusive<Call>(ring, ulysses);
    made->plan = make_ring_plan(blocks_of(*given, ring.size(), ulysses.size()), ring.rank(), causal);
    for (int u = 0; u < ulysses.size(); ++u)
      made->rows.push_back(given->tokens_of(ring.rank() * ulysses.size() + u));
    call = std::move(made);
    cut = given;
  }
};

ContextGroups context_groups(const Mesh& mesh) {
  const auto group = [&](const AxisSet& axes) { return mesh.along(axes, "attention"); };
  return {.context = group(kContextAxes), .ring = group({"cp_ring"}), .ulysses = group({"cp_ulysses"})};
}

ContextAttention::ContextAttention(const ContextGroups& groups, bool causal)
    : impl_(std::make_shared<Impl>(Impl{groups.context, groups.ring, groups.ulysses, causal, nullptr, {}})) {
  const auto& [context, ring, ulysses] = groups;
  if (ring.size() * ulysses.size() != context.size() ||
      ring.rank() * ulysses.size() + ulysses.rank() != context.rank())
    refuse_attention(fmt::format("a ring of {} and Ulysses of {} for {} context ranks", ring.size(),
                                 ulysses.size(), context.size()),
                     "sizes that multiply to the context ranks, Ulysses inside", "Use context_groups()");
}

at::Tensor ContextAttention::operator()(const Batch& batch, const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v) const {
  if (!batch.cut && (impl_->context.size() == 1 || batch.num_tokens() == 0))
    return variable_length_attention(q, k, v, batch, impl_->causal);
  impl_->prepare(batch, q, k, v);
  return Function::apply(q, k, v, impl_->call);
}

at::Tensor naive_context_attention(Group context, const Batch& batch, const at::Tensor& q,
                                   const at::Tensor& k, const at::Tensor& v, bool causal) {
  const ContextCut& cut = *batch.cut;
  check_shapes(cut, q, k, v);
  Group::Rows rows;
  std::vector<std::int64_t> documents, positions;
  for (std::size_t rank = 0; rank < cut.pieces.size(); ++rank) {
    rows.push_back(cut.tokens_of(static_cast<int>(rank)));
    for (const Piece& piece : cut.pieces[rank])
      for (std::int64_t i = 0; i < piece.length; ++i) {
        documents.push_back(piece.document);
        positions.push_back(piece.begin + i);
      }
  }
  std::int64_t before = 0;
  for (int rank = 0; rank < cut.rank; ++rank) before += rows[static_cast<std::size_t>(rank)];
  const auto of_queries = [&](const at::Tensor& x) { return x.narrow(0, before, q.size(0)).unsqueeze(1); };
  const at::Tensor document = at::tensor(documents, at::kLong), position = at::tensor(positions, at::kLong);
  at::Tensor visible = of_queries(document).eq(document);  // [T_local, T]
  if (causal) visible = visible.logical_and(of_queries(position).ge(position));

  const std::int64_t groups = queries_per_key(q, k);
  const at::Tensor keys = differentiable::all_gather_rows(context, k, rows).repeat_interleave(groups, 1);
  const at::Tensor values = differentiable::all_gather_rows(context, v, rows).repeat_interleave(groups, 1);
  const at::Tensor scores = at::einsum("ihd,jhd->hij", {q, keys}) / std::sqrt(static_cast<double>(q.size(2)));
  const at::Tensor weights =
      at::softmax(scores.masked_fill(visible.logical_not(), -std::numeric_limits<double>::infinity()), -1,
                  accumulating_type(q.scalar_type()));
  return at::einsum("hij,jhd->ihd", {weights.to(q.scalar_type()), values});
}

}  // namespace isograd
