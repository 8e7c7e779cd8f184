// The data that the sweep's cells are run on, and what one process has of them.
#pragma once

#include <algorithm>
#include <map>
#include <string>

#include "hybrid_run.hpp"
#include "train/video_testing.hpp"

namespace isograd::hybrid {

constexpr std::uint64_t kSeed = 20261125;  // of the rows

class HybridCells : public testing_runs::TinyVideos {
 protected:
  void SetUp() override {
    TinyVideos::SetUp();
    const int shapes[][3] = {{4, 8, 8}, {2, 8, 12}, {6, 8, 8}, {2, 12, 16}};
    int seed = 10;
    for (const auto& shape : shapes) {
      testing_runs::write_video(root_ / "videos" / fmt::format("clip{}.y4m", seed), shape[0], shape[1],
                                shape[2], seed);
      ++seed;
    }
  }
  // More packs, or videos, than ranks that they are dealt to, and no number of ranks divides them.
  RunConfig base(const Cell& cell) const {
    RunConfig config = cell.is(kModel, "video") ? videos("hybrid") : tiny("hybrid");
    if (cell.is(kModel, "video"))
      config.batch.videos_per_step = 9, config.data.validation_fraction = 0,
      config.sample = RunConfig{}.sample;
    else
      config.batch.packs_per_step = 9, config.data.pack_length = 24;
    config.run.seed = static_cast<std::int64_t>(context::kNoiseSeed);  // the oracle's
    return config;
  }
  RunConfig config_for(const Cell& cell) const { return config_of(cell, base(cell)); }

  // It depends on the model, the mean, the number of layers and the values alone.
  const Wanted& wanted(const Cell& cell, std::uint64_t nudge = 0) {
    const RunConfig config = config_for(cell);
    const std::string key = fmt::format("{} {} {} {} {}", cell.text(kModel), cell.text(kMean),
                                        config.model.shape.layers, cell.dtype, nudge);
    const auto known = wanted_.find(key);
    if (known != wanted_.end()) return known->second;
    return wanted_.emplace(key, wanted_of(config, nudge)).first->second;
  }

  // As `isograd train` reads and checks a configuration: "no error", or what it says.
  static std::string refusal_of(const RunConfig& config, int ranks) {
    return testing_runs::config_error_of([&] { check(parse_config(to_toml(config), "hybrid.toml"), ranks); });
  }

 private:
  std::map<std::string, Wanted> wanted_{};
};

inline std::vector<Cell> pairwise_cells() {
  std::vector<Cell> cells;
  for (const covering::Row& row : covering::cover(factors(), 2, possible, kSeed).rows) cells.push_back({row});
  return cells;
}

}  // namespace isograd::hybrid
