// Bytes moved by configured runs are those of the plan's formula, and what moves more is found.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include "full_tests.hpp"
#include "train/video_testing.hpp"
#include "verify/run.hpp"
#include "verify/test_problem.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

class Traffic : public testing_runs::TinyVideos {
 protected:
  static Verdict verified(const RunConfig& config, int ranks, const ChangeProblem& change = {}) {
    return verify_test::verify_on(ranks, config, {}, [&](VerifyProblem& problem, World& world) {
      problem.updates = 0;
      if (change) change(problem, world);
    });
  }
  static void expect_formula(const RunConfig& config, int ranks, const std::string& where) {
    const Verdict verdict = verified(config, ranks);
    SCOPED_TRACE(fmt::format("{}, {} ranks", where, ranks));
    EXPECT_TRUE(verdict.passed) << to_text(verdict);
    EXPECT_GT(verdict.layouts.at(0).bytes_needed, 0);
    EXPECT_EQ(verdict.layouts[0].bytes_moved, verdict.layouts[0].bytes_needed);
  }
  RunConfig sharded(const std::string& name, bool video = false) const {
    RunConfig config = video ? videos(name) : tiny(name);
    config.model.shape.layers = 3;
    config.parallel.strategy = "zero3";
    config.parallel.share_parameters = "off";
    return config;
  }
};

void with_experts(RunConfig& config) {
  config.model.shape.family = "qwen3_moe";
  config.model.shape.query_key_norm = true;
  config.model.shape.experts.count = 5;
  config.model.shape.experts.feed_forward = 12;
}

struct Option {
  const char* name;
  void (*set)(RunConfig&);
};
const Option kOptions[] = {
    {"as it is", [](RunConfig&) {}},
    {"reduce_once", [](RunConfig& c) { c.parallel.reduce_once = true; }},
    {"no reshard", [](RunConfig& c) { c.parallel.reshard_after_forward = false; }},
    {"no prefetch", [](RunConfig& c) { c.parallel.prefetch = false; }},
    {"checkpointed", [](RunConfig& c) { c.parallel.checkpoint_activations = true; }},
    {"tied", [](RunConfig& c) { c.model.shape.tied_output = true; }},
    {"one copy", [](RunConfig& c) { c.parallel.share_parameters = "on"; }},
    {"one copy, reduce_once",
     [](RunConfig& c) { c.parallel.share_parameters = "on", c.parallel.reduce_once = true; }},
    {"one micro-batch", [](RunConfig& c) { c.batch.packs_per_micro_batch = 100; }},
};

// Each option at half of the meshes by turns, at all with ISOGRAD_FULL_TESTS=1.
TEST_F(Traffic, OfStage3IsTheFormulas) {
  std::size_t place = 0;
  for (const Option& option : kOptions)
    for (const int ranks : {2, 3, 4})
      for (const int replicas : {1, 2}) {
        if (ranks % replicas != 0 || ranks == replicas) continue;
        if (!full_tests() && !takes_first(place++)) continue;
        RunConfig config = sharded("formula");
        option.set(config);
        config.parallel.replicas = replicas;
        expect_formula(config, ranks, fmt::format("{}, {} replicas", option.name, replicas));
      }
  for (const char* mode : {"all", "none"})  // on context ranks, and of videos
    for (const int ranks : {2, 4})
      for (const bool video : {false, true}) {
        if (!full_tests() && !takes_first(place++)) continue;
        RunConfig config = sharded("formula", video);
        config.parallel.cp_ring = 2;
        config.parallel.cp_fsdp_mode = mode;
        expect_formula(config, ranks, fmt::format("{}, video {}", mode, video));
      }
}

