#include "loss/ranking/quantile.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "loss/checks.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kExactInFloat = 1 << 24;  // counts up to here are exact in fp32

// The order statistics around a quantile, and how far between them it lies.
struct QuantileRank {
  std::int64_t lower = 0, upper = 0;
  double fraction = 0;
};

// `q` was rounded to T by the caller.
template <typename T>
QuantileRank quantile_rank(T q, std::int64_t count, Interpolation interpolation) {
  const double exact = static_cast<double>(q) * static_cast<double>(count - 1);
  const double rank = count <= kExactInFloat ? static_cast<double>(q * static_cast<T>(count - 1)) : exact;
  QuantileRank result{.lower = static_cast<std::int64_t>(std::floor(rank)),
                      .upper = static_cast<std::int64_t>(std::ceil(rank)),
                      .fraction = rank - std::floor(rank)};
  switch (interpolation) {
    case Interpolation::kLower: result.upper = result.lower; break;
    case Interpolation::kHigher: result.lower = result.upper; break;
    case Interpolation::kNearest:
      result.lower = result.upper = static_cast<std::int64_t>(std::nearbyint(rank));  // half to even
      break;
    case Interpolation::kMidpoint: result.fraction = 0.5; break;
    case Interpolation::kLinear: break;
  }
  return result;
}

// a + fraction (b − a), as at::lerp computes it.
template <typename T>
T between(T a, T b, T fraction) {
  // Rounded once, from the nearer end.
  return fraction < T(0.5) ? std::fma(fraction, b - a, a) : std::fma(fraction - T(1), b - a, b);
}

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

// Order statistics of many values: bins of equal width between the ends of a sample, the first and last bin
// without an end; of them the few in which a wanted one lies are kept, and sought in.
constexpr std::int64_t kLeastBinned = 2048, kValueBins = 2048, kSample = 256;

template <typename T>
class Bins {
 public:
  explicit Bins(const std::vector<T>& values) {
    T high = low_ = values[0];
    for (std::size_t i = 0; i < values.size(); i += std::max<std::size_t>(1, values.size() / kSample))
      low_ = std::min(low_, values[i]), high = std::max(high, values[i]);
    scale_ = static_cast<T>(kValueBins) / (high - low_);
  }

  // False: the sample is one number, or its range is none that T has.
  bool split() const { return std::isfinite(low_) && std::isnormal(scale_); }

  // Never falls as values rise: neither do a rounded difference and a rounded product.
  std::size_t of(T value) const {
    const T at = (value - low_) * scale_, last = static_cast<T>(kValueBins - 1);
    return static_cast<std::size_t>(static_cast<std::int32_t>(at > 0 ? (at < last ? at : last) : T(0)));
  }

 private:
  T low_, scale_;
};

// The values in whose bins the order statistics `wanted` (ascending) lie; these become ranks among them.
template <typename T>
std::vector<T> narrowed(const std::vector<T>& values, const Bins<T>& bins,
                        std::vector<std::int64_t>& wanted) {
  std::vector<std::int64_t> counts(kValueBins, 0);
  for (const T value : values) ++counts[bins.of(value)];
  std::vector<std::uint8_t> kept(kValueBins, 0);
  std::int64_t below = 0, left_out = 0;
  auto next = wanted.begin();
  for (std::size_t bin = 0; bin < kept.size(); ++bin) {
    below += counts[bin];
    for (; next != wanted.end() && *next < below; ++next) *next -= left_out, kept[bin] = 1;
    if (kept[bin] == 0) left_out += counts[bin];
  }
  std::vector<T> few(values.size() - static_cast<std::size_t>(left_out) + 1);
  std::size_t count = 0;
  for (const T value : values) few[count] = value, count += kept[bins.of(value)];
  few.resize(count);
  return few;
}

