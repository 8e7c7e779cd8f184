// Checkpoints: directories that are whole or absent, checksummed, and independent of the number of ranks.
#pragma once

#include "isograd/error.hpp"

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "isograd/data.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/model.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/parameters.hpp"

namespace isograd {

class PipelineModel;

// The state of a run, apart from its tensors, on any number of ranks. save_checkpoint() takes `updates` and
// `missed_updates` from the optimizer, and fills in `optimizer`, `dtype` and `bucket_order` where they are
// empty.
struct TrainingState {
  std::int64_t step = 0;     // steps made, with skipped and empty ones; the index of the next step
  std::int64_t updates = 0;  // of the optimizer (AdamW's t)
  std::int64_t skipped = 0;  // steps refused because something was not finite
  LoaderPosition position;   // of the next step
  // These determine the order of the data. A run with other values cannot be continued.
  std::int64_t seed = 0;
  std::int64_t pack_length = 0;
  std::int64_t packs_per_step = 0;
  std::int64_t shuffle_packs = 1;  // 0 or 1
  double validation_fraction = 0;
  std::int64_t documents = 0;  // of the corpus; for video data, the number of videos
  std::int64_t tokens = 0;
  std::string optimizer;  // adamw | sgd
  std::string dtype;      // float64 | float32 | bfloat16
  std::string tokenizer;  // Tokenizer::name(); empty for foreign shards and where nothing is tokenized
  std::string config;     // the whole configuration as TOML
  // DataParallel::bucket_order(), by which a resumed run has the same bits. Checkpoints of old versions lack
  // it.
  std::vector<std::string> bucket_order{};
  // Optimizer::missed_updates(). Empty unless parameters were frozen.
  std::map<std::string, std::int64_t> missed_updates{};
  // Further keys and values that determine the order of the data. Empty for text.
  std::map<std::string, std::string> order{};
  std::optional<double> validation_loss{};  // after `step`; absent where it was not measured
};

// root/step-00000100
std::filesystem::path checkpoint_path(const std::filesystem::path& root, std::int64_t step);

// The complete checkpoints below `root`, by ascending step. Half-written ones are never listed.
std::vector<std::filesystem::path> list_checkpoints(const std::filesystem::path& root);

// `which`: "latest" (the highest step below `root`), "best" (the lowest validation loss), "auto" (the latest;
// an empty path where there is none) or a checkpoint's directory. ConfigError: there is none.
std::filesystem::path resolve_checkpoint(const std::filesystem::path& root, const std::string& which);

struct SaveOptions {
  std::filesystem::path root;  // folder of checkpoints
  std::int64_t keep = 2;  // number of newest checkpoints to keep; older ones go once the new one is complete
  std::int64_t keep_best = 0;  // number of those with the lowest validation loss to keep in addition
  // The layout of a model that is sharded over model-parallel ranks; null: each rank has it whole, or shards.
  const Layout* placed = nullptr;
  bool makes_folders = true;  // creates `root` and its parents; false: ConfigError when the parent is missing
};

// Writes config.json, model.safetensors and the model's other files, on rank 0. `weights` streams the trained
// parameters in the model's order; other tensors can be read directly, unless the layout shards them.
using WriteModel = std::function<void(const std::filesystem::path& directory, const TensorStream& weights)>;

// Collective. Rank 0 writes a hidden sibling folder, fsyncs every file, renames it and fsyncs the parent; the
// others wait. An error on rank 0 (e.g. a full disk) is thrown on every rank and leaves earlier checkpoints
// whole. Checkpoints of later steps are removed: this run did not make them.
//   config.json, model.safetensors   from `write_model`; a language model in Hugging Face's format
//   optimizer.safetensors            per parameter: NAME.exp_avg, NAME.exp_avg_sq, ...; NAME.master for bf16
//   state.json                       TrainingState
//   tokenizer.model or .json         from `write_model`, if there is a tokenizer file
//   checksums.json                   XXH3-64 and size of every other file
std::filesystem::path save_checkpoint(const SaveOptions& options, const TrainingState& state,
                                      const WriteModel& write_model, DataParallel& layout,
                                      Optimizer& optimizer);

// Verifies all checksums, then reads state.json. ConfigError names the bad file.
TrainingState open_checkpoint(const std::filesystem::path& directory);

// Restores optimizer state and masters into a layout of the model that was read from the same checkpoint.
// `placed`: as in SaveOptions, for this run's mesh, which may be another. ConfigError: missing, unexpected or
// misshapen tensors, moments in a state of 0 updates.
void restore_optimizer(const std::filesystem::path& directory, const TrainingState& state,
                       DataParallel& layout, Optimizer& optimizer, const Layout* placed = nullptr);

// ---- a torch::nn module of your own: its weights alone, or all that a resumed run needs ----
//
// `module`: before or after its layout is made (with `layout`: the one that it is in). Files have parameters
// and buffers by their names in the module, tied ones once. Only one whole tensor at a time is in memory for
// writing; for reading, files are mapped.

// Writes model.safetensors, or where that would have more than `file_bytes` model-0000K-of-0000N.safetensors
// and model.safetensors.index.json, and checksums.json: in a hidden folder next to `directory`, whose place
// it then takes. ConfigError: `directory` holds other files; parameters in shards. In one process alone:
void write_weights(const std::filesystem::path& directory, const ModuleRef& module,
                   std::int64_t file_bytes = kHfFileBytes);
// Collective, for a module under a layout: rank 0 writes, which gets the other ranks' shards one parameter at
// a time. `placed`: what cut() returned. ConfigError on every rank: as above; buffers that ranks have
// otherwise; a layout of another module.
void write_weights(const std::filesystem::path& directory, const ModuleRef& module, DataParallel& layout,
                   const Layout* placed = nullptr, std::int64_t file_bytes = kHfFileBytes);

// Reads them, also files of other programs, into all parameters and buffers: rounded to the module's dtypes,
// before anything is written all checked. ConfigError: a missing or further name, another shape or kind of
// dtype, values that are not finite, a file that its checksum does not fit. Every rank reads for itself; call
// it before prepare_module() and the layout, or give the layout.
void read_weights(const std::filesystem::path& directory, const ModuleRef& module);
// Collective: into a module under a layout, on any number of ranks, and into its masters and shards.
void read_weights(const std::filesystem::path& directory, const ModuleRef& module, DataParallel& layout,
                  const Layout* placed = nullptr);

// The parameters of a model in stages; `placed`: what split() returned. ConfigError: it has buffers, which
// layouts do not hold. Writing is collective. Each rank reads its own stages' between split() and the layout;
// one process reads all after make_all(), by read_weights(directory, model.modules()).
void write_weights(const std::filesystem::path& directory, const PipelineModel& model, DataParallel& layout,
                   const Layout& placed, std::int64_t file_bytes = kHfFileBytes);
void read_weights(const std::filesystem::path& directory, const PipelineModel& model, const Layout& placed);
template <std::same_as<PipelineModel> Model, typename... Others>
requires(!std::is_invocable_v<void(DataParallel&, const Layout&, std::int64_t),
                              Others&...>) void write_weights(const std::filesystem::path&, const Model&,
                                                              const Others&...) {
  static_assert(misused<Model>,
                "the weights of a PipelineModel are written by write_weights(directory, model, *layout, "
                "placed), where placed is what model.split() returned");
}

// Collective. Saves module, optimizer and number of steps as `options.root`/step-00000100, as the function
// above does.
std::filesystem::path save_checkpoint(const SaveOptions& options, std::int64_t step, const ModuleRef& module,
                                      DataParallel& layout, Optimizer& optimizer);
// Collective. Loads the newest checkpoint below `root`, or the one whose folder `root` is, and returns its
// number of steps; 0: there is none yet. The run goes on with the same bits on the same ranks and layout, on
// others as a run there would. ConfigError on every rank: as read_weights() and restore_optimizer(); another
// kind of optimizer; weights alone.
std::int64_t load_checkpoint(const std::filesystem::path& root, const ModuleRef& module, DataParallel& layout,
                             Optimizer& optimizer, const Layout* placed = nullptr);

// Opens the tokenizer saved with a checkpoint. ConfigError for a model trained on foreign shards.
std::unique_ptr<Tokenizer> checkpoint_tokenizer(const std::filesystem::path& directory,
                                                const TrainingState& state);

}  // namespace isograd
