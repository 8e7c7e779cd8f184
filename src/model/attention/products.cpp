#include "model/attention/kernel.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <limits>

namespace isograd::products {
namespace {

constexpr std::int64_t kFewestQueries = 256;  // of one product

// alpha · a b for batches of matrices: [B, N, K], [B, K, M] -> [B, N, M]
at::Tensor scaled_product(const at::Tensor& a, const at::Tensor& b, double alpha) {
  return at::baddbmm(at::empty({1, 1, 1}, a.options()), a, b, /*beta=*/0, alpha);
}

// Operands of all products of a tile: its keys and values, [F · Hkv, k_length, D] in the accumulating type.
struct Operands {
  const Tile& tile;
  std::int64_t groups;
  std::int64_t queries;  // of one product, but for the last ones
  double scale;
  at::ScalarType type;
  Rows rows{tile.k_row, tile.count, tile.k_length};
  at::Tensor keys, values;
  at::Tensor hidden;  // [L, L]: −∞ where a query must not see a key of its own slice; for causal tiles
  at::Tensor given;   // [T, T] in its place, for all slices

  Operands(const Qkv& x, const Tile& of, std::int64_t most_scores = kScores, at::Tensor hidden_by_caller = {})
      : tile(of),
        groups(queries_per_key(x.q, x.k)),
        queries(std::min(
            tile.q_length,
            std::max(kFewestQueries, at::divup(most_scores, tile.count * x.q.size(1) * tile.k_length)))),
        scale(1 / std::sqrt(static_cast<double>(x.q.size(2)))),
        type(accumulating_type(x.q.scalar_type())),
        keys(batches(x.k)),
        values(batches(x.v)),
        given(std::move(hidden_by_caller)) {
    if (!tile.causal || given.defined()) return;
    hidden = at::full({queries, queries}, -std::numeric_limits<double>::infinity(), keys.options()).triu_(1);
  }

  at::Tensor batches(const at::Tensor& x) const {
    return heads_first(x, rows).to(type).reshape({-1, tile.k_length, x.size(2)});
  }
  // [F, Hkv, n, D]
  at::Tensor heads(const at::Tensor& x) const { return x.unflatten(0, {tile.count, -1}); }
};

// Some queries of a tile.
struct Slice {
  const Operands& operands;
  std::int64_t begin, length;

  // Keys that one of these queries sees: the first so many.
  std::int64_t seen() const { return operands.tile.causal ? begin + length : operands.tile.k_length; }
  at::Tensor keys() const { return operands.keys.narrow(1, 0, seen()); }
  at::Tensor values() const { return operands.values.narrow(1, 0, seen()); }

