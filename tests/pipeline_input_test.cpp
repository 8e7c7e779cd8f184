// A user's mistakes with a pipeline are refused by name, on every rank and without a wait;
// a rank that is lost in mid-schedule ends all; ranks and stages without micro-batches are no mistake.
#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "decoder_step.hpp"
#include "isograd/pipeline_parallel.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using error_testing::error_of;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Kind = PipelineAction::Kind;

Mesh stages_of(const World& world) { return Mesh(world, Grid({{kStageAxis, world.size}})); }

// The errors of each rank where a pipeline is made with such options, all at once.
std::vector<std::string> refused(int ranks, const std::function<PipelineOptions(int rank)>& options) {
  std::vector<std::string> told(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](World& world) {
    told[static_cast<std::size_t>(world.rank)] =
        error_of([&] { Pipeline(stages_of(world), options(world.rank)); });
  });
  return told;
}
std::vector<std::string> refused(const PipelineTable& table) {
  return refused(static_cast<int>(table.ranks.size()), [&](int) { return PipelineOptions{.table = table}; });
}

// A stage's forward and backward in two lines: `forward` gives what is differentiated.
using StageForward = std::function<at::Tensor(Pipeline& pipeline, std::size_t micro_batch)>;
void run_stages(Pipeline& pipeline, std::size_t micro_batches, const StageForward& forward) {
  std::map<std::pair<std::size_t, std::size_t>, at::Tensor> results;
  pipeline.run(micro_batches, {.forward =
                                   [&](std::size_t i, std::size_t part) {
                                     results[{i, part}] = forward(pipeline, i);
                                   },
                               .backward =
                                   [&](std::size_t i, bool, std::size_t part) {
                                     results.at({i, part}).backward();
                                   }});
}
at::Tensor right_forward(Pipeline& pipeline, std::size_t) {
  const at::Tensor x =
      pipeline.is_first() ? at::ones({7, 12}, at::kDouble).requires_grad_() : pipeline.receive({-1, 12});
  return pipeline.is_last() ? x.sum() : pipeline.pass_on(x * 2);
}

// The error of each rank where the stages compute this, 1f1b over 3 micro-batches. Those that did nothing
// wrong hear of the rank that did.
std::vector<std::string> told_by_run(int ranks, const StageForward& forward) {
  std::vector<std::string> told(static_cast<std::size_t>(ranks), "no error");
  try {
    run_ranks(ranks, [&](World& world) {
      Pipeline pipeline(stages_of(world), {});
      try {
        run_stages(pipeline, 3, forward);
      } catch (const std::exception& error) {
        told[static_cast<std::size_t>(world.rank)] = error.what();
        throw;
      }
    });
  } catch (const std::exception&) {  // said by `told`
  }
  return told;
}

TEST(PipelineInput, AsManyMicroBatchesAsTheTableHas) {
  run_ranks(2, [](World& world) {
    const auto run = [&](PipelineOptions options, std::size_t micro_batches) {
      Pipeline pipeline(stages_of(world), std::move(options));
      return error_of([&] { run_stages(pipeline, micro_batches, right_forward); });
    };
    EXPECT_EQ(run({.table = make_pipeline("gpipe", 2, 1, 4)}, 4), "no error");
    EXPECT_EQ(run({.table = make_pipeline("gpipe", 2, 1, 4)}, 3),
              "ConfigError: the schedule 'gpipe': found 3 micro-batches in the step; expected 4. Cut the "
              "step into as "
              "many, or make a table for these.");
    EXPECT_EQ(
        run({.schedule = "interleaved", .stages_of_rank = 2}, 1),
        "ConfigError: the schedule interleaved: found 1 micro-batches on 2 ranks; expected a multiple of the "
        "ranks: 2. Change the micro-batches, or take another schedule.");
    for (const char* schedule : {"1f1b", "gpipe", "one-after-another"})
      EXPECT_EQ(run({.schedule = schedule}, 1), "no error") << schedule;  // fewer than stages are enough
  });
}

TEST(PipelineInput, AtMostAsManyStagesAsLayers) {
  run_ranks(4, [](World& world) {
    const auto model = tensor::whole_model(tensor::shape(4, 2, false), at::kDouble);  // two layers
    const Mesh mesh = stages_of(world);
    const auto pipeline = std::make_shared<Pipeline>(mesh, PipelineOptions{});
    EXPECT_EQ(error_of([&] { split_decoder(*model, mesh, pipeline); }),
              "ConfigError: stages of a pipeline: found 4 for 2 layers; expected 1 to 2, a layer for each. "
              "Use fewer "
              "ranks along pp, or fewer stages on each.");
  });
}

