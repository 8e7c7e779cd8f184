// Bytes moved by configured runs are those of the plan's formula, and what moves more is found.
#include <gmock/gmock.h>

#include "train/video_testing.hpp"
#include "verify/run.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

class Traffic : public testing_runs::TinyVideos {
 protected:
  static Verdict verified(const RunConfig& config, int ranks, const ChangeProblem& change = {}) {
    Verdict verdict;
    run_ranks(ranks,
              [&](World& world) {
                Verdict own = verify_run(config, world, {}, [&](VerifyProblem& problem, World& here) {
                  problem.updates = 0;
                  if (change) change(problem, here);
                });
                if (world.rank == 0) verdict = std::move(own);
              },
              {.timeout = std::chrono::seconds(60)});
    return verdict;
  }
  RunConfig sharded(const std::string& name) const {
    RunConfig config = tiny(name);
    config.model.shape.layers = 3;
    config.parallel.strategy = "zero3";
    config.parallel.share_parameters = "off";
    return config;
  }
};

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
     [](RunConfig& c) {
       c.parallel.share_parameters = "on";
       c.parallel.reduce_once = true;
     }},
    {"one micro-batch", [](RunConfig& c) { c.batch.packs_per_micro_batch = 100; }},
};

TEST_F(Traffic, OfStage3IsTheFormulas) {
  for (const Option& option : kOptions)
    for (const int ranks : {2, 3, 4})
      for (const int replicas : {1, 2}) {
        if (ranks % replicas != 0 || ranks == replicas) continue;
        RunConfig config = sharded("formula");
        option.set(config);
        config.parallel.replicas = replicas;
        const Verdict verdict = verified(config, ranks);
        SCOPED_TRACE(::testing::Message()
                     << option.name << ", " << ranks << " ranks, " << replicas << " replicas");
        EXPECT_TRUE(verdict.passed) << to_text(verdict);
        EXPECT_GT(verdict.layouts.at(0).bytes_needed, 0);
        EXPECT_EQ(verdict.layouts[0].bytes_moved, verdict.layouts[0].bytes_needed);
      }
}

TEST_F(Traffic, OfStage3OnContextRanksAndOfVideosIsTheFormulas) {
  for (const char* mode : {"all", "none"})
    for (const int ranks : {2, 4})
      for (const bool video : {false, true}) {
        RunConfig config = video ? videos("formula") : sharded("formula");
        config.parallel.strategy = "zero3";
        config.parallel.share_parameters = "off";
        config.parallel.cp_ring = 2;
        config.parallel.cp_fsdp_mode = mode;
        const Verdict verdict = verified(config, ranks);
        SCOPED_TRACE(::testing::Message() << mode << ", " << ranks << " ranks, video " << video);
        EXPECT_TRUE(verdict.passed) << to_text(verdict);
        EXPECT_GT(verdict.layouts.at(0).bytes_needed, 0);
        EXPECT_EQ(verdict.layouts[0].bytes_moved, verdict.layouts[0].bytes_needed);
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
  for (const bool video : {false, true})
    for (const Fault& fault : faults)
      for (const int ranks : {2, 3}) {
        RunConfig config = video ? videos("twice") : sharded("twice");
        config.model.shape.layers = 3;
        config.parallel.strategy = "zero3";
        config.parallel.share_parameters = "off";
        config.parallel.reshard_after_forward = fault.name != std::string("a block");
        const Verdict verdict = verified(config, ranks, [&](VerifyProblem& problem, World&) {
          problem.make_model = [make = problem.make_model, &fault](at::ScalarType dtype) {
            VerifyModel model = make(dtype);
            fault.plant(*model.units);
            return model;
          };
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

// What is gathered but not trained has no formula here: nothing is claimed of it.
TEST_F(Traffic, OfFrozenParametersIsNotClaimed) {
  const Verdict verdict = verified(sharded("frozen"), 2, [](VerifyProblem& problem, World&) {
    problem.make_model = [make = problem.make_model](at::ScalarType dtype) {
      VerifyModel model = make(dtype);
      model.named[0].second.requires_grad_(false);
      return model;
    };
  });
  EXPECT_TRUE(verdict.passed) << to_text(verdict);
  EXPECT_EQ(verdict.layouts.at(0).bytes_needed, 0);
}

}  // namespace
}  // namespace isograd
