#include "optim/norm/passes.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

#include "kernels/flat.hpp"
#include "kernels/threads/parallel_for.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kChunk = kernels::kSquaresRun;  // fixed: the bits do not depend on the threads

// `of(place, count)` for each chunk of the range.
template <typename Pass>
std::vector<double> by_chunks(Range range, const Pass& of) {
  const std::int64_t chunks = (range.size() + kChunk - 1) / kChunk;
  std::vector<double> results(chunks);
  parallel_for(0, chunks, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t chunk = first; chunk < last; ++chunk) {
      const std::int64_t at = range.begin + chunk * kChunk;
      results[chunk] = of(at, std::min(kChunk, range.end - at));
    }
  });
  return results;
}

template <typename Action>
void with_values(const at::Tensor& flat, const Action& action) {
  switch (flat.scalar_type()) {
    case at::kDouble: return action(flat.const_data_ptr<double>());
    case at::kBFloat16: return action(static_cast<const kernels::Bfloat16*>(flat.const_data_ptr()));
    default: return action(flat.const_data_ptr<float>());
  }
}

}  // namespace

Range owned_part(const Bucket& bucket) {
  return {bucket.owned.begin - bucket.held.begin, bucket.owned.end - bucket.held.begin};
}

Range owned_part(const Bucket& bucket, const Slot& slot) {
  const auto place = [&](std::int64_t at) {  // clamps slots outside the range too
    return std::clamp(at, bucket.owned.begin, bucket.owned.end) - bucket.held.begin;
  };
  return {place(slot.offset), place(slot.offset + slot.numel)};
}

namespace by_libtorch {

double squared_norm(const at::Tensor& flat, Range range) {
  const at::Tensor squares = squares_of({flat.narrow(0, range.begin, range.size())});
  return squares.defined() ? squares.item<double>() : 0;
}

at::Tensor squares_of(const std::vector<at::Tensor>& parts) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> filled;
  std::ranges::copy_if(parts, std::back_inserter(filled), [](const at::Tensor& x) { return x.numel() > 0; });
  if (filled.empty()) return {};
  // One pass over all parts that squares and adds in fp64; a norm's own square is accurate to an fp64
  // rounding or two.
  const at::Tensor norms = at::stack(at::_foreach_norm(filled, 2, at::kDouble));
  return norms.square().sum();
}

double max_abs(const at::Tensor& flat, Range range) {
  const at::NoGradGuard no_grad;
  if (range.size() == 0) return 0;
  return flat.narrow(0, range.begin, range.size()).abs().max().item<double>();  // of a NaN and others a NaN
}

}  // namespace by_libtorch

double squared_norm(const at::Tensor& flat, Range range) {
  if (!flat.is_cpu()) return by_libtorch::squared_norm(flat, range);
  double sum = 0;
  with_values(flat, [&](const auto* values) {
    for (double part : by_chunks(range, [&](std::int64_t at, std::int64_t count) {
           return kernels::squared_norm(values + at, count);
         }))
      sum += part;
  });
  return sum;
}

double max_abs(const at::Tensor& flat, Range range) {
  if (!flat.is_cpu()) return by_libtorch::max_abs(flat, range);
  double largest = 0;
  with_values(flat, [&](const auto* values) {
    for (double part : by_chunks(range, [&](std::int64_t at, std::int64_t count) {
           return static_cast<double>(kernels::max_abs(values + at, count));
         }))
      if (std::isnan(part) || part > largest) largest = part;  // nothing is larger than a NaN: it stays
  });
  return largest;
}

}  // namespace isograd
