#include "train/video_model.hpp"

#include <torch/csrc/autograd/grad_mode.h>

#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/json.hpp"
#include "isograd/error.hpp"
#include "model/parameters.hpp"
#include "model/safetensors.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

constexpr const char* kModelType = "isograd_video_dit";
constexpr const char* kConfigFile = "config.json";
constexpr const char* kWeightsFile = "model.safetensors";

// Visits every field with its key, for writing, reading and comparing alike.
template <class Shape, class Visit>
void fields(Shape& shape, Visit visit) {
  visit("patch_elements", shape.patch_elements);
  visit("hidden", shape.hidden);
  visit("layers", shape.layers);
  visit("heads", shape.heads);
  visit("head_dim", shape.head_dim);
  visit("feed_forward", shape.feed_forward);
  visit("max_frames", shape.max_frames);
  visit("max_height", shape.max_height);
  visit("max_width", shape.max_width);
  visit("timestep_features", shape.timestep_features);
  visit("norm_epsilon", shape.norm_epsilon);
}

}  // namespace

bool is_video_model(const fs::path& directory) {
  if (!fs::exists(directory / kConfigFile)) return false;
  const auto [json, problem] = parse_json(read_file(directory / kConfigFile));
  return problem.empty() && json.value("model_type", nlohmann::json()) == kModelType;
}

VideoDiTConfig read_video_shape(const fs::path& directory) {
  const fs::path file = directory / kConfigFile;
  const auto bad = [&](const std::string& key, const std::string& found, const std::string& expected) {
    throw ConfigError({.where = file.string() + ": " + key,
                       .found = found,
                       .expected = expected,
                       .action = "Name a checkpoint of a video run"});
  };
  const auto [json, problem] = parse_json(read_file(file));
  if (!problem.empty()) bad("the whole file", problem, "the shape of a model");
  const auto type = json.value("model_type", nlohmann::json("nothing"));
  if (type != kModelType) bad("model_type", type.dump(), kModelType);
  VideoDiTConfig shape;
  fields(shape, [&, &json = json](const char* key, auto& value) {
    using Value = std::decay_t<decltype(value)>;
    const auto found = json.find(key);
    const bool fits =
        found != json.end() && (std::is_integral_v<Value> ? found->is_number_integer() : found->is_number());
    if (!fits)
      bad(key, found != json.end() ? found->dump() : "no such key",
          std::is_integral_v<Value> ? "a whole number" : "a number");
    value = found->template get<Value>();
  });
  check(shape);
  return shape;
}

void write_video_model(const fs::path& directory, VideoDiT& model) {
  fs::create_directories(directory);
  nlohmann::ordered_json json{{"model_type", kModelType}};
  fields(model.config(), [&](const char* key, const auto& value) { json[key] = value; });
  write_file(directory / kConfigFile, json.dump(2) + "\n");
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& [name, tensor] : model.named()) tensors.emplace_back(name, tensor.detach());
  write_safetensors(directory / kWeightsFile, tensors);
}

std::shared_ptr<VideoDiT> read_video_model(const fs::path& directory, at::ScalarType dtype) {
  const VideoDiTConfig shape = read_video_shape(directory);
  const fs::path file = directory / kWeightsFile;
  const auto saved = read_safetensors(file);
  const auto bad = [&](const std::string& name, const std::string& found, const std::string& expected) {
    throw ConfigError({.where = file.string() + ": " + name,
                       .found = found,
                       .expected = expected,
                       .action = "Use the weights that belong to this config.json"});
  };
  // Before memory is taken for shapes that the file contradicts.
  if (static_cast<std::uint64_t>(shape.layers) > saved.size())
    bad("the whole file", fmt::format("{} tensors", saved.size()),
        fmt::format("those of {} layers", shape.layers));
  const auto described = VideoDiT::without_values(shape, dtype)->named();
  for (const auto& [name, tensor] : described) {
    const auto found = saved.find(name);
    if (found == saved.end()) bad(name, "no such tensor", c10::str(tensor.sizes()));
    if (found->second.sizes() != tensor.sizes())
      bad(name, c10::str(found->second.sizes()), c10::str(tensor.sizes()));
  }
  if (saved.size() != described.size())
    bad("the whole file", fmt::format("{} tensors", saved.size()),
        fmt::format("{}, those of the model", described.size()));
  auto model = std::make_shared<VideoDiT>(shape, dtype, 0);
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : model->named()) {
    tensor.copy_(saved.at(name));
    check_finite(file, name, tensor);
  }
  return model;
}

// Gates and the largest grid follow from the keys that people set, and from the data.
ShapeKeys video_shape_keys(const VideoDiTConfig& shape) {
  ShapeKeys keys;
  fields(shape, [&](const std::string& key, const auto& value) {
    keys.emplace_back((key == "timestep_features" ? "video." : "model.") + key, fmt::format("{}", value));
  });
  return keys;
}

}  // namespace isograd
