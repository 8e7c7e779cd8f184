#include "model/attention/kernel.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "kernels/attention.hpp"
#include "kernels/matmul/brgemm.hpp"
#include "kernels/threads/parallel_for.hpp"
#include "kernels/transpose.hpp"

// FlashAttention's recurrences (Dao 2023, arXiv 2307.08691, algorithms 1 and 2), one head at a time: softmax
// over blocks of keys with the maximum and the sum so far, and backward from the saved log-sums.
namespace isograd::blocks {
namespace {

// Scores of one block, and the keys and values it needs, stay in the second-level cache (512 kB).
constexpr std::int64_t kQueries = 64, kKeys = 512;
// Blocks at the end of a fragment are filled up with zeros to a multiple of this: few kernels for any length.
constexpr std::int64_t kStep = 32;
// Keys that are gathered at once, a multiple of kKeys: of longer fragments forward gathers each block when it
// comes to it, and backward goes over the queries once for so many keys, so that memory is bounded.
constexpr std::int64_t kGathered = 8192;

std::int64_t filled_up(std::int64_t count) { return (count + kStep - 1) / kStep * kStep; }

template <typename T>
struct Head {  // row i of a head at data + i · stride
  T* data;
  std::int64_t stride;
  T* row(std::int64_t i) const { return data + i * stride; }
};
Head<const float> head_of(const at::Tensor& x, std::int64_t row, std::int64_t head) {
  return {x.const_data_ptr<float>() + row * x.stride(0) + head * x.stride(1), x.stride(0)};
}
Head<float> place_of(const at::Tensor& x, std::int64_t row, std::int64_t head) {
  return {x.mutable_data_ptr<float>() + row * x.stride(0) + head * x.stride(1), x.stride(0)};
}

// Rows one after another, then zeros.
void gather(const Head<const float>& from, std::int64_t rows, std::int64_t dim, float* to) {
  for (std::int64_t i = 0; i < rows; ++i) std::copy_n(from.row(i), dim, to + i * dim);
  std::fill(to + rows * dim, to + filled_up(rows) * dim, 0.f);
}

// gather() into columns: [dim, stride], its columns filled up.
void gather_turned(const Head<const float>& from, std::int64_t rows, std::int64_t dim, float* to,
                   std::int64_t stride) {
  kernels::transpose(from.data, from.stride, rows, dim, to, stride);
  for (std::int64_t d = 0; d < dim; ++d)
    std::fill(to + d * stride + rows, to + d * stride + filled_up(rows), 0.f);
}

// Σ a b, in lanes.
float dot(const float* a, const float* b, std::int64_t count) {
  constexpr std::int64_t kLanes = 16;
  float lanes[kLanes] = {};
  const std::int64_t whole = count - count % kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes)
    for (std::int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  for (std::int64_t i = whole; i < count; ++i) lanes[i - whole] += a[i] * b[i];
  return std::accumulate(lanes, lanes + kLanes, 0.f);
}

void scatter(const float* from, std::int64_t rows, std::int64_t dim, const Head<float>& to, bool adds) {
  for (std::int64_t i = 0; i < rows; ++i) {
    const float* const source = from + i * dim;
    float* const target = to.row(i);
    if (adds)
      for (std::int64_t d = 0; d < dim; ++d) target[d] += source[d];
    else
      std::copy_n(source, dim, target);
  }
}

// A tile's sizes, and memory of one thread for them.
struct Work {
  const Tile& tile;
  std::int64_t dim, groups, key_heads;
  float scale;

  Work(const Tile& tile_, const Qkv& of)
      : tile(tile_),
        dim(of.q.size(2)),
        groups(queries_per_key(of.q, of.k)),
        key_heads(of.k.size(1)),
        scale(static_cast<float>(1 / std::sqrt(static_cast<double>(of.q.size(2))))) {}

