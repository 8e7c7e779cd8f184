// The parameters of a list of modules of which each rank has made some: who says what, and what all know
// then.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/parameters.hpp"
#include "isograd/pipeline_parallel.hpp"

namespace isograd {

// Of the whole list, on whichever rank it is.
struct ListedParameter {
  std::string name;     // "<module>.<parameter>", of a tied one the first such
  std::size_t module;   // place of the module in the list
  std::vector<int> on;  // ranks along pp that have it, ascending
  std::vector<std::int64_t> shape;
  int given = -1;  // which of the given tensors it is, if any
};

// Collective: what each rank says, by rank. `say` is not collective itself; a ConfigError of any rank's
// becomes that of the first on all.
std::vector<std::string> texts_of_all(Group& group, const std::function<std::string()>& say);

// The given tensors of the whole list, each once.
std::vector<at::Tensor> given_tensors(const std::vector<PipelineModule>& list);

// One line for each module: what ranks must agree on before any is made.
std::string text_of_list(const std::vector<PipelineModule>& list, const std::vector<at::Tensor>& given);

// The parameters of one module, "<key>" to tensor and each tensor once, as lines.
using KeyedTensors = std::vector<std::pair<std::string, at::Tensor>>;
std::string text_of_module(std::size_t module, const KeyedTensors& parameters,
                           const std::vector<at::Tensor>& given);

// `texts` of all ranks, each of its modules' one after another; `pp` says which place along pp each rank has.
// ConfigError that names module, parameter and ranks where two ranks do not say the same of a module.
std::vector<ListedParameter> listed_parameters(const std::vector<std::string>& texts,
                                               const std::vector<int>& pp,
                                               const std::vector<std::string>& names);

// ConfigError where ranks have other lists than rank 0.
void check_same_lists(const std::vector<std::string>& texts);

Layout::Named placements_of(const std::vector<ListedParameter>& parameters, const Grid& grid);

}  // namespace isograd
