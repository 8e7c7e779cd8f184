// Test helper: every operation of Group, with inputs and answers that every rank can compute.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "isograd/group.hpp"

namespace isograd::testing {

struct OperationCases {
  std::vector<std::int64_t> numels = {0, 1, 7, 1000};
  std::vector<at::ScalarType> dtypes = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf, at::kLong,
                                        at::kInt,    at::kShort, at::kChar,     at::kByte, at::kBool};
  // true: each operation, type and size with shared or private memory × contiguous or strided × blocking or
  // asynchronous. false: these alternate, so that each operation meets each of them with some type and size.
  bool every_layout = false;
};

// Collective. One line for each error; empty when all is right.
std::vector<std::string> check_operations(Group group, const OperationCases& cases = {});

}  // namespace isograd::testing
