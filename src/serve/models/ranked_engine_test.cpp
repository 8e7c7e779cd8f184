#include "serve/models/ranked_engine.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "base/error_testing.hpp"
#include "serve/models/spread_testing.hpp"

namespace isograd::serve {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class RankedEngineTest : public SpreadServers {
 protected:
  // `work` on rank 0, whose calls the others follow.
  static void serve(const fs::path& base, const Spread& spread, const std::function<void(Engine&)>& work,
                    std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
    on_ranks(
        base, spread,
        [&](ModelEngine& engine, World& world) {
          if (world.rank > 0) return follow(engine, world);
          RankedEngine ranked(engine, world);
          work(ranked);
        },
        timeout);
  }
};

const Spread kTwo{.ranks = 2, .sets = {"parallel.strategy=zero2"}},
    kFour{.ranks = 4, .sets = {"parallel.strategy=zero3", "parallel.tp=2"}};

TEST_F(RankedEngineTest, ADroppedGradientIsGone) {
  const fs::path base = this->base("qwen3");
  Calls calls(kSeed + 3);
  const ForwardBackward first = calls.cross_entropy({9, 2, 5}), second = calls.cross_entropy({4, 12});
  const auto check = [&](Engine& engine) {
    const auto norm = [&](bool has_first, bool drops) {
      engine.create("m", request_of(4));
      if (has_first) engine.forward_backward("m", first);
      if (drops) engine.drop_gradient("m");
      engine.forward_backward("m", second);
      const double found = engine.optim_step("m", kParams).at("grad_norm");
      engine.remove("m");
      return found;
    };
    const double expected = norm(false, false);
    EXPECT_EQ(norm(true, true), expected);
    EXPECT_EQ(norm(false, true), expected);
    EXPECT_GT(std::abs(norm(true, false) - expected), 1e-6);
  };
  ModelEngine alone(options(base));
  check(alone);
  serve(base, kTwo, check);
}

// Saved between the calls of a step on some ranks, and continued on others.
TEST_F(RankedEngineTest, ModelsMoveBetweenNumbersOfRanks) {
  const fs::path base = this->base("qwen3");
  for (const std::int64_t rank : {std::int64_t{0}, std::int64_t{4}}) {
    const CreateModel request = request_of(rank, {{"isograd.normalise", "tokens"}});
    ModelEngine alone(options(base));
    alone.create("m", request);
    const auto steps = steps_of_calls(alone, "m", /*gspo=*/true);
    const auto place = [&](const std::string& name) { return folder(fmt::format("{}_{}", name, rank)); };
    const auto first_part = [&](Engine& engine, const std::string& name) {
      Outcome ignored;
      engine.create("m", request);
      make_calls(engine, {steps[0]}, ignored);
      engine.forward_backward("m", steps[1][0]);
      engine.save("m", Engine::Save::kTraining, place(name));
    };
    const auto second_part = [&](Engine& engine, const std::string& from, const std::string& name) {
      if (!from.empty()) engine.load("m", place(from), /*optimizer=*/true, {});
      engine.forward_backward("m", steps[1][1]);
      engine.forward_backward("m", steps[1][2]);
      engine.optim_step("m", kParams);
      engine.save("m", Engine::Save::kTraining, place(name));
      return read(place(name));
    };
    ModelEngine other(options(base));
    first_part(other, "alone");
    const Tensors expected = second_part(other, "", "alone_end");

    Tensors straight, resumed, grown, on_four;
    serve(base, kTwo, [&](Engine& engine) {
      first_part(engine, "two");
      straight = second_part(engine, "", "two_end");
      engine.remove("m");
      resumed = second_part(engine, "two", "two_resumed");
      engine.remove("m");
      grown = second_part(engine, "alone", "two_of_alone");
    });
    EXPECT_LT(apart(straight, expected), 1e-10);
    EXPECT_TRUE(same_bits(straight, resumed));
    EXPECT_TRUE(same_bits(read_moments(place("two_end")), read_moments(place("two_resumed"))));
    EXPECT_LT(apart(grown, expected), 1e-10);
    ModelEngine shrunk(options(base));
    EXPECT_LT(apart(second_part(shrunk, "two", "alone_of_two"), expected), 1e-10);
    serve(base, kFour, [&](Engine& engine) { on_four = second_part(engine, "two", "four_of_two"); });
    EXPECT_LT(apart(on_four, expected), 1e-10);
  }
}

TEST_F(RankedEngineTest, SamplersHaveTheWeightsOfTheirTime) {
  const fs::path base = this->base("llama");
  for (const std::int64_t rank : {std::int64_t{0}, std::int64_t{4}})
    serve(base, kFour, [&](Engine& engine) {
      engine.create("m", request_of(rank));
      Calls calls(kSeed);
      const auto step = [&] {
        engine.forward_backward("m", calls.cross_entropy({5, 9}));
        engine.optim_step("m", kParams);
      };
      const auto saved = [&](const std::string& name) { return folder(fmt::format("{}_{}", name, rank)); };
      step();
      engine.save("m", Engine::Save::kExternal, saved("then"));
      engine.open_sampler_of("s", "m");
      engine.open_sampler_of("again", "m");
      step();
      engine.save_sampler("s", saved("sampler"));
      engine.close_sampler("s");
      EXPECT_TRUE(same_bits(read(saved("sampler")), read(saved("then"))));
      Sample request;
      request.prompt = {1, 2, 3};
      request.params.max_tokens = 4;
      engine.submit("q", "again", request, 1);
      std::vector<Engine::Sampled> done;
      while (engine.sampling())
        for (Engine::Sampled& one : engine.sample_pass()) done.push_back(std::move(one));
      ASSERT_EQ(done.size(), 1U);
      EXPECT_EQ(done[0].error, "");
      EXPECT_EQ(done[0].result.sequences.at(0).tokens.size(), 4U);
    });
}

// A user's mistake is refused on all ranks alike, and an idle server's ranks wait longer than their timeout.
TEST_F(RankedEngineTest, MistakesAndPausesKeepRanksTogether) {
  const fs::path base = this->base("llama");
  const auto told = [](const std::function<void()>& work) {
    try {
      work();
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  serve(
      base, {.ranks = 2, .sets = {"parallel.cp_ring=2"}},
      [&](Engine& engine) {
        EXPECT_THAT(told([&] {
                      engine.create("m", request_of(4, {{"isograd.x", "1"}}));
                    }),
                    HasSubstr("isograd.x"));
        engine.create("m", request_of(4));
        Calls calls(kSeed);
        ForwardBackward call = calls.cross_entropy({7, 3});
        ForwardBackward bad = call;
        bad.loss = "nothing";
        EXPECT_THAT(told([&] { engine.forward_backward("m", bad); }), HasSubstr("loss_fn"));
        EXPECT_THAT(told([&] { engine.optim_step("m", kParams); }), HasSubstr("no forward_backward"));
        EXPECT_THAT(told([&] { engine.load("n", folder("empty"), true, {}); }), HasSubstr("isograd.json"));
        while (bad.loss != "gspo") bad = calls.any(engine, "m");
        EXPECT_THAT(told([&] { engine.forward_backward("m", bad); }), HasSubstr("gspo"));
        std::this_thread::sleep_for(std::chrono::milliseconds(3000));
        engine.forward_backward("m", call);
        EXPECT_EQ(engine.optim_step("m", kParams).at("step"), 1);
      },
      std::chrono::milliseconds(2000));
}

TEST_F(RankedEngineTest, ALostRankIsAnError) {
  const fs::path base = this->base("llama");
  std::string said;
  EXPECT_ANY_THROW(on_ranks(base, kTwo, [&](ModelEngine& engine, World& world) {
    if (world.rank > 0) throw std::runtime_error("planted");
    RankedEngine ranked(engine, world);
    try {
      ranked.create("m", request_of(4));
      ranked.create("n", request_of(4));
    } catch (const PeerError& error) {
      said = error.what();
      throw;
    }
  }));
  EXPECT_THAT(said, HasSubstr("planted"));
}

}  // namespace
}  // namespace isograd::serve
