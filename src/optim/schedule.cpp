#include <algorithm>
#include <cmath>
#include <numbers>

#include "isograd/optimizer.hpp"

namespace isograd {

double Schedule::at(std::int64_t step) const {
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup + 1);
  if (kind == Kind::kConstant) return peak;
  const auto decaying = static_cast<double>(std::max<std::int64_t>(1, total - warmup));
  const double progress = std::min(1.0, static_cast<double>(step - warmup) / decaying);
  return peak * (floor + (1 - floor) * 0.5 * (1 + std::cos(std::numbers::pi * progress)));
}

}  // namespace isograd
