#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "isograd/optimizer.hpp"
#include "optim/norm/norm.hpp"

namespace isograd {
namespace {

std::vector<double> add_up(std::vector<double> values, Group& group, ReduceOp op) {
  if (group.size() == 1) return values;
  at::Tensor message = at::tensor(values, at::kDouble);
  group.all_reduce(message, op);
  const auto* begin = message.const_data_ptr<double>();
  return {begin, begin + values.size()};
}

// Some backends' maximum drops NaN, so the number of NaNs is summed separately.
std::vector<double> largest_of_all(std::vector<double> values, Group& group) {
  const std::size_t count = values.size();
  for (std::size_t i = 0; i < count; ++i) {
    const bool lost = std::isnan(values[i]);
    if (lost) values[i] = 0;
    values.push_back(lost ? 1 : 0);
  }
  values = add_up(std::move(values), group, ReduceOp::kMax);
  for (std::size_t i = 0; i < count; ++i)
    if (values[count + i] > 0) values[i] = std::numeric_limits<double>::quiet_NaN();
  values.resize(count);
  return values;
}

}  // namespace

std::vector<double> part_norms(const std::vector<Bucket>& buckets,
                               const std::function<int(const Slot&)>& part_of, int parts, NormOrder order,
                               Group group) {
  std::vector<double> values(parts);
  std::vector<OwnedSquares> squares(parts);
  for (const Bucket& bucket : buckets)
    for (const Slot& slot : bucket.plan.slots) {
      const int part = part_of(slot);
      if (part < 0 || part >= parts) continue;
      if (order == NormOrder::kTwo) {
        squares[part].add(bucket, slot);
      } else {
        const double largest = max_abs(bucket.gradients, owned_part(bucket, slot));
        if (std::isnan(largest) || largest > values[part]) values[part] = largest;
      }
    }
  if (order == NormOrder::kInfinity) return largest_of_all(std::move(values), group);
  std::ranges::transform(squares, values.begin(), &OwnedSquares::value);
  values = add_up(std::move(values), group, ReduceOp::kSum);
  for (double& value : values) value = std::sqrt(value);
  return values;
}

void add_owned_squares(const Bucket& bucket, const NormParts& parts, std::vector<OwnedSquares>& squares) {
  for (const Slot& slot : bucket.plan.slots) {
    const int part = parts.of(slot.name);
    if (part < 0 || static_cast<std::size_t>(part) >= squares.size()) continue;
    squares[static_cast<std::size_t>(part)].add(bucket, slot);
  }
}

double infinity_norm(const std::vector<Bucket>& buckets, Group group) {
  return part_norms(
      buckets, [](const Slot&) { return 0; }, 1, NormOrder::kInfinity, group)[0];
}

}  // namespace isograd
