#include "kernels/paged_attention.hpp"

#include <cmath>
#include <limits>

#include "kernels/exponential.hpp"
#include "kernels/versions.hpp"

namespace isograd::kernels {
namespace {

constexpr std::int64_t kBlock = 16;  // positions, or numbers of a value, whose sums stay in registers

// scores[i · span + j] = q_i · k_j for `count` positions j of a page from `begin` on.
template <int kQueries, int kWidth, typename T, typename C>
ISOGRAD_ALWAYS_INLINE void score_block(const T* const* queries, const T* keys, std::int64_t dim,
                                       std::int64_t page, std::int64_t span, C* scores) {
  C sums[kQueries][kWidth] = {};
  for (std::int64_t d = 0; d < dim; ++d) {
    const T* row = keys + d * page;
#pragma GCC unroll 4
    for (int i = 0; i < kQueries; ++i) {
      const C q = load(queries[i][d]);
      for (int lane = 0; lane < kWidth; ++lane) sums[i][lane] = fused(q, load(row[lane]), sums[i][lane]);
    }
  }
  for (int i = 0; i < kQueries; ++i)
    for (int lane = 0; lane < kWidth; ++lane) scores[i * span + lane] = sums[i][lane];
}

// Numbers [0, kWidth) of the values' sums by the weights of all positions.
template <int kQueries, int kWidth, typename T, typename C>
ISOGRAD_ALWAYS_INLINE void sum_block(const PagedShape& shape, std::int64_t most, const C* weights,
                                     std::int64_t span, const T* const* values, std::int64_t begin,
                                     const C* totals, T* const* out) {
  C sums[kQueries][kWidth] = {};
  for (std::int64_t first = 0; first < most; first += shape.page) {
    const std::int64_t count = most - first < shape.page ? most - first : shape.page;
    const T* value = values[first / shape.page] + begin;
    for (std::int64_t j = 0; j < count; ++j, value += shape.dim) {
#pragma GCC unroll 4
      for (int i = 0; i < kQueries; ++i) {
        const C weight = weights[i * span + first + j];
        for (int lane = 0; lane < kWidth; ++lane)
          sums[i][lane] = fused(weight, load(value[lane]), sums[i][lane]);
      }
    }
  }
  for (int i = 0; i < kQueries; ++i)
    for (int lane = 0; lane < kWidth; ++lane) store(sums[i][lane] / totals[i], out[i] + begin + lane);
}

// Scores become weights exp(scale · (score − max)); those from `seen` to `most` become 0. Returns their sum.
template <typename C>
ISOGRAD_ALWAYS_INLINE C to_weights(C* row, std::int64_t seen, std::int64_t most, C scale) {
  const std::int64_t whole = seen - seen % kLanes;
  C lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = -std::numeric_limits<C>::infinity();
  const auto larger = [](C a, C b) { return a > b || a != a ? a : b; };  // a NaN stays NaN
  for (std::int64_t j = 0; j < whole; j += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = larger(row[j + lane], lanes[lane]);
  for (std::int64_t j = whole; j < seen; ++j) lanes[j - whole] = larger(row[j], lanes[j - whole]);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] = larger(lanes[lane + width], lanes[lane]);
  const C max = lanes[0];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = 0;
  for (std::int64_t j = 0; j < whole; j += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      row[j + lane] = exponential((row[j + lane] - max) * scale);
      lanes[lane] += row[j + lane];
    }
  for (std::int64_t j = whole; j < seen; ++j) {
    row[j] = exponential((row[j] - max) * scale);
    lanes[j - whole] += row[j];
  }
  for (std::int64_t j = seen; j < most; ++j) row[j] = 0;
  return folded(lanes);
}

// Queries [first, first + kQueries), counted over rows and heads.
template <int kQueries, typename T, typename C>
ISOGRAD_ALWAYS_INLINE void attend_queries(const PagedShape& shape, std::int64_t first, const T* queries,
                                          const T* const* keys, const T* const* values, C* scratch, T* out) {
  const T* from[kQueries];
  T* to[kQueries];
  C totals[kQueries];
  std::int64_t seen[kQueries];
  for (int i = 0; i < kQueries; ++i) {
    const std::int64_t row = (first + i) / shape.groups,
                       at = row * shape.stride + (first + i) % shape.groups * shape.dim;
    from[i] = queries + at, to[i] = out + at, seen[i] = shape.visible + row;
  }
  const std::int64_t most = seen[kQueries - 1], page = shape.page, span = (most + page - 1) / page * page;
  for (std::int64_t begin = 0; begin < span; begin += page) {
    const T* const of_page = keys[begin / page];
    std::int64_t j = 0;
    for (; j + kBlock <= page; j += kBlock)
      score_block<kQueries, kBlock>(from, of_page + j, shape.dim, page, span, scratch + begin + j);
    for (; j < page; ++j)
      score_block<kQueries, 1>(from, of_page + j, shape.dim, page, span, scratch + begin + j);
  }
  const C scale = C(1) / std::sqrt(static_cast<C>(shape.dim));
  for (int i = 0; i < kQueries; ++i) totals[i] = to_weights(scratch + i * span, seen[i], most, scale);
  std::int64_t d = 0;
  for (; d + kBlock <= shape.dim; d += kBlock)
    sum_block<kQueries, kBlock>(shape, most, scratch, span, values, d, totals, to);
  for (; d < shape.dim; ++d) sum_block<kQueries, 1>(shape, most, scratch, span, values, d, totals, to);
}

template <typename T, typename C>
ISOGRAD_ALWAYS_INLINE void attend_body(const PagedShape& shape, const T* queries, const T* const* keys,
                                       const T* const* values, C* scratch, T* out) {
  const std::int64_t all = shape.rows * shape.groups;
  std::int64_t i = 0;
  for (; i + 4 <= all; i += 4) attend_queries<4>(shape, i, queries, keys, values, scratch, out);
  for (; i < all; ++i) attend_queries<1>(shape, i, queries, keys, values, scratch, out);
}

}  // namespace

#define ISOGRAD_FOR_TYPE(T, C)                                                                               \
  ISOGRAD_VERSIONS(void, attend_pages, (attend_body<T, C>),                                                  \
                   (const PagedShape& shape, const T* queries, const T* const* keys, const T* const* values, \
                    C* scratch, T* out),                                                                     \
                   (shape, queries, keys, values, scratch, out))
ISOGRAD_FOR_TYPE(float, float)
ISOGRAD_FOR_TYPE(double, double)
ISOGRAD_FOR_TYPE(Bfloat16, float)
#undef ISOGRAD_FOR_TYPE

}  // namespace isograd::kernels
