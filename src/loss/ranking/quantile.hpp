// Quantiles by selection: torch.quantile's ranks without a sort.
#pragma once

#include <cstdint>
#include <vector>

#include "isograd/ranking.hpp"

namespace isograd {

// No NaN among them.
template <typename T>
std::vector<T> select_quantiles(const std::vector<T>& values, const std::vector<T>& q,
                                Interpolation interpolation);

// A digit of the selection over ranks, in bits; the first digit's counts have one place more, for NaNs.
inline constexpr int kSelectionDigit = 11;
constexpr int selection_rounds(int bits) { return (bits + kSelectionDigit - 1) / kSelectionDigit; }

// For each list, of which every rank has a part (no NaN: they are counted alone), the quantiles of all parts
// together: empty where no rank has a value, or where one is NaN. One all-reduce a digit, the highest first:
// it counts, for every list and every order statistic that the digits found so far tell apart, the values
// that share them, by their next digit. `most`: a bound of the values of a list over all ranks, the same on
// every rank; below 2^31 counts travel in four bytes.
template <typename T>
struct Selected {
  std::vector<std::vector<T>> quantiles;          // of each list
  std::vector<std::int64_t> counts, not_numbers;  // of each list, over all ranks
};
template <typename T>
Selected<T> select_over_ranks(Group& group, const std::vector<std::vector<T>>& lists, const std::vector<T>& q,
                              Interpolation interpolation, std::int64_t most);

}  // namespace isograd
