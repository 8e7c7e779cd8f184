#include "loss/ranking/quantile.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "loss/checks.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kExactInFloat = 1 << 24;  // counts up to here are exact in fp32

// Puts the order statistics `wanted` (ascending) of [begin, end) into their places.
template <typename T>
void place(T* base, T* begin, T* end, const std::int64_t* first, const std::int64_t* last) {
  if (first == last || end - begin < 2) return;
  const std::int64_t* middle = first + (last - first) / 2;
  T* const at = base + *middle;
  std::nth_element(begin, at, end);
  place(base, begin, at, first, middle);
  place(base, at + 1, end, middle + 1, last);
}

std::vector<std::int64_t> distinct(const std::vector<QuantileRank>& ranks) {
  std::vector<std::int64_t> wanted;
  for (const auto& rank : ranks) wanted.push_back(rank.lower), wanted.push_back(rank.upper);
  std::sort(wanted.begin(), wanted.end());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  return wanted;
}

void check_q(const std::vector<double>& q) {
  for (const double value : q)
    if (!(value >= 0 && value <= 1))
      refuse("quantiles", fmt::format("q = {}", value), "0 <= q <= 1", "Give probabilities");
}

template <typename T>
std::vector<T> rounded(const std::vector<double>& q) {
  return {q.begin(), q.end()};
}

// Unsigned integers in the order of the numbers. −0 and 0 are one number.
std::uint32_t order_key(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
std::uint64_t order_key(double value) {
  const auto bits = std::bit_cast<std::uint64_t>(value + 0.0);
  return bits >> 63 ? ~bits : bits | 0x8000000000000000u;
}
float value_of_key(std::uint32_t key) {
  return std::bit_cast<float>(key >> 31 ? key & 0x7fffffffu : ~key);
}
double value_of_key(std::uint64_t key) {
  return std::bit_cast<double>(key >> 63 ? key & 0x7fffffffffffffffu : ~key);
}

// The order statistics `wanted` of all ranks' values: digit by digit, from the highest, each narrows its
// statistic to the values that begin with the digits found so far.
template <typename T>
std::vector<T> radix_select(Group& group, const T* values, std::int64_t count,
                            const std::vector<std::int64_t>& wanted) {
  using Key = decltype(order_key(T()));
  constexpr int kDigit = 11, kBits = 8 * sizeof(T);
  constexpr std::int64_t kBins = 1 << kDigit;
  const auto statistics = static_cast<std::int64_t>(wanted.size());
  std::vector<Key> keys(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) keys[static_cast<std::size_t>(i)] = order_key(values[i]);
  std::vector<Key> found(wanted.size(), 0);
  std::vector<std::int64_t> rest = wanted;  // ranks within the values that share the digits found
  for (int shift = kBits - kDigit, known = 0; known < kBits;) {
    const int width = std::min(kDigit, kBits - known);
    shift = kBits - known - width;
    at::Tensor counts = at::zeros({statistics, kBins}, at::kLong);
    auto* bins = counts.data_ptr<std::int64_t>();
    const Key digit = (Key{1} << width) - 1;
    for (std::size_t s = 0; s < wanted.size(); ++s) {
      // Statistics that agree so far share one histogram: the first of them counts.
      if (s > 0 && found[s] == found[s - 1]) continue;
      std::int64_t* own = bins + static_cast<std::int64_t>(s) * kBins;
      const bool all = known == 0;
      const int prefix = kBits - known;
      for (const Key key : keys)
        if (all || key >> prefix == found[s]) ++own[(key >> shift) & digit];
    }
    group.all_reduce(counts);
    std::size_t histogram = 0;
    std::vector<Key> next = found;
    for (std::size_t s = 0; s < wanted.size(); ++s) {
      if (s > 0 && found[s] != found[s - 1]) histogram = s;
      const std::int64_t* own = bins + static_cast<std::int64_t>(histogram) * kBins;
      Key bin = 0;
      while (rest[s] >= own[bin]) rest[s] -= own[bin++];
      next[s] = static_cast<Key>(found[s] << (known == 0 ? 0 : width)) | bin;
    }
    found = std::move(next);
    known += width;
  }
  std::vector<T> result;
  for (const Key key : found) result.push_back(value_of_key(key));
  return result;
}

template <typename T>
std::vector<double> combine(const std::vector<QuantileRank>& ranks, const std::vector<std::int64_t>& wanted,
                            const std::vector<T>& statistics) {
  const auto at = [&](std::int64_t rank) {
    return statistics[static_cast<std::size_t>(std::lower_bound(wanted.begin(), wanted.end(), rank) -
                                               wanted.begin())];
  };
  std::vector<double> result;
  for (const auto& rank : ranks)
    result.push_back(
        static_cast<double>(between(at(rank.lower), at(rank.upper), static_cast<T>(rank.fraction))));
  return result;
}

template <typename T>
std::vector<double> quantiles_of(const at::Tensor& values, const std::vector<double>& q,
                                 Interpolation interpolation) {
  const T* data = values.data_ptr<T>();
  std::vector<T> copy(data, data + values.numel());
  for (const T value : copy)
    if (std::isnan(value)) return std::vector<double>(q.size(), std::numeric_limits<double>::quiet_NaN());
  const auto result = select_quantiles(copy, rounded<T>(q), interpolation);
  return {result.begin(), result.end()};
}

template <typename T>
std::vector<double> distributed_quantiles_of(Group& group, const at::Tensor& values,
                                             const std::vector<double>& q, Interpolation interpolation) {
  const T* data = values.data_ptr<T>();
  const std::int64_t count = values.numel();
  at::Tensor totals = at::zeros({2}, at::kLong);  // values, NaNs
  totals[0] = count;
  totals[1] = std::count_if(data, data + count, [](T value) { return std::isnan(value); });
  group.all_reduce(totals);
  const auto all = totals[0].item<std::int64_t>();
  if (all == 0) refuse("distributed_quantiles", "no values on any rank", "one at least", "Give some");
  if (totals[1].item<std::int64_t>() > 0)
    return std::vector<double>(q.size(), std::numeric_limits<double>::quiet_NaN());
  std::vector<QuantileRank> ranks;
  for (const T p : rounded<T>(q)) ranks.push_back(quantile_rank(p, all, interpolation));
  const auto wanted = distinct(ranks);
  return combine(ranks, wanted, radix_select(group, data, count, wanted));
}

at::Tensor checked(const at::Tensor& values) {
  if (!values.defined() || values.dim() != 1 || !at::isFloatingType(values.scalar_type()))
    refuse("quantiles", values.defined() ? fmt::format("values of {} dims", values.dim()) : "no values",
           "[n] of a floating type", "Pass a flat tensor of scores");
  return values.detach().to(at::kCPU, computing_type(values.scalar_type())).contiguous();
}

}  // namespace

