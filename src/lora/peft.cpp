// Directories as PEFT has them.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/refuse.hpp"
#include "isograd/lora.hpp"
#include "lora/modules.hpp"
#include "model/parameters.hpp"
#include "model/safetensors.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

constexpr const char *kConfig = "adapter_config.json", *kValues = "adapter_model.safetensors";
constexpr const char *kPrefix = "base_model.model.", *kHead = "base_model.model.lm_head.base_layer.weight";

[[noreturn]] void bad(const fs::path& file, const std::string& key, const std::string& found,
                      const std::string& expected) {
  refuse(file.string() + (key.empty() ? "" : ": " + key), found, expected,
         "Use an adapter that PEFT's LoRA wrote, without its variants");
}

// Keys that do not change what a trained adapter computes.
const std::set<std::string> kNeutral = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "loftq_config",   "megatron_core",
    "peft_version", "qalora_group_size",       "revision",       "runtime_config", "task_type"};
const std::set<std::string> kRead = {
    "peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "init_lora_weights", "bias"};

bool is_off(const nlohmann::json& value) {
  return value.is_null() || value == false || (value.is_structured() && value.empty()) ||
         (value.is_string() && value.get<std::string>().empty());
}

std::vector<std::string> adapted_modules(const LoraConfig& config) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < kAdaptable.size(); ++i)
    if (config.adapts(static_cast<Projection>(i))) names.emplace_back(kAdaptable[i].name);
  return names;
}

// The groups where the modules are all of their matrices, else the modules one by one.
void set_modules(LoraConfig& config, const std::vector<std::string>& modules) {
  config.attention = config.mlp = config.unembed = false;
  for (const std::string& name : modules) {
    const auto found = std::ranges::find(kAdaptable, name, &Adaptable::name);
    if (found == kAdaptable.end()) continue;  // check() refuses it
    (found->group == kAttention ? config.attention
     : found->group == kMlp     ? config.mlp
                                : config.unembed) = true;
  }
  if (std::set(modules.begin(), modules.end()) !=
      [names = adapted_modules(config)] { return std::set(names.begin(), names.end()); }())
    config.modules = modules;
}

}  // namespace

LoraConfig read_peft_config(const fs::path& directory) {
  const fs::path file = directory / kConfig;
  const auto [object, problem] = parse_json(read_file(file));
  if (!problem.empty()) bad(file, "", problem, "an object");
  if (object.value("peft_type", nlohmann::json()) != "LORA")
    bad(file, "peft_type", brief(object.value("peft_type", nlohmann::json())), "LORA");
  for (const auto& [key, value] : object.items()) {
    const bool is_known = kNeutral.contains(key) || kRead.contains(key) || is_off(value);
    if (!is_known)
      bad(file, key, brief(value), "nothing set here: it would change what the adapter computes");
  }
  const auto number = [&, &all = object](const char* key, const nlohmann::json& otherwise) {
    const nlohmann::json value = all.value(key, otherwise);
    if (!value.is_number()) bad(file, key, brief(value), "a number");
    return value;
  };
  if (const auto bias = object.value("bias", nlohmann::json("none")); bias != "none")
    bad(file, "bias", brief(bias), "none");
  const auto first = object.value("init_lora_weights", nlohmann::json(true));
  if (!first.is_boolean() && first != "gaussian")
    bad(file, "init_lora_weights", brief(first),
        "true or gaussian: others change the base's weights, which the directory does not have");
  LoraConfig config;
  if (const auto base = object.value("base_model_name_or_path", nlohmann::json()); base.is_string())
    config.base = base.get<std::string>();
  const nlohmann::json rank = number("r", 8);
  if (!rank.is_number_integer()) bad(file, "r", brief(rank), "a whole number");
  config.rank = rank.is_number_unsigned() && rank.get<std::uint64_t>() > (std::uint64_t{1} << 32)
                    ? 0
                    : rank.get<std::int64_t>();
  config.alpha = number("lora_alpha", 8).get<double>();
  config.dropout = number("lora_dropout", 0).get<double>();
  const nlohmann::json targets = object.value("target_modules", nlohmann::json());
  const bool is_list = targets.is_array() && !targets.empty() &&
                       std::ranges::all_of(targets, [](const auto& each) { return each.is_string(); });
  if (!is_list) bad(file, "target_modules", brief(targets), "a list of " + module_names());
  config.modules = targets.get<std::vector<std::string>>();
  check(config);
  const std::vector<std::string> modules = std::exchange(config.modules, {});
  set_modules(config, modules);
  return config;
}

