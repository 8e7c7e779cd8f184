#include "isograd/norm.hpp"

#include <ATen/Parallel.h>
#include <ATen/ops/tensor.h>

#include <cmath>

#include "kernels/flat.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kChunk = 1 << 16;  // elements; fixed, so that the bits do not depend on the threads

double squared_norm(const at::Tensor& flat, Range range) {
  const std::int64_t chunks = (range.size() + kChunk - 1) / kChunk;
  std::vector<double> sums(chunks);
  at::parallel_for(0, chunks, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t chunk = first; chunk < last; ++chunk) {
      const std::int64_t at = range.begin + chunk * kChunk, count = std::min(kChunk, range.end - at);
      sums[chunk] = flat.scalar_type() == at::kDouble
                        ? kernels::squared_norm(flat.const_data_ptr<double>() + at, count)
                        : kernels::squared_norm(flat.const_data_ptr<float>() + at, count);
    }
  });
  double sum = 0;
  for (double part : sums) sum += part;
  return sum;
}

}  // namespace

GlobalNorm global_norm(const std::vector<Bucket>& buckets, double local_loss_sum, Group& group) {
  double squares = 0;
  for (const Bucket& bucket : buckets) squares += squared_norm(bucket.gradients, bucket.owned);
  const double bad = std::isfinite(squares) && std::isfinite(local_loss_sum) ? 0 : 1;
  double sums[3] = {squares, local_loss_sum, bad};  // of this rank, then of all
  if (group.size() > 1) {
    at::Tensor message = at::tensor(at::ArrayRef<double>(sums, 3), at::kDouble);
    group.all_reduce(message);
    for (int i = 0; i < 3; ++i) sums[i] = message.const_data_ptr<double>()[i];
  }
  // Finite parts can still overflow when summed.
  return {.norm = std::sqrt(sums[0]),
          .loss_sum = sums[1],
          .finite = sums[2] == 0 && std::isfinite(sums[0]) && std::isfinite(sums[1])};
}

double clip_coefficient(double norm, double max_norm) {
  return max_norm > 0 ? std::fmin(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

}  // namespace isograd
