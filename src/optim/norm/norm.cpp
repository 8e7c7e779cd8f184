#include "isograd/optimizer.hpp"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "isograd/parameters.hpp"
#include "layout/readings.hpp"
#include "optim/norm/passes.hpp"

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

}  // namespace isograd
