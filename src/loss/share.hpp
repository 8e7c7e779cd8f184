// A share: what the one division made of a sum.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "isograd/loss.hpp"

namespace isograd {

// Whether `value` is a share, or computed from one.
bool is_share(const at::Tensor& value);

// Σ over terms of weight · sum / denominator, unchecked.
at::Tensor share_of(const LossTerms& terms, const Denominator& denominator);
// The one division: what share_of() multiplies each term's sum by, weight / denominator; nothing where a term
// has no denominator or no weight and is left out.
std::vector<std::optional<double>> factors_of(const LossTerms& terms, const Denominator& denominator);
// share_of() with the factors as data, fp64 on the sums' device, so that a recorded backward reads them anew.
at::Tensor share_on_device(const LossTerms& terms, const at::Tensor& factors);
// A share of this value, which passes `fraction` back to the mean that it was made of.
at::Tensor share_of_value(const at::Tensor& mean, double fraction, double value);
// ConfigError for terms that Normalizer::scale refuses. `deferred`: nothing is divided before the end of the
// step.
void check_terms(const LossTerms& terms, bool deferred);

// Which part of the gradient of a sum, or mean, is in 16 bits while it is still one number for all elements:
// there the division is rounded, the same way for every token.
enum class In16Bits {
  kNothing,
  kCopies,     // tensors that get the sum's own gradient, its negative or 0
  kMultiples,  // tensors that get it multiplied or added up: masks, weights, means
  kSum,        // the sum itself, or a scalar that it is made of
};
In16Bits in_16_bits(const at::Tensor& sum);
void check_16_bits(const std::string& where, const LossTerm& term, bool deferred);

// LibTorch's functions, by their nodes' names without "Backward".
const std::set<std::string>& functions_of_own_slope();  // whose slope differs between elements
const std::set<std::string>& copying_functions();
// Where factors stand among the inputs: a factor's slope is the product of the others.
const std::map<std::string, std::vector<std::size_t>>& products();

}  // namespace isograd
