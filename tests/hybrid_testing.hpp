// The data that the sweep's cells are run on, and what one process has of them.
#pragma once

#include <algorithm>
#include <map>
#include <string>

#include "full_tests.hpp"
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
  // No number of ranks that they are assigned to divides the packs, or videos; there are more of them.
  RunConfig base(const Cell& cell) const {
    RunConfig config = cell.is(kModel, "video") ? videos("hybrid") : tiny("hybrid");
    if (cell.is(kModel, "video"))
      config.batch.videos_per_step = 9, config.data.validation_fraction = 0,
      config.sample = RunConfig{}.sample;
    else
      config.batch.packs_per_step = cell.data() <= 4 ? 5 : 9, config.data.pack_length = 24;
    config.run.seed = static_cast<std::int64_t>(kNoiseSeed);  // the oracle's
    return config;
  }
  RunConfig config_for(const Cell& cell) const { return config_of(cell, base(cell)); }

  // It depends on the model, the data, the mean and the values alone, and not on how a step is cut.
  const Wanted& wanted(RunConfig config, std::uint64_t nudge = 0, bool tied_routers = false) {
    config.parallel = {};
    config.batch.packs_per_micro_batch = config.batch.tokens_per_micro_batch = 1;
    const std::string key = fmt::format("{}{} {}", to_toml(config), nudge, tied_routers);
    const auto known = wanted_.find(key);
    if (known != wanted_.end()) return known->second;
    return wanted_.emplace(key, wanted_of(config, nudge, 1, tied_routers)).first->second;
  }
  const Wanted& wanted(const Cell& cell, std::uint64_t nudge = 0) { return wanted(config_for(cell), nudge); }

  struct Rounding {
    std::vector<std::string> outside{};  // parameters, each with its error and what is allowed
    double share = 0, alone = 0;  // the largest error of what is allowed; the most that one process has
    double assembled = 0;         // Measured::assembled
  };
  // E2, in the precision of the configuration: four times what one process is off by, the most of up to 16
  // draws (other values of the parameters, other micro-batches).
  Rounding rounding_of(const RunConfig& config, int ranks, Asked asked = {}) {
    asked.look_before = asked.repeat = false;
    const Measured found = measure(config, ranks, wanted(config, 0, asked.tied_routers), asked);
    RunConfig one = config;
    one.parallel = {};
    auto& draws = alone_[fmt::format("{}{}", to_toml(one), asked.tied_routers)];
    Rounding result{.assembled = found.assembled};
    for (std::uint64_t draw = 0; draw < 16 && (draw == 0 || !result.outside.empty()); ++draw) {
      if (draws.size() <= draw) {
        one.batch.packs_per_micro_batch = draw % 3 == 0 ? 1 : draw % 3 == 1 ? 9 : 2;
        one.batch.tokens_per_micro_batch = draw % 3 == 0 ? 1 : draw % 3 == 1 ? 1000 : 40;
        draws.push_back(
            measure(
                one, 1, wanted(config, draw, asked.tied_routers),
                {.look_before = false, .repeat = false, .nudge = draw, .tied_routers = asked.tied_routers})
                .errors);
      }
      result.outside.clear(), result.share = 0;
      for (const auto& [name, error] : found.errors) {
        double own = 0;
        for (std::uint64_t d = 0; d <= draw; ++d) own = std::max(own, draws[d].at(name));
        const double allowed = 4 * own + 0x1p-24 * std::sqrt(ranks * 9.0);
        result.alone = std::max(result.alone, own);
        if (!(error <= allowed))
          result.outside.push_back(fmt::format("{} {:.1e} of {:.1e}", name, error, allowed));
        else
          result.share = std::max(result.share, error / allowed);
      }
    }
    return result;
  }

  // As `isograd train` reads and checks a configuration: "no error", or what it says.
  static std::string refusal_of(const RunConfig& config, int ranks) {
    return testing_runs::config_error_of([&] { check(parse_config(to_toml(config), "hybrid.toml"), ranks); });
  }

 private:
  std::map<std::string, Wanted> wanted_{};
  std::map<std::string, std::vector<std::map<std::string, double>>>
      alone_{};  // errors of one process, by draw
};

// Rows in which every `strength` values stand that go together. By default on up to 6 ranks, for each rank of
// a cell takes its time; ISOGRAD_FULL_TESTS=1: on up to 8.
inline covering::Array covering_rows(int strength) {
  const int ranks = full_tests() ? kRanks : 6;
  return covering::cover(
      factors(), strength,
      [=](const covering::Row& row) { return possible(row) && !too_large({row}, ranks); }, kSeed);
}

// Every pair of values. By default also replicas of shards without anything else, which faults of their sums
// are planted in, and two meshes of 8 ranks: along two axes and along three.
inline std::vector<Cell> pairwise_cells() {
  std::vector<Cell> cells;
  for (const covering::Row& row : covering_rows(2).rows) cells.push_back({row});
  if (full_tests()) return cells;
  cells.push_back(Cell{}.with(kReplicate, "2").with(kShard, "2").with(kStrategy, "zero3"));
  const Cell one_by_one = Cell{}.with(kPacks, "1");
  cells.push_back(one_by_one.with(kPp, "4")
                      .with(kSchedule, "zb-h1")
                      .with(kTp, "2")
                      .with(kModel, "tied")
                      .with(kMean, "sample_mean"));
  cells.push_back(one_by_one.with(kShard, "2")
                      .with(kRing, "2")
                      .with(kUlysses, "2")
                      .with(kEp, "4")
                      .with(kModel, "experts")
                      .with(kStrategy, "zero3")
                      .with(kSpread, "ulysses_only")
                      .with(kLoss, "fused"));
  return cells;
}

}  // namespace isograd::hybrid
