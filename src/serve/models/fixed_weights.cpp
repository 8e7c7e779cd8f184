#include "serve/models/fixed_weights.hpp"

#include <atomic>
#include <set>

#include "base/files.hpp"
#include "base/refuse.hpp"
#include "serve/wire/fields.hpp"

namespace isograd::serve {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Counted, calls, sequences, tokens, weights)

namespace {

constexpr const char* kSavedFile = "isograd.json";
constexpr int kSavedFormat = 1;

fs::path tokenizer_in(const fs::path& directory) {
  for (const char* name : {"tokenizer.json", "tokenizer.model"})
    if (fs::exists(directory / name)) return directory / name;
  return {};
}

// The configuration's meaning, names and bytes of the files with weights. The model is read from them too, so
// that they are in memory.
std::string digest_of(const fs::path& directory) {
  std::string all = parse_json(read_file(directory / "config.json")).value.dump();
  std::set<fs::path> files;
  for (const auto& entry : fs::directory_iterator(directory))
    if (entry.path().extension() == ".safetensors") files.insert(entry.path());
  for (const fs::path& file : files) all += "\n" + file.filename().string() + " " + checksum_file(file);
  return checksum(all.data(), all.size());
}

}  // namespace

Base::Base(const std::string& name, const fs::path& directory, at::ScalarType dtype,
           const TextSamplerOptions& options, bool values) {
  const std::shared_ptr<DecoderLM> model =
      values ? read_hf(directory, dtype) : DecoderLM::without_values(read_hf_config(directory), dtype);
  for (const auto& [parameter, tensor] : model->named()) at::Tensor(tensor).requires_grad_(false);
  const DecoderConfig& config = model->config();
  const bool slides = config.sliding_window > 0 && config.full_layers < config.layers;
  info = {.name = name,
          .directory = fs::absolute(directory),
          .tokenizer = tokenizer_in(fs::absolute(directory)),
          .architecture = config.family,
          .context = slides ? std::min(config.sliding_window, config.max_positions) : config.max_positions,
          .vocabulary = config.vocabulary,
          .digest = values ? digest_of(directory) : ""};
  sampled = std::make_shared<SampledModel>(model, options);
}

const Tokenizer& Base::tokenizer() {
  if (info.tokenizer.empty())
    refuse("stop strings of a sample", "a base without a tokenizer: " + info.name,
           "tokenizer.json or tokenizer.model in its directory", "Pass stop tokens");
  if (!tokenizer_) tokenizer_ = open_tokenizer(info.tokenizer.string());
  return *tokenizer_;
}

FixedWeights::FixedWeights(std::shared_ptr<Base> of, std::shared_ptr<const LoraAdapter> low_rank,
                           std::shared_ptr<SampledModel> whole)
    : base(std::move(of)),
      adapter(std::move(low_rank)),
      sampled(whole ? std::move(whole) : base->sampled),
      number([] {
        static std::atomic<std::uint64_t> last{0};
        return ++last;
      }()) {}

void write_saved(const fs::path& directory, const SavedModel& saved) {
  Json json = saved.created.lora;
  json["format"] = kSavedFormat, json["base"] = saved.created.base, json["weights"] = saved.weights;
  json["metadata"] = saved.created.metadata;
  if (saved.training) {
    json["training"] = saved.open;
    json["training"].update({{"dtype", saved.dtype}, {"updates", saved.updates}});
  }
  write_file(directory / kSavedFile, json.dump(1) + "\n");
}

SavedModel read_saved(const fs::path& directory) {
  const fs::path file = directory / kSavedFile;
  const auto bad = [&](const std::string& found) {
    refuse(file.string(), found, "a model that this server has saved", "Give another checkpoint");
  };
  if (!fs::exists(file)) bad("no such file");
  const auto [json, problem] = parse_json(read_file(file));
  if (!problem.empty()) bad(problem);
  SavedModel saved;
  try {
    if (json.at("format") != kSavedFormat) bad("format " + json.at("format").dump());
    json.at("base").get_to(saved.created.base), json.get_to(saved.created.lora);
    json.at("weights").get_to(saved.weights), json.at("metadata").get_to(saved.created.metadata);
    if (!json.contains("training")) return saved;
    const Json& training = json.at("training");
    saved.training = true, training.get_to(saved.open);
    training.at("dtype").get_to(saved.dtype), training.at("updates").get_to(saved.updates);
  } catch (const nlohmann::json::exception& error) {
    bad(error.what());
  }
  return saved;
}

void write_weights(const fs::path& directory, const Base& base, const LoraAdapter* adapter,
                   DecoderLM& model) {
  if (adapter)
    write_peft(directory, *adapter, base.shape(), base.info.name);
  else
    write_hf(directory, model);
}

}  // namespace isograd::serve
