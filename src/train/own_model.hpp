// Files of models that no other library knows: config.json with a shape of our own, model.safetensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "isograd/model.hpp"
#include "train/build.hpp"

namespace isograd {

struct OwnFamily {
  const char* type;  // model_type of its config.json
  const char* run;   // whose checkpoints have such models, for messages: "a video run"
};

// One number of a shape, with its key in config.json.
struct ShapeField {
  std::string key;
  std::variant<std::int64_t*, double*, bool*> value;
};
using ShapeFields = std::vector<ShapeField>;

bool is_own_model(const std::filesystem::path& directory, const OwnFamily& family);  // by its config.json
void write_own_model(const std::filesystem::path& directory, const OwnFamily& family,
                     const ShapeFields& shape, const TensorStream& weights);
// ConfigError naming file and key where something is missing or does not fit.
void read_own_shape(const std::filesystem::path& directory, const OwnFamily& family,
                    const ShapeFields& shape);
// The values of model.safetensors, which must fit the parameters that `describe` gives. It is called after
// the check that there are tensors for `layers` layers, before memory is taken for a shape that the file
// contradicts. ConfigErrors name the file and the tensor.
FillValues open_own_weights(const std::filesystem::path& directory, std::int64_t layers,
                            const std::function<NamedTensors()>& describe);

}  // namespace isograd
