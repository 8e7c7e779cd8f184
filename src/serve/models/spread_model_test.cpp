// Models on several ranks train what one process and plain torch train.
#include "serve/models/spread_model.hpp"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "full_tests.hpp"
#include "serve/models/spread_testing.hpp"

namespace isograd::serve {
namespace {

namespace fs = std::filesystem;

class SpreadModelTest : public SpreadServers {};

// 3, 5 and 8 ranks have fewer datums than ranks in most calls, and never equally many each.
const std::vector<Spread> kSpreads = {
    {.sets = {"parallel.strategy=bucketed"}},
    {.sets = {"parallel.strategy=zero1"}},
    {.sets = {"parallel.strategy=zero2"}},
    {.sets = {"parallel.strategy=zero3"}},
    {.sets = {"parallel.strategy=zero3", "parallel.cp_ring=2", "parallel.cp_fsdp_mode=all"}},
    {.sets = {"parallel.strategy=zero2", "parallel.cp_ulysses=2", "parallel.cp_fsdp_mode=ulysses_only"}},
    {.sets = {"parallel.strategy=zero3", "parallel.cp_ring=2", "parallel.cp_fsdp_mode=ring_only"}},
    {.sets = {"parallel.strategy=zero1", "parallel.cp_ring=2", "parallel.cp_fsdp_mode=none"}},
    {.sets = {"parallel.tp=2"}},
    {.sets = {"parallel.pp=2"}},
    {.ranks = 4, .sets = {"parallel.strategy=zero2", "parallel.cp_ring=2"}},
    {.ranks = 3, .sets = {"parallel.strategy=bucketed"}, .full = true},
    {.ranks = 3, .sets = {"parallel.strategy=zero1"}, .full = true},
    {.ranks = 3, .sets = {"parallel.strategy=zero2"}, .full = true},
    {.ranks = 3, .sets = {"parallel.strategy=zero3"}},
    {.ranks = 5, .sets = {"parallel.strategy=bucketed"}, .full = true},
    {.ranks = 5, .sets = {"parallel.strategy=zero1"}},
    {.ranks = 5, .sets = {"parallel.strategy=zero2"}, .full = true},
    {.ranks = 5, .sets = {"parallel.strategy=zero3"}, .full = true},
    {.ranks = 8, .sets = {"parallel.strategy=bucketed"}, .full = true},
    {.ranks = 8, .sets = {"parallel.strategy=zero1"}, .full = true},
    {.ranks = 8, .sets = {"parallel.strategy=zero2"}, .full = true},
    {.ranks = 8, .sets = {"parallel.strategy=zero3"}, .full = true},
    {.ranks = 6, .sets = {"parallel.strategy=zero1", "parallel.tp=2"}, .full = true},
    {.ranks = 6, .sets = {"parallel.strategy=zero3", "parallel.cp_ring=2"}, .full = true},
    {.ranks = 6, .sets = {"parallel.strategy=zero2", "parallel.pp=2"}, .full = true},
    {.ranks = 8, .sets = {"parallel.strategy=zero2", "parallel.tp=2", "parallel.cp_ring=2"}, .full = true},
    {.ranks = 8, .sets = {"parallel.strategy=zero1", "parallel.tp=2", "parallel.pp=2"}, .full = true},
    {.ranks = 8, .sets = {"parallel.strategy=zero3", "parallel.tp=2", "parallel.replicas=2"}, .full = true},
};

TEST_F(SpreadModelTest, RanksTrainWhatOneProcessAndPlainTorchTrain) {
  for (const std::int64_t rank : {std::int64_t{0}, std::int64_t{4}}) {
    const fs::path base = this->base("qwen3");
    const CreateModel request = request_of(rank, {{"isograd.normalise", "tokens"}, {"isograd.alpha", "6"}});
    ModelEngine alone(options(base));
    alone.create("m", request);
    const auto steps = steps_of_calls(alone, "m", /*gspo=*/false);
    const auto saved = [&](ModelEngine& engine, const std::string& name) {
      const fs::path directory = folder(fmt::format("{}_{}", name, rank));
      engine.save("m", Engine::Save::kExternal, directory);
      return directory;
    };
    const Tensors first = read(saved(alone, "first"));
    Outcome expected;
    make_calls(alone, steps, expected);
    expected.weights = read(saved(alone, "alone"));
    EXPECT_GT(apart(expected.weights, first), 1e-3);

    const auto plain = [&](const Mistake& mistake) {
      Plain reference(config_of("qwen3"), base_weights(base), first, rank > 0 ? 6.0 / 4 : 0, mistake);
      for (const auto& calls : steps) {
        for (const ForwardBackward& call : calls) reference.accumulate(call);
        reference.step(kParams, "tokens");
      }
      return apart(expected.weights, reference.trained());
    };
    EXPECT_LT(plain({}), 1e-10);
    EXPECT_GT(plain({.divides_by_call = true}), 1e-6);
    EXPECT_GT(plain({.sums_ranks_again = true}), 1e-6);

    for (std::size_t i = 0; i < kSpreads.size(); ++i) {
      if (kSpreads[i].full && !full_tests()) continue;
      const std::string where =
          fmt::format("rank {}, {} ranks: {}", rank, kSpreads[i].ranks, fmt::join(kSpreads[i].sets, " "));
      const fs::path directory = folder(fmt::format("spread_{}_{}", rank, i));
      Outcome found;
      SCOPED_TRACE(where);
      ASSERT_NO_THROW(on_ranks(base, kSpreads[i], [&](ModelEngine& engine, World& world) {
        engine.create("m", request);
        Outcome own;
        make_calls(engine, steps, own);
        engine.save("m", Engine::Save::kExternal, directory);
        if (world.rank == 0) found = std::move(own);
      }));
      found.weights = read(directory);
      expect_same(found, expected, where);
    }
  }
}

// One embedding in the first and the last stage, and biases.
TEST_F(SpreadModelTest, TiedModelsOnSeveralRanks) {
  const fs::path base = this->base("tied");
  ModelEngine alone(options(base));
  alone.create("m", request_of(0));
  const auto steps = steps_of_calls(alone, "m", /*gspo=*/true);
  Outcome expected;
  make_calls(alone, steps, expected);
  alone.save("m", Engine::Save::kExternal, folder("alone"));
  expected.weights = read(folder("alone"));
  const std::vector<std::vector<std::string>> kinds = {{"parallel.tp=2"},
                                                       {"parallel.pp=2"},
                                                       {"parallel.pp=2", "parallel.schedule=zb-h1"},
                                                       {"parallel.strategy=zero3"}};
  for (std::size_t i = 0; i < kinds.size(); ++i) {
    const fs::path directory = folder(fmt::format("spread_{}", i));
    Outcome found;
    on_ranks(base, {.ranks = 2, .sets = kinds[i]}, [&](ModelEngine& engine, World& world) {
      engine.create("m", request_of(0));
      Outcome own;
      make_calls(engine, steps, own);
      engine.save("m", Engine::Save::kExternal, directory);
      if (world.rank == 0) found = std::move(own);
    });
    found.weights = read(directory);
    expect_same(found, expected, fmt::format("{}", fmt::join(kinds[i], " ")));
  }
}

// Experts on two ranks: whole weights, and adapters.
TEST_F(SpreadModelTest, ExpertsOnSeveralRanks) {
  const fs::path base = this->base("qwen3_moe");
  for (const std::int64_t rank : {std::int64_t{0}, std::int64_t{4}}) {
    CreateModel request = request_of(rank, {{"isograd.normalise", "tokens"}});
    ModelEngine alone(options(base));
    alone.create("m", request);
    const auto steps = steps_of_calls(alone, "m", /*gspo=*/true);
    Outcome expected;
    make_calls(alone, steps, expected);
    const auto place = [&](const std::string& name) { return folder(fmt::format("{}_{}", name, rank)); };
    alone.save("m", Engine::Save::kExternal, place("alone"));
    expected.weights = read(place("alone"));
    for (const std::string strategy : {"bucketed", "zero2", "zero3"}) {
      Outcome found;
      on_ranks(base, {.ranks = 2, .sets = {"parallel.ep=2", "parallel.strategy=" + strategy}},
               [&](ModelEngine& engine, World& world) {
                 engine.create("m", request);
                 Outcome own;
                 make_calls(engine, steps, own);
                 engine.save("m", Engine::Save::kExternal, place(strategy));
                 if (world.rank == 0) found = std::move(own);
               });
      found.weights = read(place(strategy));
      expect_same(found, expected, fmt::format("rank {}, {}", rank, strategy));
    }
  }
}

}  // namespace
}  // namespace isograd::serve
