// Written plans read back: the layout's numbers, the bytes of `isograd layout`, and what a model's file says.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "base/error_testing.hpp"
#include "model/decoder_testing.hpp"
#include "model/hf.hpp"
#include "plan/inputs.hpp"
#include "plan/memory.hpp"
#include "plan/search.hpp"
#include "train/build.hpp"
#include "train/rank_layout.hpp"

namespace isograd::planner {
namespace {

namespace fs = std::filesystem;
using error_testing::error_of;
using ::testing::HasSubstr;

Plan plan_of(std::int64_t devices, std::int64_t samples, bool experts) {
  Plan plan{.model = {.layers = 6,
                      .hidden = 96,
                      .heads = 6,
                      .key_value_heads = 2,
                      .head_dim = 8,
                      .feed_forward = 96,
                      .vocabulary = 258},
            .cluster = {.name = "tested", .devices = devices, .per_host = devices, .host_memory = true},
            .work = {.tokens = static_cast<double>(512 * samples), .sequence = 512}};
  if (experts)
    plan.model.family = "qwen3_moe", plan.model.query_key_norm = true,
    plan.model.experts = {.count = 4, .per_token = 2, .feed_forward = 32, .dense_layers = {0, 2, 4}};
  return plan;
}

RunConfig written(const Plan& plan, const Candidate& candidate) {
  return parse_config(to_toml(plan, {.candidate = candidate}), "written");
}

// All that the rules and formulas read of a layout.
auto facts(const LayoutNumbers& of) {
  return std::tuple(of.ranks, of.replicas, of.cp_ring, of.cp_ulysses, of.tp, of.ep, of.pp, of.stages_per_rank,
                    of.stage, of.asked_to_share, of.sequence_parallel, of.reduce_once, of.schedule,
                    of.samples, of.samples_at_a_time, of.shard_ranks(), of.micro_batches());
}

TEST(PlanWritten, IsTheLayoutOfEveryCandidate) {
  int seen = 0;
  for (const Plan& plan : {plan_of(4, 6, true), plan_of(6, 12, false), plan_of(1, 6, false)}) {
    const Calibration nothing;
    const Problem problem{
        .model = plan.model, .cluster = plan.cluster, .calibration = nothing, .work = plan.work};
    const Space space = space_of(problem, plan.cluster.devices);
    Pipelines pipelines;
    MemoryModel memory(problem, pipelines);
    for_each_mesh(problem, space, [&](const Candidate& mesh) {
      for_each_candidate(problem, space, mesh, [&](const Candidate& candidate) {
        if (seen++ % 7 != 0) return true;
        const RunConfig config = written(plan, candidate);
        LayoutNumbers asked = numbers_of(candidate, plan.work);
        EXPECT_EQ(facts(layout_numbers(config, candidate.ranks)), facts(asked)) << to_text(candidate);
        asked.samples_at_a_time += 1;  // the comparison can fail
        EXPECT_NE(facts(layout_numbers(config, candidate.ranks)), facts(asked));
        EXPECT_EQ(config.parallel.checkpoint_activations, candidate.checkpoint);
        EXPECT_EQ(config.parallel.reshard_after_forward, candidate.reshard);
        EXPECT_EQ(configured_shape(config).experts.dense_layers, plan.model.experts.dense_layers);
        if (seen % 4 == 0) {  // what `isograd layout` says of the file is what the plan counts
          std::int64_t most = 0;
          for (int rank = 0; rank < candidate.pp; ++rank)
            most = std::max(
                most,
                lay_out(config, candidate.ranks, candidate.ranks / candidate.pp * rank).layout.total.total());
          EXPECT_LE(memory.of(candidate).kept(), static_cast<double>(most)) << to_text(candidate);
        }
        return true;
      });
    });
  }
  EXPECT_GT(seen, 7 * 500);
}

TEST(PlanWritten, RefusesWhatIsogradDoesNotTrain) {
  const auto refused = [](const Plan& plan, const Candidate& candidate = {}) {
    return error_of<ConfigError>([&] { (void)to_toml(plan, {.candidate = candidate}); });
  };
  Plan plan = plan_of(1, 6, false);
  EXPECT_NO_THROW((void)to_toml(plan, {}));
  plan.work.precision = Precision::kFloat8;
  EXPECT_THAT(refused(plan), HasSubstr("train.dtype"));
  plan = plan_of(1, 6, false), plan.model.gated = false;
  EXPECT_THAT(refused(plan), HasSubstr("SwiGLU"));
  plan = plan_of(1, 6, true), plan.model.experts.dense_layers = {0, 1, 4};
  EXPECT_THAT(refused(plan), HasSubstr("model.experts_every"));
  plan = plan_of(1, 6, false), plan.work.states = 3;
  EXPECT_THAT(refused(plan), HasSubstr("AdamW"));
  plan = plan_of(2, 6, false);  // what `train` refuses
  EXPECT_THAT(refused(plan, {.ranks = 8, .tp = 8}), HasSubstr("parallel.tp"));
}

TEST(PlanWritten, SaysWhereItRuns) {
  Plan plan = plan_of(16, 32, false);
  plan.cluster.per_host = 8, plan.cluster.host_memory = false;
  const Candidate over_hosts{.ranks = 16, .replicas = 16}, on_one{.ranks = 8, .replicas = 8};
  EXPECT_EQ(written(plan, over_hosts).parallel.backend, "shm+mpi");
  EXPECT_EQ(written(plan, over_hosts).parallel.device, "cuda");
  EXPECT_EQ(written(plan, on_one).parallel.backend, "auto");
  plan.cluster.host_memory = true;
  EXPECT_EQ(written(plan, on_one).parallel.device, "cpu");
  plan.work.sequence = 4096, plan.work.tokens = 4096 * 32;  // more than the usual positions
  EXPECT_EQ(written(plan, on_one).model.shape.max_positions, 4096);
  for (const auto& [states, kind, momentum] :
       {std::tuple{2, "adamw", 0.0}, {1, "sgd", 0.9}, {0, "sgd", 0.0}}) {
    plan.work.states = states;
    EXPECT_EQ(written(plan, on_one).optimizer.kind, kind);
    EXPECT_EQ(written(plan, on_one).optimizer.momentum, momentum);
    EXPECT_EQ(work_of(written(plan, on_one)).states, states);
  }
}

class PlanWrittenOf : public ::testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_); }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path folder_ = fs::temp_directory_path() / ("isograd_written_" + std::to_string(::getpid()));
};

