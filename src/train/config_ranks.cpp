// What a configuration asks of the ranks it runs on.
#include <fmt/format.h>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "train/config.hpp"
#include "train/device.hpp"
#include "train/model_path.hpp"
#include "train/task_kind.hpp"

namespace isograd {

void check(const RunConfig& config, int ranks) {
  check_device(config, ranks);
  check_but_devices(config, ranks);
}

void check_but_devices(const RunConfig& config, int ranks) {
  if (!config.model.load.empty()) require_model_folder(config.model.load, "model.load");
  const Grid grid = grid_of(config, ranks);
  const int dealt = grid.size(kSampleAxes), sharing = ranks / dealt;
  const TaskKind& kind = kind_of(config);
  if (kind.check_ranks) kind.check_ranks(config, ranks);
  if (config.parallel.share_parameters == "on" && grid.size(sharded_axes(config)) == 1)
    refuse("parallel.share_parameters",
           fmt::format("\"on\" for {}, of which none has another one's parameters",
                       ranks == 1 ? "one rank" : fmt::format("{} ranks", ranks)),
           "ranks along an axis that the strategy spreads parameters or their sums over",
           "Leave it out (\"auto\" shares wherever somebody is there to share with)");
  const std::int64_t batch = kind.samples_per_step(config);
  const std::string samples = kind.samples, key = "batch." + samples + "_per_step";
  if (dealt > batch)
    refuse(fmt::format("--ranks {}", ranks),
           fmt::format("more ranks than {} in the batch ({} = {}): some would never have anything to do",
                       samples, key, batch),
           fmt::format("at most {} ranks", batch * sharing),
           fmt::format("Start with --ranks {}, or enlarge the batch with --set {}={}", batch * sharing, key,
                       dealt));
}

}  // namespace isograd
