// Training on a mesh with an axis tp = 2 along which nothing is cut: the step that the mesh without it makes,
// bit by bit, and nothing counted twice.
#include <gtest/gtest.h>

#include <cmath>

#include "isograd/loss.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/step.hpp"
#include "parallel/data/strategies_testing.hpp"
#include "planted.hpp"
#include "toy.hpp"

namespace isograd {
namespace {

using planted::Wrapped;
using testing::Strategy;

struct Trained {
  std::vector<std::vector<at::Tensor>> gradients, weights;  // by rank, of the last step
  std::vector<StepReport> reports;
};

struct Setting {
  Strategy strategy;
  int data = 1, replicas = 1, tp = 1;
  std::function<std::unique_ptr<DataParallel>(std::unique_ptr<DataParallel>, const World&)> wrap =
      [](std::unique_ptr<DataParallel> layout, const World&) { return layout; };
  std::function<void(toy::Model&, const World&)> change = [](toy::Model&, const World&) {};
  std::function<MicroBatches(const Mesh&, int step)> batches = [](const Mesh& mesh, int step) {
    return toy::make_step(mesh.size(mesh.data()), 2, step)[static_cast<std::size_t>(mesh.place(mesh.data()))];
  };
  int stops = -1;  // the rank that asks for it
  double max_norm = 0;
  int steps = 3;
};

Trained train(const Setting& setting) {
  const int ranks = setting.data * setting.tp;
  Trained trained;
  trained.gradients.resize(ranks), trained.weights.resize(ranks), trained.reports.resize(ranks);
  run_ranks(ranks, [&](World& world) {
    const Mesh mesh(world, Grid({{"dp_replicate", setting.replicas},
                                 {"dp_shard", setting.data / setting.replicas},
                                 {"tp", setting.tp}}));
    toy::Model model;
    setting.change(model, world);
    auto layout = setting.wrap(
        setting.strategy.make(trainable_parameters(model.named()), mesh, {.bucket_bytes = 256}), world);
    TokenMean mean;
    const auto optimizer = adamw({.learning_rate = 1e-2});
    Step step(
        [&](const Batch& batch) -> LossTerms {
          return {{"cross_entropy", cross_entropy_sum(model.logits(batch), batch.targets)}};
        },
        *layout, mean, *optimizer, {.max_norm = setting.max_norm});
    for (int i = 0; i < setting.steps; ++i) {
      step.accumulate(setting.batches(mesh, i), setting.stops == world.rank);
      trained.reports[world.rank] = step.finish();
    }
    for (auto& view : layout->views()) {
      trained.gradients[world.rank].push_back(view.gradient.clone());
      trained.weights[world.rank].push_back(view.parameter.clone());
    }
  });
  return trained;
}

void expect_same_bits(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& wanted,
                      const std::string& where) {
  ASSERT_EQ(found.size(), wanted.size());
  for (std::size_t i = 0; i < found.size(); ++i)
    EXPECT_TRUE(at::equal(found[i], wanted[i])) << where << " " << i;
}

TEST(IdleAxis, ChangesNoBitOfAStep) {
  for (const Strategy& strategy : testing::strategies())
    for (const auto& [data, replicas] : {std::pair{1, 1}, {2, 1}, {3, 1}, {4, 2}}) {
      Setting setting{.strategy = strategy, .data = data, .replicas = replicas};
      const Trained wanted = train(setting);
      setting.tp = 2;
      const Trained found = train(setting);
      const std::string where = strategy.name + " on " + std::to_string(data);
      for (int rank = 0; rank < 2 * data; ++rank) {
        expect_same_bits(found.gradients[rank], wanted.gradients[0], where + ", gradient");
        expect_same_bits(found.weights[rank], wanted.weights[0], where + ", weights");
        const StepReport &report = found.reports[rank], &right = wanted.reports[0];
        EXPECT_EQ(report.loss, right.loss) << where;
        EXPECT_EQ(report.census.targets, right.census.targets) << where;
        // Copies are dealt to twice as many owners: the sum of some 300 squares in another order.
        EXPECT_NEAR(report.norm, right.norm, right.norm * 300 * 0x1p-53) << where;
        ASSERT_EQ(report.terms.size(), right.terms.size()) << where;
        EXPECT_EQ(report.terms[0].value, right.terms[0].value) << where;
      }
    }
}

TEST(IdleAxis, ClipsByTheSameNorm) {
  for (const Strategy& strategy : testing::strategies()) {
    const Trained wanted = train({.strategy = strategy, .data = 2, .max_norm = 0.01});
    const Trained found = train({.strategy = strategy, .data = 2, .tp = 2, .max_norm = 0.01});
    EXPECT_LT(wanted.reports[0].clip_coefficient, 1);
    for (int rank = 0; rank < 4; ++rank)
      for (std::size_t i = 0; i < found.weights[rank].size(); ++i)
        EXPECT_TRUE(at::allclose(found.weights[rank][i], wanted.weights[0][i], 1e-12, 1e-14))
            << strategy.name;
  }
}

TEST(IdleAxis, OneRankStopsAll) {
  for (const int stops : {-1, 0, 1, 2, 3}) {
    const Trained trained =
        train({.strategy = {.name = "zero1", .stage = 1}, .data = 2, .tp = 2, .stops = stops, .steps = 1});
    for (const StepReport& report : trained.reports)
      EXPECT_EQ(report.census.stop_requested, stops >= 0) << stops;
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
    const Trained trained = train({.strategy = {.name = "bucketed"},
                                   .data = 2,
                                   .tp = 2,
                                   .wrap =
                                       [&](std::unique_ptr<DataParallel> layout, const World& world) {
                                         auto breaks = std::make_unique<Breaks>(std::move(layout));
                                         breaks->breaks = world.rank == bad;
                                         return breaks;
                                       },
                                   .steps = 1});
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

// As when samples are dealt, or packs drawn, by the rank in the world.
TEST(IdleAxis, RanksThatShareABatchAndHaveAnotherAreRefused) {
  for (const bool fewer : {false, true}) {
    Setting setting{.strategy = {.name = "bucketed"}, .data = 1, .tp = 2, .steps = 1};
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
  Setting setting{.strategy = {.name = "bucketed"}, .data = 2, .tp = 2, .steps = 1};
  const Trained right = train(setting);
  setting.wrap = [](std::unique_ptr<DataParallel> layout,
                    const World& world) -> std::unique_ptr<DataParallel> {
    return std::make_unique<CountsAll>(std::move(layout), world);
  };
  const Trained counted = train(setting);
  EXPECT_EQ(counted.reports[0].census.targets, 2 * right.reports[0].census.targets);
  EXPECT_NEAR(counted.reports[0].norm, right.reports[0].norm / 2, 1e-12 * right.reports[0].norm);
  setting.wrap = [](std::unique_ptr<DataParallel> layout, const World&) -> std::unique_ptr<DataParallel> {
    return std::make_unique<OwnsAll>(std::move(layout));
  };
  const Trained owned = train(setting);
  EXPECT_NEAR(owned.reports[0].norm, 2 * right.reports[0].norm, 1e-12 * right.reports[0].norm);  // √4 copies
}

}  // namespace
}  // namespace isograd
