// How a gradient that is off is held against causes: what the diagnosing files share.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "verify/compared_step.hpp"

namespace isograd {

std::vector<std::string> all_names(const ComparedStep& one);
// "all parameters", "only 1 of 12 parameters (b)"
std::string subject(const ComparedStep& one, const std::vector<std::string>& names);
// Ratios, cosine and error of the named parameters, in words.
std::string numbers_of(const ComparedStep& one, const std::vector<std::string>& names);
// Whether what is off keeps its direction.
bool multiples(const ComparedStep& one, const std::vector<std::string>& names);
bool same_ids(const std::vector<Cause>& causes);
// Whether the loss found is what a trainer with this mistake logs.
bool logs_as(const Cause& cause, const ComparedStep& one);
// Whether the cause explains the named parameters of this step. Nothing: it cannot be told.
std::optional<bool> explains(ComparedStep& one, const Cause& cause, const std::vector<std::string>& names);
// What a person can do where nothing can be run again.
std::string would_tell(const std::vector<Cause>& fitting);

// Leaves of causes that explain the gradient within rounding those to which it lies nearest.
void prefer_nearest(ComparedStep& one, std::vector<Cause>& fitting, const std::vector<std::string>& names);

// The weights of the micro-batches' parts that come nearest, by least squares.
struct Fitted {
  std::vector<double> weights;  // by cells()
  std::vector<double> norms;    // of the parts
  double left = 0;              // of the gradient found, as a share of its norm, that they do not explain
};
// Nothing: the parts cannot be had, or are too many for the elements.
std::optional<Fitted> fit_weights(ComparedStep& one, const std::vector<std::string>& names);
std::string text_of(const ComparedStep& one, const Fitted& fitted);
// Of a factor of all parameters within rounding: the weights of single parts lie further apart than it is
// from 1, so that these may be what is wrong.
bool nearer_to_other_weights(const Fitted& fitted, double ratio);
// Parts that are not in the sum, where the others are as they should be.
std::optional<Finding> diagnose_missing_parts(const ComparedStep& one, const std::vector<std::string>& names,
                                              const Fitted& fitted);
// Parts that were cut to one length before they were added up.
std::optional<Finding> diagnose_clipped_parts(ComparedStep& one, const std::vector<std::string>& names,
                                              const Fitted& fitted);

}  // namespace isograd
