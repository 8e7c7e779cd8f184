// Tiny whole runs of text, of models with experts and of videos on many ranks, and what makes two of them the
// same run.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "changed_config.hpp"
#include "train/task.hpp"
#include "train/video_testing.hpp"
#include "verify/run.hpp"

namespace isograd {

class AxisRuns : public testing_runs::TinyVideos {
 protected:
  // Little that a number of ranks divides: 3 layers, 6 heads over 3 key heads, 29 features, 259 tokens, 5
  // packs.
  RunConfig text(const std::string& name, const std::string& dtype = "float64") const {
    RunConfig config = tiny(name, dtype);
    auto& shape = config.model.shape;
    shape.layers = 3, shape.hidden = 24, shape.heads = 6, shape.key_value_heads = 3, shape.head_dim = 4;
    shape.feed_forward = 29;
    config.train.steps = 4;
    config.sample.tokens = 9, config.sample.temperature = 0;  // always the likeliest
    config.verify.checksums_every = 1;
    return config;
  }
  // Experts in some of the layers, so that stages have other numbers of them, and routers that prefer.
  RunConfig experts(const std::string& name, const std::string& dtype = "float64") const {
    return changed(text(name, dtype),
                   "model.family=qwen3_moe model.query_key_norm=true model.experts=5 model.layers=4 "
                   "model.experts_per_token=2 model.expert_feed_forward=12 model.normalise_experts=false "
                   "model.experts_every=2 model.initializer_range=0.3 loss.balance=0.1 loss.router_z=0.01");
  }
  RunConfig video(const std::string& name) const {
    RunConfig config = videos(name, "float64");
    auto& shape = config.model.shape;
    shape.layers = 2, shape.feed_forward = 29;
    shape.key_value_heads = DecoderConfig{}.key_value_heads;  // it has none
    shape.max_positions = DecoderConfig{}.max_positions;
    config.sample = RunConfig{}.sample;
    config.train.steps = 4;
    return config;
  }
  static RunConfig with_sigmoid_routers(const RunConfig& config) {
    return changed(
        config,
        "model.family=dots1 model.experts_every=1 model.normalise_experts=true model.expert_scale=2.5 loss.router_z=0 "
        "model.shared_expert_feed_forward=12 loss.selection_bias_rate=0.05");
  }
  // In a folder of its own.
  RunConfig on(const RunConfig& base, const std::string& set, const std::string& name) const {
    RunConfig config = changed(base, set);
    config.run.directory = (root_ / fmt::format("{}-{}", name, runs_++)).string();
    return config;
  }
  // With the checks that `isograd train` makes.
  static Run checked(const RunConfig& config, int ranks) {
    return run(config, ranks, [](World&, TrainerHooks& hooks) {
      hooks.check = [](RunningRun& running) { return check_running(running); };
    });
  }
  static double term(const StepEvent& event, const std::string& name) {
    for (const TermValue& value : event.report.terms)
      if (value.name == name) return value.value;
    return NAN;
  }
  // `found` went on after `skip` steps.
  static void expect_same(const Run& found, const Run& wanted, std::size_t skip, const std::string& where) {
    SCOPED_TRACE(where);
    ASSERT_EQ(found.steps.size() + skip, wanted.steps.size());
    for (std::size_t i = 0; i < found.steps.size(); ++i) {
      SCOPED_TRACE(i);
      const StepEvent &a = found.steps[i], &b = wanted.steps[i + skip];
      EXPECT_EQ(a.report.step_counts.targets, b.report.step_counts.targets);
      EXPECT_EQ(a.report.step_counts.tokens, b.report.step_counts.tokens);
      EXPECT_EQ(a.report.step_counts.samples, b.report.step_counts.samples);
      EXPECT_NEAR(a.report.loss, b.report.loss, 1e-9 * std::abs(b.report.loss));
      EXPECT_NEAR(a.report.norm, b.report.norm, 1e-9 * std::abs(b.report.norm));
      EXPECT_EQ(a.report.terms.size(), b.report.terms.size());
      for (const TermValue& each : b.report.terms)
        EXPECT_NEAR(term(a, each.name), each.value, 1e-9 * std::abs(each.value)) << each.name;
      ASSERT_EQ(a.expert_loads.size(), b.expert_loads.size());
      for (std::size_t layer = 0; layer < b.expert_loads.size(); ++layer) {
        EXPECT_EQ(a.expert_loads[layer].layer, b.expert_loads[layer].layer);
        EXPECT_EQ(a.expert_loads[layer].choices, b.expert_loads[layer].choices);
      }
    }
    EXPECT_NEAR(*found.outcomes[0].validation_loss, *wanted.outcomes[0].validation_loss, 1e-9);
    EXPECT_EQ(found.outcomes[0].sample, wanted.outcomes[0].sample);
    EXPECT_NEAR(found.outcomes[0].baseline, wanted.outcomes[0].baseline, 1e-13);
    EXPECT_EQ(found.evaluations.back().targets, wanted.evaluations.back().targets);
  }
  static Verdict verified(const RunConfig& config, int ranks, const std::vector<std::string>& layouts = {},
                          const ChangeProblem& change = {}) {
    Verdict verdict;
    run_ranks(ranks, [&](World& world) {
      Verdict own = verify_run(config, world, layouts, change);
      if (world.rank == 0) verdict = std::move(own);
    });
    return verdict;
  }

 private:
  mutable int runs_ = 0;
};

}  // namespace isograd