std::shared_ptr<LoraAdapter> read_peft(const fs::path& directory, const DecoderConfig& model,
                                       at::ScalarType dtype) {
  const LoraConfig config = read_peft_config(directory);
  const fs::path file = directory / kValues;
  auto stored = read_safetensors(file);
  // Before memory is taken for shapes that the file contradicts.
  const auto shape = LoraAdapter::without_values(model, config, dtype);
  for (const auto& [name, parameter] : shape->named()) {
    const auto found = stored.find(kPrefix + name);
    if (found == stored.end()) bad(file, kPrefix + name, "no such tensor", c10::str(parameter.sizes()));
    if (found->second.sizes() != parameter.sizes())
      bad(file, kPrefix + name, c10::str("shape ", found->second.sizes()),
          c10::str("shape ", parameter.sizes()));
    if (!at::isFloatingType(found->second.scalar_type()))
      bad(file, kPrefix + name, c10::toString(found->second.scalar_type()), "floating-point numbers");
  }
  // PEFT adds the base's output where it is adapted, which no training of an adapter changes.
  if (const auto head = stored.find(kHead); head != stored.end() && config.adapts(Projection::kHead)) {
    if (head->second.sizes() != at::IntArrayRef({model.vocabulary, model.hidden}))
      bad(file, kHead, c10::str("shape ", head->second.sizes()),
          fmt::format("shape [{}, {}], the base's", model.vocabulary, model.hidden));
    stored.erase(head);
  }
  auto adapter = std::make_shared<LoraAdapter>(model, config, dtype, /*seed=*/0);
  const at::NoGradGuard no_grad;
  for (const auto& [name, parameter] : adapter->named()) {
    const auto found = stored.extract(kPrefix + name);
    parameter.copy_(found.mapped());
    check_finite(file, kPrefix + name, parameter);
  }
  if (!stored.empty())
    bad(file, stored.begin()->first, "a tensor that this adapter has no place for", "none");
  return adapter;
}

void write_peft(const fs::path& directory, const LoraConfig& config, const TensorStream& values,
                const std::string& base) {
  fs::create_directories(directory);
  TensorStream renamed = values;
  for (TensorStream::Entry& entry : renamed.entries) entry.name = kPrefix + entry.name;
  write_safetensors(directory / kValues, renamed);
  const bool whole = config.alpha == std::floor(config.alpha) && config.alpha < 1e9;  // some readers want int
  const auto alpha = whole ? nlohmann::ordered_json(static_cast<std::int64_t>(config.alpha))
                           : nlohmann::ordered_json(config.alpha);
  const nlohmann::ordered_json object = {{"peft_type", "LORA"},
                                         {"task_type", "CAUSAL_LM"},
                                         {"base_model_name_or_path", base},
                                         {"r", config.rank},
                                         {"lora_alpha", alpha},
                                         {"lora_dropout", config.dropout},
                                         {"target_modules", adapted_modules(config)},
                                         {"bias", "none"},
                                         {"fan_in_fan_out", false},
                                         {"use_rslora", false},
                                         {"use_dora", false},
                                         {"init_lora_weights", true},
                                         {"inference_mode", true}};
  write_file(directory / kConfig, object.dump(2) + "\n");
}

void write_peft(const fs::path& directory, const LoraAdapter& adapter, const DecoderConfig& /*model*/,
                const std::string& base) {
  write_peft(directory, adapter.config(), stream_of(adapter.named()), base);
}

}  // namespace isograd
