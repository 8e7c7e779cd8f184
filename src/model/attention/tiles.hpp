// Attention of some queries to some keys, merged with other blocks' parts by log-sum-exp: for devices that
// hold parts of documents.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace isograd {

// Consecutive tokens of one document at consecutive rows of a tensor.
struct Span {
  std::int64_t document = 0;
  std::int64_t position = 0;  // of the first token, within its document
  std::int64_t length = 0;
  std::int64_t row = 0;

  bool operator==(const Span&) const = default;
};

// A rectangle of scores: every query of rows [q_row, q_row + q_length) sees every key of rows [k_row, k_row +
// k_length), or with `causal` (then both lengths are equal) the keys up to its own place. `count` of them,
// each as many rows further on as it is long.
struct Tile {
  std::int64_t q_row = 0, q_length = 0;
  std::int64_t k_row = 0, k_length = 0;
  bool causal = false;
  std::int64_t count = 1;

  bool operator==(const Tile&) const = default;
};

// The tiles that cover what these queries may see of these keys, each score once: keys of the same document
// and, with `causal`, of positions up to the query's own. In the order of the queries, then of the keys.
std::vector<Tile> tiles_between(const std::vector<Span>& queries, const std::vector<Span>& keys, bool causal);

// Whether any query of `queries` sees a key of `keys`.
bool sees_any(const std::vector<Span>& queries, const Span& keys, bool causal);

// fp64 for fp64, else fp32: what parts are merged and gradients added up in.
inline at::ScalarType accumulating_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

// q [T, H, D], k and v [N, Hkv, D], H a multiple of Hkv (query head h reads key head h / (H / Hkv)), heads
// dense, rows any distance apart; or gradients of these.
struct Qkv {
  at::Tensor q, k, v;
};

// The state of queries after the keys they met so far.
struct Attended {
  at::Tensor out;  // [T, H, D] in the accumulating type; zeros before the first key
  // [T, H] log Σ exp(score); −∞ before the first key. In fp64 while parts are merged: fp32 would round it
  // with each part, by more than the weights themselves, and `out` would no longer be a mean of values.
  at::Tensor log_sums;

  static Attended nothing(const at::Tensor& q);
};

// Merges `part` [..., D], whose log-sums are `log_sums` [...], into what was there.
void merge(const at::Tensor& part, const at::Tensor& log_sums, at::Tensor out, at::Tensor sums);

// Merges one tile into `attended`; scores are never kept. No gradient.
void attend(const Qkv& of, const Tile& tile, Attended& attended);

// Kept for backward, of queries: `out` of all keys in q's type, `log_sums`, and the gradient of `out`. Here
// log-sums may be in the accumulating type: rounded once, they add a third of the error of fp32 scores.
struct AttendedGradient {
  at::Tensor out, log_sums, gradient;  // [T, H, D], [T, H], [T, H, D]
};

// Adds one tile's part of the gradients, in the accumulating type. Summed over all tiles they are those of
// the whole: with the global log-sums every weight exp(score − log_sum) is final.
void attend_backward(const Qkv& of, const AttendedGradient& attended, const Tile& tile, const Qkv& gradients);

}  // namespace isograd
