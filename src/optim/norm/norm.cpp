#include "optim/norm/norm.hpp"

#include <ATen/ATen.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>
#include <vector>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/parameters.hpp"
#include "kernels/flat.hpp"
#include "kernels/threads/parallel_for.hpp"
#include "layout/readings.hpp"

namespace isograd {

GlobalNorm global_norm(const std::vector<Bucket>& buckets, double local_loss_sum, Group group) {
  std::vector<double> sums = {local_loss_sum};
  return global_norm(buckets, sums, group);
}

GlobalNorm global_norm(const std::vector<Bucket>& buckets, std::vector<double>& local_sums, Group group) {
  OwnedSquares squares;
  for (const Bucket& bucket : buckets) squares.add(bucket);
  return global_norm(squares.value(), local_sums, group);
}

void OwnedSquares::add(const Bucket& bucket) { add(bucket.gradients, owned_part(bucket)); }

void OwnedSquares::add(const Bucket& bucket, const Slot& slot) {
  add(bucket.gradients, owned_part(bucket, slot));
}

void OwnedSquares::add(const at::Tensor& flat, Range range) {
  if (flat.is_cpu())
    sum_ += squared_norm(flat, range);
  else
    waiting_.push_back(flat.narrow(0, range.begin, range.size()));
}

at::Tensor OwnedSquares::complete(Readings& readings) {
  const at::Tensor squares = by_libtorch::squares_of(std::exchange(waiting_, {}));
  if (!squares.defined()) return {};
  readings.add(squares, [this](double value) { sum_ += value; });
  return squares + sum_;
}

double OwnedSquares::value() {
  Readings readings;
  complete(readings);
  readings.read();
  return sum_;
}

double owned_squares(const Bucket& bucket) {
  OwnedSquares squares;
  squares.add(bucket);
  return squares.value();
}

GlobalNorm global_norm(double squares, std::vector<double>& local_sums, Group group) {
  std::vector<double> sums = local_sums;  // of this rank, then of all
  sums.push_back(squares);
  sums.push_back(std::isfinite(sums.front()) && std::isfinite(squares) ? 0 : 1);
  if (group.size() > 1) {
    at::Tensor message = at::tensor(sums, at::kDouble);
    group.all_reduce(message);
    std::copy_n(message.const_data_ptr<double>(), sums.size(), sums.begin());
  }
  const double bad = sums.back();
  sums.pop_back();
  const double total = sums.back();
  // Finite parts can still overflow when summed.
  const bool finite = bad == 0 && std::isfinite(sums.front()) && std::isfinite(total);
  std::copy_n(sums.begin(), local_sums.size(), local_sums.begin());
  return {.norm = std::sqrt(total), .loss_sum = local_sums.front(), .finite = finite};
}

double owned_squares(const Layout& layout, const std::vector<at::Tensor>& gradients) {
  double squares = 0;
  for (std::size_t i = 0; i < gradients.size(); ++i)
    squares += squared_norm(gradients[i].reshape({-1}), layout.parameters().at(i).owned);
  return squares;
}

GlobalNorm global_norm(const Layout& layout, const std::vector<at::Tensor>& gradients,
                       std::vector<double>& local_sums) {
  return global_norm(owned_squares(layout, gradients), local_sums, layout.mesh().all());
}

double clip_coefficient(double norm, double max_norm) {
  if (std::isnan(max_norm))
    refuse("max_norm", "NaN", "a number: a limit above 0, or 0 for no clipping", "Set max_norm");
  return max_norm > 0 ? std::fmin(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

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
