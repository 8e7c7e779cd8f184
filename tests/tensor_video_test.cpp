// A video transformer cut over tp: its gradient is one process's, whoever else there is on the mesh.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error_testing.hpp"
#include "context_video_step.hpp"

namespace isograd::context {
namespace {

constexpr TensorOverlap kOverlaps[] = {TensorOverlap::kNone, TensorOverlap::kWeights, TensorOverlap::kTokens};
constexpr double kExact = 1e-10;  // E1

std::vector<Axes> meshes() {
  std::vector<Axes> all;
  for (const int tp : {2, 3, 4, 5, 8}) all.push_back({.tp = tp});
  all.push_back({.dp_shard = 2, .tp = 2});
  all.push_back({.ring = 2, .tp = 2});
  all.push_back({.ulysses = 2, .tp = 3});
  all.push_back({.dp_shard = 2, .ring = 2, .tp = 2});
  return all;
}

// 12 heads over 5 and 8 ranks, 20 features over 3 and 8: uneven. By default strategies and accumulations take
// turns; ISOGRAD_FULL_TESTS=1: all that cells_of() gives, with both.
TEST(TensorVideo, GradientIsThatOfOneProcess) {
  int place = 0, turn = 0;  // of mesh and layout; of strategies
  for (const Axes& axes : meshes()) {
    int cases = 0;
    double worst = 0;
    for (std::size_t i = 0; i < kVideoLayouts.size(); ++i, ++place) {
      const VideoLayout& layout = kVideoLayouts[i];
      if (!full_tests() && (place + axes.tp) % 2 == 0) continue;
      for (const int accumulation : {1, 3}) {
        if (!full_tests() && (accumulation == 1) != (place % 4 < 2)) continue;
        const VideoStep step = make_video_step(layout, axes.data(), accumulation);
        for (const bool samples : {false, true}) {
          const Reference wanted = reference(*exact_model(testing::small_video_dit()), step, samples);
          for (const bool by_tokens : {true, false}) {
            if (!full_tests() && by_tokens != (samples == (place % 3 == 0))) continue;
            for (const Cell& cell : cells_of(axes, turn += 5)) {
              VideoSetting setting;
              setting.strategy = cell.strategy, setting.sharded = cell.sharded, setting.samples = samples;
              setting.sequence_parallel = by_tokens;
              setting.overlap = kOverlaps[turn % (by_tokens ? 3 : 2)];
              const VideoOutcome outcome = run_video_step(axes, step, layout.options, setting);
              const double error = outcome.worst_error(wanted);
              EXPECT_LT(error, kExact)
                  << axes.name() << ", " << layout.name << ", samples " << samples << ", accumulation "
                  << accumulation << ", cut tokens " << by_tokens << ", " << setting.strategy.name();
              for (const StepReport& report : outcome.reports)
                EXPECT_NEAR(report.loss, wanted.loss, 1e-12 * wanted.loss) << axes.name();
              worst = std::max(worst, error);
              ++cases;
            }
          }
        }
      }
    }
    EXPECT_GE(cases, 4) << axes.name();
    std::printf("%s: %d cases, largest error of any parameter %.1e of its scale (allowed %.0e)\n",
                axes.name().c_str(), cases, worst, kExact);
    std::fflush(stdout);
  }
}

TEST(TensorVideo, WithinRoundingInLowerPrecision) {
  const VideoStep step = make_video_step(kVideoLayouts[3], 1, 2);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const Reference wanted = reference(*exact_model(testing::small_video_dit(), dtype), step, true);
    VideoSetting setting;
    setting.dtype = dtype, setting.samples = true;
    // One process, its sums formed in other orders: as it is, and a video to each micro-batch.
    VideoStep apart{step.store, {{}}};
    for (const Batch& batch : step.whole[0])
      for (const std::int64_t video : batch.sample_ids)
        apart.whole[0].push_back(testing::batch_of_videos(*step.store, {video}, batch.draw));
    VideoStep turned = apart;
    std::reverse(turned.whole[0].begin(), turned.whole[0].end());
    std::vector<VideoOutcome> outcomes;
    for (const VideoStep& one : {step, apart, turned})
      outcomes.push_back(run_video_step({}, one, {}, setting));
    std::vector<const Outcome*> alone;
    for (const VideoOutcome& outcome : outcomes) alone.push_back(&outcome);
    for (const Axes& axes : {Axes{.tp = 2}, Axes{.tp = 5}, Axes{.ring = 2, .tp = 2}})
      for (const bool by_tokens : {true, false}) {
        setting.sequence_parallel = by_tokens;
        setting.overlap = by_tokens ? TensorOverlap::kTokens : TensorOverlap::kWeights;
        const Rounding rounding =
            rounding_of(run_video_step(axes, step, {}, setting), wanted, alone, dtype, axes.ranks() * 2);
        EXPECT_LE(rounding.share, 1) << axes.name() << ", cut tokens " << by_tokens << ", "
                                     << c10::toString(dtype) << ": " << rounding.where;
      }
  }
}

// Parameters that work on this rank's heads or tokens, and are taken for whole.
TEST(TensorVideo, PlantedMistakesAreSeen) {
  const VideoStep step = make_video_step(kVideoLayouts[3], 1, 2);
  const Reference wanted = reference(*exact_model(testing::small_video_dit()), step, false);
  for (const char* part : {"q_norm", "k_norm", "modulation", "attention.o.bias", "patch", "time", "final"}) {
    VideoSetting setting;
    setting.change_placements = [part](isograd::Layout::Named& placements) {
      for (auto& [name, placement] : placements)
        if (name.find(part) != std::string::npos) placement.summed.erase("tp");
    };
    const VideoOutcome outcome = run_video_step({.tp = 3}, step, {}, setting);
    int wrong = 0;
    const double rms = rms_of(wanted);
    for (const auto& [name, g] : wanted.gradients) {
      const double error = (outcome.gradients[0].at(name) - g).norm().item<double>() / scale_of(rms, g);
      const bool planted = name.find(part) != std::string::npos;
      wrong += planted;
      if (planted)
        EXPECT_GT(error, 1e-3) << name;
      else
        EXPECT_LT(error, kExact) << name;
    }
    EXPECT_GT(wrong, 0) << part;
  }
}

TEST(TensorVideo, MoreRanksThanHeadsAreRefused) {
  run_ranks(3, [](World& world) {
    VideoDiTConfig config = testing::small_video_dit();
    config.heads = 2;
    VideoDiT model(config, at::kDouble, 1);
    EXPECT_THAT(error_testing::error_of<ConfigError>([&] {
                  cut_video(model, Mesh(world, Grid({{"tp", 3}})));
                }),
                ::testing::HasSubstr("at most 2 ranks along tp"));
  });
}

}  // namespace
}  // namespace isograd::context
