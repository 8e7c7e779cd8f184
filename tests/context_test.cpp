// The law with samples cut over ranks: the gradient of data x context ranks is that of one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "context_planted.hpp"

namespace isograd::context {
namespace {

using ::testing::HasSubstr;

constexpr double kExact = 1e-10;  // E1

// Every mesh × layout × mean × accumulation, each with the strategies and axes of shards of cells_of().
void check_axes(const Axes& axes, int turn) {
  const DecoderConfig config = small_decoder(axes.ulysses);
  int cases = 0;
  double worst = 0;
  for (const Layout& layout : kLayouts)
    for (const bool samples : {false, true})
      for (const int accumulation : {1, 2}) {
        const auto whole = make_step(layout, axes.data(), accumulation);
        const Reference wanted = reference(config, whole, samples);
        for (const Cell& cell : cells_of(axes, turn)) {
          const Setting setting{.strategy = cell.strategy, .sharded = cell.sharded, .samples = samples};
          const Outcome outcome = run_step(axes, config, whole, layout.options, setting);
          const double error = outcome.worst_error(wanted);
          EXPECT_LT(error, kExact) << axes.name() << ", " << layout.name << ", samples " << samples
                                   << ", accumulation " << accumulation << ", " << setting.strategy.name()
                                   << ", sharded over "
                                   << fmt::format("{}", fmt::join(setting.sharded, " x "));
          for (const StepReport& report : outcome.reports) EXPECT_NEAR(report.loss, wanted.loss, 1e-12);
          worst = std::max(worst, error);
          ++cases;
        }
        turn += 7;  // no divisor of the numbers of strategies and axes of shards
      }
  std::printf("%s: %d cases, largest error of any parameter %.1e of its scale (allowed %.0e)\n",
              axes.name().c_str(), cases, worst, kExact);
  std::fflush(stdout);
}

TEST(Context, GradientIsThatOfOneProcess) {
  int turn = 0;
  for (const ContextSizes& sizes : testing::kContextSizes)
    check_axes({.ring = sizes.ring, .ulysses = sizes.ulysses}, turn++);
}

TEST(Context, UnderDataParallelismToo) {
  check_axes({.dp_shard = 2, .ring = 2}, 1);
  check_axes({.dp_replicate = 2, .ring = 2}, 2);
  check_axes({.dp_shard = 2, .ulysses = 2}, 3);
  check_axes({.dp_shard = 2, .ring = 2, .ulysses = 2}, 4);
  check_axes({.dp_replicate = 2, .ring = 2, .ulysses = 2}, 5);
}

// E2. The number of cases, and the largest share of the error allowed.
std::pair<int, double> check_rounding(const Axes& axes, const std::vector<Layout>& layouts,
                                      const std::vector<int>& accumulations) {
  const DecoderConfig config = small_decoder(axes.ulysses);
  int cases = 0;
  double worst = 0;
  auto place = static_cast<std::size_t>(4 * axes.ranks());
  for (const Layout& layout : layouts)
    for (const int accumulation : accumulations) {
      const auto whole = make_step(layout, axes.data(), accumulation);
      MicroBatches all;
      for (const MicroBatches& batches : whole) all.insert(all.end(), batches.begin(), batches.end());
      for (const auto dtype : {at::kFloat, at::kBFloat16})
        for (const bool samples : {false, true}) {
          if (!full_tests() && takes_first(place++)) continue;  // each type with one of the means, by turns
          const Reference wanted = reference(config, whole, samples, dtype);
          const Outcome alone = run_step({}, config, {all}, {}, {.dtype = dtype, .samples = samples});
          const std::vector<Cell> cells =
              full_tests() ? cells_of_stages(axes, cases)
                           : std::vector<Cell>{{.strategy = {.flat = {.name = "bucketed"}}}};
          for (const Cell& cell : cells) {
            const Outcome outcome = run_step(
                axes, config, whole, layout.options,
                {.strategy = cell.strategy, .sharded = cell.sharded, .dtype = dtype, .samples = samples});
            const Rounding rounding =
                rounding_of(outcome, wanted, {&alone}, dtype, axes.ranks() * accumulation);
            EXPECT_LE(rounding.share, 1)
                << rounding.where << "; " << axes.name() << ", " << layout.name << ", "
                << cell.strategy.name() << ", sharded over "
                << fmt::format("{}", fmt::join(cell.sharded, " x ")) << ", " << c10::toString(dtype)
                << ", samples " << samples << ", accumulation " << accumulation;
            worst = std::max(worst, rounding.share);
            ++cases;
          }
          const Outcome averaged =
              run_step(axes, config, whole, layout.options,
                       {.dtype = dtype, .samples = samples, .wrap = averages_over_context});
          EXPECT_GT(rounding_of(averaged, wanted, {&alone}, dtype, axes.ranks() * accumulation).share, 1)
              << "B19: " << axes.name() << ", " << layout.name << ", " << c10::toString(dtype);
        }
    }
  return {cases, worst};
}

TEST(Context, WithinRoundingInLowerPrecision) {
  std::vector<Axes> meshes = {Axes{.ring = 2}, Axes{.ring = 5}, Axes{.ulysses = 4},
                              Axes{.ring = 2, .ulysses = 3}, Axes{.dp_shard = 2, .ring = 2, .ulysses = 2}};
  std::vector<Layout> layouts = {kLayouts[0], kLayouts[1], kLayouts[3]};
  std::vector<int> accumulations = {2};
  if (full_tests()) {
    meshes = {Axes{.dp_shard = 2, .ring = 2}, Axes{.dp_shard = 2, .ring = 2, .ulysses = 2}};
    for (const ContextSizes& sizes : testing::kContextSizes)
      meshes.push_back({.ring = sizes.ring, .ulysses = sizes.ulysses});
    layouts = kLayouts;
    accumulations = {1, 2};
  }
  for (const Axes& axes : meshes) {
    const auto [cases, worst] = check_rounding(axes, layouts, accumulations);
    std::printf("%s: %d cases in float32 and bfloat16, at most %.2f of the error allowed\n",
                axes.name().c_str(), cases, worst);
    std::fflush(stdout);
  }
}

// Otherwise the layouts are not what they are called.
TEST(Context, ARankHasOnlyPaddingOrNothing) {
  for (const Axes& axes : {Axes{.ring = 2}, Axes{.ring = 5}, Axes{.ulysses = 2}, Axes{.ulysses = 4},
                           Axes{.ring = 2, .ulysses = 2}, Axes{.dp_shard = 2, .ulysses = 2}})
    for (const Layout* layout : {&kLayouts[4], &kLayouts[5]}) {
      CutOptions options = layout->options;
      options.ring = axes.ring, options.ulysses = axes.ulysses;
      const Batch whole = make_step(*layout, axes.data(), 1)[0][0];
      int without_text = 0;
      for (int rank = 0; rank < axes.context(); ++rank) {
        const Batch part = cut_batch(whole, cut_documents(whole.cu_seqlens, options), rank);
        const bool text = std::any_of(part.sample_ids.begin(), part.sample_ids.end(),
                                      [&](std::int64_t id) { return id != kPaddingSample; }) &&
                          part.positions.ge(0).any().item<bool>();
        without_text += !text;
        EXPECT_EQ(part.num_tokens() > 0, text || options.pad_to_multiple > 0) << layout->name;
      }
      EXPECT_GT(without_text, 0) << layout->name << ", " << axes.name();
    }
}

// Doing nothing must not pass as parity.
TEST(Context, LocalGradientsDifferBeforeTheReduction) {
  for (const Axes& axes :
       {Axes{.ring = 2}, Axes{.ulysses = 4}, Axes{.dp_shard = 2, .ring = 2, .ulysses = 2}}) {
    const DecoderConfig config = small_decoder(axes.ulysses);
    const auto whole = make_step(kLayouts[3], axes.data(), 2);
    const Reference wanted = reference(config, whole, true);
    const Outcome outcome = run_step(axes, config, whole, {}, {.samples = true, .reduce = false});
    for (std::size_t r = 0; r < outcome.gradients.size(); ++r) {
      EXPECT_GT(worst_error(outcome.gradients[r], wanted), 1e-3) << axes.name() << ", rank " << r;
      const auto& next = outcome.gradients[(r + 1) % outcome.gradients.size()];
      EXPECT_GT(worst_error(outcome.gradients[r], {.gradients = next}), 1e-3) << axes.name();
    }
  }
}

// ---- the museum's mistakes ----

struct FragmentsAreSamples : SampleMean {  // T_b of the tokens at hand
  Batch prepare(const Batch& batch, const Denominator& denominator) const override {
    Denominator wrong = denominator;
    wrong.sample_sizes.clear();
    for (std::size_t i = 0; i < batch.sample_ids.size(); ++i)
      wrong.sample_sizes[batch.sample_ids[i]] +=
          batch.targets.slice(0, batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
              .ne(kIgnoreIndex)
              .sum()
              .item<double>();
    return SampleMean::prepare(batch, wrong);
  }
};

TEST(Context, PlantedMistakesAreSeen) {
  for (const Axes& axes :
       {Axes{.ring = 2}, Axes{.ring = 3}, Axes{.ulysses = 4}, Axes{.ring = 2, .ulysses = 2},
        Axes{.dp_shard = 2, .ring = 2}, Axes{.dp_shard = 2, .ring = 2, .ulysses = 2}}) {
    const DecoderConfig config = small_decoder(axes.ulysses);
    const double cp = axes.context();
    for (const bool samples : {false, true})
      for (const Layout* layout : {&kLayouts[0], &kLayouts[2], &kLayouts[3]}) {
        const auto whole = make_step(*layout, axes.data(), 2);
        const Reference wanted = reference(config, whole, samples);
        const auto outcome = [&](Setting setting) {
          setting.samples = samples;
          return run_step(axes, config, whole, layout->options, setting);
        };
        const std::string where = fmt::format("{}, {}, samples {}", axes.name(), layout->name, samples);

        const Outcome averaged = outcome({.wrap = averages_over_context});
        EXPECT_GT(averaged.worst_error(wanted), 0.1) << "B19: " << where;
        EXPECT_NEAR(common_ratio(averaged, wanted), 1 / cp, 1e-9) << "B19: " << where;

        const Outcome counted =
            outcome({.mean = [](bool of_samples, const Mesh& mesh) -> std::unique_ptr<Normalizer> {
              if (of_samples)
                return std::make_unique<CountsContextPeers<SampleMean>>(mesh.size(kContextAxes));
              return std::make_unique<CountsContextPeers<TokenMean>>(mesh.size(kContextAxes));
            }});
        EXPECT_NEAR(common_ratio(counted, wanted), 1 / cp, 1e-9) << "B5: " << where;
        EXPECT_NEAR(counted.reports[0].loss, wanted.loss / cp, 1e-9) << "B5: " << where;
        EXPECT_NEAR(averaged.reports[0].loss, wanted.loss, 1e-12) << "B19 has the right loss: " << where;

        if (layout->lengths.size() > 1) {
          const Outcome joined = outcome({.attention = [](ContextAttention right) -> DecoderLM::Attention {
            return
                [right](const Batch& batch, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
                  auto wrong = std::make_shared<ContextCut>(*testing::joined_across_shards(*batch.cut));
                  wrong->rank = batch.cut->rank;
                  Batch leaky = batch;
                  leaky.cut = wrong;
                  return right(leaky, q, k, v);
                };
          }});
          EXPECT_GT(joined.worst_error(wanted), 1e-3) << "B20: " << where;
          EXPECT_TRUE(std::isnan(common_ratio(joined, wanted))) << "B20: " << where;
        }
        if (samples) {
          const Outcome fragments = outcome({.mean = [](bool, const Mesh&) -> std::unique_ptr<Normalizer> {
            return std::make_unique<FragmentsAreSamples>();
          }});
          EXPECT_GT(fragments.worst_error(wanted), 1e-3) << "fragments as samples: " << where;
        }
        // B23: right with shards along the axis, forgotten where it is not.
        if (axes.ring > 1 && axes.dp_shard * axes.ulysses > 1) {
          const Outcome forgotten =
              outcome({.strategy = {.flat = {.name = "zero1", .stage = 1}},
                       .sharded = {"dp_shard", "cp_ulysses"},
                       .layout_mesh = [](const World& world, const Mesh& right) {
                         return planted::skips_sums_along(world, right.grid(), {"dp_replicate", "cp_ring"});
                       }});
          EXPECT_GT(forgotten.worst_error(wanted), 1e-3) << "B23: " << where;
        }
      }
  }
}

// The two means are different losses here, so that one cannot pass for the other.
TEST(Context, TheMeansDiffer) {
  for (const Layout& layout : kLayouts) {
    if (layout.lengths.size() < 3) continue;
    const auto whole = make_step(layout, 2, 1);
    const DecoderConfig config = small_decoder(2);
    const Reference tokens = reference(config, whole, false), samples = reference(config, whole, true);
    EXPECT_GT(worst_error(tokens.gradients, samples), 1e-2) << layout.name;
  }
}

// Another document's tokens change nothing, bit for bit.
TEST(Context, NothingLeaksBetweenDocuments) {
  for (const Axes& axes :
       {Axes{.ring = 2}, Axes{.ring = 5}, Axes{.ulysses = 4}, Axes{.ring = 2, .ulysses = 2}})
    for (const std::size_t which : {1, 2, 3}) {
      const Layout& layout = kLayouts[which];
      const DecoderConfig config = small_decoder(axes.ulysses);
      const Batch whole = make_step(layout, 1, 1)[0][0];
      CutOptions options = layout.options;
      options.ring = axes.ring, options.ulysses = axes.ulysses;
      const ContextCut cut = cut_documents(whole.cu_seqlens, options);
      run_ranks(axes.ranks(), [&](World& world) {
        const Mesh mesh(world, data_grid(world.size, {.cp_ring = axes.ring, .cp_ulysses = axes.ulysses}));
        DecoderLM model(config, at::kFloat, 3);
        model.set_attention(ContextAttention(mesh));
        const auto hidden = [&](const Batch& batch) {
          return model.hidden(cut_batch(batch, cut, world.rank)).detach();
        };
        const at::Tensor before = hidden(whole);
        for (std::size_t victim = 0; victim + 1 < whole.cu_seqlens.size(); ++victim) {
          Batch changed = whole;
          changed.tokens = whole.tokens.clone();
          at::Tensor place = changed.tokens.slice(0, whole.cu_seqlens[victim], whole.cu_seqlens[victim + 1]);
          place.add_(11).remainder_(31);
          const at::Tensor after = hidden(changed);
          const Batch own = cut_batch(whole, cut, world.rank);
          for (std::size_t f = 0; f < own.sample_ids.size(); ++f) {
            const auto part = [&](const at::Tensor& x) {
              return x.slice(0, own.cu_seqlens[f], own.cu_seqlens[f + 1]);
            };
            const bool is_victim = own.sample_ids[f] == whole.sample_ids[victim];
            const bool same = part(before).equal(part(after));
            EXPECT_TRUE(is_victim ? !same || part(before).numel() == 0 : same)
                << axes.name() << ", " << layout.name;
          }
        }
      });
    }
}

// Angles that depend on a document's length know the whole document's.
TEST(Context, DynamicRotaryAnglesAreTheDocuments) {
  DecoderConfig config = small_decoder(1);
  config.max_positions = 16;
  config.rope_scaling = {.kind = "dynamic", .factor = 2};
  const auto whole = make_step(kLayouts[3], 1, 1);
  const Reference wanted = reference(config, whole, false);
  EXPECT_LT(run_step({.ring = 3}, config, whole, {}, {}).worst_error(wanted), kExact);
}

TEST(Context, AModelWithoutContextAttentionRefusesParts) {
  const Batch whole = make_step(kLayouts[0], 1, 1)[0][0];
  DecoderLM model(small_decoder(1), at::kFloat, 3);
  const Batch part = cut_batch(whole, cut_documents(whole.cu_seqlens, {.ring = 2}), 0);
  EXPECT_THAT(error_testing::error_of([&] { model.hidden(part); }),
              HasSubstr("a part of a batch that is cut over 2 context ranks"));
}

}  // namespace
}  // namespace isograd::context
