#include "isograd/checkpoint.hpp"

#include <map>

#include "base/files.hpp"
#include "isograd/error.hpp"
#include "model/safetensors.hpp"
#include "train/checkpoint_files.hpp"
#include "train/checkpoint_state.hpp"
#include "train/rank_zero.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr const char* kStateFile = "state.json";
constexpr const char* kTokenizerFile = "tokenizer.model";

std::string described(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " ", tensor.sizes());
}

// Every tensor that belongs to the optimizer, under the name it has in the file: views, to be read or
// overwritten. Per parameter and not per bucket, so that another layout can load it.
std::map<std::string, at::Tensor> optimizer_tensors(DataParallel& layout, Optimizer& optimizer) {
  std::map<std::string, at::Tensor> tensors;
  for (auto& [name, state] : optimizer.state(layout.buckets()))
    for (auto& [key, tensor] : state) tensors[name + "." + key] = tensor;
  for (auto& view : layout.views())
    if (view.master.scalar_type() != view.parameter.scalar_type())
      tensors[view.name + ".master"] = view.master;
  return tensors;
}

}  // namespace

fs::path save_checkpoint(const SaveOptions& options, const TrainingState& state, DecoderLM& model,
                         DataParallel& layout, Optimizer& optimizer) {
  const fs::path directory = checkpoint_path(options.root, state.step);
  on_rank_zero(layout.group(), [&] {
    publish_directory(directory, [&](const fs::path& folder) {
      write_hf(folder, model);
      std::vector<std::pair<std::string, at::Tensor>> tensors;
      for (auto& [name, tensor] : optimizer_tensors(layout, optimizer)) tensors.emplace_back(name, tensor);
      write_safetensors(folder / kOptimizerFile, tensors);
      if (!options.tokenizer_file.empty())
        write_file(folder / kTokenizerFile, read_file(options.tokenizer_file));
      write_file(folder / kStateFile, to_json(state));
    });
    prune_checkpoints(options.root, state.step, options.keep);
  });
  return directory;
}

TrainingState open_checkpoint(const fs::path& directory) {
  verify_checksums(directory);
  const fs::path file = directory / kStateFile;
  return parse_state(read_file(file), file.string());
}

void restore_optimizer(const fs::path& directory, const TrainingState& state, DataParallel& layout,
                       Optimizer& optimizer) {
  const fs::path path = directory / kOptimizerFile;
  const auto bad = [&](const std::string& name, const std::string& found, const std::string& expected) {
    throw ConfigError(
        {.where = path.string() + ": " + name,
         .found = found,
         .expected = expected,
         .action = "Resume with the model, optimizer and dtype that this checkpoint was saved with"});
  };
  const auto saved = read_safetensors(path);
  auto wanted = optimizer_tensors(layout, optimizer);
  for (const auto& [name, tensor] : saved)
    if (!wanted.contains(name)) bad(name, "a tensor that this run has no place for", "none");
  at::NoGradGuard no_grad;
  for (auto& [name, tensor] : wanted) {
    const auto found = saved.find(name);
    if (found == saved.end()) bad(name, "no such tensor", described(tensor));
    const at::Tensor& source = found->second;
    if (source.sizes() != tensor.sizes() || source.scalar_type() != tensor.scalar_type())
      bad(name, described(source), described(tensor));
    tensor.copy_(source);
  }
  optimizer.set_updates(state.updates);
}

std::unique_ptr<Tokenizer> checkpoint_tokenizer(const fs::path& directory, const TrainingState& state) {
  if (state.tokenizer == "bytes") return byte_tokenizer();
  const fs::path file = directory / kTokenizerFile;
  if (!fs::exists(file))
    throw ConfigError({.where = directory.string(),
                       .found = state.tokenizer.empty()
                                    ? "a model trained on shards of an unknown tokenizer"
                                    : "tokenizer " + state.tokenizer + " without its file",
                       .expected = std::string(kTokenizerFile) + " beside the weights",
                       .action = "Decode with the tokenizer that packed the shards"});
  return sentencepiece_tokenizer(file);
}

}  // namespace isograd
