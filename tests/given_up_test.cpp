// What a step that is given up leaves behind, under every strategy: a backward that was only looked at, an
// exception in mid-backward, a rank that is lost before its update.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "isograd/optimizer.hpp"
#include "isograd/world.hpp"
#include "parallel/data/strategies_testing.hpp"
#include "zero3_model.hpp"

namespace isograd {
namespace {

using zero3::Model;
using zero3::Reference;

const double kExact = 1e-10;  // E1

struct Way {
  std::string name;
  std::function<std::unique_ptr<DataParallel>(const Sharded<Model>&, const Mesh&)> make;
  bool sharded_units = false;
};

std::vector<Way> ways() {
  std::vector<Way> all;
  for (const testing::Strategy& strategy : testing::strategies())
    all.push_back({strategy.name, [strategy](const Sharded<Model>& model, const Mesh& mesh) {
                     std::vector<std::pair<std::string, at::Tensor>> named;
                     for (auto& item : model->named_parameters())
                       named.emplace_back(item.key(), item.value());
                     return strategy.make(trainable_parameters(named), mesh, {.bucket_bytes = 300});
                   }});
  for (const auto& [name, options] : std::vector<std::pair<std::string, FullyShardOptions>>{
           {"zero3", {}},
           {"zero3 once", {.reduce_once = true}},
           {"zero3 shared", {.share_parameters = true}},
           {"zero3 shared once", {.reduce_once = true, .share_parameters = true}}})
    all.push_back({name,
                   [options](const Sharded<Model>& model, const Mesh& mesh) {
                     return fully_shard(model, model->uses(), mesh, options);
                   },
                   true});
  return all;
}

Sharded<Model> make_model() {
  return std::make_shared<Model>(at::kDouble, std::vector<std::size_t>{0, 1, 2});
}

struct NeverZeroes : DataParallel {
  std::unique_ptr<DataParallel> inner;
  explicit NeverZeroes(std::unique_ptr<DataParallel> inner_) : inner(std::move(inner_)) {}
  void zero_gradients() override {}
  void begin_backward(bool last) override { inner->begin_backward(last); }
  void finish_reduction() override { inner->finish_reduction(); }
  std::vector<Bucket>& buckets() override { return inner->buckets(); }
  const Mesh& mesh() const override { return inner->mesh(); }
};

// The largest error of two steps, each after a backward that belongs to none.
double error_after_probes(const Way& way, int ranks, int replicas, bool planted) {
  std::vector<double> worst(ranks);
  run_ranks(ranks, [&](World& world) {
    const auto model = make_model();
    const Reference reference(*model);
    auto layout = way.make(model, Mesh(world, data_grid(world.size, {.dp_replicate = replicas})));
    if (planted) layout = std::make_unique<NeverZeroes>(std::move(layout));
    for (int step : {0, 1}) {
      const zero3::Batch probe = zero3::batch(world.rank, 7, 0);
      zero3::loss(model(probe.tokens, /*odd=*/true), probe, 1).backward();
      zero3::accumulate(*layout, model, world.rank, ranks, step, 2);
      const double error = zero3::worst_error(*layout, reference.gradients(ranks, step, 2));
      worst[world.rank] = std::max(worst[world.rank], error);
    }
  });
  return *std::max_element(worst.begin(), worst.end());
}

TEST(GivenUp, ABackwardBeforeTheStepLeavesNoTrace) {
  for (const Way& way : ways())
    for (const auto& [ranks, replicas] : {std::pair{1, 1}, {3, 1}, {4, 2}}) {
      EXPECT_LE(error_after_probes(way, ranks, replicas, false), kExact) << way.name << " " << ranks;
      EXPECT_GT(error_after_probes(way, ranks, replicas, true), 1e-3) << way.name << " " << ranks;
    }
}

// Every rank's backward breaks, each in another place and one of them late, so that some wait for reductions
// which others have not begun. (Units must break in the same place: zero3_rules_test.cpp.)
TEST(GivenUp, AfterAnExceptionInBackwardTheNextStepIsRight) {
  for (const Way& way : ways())
    for (const auto& [ranks, replicas] : {std::pair{2, 1}, {3, 1}, {5, 1}, {4, 2}})
      for (const int breaks_at : {0, 1})
        for (const bool finishes : {false, true}) {
          if (way.sharded_units) continue;
          run_ranks(ranks, [&](World& world) {
            const auto model = make_model();
            const Reference reference(*model);
            const auto layout =
                way.make(model, Mesh(world, data_grid(world.size, {.dp_replicate = replicas})));
            bool breaks = false;
            model->blocks[static_cast<std::size_t>(world.rank % 3)]->weight.register_hook(
                [&](const at::Tensor&) {
                  if (breaks) throw std::runtime_error("broke");
                });
            zero3::accumulate(*layout, model, world.rank, ranks, 0, 2);
            std::string error = "nothing thrown";
            try {
              zero3::at_place = [&, micro = 0](const char* place) mutable {
                if (std::string(place) != "backward") return;
                breaks = micro++ == breaks_at;
                if (breaks && world.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(10));
              };
              zero3::accumulate(*layout, model, world.rank, ranks, 1, 2);
            } catch (const std::exception& caught) {
              error = caught.what();
            }
            zero3::at_place = nullptr;
            breaks = false;
            EXPECT_EQ(error, "broke");
            if (finishes) layout->finish_reduction();
            zero3::accumulate(*layout, model, world.rank, ranks, 2, 2);
            EXPECT_LE(zero3::worst_error(*layout, reference.gradients(ranks, 2, 2)), kExact)
                << way.name << " " << ranks << " ranks, broken at " << breaks_at << ", finishes " << finishes;
          });
        }
}

// Rank 1 is lost between the reduction and its update in step 2: its shards are a step behind for ever.
// Calls of blocks that the others have made with the model after that. `alone`: ranks that do not wait.
int calls_with_half_an_update(const Way& way, bool alone) {
  constexpr int kRanks = 3;
  std::vector<int> calls(kRanks), updates(kRanks);
  std::string error;
  try {
    run_ranks(kRanks, [&](World& world) {
      const auto model = make_model();
      const auto layout = way.make(model, alone ? Mesh(Group::solo()) : Mesh(world.group));
      const auto optimizer = sgd({.learning_rate = 0.1});
      zero3::at_place = [&](const char* place) {
        if (updates[world.rank] > 2 && std::string(place) == "block") ++calls[world.rank];
      };
      for (int step = 0; step < 5; ++step) {
        zero3::accumulate(*layout, model, world.rank, kRanks, step, 2);
        if (world.rank == 1 && step == 2) throw std::runtime_error("the power is gone");
        optimizer->update(layout->buckets(), 1);
        ++updates[world.rank];
        layout->publish_parameters();
      }
    });
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  EXPECT_NE(error.find("the power is gone"), std::string::npos) << way.name << ": " << error;
  EXPECT_EQ(updates, alone ? std::vector({5, 2, 5}) : std::vector({3, 2, 3})) << way.name;
  return calls[0] + calls[1] + calls[2];
}

TEST(GivenUp, NobodyUsesUnitsThatALostRankHasNotUpdated) {
  for (const Way& way : ways()) {
    if (!way.sharded_units) continue;  // of the others: sharded_test.cpp
    EXPECT_EQ(calls_with_half_an_update(way, false), 0) << way.name;
    EXPECT_GT(calls_with_half_an_update(way, true), 0) << way.name;
  }
}

}  // namespace
}  // namespace isograd
