// Helpers of all models: parameters registered by dotted names, initial values by name, checks.
#pragma once

#include <fmt/format.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "base/refuse.hpp"
#include "isograd/model.hpp"

namespace isograd {

struct Linear {
  at::Tensor weight;  // [out, in]
  at::Tensor bias;    // [out], or undefined
};

// Makes parameters without values and registers them below `root`, one module per dot of the name; the last
// part is the parameter. Keeps the modules by name, because LibTorch copies all children to find one: time
// would grow with the square of the layers.
class ParameterMaker {
 public:
  ParameterMaker(torch::nn::Module& root, at::TensorOptions options, NamedTensors& in_order)
      : made_{{"", &root}}, options_(options), in_order_(in_order) {}
  // `trained`: in the model's type, with a gradient; else in fp32 at least, without.
  at::Tensor operator()(const std::string& name, at::IntArrayRef shape, bool trained = true);
  Linear linear(const std::string& name, std::int64_t out, std::int64_t in, bool bias = true);

 private:
  torch::nn::Module& module(const std::string& name);
  std::map<std::string, torch::nn::Module*> made_;
  at::TensorOptions options_;
  NamedTensors& in_order_;
};

// ConfigError where the batch is split over context ranks and the model's attention is that of one device.
void check_attention(const Batch& batch, bool has_attention);

// normal(0, range) by (seed, name), computed in fp64 and rounded through fp32 for lower types.
void fill_normal(at::Tensor& values, double range, std::uint64_t seed, const std::string& name);

// Rules of a model's shape: ConfigError for its key model.* unless one holds.
template <typename Found>
void want(bool holds, const char* key, const Found& found, const std::string& expected) {
  if (!holds)
    refuse(std::string("model.") + key, fmt::format("{}", found), expected, "Correct the model's shape");
}
inline void want_size(const char* key, std::int64_t value) {
  constexpr std::int64_t kMost = std::int64_t{1} << 28;  // bytes of a product of two stay far from overflow
  want(value >= 1 && value <= kMost, key, value, fmt::format("1 to {}", kMost));
}

// ConfigError unless it is fp64, fp32 or bf16.
void check_model_dtype(at::ScalarType dtype);

// ConfigError, with the name and the first place, unless all weights that were read from `file` are finite.
void check_finite(const fs::path& file, const std::string& name, const at::Tensor& values);

}  // namespace isograd
