// Files of models that no other library knows: config.json with a shape of our own, model.safetensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "isograd/model.hpp"

namespace isograd {

struct OwnFamily {
  const char* type;  // model_type of its config.json
  const char* run;   // whose checkpoints have such models, for messages: "a video run"
};

// One number of a shape, with its key in config.json.
struct ShapeField {
  std::string key;
  std::variant<std::int64_t*, double*, bool*> value;
  std::string text() const;
};
using ShapeFields = std::vector<ShapeField>;

bool is_own_model(const std::filesystem::path& directory, const OwnFamily& family);  // by its config.json
void write_own_model(const std::filesystem::path& directory, const OwnFamily& family,
                     const ShapeFields& shape, const TensorStream& weights);
// ConfigError naming file and key where something is missing or does not fit.
void read_own_shape(const std::filesystem::path& directory, const OwnFamily& family,
                    const ShapeFields& shape);

// Reads model.safetensors and checks it against config.json. ConfigErrors name the file and the tensor.
class OwnWeights {
 public:
  explicit OwnWeights(const std::filesystem::path& directory);
  // ConfigError unless there are tensors for `layers` layers. Called before memory is allocated for a shape
  // that the file contradicts.
  void check_layers(std::int64_t layers) const;
  void check_shapes(const NamedTensors& described) const;
  void copy_into(const NamedTensors& named) const;  // checked; and that all values are finite
  void fill(const std::string& name, const at::Tensor& values) const;  // one of checked shapes, the same

 private:
  [[noreturn]] void refuse(const std::string& name, const std::string& found,
                           const std::string& expected) const;

  std::filesystem::path file_;
  std::map<std::string, at::Tensor> saved_;
};

}  // namespace isograd
