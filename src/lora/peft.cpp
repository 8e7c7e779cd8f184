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
#include "model/hf.hpp"
#include "model/parameters.hpp"
#include "model/safetensors.hpp"

namespace isograd {
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
const std::set<std::string> kRead = {"peft_type",         "r",
                                     "lora_alpha",        "lora_dropout",
                                     "target_modules",    "target_parameters",
                                     "rank_pattern",      "alpha_pattern",
                                     "init_lora_weights", "bias"};

// PEFT has gate and up of all experts of a layer in one parameter, with an adapter of twice the rank, which
// it makes from the tensors of each expert. In most models with experts it takes modules named gate_proj for
// theirs, so that dense networks and shared experts are named as parameters too.
constexpr const char *kFused = "experts.gate_up_proj", *kDown = "experts.down_proj",
                     *kFusedPattern = R"(.*\.gate_up_proj)";

// The entry of target_parameters for a matrix of an adapter.
std::string target_of(const std::string& matrix) {
  if (is_stacked(matrix)) return matrix.ends_with("down_proj") ? kDown : kFused;
  const auto name = matrix.rfind('.', matrix.rfind('.') - 1);
  return matrix.substr(matrix.rfind('.', name - 1) + 1);  // "shared_expert.up_proj.weight"
}

bool is_off(const nlohmann::json& value) {
  return value.is_null() || value == false || (value.is_structured() && value.empty()) ||
         (value.is_string() && value.get<std::string>().empty());
}

std::vector<std::string> adapted_modules(const LoraConfig& config, bool mlp = true) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < kAdaptable.size(); ++i)
    if (config.adapts(static_cast<Projection>(i)) && (mlp || kAdaptable[i].group != kMlp))
      names.emplace_back(kAdaptable[i].name);
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
  using nlohmann::json;
  const fs::path file = directory / kConfig;
  const auto parsed = parse_json(read_file(file));
  if (!parsed.problem.empty()) bad(file, "", parsed.problem, "an object");
  const auto given = [&](const std::string& key, const json& otherwise = {}) {
    return parsed.value.value(key, otherwise);
  };
  const auto want = [&](bool holds, const std::string& key, const std::string& expected) {
    if (!holds) bad(file, key, brief(given(key)), expected);
  };
  want(given("peft_type") == "LORA", "peft_type", "LORA");
  for (const auto& [key, value] : parsed.value.items())
    want(kNeutral.contains(key) || kRead.contains(key) || is_off(value), key,
         "nothing set here: it would change what the adapter computes");
  const auto number = [&](const char* key, const json& otherwise) {
    const json value = given(key, otherwise);
    want(value.is_number(), key, "a number");
    return value;
  };
  const auto texts = [&](const char* key) {
    const json value = given(key);
    const bool is_list =
        value.is_array() && std::ranges::all_of(value, [](const auto& each) { return each.is_string(); });
    want(is_list || is_off(value), key, "a list of names");
    return is_list ? value.get<std::vector<std::string>>() : std::vector<std::string>();
  };
  want(given("bias", "none") == "none", "bias", "none");
  const json first = given("init_lora_weights", true);
  want(first.is_boolean() || first == "gaussian", "init_lora_weights",
       "true or gaussian: others change the base's weights, which the directory does not have");
  LoraConfig config;
  if (const json base = given("base_model_name_or_path"); base.is_string())
    config.base = base.get<std::string>();
  const json rank = number("r", 8);
  want(rank.is_number_integer(), "r", "a whole number");
  config.rank = rank.is_number_unsigned() && rank.get<std::uint64_t>() > (std::uint64_t{1} << 32)
                    ? 0
                    : rank.get<std::int64_t>();
  config.alpha = number("lora_alpha", 8).get<double>();
  config.dropout = number("lora_dropout", 0).get<double>();
  config.modules = texts("target_modules");
  const std::vector<std::string> parameters = texts("target_parameters");
  const bool none = parameters.empty();
  want(!none || !config.modules.empty(), "target_modules", "a list of " + module_names());
  for (const char* needed : {kFused, kDown})  // which others there are, the tensors say
    want(none || std::ranges::find(parameters, needed) != parameters.end(), "target_parameters",
         fmt::format("nothing, or {} and {}, as isograd writes them", kFused, kDown));
  const auto check_pattern = [&](const char* key, double twice) {
    const json value = given(key);
    want(none ? is_off(value) : value == json{{kFusedPattern, twice}}, key,
         none ? "nothing" : fmt::format("{} for {}", twice, kFusedPattern));
  };
  check_pattern("rank_pattern", 2 * static_cast<double>(config.rank));
  check_pattern("alpha_pattern", 2 * config.alpha);
  if (!none) config.modules.insert(config.modules.end(), {"gate_proj", "up_proj", "down_proj"});
  check(config);
  set_modules(config, std::exchange(config.modules, {}));
  return config;
}

