#include "train/own_model.hpp"

#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/refuse.hpp"
#include "model/parameters.hpp"
#include "model/safetensors.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

constexpr const char* kConfigFile = "config.json";
constexpr const char* kWeightsFile = "model.safetensors";
constexpr const char* kExpected[] = {"a whole number", "a number", "true or false"};  // by ShapeField::value

}  // namespace

bool is_own_model(const fs::path& directory, const OwnFamily& family) {
  if (!fs::exists(directory / kConfigFile)) return false;
  const auto [json, problem] = parse_json(read_file(directory / kConfigFile));
  return problem.empty() && json.value("model_type", nlohmann::json()) == family.type;
}

void read_own_shape(const fs::path& directory, const OwnFamily& family, const ShapeFields& shape) {
  const fs::path file = directory / kConfigFile;
  const auto bad = [&](const std::string& key, const std::string& found, const std::string& expected) {
    refuse(file.string() + ": " + key, found, expected, fmt::format("Name a checkpoint of {}", family.run));
  };
  const auto [json, problem] = parse_json(read_file(file));
  if (!problem.empty()) bad("the whole file", problem, "the shape of a model");
  const auto type = json.value("model_type", nlohmann::json("nothing"));
  if (type != family.type) bad("model_type", type.dump(), family.type);
  for (const ShapeField& field : shape) {
    const std::size_t kind = field.value.index();
    if (!json.contains(field.key)) bad(field.key, "no such key", kExpected[kind]);
    const nlohmann::json& found = json[field.key];
    if (!(kind == 0 ? found.is_number_integer() : kind == 1 ? found.is_number() : found.is_boolean()))
      bad(field.key, found.dump(), kExpected[kind]);
    std::visit([&](auto* value) { found.get_to(*value); }, field.value);
  }
}

void write_own_model(const fs::path& directory, const OwnFamily& family, const ShapeFields& shape,
                     const TensorStream& weights) {
  fs::create_directories(directory);
  nlohmann::ordered_json json{{"model_type", family.type}};
  for (const ShapeField& field : shape)
    std::visit([&](const auto* value) { json[field.key] = *value; }, field.value);
  write_file(directory / kConfigFile, json.dump(2) + "\n");
  write_safetensors(directory / kWeightsFile, weights);
}

FillValues open_own_weights(const fs::path& directory, std::int64_t layers,
                            const std::function<NamedTensors()>& describe) {
  const fs::path file = directory / kWeightsFile;
  const auto saved = read_safetensors(file);
  const auto bad = [&](const std::string& name, const std::string& found, const std::string& expected) {
    refuse(file.string() + ": " + name, found, expected, "Use the weights that belong to this config.json");
  };
  const std::string count = fmt::format("{} tensors", saved.size());
  if (static_cast<std::uint64_t>(layers) > saved.size())
    bad("the whole file", count, fmt::format("those of {} layers", layers));
  const NamedTensors described = describe();
  for (const auto& [name, tensor] : described) {
    const auto found = saved.find(name);
    if (found == saved.end()) bad(name, "no such tensor", c10::str(tensor.sizes()));
    if (found->second.sizes() != tensor.sizes())
      bad(name, c10::str(found->second.sizes()), c10::str(tensor.sizes()));
  }
  if (saved.size() != described.size())
    bad("the whole file", count, fmt::format("{}, those of the model", described.size()));
  return [file, saved](const std::string& name, at::Tensor& values) {
    const at::NoGradGuard no_grad;
    values.copy_(saved.at(name));
    check_finite(file, name, values);
  };
}

}  // namespace isograd