  // A view of these queries' rows of x [T, H, ...]: [F, Hkv, groups, L, D]
  at::Tensor of(const at::Tensor& x) const {
    const Tile& tile = operands.tile;
    return x.narrow(0, tile.q_row, tile.count * tile.q_length)
        .view({tile.count, tile.q_length, x.size(1) / operands.groups, operands.groups, -1})
        .narrow(1, begin, length)
        .permute({0, 2, 3, 1, 4});
  }
  // [F · Hkv, groups · L, D]
  at::Tensor joined(const at::Tensor& x) const {
    const at::Tensor part = of(x).to(operands.type);
    return part.reshape({-1, operands.groups * length, part.size(4)});
  }
  // Back into the shape of of().
  at::Tensor apart(const at::Tensor& x) const {
    return x.unflatten(1, {operands.groups, length}).unflatten(0, {operands.tile.count, -1});
  }
  // [F · Hkv, groups · L, seen]
  at::Tensor scores(const at::Tensor& queries) const {
    const at::Tensor result = scaled_product(queries, keys().transpose(1, 2), operands.scale);
    if (operands.given.defined())
      apart(result).add_(operands.given.narrow(0, begin, length).narrow(1, 0, seen()));
    else if (operands.tile.causal)
      apart(result).narrow(4, begin, length).add_(operands.hidden.narrow(0, 0, length).narrow(1, 0, length));
    return result;
  }
};

// From the last: its queries see all keys of the tile.
template <typename F>
void for_each_slice(const Operands& operands, F&& work) {
  const std::int64_t all = operands.tile.q_length, step = operands.queries;
  for (std::int64_t begin = (all - 1) / step * step; begin >= 0; begin -= step)
    work(Slice{operands, begin, std::min(step, all - begin)});
}

}  // namespace

void attend_fragments(const Qkv& of, const std::vector<Tile>& tiles, at::Tensor& out, std::int64_t scores,
                      const at::Tensor& hidden) {
  for (const Tile& tile : tiles)
    for_each_slice(Operands(of, tile, scores, hidden), [&](const Slice& slice) {
      const at::Tensor weights = at::softmax(slice.scores(slice.joined(of.q)), 2);
      slice.of(out).copy_(slice.apart(at::bmm(weights, slice.values())));
    });
}

void attend_fragments_backward(const Qkv& of, const at::Tensor& gradient, const std::vector<Tile>& tiles,
                               const Qkv& gradients, std::int64_t scores, const at::Tensor& hidden) {
  for (const Tile& tile : tiles) {
    const Operands operands(of, tile, scores, hidden);
    at::Tensor of_keys, of_values;  // [F · Hkv, k_length, D]
    const auto add = [](at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, double alpha) {
      if (!sum.defined())
        sum = scaled_product(a, b, alpha);
      else
        sum.narrow(1, 0, a.size(1)).baddbmm_(a, b, /*beta=*/1, alpha);
    };
    for_each_slice(operands, [&](const Slice& slice) {
      const at::Tensor queries = slice.joined(of.q), own = slice.joined(gradient);
      const at::Tensor weights = at::softmax(slice.scores(queries), 2);
      const at::Tensor of_weights = at::bmm(own, slice.values().transpose(1, 2));
      const at::Tensor of_scores = at::_softmax_backward_data(of_weights, weights, 2, operands.type);
      slice.of(gradients.q).copy_(slice.apart(scaled_product(of_scores, slice.keys(), operands.scale)));
      add(of_keys, of_scores.transpose(1, 2), queries, operands.scale);
      add(of_values, weights.transpose(1, 2), own, 1);
    });
    heads_first(gradients.k, operands.rows).copy_(operands.heads(of_keys));
    heads_first(gradients.v, operands.rows).copy_(operands.heads(of_values));
  }
}

void attend(const Qkv& of, const Tile& tile, Attended& attended) {
  for_each_slice(Operands(of, tile), [&](const Slice& slice) {
    const at::Tensor scores = slice.scores(slice.joined(of.q)), log_sums = at::logsumexp(scores, {2}, true);
    const at::Tensor part = at::bmm((scores - log_sums).exp_(), slice.values());
    merge(slice.apart(part), slice.apart(log_sums).squeeze(4), slice.of(attended.out),
          slice.of(attended.log_sums).squeeze(4));
  });
}

void attend_backward(const Qkv& of, const AttendedGradient& attended, const Tile& tile,
                     const Qkv& gradients) {
  const Operands operands(of, tile);
  for_each_slice(operands, [&](const Slice& slice) {
    const at::Tensor queries = slice.joined(of.q), gradient = slice.joined(attended.gradient);
    const at::Tensor log_sums = slice.joined(attended.log_sums);  // [F · Hkv, groups · L, 1]
    const at::Tensor weights = (slice.scores(queries) - log_sums).exp_();
    const at::Tensor mean = (gradient * slice.joined(attended.out)).sum(2, true);
    const at::Tensor of_scores =
        (at::bmm(gradient, slice.values().transpose(1, 2)) - mean).mul_(weights).mul_(operands.scale);
    slice.of(gradients.q).add_(slice.apart(at::bmm(of_scores, slice.keys())));
    const auto add = [&](const at::Tensor& to, const at::Tensor& part) {
      heads_first(to, operands.rows).narrow(2, 0, slice.seen()).add_(operands.heads(part));
    };
    add(gradients.k, at::bmm(of_scores.transpose(1, 2), queries));
    add(gradients.v, at::bmm(weights.transpose(1, 2), gradient));
  });
}

}  // namespace isograd::products
