// Plain scalar twins of the kernels, one element at a time. Tests compare the fast passes with them, bit for
// bit where the arithmetic is the same. And numbers to compare them on.
#pragma once

#include <cmath>
#include <random>
#include <type_traits>
#include <vector>

#include "kernels/flat.hpp"
#include "kernels/softmax.hpp"

namespace isograd::kernels::naive {

inline float load(float x) { return x; }
inline double load(double x) { return x; }
inline float load(Bfloat16 x) { return to_float(x); }

template <typename T>
T stored(double value) {
  if constexpr (std::is_same_v<T, Bfloat16>)
    return to_bfloat16(static_cast<float>(value));
  else
    return static_cast<T>(value);
}

template <typename T>
std::vector<T> random_values(std::int64_t count, unsigned seed) {
  std::mt19937_64 bits(seed);
  std::normal_distribution<double> normal(0, 5);
  std::vector<T> values(count);
  for (T& value : values) value = stored<T>(normal(bits));
  return values;
}

template <typename T>
double squared_norm(const T* values, std::int64_t count) {
  long double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += static_cast<long double>(load(values[i])) * load(values[i]);
  return static_cast<double>(sum);
}

template <typename T>
double max_abs(const T* values, std::int64_t count) {
  double largest = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const double value = load(values[i]);
    if (std::isnan(value)) return value;
    largest = std::fmax(largest, std::fabs(value));
  }
  return largest;
}

template <typename G, typename T>
void adamw(const AdamW& s, const G* gradients, T* parameters, T* first, T* second, Bfloat16* rounded,
           std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    T gradient = T(s.gradient_scale) * load(gradients[i]);
    first[i] = first[i] + T(1 - s.beta1) * (gradient - first[i]);
    second[i] = T(s.beta2) * second[i] + T(1 - s.beta2) * gradient * gradient;
    T root = std::sqrt(second[i]) * T(s.inverse_root_correction) + T(s.epsilon);
    parameters[i] = T(s.keep) * parameters[i] - T(s.step_size) * first[i] / root;
    if (rounded) rounded[i] = to_bfloat16(static_cast<float>(parameters[i]));
  }
}

template <typename G, typename T>
void sgd(const Sgd& s, const G* gradients, T* parameters, T* velocity, Bfloat16* rounded,
         std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    T change = T(s.gradient_scale) * load(gradients[i]) + T(s.weight_decay) * parameters[i];
    if (velocity) change = velocity[i] = T(s.momentum) * velocity[i] + change;
    parameters[i] = parameters[i] - T(s.learning_rate) * change;
    if (rounded) rounded[i] = to_bfloat16(static_cast<float>(parameters[i]));
  }
}

// log Σ_j exp(x_j) of one row.
template <typename T>
double log_sum_exp(const T* row, std::int64_t vocabulary) {
  long double maximum = -INFINITY, sum = 0;
  for (std::int64_t j = 0; j < vocabulary; ++j) maximum = std::fmax(maximum, load(row[j]));
  for (std::int64_t j = 0; j < vocabulary; ++j) sum += std::exp(load(row[j]) - maximum);
  return static_cast<double>(maximum + std::log(sum));
}

// scale · (softmax(row)_j − [j = target]), given the row's log_sum_exp.
template <typename T>
double cross_entropy_gradient(const T* row, double log_sum, std::int64_t target, double scale,
                              std::int64_t j) {
  return scale * (std::exp(load(row[j]) - log_sum) - (j == target ? 1 : 0));
}

}  // namespace isograd::kernels::naive
