#include "sampler/draw.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/softmax.hpp"

namespace isograd {

void TokenDistribution::compute(double temperature) {
  const auto best = std::max_element(values_.begin(), values_.end());
  if (best == values_.end() || !std::isfinite(*best)) return;
  best_ = best - values_.begin();
  const double largest = *best, divisor = temperature > 0 ? temperature : 1;
  for (double& value : values_) value = (value - largest) / divisor;
  weights_.resize(values_.size());
  kernels::exp_nonpositive(values_.data(), std::ssize(values_), weights_.data());
  total_ = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  finite_ = std::isfinite(total_);
}

double TokenDistribution::log_probability(std::int64_t token) const {
  return values_[static_cast<std::size_t>(token)] - std::log(total_);
}

std::vector<std::int64_t> TokenDistribution::likeliest(std::int64_t k) const {
  std::vector<std::int64_t> tokens(values_.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  const auto before = [&](std::int64_t a, std::int64_t b) {
    const double x = values_[static_cast<std::size_t>(a)], y = values_[static_cast<std::size_t>(b)];
    return x > y || (x == y && a < b);
  };
  if (k < std::ssize(tokens)) {
    std::nth_element(tokens.begin(), tokens.begin() + k, tokens.end(), before);
    tokens.resize(static_cast<std::size_t>(k));
  }
  std::sort(tokens.begin(), tokens.end(), before);
  return tokens;
}

std::vector<std::int64_t> TokenDistribution::kept(const Draw& how) const {
  const auto all = std::ssize(values_), most = how.top_k > 0 ? std::min(how.top_k, all) : all;
  const auto weight = [&](std::int64_t token) { return weights_[static_cast<std::size_t>(token)]; };
  std::vector<std::int64_t> tokens;
  // Without top_k few tokens are sorted at first, for they mostly have top_p.
  for (std::int64_t count = how.top_k > 0 ? most : std::min<std::int64_t>(64, most);;
       count = std::min(8 * count, most)) {
    tokens = likeliest(count);
    if (how.top_p == 1) break;
    double total = total_, have = 0;
    if (how.top_k > 0) {
      total = 0;
      for (const auto token : tokens) total += weight(token);
    }
    std::size_t taken = 0;
    while (taken < tokens.size() && (taken == 0 || have < how.top_p * total)) have += weight(tokens[taken++]);
    if (have < how.top_p * total && count < most) continue;
    tokens.resize(taken);
    break;
  }
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

std::int64_t TokenDistribution::draw(const Draw& how, double uniform) const {
  if (how.temperature == 0) return best_;
  double reached = 0;
  if (how.top_k == 0 && how.top_p == 1) {
    const double wanted = uniform * total_;
    for (std::size_t token = 0; token < weights_.size(); ++token)
      if ((reached += weights_[token]) > wanted) return static_cast<std::int64_t>(token);
    return best_;  // unless rounding, `wanted` is below the sum of all
  }
  const std::vector<std::int64_t> tokens = kept(how);
  double total = 0;
  for (const auto token : tokens) total += weights_[static_cast<std::size_t>(token)];
  const double wanted = uniform * total;
  for (const auto token : tokens)
    if ((reached += weights_[static_cast<std::size_t>(token)]) > wanted) return token;
  return best_;
}

}  // namespace isograd
