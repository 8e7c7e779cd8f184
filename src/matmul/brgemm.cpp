#include "matmul/brgemm.hpp"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <iterator>
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

struct Factors {
  Operand a, b;

  // a's rows, and b as [k, n], as the kernel reads them: where they lie, or turned into `memory`.
  ConstRows rows_of_a(const Part& row, const Part& depth, float* memory) const {
    if (!a.turned) return {a.data + row.begin * a.stride + depth.begin, a.stride};
    kernels::transpose(a.data + depth.begin * a.stride + row.begin, a.stride, depth.size, row.size, memory,
                       depth.size);
    return {memory, depth.size};
  }
  ConstRows rows_of_b(const Part& column, const Part& depth, float* memory) const {
    if (b.turned) return {b.data + depth.begin * b.stride + column.begin, b.stride};
    kernels::transpose(b.data + column.begin * b.stride + depth.begin, b.stride, column.size, depth.size,
                       memory, column.size);
    return {memory, column.size};
  }
};

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
  const Factors factors{a, b};
  // What is turned is turned once for all blocks that read it: a's rows are outside where a is turned, b's
  // columns elsewhere.
  const auto& outer = a.turned ? rows : columns;
  const auto& inner = a.turned ? columns : rows;
  // Fewer outer parts than threads: each is done in several pieces of the inner ones.
  const std::int64_t threads = at::get_num_threads(), num_outer = std::ssize(outer),
                     num_inner = std::ssize(inner),
                     pieces = std::min(at::divup(threads, num_outer), num_inner);
  const auto work = [&](std::int64_t first, std::int64_t last) {
    const std::int64_t depth_size = depths.front().size;
    const at::Tensor memory = at::empty({((a.turned ? kRows : 0) + (b.turned ? 0 : kColumns)) * depth_size},
                                        at::TensorOptions(at::kFloat));
    float* const turned_a = memory.mutable_data_ptr<float>();
    float* const turned_b = turned_a + (a.turned ? kRows * depth_size : 0);
    for (std::int64_t task = first; task < last; ++task) {
      const std::int64_t piece = task % pieces, begin = piece * num_inner / pieces,
                         end = (piece + 1) * num_inner / pieces;
      const Part& out = outer[static_cast<std::size_t>(task / pieces)];
      for (const Part& depth : depths) {
        const ConstRows kept =
            a.turned ? factors.rows_of_a(out, depth, turned_a) : factors.rows_of_b(out, depth, turned_b);
        for (std::int64_t i = begin; i < end; ++i) {
          const Part& in = inner[static_cast<std::size_t>(i)];
          const Part &row = a.turned ? out : in, &column = a.turned ? in : out;
          multiply_block(row.size, column.size, depth.size,
                         a.turned ? kept : factors.rows_of_a(row, depth, turned_a),
                         a.turned ? factors.rows_of_b(column, depth, turned_b) : kept,
                         {c.data + row.begin * c.stride + column.begin, c.stride}, adds || depth.begin > 0);
        }
      }
    }
  };
  at::parallel_for(0, num_outer * pieces, 1, work);
}

}  // namespace isograd
