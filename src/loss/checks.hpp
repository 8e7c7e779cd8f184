// Checks of the arguments of every token-level loss, and the losses of single tokens that are reported.
#pragma once

#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <cstdint>
#include <string>

#include "base/refuse.hpp"  // for users of these checks
#include "isograd/loss.hpp"

namespace isograd {

// The valid tokens of a loss and what each weighs.
struct TokenWeights {
  at::Tensor mask;     // [T] bool
  at::Tensor weights;  // [T] fp64, 0 where the mask is false
};

// ConfigError for the option `key` of a loss.
template <class Value>
void check_option(bool in_range, const std::string& loss, const std::string& key, const Value& found,
                  const std::string& range) {
  if (!in_range) refuse(loss + ": " + key, fmt::format("{}", found), range, "Set " + key + " in that range");
}

// fp64 for fp64, else fp32.
at::ScalarType computing_type(at::ScalarType type);

// fp64, fp32 or bf16.
void check_type(const std::string& where, const std::string& name, const at::Tensor& values);

// ε in [0, 1], z ≥ 0 and finite.
void check_coefficients(const std::string& where, double label_smoothing, double z_loss);

// With the vocabulary filled in. Columns [first, first + columns) lie within it; whole where there is one
// rank.
VocabularyShard checked_shard(const std::string& where, VocabularyShard shard, std::int64_t columns);

// Marks forwards on a GPU whose shapes may not depend on the values of their tensors, because the host knows
// the batch and does not wait for the device (a captured step has fixed shapes as well).
class FixedShapes {
 public:
  explicit FixedShapes(bool on) : was_(now()) { now() = on; }
  ~FixedShapes() { now() = was_; }
  FixedShapes(const FixedShapes&) = delete;
  FixedShapes& operator=(const FixedShapes&) = delete;
  static bool wanted() { return now(); }

 private:
  static bool& now() {
    thread_local bool on = false;
    return on;
  }
  const bool was_;
};

// [tokens] int64 in [0, vocabulary) or kIgnoreIndex. On a GPU under FixedShapes the shape alone: NaN weights
// then stand for what is wrong (token_weights), and the step is refused as not finite.
void check_targets(const std::string& where, const at::Tensor& targets, std::int64_t tokens,
                   std::int64_t vocabulary);

// Undefined weights are 1. Targets, when defined, must have been checked, of a vocabulary of that size.
TokenWeights token_weights(const std::string& where, const at::Tensor& weights, const at::Tensor& targets,
                           std::int64_t tokens, const at::Device& device, std::int64_t vocabulary = 0);

// The summands of flow_matching_sum, [T] in fp64.
at::Tensor flow_matching_losses(const at::Tensor& velocity, const at::Tensor& x0, const at::Tensor& x1,
                                const at::Tensor& weights);

}  // namespace isograd
