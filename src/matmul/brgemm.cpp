#include "matmul/brgemm.hpp"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "kernels/transpose.hpp"
#include "kernels/versions.hpp"

namespace isograd {
namespace {

// Of one call: rows of a, columns of c and what is summed over. b's part, [kDepth, kColumns], stays in the
// first- and second-level cache while rows pass by. Chosen among {64, 128, 256} and {256, 512} on a Zen 4
// core (README.md), by the products of all cases of `isograd bench product`.
constexpr std::int64_t kRows = 128, kColumns = 64, kDepth = 512;
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

// Where a thread turns the part of an operand that it needs in rows; aligned to a cache line.
float* turned_part() {
  thread_local const at::Tensor memory = at::empty({std::max(kRows, kColumns) * kDepth}, at::kFloat);
  return memory.mutable_data_ptr<float>();
}

}  // namespace

bool has_brgemm() {
#if defined(__x86_64__)
  constexpr int kAvx2 = 1;
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
  const auto rows = parts_of(m, kRows, kRowStep), columns = parts_of(n, kColumns, kColumnStep);
  const auto depths = parts_of(k, kDepth, kDepthStep);
  // a's rows as the kernel reads them, and b as [k, n]: where they lie, or turned once for all blocks that
  // use them. Rows are outside where a's are turned, columns elsewhere.
  const auto rows_of_a = [&](const Part& row, const Part& depth) -> ConstRows {
    if (!a.turned) return {a.data + row.begin * a.stride + depth.begin, a.stride};
    kernels::transpose(a.data + depth.begin * a.stride + row.begin, a.stride, depth.size, row.size,
                       turned_part(), depth.size);
    return {turned_part(), depth.size};
  };
  std::vector<float> both_turned(a.turned && !b.turned ? kColumns * kDepth : 0);
  const auto rows_of_b = [&](const Part& column, const Part& depth) -> ConstRows {
    if (b.turned) return {b.data + depth.begin * b.stride + column.begin, b.stride};
    float* const to = a.turned ? both_turned.data() : turned_part();
    kernels::transpose(b.data + column.begin * b.stride + depth.begin, b.stride, column.size, depth.size, to,
                       column.size);
    return {to, column.size};
  };
  const auto multiply = [&](const Part& row, const Part& column, const Part& depth, ConstRows of_a,
                            ConstRows of_b) {
    multiply_block(row.size, column.size, depth.size, of_a, of_b,
                   {c.data + row.begin * c.stride + column.begin, c.stride}, adds || depth.begin > 0);
  };
  const auto& outer = a.turned ? rows : columns;
  const auto& inner = a.turned ? columns : rows;
  // Fewer outer parts than threads: each is done in several pieces of the inner ones.
  const auto threads = static_cast<std::size_t>(both_turned.empty() ? at::get_num_threads() : 1);
  const std::size_t pieces = std::min((threads + outer.size() - 1) / outer.size(), inner.size());
  const auto work = [&](std::int64_t first, std::int64_t last) {
    for (auto task = static_cast<std::size_t>(first); task < static_cast<std::size_t>(last); ++task) {
      const Part& out = outer[task / pieces];
      const std::size_t piece = task % pieces, begin = piece * inner.size() / pieces,
                        end = (piece + 1) * inner.size() / pieces;
      for (const Part& depth : depths) {
        const ConstRows kept = a.turned ? rows_of_a(out, depth) : rows_of_b(out, depth);
        for (std::size_t i = begin; i < end; ++i)
          if (a.turned)
            multiply(out, inner[i], depth, kept, rows_of_b(inner[i], depth));
          else
            multiply(inner[i], out, depth, rows_of_a(inner[i], depth), kept);
      }
    }
  };
  const auto tasks = static_cast<std::int64_t>(outer.size() * pieces);
  if (threads == 1)
    work(0, tasks);
  else
    at::parallel_for(0, tasks, 1, work);
}

}  // namespace isograd
