// Losses and the normaliser: the one place that divides (docs/losses.md, the law).
#pragma once

#include "isograd/cxx20.hpp"

#include "isograd/normalizer.hpp"    // what a loss is divided by
#include "isograd/token_losses.hpp"  // the losses themselves, as sums
