// What models share: parameters registered by dotted names, initial values by name, a look at values that
// were read.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

namespace isograd {

struct Linear {
  at::Tensor weight;  // [out, in]
  at::Tensor bias;    // [out], or undefined
};

// Registers parameters below `root`, one module per dot of the name; the last part is the parameter. Keeps
// the modules by name, because LibTorch copies all children to find one: time would grow with the square of
// the layers.
class RegisterUnder {
 public:
  explicit RegisterUnder(torch::nn::Module& root) : made_{{"", &root}} {}
  void operator()(const std::string& name, const at::Tensor& parameter);

 private:
  torch::nn::Module& module(const std::string& name);
  std::map<std::string, torch::nn::Module*> made_;
};

// normal(0, range) by (seed, name), computed in fp64 and rounded through fp32 for lower types.
void fill_normal(at::Tensor& values, double range, std::uint64_t seed, const std::string& name);

// ConfigError unless it is fp64, fp32 or bf16.
void check_model_dtype(at::ScalarType dtype);

// Of weights as they were read from `file`; ConfigError with the parameter's name and the first place.
void check_finite(const std::filesystem::path& file, const std::string& name, const at::Tensor& values);

}  // namespace isograd