// Parameters cut along tp, experts along ep, layers along pp: each is summed and sharded along its own axes.
TEST_F(Traffic, OfModelsThatRanksHoldTogetherIsTheFormulas) {
  struct Axes {
    const char* name;
    int ranks;
    void (*set)(RunConfig&);
  };
  const Axes meshes[] = {
      {"tp 2", 2, [](RunConfig& c) { c.parallel.tp = 2; }},
      {"dp 2 x tp 2", 4, [](RunConfig& c) { c.parallel.tp = 2; }},
      {"dp 3 x tp 2", 6, [](RunConfig& c) { c.parallel.tp = 2; }},
      {"dp 2 x tp 2, whole tokens", 4,
       [](RunConfig& c) { c.parallel.tp = 2, c.parallel.sequence_parallel = false; }},
      {"replicas 2 x dp 2 x tp 2", 8, [](RunConfig& c) { c.parallel.tp = 2, c.parallel.replicas = 2; }},
      {"ring 2 x tp 2", 4, [](RunConfig& c) { c.parallel.tp = 2, c.parallel.cp_ring = 2; }},
      {"ep 2 of 4", 4, [](RunConfig& c) { with_experts(c), c.parallel.ep = 2; }},
      {"dp 2 x ep 2 x tp 2", 4, [](RunConfig& c) { with_experts(c), c.parallel.ep = 2, c.parallel.tp = 2; }},
      {"pp 3", 3, [](RunConfig& c) { c.parallel.pp = 3; }},
      {"pp 2 x dp 2", 4, [](RunConfig& c) { c.parallel.pp = 2; }},
      {"pp 2 x dp 2 x tp 2", 8, [](RunConfig& c) { c.parallel.pp = 2, c.parallel.tp = 2; }},
  };
  int turn = 0;
  for (const Axes& mesh : meshes)
    for (const char* strategy : {"naive", "bucketed", "zero1", "zero2", "zero3"})
      for (const bool tied : {false, true}) {
        if (!full_tests() && ++turn % 9 != 0) continue;
        RunConfig config = sharded("together");
        mesh.set(config);
        config.parallel.strategy = strategy;
        config.model.shape.tied_output = tied;
        if (stage_of(strategy) == 0) config.parallel.replicas = 1;
        if (stage_of(strategy) == 1 && tied) config.parallel.share_parameters = "on";
        SCOPED_TRACE(::testing::Message() << mesh.name << ", " << strategy << ", tied " << tied);
        const Verdict verdict = verified(config, mesh.ranks);
        EXPECT_TRUE(verdict.passed) << to_text(verdict);  // so that bytes are those that are claimed
        const LayoutVerdict& layout = verdict.layouts.at(0);
        // How often a stage gathers what stays whole depends on the schedule.
        const bool claimed = layout.bytes_moved > 0 && !(config.parallel.pp > 1 && stage_of(strategy) == 3);
        EXPECT_EQ(layout.bytes_needed > 0, claimed);
      }
}

// Planted: a unit that is gathered once more than it has to be. All values stay right.
TEST_F(Traffic, AUnitGatheredTwiceIsFound) {
  struct Fault {
    const char* name;
    void (*plant)(ModelUnits&);
  };
  const Fault faults[] = {
      {"root", [](ModelUnits& units) { units.root.set_reshard_after_forward(true); }},
      {"a block", [](ModelUnits& units) { units.blocks[1].set_reshard_after_forward(true); }},
  };
  std::size_t place = 0;
  for (const bool video : {false, true})
    for (const Fault& fault : faults)
      for (const int ranks : {2, 3, 4}) {
        if (!full_tests() && !takes_first(place++)) continue;
        RunConfig config = sharded("twice", video);
        config.parallel.tp = ranks == 4 ? 2 : 1;
        config.parallel.reshard_after_forward = fault.name != std::string("a block");
        const Verdict verdict = verified(config, ranks, [&](VerifyProblem& problem, World&) {
          verify_test::change_model(problem, [&fault](VerifyModel& model) { fault.plant(*model.units); });
        });
        SCOPED_TRACE(::testing::Message() << fault.name << ", " << ranks << " ranks, video " << video);
        EXPECT_FALSE(verdict.passed);
        const LayoutVerdict& layout = verdict.layouts.at(0);
        EXPECT_EQ(layout.e1.state, Grade::State::kPassed);
        EXPECT_GT(layout.bytes_moved, layout.bytes_needed);
        ASSERT_EQ(layout.findings.size(), 1u) << to_text(verdict);
        EXPECT_EQ(layout.findings[0].id, "traffic_differs");
        EXPECT_THAT(layout.findings[0].sentence, HasSubstr("right values, but"));
      }
}

// Gathered parameters that are not trained have no formula here: nothing is claimed of them.
TEST_F(Traffic, OfFrozenParametersIsNotClaimed) {
  const Verdict verdict = verified(sharded("frozen"), 2, [](VerifyProblem& problem, World&) {
    verify_test::change_model(problem, [](auto& model) { model.named[0].second.requires_grad_(false); });
  });
  EXPECT_TRUE(verdict.passed) << to_text(verdict);
  EXPECT_EQ(verdict.layouts.at(0).bytes_needed, 0);
}

}  // namespace
}  // namespace isograd
