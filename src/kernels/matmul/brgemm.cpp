#include "kernels/matmul/brgemm.hpp"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <iterator>
#include <span>
#include <vector>

#include "kernels/threads/parallel_for.hpp"
#include "kernels/transpose.hpp"
#include "kernels/versions.hpp"

namespace isograd {
namespace {

// Block sizes of one call: rows of a, columns of c, and the summed dimension. b's part, [kDepth, kColumns],
// stays in the first- and second-level cache while rows pass. They were chosen among {64, 128, 256} and {256,
// 512} on a Zen 4 core (README.md) by all cases of `isograd bench product`.
constexpr std::int64_t kRows = 128, kColumns = 64, kDepth = 512;
constexpr int kAvx2 = 1, kAvx512 = 2;  // kernels::processor_level()
constexpr std::int64_t kFewRowsOfA =
    128;  // at most this many rows of a; b is then read from memory for little work
constexpr std::int64_t kNarrowest = 256, kWidest = 768;  // columns of b, read along whole rows
constexpr std::int64_t kTurnedRows = 4;  // blocks of a's rows that are transposed at once: 1 MB
constexpr std::int64_t kKept = 1 << 17;  // floats of b that stay in the second-level cache: 512 KB
constexpr std::int64_t kRowStep = 16, kColumnStep = 16, kDepthStep = 64;  // see next_block()

struct Part {
  std::int64_t begin, size;
};

std::vector<Part> parts_of(std::int64_t total, std::int64_t block, std::int64_t step) {
  std::vector<Part> parts;
  for (std::int64_t begin = 0; begin < total; begin += parts.back().size)
    parts.push_back({begin, next_block(total - begin, block, step)});
  return parts;
}

// Columns per thread: at most `most`, and few enough that every thread gets work.
std::int64_t columns_per_thread(std::int64_t n, std::int64_t most) {
  return std::min(at::divup(at::divup(n, at::get_num_threads()), kColumns) * kColumns, most);
}

// With a small summed dimension b's part is wider, at the same size: a thread then mainly writes c, which is
// faster along c's rows.
std::int64_t columns_of_block(std::int64_t n, std::int64_t depth) {
  std::int64_t most = kColumns;
  while (most < kDepth && 2 * most * depth <= kColumns * kDepth) most *= 2;
  return columns_per_thread(n, most);
}

// The stride of moved rows. Rows of a wide part must not map to the same few cache lines either.
constexpr std::int64_t moved_stride(std::int64_t columns) {
  return columns > kColumns ? columns + 16 : columns;
}

// Rows of b at multiples of 4 KiB map to the same few lines of the first-level cache. The kernel reads them
// several times, a few columns each, and is then half as fast.
bool wants_copies(const Operand& b) {
  constexpr std::int64_t kFloatsApart = 4096 / sizeof(float);
  return b.turned && b.stride % kFloatsApart == 0;
}

struct Factors {
  Operand a, b;
  bool copies_b = wants_copies(b);

  bool moves_b() const { return !b.turned || copies_b; }

