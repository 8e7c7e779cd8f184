// Test helper: every operation of c10d::Backend, with inputs and answers that every rank can compute.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace isograd::testing {

struct BackendCases {
  std::vector<at::ScalarType> types = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kLong,
                                       at::kInt,    at::kShort, at::kChar,     at::kByte, at::kBool};
  bool uneven = true;      // gather and scatter take parts of other sizes
  at::Tensor memory = {};  // bytes for this rank's tensors, e.g. shared ones; undefined: private memory
};

// Collective. One line for each error; empty when all is right.
std::vector<std::string> check_backend(c10d::Backend& backend, const BackendCases& cases = {});

}  // namespace isograd::testing