  // Calls `each` (fragment, key head) on LibTorch's threads, with a thread's memory of as many floats.
  template <typename F>
  void for_each_head(std::int64_t floats, F&& each) const {
    parallel_for(0, tile.count * key_heads, 1, [&](std::int64_t first, std::int64_t last) {
      const at::Tensor memory = at::empty({floats}, at::kFloat);
      for (std::int64_t i = first; i < last; ++i)
        each(i / key_heads, i % key_heads, memory.mutable_data_ptr<float>());
    });
  }
  // The number of queries of the block from `begin`, and of keys of the block from `key` that they see.
  std::int64_t queries_from(std::int64_t begin) const { return std::min(kQueries, tile.q_length - begin); }
  std::int64_t keys_from(std::int64_t key, std::int64_t begin) const {
    const std::int64_t end =
        tile.causal ? std::min(begin + queries_from(begin), tile.k_length) : tile.k_length;
    return std::min(kKeys, end - key);
  }
};

}  // namespace

void attend(const Qkv& of, const Tile& tile, const at::Tensor& out, const at::Tensor& log_sums) {
  const Work work(tile, of);
  const bool at_once = tile.k_length <= kGathered;
  const std::int64_t dim = work.dim, all_keys = at_once ? (tile.k_length + kKeys - 1) / kKeys * kKeys : kKeys;
  const std::int64_t floats = 2 * all_keys * dim + kQueries * (2 * dim + kKeys + 3);
  work.for_each_head(floats, [&](std::int64_t fragment, std::int64_t key_head, float* memory) {
    const auto take_floats = [&](std::int64_t count) { return std::exchange(memory, memory + count); };
    float* const all_turned = take_floats(all_keys * dim);  // block by block: [dim, kKeys]
    float* const all_values = take_floats(all_keys * dim);
    float* const queries = take_floats(kQueries * dim);
    float* const sums = take_floats(kQueries * dim);
    float* const scores = take_floats(kQueries * kKeys);
    float *const max = take_floats(kQueries), *const sum = take_floats(kQueries),
                 *const factor = take_floats(kQueries);
    const auto gather_block = [&](std::int64_t key, float* turned, float* values) {
      const std::int64_t row = tile.k_row + fragment * tile.k_length + key,
                         count = std::min(kKeys, tile.k_length - key);
      gather_turned(head_of(of.k, row, key_head), count, dim, turned, kKeys);
      gather(head_of(of.v, row, key_head), count, dim, values);
    };
    if (at_once)
      for (std::int64_t key = 0; key < tile.k_length; key += kKeys)
        gather_block(key, all_turned + key * dim, all_values + key * dim);
    for (std::int64_t head = key_head * work.groups; head < (key_head + 1) * work.groups; ++head)
      for (std::int64_t begin = 0; begin < tile.q_length; begin += kQueries) {
        const std::int64_t rows = work.queries_from(begin), filled = filled_up(rows),
                           place = fragment * tile.q_length + begin;
        gather(head_of(of.q, tile.q_row + place, head), rows, dim, queries);
        std::fill_n(max, rows, -std::numeric_limits<float>::infinity());
        std::fill_n(sum, rows, 0.f);
        for (std::int64_t key = 0, count; (count = work.keys_from(key, begin)) > 0; key += kKeys) {
          const std::int64_t columns = filled_up(count);
          const std::int64_t place_of_key = at_once ? key * dim : 0;
          float *const turned = all_turned + place_of_key, *const values = all_values + place_of_key;
          if (!at_once) gather_block(key, turned, values);
          multiply_block(filled, columns, dim, {queries, dim}, {turned, kKeys}, {scores, kKeys}, false);
          kernels::attention_weights(scores, kKeys, rows, count, columns,
                                     tile.causal ? begin - key + 1 : count, work.scale, max, sum, factor);
          if (key > 0)
            for (std::int64_t i = 0; i < rows; ++i)
              for (std::int64_t d = 0; d < dim; ++d) sums[i * dim + d] *= factor[i];
          multiply_block(filled, dim, columns, {scores, kKeys}, {values, dim}, {sums, dim}, key > 0);
        }
        const Head<float> to = place_of(out, place, head), logs = place_of(log_sums, place, head);
        for (std::int64_t i = 0; i < rows; ++i) {
          const float whole = 1 / sum[i];
          for (std::int64_t d = 0; d < dim; ++d) to.row(i)[d] = sums[i * dim + d] * whole;
          *logs.row(i) = max[i] + std::log(sum[i]);
        }
      }
  });
}

void attend_backward(const Qkv& of, const AttendedGradient& attended, const Tile& tile, const Qkv& gradients,
                     bool adds) {
  const Work work(tile, of);
  const std::int64_t dim = work.dim, all_keys = std::min(filled_up(tile.k_length), kGathered);
  const std::int64_t floats = 4 * all_keys * dim + 5 * kQueries * dim + 3 * kQueries * kKeys + 2 * kQueries;
  work.for_each_head(floats, [&](std::int64_t fragment, std::int64_t key_head, float* memory) {
    const auto take_floats = [&](std::int64_t count) { return std::exchange(memory, memory + count); };
    float *const keys = take_floats(all_keys * dim), *const values = take_floats(all_keys * dim);
    float *const dkeys = take_floats(all_keys * dim), *const dvalues = take_floats(all_keys * dim);
    float *const queries = take_floats(kQueries * dim), *const dqueries = take_floats(kQueries * dim);
    float* const gradient = take_floats(kQueries * dim);  // of out
    float* const turned_queries = take_floats(kQueries * dim);
    float* const turned_gradient = take_floats(kQueries * dim);
    // Keys in rows, [keys, queries]; and the scores' gradient with queries in rows.
    float *const weights = take_floats(kQueries * kKeys), *const dweights = take_floats(kQueries * kKeys);
    float* const dscores = take_floats(kQueries * kKeys);
    float *const logs = take_floats(kQueries), *const mean = take_floats(kQueries);
    for (std::int64_t first = 0; first < tile.k_length; first += kGathered) {
      const std::int64_t k_row = tile.k_row + fragment * tile.k_length + first,
                         gathered = std::min(kGathered, tile.k_length - first);
      gather(head_of(of.k, k_row, key_head), gathered, dim, keys);
      gather(head_of(of.v, k_row, key_head), gathered, dim, values);
      std::fill_n(dkeys, all_keys * dim, 0.f), std::fill_n(dvalues, all_keys * dim, 0.f);
      for (std::int64_t head = key_head * work.groups; head < (key_head + 1) * work.groups; ++head)
        // The queries before the first of these keys see none of them.
        for (std::int64_t begin = tile.causal ? first : 0; begin < tile.q_length; begin += kQueries) {
          const std::int64_t rows = work.queries_from(begin), filled = filled_up(rows),
                             place = fragment * tile.q_length + begin;
          const Head<const float> of_queries = head_of(of.q, tile.q_row + place, head),
                                  of_gradient = head_of(attended.gradient, place, head),
                                  of_out = head_of(attended.out, place, head),
                                  of_logs = head_of(attended.log_sums, place, head);
          gather(of_queries, rows, dim, queries);
          gather_turned(of_queries, rows, dim, turned_queries, filled);
          gather(of_gradient, rows, dim, gradient);
          gather_turned(of_gradient, rows, dim, turned_gradient, filled);
          for (std::int64_t i = 0; i < filled; ++i) {
            // Queries that fill up have the weight 0.
            logs[i] = i < rows ? *of_logs.row(i) : std::numeric_limits<float>::infinity();
            mean[i] = i < rows ? dot(of_out.row(i), of_gradient.row(i), dim) : 0.f;
          }
          for (std::int64_t key = first, count;
               key < first + gathered && (count = work.keys_from(key, begin)) > 0; key += kKeys) {
            const std::int64_t columns = filled_up(count), place_of_key = (key - first) * dim;
            const ConstRows of_keys{keys + place_of_key, dim}, of_values{values + place_of_key, dim};
            multiply_block(columns, filled, dim, of_keys, {turned_queries, filled}, {weights, filled}, false);
            multiply_block(columns, filled, dim, of_values, {turned_gradient, filled}, {dweights, filled},
                           false);
            kernels::attention_weights_backward(weights, dweights, count, filled,
                                                tile.causal ? begin - key : tile.k_length, work.scale, logs,
                                                mean);
            std::fill(weights + count * filled, weights + columns * filled, 0.f);
            std::fill(dweights + count * filled, dweights + columns * filled, 0.f);
            multiply_block(columns, dim, filled, {weights, filled}, {gradient, dim},
                           {dvalues + place_of_key, dim}, true);
            multiply_block(columns, dim, filled, {dweights, filled}, {queries, dim},
                           {dkeys + place_of_key, dim}, true);
            kernels::transpose(dweights, filled, columns, filled, dscores, kKeys);
            multiply_block(filled, dim, columns, {dscores, kKeys}, of_keys, {dqueries, dim}, key > first);
          }
          scatter(dqueries, rows, dim, place_of(gradients.q, tile.q_row + place, head), adds || first > 0);
        }
      scatter(dkeys, gathered, dim, place_of(gradients.k, k_row, key_head), adds);
      scatter(dvalues, gathered, dim, place_of(gradients.v, k_row, key_head), adds);
    }
  });
}

}  // namespace isograd::blocks