std::vector<std::int64_t> distinct(const std::vector<QuantileRank>& ranks) {
  std::vector<std::int64_t> wanted;
  for (const auto& rank : ranks) wanted.push_back(rank.lower), wanted.push_back(rank.upper);
  std::sort(wanted.begin(), wanted.end());
  wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
  return wanted;
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
float value_of_key(std::uint32_t key) { return std::bit_cast<float>(key >> 31 ? key & 0x7fffffffu : ~key); }
double value_of_key(std::uint64_t key) {
  return std::bit_cast<double>(key >> 63 ? key & 0x7fffffffffffffffu : ~key);
}

// The state of the search for one order statistic in one list: the digits so far, and its rank among the
// values that have them.
template <typename Key>
struct Search {
  std::size_t list;
  std::int64_t rank;
  Key prefix = 0;
  std::size_t histogram = 0;
};

at::Tensor checked(const at::Tensor& values, const std::vector<double>& q) {
  for (const double value : q)
    if (!(value >= 0 && value <= 1))
      refuse("quantiles", fmt::format("q = {}", value), "0 <= q <= 1", "Give probabilities");
  if (!values.defined() || values.dim() != 1 || !at::isFloatingType(values.scalar_type()))
    refuse("quantiles", values.defined() ? fmt::format("values of {} dims", values.dim()) : "no values",
           "[n] of a floating type", "Pass a flat tensor of scores");
  return values.detach().to(at::kCPU, computing_type(values.scalar_type())).contiguous();
}

std::vector<double> not_numbers(const std::vector<double>& q) {
  return std::vector<double>(q.size(), std::numeric_limits<double>::quiet_NaN());
}

}  // namespace

template <typename T>
std::vector<T> select_quantiles(const std::vector<T>& values, const std::vector<T>& q,
                                Interpolation interpolation) {
  const auto count = std::ssize(values);
  std::vector<QuantileRank> ranks;
  for (const T p : q) ranks.push_back(quantile_rank(p, count, interpolation));
  const auto wanted = distinct(ranks);
  std::vector<std::int64_t> sought = wanted;  // in `few`
  std::vector<T> few;
  if (const Bins<T> bins(values); count >= kLeastBinned && bins.split())
    few = narrowed(values, bins, sought);
  else
    few = values;
  place(few.data(), few.data(), few.data() + few.size(), sought.data(), sought.data() + sought.size());
  const auto at = [&](std::int64_t rank) {
    const auto place = std::lower_bound(wanted.begin(), wanted.end(), rank) - wanted.begin();
    return few[sought[place]];
  };
  std::vector<T> result;
  for (const auto& rank : ranks)
    result.push_back(between(at(rank.lower), at(rank.upper), static_cast<T>(rank.fraction)));
  return result;
}

template <typename T>
Selected<T> select_over_ranks(Group& group, const std::vector<std::vector<T>>& lists, const std::vector<T>& q,
                              Interpolation interpolation, std::int64_t most) {
  using Key = decltype(order_key(T()));
  constexpr int kBits = 8 * sizeof(T);
  constexpr std::int64_t kBins = 1 << kSelectionDigit;
  const auto counts_type = [](std::int64_t of) {
    return of > std::numeric_limits<std::int32_t>::max() ? at::kLong : at::kInt;
  };
  const auto summed = [&](const std::vector<std::int64_t>& counts, std::int64_t of) {
    at::Tensor message = at::tensor(counts, at::kLong).to(counts_type(of));
    if (group.size() > 1) group.all_reduce(message);
    message = message.to(at::kLong);
    const auto* sums = message.const_data_ptr<std::int64_t>();
    return std::vector<std::int64_t>(sums, sums + message.numel());
  };

  // The highest digit of all values: with it the ranks learn how many there are.
  Selected<T> selected;
  std::vector<std::vector<Key>> keys(lists.size());
  std::vector<std::int64_t> counts(lists.size() * (kBins + 1), 0);
  for (std::size_t l = 0; l < lists.size(); ++l) {
    std::int64_t* own = counts.data() + l * (kBins + 1);
    keys[l].reserve(lists[l].size());
    for (const T value : lists[l]) {
      if (std::isnan(value)) {
        ++own[kBins];
        continue;
      }
      keys[l].push_back(order_key(value));
      ++own[keys[l].back() >> (kBits - kSelectionDigit)];
    }
  }
  counts = summed(counts, most);
  std::vector<std::vector<std::int64_t>> wanted(lists.size());
  std::vector<Search<Key>> searches;  // ascending by list and rank
  std::int64_t largest = 0;
  for (std::size_t l = 0; l < lists.size(); ++l) {
    const std::int64_t* own = counts.data() + l * (kBins + 1);
    selected.counts.push_back(std::accumulate(own, own + kBins, std::int64_t{0}));
    selected.not_numbers.push_back(own[kBins]);
    largest = std::max(largest, selected.counts.back());
    if (selected.counts.back() == 0 || own[kBins] > 0) continue;
    std::vector<QuantileRank> of_list;
    for (const T p : q) of_list.push_back(quantile_rank(p, selected.counts.back(), interpolation));
    wanted[l] = distinct(of_list);
    for (const auto rank : wanted[l]) searches.push_back({.list = l, .rank = rank, .histogram = l});
  }

  std::int64_t stride = kBins + 1;
  for (int known = 0, width = kSelectionDigit; !searches.empty();) {
    for (auto& search : searches) {
      const std::int64_t* own = counts.data() + static_cast<std::int64_t>(search.histogram) * stride;
      Key bin = 0;
      while (search.rank >= own[bin]) search.rank -= own[bin++];
      search.prefix = static_cast<Key>(search.prefix << (known == 0 ? 0 : width)) | bin;
    }
    known += width;
    if (known == kBits) break;
    // The next digit of the values that share what is found; searches that agree share a histogram.
    std::size_t histograms = 0;
    for (std::size_t s = 0; s < searches.size(); ++s) {
      const bool same =
          s > 0 && searches[s].list == searches[s - 1].list && searches[s].prefix == searches[s - 1].prefix;
      searches[s].histogram = same ? histograms - 1 : histograms++;
    }
    width = std::min(kSelectionDigit, kBits - known);
    stride = std::int64_t{1} << width;
    counts.assign(histograms * static_cast<std::size_t>(stride), 0);
    const int prefix = kBits - known;
    std::size_t first = 0;
    for (std::size_t l = 0; l < lists.size(); ++l) {
      std::size_t last = first;
      while (last < searches.size() && searches[last].list == l) ++last;
      std::erase_if(keys[l], [&](const Key key) {
        for (std::size_t s = first; s < last; ++s) {
          if (key >> prefix != searches[s].prefix) continue;
          const Key digit = key >> (prefix - width) & static_cast<Key>(stride - 1);
          ++counts[searches[s].histogram * static_cast<std::size_t>(stride) +
                   static_cast<std::size_t>(digit)];
          return false;
        }
        return true;  // of no use to any search
      });
      first = last;
    }
    counts = summed(counts, largest);
  }

  auto search = searches.begin();
  for (std::size_t l = 0; l < lists.size(); ++l) {
    selected.quantiles.emplace_back();
    if (wanted[l].empty()) continue;
    const auto at = [&](std::int64_t rank) {
      const auto place = std::lower_bound(wanted[l].begin(), wanted[l].end(), rank) - wanted[l].begin();
      return value_of_key((search + place)->prefix);
    };
    for (const T p : q) {
      const QuantileRank rank = quantile_rank(p, selected.counts[l], interpolation);
      selected.quantiles.back().push_back(
          between(at(rank.lower), at(rank.upper), static_cast<T>(rank.fraction)));
    }
    search += static_cast<std::ptrdiff_t>(wanted[l].size());
  }
  return selected;
}