template <typename T>
QuantileRank quantile_rank(T q, std::int64_t count, Interpolation interpolation) {
  const double exact = static_cast<double>(q) * static_cast<double>(count - 1);
  const double rank = count <= kExactInFloat ? static_cast<double>(q * static_cast<T>(count - 1)) : exact;
  QuantileRank result{.lower = static_cast<std::int64_t>(std::floor(rank)),
                      .upper = static_cast<std::int64_t>(std::ceil(rank)),
                      .fraction = rank - std::floor(rank)};
  switch (interpolation) {
    case Interpolation::kLower:
      result.upper = result.lower;
      break;
    case Interpolation::kHigher:
      result.lower = result.upper;
      break;
    case Interpolation::kNearest:
      result.lower = result.upper = static_cast<std::int64_t>(std::nearbyint(rank));  // half to even
      break;
    case Interpolation::kMidpoint:
      result.fraction = 0.5;
      break;
    case Interpolation::kLinear:
      break;
  }
  return result;
}

template <typename T>
T between(T a, T b, T fraction) {
  // Rounded once, from the nearer end.
  return fraction < T(0.5) ? std::fma(fraction, b - a, a) : std::fma(fraction - T(1), b - a, b);
}

template <typename T>
std::vector<T> select_quantiles(std::vector<T>& values, const std::vector<T>& q,
                                Interpolation interpolation) {
  const auto count = static_cast<std::int64_t>(values.size());
  std::vector<QuantileRank> ranks;
  for (const T p : q) ranks.push_back(quantile_rank(p, count, interpolation));
  const auto wanted = distinct(ranks);
  place(values.data(), values.data(), values.data() + count, wanted.data(), wanted.data() + wanted.size());
  std::vector<T> result;
  for (const auto& rank : ranks)
    result.push_back(between(values[static_cast<std::size_t>(rank.lower)],
                             values[static_cast<std::size_t>(rank.upper)], static_cast<T>(rank.fraction)));
  return result;
}

template QuantileRank quantile_rank(float, std::int64_t, Interpolation);
template QuantileRank quantile_rank(double, std::int64_t, Interpolation);
template float between(float, float, float);
template double between(double, double, double);
template std::vector<float> select_quantiles(std::vector<float>&, const std::vector<float>&, Interpolation);
template std::vector<double> select_quantiles(std::vector<double>&, const std::vector<double>&,
                                              Interpolation);

std::vector<double> quantiles(const at::Tensor& values, const std::vector<double>& q,
                              Interpolation interpolation) {
  check_q(q);
  const at::Tensor given = checked(values);
  if (given.numel() == 0) refuse("quantiles", "no values", "one at least", "Give some");
  return given.scalar_type() == at::kDouble ? quantiles_of<double>(given, q, interpolation)
                                            : quantiles_of<float>(given, q, interpolation);
}

std::vector<double> distributed_quantiles(Group& group, const at::Tensor& values,
                                          const std::vector<double>& q, Interpolation interpolation) {
  check_q(q);
  const at::Tensor given = checked(values);
  return given.scalar_type() == at::kDouble ? distributed_quantiles_of<double>(group, given, q, interpolation)
                                            : distributed_quantiles_of<float>(group, given, q, interpolation);
}

}  // namespace isograd
