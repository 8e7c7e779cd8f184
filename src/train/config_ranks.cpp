// What a configuration asks of the ranks it runs on.
#include <fmt/format.h>

#include "isograd/error.hpp"
#include "train/config.hpp"
#include "train/device.hpp"
#include "train/model_path.hpp"

namespace isograd {

void check(const RunConfig& config, int ranks) {
  check_device(config, ranks);
  if (!config.model.load.empty()) require_model_folder(config.model.load, "model.load");
  const Grid grid = grid_of(config, ranks);
  const int sharing = grid.size(kContextAxes), dealt = grid.size(kSampleAxes);
  if (config.model.kind == "scorer") {
    const auto refuse = [](const char* key, std::string found, const char* expected) {
      throw ConfigError({.where = key,
                         .found = std::move(found) + " with model.kind = \"scorer\"",
                         .expected = expected,
                         .action =
                             "Leave it out: a scorer's rows are not cut, nor its run saved or checked on the "
                             "way; isograd verify checks it from outside"});
    };
    if (sharing > 1) refuse("parallel.cp_ring, parallel.cp_ulysses", std::to_string(sharing) + " ranks", "1");
    if (config.batch.max_tokens_per_rank > 0)
      refuse("batch.max_tokens_per_rank", std::to_string(config.batch.max_tokens_per_rank), "0");
    if (config.verify.every > 0) refuse("verify.every", std::to_string(config.verify.every), "0");
    if (ranks > config.batch.rows_per_step)
      throw ConfigError({.where = fmt::format("--ranks {}", ranks),
                         .found = fmt::format("more ranks than rows (batch.rows_per_step = {})",
                                              config.batch.rows_per_step),
                         .expected = "a row for each rank at least",
                         .action = "Start fewer ranks, or enlarge batch.rows_per_step"});
    return;
  }
  const bool videos = config.model.kind == "video";
  const std::int64_t batch = videos ? config.batch.videos_per_step : config.batch.packs_per_step;
  const std::string packs = videos ? "videos" : "packs", key = "batch." + packs + "_per_step";
  if (dealt > batch)
    throw ConfigError({.where = fmt::format("--ranks {}", ranks),
                       .found = fmt::format(
                           "more ranks than {} in the batch ({} = {}): some would never have anything to do",
                           packs, key, batch),
                       .expected = fmt::format("at most {} ranks", batch * sharing),
                       .action = fmt::format("Start with --ranks {}, or enlarge the batch with --set {}={}",
                                             batch * sharing, key, dealt)});
}

}  // namespace isograd