TEST(PipelineInput, ATableThatForgetsRepeatsOrWaitsForEver) {
  PipelineTable table = make_pipeline("1f1b", 2, 1, 3);
  table.name = "mine";
  const auto told_of = [&](const std::function<void(PipelineTable&)>& change, const std::string& text) {
    PipelineTable wrong = table;
    change(wrong);
    for (const std::string& told : refused(wrong)) EXPECT_EQ(told, text);
  };
  told_of([](PipelineTable&) {}, "no error");
  told_of(
      [](PipelineTable& wrong) {
        std::erase(wrong.ranks[1], PipelineAction{Kind::kBackward, 1, 2});
      },
      "ConfigError: the schedule 'mine': found no 1B2 on rank 1; expected every micro-batch once through "
      "each "
      "stage and back. Change the table's 'ranks'.");
  told_of(
      [](PipelineTable& wrong) {
        wrong.ranks[0].push_back({Kind::kForward, 0, 1});
      },
      "ConfigError: the schedule 'mine': found 0F1 on rank 0 a second time; expected each once. Change the "
      "table's 'ranks'.");
  // Rank 0 wants the gradient of micro-batch 0 before it makes what rank 1 begins with.
  told_of(
      [](PipelineTable& wrong) {
        wrong.ranks[0] = {{Kind::kForward, 0, 0},  {Kind::kBackward, 0, 0}, {Kind::kForward, 0, 1},
                          {Kind::kBackward, 0, 1}, {Kind::kForward, 0, 2},  {Kind::kBackward, 0, 2}};
        std::swap(wrong.ranks[1][1], wrong.ranks[1][2]);
      },
      "ConfigError: the schedule 'mine': found rank 0 waits before 0B0 for 1B0 of rank 1; rank 1 waits "
      "before "
      "1F1 for 0F1 of rank 0; expected an order in which each rank's next action can be done at last. Change "
      "the table's 'ranks'.");
}

TEST(PipelineInput, EveryRankHasAStageAndTheSameTable) {
  PipelineTable table = make_pipeline("gpipe", 1, 1, 2);
  table.ranks.emplace_back();
  for (const std::string& told : refused(table))
    EXPECT_EQ(
        told,
        "ConfigError: the schedule 'gpipe': found no stage on rank 1 along pp; expected one on each rank at "
        "least. Assign the stages to all ranks, or start fewer along pp.");
  const auto told =
      refused(3, [](int rank) { return PipelineOptions{.schedule = rank == 2 ? "gpipe" : "1f1b"}; });
  for (const std::string& each : told)
    EXPECT_EQ(
        each,
        "ConfigError: the schedule of a pipeline: found another table on rank 2 along pp than on rank 0; "
        "expected the same one on all of them. Give every rank the same PipelineOptions.");
}

TEST(PipelineInput, StagesThatDoNotFitAreNamedWithTheirSizes) {
  const auto told = told_by_run(3, [](Pipeline& pipeline, std::size_t i) {
    if (pipeline.stage() < 2 || i < 1) return right_forward(pipeline, i);
    return pipeline.receive({-1, 16}).sum();
  });
  EXPECT_EQ(
      told[2],
      "ConfigError: stage 2 of a pipeline: found [7, 12] from stage 1, of micro-batch 1; expected [any, 16]. "
      "Make the two stages agree on what goes between them.");
  for (const int rank : {0, 1})
    EXPECT_THAT(
        told[static_cast<std::size_t>(rank)],
        AllOf(StartsWith("PeerError: recv from rank "), HasSubstr("rank 2 (a thread of this process) left")));
}

TEST(PipelineInput, ForwardsThatDoNotReceiveOrPassOn) {
  EXPECT_EQ(
      told_by_run(2,
                  [](Pipeline& pipeline, std::size_t i) {
                    return pipeline.is_last() ? at::ones({}, at::kDouble).requires_grad_()
                                              : right_forward(pipeline, i);
                  })[1],
      "ConfigError: stage 1 of a pipeline: found a forward of micro-batch 0 without a call of receive(); "
      "expected one, because stage 0 has passed something on. Call it in every forward of the stage, "
      "whatever the micro-batch holds.");
  EXPECT_EQ(
      told_by_run(2,
                  [](Pipeline& pipeline, std::size_t i) {
                    return pipeline.is_first() ? at::ones({}, at::kDouble).requires_grad_()
                                               : right_forward(pipeline, i);
                  })[0],
      "ConfigError: stage 0 of a pipeline: found a forward of micro-batch 0 without a call of pass_on(); "
      "expected one, because stage 1 waits. Call it in every forward of the stage, whatever the micro-batch "
      "holds.");
}

TEST(PipelineInput, ForwardsThatReceiveOrPassOnTwice) {
  const auto told = told_by_run(2, [](Pipeline& pipeline, std::size_t i) {
    const at::Tensor first = right_forward(pipeline, i);
    return pipeline.is_first() ? first + pipeline.pass_on(at::ones({7, 12}, at::kDouble)) : first;
  });
  EXPECT_EQ(told[0],
            "ConfigError: stage 0 of a pipeline: found a second call of pass_on() in the forward of "
            "micro-batch 0; expected one. Pass one tensor on from stage to stage, and take it once.");
  EXPECT_THAT(told_by_run(2,
                          [](Pipeline& pipeline, std::size_t i) {
                            return right_forward(pipeline, i) +
                                   (pipeline.is_last() ? pipeline.receive().sum() : at::zeros({}));
                          })[1],
              HasSubstr("a second call of receive() in the forward of micro-batch 0"));
}

