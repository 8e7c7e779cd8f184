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

bool TokenDistribution::before(std::int64_t a, std::int64_t b) const {
  const double x = values_[static_cast<std::size_t>(a)], y = values_[static_cast<std::size_t>(b)];
  return x > y || (x == y && a < b);
}

std::vector<std::int64_t> TokenDistribution::likeliest(std::int64_t k) const {
  std::vector<std::int64_t> tokens(values_.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  const auto order = [this](std::int64_t a, std::int64_t b) { return before(a, b); };
  if (k < std::ssize(tokens)) {
    std::nth_element(tokens.begin(), tokens.begin() + k, tokens.end(), order);
    tokens.resize(static_cast<std::size_t>(k));
  }
  std::sort(tokens.begin(), tokens.end(), order);
  return tokens;
}

std::vector<std::int64_t> TokenDistribution::kept(const Draw& how) const {
  const auto all = std::ssize(values_);
  std::vector<std::int64_t> tokens;
  if (how.top_k > 0) {
    tokens = likeliest(std::min(how.top_k, all));
  } else {
    tokens.resize(values_.size());
    std::iota(tokens.begin(), tokens.end(), 0);
  }
  const auto mass = [&](auto begin, auto end) {
    return std::accumulate(begin, end, 0.0, [&](double sum, std::int64_t token) {
      return sum + weights_[static_cast<std::size_t>(token)];
    });
  };
  if (how.top_p < 1) {
    // The last that is kept lies in [begin, end), which is halved, the likelier half first, without sorting
    // it.
    const double wanted = how.top_p * mass(tokens.begin(), tokens.end());
    double have = 0;
    auto begin = tokens.begin(), end = tokens.end();
    while (end - begin > 1) {
      const auto middle = begin + (end - begin) / 2;
      std::nth_element(begin, middle, end, [this](std::int64_t a, std::int64_t b) { return before(a, b); });
      const double half = mass(begin, middle);
      if (have + half >= wanted)
        end = middle;
      else
        have += half, begin = middle;
    }
    tokens.erase(end, tokens.end());
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
