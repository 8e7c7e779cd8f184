#include "train/own_model.hpp"

#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "model/parameters.hpp"
#include "model/safetensors.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

constexpr const char* kConfigFile = "config.json";
constexpr const char* kWeightsFile = "model.safetensors";

bool fits(const nlohmann::json& json, const std::int64_t*) {
  return json.is_number_integer();
}
bool fits(const nlohmann::json& json, const double*) {
  return json.is_number();
}
bool fits(const nlohmann::json& json, const bool*) {
  return json.is_boolean();
}
constexpr const char* kExpected[] = {"a whole number", "a number", "true or false"};  // by ShapeField::value

}  // namespace

std::string ShapeField::text() const {
  return std::visit([](const auto* field) { return fmt::format("{}", *field); }, value);
}

bool is_own_model(const fs::path& directory, const OwnFamily& family) {
  if (!fs::exists(directory / kConfigFile)) return false;
  const auto [json, problem] = parse_json(read_file(directory / kConfigFile));
  return problem.empty() && json.is_object() && json.value("model_type", nlohmann::json()) == family.type;
}

void read_own_shape(const fs::path& directory, const OwnFamily& family, const ShapeFields& shape) {
  const fs::path file = directory / kConfigFile;
  const auto bad = [&](const std::string& key, const std::string& found, const std::string& expected) {
    isograd::refuse(file.string() + ": " + key, found, expected, fmt::format("Name a checkpoint of {}", family.run));
  };
  const auto [json, problem] = parse_json(read_file(file));
  if (!problem.empty()) bad("the whole file", problem, "the shape of a model");
  if (!json.is_object()) bad("the whole file", json.type_name(), "the shape of a model");
  const auto type = json.value("model_type", nlohmann::json("nothing"));
  if (type != family.type) bad("model_type", type.dump(), family.type);
  for (const ShapeField& field : shape) {
    const auto found = json.find(field.key);
    std::visit(
        [&](auto* value) {
          if (found == json.end()) bad(field.key, "no such key", kExpected[field.value.index()]);
          if (!fits(*found, value)) bad(field.key, found->dump(), kExpected[field.value.index()]);
          *value = found->template get<std::decay_t<decltype(*value)>>();
        },
        field.value);
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

OwnWeights::OwnWeights(const fs::path& directory)
    : file_(directory / kWeightsFile), saved_(read_safetensors(file_)) {}

void OwnWeights::refuse(const std::string& name, const std::string& found,
                        const std::string& expected) const {
  isograd::refuse(file_.string() + ": " + name, found, expected, "Use the weights that belong to this config.json");
}

void OwnWeights::check_layers(std::int64_t layers) const {
  if (static_cast<std::uint64_t>(layers) > saved_.size())
    refuse("the whole file", fmt::format("{} tensors", saved_.size()),
           fmt::format("those of {} layers", layers));
}

void OwnWeights::check_shapes(const NamedTensors& described) const {
  for (const auto& [name, tensor] : described) {
    const auto found = saved_.find(name);
    if (found == saved_.end()) refuse(name, "no such tensor", c10::str(tensor.sizes()));
    if (found->second.sizes() != tensor.sizes())
      refuse(name, c10::str(found->second.sizes()), c10::str(tensor.sizes()));
  }
  if (saved_.size() != described.size())
    refuse("the whole file", fmt::format("{} tensors", saved_.size()),
           fmt::format("{}, those of the model", described.size()));
}

void OwnWeights::copy_into(const NamedTensors& named) const {
  check_shapes(named);
  for (const auto& [name, tensor] : named) fill(name, tensor);
}

void OwnWeights::fill(const std::string& name, const at::Tensor& values) const {
  const at::NoGradGuard no_grad;
  values.copy_(saved_.at(name));
  check_finite(file_, name, values);
}

}  // namespace isograd
