// Checkpoints: directories that are whole or absent, checksummed, and independent of the number of ranks.
#pragma once

#include "isograd/error.hpp"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "isograd/data.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/model.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

// What a run is, besides its tensors. Nothing here depends on ranks. save_checkpoint() writes `updates`
// and `missed_updates` as the optimizer has them, and `optimizer`, `dtype` and `bucket_order` as optimizer
// and layout have them where they are empty; the rest is the caller's.
struct TrainingState {
  std::int64_t step = 0;     // steps made, skipped and empty ones included; the next step has this index
  std::int64_t updates = 0;  // of the optimizer (AdamW's t)
  std::int64_t skipped = 0;  // steps refused because something was not finite
  LoaderPosition position;   // of the step to come
  // The order of the data is a function of these; a run that differs cannot be continued.
  std::int64_t seed = 0;
  std::int64_t pack_length = 0;
  std::int64_t packs_per_step = 0;
  std::int64_t shuffle_packs = 1;  // 0 or 1
  double validation_fraction = 0;
  std::int64_t documents = 0;  // of the corpus; videos
  std::int64_t tokens = 0;
  std::string optimizer;  // adamw | sgd
  std::string dtype;      // float64 | float32 | bfloat16
  std::string tokenizer;  // Tokenizer::name(); empty for foreign shards and where nothing is tokenized
  std::string config;     // the whole configuration as TOML
  // DataParallel::bucket_order(): whoever goes on has the same bits only with the same buckets. Empty in
  // checkpoints of versions that did not save it.
  std::vector<std::string> bucket_order{};
  // Optimizer::missed_updates(). Empty unless parameters were frozen.
  std::map<std::string, std::int64_t> missed_updates{};
  // Further keys, with their values, that the order of data depends on, by kind of data. Empty for text.
  std::map<std::string, std::string> order{};
};

// root/step-00000100
std::filesystem::path checkpoint_path(const std::filesystem::path& root, std::int64_t step);

// The complete checkpoints below `root`, by ascending step. Half-written ones are never listed.
std::vector<std::filesystem::path> list_checkpoints(const std::filesystem::path& root);

// `which` is "latest" (the highest step below `root`) or a checkpoint's directory. ConfigError when there is
// none.
std::filesystem::path resolve_checkpoint(const std::filesystem::path& root, const std::string& which);

struct SaveOptions {
  std::filesystem::path root;  // folder of checkpoints
  std::int64_t keep = 2;       // the newest that stay; older ones go once the new one is complete
  // Of a model whose parameters are cut over ranks; null: every rank, or its shards, have them whole.
  const Layout* placed = nullptr;
  bool makes_folders = true;  // `root` and those above it; without: where the one above has gone, ConfigError
};

// Writes config.json, model.safetensors and what else belongs to the model into a folder. Called on rank 0.
// `weights`: the trained parameters, in the model's order, of which no two buckets are whole at a time; the
// model's own tensors can be read unless the layout shards them.
using WriteModel = std::function<void(const std::filesystem::path& directory, const TensorStream& weights)>;

// Collective: rank 0 writes a hidden sibling, fsyncs every file, renames it, fsyncs the folder; the others
// wait. An error of rank 0 (a full disk, ...) is thrown on every rank and leaves earlier checkpoints whole.
// Checkpoints of a later step belong to a future that this run did not take: they go too.
//   config.json, model.safetensors   of `write_model`: a language model as Hugging Face writes it
//   optimizer.safetensors            per parameter: NAME.exp_avg, NAME.exp_avg_sq, ...; NAME.master for bf16
//   state.json                       TrainingState
//   tokenizer.model or .json         of `write_model` too, where there is a tokenizer file
//   checksums.json                   XXH3-64 and size of every other file
std::filesystem::path save_checkpoint(const SaveOptions& options, const TrainingState& state,
                                      const WriteModel& write_model, DataParallel& layout,
                                      Optimizer& optimizer);

// Checks every checksum, then reads state.json. ConfigError names the bad file.
TrainingState open_checkpoint(const std::filesystem::path& directory);

// The model is read (a language model with read_hf(directory, dtype)) and given to a layout; then this fills
// in the optimizer's state and the masters. `placed` as in SaveOptions, of this run's mesh, whatever the mesh
// was that saved. ConfigError on missing, unexpected or misshapen tensors, and on moments in a
// state of 0 updates, as earlier versions saved them where the caller left `updates` at 0.
void restore_optimizer(const std::filesystem::path& directory, const TrainingState& state,
                       DataParallel& layout, Optimizer& optimizer, const Layout* placed = nullptr);

// The tokenizer kept with a checkpoint. ConfigError for a model trained on foreign shards.
std::unique_ptr<Tokenizer> checkpoint_tokenizer(const std::filesystem::path& directory,
                                                const TrainingState& state);

}  // namespace isograd
