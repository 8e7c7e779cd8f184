// Models on several ranks train what one process and plain torch train.
#include "serve/models/spread_model.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fmt/ranges.h>

#include <chrono>

#include "base/error_testing.hpp"
#include "isograd/world.hpp"
#include "serve/models/model_engine.hpp"
#include "serve/models/plain_testing.hpp"

namespace isograd::serve {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

struct Spread {
  int ranks = 2;
  std::vector<std::string> sets;
};

class SpreadModelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(::testing::TempDir()) /
            fmt::format("spread_model_{}_{}", ::getpid(),
                        ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
    fs::create_directories(root_);
    fmt::print("seed {}\n", kSeed);
  }
  void TearDown() override { fs::remove_all(root_); }

  fs::path folder(const std::string& name) const {
    const fs::path made = root_ / name;
    fs::create_directories(made);
    return made;
  }
  static DecoderConfig shape_of(const std::string& family) {
    DecoderConfig config = config_of(family);
    if (family.ends_with("_moe"))
      config.experts.count = 4, config.experts.per_token = 2, config.experts.feed_forward = 24;
    return config;
  }
  fs::path base(const std::string& family) const {
    const fs::path directory = root_ / ("base_" + family);
    if (fs::exists(directory)) return directory;
    fs::create_directories(directory);
    DecoderLM model(shape_of(family), at::kDouble, kSeed);
    perturb(model, kSeed + 1);
    write_hf(directory, model);
    return directory;
  }
  static ModelEngineOptions options(const fs::path& base, std::shared_ptr<const Ranks> ranks = nullptr) {
    ModelEngineOptions options;
    options.bases = {{"tiny", base}};
    options.dtype = at::kDouble, options.micro_batch_tokens = 24, options.ranks = std::move(ranks);
    return options;
  }
  static RunConfig run_of(const fs::path& base, std::vector<std::string> sets) {
    sets.push_back("model.load=" + base.string());
    sets.push_back("train.dtype=float64");
    sets.push_back("parallel.bucket_bytes=8192");
    return load_config({}, sets);
  }
  // `work` with an engine on each of the ranks, which are threads.
  static void on_ranks(const fs::path& base, const Spread& spread,
                       const std::function<void(ModelEngine&, World&)>& work) {
    run_ranks(spread.ranks,
              [&](World& world) {
                const auto ranks = std::make_shared<const Ranks>(world, run_of(base, spread.sets));
                ModelEngine engine(options(base, ranks));
                work(engine, world);
              },
              {.timeout = std::chrono::seconds(20)});
  }
  static Tensors read(const fs::path& directory) {
    const bool whole = fs::exists(directory / "model.safetensors");
    Tensors found;
    for (const auto& [name, tensor] :
         read_safetensors(directory / (whole ? "model.safetensors" : "adapter_model.safetensors")))
      found[whole ? name : name.substr(std::string("base_model.model.").size())] = tensor.clone();
    return found;
  }

  fs::path root_;
};

constexpr AdamParams kParams{
    .learning_rate = 5e-3, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-6, .weight_decay = 0.1, .clip = 0.05};

// Two steps, each of three calls with uneven datums and several losses.
std::vector<std::vector<ForwardBackward>> steps_of_calls(Engine& engine, const std::string& model,
                                                         bool gspo) {
  Calls calls(kSeed + 11);
  std::vector<std::vector<ForwardBackward>> steps(2);
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
void make_calls(Engine& engine, const std::vector<std::vector<ForwardBackward>>& steps, Outcome& outcome) {
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
}

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
    EXPECT_GT(plain({.counts_first_call_twice = true}), 1e-6);  // a sum over ranks that is repeated per call

    for (std::size_t i = 0; i < kSpreads.size(); ++i) {
      const std::string where = fmt::format("rank {}: {}", rank, fmt::join(kSpreads[i].sets, " "));
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

}  // namespace
}  // namespace isograd::serve
