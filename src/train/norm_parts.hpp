// train.part_norms: whose norms a step logs beside that of the whole gradient.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "isograd/optimizer.hpp"
#include "train/config.hpp"

namespace isograd {

// `named`: the whole model's parameters, of which the trained ones count, in their order. "off": no parts.
// "groups": "experts" (names with ".experts." in them) and "dense", as far as there are any. "layers": a
// name's text up to its first number, that included ("model.layers.3"), else its module ("model.norm").
// "parameters": each by itself.
NormParts norm_parts_of(const RunConfig& config,
                        const std::vector<std::pair<std::string, at::Tensor>>& named);

}  // namespace isograd
