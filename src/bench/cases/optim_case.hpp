// What both sides of `bench optim` compute: shapes, options, and values that both make by one formula.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>
#include <vector>

namespace isograd {

struct OptimCase {
  std::string name;
  std::vector<std::vector<std::int64_t>> shapes{};
  std::int64_t updates_per_turn = 5;
  bool standard = true;

  std::int64_t numel() const;
};

// "communication": the 43 M parameters of bench step's case of that name. "tiny" shows that it works.
const std::vector<OptimCase>& optim_cases();
const OptimCase& find_optim_case(const std::string& name);  // ConfigError names the cases

void write_optim_exchange(const std::filesystem::path& directory, const OptimCase& of, int ranks);

// [numel] whole numbers in [-509, 509], a function of the element's place among all parameters and of `salt`
// (0: parameters, 1 + rank: that rank's gradient).
at::Tensor pattern(std::int64_t offset, std::int64_t numel, std::int64_t salt);
// A power of two makes them parameters or gradients: everything that is summed before the norm is exact.
inline constexpr double kParameterUnit = 0x1p-14;
inline constexpr double kGradientUnit = 0x1p-20;
// What update number `update` multiplies its gradients by.
double gradient_factor(std::int64_t update);

// How far two runs of `norms.size()` fp32 AdamW updates may lie apart whose gradients are equal and whose
// clipping norms are `ours` and `theirs`. Derived in optim_case.cpp.
double allowed_difference(const std::vector<double>& ours, const std::vector<double>& theirs,
                          double largest_parameter);

}  // namespace isograd
