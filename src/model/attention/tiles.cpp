#include "model/attention/tiles.hpp"

#include <ATen/ATen.h>

#include <limits>
#include <unordered_map>

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

}  // namespace isograd
