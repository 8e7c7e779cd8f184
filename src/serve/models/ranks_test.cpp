// Models on several ranks train what one process and plain torch train; the first rank's calls are made by
// all.
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <thread>

#include "full_tests.hpp"
#include "isograd/world.hpp"
#include "layout/cost/meter.hpp"
#include "serve/models/plain_testing.hpp"
#include "serve/models/ranked_engine.hpp"
#include "serve/models/trained_model.hpp"

namespace isograd::serve {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using Steps = std::vector<std::vector<ForwardBackward>>;

struct Spread {
  int ranks = 2;
  std::vector<std::string> sets;
  bool full = false;       // left out of the ordinary suite
  bool loses_one = false;  // all ranks but the first end before they follow
};

inline constexpr AdamParams kParams{
    .learning_rate = 5e-3, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-6, .weight_decay = 0.1, .clip = 0.05};

// Two steps, each of three calls with uneven datums and several losses.
Steps steps_of_calls(Engine& engine, const std::string& model, bool gspo) {
  Calls calls(kSeed + 11);
  Steps steps(2);
  steps[0] = {calls.cross_entropy({9, 2, 14, 1, 5}), calls.cross_entropy({3}), calls.cross_entropy({12, 11})};
  while (steps[1].size() < 3) {
    ForwardBackward call = calls.any(engine, model);
    if (call.loss != "gspo" || gspo) steps[1].push_back(std::move(call));
  }
  return steps;
}

struct Outcome {
  Tensors weights;
  std::vector<double> losses, norms;
  std::vector<std::vector<float>> log_probabilities;
};

void expect_same(const Outcome& found, const Outcome& expected, const std::string& where) {
  EXPECT_LT(apart(found.weights, expected.weights), 1e-10) << where;
  ASSERT_EQ(found.losses.size(), expected.losses.size()) << where;
  for (std::size_t i = 0; i < found.losses.size(); ++i)
    EXPECT_NEAR(found.losses[i], expected.losses[i], 1e-10 * (1 + std::abs(expected.losses[i]))) << where;
  for (std::size_t i = 0; i < found.norms.size(); ++i)
    EXPECT_NEAR(found.norms[i], expected.norms[i], 1e-10 * expected.norms[i]) << where;
  ASSERT_EQ(found.log_probabilities.size(), expected.log_probabilities.size()) << where;
  for (std::size_t i = 0; i < found.log_probabilities.size(); ++i)
    for (std::size_t j = 0; j < found.log_probabilities[i].size(); ++j)
      EXPECT_NEAR(found.log_probabilities[i].at(j), expected.log_probabilities[i].at(j), 3e-6) << where;
}

class RanksTest : public EngineTest {
 protected:
  // `work` on the first of ranks that are threads, whose calls the others follow.
  // `kept`: the bytes of each rank's tensors afterwards, memory between ranks by parts.
  static void serve(const fs::path& base, const Spread& spread, const std::function<void(Engine&)>& work,
                    std::chrono::milliseconds timeout = std::chrono::seconds(20),
                    std::vector<std::int64_t>* kept = nullptr) {
    std::vector<std::string> sets = spread.sets;
    sets.insert(sets.end(),
                {"model.load=" + base.string(), "train.dtype=float64", "parallel.bucket_bytes=8192"});
    run_ranks(spread.ranks,
              [&](World& world) {
                std::optional<MemoryMeter> meter;
                if (kept) meter.emplace();
                const auto measure = [&] {
                  if (kept) kept->at(static_cast<std::size_t>(world.rank)) = meter->alive() + meter->shared();
                };
                ModelEngineOptions options = EngineTest::options(base);
                options.ranks = std::make_shared<const Ranks>(world, load_config({}, sets));
                if (world.rank == 0) {
                  RankedEngine engine(options);
                  work(engine);
                  return measure();
                }
                ModelEngine engine(options);
                if (spread.loses_one) throw std::runtime_error("planted");
                follow(engine, world);
                measure();
              },
              {.timeout = timeout});
  }
  void make_calls(Engine& engine, const Steps& steps, Outcome& outcome) {
    for (const auto& calls : steps) {
      for (const ForwardBackward& call : calls) {
        const ForwardBackwardResult found = engine.forward_backward("m", call);
        outcome.losses.push_back(found.metrics.at("loss:sum"));
        for (const Array& array : found.log_probabilities) outcome.log_probabilities.push_back(array.numbers);
      }
      ForwardBackward asked = calls[0];
      asked.forward_only = true;  // adds nothing
      outcome.losses.push_back(engine.forward_backward("m", asked).metrics.at("loss:sum"));
      outcome.norms.push_back(engine.optim_step("m", kParams).at("grad_norm"));
    }
    outcome.weights = weights(engine, "m");
  }
  // The calls on the ranks of each spread have the outcome that one process has.
  void expect_same_everywhere(const fs::path& base, const CreateModel& request, const Steps& steps,
                              const Outcome& expected, const std::vector<Spread>& spreads) {
    for (const Spread& spread : spreads) {
      if (spread.full && !full_tests()) continue;
      const std::string where =
          fmt::format("rank {}, {} ranks: {}", request.lora.rank, spread.ranks, fmt::join(spread.sets, " "));
      SCOPED_TRACE(where);
      Outcome found;
      ASSERT_NO_THROW(serve(base, spread, [&](Engine& engine) {
        engine.create("m", request);
        make_calls(engine, steps, found);
      }));
      expect_same(found, expected, where);
    }
  }
};

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

const std::vector<Spread> kExperts = {{.sets = {"parallel.ep=2", "parallel.strategy=bucketed"}},
                                      {.sets = {"parallel.ep=2", "parallel.strategy=zero2"}},
                                      {.sets = {"parallel.ep=2", "parallel.strategy=zero3"}}};

TEST_F(RanksTest, RanksTrainWhatOneProcessAndPlainTorchTrain) {
  for (const std::int64_t rank : {std::int64_t{0}, std::int64_t{4}}) {
    const fs::path base = this->base("qwen3");
    const CreateModel request = request_of(rank, {{"isograd.normalise", "tokens"}, {"isograd.alpha", "6"}});
    ModelEngine alone(options(base));
    alone.create("m", request);
    const Steps steps = steps_of_calls(alone, "m", /*gspo=*/false);
    const Tensors first = weights(alone, "m");
    Outcome expected;
    make_calls(alone, steps, expected);
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
    expect_same_everywhere(base, request, steps, expected, kSpreads);
  }
}

// "tied": one embedding in the first and the last stage, and biases.
TEST_F(RanksTest, TiedModelsAndExpertsOnSeveralRanks) {
  const std::tuple<const char*, std::int64_t, std::vector<Spread>> cases[] = {
      {"tied",
       0,
       {{.sets = {"parallel.tp=2"}},
        {.sets = {"parallel.pp=2"}},
        {.sets = {"parallel.pp=2", "parallel.schedule=zb-h1"}},
        {.sets = {"parallel.strategy=zero3"}}}},
      {"qwen3_moe", 0, kExperts},
      {"qwen3_moe", 4, kExperts}};
  for (const auto& [family, rank, spreads] : cases) {
    const fs::path base = this->base(family);
    const CreateModel request = request_of(rank, {{"isograd.normalise", "tokens"}});
    ModelEngine alone(options(base));
    alone.create("m", request);
    const Steps steps = steps_of_calls(alone, "m", /*gspo=*/true);
    Outcome expected;
    make_calls(alone, steps, expected);
    expect_same_everywhere(base, request, steps, expected, spreads);
  }
}

const Spread kTwo{.ranks = 2, .sets = {"parallel.strategy=zero2"}},
    kFour{.ranks = 4, .sets = {"parallel.strategy=zero3", "parallel.tp=2"}};

TEST_F(RanksTest, ADroppedGradientIsGone) {
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
TEST_F(RanksTest, ModelsMoveBetweenNumbersOfRanks) {
  const fs::path base = this->base("qwen3");
  for (const std::int64_t rank : {std::int64_t{0}, std::int64_t{4}}) {
    const CreateModel request = request_of(rank, {{"isograd.normalise", "tokens"}});
    ModelEngine alone(options(base));
    alone.create("m", request);
    const Steps steps = steps_of_calls(alone, "m", /*gspo=*/true);
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
      return weights_in(place(name));
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
    EXPECT_TRUE(same_bits(read(place("two_end") / "optimizer.safetensors"),
                          read(place("two_resumed") / "optimizer.safetensors")));
    EXPECT_LT(apart(grown, expected), 1e-10);
    ModelEngine shrunk(options(base));
    EXPECT_LT(apart(second_part(shrunk, "two", "alone_of_two"), expected), 1e-10);
    serve(base, kFour, [&](Engine& engine) { on_four = second_part(engine, "two", "four_of_two"); });
    EXPECT_LT(apart(on_four, expected), 1e-10);
  }
}

TEST_F(RanksTest, SamplersHaveTheWeightsOfTheirTime) {
  const fs::path base = this->base("llama");
  for (const std::int64_t rank : {std::int64_t{0}, std::int64_t{4}})
    serve(base, kFour, [&](Engine& engine) {
      engine.create("m", request_of(rank));
      Calls calls(kSeed);
      const auto step = [&] {
        engine.forward_backward("m", calls.cross_entropy({5, 9}));
        engine.optim_step("m", kParams);
      };
      step();
      const Tensors then = weights(engine, "m");
      engine.open_sampler_of("s", "m");
      engine.open_sampler_of("again", "m");
      step();
      const fs::path saved = folder(fmt::format("sampler_{}", rank));
      engine.saving_sampler("s")(saved);
      engine.close_sampler("s");
      EXPECT_TRUE(same_bits(weights_in(saved), then));
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
TEST_F(RanksTest, MistakesAndPausesKeepRanksTogether) {
  const fs::path base = this->base("llama");
  serve(
      base, {.ranks = 2, .sets = {"parallel.cp_ring=2"}},
      [&](Engine& engine) {
        EXPECT_THAT(message_of([&] {
                      engine.create("m", request_of(4, {{"isograd.x", "1"}}));
                    }),
                    HasSubstr("isograd.x"));
        engine.create("m", request_of(4));
        Calls calls(kSeed);
        ForwardBackward call = calls.cross_entropy({7, 3});
        ForwardBackward bad = call;
        bad.loss = "nothing";
        EXPECT_THAT(message_of([&] { engine.forward_backward("m", bad); }), HasSubstr("loss_fn"));
        EXPECT_THAT(message_of([&] { engine.optim_step("m", kParams); }), HasSubstr("no forward_backward"));
        EXPECT_THAT(message_of([&] { engine.load("n", folder("empty"), true, {}); }),
                    HasSubstr("isograd.json"));
        while (bad.loss != "gspo") bad = calls.any(engine, "m");
        EXPECT_THAT(message_of([&] { engine.forward_backward("m", bad); }), HasSubstr("gspo"));
        std::this_thread::sleep_for(std::chrono::milliseconds(3000));
        engine.forward_backward("m", call);
        EXPECT_EQ(engine.optim_step("m", kParams).at("step"), 1);
      },
      std::chrono::milliseconds(2000));
}

// Under ZeRO-3 ranks of one host have one copy of the base between them, apart from the one that rank 0
// samples with: of an adapter's training each rank keeps Ψ p / N, and of the adapter (p + g + sums + m + v) /
// N.
TEST_F(RanksTest, RanksHaveOneCopyOfTheBaseBetweenThem) {
  MemoryMeter::install();
  const auto shape_of = [](std::int64_t layers) {
    DecoderConfig shape = small_config("qwen3");
    shape.vocabulary = 509, shape.hidden = 128, shape.layers = layers, shape.feed_forward = 352;
    return shape;
  };
  const auto elements = [](const NamedTensors& all) {
    double sum = 0;
    for (const auto& [name, tensor] : all) sum += static_cast<double>(tensor.numel());
    return sum;
  };
  constexpr double kBytes = sizeof(double);
  // By rank: what more layers take, so that the memory of groups does not count.
  const auto difference = [&](int ranks, const std::vector<std::string>& sets) {
    std::vector<std::int64_t> kept[2];
    for (const bool large : {false, true}) {
      const fs::path base = folder(fmt::format("base_{}", large));
      DecoderLM model(shape_of(large ? 8 : 2), at::kDouble, kSeed);
      write_hf(base, model);
      kept[large].resize(static_cast<std::size_t>(ranks));
      serve(
          base, {.ranks = ranks, .sets = sets},
          [&](Engine& engine) {
            engine.create("m", request_of(4));
            engine.forward_backward("m", Calls(kSeed).cross_entropy({9, 14}));
            engine.optim_step("m", kParams);
          },
          std::chrono::seconds(60), &kept[large]);
    }
    std::vector<double> bytes;
    for (std::size_t i = 0; i < kept[0].size(); ++i)
      bytes.push_back(static_cast<double>(kept[1][i] - kept[0][i]));
    return bytes;
  };
  const auto more = [&](const std::function<double(const DecoderConfig&)>& of) {
    return kBytes * (of(shape_of(8)) - of(shape_of(2)));
  };
  const double base = more([&](const DecoderConfig& shape) {
    return elements(DecoderLM::without_values(shape, at::kDouble)->named());
  });
  const double adapter = more([&](const DecoderConfig& shape) {
    return elements(LoraAdapter::without_values(shape, {.rank = 4}, at::kDouble)->named());
  });
  constexpr double kOff = 0.03;  // as in tests/memory_test.cpp: padding
  for (const int ranks : {2, 4}) {
    const double expected = (base + 5 * adapter) / ranks;
    const auto off = [&](const std::vector<double>& found) {
      double most = 0;
      for (std::size_t i = 0; i < found.size(); ++i)
        most = std::max(most, std::abs(found[i] - (i == 0 ? base : 0) - expected) / expected);
      return most;
    };
    const std::vector<double> shared = difference(ranks, {"parallel.strategy=zero3"}),
                              apart = difference(
                                  ranks, {"parallel.strategy=bucketed", "parallel.share_parameters=off"});
    fmt::print("{} ranks: {:.0f} of {:.0f}; each with a base of its own {:.0f}\n", ranks,
               fmt::join(shared, " "), expected, fmt::join(apart, " "));
    EXPECT_LT(off(shared), kOff);
    EXPECT_GT(off(apart), 10 * kOff);
  }
}

TEST_F(RanksTest, ALostRankIsAnError) {
  const fs::path base = this->base("llama");
  std::string said;
  EXPECT_ANY_THROW(serve(base, {.sets = kTwo.sets, .loses_one = true}, [&](Engine& engine) {
    try {
      engine.create("m", request_of(4));
      engine.create("n", request_of(4));
    } catch (const PeerError& error) {
      said = error.what();
      throw;
    }
  }));
  EXPECT_THAT(said, HasSubstr("planted"));
}

}  // namespace
}  // namespace isograd::serve