  // a's rows, and b as [k, n], as the kernel reads them: in place, or transposed into `memory`.
  ConstRows rows_of_a(const Part& row, const Part& depth, float* memory) const {
    if (!a.turned) return {a.data + row.begin * a.stride + depth.begin, a.stride};
    kernels::transpose(a.data + depth.begin * a.stride + row.begin, a.stride, depth.size, row.size, memory,
                       depth.size);
    return {memory, depth.size};
  }
  ConstRows rows_of_b(const Part& column, const Part& depth, float* memory) const {
    const std::int64_t stride = moved_stride(column.size);
    if (b.turned) {
      const float* const from = b.data + depth.begin * b.stride + column.begin;
      if (!copies_b) return {from, b.stride};
      for (std::int64_t i = 0; i < depth.size; ++i)
        std::copy_n(from + i * b.stride, column.size, memory + i * stride);
      return {memory, stride};
    }
    kernels::transpose(b.data + column.begin * b.stride + depth.begin, b.stride, column.size, depth.size,
                       memory, stride);
    return {memory, stride};
  }
};

// Prefetches rows [begin, end) of b for the kernel.
void prefetch(Operand b, std::int64_t begin, std::int64_t end, std::int64_t columns) {
  constexpr std::int64_t kLine = 64 / sizeof(float);
  for (std::int64_t row = begin; row < end; ++row)
    for (std::int64_t i = 0; i < columns; i += kLine) __builtin_prefetch(b.data + row * b.stride + i);
}

// Two forms for few rows of a (kFewRowsOfA), where reading b from memory costs as much as multiplying. Both
// read b along its rows, as the processor's prefetchers do.
//
// x Wᵀ is computed as cᵀ = b aᵀ, for b [n, k], which the kernel cannot read as its second factor. a is
// transposed once, and so is each block of cᵀ. The AVX2 kernel is a seventh faster when the next rows of b
// are prefetched while it multiplies; the AVX-512 kernel is a twentieth slower.
void few_rows_x_wt(std::int64_t m, std::int64_t n, std::int64_t k, Operand a, Operand b, MutableRows c,
                   bool adds) {
  const auto rows = parts_of(n, kRows, kRowStep), columns = parts_of(m, kColumns, kColumnStep);
  const auto depths = parts_of(k, kDepth, kDepthStep);
  const bool asks_ahead = kernels::processor_level() == kAvx2;
  const std::int64_t stride =
      at::divup(m, kColumns) * kColumns;  // few different values: see multiply_block()
  const at::Tensor turned = at::empty({k * stride}, at::TensorOptions(at::kFloat));
  kernels::transpose(a.data, a.stride, m, k, turned.mutable_data_ptr<float>(), stride);
  const auto* const of_a = turned.const_data_ptr<float>();
  parallel_for(0, std::ssize(rows), 1, [&](std::int64_t first, std::int64_t last) {
    const at::Tensor memory = at::empty({kRows * kColumns}, at::TensorOptions(at::kFloat));
    float* const block = memory.mutable_data_ptr<float>();
    for (std::int64_t i = first; i < last; ++i)
      for (const Part& row = rows[i]; const Part& column : columns) {
        float* const to = c.data + column.begin * c.stride + row.begin;
        // Added to as with many rows, so that a row's bits do not depend on the number of rows.
        if (adds) kernels::transpose(to, c.stride, column.size, row.size, block, column.size);
        for (const Part& depth : depths) {
          if (asks_ahead && column.begin == 0 && i + 1 < last) {
            const Part& next = rows[static_cast<std::size_t>(i) + 1];
            prefetch(b, next.begin + next.size * depth.begin / k,
                     next.begin + next.size * (depth.begin + depth.size) / k, k);
          }
          multiply_block(row.size, column.size, depth.size,
                         {b.data + row.begin * b.stride + depth.begin, b.stride},
                         {of_a + depth.begin * stride + column.begin, stride}, {block, column.size},
                         adds || depth.begin > 0);
        }
        kernels::transpose(block, column.size, row.size, column.size, to, c.stride);
      }
  });
}

// dy W, for b [k, n], which the kernel reads in place: `few` of its rows at a time, whole or in wide parts. c
// stays in the second-level cache and is read and written once for each. The kernel takes a few columns of
// all rows at once. With more rows their lines would evict each other from the first-level cache.
void few_rows_dy_w(std::int64_t m, std::int64_t n, std::int64_t k, Operand a, Operand b, MutableRows c,
                   bool adds) {
  const std::int64_t few = kernels::processor_level() >= kAvx512 ? 32 : 16;
  const auto rows = parts_of(m, kRows, kRowStep),
             columns = parts_of(n, columns_per_thread(n, kWidest), kColumnStep),
             depths = parts_of(k, few, few);
  parallel_for(0, std::ssize(columns), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i)
      for (const Part& column = columns[i]; const Part& depth : depths)
        for (const Part& row : rows)
          multiply_block(row.size, column.size, depth.size,
                         {a.data + row.begin * a.stride + depth.begin, a.stride},
                         {b.data + depth.begin * b.stride + column.begin, b.stride},
                         {c.data + row.begin * c.stride + column.begin, c.stride}, adds || depth.begin > 0);
  });
}

}  // namespace

