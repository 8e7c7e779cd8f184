// A share: what the one division made of a sum.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
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

}  // namespace isograd
