// The weights of a Hugging Face directory.
#include <nlohmann/json.hpp>
#include <optional>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/refuse.hpp"
#include "model/decoder.hpp"
#include "model/hf.hpp"
#include "model/parameters.hpp"
#include "model/safetensors.hpp"

namespace isograd {
namespace {

constexpr const char* kHead = "lm_head.weight";

constexpr const char* kAction = "Use weights that belong to the config.json next to them";

[[noreturn]] void bad(const fs::path& file, const std::string& tensor, const std::string& found,
                      const std::string& expected) {
  refuse(file.string() + (tensor.empty() ? "" : ": " + tensor), found, expected, kAction);
}

// Files have experts one by one (transformers 4, and what transformers 5 saves; ours too), or gate and up of
// all in one (transformers 5 in memory).
const std::string kStacked = ".mlp.experts.", kRouter = ".mlp.gate.weight";

}  // namespace

bool is_stacked(const std::string& parameter) { return parameter.find(kStacked) != std::string::npos; }

std::string name_in_file(const DecoderConfig& config, const std::string& parameter, std::int64_t expert) {
  const bool mixtral = config.family == "mixtral";
  if (!is_stacked(parameter)) {
    const auto at = parameter.find(kRouter);
    if (!mixtral || at == std::string::npos) return parameter;
    return parameter.substr(0, at) + ".block_sparse_moe.gate.weight";
  }
  const auto at = parameter.find(kStacked);
  const std::string prefix = parameter.substr(0, at), rest = parameter.substr(at + kStacked.size());
  const auto dot = rest.find('.');  // behind it, the matrix of an adapter
  const std::string role = rest.substr(0, dot), end = dot == std::string::npos ? ".weight" : rest.substr(dot);
  if (!mixtral) return fmt::format("{}.mlp.experts.{}.{}{}", prefix, expert, role, end);
  const char* numbered = role == "gate_proj" ? "w1" : role == "up_proj" ? "w3" : "w2";
  return fmt::format("{}.block_sparse_moe.experts.{}.{}{}", prefix, expert, numbered, end);
}

namespace {

// The tensor of all experts that a stacked parameter is a part of, and which half of its rows: 0, 1, or -1:
// all.
std::pair<std::string, int> fused_name(const std::string& parameter) {
  const auto at = parameter.find(kStacked) + kStacked.size();
  const std::string prefix = parameter.substr(0, at), role = parameter.substr(at);
  if (role == "down_proj") return {parameter, -1};
  return {prefix + "gate_up_proj", role == "gate_proj" ? 0 : 1};
}

}  // namespace

TensorStream by_expert(const DecoderConfig& config, const TensorStream& weights) {
  TensorStream stream;
  std::vector<bool> stacked;
  for (const TensorStream::Entry& entry : weights.entries) {
    stacked.push_back(is_stacked(entry.name));
    if (!stacked.back()) {
      stream.entries.push_back({name_in_file(config, entry.name), entry.dtype, entry.shape});
      continue;
    }
    for (std::int64_t expert = 0; expert < entry.shape.front(); ++expert)
      stream.entries.push_back({name_in_file(config, entry.name, expert),
                                entry.dtype,
                                {entry.shape.begin() + 1, entry.shape.end()}});
  }
  stream.each = [each = weights.each, stacked](const TensorStream::Take& take) {
    std::size_t next = 0;
    each([&](const at::Tensor& tensor) {
      if (!stacked.at(next++)) return take(tensor);
      for (std::int64_t expert = 0; expert < tensor.size(0); ++expert) take(tensor[expert]);
    });
  };
  return stream;
}

namespace {

// Old Llama files carry the rotary frequencies, which follow from config.json.
bool is_derived(const std::string& name) {
  return name.starts_with("model.layers.") && name.ends_with(".self_attn.rotary_emb.inv_freq");
}

// The first layer that the file has weights of and config.json has none for, or the other way round.
void check_layers(const fs::path& directory, const std::map<std::string, FoundTensor>& stored,
                  std::int64_t layers) {
  std::int64_t most = 0;
  std::string last;
  for (const auto& [name, place] : stored) {
    if (!name.starts_with("model.layers.")) continue;
    const std::int64_t count =
        std::min<std::int64_t>(std::atoll(name.c_str() + 13), std::int64_t{1} << 40) + 1;
    if (count > most) most = count, last = name;
  }
  if (most > layers)
    bad(stored.at(last).file, last, fmt::format("weights of {} layers", most),
        fmt::format("{}, the num_hidden_layers of config.json", layers));
  if (most < layers)
    bad(directory, fmt::format("model.layers.{}.input_layernorm.weight", most),
        fmt::format("no such tensor: weights of {} layers", most),
        fmt::format("{}, the num_hidden_layers of config.json", layers));
}

bool is_number(at::ScalarType type) {
  return type == at::kDouble || type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

}  // namespace

const FoundTensor& HfWeights::fitting(const std::string& name, at::IntArrayRef shape) const {
  const auto place = stored_.find(name);
  if (place == stored_.end()) bad(directory_, name, "no such tensor", c10::str("a tensor of shape ", shape));
  const auto& [tensor, file] = place->second;
  if (tensor.sizes() != shape) bad(file, name, c10::str("shape ", tensor.sizes()), c10::str("shape ", shape));
  if (!is_number(tensor.scalar_type()))
    bad(file, name, c10::toString(tensor.scalar_type()),
        "F64, F32, BF16 or F16 (quantised weights are not read)");
  return place->second;
}

std::vector<FoundTensor> HfWeights::parts(const std::string& parameter, at::IntArrayRef shape,
                                          std::set<std::string>* names) const {
  const auto take = [&](const std::string& name, at::IntArrayRef of) {
    if (names) names->insert(name);
    return fitting(name, of);
  };
  if (!is_stacked(parameter)) {
    const std::string name = name_in_file(config_, parameter);
    return {take(stored_.contains(name) ? name : parameter, shape)};
  }
  if (const auto [name, half] = fused_name(parameter); stored_.contains(name)) {
    if (half < 0) return {take(name, shape)};
    FoundTensor whole = take(name, {shape[0], 2 * shape[1], shape[2]});
    whole.tensor = whole.tensor.narrow(1, half * shape[1], shape[1]);
    return {whole};
  }
  std::vector<FoundTensor> found;
  for (std::int64_t expert = 0; expert < shape[0]; ++expert)
    found.push_back(take(name_in_file(config_, parameter, expert), shape.slice(1)));
  return found;
}

HfWeights::HfWeights(const fs::path& directory, at::ScalarType dtype)
    : directory_(directory),
      config_(read_hf_config(directory)),
      dtype_(dtype),
      stored_(read_tensor_files(directory, kAction)) {
  const auto embedding = stored_.find("model.embed_tokens.weight");
  if (embedding != stored_.end() && embedding->second.tensor.dim() == 2 &&
      embedding->second.tensor.size(0) != config_.vocabulary)
    bad(embedding->second.file, embedding->first, fmt::format("{} rows", embedding->second.tensor.size(0)),
        fmt::format("{}, the vocab_size of config.json", config_.vocabulary));
  check_layers(directory, stored_, config_.layers);

  // Before memory is taken for shapes that the files contradict.
  if (config_.layers > std::ssize(stored_))
    bad(directory, "", fmt::format("{} tensors", stored_.size()),
        fmt::format("those of {} layers", config_.layers));
  std::set<std::string> known;
  for (const auto& [name, parameter] : DecoderLM::without_values(config_, dtype)->named()) {
    parts(name, parameter.sizes(), &known);
  }
  for (const auto& [name, place] : stored_) {
    if (known.contains(name) || is_derived(name)) continue;
    if (!config_.tied_output || name != kHead)
      bad(place.file, name, "a tensor that this model has no place for", "none");
    const at::Tensor& tied = stored_.at("model.embed_tokens.weight").tensor;
    if (place.tensor.sizes() != tied.sizes() || !place.tensor.to(dtype).equal(tied.to(dtype)))
      bad(place.file, name, "values that differ from the embedding's",
          "the same values, or no such tensor: config.json ties them");
  }
}

void HfWeights::fill(const std::string& name, const at::Tensor& values) const {
  const at::NoGradGuard no_grad;
  const auto found = parts(name, values.sizes());
  if (found.size() == 1 && found[0].tensor.sizes() == values.sizes()) {
    values.copy_(found[0].tensor);
    return check_finite(found[0].file, name, values);
  }
  for (std::size_t expert = 0; expert < found.size(); ++expert) {
    const at::Tensor part = values[static_cast<std::int64_t>(expert)];
    part.copy_(found[expert].tensor);
    check_finite(found[expert].file, name_in_file(config_, name, static_cast<std::int64_t>(expert)), part);
  }
}

std::shared_ptr<DecoderLM> HfWeights::model(const DecoderConfig& config) const {
  std::shared_ptr<DecoderLM> model(new DecoderLM(config, dtype_));
  for (auto& [name, parameter] : model->named_) fill(name, parameter);
  return model;
}

std::shared_ptr<DecoderLM> read_hf(const fs::path& directory, at::ScalarType dtype) {
  const HfWeights weights(directory, dtype);
  return weights.model(weights.config());
}

void write_hf(const fs::path& directory, const DecoderConfig& config, const TensorStream& parameters,
              std::int64_t file_bytes) {
  std::error_code problem;
  fs::create_directories(directory, problem);
  if (problem || !fs::is_directory(directory))
    bad(directory, "", problem ? problem.message() : "no folder", "a folder that can be made");
  const TensorStream weights = config.experts.count > 0 ? by_expert(config, parameters) : parameters;
  write_tensor_files(directory, weights, file_bytes);
  write_file(directory / "config.json", hf_config_text(config, weights.entries.front().dtype));
  if (!config.generation_config.empty()) write_file(directory / kGenerationConfig, config.generation_config);
}

void write_hf(const fs::path& directory, DecoderLM& model) {
  write_hf(directory, model.config(), stream_of(model.named()));
}

}  // namespace isograd
