// The losses of routers by plain code, for the oracle: nothing of router_losses.cpp or BalanceLoss is in
// here.
#pragma once

#include <functional>
#include <vector>

#include "isograd/model.hpp"
#include "train/task.hpp"

namespace isograd {

// Those that the configuration asks for, in the order in which RouterLosses adds them.
std::vector<PlainTerm> plain_router_terms(const RunConfig& config, const DecoderConfig& shape,
                                          std::function<DecoderLM&(TaskModel&)> decoder);

}  // namespace isograd
