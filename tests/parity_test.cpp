// The law, tested: the gradient of many ranks is that of one process on the whole batch, and each planted
// mistake is seen.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "full_tests.hpp"
#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "parallel/data/strategies_testing.hpp"
#include "planted.hpp"
#include "toy.hpp"

namespace isograd {
namespace {

using namespace planted;
using testing::Strategy;

constexpr double kExact = 1e-10;  // E1: in fp64, of the scale s of each parameter
const int kRanks[] = {1, 2, 3, 4, 5, 8};

// ---- steps on many ranks ----

struct Setting {
  std::function<std::unique_ptr<Normalizer>()> mean = [] { return std::make_unique<TokenMean>(); };
  testing::Strategy strategy = {.name = "bucketed"};
  int data = 1, most_replicas = 1, tp = 1;
  std::function<Mesh(const World&, const Grid&)> mesh = [](const World& world, const Grid& grid) {
    return Mesh(world, grid);
  };
  DataParallelOptions options = {.bucket_bytes = 256};  // many buckets
  std::function<std::unique_ptr<DataParallel>(std::unique_ptr<DataParallel>, const World&)> wrap =
      [](std::unique_ptr<DataParallel> layout, const World&) { return layout; };
  std::function<void(toy::Model&, const World&)> change = [](toy::Model&, const World&) {};
  std::function<MicroBatches(const Mesh&, int step)> batches = [](const Mesh& mesh, int step) {
    return toy::make_step(mesh.size(mesh.data()), 2, step)[static_cast<std::size_t>(mesh.place(mesh.data()))];
  };
  int stops = -1;  // the rank that asks for it, and the next one for a save
  double learning_rate = 0, max_norm = 0;
  int steps = 1;
};

struct Outcome {
  std::vector<std::vector<at::Tensor>> local;  // per rank, before the last reduction; only without overlap
  std::vector<std::vector<at::Tensor>> gradients, weights;  // per rank, of the last step
  std::vector<StepReport> reports;
};

Outcome train(const Setting& setting) {
  const int size = setting.data * setting.tp;
  Outcome outcome;
  outcome.local.resize(size), outcome.gradients.resize(size), outcome.weights.resize(size);
  outcome.reports.resize(size);
  run_ranks(size, [&](World& world) {
    toy::Model model;
    setting.change(model, world);
    const int replicas = testing::replicas_for(setting.data, setting.most_replicas);
    std::vector<Axis> axes = data_grid(setting.data, {.dp_replicate = replicas}).axes();
    if (setting.tp > 1) axes.push_back({"tp", setting.tp});
    const Mesh mesh = setting.mesh(world, Grid(axes));
    auto layout = setting.wrap(
        setting.strategy.make(trainable_parameters(model.named()), mesh, setting.options), world);
    auto mean = setting.mean();
    auto optimizer = setting.learning_rate > 0 ? adamw({.learning_rate = setting.learning_rate})
                                               : sgd({.learning_rate = 0});
    Step step(
        [&](const Batch& batch) -> LossTerms {
          return {{"cross_entropy", cross_entropy_sum(model.logits(batch), batch.targets)}};
        },
        *layout, *mean, *optimizer, {.max_norm = setting.max_norm});
    for (int i = 0; i < setting.steps; ++i) {
      const bool stops = setting.stops == world.rank,
                 saves = setting.stops >= 0 && (setting.stops + 1) % world.size == world.rank;
      step.accumulate(setting.batches(mesh, i), Requests(stops, saves));
      outcome.local[world.rank].clear();
      if (!setting.options.overlap)
        for (auto& view : layout->views()) outcome.local[world.rank].push_back(view.gradient.clone());
      outcome.reports[world.rank] = step.finish();
    }
    for (auto& view : layout->views()) {
      outcome.gradients[world.rank].push_back(view.gradient.clone());
      outcome.weights[world.rank].push_back(view.parameter.clone());
    }
  });
  return outcome;
}

Outcome run_step(const std::vector<MicroBatches>& batches, Setting setting = {}) {
  setting.data = static_cast<int>(batches.size());
  setting.batches = [&](const Mesh& mesh, int) { return batches[static_cast<std::size_t>(mesh.rank())]; };
  return train(setting);
}

// The largest error of any parameter on any rank.
double worst_error(const Outcome& outcome, const toy::Reference& wanted) {
  double worst = 0;
  for (auto& gradients : outcome.gradients)
    worst = std::max(worst, toy::worst_error(gradients, wanted.gradients));
  return worst;
}

// Sizes of buckets, with overlap or without, take turns; ISOGRAD_FULL_TESTS=1: each with each.
TEST(Parity, GradientIsThatOfOneProcess) {
  double worst = 0;
  int cases = 0, turn = 0;
  for (int size : kRanks)
    for (int accumulation : {1, 3}) {
      const auto batches = toy::make_step(size, accumulation);
      const auto wanted = toy::reference(toy::Model(), batches);
      for (const testing::Strategy& strategy : testing::strategies())
        for (int most_replicas : {1, 4})
          for (bool overlap : {true, false})
            for (std::int64_t bucket_bytes : {1, 256, 1 << 20}) {
              if (most_replicas > 1 && testing::replicas_for(size, most_replicas) == 1) continue;
              if (!full_tests() && turn++ % 5 != 0) continue;  // of six: each in turn
              Setting setting{.strategy = strategy,
                              .most_replicas = most_replicas,
                              .options = {.bucket_bytes = bucket_bytes, .overlap = overlap}};
              const Outcome outcome = run_step(batches, setting);
              const double error = worst_error(outcome, wanted);
              worst = std::max(worst, error);
              ++cases;
              EXPECT_LT(error, kExact)
                  << strategy.name << ", " << size << " ranks, accumulation " << accumulation;
              for (auto& report : outcome.reports) EXPECT_NEAR(report.loss, wanted.loss, 1e-12);
            }
    }
  std::printf("%d cases, largest error of any parameter: %.2e of its scale (allowed %.0e)\n", cases, worst,
              kExact);
}

// Doing nothing must not pass as parity: before the reduction the ranks hold different gradients, none of
// them the right one.
TEST(Parity, LocalGradientsDifferBeforeTheReduction) {
  for (int size : kRanks) {
    if (size == 1) continue;
    const auto batches = toy::make_step(size, 3);
    const auto wanted = toy::reference(toy::Model(), batches);
    const Outcome outcome = run_step(batches, {.options = {.bucket_bytes = 256, .overlap = false}});
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_GT(toy::worst_error(outcome.local[rank], wanted.gradients), 1e-3) << rank << " of " << size;
      EXPECT_GT(toy::worst_error(outcome.local[rank], outcome.local[(rank + 1) % size]), 1e-3);
    }
  }
}

template <class Wrong>
std::unique_ptr<DataParallel> wrapped(std::unique_ptr<DataParallel> layout, const World&) {
  return std::make_unique<Wrong>(std::move(layout));
}

// Wrong means, a reducer that divides, sums that are left out or made again. With one or three micro-batches
// by turns; ISOGRAD_FULL_TESTS=1: with both.
TEST(Parity, EachPlantedMistakeIsSeenUnderEveryStrategy) {
  int runs = 0;
  for (const testing::Strategy& strategy : testing::strategies())
    for (int size : kRanks)
      for (int accumulation : {1, 3}) {
        const bool is_bucketed = strategy.name == "bucketed";
        if (!is_bucketed && (size == 1 || size == 5)) continue;
        if (!full_tests() && (size % 2 == 0) != (accumulation == 3)) continue;
        const auto batches = toy::make_step(size, accumulation);
        const auto wanted = toy::reference(toy::Model(), batches);
        const Setting right{.strategy = strategy};
        std::vector<std::pair<const char*, Setting>> mistakes;
        const auto plant = [&](const char* name) -> Setting& {
          return mistakes.emplace_back(name, right).second;
        };
        plant("B1").mean = [] { return std::make_unique<MeanOfMicroBatchMeans>(); };
        plant("B30").mean = [] { return std::make_unique<NothingDivides>(); };
        if (size > 1) {
          plant("B3").mean = [] { return std::make_unique<CountNotReduced>(); };
          plant("B7").mean = [] { return std::make_unique<MeanOfRankMeans>(); };
          plant("B14, a reducer that divides").wrap = wrapped<Averages>;
        }
        if (size > 1 && is_bucketed) {  // with a reduction that waits for the end
          const std::size_t first = mistakes.size();
          plant("B16, a bucket not reduced").wrap = wrapped<SkipsABucket>;
          plant("a bucket reduced twice").wrap = wrapped<ReducesTwice>;
          if (accumulation > 1)
            plant("B28, reduced at every micro-batch").wrap = [=](auto layout, const World&) {
              return std::make_unique<ReducesEveryMicroBatch>(std::move(layout), accumulation + 1);
            };
          for (std::size_t m = first; m < mistakes.size(); ++m) mistakes[m].second.options.overlap = false;
        }
        if (size % 2 == 0) {
          Setting& halves = plant("B15, replicas averaged");
          halves.most_replicas = 2, halves.wrap = wrapped<HalvesWhatReplicasSum>;
          const bool sums_apart = strategy.stage > 0 || strategy.share;  // else one reduction over all ranks
          if (sums_apart && size > 2) {
            Setting& apart = plant("B16, replicas not summed");
            apart.most_replicas = 2;
            apart.mesh = [](const World& world, const Grid& grid) {
              return skips_sums_along(world, grid, {"dp_replicate"});
            };
          }
        }
        for (auto& [name, setting] : mistakes) {
          ++runs;
          EXPECT_GT(worst_error(run_step(batches, setting), wanted), 1e-3)
              << name << " passed under " << strategy.name << " on " << size << " ranks, accumulation "
              << accumulation;
        }
      }
  std::printf("%d planted runs, all to be found\n", runs);
}

// Every sample given twice: another batch, the same mean.
TEST(Parity, TheDoubledBatchHasTheSameGradient) {
  for (int size : {1, 3, 4}) {
    const auto batches = toy::make_step(size, 3);
    auto doubled = batches;
    for (int rank = 0; rank < size; ++rank)
      doubled[rank].insert(doubled[rank].end(), batches[rank].begin(), batches[rank].end());
    const Outcome once = run_step(batches), twice = run_step(doubled);
    EXPECT_LT(toy::worst_error(twice.gradients[0], once.gradients[0]), 1e-12);
    EXPECT_NEAR(twice.reports[0].loss, once.reports[0].loss, 1e-13);
    const Outcome wrong = run_step(doubled, {.mean = [] { return std::make_unique<NothingDivides>(); }});
    EXPECT_GT(toy::worst_error(wrong.gradients[0], once.gradients[0]), 1e-3);
  }
}

// The samples of the batch assigned to the ranks in another order, and to another number of ranks.
TEST(Parity, DoesNotDependOnWhoHoldsASample) {
  const auto batches = toy::make_step(5, 2);
  auto rotated = batches;
  std::rotate(rotated.begin(), rotated.begin() + 2, rotated.end());
  const std::vector<MicroBatches> alone = {{toy::concatenate(batches)}};
  const auto wanted = run_step(batches).gradients[0];
  EXPECT_LT(toy::worst_error(run_step(rotated).gradients[0], wanted), 1e-12);
  EXPECT_LT(toy::worst_error(run_step(alone).gradients[0], wanted), 1e-12);
}

// Two ranks with 900 and 100 targets, losses 1 and 11 each: token mean 2, mean of means 6.
TEST(Parity, NineHundredAndOneHundredTargets) {
  const auto loss_with = [](auto mean) {
    double loss = 0;
    run_ranks(2, [&](World& world) {
      at::Tensor level = at::full({1}, world.rank == 0 ? 1.0 : 11.0, at::kDouble);
      at::Tensor weight = at::ones({1}, at::kDouble).requires_grad_(true);
      auto layout = bucketed(trainable_parameters({{"weight", weight}}), world.group, {});
      auto optimizer = sgd({.learning_rate = 0});
      Batch batch;
      const std::int64_t count = world.rank == 0 ? 900 : 100;
      batch.tokens = batch.positions = batch.targets = at::zeros({count}, at::kLong);
      batch.cu_seqlens = {0, count};
      batch.sample_ids = {world.rank};
      batch.sample_targets = {count};
      decltype(mean) own = mean;
      Step step(
          [&](const Batch& b) -> LossTerms {
            return {{"loss", (weight * level).sum() * static_cast<double>(b.num_targets())}};
          },
          *layout, own, *optimizer, {});
      const StepReport report = step({batch});
      if (world.rank == 0) loss = report.loss;
      EXPECT_DOUBLE_EQ(report.loss,
                       layout->views()[0].gradient.template item<double>());  // d(loss)/d(weight) = loss here
    });
    return loss;
  };
  EXPECT_DOUBLE_EQ(loss_with(TokenMean()), 2.0);
  EXPECT_DOUBLE_EQ(loss_with(MeanOfRankMeans()), 6.0);
}

// ---- an axis tp = 2 along which nothing is cut: the step that the mesh without it makes, bit by bit, and
// nothing counted twice ----

void expect_same_bits(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& wanted,
                      const std::string& where) {
  ASSERT_EQ(found.size(), wanted.size());
  for (std::size_t i = 0; i < found.size(); ++i)
    EXPECT_TRUE(at::equal(found[i], wanted[i])) << where << " " << i;
}

TEST(IdleAxis, ChangesNoBitOfAStep) {
  for (const Strategy& strategy : testing::strategies())
    for (const auto& [data, replicas] : {std::pair{1, 1}, {2, 1}, {3, 1}, {4, 2}}) {
      Setting setting{
          .strategy = strategy, .data = data, .most_replicas = replicas, .learning_rate = 1e-2, .steps = 3};
      const Outcome wanted = train(setting);
      setting.tp = 2;
      const Outcome found = train(setting);
      const std::string where = strategy.name + " on " + std::to_string(data);
      for (int rank = 0; rank < 2 * data; ++rank) {
        expect_same_bits(found.gradients[rank], wanted.gradients[0], where + ", gradient");
        expect_same_bits(found.weights[rank], wanted.weights[0], where + ", weights");
        const StepReport &report = found.reports[rank], &right = wanted.reports[0];
        EXPECT_EQ(report.loss, right.loss) << where;
        EXPECT_EQ(report.step_counts.targets, right.step_counts.targets) << where;
        // Copies are assigned to twice as many owners: the sum of some 300 squares in another order.
        EXPECT_NEAR(report.norm, right.norm, right.norm * 300 * 0x1p-53) << where;
        ASSERT_EQ(report.terms.size(), right.terms.size()) << where;
        EXPECT_EQ(report.terms[0].value, right.terms[0].value) << where;
      }
    }
}

TEST(IdleAxis, ClipsByTheSameNorm) {
  for (const Strategy& strategy : testing::strategies()) {
    const Outcome wanted =
        train({.strategy = strategy, .data = 2, .learning_rate = 1e-2, .max_norm = 0.01, .steps = 3});
    const Outcome found = train(
        {.strategy = strategy, .data = 2, .tp = 2, .learning_rate = 1e-2, .max_norm = 0.01, .steps = 3});
    EXPECT_LT(wanted.reports[0].clip_coefficient, 1);
    for (int rank = 0; rank < 4; ++rank)
      for (std::size_t i = 0; i < found.weights[rank].size(); ++i)
        EXPECT_TRUE(at::allclose(found.weights[rank][i], wanted.weights[0][i], 1e-12, 1e-14))
            << strategy.name;
  }
}

TEST(IdleAxis, OneRankStopsAll) {
  for (const int stops : {-1, 0, 1, 2, 3}) {
    const Outcome trained =
        train({.strategy = {.name = "zero1", .stage = 1}, .data = 2, .tp = 2, .stops = stops});
    for (const StepReport& report : trained.reports) {
      EXPECT_EQ(report.step_counts.stop_requested, stops >= 0) << stops;
      EXPECT_EQ(report.step_counts.save_requested, stops >= 0) << stops;
    }
  }
}

TEST(IdleAxis, WhatIsNotFiniteOnOneCopyStopsAll) {
  for (const int bad : {0, 1, 3}) {
    struct Breaks : Wrapped {
      using Wrapped::Wrapped;
      bool breaks = false;
      void finish_reduction() override {
        inner->finish_reduction();
        if (breaks)
          for (Bucket& bucket : buckets()) bucket.gradients.fill_(std::nan(""));
      }
    };
    const Outcome trained = train({.strategy = {.name = "bucketed"},
                                   .data = 2,
                                   .tp = 2,
                                   .wrap = [&](std::unique_ptr<DataParallel> layout, const World& world) {
                                     auto breaks = std::make_unique<Breaks>(std::move(layout));
                                     breaks->breaks = world.rank == bad;
                                     return breaks;
                                   }});
    for (const StepReport& report : trained.reports) EXPECT_FALSE(report.finite || report.updated) << bad;
  }
}

TEST(IdleAxis, CopiesThatDifferAreRefused) {
  for (const Strategy& strategy : testing::strategies()) {
    const std::string error = testing::error_of([&] {
      train({.strategy = strategy, .data = 2, .tp = 2, .change = [](toy::Model& model, const World& world) {
               at::NoGradGuard no_grad;
               if (world.rank == 1) model.twice.add_(1);
             }});
    });
    EXPECT_NE(error.find("'twice'"), std::string::npos) << strategy.name << ": " << error;
  }
}

// As when samples are assigned, or packs drawn, by the rank in the world.
TEST(IdleAxis, RanksThatShareABatchAndHaveAnotherAreRefused) {
  for (const bool fewer : {false, true}) {
    Setting setting{.strategy = {.name = "bucketed"}, .data = 1, .tp = 2};
    setting.batches = [fewer](const Mesh& mesh, int step) {
      MicroBatches own = toy::make_step(1, 2, step)[0];
      if (mesh.rank() == 1 && fewer) own.pop_back();
      if (mesh.rank() == 1 && !fewer)
        for (Batch& batch : own) batch.tokens = (batch.tokens + 1) % toy::kVocabulary;
      return own;
    };
    const std::string error = testing::error_of([&] { train(setting); });
    EXPECT_NE(error.find("ranks that compute one loss together"), std::string::npos) << error;
    EXPECT_NE(error.find(fewer ? "micro-batches on rank 1" : "other micro-batches on rank 1"),
              std::string::npos)
        << error;
  }
}

// B5 and B18a, by a mesh that takes ranks along tp for ranks with other data, and by an owner on each of
// them.
TEST(IdleAxis, PlantedB5AndB18aAreSeen) {
  struct CountsAll : Wrapped {
    Mesh wrong;
    CountsAll(std::unique_ptr<DataParallel> layout, const World& world)
        : Wrapped(std::move(layout)), wrong(world.group) {}
    const Mesh& mesh() const override { return wrong; }
  };
  struct OwnsAll : Wrapped {
    using Wrapped::Wrapped;
    void finish_reduction() override {
      inner->finish_reduction();
      for (Bucket& bucket : buckets()) bucket.owned = bucket.held;
    }
  };
  Setting setting{.strategy = {.name = "bucketed"}, .data = 2, .tp = 2};
  const Outcome right = train(setting);
  setting.wrap = [](std::unique_ptr<DataParallel> layout,
                    const World& world) -> std::unique_ptr<DataParallel> {
    return std::make_unique<CountsAll>(std::move(layout), world);
  };
  const Outcome counted = train(setting);
  EXPECT_EQ(counted.reports[0].step_counts.targets, 2 * right.reports[0].step_counts.targets);
  EXPECT_NEAR(counted.reports[0].norm, right.reports[0].norm / 2, 1e-12 * right.reports[0].norm);
  setting.wrap = wrapped<OwnsAll>;
  const Outcome owned = train(setting);
  EXPECT_NEAR(owned.reports[0].norm, 2 * right.reports[0].norm, 1e-12 * right.reports[0].norm);  // √4 copies
}

}  // namespace
}  // namespace isograd
