// The law for videos cut over ranks: a video transformer under flow matching has the gradient of one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "context_video_step.hpp"

namespace isograd::context {
namespace {

constexpr double kExact = 1e-10;  // E1

// Every mesh × layout × mean with the strategies and axes of shards of cells_of(); accumulations take turns.
// ISOGRAD_FULL_TESTS=1: both.
void check_axes(const Axes& axes, int turn) {
  int cases = 0;
  double worst = 0;
  for (const VideoLayout& layout : kVideoLayouts) {
    const int chosen = 1 + turn++ % 2;
    for (const int accumulation : {1, 2}) {
      if (!full_tests() && accumulation != chosen) continue;
      const VideoStep step = make_video_step(layout, axes.data(), accumulation);
      for (const bool samples : {false, true}) {
        const Reference wanted = reference(*exact_model(testing::small_video_dit()), step, samples);
        for (const Cell& cell : cells_of(axes, turn)) {
          VideoSetting setting;
          setting.strategy = cell.strategy, setting.sharded = cell.sharded, setting.samples = samples;
          const VideoOutcome outcome = run_video_step(axes, step, layout.options, setting);
          const double error = outcome.worst_error(wanted);
          EXPECT_LT(error, kExact) << axes.name() << ", " << layout.name << ", samples " << samples
                                   << ", accumulation " << accumulation << ", " << setting.strategy.name()
                                   << ", sharded over "
                                   << fmt::format("{}", fmt::join(setting.sharded, " x "));
          for (const StepReport& report : outcome.reports)
            EXPECT_NEAR(report.loss, wanted.loss, 1e-12 * wanted.loss);
          worst = std::max(worst, error);
          ++cases;
        }
        turn += 7;  // no divisor of the numbers of strategies and axes of shards
      }
    }
  }
  EXPECT_GE(cases, 12);
  std::printf("%s: %d cases, largest error of any parameter %.1e of its scale (allowed %.0e)\n",
              axes.name().c_str(), cases, worst, kExact);
  std::fflush(stdout);
}

TEST(ContextVideo, GradientIsThatOfOneProcess) {
  int turn = 0;
  for (const ContextSizes& sizes : testing::kContextSizes) {
    // context_test has them by default; ranks that are threads of two cores take their time.
    const bool many = sizes.ring == 5 || sizes.ring * sizes.ulysses > 6;
    if (many && !full_tests()) continue;
    check_axes({.ring = sizes.ring, .ulysses = sizes.ulysses}, turn++);
  }
}

TEST(ContextVideo, UnderDataParallelismToo) {
  check_axes({.dp_shard = 2, .ring = 2}, 1);
  check_axes({.dp_replicate = 2, .ulysses = 2}, 2);
  if (full_tests()) check_axes({.dp_shard = 2, .ring = 2, .ulysses = 2}, 3);
}

// At zero every block is the identity: its gradients vanish, and parity would hold whatever attention did.
TEST(ContextVideo, GatesBeginAwayFromZeroForAReason) {
  const VideoStep step = make_video_step(kVideoLayouts[3], 1, 1);
  for (const double gate : {0.0, 0.5}) {
    const Reference wanted = reference(*exact_model(testing::small_video_dit(gate)), step, true);
    for (const auto& [name, g] : wanted.gradients) {
      if (!name.starts_with("blocks.")) continue;
      EXPECT_EQ(g.norm().item<double>() > 0, gate > 0) << name;
    }
  }
}

// Doing nothing must not pass as parity.
TEST(ContextVideo, LocalGradientsDifferBeforeTheReduction) {
  for (const Axes& axes :
       {Axes{.ring = 2}, Axes{.ring = 3}, Axes{.ulysses = 4}, Axes{.ring = 2, .ulysses = 2}})
    for (const bool samples : {false, true}) {
      const VideoStep step = make_video_step(kVideoLayouts[3], 1, 2);
      const Reference wanted = reference(*exact_model(testing::small_video_dit()), step, samples);
      VideoSetting setting;
      setting.samples = samples, setting.reduce = false;
      const VideoOutcome outcome = run_video_step(axes, step, {}, setting);
      for (std::size_t r = 0; r < outcome.gradients.size(); ++r) {
        EXPECT_GT(worst_error(outcome.gradients[r], wanted), 1e-3) << axes.name() << ", rank " << r;
        const auto& next = outcome.gradients[(r + 1) % outcome.gradients.size()];
        EXPECT_GT(worst_error(outcome.gradients[r], {.gradients = next}), 1e-3) << axes.name();
      }
    }
}

TEST(ContextVideo, PlantedMistakesAreSeen) {
  for (const Axes& axes :
       {Axes{.ring = 2}, Axes{.ring = 3}, Axes{.ulysses = 4}, Axes{.ring = 2, .ulysses = 2}}) {
    if (!full_tests() && (axes.ring == 2) == (axes.ulysses == 1)) continue;
    const double cp = axes.context();
    for (const bool samples : {false, true})
      for (const VideoLayout* layout : {&kVideoLayouts[0], &kVideoLayouts[3]}) {
        const VideoStep step = make_video_step(*layout, 1, 2);
        const Reference wanted = reference(*exact_model(testing::small_video_dit()), step, samples);
        const auto outcome = [&](auto&& plant) {
          VideoSetting setting;
          setting.samples = samples;
          plant(setting);
          return run_video_step(axes, step, layout->options, setting);
        };
        const std::string where = fmt::format("{}, {}, samples {}", axes.name(), layout->name, samples);
        const VideoOutcome averaged =
            outcome([](VideoSetting& setting) { setting.wrap = averages_over_context; });
        EXPECT_NEAR(common_ratio(averaged, wanted), 1 / cp, 1e-9) << "B19: " << where;
        EXPECT_NEAR(averaged.reports[0].loss, wanted.loss, 1e-12 * wanted.loss) << "B19: " << where;
        const VideoOutcome counted = outcome([](VideoSetting& setting) {
          setting.mean = [](bool of_samples, const Mesh& mesh) -> std::unique_ptr<Normalizer> {
            if (of_samples) return std::make_unique<CountsContextPeers<SampleMean>>(mesh.size(kContextAxes));
            return std::make_unique<CountsContextPeers<TokenMean>>(mesh.size(kContextAxes));
          };
        });
        EXPECT_NEAR(common_ratio(counted, wanted), 1 / cp, 1e-9) << "B5: " << where;
        EXPECT_NEAR(counted.reports[0].loss, wanted.loss / cp, 1e-9) << "B5: " << where;
        // B26b: noise by the place in the part, not in the video.
        const VideoOutcome by_part = outcome([](VideoSetting& setting) {
          setting.seen = [](const Batch& batch) {
            Batch wrong = batch;
            wrong.positions = at::arange(batch.num_tokens());
            return wrong;
          };
        });
        EXPECT_GT(by_part.worst_error(wanted), 1e-3) << "B26b: " << where;
        // Attention that ends at the cut.
        const VideoOutcome local = outcome([](VideoSetting& setting) {
          setting.attention = [](const ContextAttention&) -> DecoderLM::Attention {
            return [](const Batch& batch, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
              return variable_length_attention(q, k, v, batch.cu_seqlens, false);
            };
          };
        });
        EXPECT_GT(local.worst_error(wanted), 1e-3) << "attention within ranks: " << where;
      }
  }
}

// The step on one process, its sums formed in other orders: videos as they come, turned round and from the
// middle on, micro-batches as they are or a video to each.
std::vector<VideoStep> on_one_process(const VideoStep& step) {
  std::vector<VideoStep> all;
  for (const bool apart : {false, true})
    for (const int order : {0, 1, 2}) {
      MicroBatches& batches = all.emplace_back(VideoStep{step.store, {{}}}).whole[0];
      for (const MicroBatches& of_rank : step.whole)
        for (const Batch& batch : of_rank) {
          std::vector<std::int64_t> videos = batch.sample_ids;
          if (order == 1) std::reverse(videos.begin(), videos.end());
          if (order == 2)
            std::rotate(videos.begin(), videos.begin() + static_cast<std::ptrdiff_t>(videos.size() / 2),
                        videos.end());
          if (!apart) batches.push_back(testing::batch_of_videos(*step.store, videos, batch.draw));
          for (const std::int64_t video : videos)
            if (apart) batches.push_back(testing::batch_of_videos(*step.store, {video}, batch.draw));
        }
      if (order == 1) std::reverse(batches.begin(), batches.end());
    }
  return all;
}

// E2, the error of one process being the worst of these orders: over 192 orders that of a parameter of four
// elements was 5e-8 to 2.8e-7, so that one of them alone says little. The number of cases, and the largest
// share of the error allowed.
std::pair<int, double> check_rounding(const Axes& axes, const VideoLayout& layout, int accumulation) {
  int cases = 0;
  double worst = 0;
  const VideoStep step = make_video_step(layout, axes.data(), accumulation);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const bool samples : {false, true}) {
      const Reference wanted = reference(*exact_model(testing::small_video_dit(), dtype), step, samples);
      VideoSetting setting;
      setting.dtype = dtype, setting.samples = samples;
      std::vector<VideoOutcome> outcomes;
      std::vector<const Outcome*> alone;
      for (const VideoStep& one : on_one_process(step))
        outcomes.push_back(run_video_step({}, one, {}, setting));
      for (const VideoOutcome& outcome : outcomes) alone.push_back(&outcome);
      const std::vector<Cell> cells = full_tests() ? cells_of_stages(axes, cases)
                                                   : std::vector<Cell>{{setting.strategy, setting.sharded}};
      for (const Cell& cell : cells) {
        setting.strategy = cell.strategy, setting.sharded = cell.sharded;
        const Rounding rounding = rounding_of(run_video_step(axes, step, layout.options, setting), wanted,
                                              alone, dtype, axes.ranks() * accumulation);
        EXPECT_LE(rounding.share, 1) << rounding.where << "; " << axes.name() << ", " << layout.name << ", "
                                     << cell.strategy.name() << ", sharded over "
                                     << fmt::format("{}", fmt::join(cell.sharded, " x ")) << ", "
                                     << c10::toString(dtype) << ", samples " << samples << ", accumulation "
                                     << accumulation;
        worst = std::max(worst, rounding.share);
        ++cases;
      }
      setting.wrap = averages_over_context;
      const VideoOutcome averaged = run_video_step(axes, step, layout.options, setting);
      EXPECT_GT(rounding_of(averaged, wanted, alone, dtype, axes.ranks() * accumulation).share, 1)
          << "B19: " << axes.name() << ", " << layout.name << ", " << c10::toString(dtype);
    }
  return {cases, worst};
}

TEST(ContextVideo, WithinRoundingInLowerPrecision) {
  std::vector<Axes> meshes = {Axes{.ring = 2}, Axes{.ring = 5}, Axes{.ulysses = 4},
                              Axes{.ring = 2, .ulysses = 2}};
  std::vector<VideoLayout> layouts = {kVideoLayouts[3]};
  std::vector<int> accumulations = {2};
  if (full_tests()) {
    meshes = {Axes{.dp_shard = 2, .ring = 2}, Axes{.dp_shard = 2, .ring = 2, .ulysses = 2}};
    for (const ContextSizes& sizes : testing::kContextSizes)
      meshes.push_back({.ring = sizes.ring, .ulysses = sizes.ulysses});
    layouts = kVideoLayouts;
    accumulations = {1, 2};
  }
  for (const Axes& axes : meshes) {
    int cases = 0;
    double worst = 0;
    for (const VideoLayout& layout : layouts)
      for (const int accumulation : accumulations) {
        const auto [more, share] = check_rounding(axes, layout, accumulation);
        cases += more, worst = std::max(worst, share);
      }
    std::printf("%s: %d cases in float32 and bfloat16, at most %.2f of the error allowed\n",
                axes.name().c_str(), cases, worst);
    std::fflush(stdout);
  }
}

// 20 steps of SGD on a loader's videos of unequal lengths. The sample mean on several context ranks is that
// of one process, and another training than the token mean.
TEST(ContextVideo, TwentyStepsOfSgdAreThoseOfOneProcess) {
  constexpr int kSteps = 20;
  constexpr double kRate = 0.05;
  const auto store =
      testing::small_videos({{4, 3, 3}, {1, 1, 2}, {2, 2, 2}, {6, 2, 2}, {1, 3, 1}, {1, 1, 1}, {3, 2, 3}});
  VideoLoader loader(store, {0, 1, 2, 3, 4, 5, 6},
                     {.videos_per_step = 3, .tokens_per_micro_batch = 24, .seed = 2});
  std::vector<VideoStep> steps;
  for (int i = 0; i < kSteps; ++i) steps.push_back({store, {loader.next()}});

  // By hand, in fp64 with the weights of an fp32 model; the scales of its gradients are added up.
  std::map<std::string, double> scales;
  const auto by_hand = [&](bool samples) {
    const auto model = exact_model(testing::small_video_dit(), at::kFloat);
    for (const VideoStep& step : steps) {
      const Reference of = reference(*model, step, samples);
      const at::NoGradGuard no_grad;
      const double rms = rms_of(of);
      for (auto& [name, tensor] : model->named()) {
        tensor.sub_(of.gradients.at(name), kRate);
        if (samples) scales[name] += scale_of(rms, of.gradients.at(name));
      }
    }
    return model->named();
  };
  const auto start = exact_model(testing::small_video_dit(), at::kFloat)->named();
  const auto wanted = by_hand(true), tokens = by_hand(false);
  double moved = 0, apart = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    moved += (wanted[i].second - start[i].second).square().sum().item<double>();
    apart += (wanted[i].second - tokens[i].second).square().sum().item<double>();
  }
  VideoSetting setting;
  setting.dtype = at::kFloat, setting.samples = true, setting.learning_rate = kRate;
  const VideoOutcome alone = run_video_steps({}, steps, {}, setting);
  const auto error = [&](const std::map<std::string, at::Tensor>& of, std::size_t i) {
    return (of.at(wanted[i].first).to(at::kDouble) - wanted[i].second).norm().item<double>();
  };
  for (const Axes& axes :
       {Axes{.ring = 2}, Axes{.ring = 4}, Axes{.ulysses = 2}, Axes{.ring = 2, .ulysses = 2}}) {
    const VideoOutcome outcome = run_video_steps(axes, steps, {}, setting);
    double squares = 0, largest = 0;
    // E2 of every step, added up at the rate: four times what one rank's rounding does to the weights, and
    // what the reductions may.
    const double unit =
        std::ldexp(1.0, -24) * std::sqrt(axes.ranks() * 3);  // 3: most micro-batches of a step
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const double found = error(outcome.weights[0], i),
                   allowed = 4 * error(alone.weights[0], i) + kRate * unit * scales.at(wanted[i].first);
      EXPECT_LE(found, allowed) << axes.name() << ", " << wanted[i].first;
      largest = std::max(largest, found / allowed);
      squares += found * found;
    }
    for (const auto& weights : outcome.weights)
      for (const auto& [name, tensor] : weights) EXPECT_TRUE(at::equal(tensor, outcome.weights[0].at(name)));
    std::printf(
        "%s: 20 steps moved the weights by %.3g; one process is %.1e away (at most %.2f of what is "
        "allowed), the token mean %.3g\n",
        axes.name().c_str(), std::sqrt(moved), std::sqrt(squares), largest, std::sqrt(apart));
    EXPECT_GT(std::sqrt(apart), 1000 * std::sqrt(squares)) << axes.name();
    EXPECT_GT(std::sqrt(apart), 0.01 * std::sqrt(moved)) << axes.name();
  }
}

}  // namespace
}  // namespace isograd::context
