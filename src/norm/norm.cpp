#include "isograd/norm.hpp"

#include <ATen/Parallel.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>

#include "kernels/flat.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kChunk = 1 << 16;  // elements; fixed, so that the bits do not depend on the threads

double squared_norm(const at::Tensor& flat, std::int64_t at, std::int64_t count) {
  switch (flat.scalar_type()) {
    case at::kDouble:
      return kernels::squared_norm(flat.const_data_ptr<double>() + at, count);
    case at::kBFloat16:
      return kernels::squared_norm(static_cast<const kernels::Bfloat16*>(flat.const_data_ptr()) + at, count);
    default:
      return kernels::squared_norm(flat.const_data_ptr<float>() + at, count);
  }
}

double squared_norm(const at::Tensor& flat, Range range) {
  const std::int64_t chunks = (range.size() + kChunk - 1) / kChunk;
  std::vector<double> sums(chunks);
  at::parallel_for(0, chunks, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t chunk = first; chunk < last; ++chunk) {
      const std::int64_t at = range.begin + chunk * kChunk, count = std::min(kChunk, range.end - at);
      sums[chunk] = squared_norm(flat, at, count);
    }
  });
  double sum = 0;
  for (double part : sums) sum += part;
  return sum;
}

}  // namespace

GlobalNorm global_norm(const std::vector<Bucket>& buckets, double local_loss_sum, Group& group) {
  std::vector<double> sums = {local_loss_sum};
  return global_norm(buckets, sums, group);
}

GlobalNorm global_norm(const std::vector<Bucket>& buckets, std::vector<double>& local_sums, Group& group) {
  const auto all_finite = [](const std::vector<double>& numbers) {
    return std::all_of(numbers.begin(), numbers.end(), [](double number) { return std::isfinite(number); });
  };
  double squares = 0;
  for (const Bucket& bucket : buckets) {
    const std::int64_t origin = bucket.held.begin;
    squares += squared_norm(bucket.gradients, {bucket.owned.begin - origin, bucket.owned.end - origin});
  }
  std::vector<double> sums = local_sums;  // of this rank, then of all
  sums.push_back(squares);
  sums.push_back(all_finite(sums) ? 0 : 1);
  if (group.size() > 1) {
    at::Tensor message = at::tensor(sums, at::kDouble);
    group.all_reduce(message);
    std::copy_n(message.const_data_ptr<double>(), sums.size(), sums.begin());
  }
  const double bad = sums.back();
  sums.pop_back();
  const double total = sums.back();
  const bool finite = bad == 0 && all_finite(sums);  // finite parts can still overflow when summed
  std::copy_n(sums.begin(), local_sums.size(), local_sums.begin());
  return {.norm = std::sqrt(total), .loss_sum = local_sums.front(), .finite = finite};
}

double clip_coefficient(double norm, double max_norm) {
  return max_norm > 0 ? std::fmin(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

}  // namespace isograd