template Selected<float> select_over_ranks(Group&, const std::vector<std::vector<float>>&,
                                           const std::vector<float>&, Interpolation, std::int64_t);
template Selected<double> select_over_ranks(Group&, const std::vector<std::vector<double>>&,
                                            const std::vector<double>&, Interpolation, std::int64_t);
template std::vector<float> select_quantiles(const std::vector<float>&, const std::vector<float>&,
                                             Interpolation);
template std::vector<double> select_quantiles(const std::vector<double>&, const std::vector<double>&,
                                              Interpolation);

std::vector<double> quantiles(const at::Tensor& values, const std::vector<double>& q,
                              Interpolation interpolation) {
  const at::Tensor given = checked(values, q);
  if (given.numel() == 0) refuse("quantiles", "no values", "one at least", "Give some");
  const auto of = [&]<typename T>(const T* data) -> std::vector<double> {
    const std::vector<T> copy(data, data + given.numel());
    for (const T value : copy)
      if (std::isnan(value)) return not_numbers(q);
    const auto result = select_quantiles(copy, rounded<T>(q), interpolation);
    return {result.begin(), result.end()};
  };
  return given.scalar_type() == at::kDouble ? of(given.const_data_ptr<double>())
                                            : of(given.const_data_ptr<float>());
}

std::vector<double> distributed_quantiles(Group& group, const at::Tensor& values,
                                          const std::vector<double>& q, Interpolation interpolation) {
  const at::Tensor given = checked(values, q);
  const auto of = [&]<typename T>(const T* data) -> std::vector<double> {
    const auto found = select_over_ranks<T>(group, {{data, data + given.numel()}}, rounded<T>(q),
                                            interpolation, std::numeric_limits<std::int64_t>::max());
    if (found.not_numbers[0] > 0) return not_numbers(q);
    if (found.counts[0] == 0)
      refuse("distributed_quantiles", "no values on any rank", "one at least", "Give some");
    return {found.quantiles[0].begin(), found.quantiles[0].end()};
  };
  return given.scalar_type() == at::kDouble ? of(given.const_data_ptr<double>())
                                            : of(given.const_data_ptr<float>());
}

}  // namespace isograd
