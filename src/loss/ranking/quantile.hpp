// Quantiles by selection: torch.quantile's ranks without a sort.
#pragma once

#include <cstdint>
#include <vector>

#include "isograd/ranking.hpp"

namespace isograd {

// The order statistics around a quantile, and how far between them it lies.
struct QuantileRank {
  std::int64_t lower = 0, upper = 0;
  double fraction = 0;
};

// `q` was rounded to T by the caller.
template <typename T>
QuantileRank quantile_rank(T q, std::int64_t count, Interpolation interpolation);

// a + fraction (b − a), as at::lerp computes it.
template <typename T>
T between(T a, T b, T fraction);

// Reorders `values`. No NaN among them.
template <typename T>
std::vector<T> select_quantiles(std::vector<T>& values, const std::vector<T>& q, Interpolation interpolation);

}  // namespace isograd
