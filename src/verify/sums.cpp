#include "verify/sums.hpp"

#include <algorithm>
#include <array>

#include "isograd/error.hpp"
#include "kernels/threads/parallel_for.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kBlock = 1 << 14;  // elements that one thread adds up, whatever the number of threads
constexpr std::size_t kLanes = 8;

// N sums over [begin, end): `add(i, lane)` adds element i to that lane of each. Blocks are added up in their
// order.
template <std::size_t N, typename Add>
std::array<double, N> summed(std::int64_t begin, std::int64_t end, const Add& add) {
  const std::int64_t blocks = (end - begin + kBlock - 1) / kBlock;
  std::vector<std::array<double, N>> of_block(static_cast<std::size_t>(std::max<std::int64_t>(blocks, 0)));
  parallel_for(0, blocks, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t b = first; b < last; ++b) {
      std::array<std::array<double, kLanes>, N> lanes{};
      std::int64_t i = begin + b * kBlock;
      const std::int64_t stop = std::min(end, i + kBlock);
      for (; i + static_cast<std::int64_t>(kLanes) <= stop; i += kLanes)
        for (std::size_t lane = 0; lane < kLanes; ++lane)
          add(i + static_cast<std::int64_t>(lane), lane, lanes);
      for (std::size_t lane = 0; i < stop; ++i, ++lane) add(i, lane, lanes);
      for (std::size_t n = 0; n < N; ++n) {
        double sum = 0;
        for (const double lane : lanes[n]) sum += lane;
        of_block[static_cast<std::size_t>(b)][n] = sum;
      }
    }
  });
  std::array<double, N> sums{};
  for (const auto& block : of_block)
    for (std::size_t n = 0; n < N; ++n) sums[n] += block[n];
  return sums;
}

// Where its elements can be read one after the other; usually the tensor itself.
at::Tensor readable(const at::Tensor& tensor) {
  return tensor.to(at::kCPU, at::kDouble).contiguous();
}

void expect_alike(const at::Tensor& a, const at::Tensor& b) {
  ISOGRAD_INVARIANT(a.numel() == b.numel(), "sums over tensors of other sizes");
}

}  // namespace

PairSums pair_sums(const at::Tensor& a_, const at::Tensor& b_, std::int64_t begin, std::int64_t end) {
  const at::Tensor a = readable(a_), b = readable(b_);
  expect_alike(a, b);
  const auto *x = a.const_data_ptr<double>(), *y = b.const_data_ptr<double>();
  const auto sums = summed<6>(begin, end, [x, y](std::int64_t i, std::size_t lane, auto& lanes) {
    const double own = x[i], other = y[i], apart = own - other;
    lanes[0][lane] += own * own;
    lanes[1][lane] += other * other;
    lanes[2][lane] += own * other;
    lanes[3][lane] += apart * apart;
    lanes[4][lane] += apart * own;
    lanes[5][lane] += apart * other;
  });
  return {.own = sums[0],
          .other = sums[1],
          .product = sums[2],
          .apart = sums[3],
          .along_own = sums[4],
          .along_other = sums[5]};
}

PairSums pair_sums(const at::Tensor& a, const at::Tensor& b) {
  return pair_sums(a, b, 0, a.numel());
}

FitSums fit_sums(const at::Tensor& error, const at::Tensor& direction, const at::Tensor& value,
                 std::int64_t begin, std::int64_t end) {
  const at::Tensor e = readable(error), d = readable(direction), v = readable(value);
  expect_alike(e, d);
  expect_alike(e, v);
  const auto *x = e.const_data_ptr<double>(), *y = d.const_data_ptr<double>(),
             *z = v.const_data_ptr<double>();
  const auto sums = summed<4>(begin, end, [x, y, z](std::int64_t i, std::size_t lane, auto& lanes) {
    lanes[0][lane] += x[i] * y[i];
    lanes[1][lane] += y[i] * y[i];
    lanes[2][lane] += x[i] * x[i];
    lanes[3][lane] += z[i] * z[i];
  });
  return {.error_direction = sums[0],
          .direction = sums[1],
          .error = sums[2],
          .value = sums[3],
          .elements = static_cast<double>(end - begin)};
}

double squares_apart(const at::Tensor& a_, const at::Tensor& b_, double factor) {
  const at::Tensor a = readable(a_), b = readable(b_);
  expect_alike(a, b);
  const auto *x = a.const_data_ptr<double>(), *y = b.const_data_ptr<double>();
  return summed<1>(0, a.numel(), [x, y, factor](std::int64_t i, std::size_t lane, auto& lanes) {
    const double apart = x[i] - factor * y[i];
    lanes[0][lane] += apart * apart;
  })[0];
}

double squares_missing(const at::Tensor& whole_, const std::vector<at::Tensor>& parts_) {
  const at::Tensor whole = readable(whole_);
  std::vector<at::Tensor> parts;
  std::vector<const double*> of_part;
  for (const at::Tensor& part : parts_) {
    expect_alike(part, whole);
    parts.push_back(readable(part));
    of_part.push_back(parts.back().const_data_ptr<double>());
  }
  const auto* x = whole.const_data_ptr<double>();
  return summed<1>(0, whole.numel(), [x, &of_part](std::int64_t i, std::size_t lane, auto& lanes) {
    double sum = 0;
    for (const double* part : of_part) sum += part[i];
    lanes[0][lane] += (sum - x[i]) * (sum - x[i]);
  })[0];
}

double squares(const at::Tensor& tensor_) {
  const at::Tensor tensor = readable(tensor_);
  const auto* x = tensor.const_data_ptr<double>();
  return summed<1>(0, tensor.numel(),
                   [x](std::int64_t i, std::size_t lane, auto& lanes) { lanes[0][lane] += x[i] * x[i]; })[0];
}

bool holds(double squares) {
  constexpr double kLeast = 1e-270, kMost = 1e300;
  return squares >= kLeast && squares <= kMost;
}

}  // namespace isograd