bool has_brgemm() {
#if defined(__x86_64__)
  return kernels::processor_level() >= kAvx2 && at::hasMKLDNN() && at::globalContext().userEnabledMkldnn();
#else
  return false;
#endif
}

void multiply_block(std::int64_t m, std::int64_t n, std::int64_t k, ConstRows a, ConstRows b, MutableRows c,
                    bool adds) {
  at::native::cpublas::brgemm(m, n, k, a.stride, b.stride, c.stride, adds, a.data, b.data, c.data,
                              /*is_vnni=*/false);
}

void multiply_by_brgemm(std::int64_t m, std::int64_t n, std::int64_t k, Operand a, Operand b, MutableRows c,
                        bool adds) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (!adds)
      for (std::int64_t i = 0; i < m; ++i) std::fill_n(c.data + i * c.stride, n, 0.f);
    return;
  }
  const Factors factors{a, b};
  if (m <= kFewRowsOfA && !a.turned) {
    if (!b.turned && m < n) return few_rows_x_wt(m, n, k, a, b, c, adds);
    // It reads 32 rows of b at a time with AVX-512, whose lines stay in the cache without a copy.
    if (b.turned && n >= kNarrowest && (!factors.copies_b || kernels::processor_level() >= kAvx512))
      return few_rows_dy_w(m, n, k, a, b, c, adds);
  }
  const auto depths = parts_of(k, kDepth, kDepthStep);
  const auto rows = parts_of(m, kRows, kRowStep),
             columns = parts_of(n, columns_of_block(n, depths.front().size), kColumnStep);
  // A task is a set of rows and columns. Operands are transposed or copied once for all blocks of the task
  // that read them: a's rows for all columns, b's columns for all rows.
  const std::int64_t num_rows = std::ssize(rows), num_columns = std::ssize(columns);
  const bool keeps_b = !factors.moves_b() && depths.front().size * n <= kKept;
  std::int64_t rows_each = keeps_b    ? 1
                           : a.turned ? std::min(kTurnedRows, num_rows)
                                      : num_rows,
               columns_each = a.turned ? num_columns : 1;
  const auto num_tasks = [&] {
    return at::divup(num_rows, rows_each) * at::divup(num_columns, columns_each);
  };
  for (std::int64_t& each = a.turned ? columns_each : rows_each;
       num_tasks() < at::get_num_threads() && each > 1;)
    each = at::divup(each, 2);
  const std::int64_t tasks_across = at::divup(num_columns, columns_each);
  parallel_for(0, num_tasks(), 1, [&](std::int64_t first, std::int64_t last) {
    const std::int64_t of_a = a.turned ? kRows * depths.front().size : 0,
                       of_b =
                           factors.moves_b() ? moved_stride(columns.front().size) * depths.front().size : 0;
    const at::Tensor memory = at::empty({rows_each * of_a + of_b}, at::TensorOptions(at::kFloat));
    float* const moved_a = memory.mutable_data_ptr<float>();
    float* const moved_b = moved_a + rows_each * of_a;
    for (std::int64_t task = first; task < last; ++task) {
      const std::int64_t row_begin = task / tasks_across * rows_each,
                         column_begin = task % tasks_across * columns_each;
      const std::span own_rows(rows.begin() + row_begin, std::min(rows_each, num_rows - row_begin));
      const std::span own_columns(columns.begin() + column_begin,
                                  std::min(columns_each, num_columns - column_begin));
      std::vector<ConstRows> rows_of_a(own_rows.size());
      for (const Part& depth : depths) {
        for (std::size_t i = 0; i < own_rows.size(); ++i)
          rows_of_a[i] = factors.rows_of_a(own_rows[i], depth, moved_a + static_cast<std::int64_t>(i) * of_a);
        for (const Part& column : own_columns) {
          const ConstRows rows_of_b = factors.rows_of_b(column, depth, moved_b);
          for (std::size_t i = 0; i < own_rows.size(); ++i)
            multiply_block(own_rows[i].size, column.size, depth.size, rows_of_a[i], rows_of_b,
                           {c.data + own_rows[i].begin * c.stride + column.begin, c.stride},
                           adds || depth.begin > 0);
        }
      }
    }
  });
}

}  // namespace isograd