std::shared_ptr<LoraAdapter> read_peft(const fs::path& directory, const DecoderConfig& model,
                                       at::ScalarType dtype) {
  const LoraConfig config = read_peft_config(directory);
  const fs::path file = directory / kValues;
  auto stored = read_safetensors(file);
  // Before memory is taken for shapes that the file contradicts.
  const auto shape = LoraAdapter::without_values(model, config, dtype);
  const auto entries = by_expert(model, stream_of(shape->named())).entries;
  for (const TensorStream::Entry& entry : entries) {
    const auto found = stored.find(kPrefix + entry.name);
    const at::IntArrayRef sizes = entry.shape;
    if (found == stored.end()) bad(file, kPrefix + entry.name, "no such tensor", c10::str(sizes));
    if (found->second.sizes() != sizes)
      bad(file, kPrefix + entry.name, c10::str("shape ", found->second.sizes()), c10::str("shape ", sizes));
    if (!at::isFloatingType(found->second.scalar_type()))
      bad(file, kPrefix + entry.name, c10::toString(found->second.scalar_type()), "floating-point numbers");
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
  std::size_t next = 0;
  by_expert(model, stream_of(adapter->named())).each([&](const at::Tensor& part) {
    const std::string name = kPrefix + entries.at(next++).name;
    part.copy_(stored.extract(name).mapped());
    check_finite(file, name, part);
  });
  if (!stored.empty())
    bad(file, stored.begin()->first, "a tensor that this adapter has no place for", "none");
  return adapter;
}

void write_peft(const fs::path& directory, const LoraConfig& config, const DecoderConfig& model,
                const TensorStream& values, const std::string& base) {
  fs::create_directories(directory);
  std::set<std::string> parameters;
  for (const TensorStream::Entry& entry : values.entries)
    if (entry.name.find(".mlp.") != std::string::npos)
      parameters.insert(target_of(adapted_matrix(entry.name)));
  const bool of_experts = parameters.contains(kFused);
  TensorStream renamed = by_expert(model, values);
  for (TensorStream::Entry& entry : renamed.entries) entry.name = kPrefix + entry.name;
  write_safetensors(directory / kValues, renamed);
  const bool whole = config.alpha == std::floor(config.alpha) && config.alpha < 1e9;  // some readers want int
  const auto alpha = whole ? nlohmann::ordered_json(static_cast<std::int64_t>(config.alpha))
                           : nlohmann::ordered_json(config.alpha);
  nlohmann::ordered_json object = {{"peft_type", "LORA"},
                                   {"task_type", "CAUSAL_LM"},
                                   {"base_model_name_or_path", base},
                                   {"r", config.rank},
                                   {"lora_alpha", alpha},
                                   {"lora_dropout", config.dropout},
                                   {"target_modules", adapted_modules(config, /*mlp=*/!of_experts)},
                                   {"bias", "none"},
                                   {"fan_in_fan_out", false},
                                   {"use_rslora", false},
                                   {"use_dora", false},
                                   {"init_lora_weights", true},
                                   {"inference_mode", true}};
  if (of_experts) {
    object["target_parameters"] = parameters;
    object["rank_pattern"] = {{kFusedPattern, 2 * config.rank}};
    object["alpha_pattern"] = {{kFusedPattern, 2 * config.alpha}};
  }
  write_file(directory / kConfig, object.dump(2) + "\n");
}

void write_peft(const fs::path& directory, const LoraAdapter& adapter, const DecoderConfig& model,
                const std::string& base) {
  write_peft(directory, adapter.config(), model, stream_of(adapter.named()), base);
}

}  // namespace isograd
