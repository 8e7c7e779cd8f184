// Engines on ranks that are threads, for tests.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "isograd/world.hpp"
#include "serve/models/model_engine.hpp"
#include "serve/models/plain_testing.hpp"
#include "serve/models/spread_model.hpp"

namespace isograd::serve {

struct Spread {
  int ranks = 2;
  std::vector<std::string> sets;
  bool full = false;  // left out of the ordinary suite
};

class SpreadServers : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::path(::testing::TempDir()) /
            fmt::format("spread_model_{}_{}", ::getpid(),
                        ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(root_);
    std::filesystem::create_directories(root_);
    fmt::print("seed {}\n", kSeed);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  std::filesystem::path folder(const std::string& name) const {
    const std::filesystem::path made = root_ / name;
    std::filesystem::create_directories(made);
    return made;
  }
  static DecoderConfig shape_of(const std::string& family) {
    DecoderConfig config = config_of(family);
    if (family == "qwen3_moe") {
      config.query_key_norm = true;
      config.experts.count = 4, config.experts.per_token = 2, config.experts.feed_forward = 24;
    }
    return config;
  }
  std::filesystem::path base(const std::string& family) const {
    const std::filesystem::path directory = root_ / ("base_" + family);
    if (std::filesystem::exists(directory)) return directory;
    std::filesystem::create_directories(directory);
    DecoderLM model(shape_of(family), at::kDouble, kSeed);
    perturb(model, kSeed + 1);
    write_hf(directory, model);
    return directory;
  }
  static ModelEngineOptions options(const std::filesystem::path& base,
                                    std::shared_ptr<const Ranks> ranks = nullptr) {
    ModelEngineOptions options;
    options.bases = {{"tiny", base}};
    options.dtype = at::kDouble, options.micro_batch_tokens = 24, options.ranks = std::move(ranks);
    return options;
  }
  static RunConfig run_of(const std::filesystem::path& base, std::vector<std::string> sets) {
    sets.push_back("model.load=" + base.string());
    sets.push_back("train.dtype=float64");
    sets.push_back("parallel.bucket_bytes=8192");
    return load_config({}, sets);
  }
  // `work` with an engine on each of the ranks, which are threads.
  static void on_ranks(const std::filesystem::path& base, const Spread& spread,
                       const std::function<void(ModelEngine&, World&)>& work,
                       std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
    run_ranks(spread.ranks,
              [&](World& world) {
                const auto ranks = std::make_shared<const Ranks>(world, run_of(base, spread.sets));
                ModelEngine engine(options(base, ranks));
                work(engine, world);
              },
              {.timeout = timeout});
  }
  static Tensors read(const std::filesystem::path& directory) {
    const bool whole = std::filesystem::exists(directory / "model.safetensors");
    Tensors found;
    for (const auto& [name, tensor] :
         read_safetensors(directory / (whole ? "model.safetensors" : "adapter_model.safetensors")))
      found[whole ? name : name.substr(std::string("base_model.model.").size())] = tensor.clone();
    return found;
  }

  static Tensors read_moments(const std::filesystem::path& directory) {
    Tensors found;
    for (const auto& [name, tensor] : read_safetensors(directory / "optimizer.safetensors"))
      found[name] = tensor.clone();
    return found;
  }

  std::filesystem::path root_;
};

inline constexpr AdamParams kParams{
    .learning_rate = 5e-3, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-6, .weight_decay = 0.1, .clip = 0.05};

// Two steps, each of three calls with uneven datums and several losses.
inline std::vector<std::vector<ForwardBackward>> steps_of_calls(Engine& engine, const std::string& model,
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
inline void make_calls(Engine& engine, const std::vector<std::vector<ForwardBackward>>& steps,
                       Outcome& outcome) {
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

inline void expect_same(const Outcome& found, const Outcome& expected, const std::string& where) {
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

}  // namespace isograd::serve
