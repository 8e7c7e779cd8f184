#include "optim/norm/norm.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include "base/pattern.hpp"
#include "base/refuse.hpp"
#include "isograd/optimizer.hpp"
#include "kernels/flat.hpp"
#include "kernels/threads/parallel_for.hpp"
#include "layout/flat.hpp"
#include "layout/readings.hpp"

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

void check_limit(const std::string& pattern, double limit) {
  if (std::isfinite(limit) && limit >= 0) return;
  refuse("clip groups", fmt::format("the limit {} of {}", limit, pattern), "a number, 0 for no clip",
         "Give it a limit of 0 or more");
}

}  // namespace

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
  sums = add_up(std::move(sums), group, ReduceOp::kSum);
  const double bad = sums.back();
  sums.pop_back();
  const double total = sums.back();
  // Finite parts can still overflow when summed.
  const bool finite = bad == 0 && std::isfinite(sums.front()) && std::isfinite(total);
  std::copy_n(sums.begin(), local_sums.size(), local_sums.begin());
  return {.norm = std::sqrt(total), .loss_sum = local_sums.front(), .finite = finite};
}

double clip_coefficient(double norm, double max_norm) {
  if (std::isnan(max_norm))
    refuse("max_norm", "NaN", "a number: a limit above 0, or 0 for no clipping", "Set max_norm");
  return max_norm > 0 ? std::fmin(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

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

// ---- norms of parts ----

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

// ---- clipping groups ----

ClipsGroups::ClipsGroups(std::unique_ptr<Optimizer> inner, std::vector<ClipGroup> groups, double others,
                         Group all)
    : inner_(std::move(inner)), groups_(std::move(groups)), all_(std::move(all)) {
  check_limit("other parameters", others);
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const std::string& pattern = groups_[i].pattern;
    if (pattern.size() > kMostPattern)
      refuse("clip groups", fmt::format("a pattern of {} characters", pattern.size()),
             fmt::format("at most {}", kMostPattern), "Shorten it");
    check_limit(pattern, groups_[i].max_norm);
    const auto same = [&](const ClipGroup& group) { return group.pattern == pattern; };
    if (pattern.empty() ||
        std::any_of(groups_.begin(), groups_.begin() + static_cast<std::ptrdiff_t>(i), same))
      refuse("clip groups",
             pattern.empty() ? std::string("an empty pattern") : fmt::format("{}, given twice", pattern),
             "patterns of parameters' names, each once", "Leave it out");
  }
  groups_.push_back({.pattern = "others", .max_norm = others});
}

int ClipsGroups::group_of(const std::string& name) const {
  const auto last = groups_.end() - 1;
  const auto own = std::find_if(groups_.begin(), last,
                                [&](const ClipGroup& group) { return matches(group.pattern, name); });
  return static_cast<int>(own - groups_.begin());
}

// A pipeline stage or a rank of experts may have no parameter of a group, so the check sums over all ranks.
void ClipsGroups::check_patterns(const std::vector<Bucket>& buckets) {
  at::Tensor held = at::zeros({static_cast<std::int64_t>(groups_.size())}, at::kLong);
  for (const Bucket& bucket : buckets)
    for (const Slot& slot : bucket.plan.slots) held[group_of(slot.name)] += 1;
  if (all_.size() > 1) all_.all_reduce(held);
  for (std::size_t i = 0; i + 1 < groups_.size(); ++i)
    if (held[static_cast<std::int64_t>(i)].item<std::int64_t>() == 0)
      refuse("clip groups",
             fmt::format("{}, which fits no parameter that an earlier pattern does not have",
                         groups_[i].pattern),
             "patterns of names such as model.layers.0.mlp.up_proj.weight", "Change it, or leave it out");
  checked_ = true;
}

void ClipsGroups::update(std::vector<Bucket>& buckets, double gradient_scale) {
  if (!checked_) check_patterns(buckets);
  const auto norms = part_norms(
      buckets, [this](const Slot& slot) { return group_of(slot.name); }, static_cast<int>(groups_.size()),
      NormOrder::kTwo, all_);
  last_.clear();
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    // Buckets hold the gradient before a deferred mean's scale.
    const double norm = norms[i] * std::abs(gradient_scale);
    last_.push_back({groups_[i].pattern, norm, clip_coefficient(norm, groups_[i].max_norm)});
  }
  const at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets)
    for (const Slot& slot : bucket.plan.slots) {
      const double coefficient = last_[static_cast<std::size_t>(group_of(slot.name))].coefficient;
      const Range part = within(bucket.held, slot);
      if (coefficient != 1 && part.size() > 0)
        bucket.gradients.narrow(0, part.begin - bucket.held.begin, part.size()).mul_(coefficient);
    }
  inner_->update(buckets, gradient_scale);
}

}  // namespace isograd