// One rank alone gives a step up: the others hear of it at the latest when its next step's messages come.
TEST(PipelineInput, AStepGivenUpByOneRankAloneIsSeen) {
  std::vector<std::string> told(2, "no error");
  try {
    run_ranks(2, [&](World& world) {
      Pipeline pipeline(stages_of(world), {});
      const bool first = world.rank == 0;
      try {
        if (first)
          EXPECT_EQ(error_of<std::runtime_error>([&] {
                      run_stages(pipeline, 3, [](Pipeline& own, std::size_t i) {
                        if (i == 1) throw std::runtime_error("given up");
                        return right_forward(own, i);
                      });
                    }),
                    "given up");
        run_stages(pipeline, 3, right_forward);
      } catch (const std::exception& error) {
        told[static_cast<std::size_t>(world.rank)] = error.what();
        throw;
      }
    });
  } catch (const std::exception&) {  // said by `told`
  }
  EXPECT_EQ(
      told[1],
      "PeerError: stage 1 of a pipeline: found a message of a later step, from rank 0 along pp; expected all "
      "ranks in the same step. Give a step up on all ranks in the same micro-batch, or on none.");
}

// ---- a rank that is lost ----

constexpr int kRanks = 3;
constexpr const char *kFolder = "ISOGRAD_TEST_LOST_FOLDER", *kVictim = "ISOGRAD_TEST_LOST_VICTIM";

// A rank is killed in the forward of its third micro-batch of six, or leaves what it is told.
[[noreturn]] void be_a_rank(const fs::path& folder, int victim) {
  World world = join({.timeout = std::chrono::minutes(1)});
  std::string told = "no error";
  try {
    Pipeline pipeline(stages_of(world), {});
    run_stages(pipeline, 6, [&](Pipeline& own, std::size_t i) {
      if (world.rank == victim && i == 2) ::kill(::getpid(), SIGKILL);
      return right_forward(own, i);
    });
  } catch (const std::exception& error) {
    told = error.what();
  }
  std::ofstream(folder / std::to_string(world.rank)) << told;
  ::_exit(0);
}

// Each run of this test starts the test again as its ranks.
TEST(PipelineInput, ARankThatIsLostInMidScheduleEndsAllByItsName) {
  if (const char* folder = std::getenv(kFolder)) be_a_rank(folder, std::atoi(std::getenv(kVictim)));
  const fs::path folder = fs::temp_directory_path() / fmt::format("isograd-pipeline-lost-{}", ::getpid());
  const std::string program = fs::read_symlink("/proc/self/exe").string();
  for (int victim = 0; victim < kRanks; ++victim) {
    fs::remove_all(folder);
    fs::create_directories(folder);
    const auto begin = std::chrono::steady_clock::now();
    const int status =
        launch_ranks({"env", fmt::format("{}={}", kFolder, folder.string()),
                      fmt::format("{}={}", kVictim, victim), program, "--gtest_brief=1",
                      "--gtest_filter=PipelineInput.ARankThatIsLostInMidScheduleEndsAllByItsName"},
                     {.ranks = kRanks});
    EXPECT_EQ(status, 3);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30))
        << "long before the timeout";
    for (int rank = 0; rank < kRanks; ++rank) {
      std::ostringstream told;
      told << std::ifstream(folder / std::to_string(rank)).rdbuf();
      if (rank == victim)
        EXPECT_EQ(told.str(), "") << "it should be gone";
      else
        EXPECT_THAT(told.str(), AllOf(StartsWith("PeerError: "),
                                      ContainsRegex(fmt::format("rank {} .host .*has ended", victim))));
    }
  }
  fs::remove_all(folder);
}

// Units of ZeRO-3 compute their weights' gradients with the others.
TEST(PipelineInput, HalvesOfABackwardAreNotForUnitsOfZero3) {
  run_ranks(2, [](World& world) {
    const auto model = tensor::whole_model(tensor::shape(4, 2, false), at::kDouble);
    const ModelUnits units = model_units(*model, RunConfig{});
    const auto layout =
        fully_shard(units.root, model->named(), units.blocks, Mesh(world, Grid({{"dp_shard", 2}})), {});
    const auto optimizer = sgd({});
    TokenMean mean;
    const ForwardLossTerms forward = [&](const Batch& batch) -> LossTerms {
      return {{"cross_entropy", cross_entropy_sum(model->logits(batch), batch.targets)}};
    };
    Step step(inside(units.root, forward), *layout, mean, *optimizer, {.schedule = [](MicroBatchWork& work) {
                work.forward(0);
                work.backward_inputs(0);
              }});
    EXPECT_THAT(error_of([&] { step(tensor::step_of(world.rank, 2, model->config().vocabulary)); }),
                HasSubstr("parameters of ZeRO-3"));
  });
}

}  // namespace
}  // namespace isograd
