// The matrix products of a step, timed alone: what is left of it when nothing else takes time.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "bench/cases/step_case.hpp"
#include "kernels/matmul/product.hpp"

namespace isograd {

// a bᵀ of a [m, k] and b [n, k], each in rows or (turned) in columns, so many times in a step.
struct StepProduct {
  std::string name;
  std::int64_t m = 0, n = 0, k = 0;
  bool a_turned = false, b_turned = false;
  std::int64_t times = 0;
  bool in_attention = false;  // a block that its kernel has in the cache
  // As time_products() finds them: seconds of one, medians, and whom the rule takes.
  double blas = 0, one_dnn = 0, brgemm = 0;
  Multiplier rule = Multiplier::kBlas;

  double flops() const {
    return 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  }
  double fastest() const { return std::min({blas, one_dnn, brgemm}); }
  double by_rule() const {
    return rule == Multiplier::kBrgemm ? brgemm : rule == Multiplier::kOneDnn ? one_dnn : blas;
  }
};

// Of one rank in fp32: forward, of the inputs' gradients and of the weights'; of attention our
// kernel's blocks, causal. Experts are dealt to `expert_ranks` and get as many tokens each, or in a case
// for one quarter of them, that quarter.
std::vector<StepProduct> step_products(const StepCase& step_case, int expert_ranks = 1);

// Times each by all three, by turns, on this thread, with operands that are not in the cache.
void time_products(std::vector<StepProduct>& products);

// Seconds of all, by the fastest for each.
double fastest_products(const StepCase& step_case, int expert_ranks = 1);

}  // namespace isograd