TEST_F(PlanWrittenOf, AFileKeepsItsOtherKeys) {
  const fs::path file = folder_ / "run.toml";
  std::ofstream(file)
      << "[run]\nseed = 7\n[data]\ntext = [\"here\"]\npack_length = 64\n[batch]\npacks_per_step = 12\n"
         "max_tokens_per_rank = 64\n[model]\nrope_theta = 5e5\nhidden = 96\nheads = 3\nhead_dim = 32\nkey_value_heads = 3\n"
         "[train]\ndtype = \"float64\"\n[optimizer]\nkind = \"sgd\"\nmomentum = 0.5\n"
         "[parallel]\nstrategy = \"zero3\"\ntimeout_seconds = 11\nprefetch = false\n";
  Plan plan{.model = read_model(file),
            .cluster = {.devices = 2, .per_host = 2, .host_memory = true},
            .work = work_of(load_config(file))};
  EXPECT_EQ(plan.work.tokens, 12 * 64);
  EXPECT_EQ(plan.work.states, 1);
  EXPECT_EQ(plan.work.precision, Precision::kFloat64);
  const RunConfig config = written(
      plan, {.ranks = 2, .shards = 2, .strategy = Strategy::kZero2, .micro_batch = 3, .micro_batches = 2});
  RunConfig expected = load_config(file);
  EXPECT_EQ(config.run.seed, 7);
  EXPECT_EQ(config.model.shape.rope_theta, 5e5);
  EXPECT_EQ(config.optimizer.momentum, 0.5);
  EXPECT_EQ(config.parallel.timeout_seconds, 11);
  EXPECT_TRUE(config.parallel.prefetch);
  EXPECT_EQ(config.batch.max_tokens_per_rank, 0);
  expected.batch = config.batch, expected.parallel = config.parallel,
  expected.run.directory = config.run.directory;
  EXPECT_EQ(isograd::to_toml(config), isograd::to_toml(expected));
  expected.model.lora.rank = 4;
  EXPECT_THAT(error_of<ConfigError>([&] { (void)work_of(expected); }), HasSubstr("model.lora.rank"));
}

TEST_F(PlanWrittenOf, AHuggingFaceDirectoryIsLoadedWhereItHasWeights) {
  DecoderConfig shape;
  shape.rope_theta = 12345, shape.layers = 3;
  std::ofstream(folder_ / "config.json") << hf_config_text(shape, at::kFloat);
  Plan plan{.model = read_model(folder_),
            .cluster = {.devices = 1, .per_host = 1, .host_memory = true},
            .work = {.tokens = 4096 * 4.0}};
  RunConfig config = written(plan, {});
  EXPECT_EQ(config.model.load, "");
  EXPECT_EQ(config.model.shape.rope_theta, 12345);
  EXPECT_EQ(config.model.shape.layers, 3);
  std::ofstream(folder_ / "model.safetensors") << "weights";
  config = written(plan, {});
  EXPECT_EQ(config.model.load, folder_.string());
}

}  // namespace
}  // namespace isograd::planner
