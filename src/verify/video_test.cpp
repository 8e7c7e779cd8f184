// verify of runs on videos: every layout has the gradient of one process, and planted faults have not.
#include <gmock/gmock.h>

#include "base/files.hpp"
#include "full_tests.hpp"
#include "train/task.hpp"
#include "train/video_testing.hpp"
#include "verify/run.hpp"
#include "verify/test_problem.hpp"

namespace isograd {
namespace {

using testing_runs::kVideoLayouts;

class VideosVerified : public testing_runs::TinyVideos {
 protected:
  static Verdict verified(const RunConfig& config, int ranks, const std::vector<std::string>& layouts = {},
                          const ChangeProblem& change = {}) {
    return verify_test::verify_on(ranks, config, layouts, change);
  }
};

// Under one of two means by turns, under both with ISOGRAD_FULL_TESTS=1.
TEST_F(VideosVerified, OnDataAndContextRanks) {
  std::size_t place = 0;
  for (const char* mean : {"token_mean", "sample_mean"})
    for (const auto& layout : kVideoLayouts) {
      if (!full_tests() && place++ % 2 != 0)
        continue;  // an odd number of layouts: the second mean has the others
      RunConfig config = videos("run", layout.ranks == 3 ? "bfloat16" : "float32");
      config.loss.kind = mean;
      layout.change(config);
      const Verdict verdict = verified(config, layout.ranks);
      EXPECT_TRUE(verdict.passed) << layout.name << ", " << mean << "\n" << to_text(verdict);
      EXPECT_TRUE(verdict.batch_agrees && verdict.documents_apart) << layout.name;
      EXPECT_EQ(verdict.samples.size(), 5u) << layout.name;  // each video once
    }
}

TEST_F(VideosVerified, OnEveryLayoutThatTheRanksAllow) {
  const Verdict verdict = verified(videos("run"), 2, {"all"});
  EXPECT_TRUE(verdict.passed) << to_text(verdict);
  EXPECT_EQ(verdict.layouts.size(), 2 * 13u);  // with another accumulation
}

TEST_F(VideosVerified, MeansOfReplicas) {
  RunConfig config = videos("run");
  config.loss.kind = "sample_mean";
  config.loss.normalise_over = {"dp_shard", "cp_ring", "cp_ulysses"};
  config.parallel.strategy = "zero2";
  config.parallel.replicas = 2;
  config.parallel.cp_ring = 2;
  const Verdict verdict = verified(config, 4);
  EXPECT_TRUE(verdict.passed) << to_text(verdict);
}

// Changes the product's loss or the oracle's outputs, on every rank.
ChangeProblem changed(std::function<void(VerifyModel&, World&)> change) {
  return [change](VerifyProblem& problem, World& world) {
    verify_test::change_model(problem, [change, &world](VerifyModel& model) { change(model, world); });
  };
}

// Noise that depends on the rank, as with a generator on each. Experiments about the failure on one layout;
// ISOGRAD_FULL_TESTS=1: on all.
TEST_F(VideosVerified, NoiseOfOnesOwnIsCaught) {
  const ChangeProblem own_noise = changed([](VerifyModel& model, World& world) {
    model.loss_terms = [right = model.loss_terms, rank = world.rank](const Batch& batch) {
      Batch other = batch;
      other.draw += rank;
      return right(other);
    };
  });
  std::size_t place = 0;
  for (const auto& layout : kVideoLayouts) {
    if (!full_tests() && place++ % 2 != 0) continue;
    RunConfig config = videos("run");
    layout.change(config);
    const bool experiments = full_tests() || &layout == kVideoLayouts;
    const Verdict verdict = verified(config, layout.ranks, {}, [&](VerifyProblem& problem, World& world) {
      problem.experiments = experiments;
      own_noise(problem, world);
    });
    EXPECT_FALSE(verdict.passed) << layout.name;
    EXPECT_EQ(verdict.layouts[0].e1.state, Grade::State::kFailed) << layout.name;
  }
}

TEST_F(VideosVerified, ATokenMeanDeclaredAsSampleMeanIsCaught) {
  RunConfig config = videos("run");
  config.loss.kind = "sample_mean";
  const Verdict verdict = verified(config, 2, {}, [](VerifyProblem& problem, World&) {
    problem.make_normalizer = [] { return std::make_unique<TokenMean>(); };
  });
  EXPECT_FALSE(verdict.passed);
}

TEST_F(VideosVerified, AttentionAcrossVideosIsCaught) {
  RunConfig config = videos("run");
  config.batch.tokens_per_micro_batch = 1000;
  const Verdict verdict = verified(config, 1, {}, changed([](VerifyModel& model, World&) {
                                     model.logits = [right = model.logits](const Batch& batch) {
                                       Batch merged = batch;
                                       merged.cu_seqlens = {0, batch.num_tokens()};
                                       merged.sample_ids = {batch.sample_ids.front()};
                                       merged.sample_targets = {batch.num_tokens()};
                                       return right(merged);
                                     };
                                   }));
  EXPECT_FALSE(verdict.documents_apart);
}

// ---- the smallest failure ----

// As a file may say it: nothing of text.
RunConfig without_text(RunConfig config) {
  const RunConfig usual;
  config.model.shape.key_value_heads = usual.model.shape.key_value_heads;
  config.model.shape.max_positions = usual.model.shape.max_positions;
  config.sample = usual.sample;
  return config;
}

TEST_F(VideosVerified, TheSmallestOfEverythingIsFound) {
  RunConfig config = without_text(videos("small"));
  config.video.files = {"a", "b", "c", "d", "e"};
  config.video.patch_height = config.video.patch_width = 8, config.video.height = 48;
  config.model.shape.layers = 4;
  config.parallel.cp_ring = 2;
  const auto always = minimise({config, 4}, [](const Trial&) { return std::string("always"); });
  ASSERT_TRUE(always);
  const RunConfig& least = always->trial.config;
  EXPECT_EQ(always->trial.ranks, 1);
  EXPECT_EQ(least.video.files.size(), 1u);
  EXPECT_EQ(least.video.max_frames, 1);
  EXPECT_EQ(least.video.patch_frames, 1);
  EXPECT_EQ(least.video.height, 1);
  EXPECT_EQ(least.batch.videos_per_step, 1);
  EXPECT_EQ(least.model.shape.layers, 1);
  EXPECT_EQ(least.model.shape.hidden, 1);
  EXPECT_EQ(least.model.shape.heads, 1);
  EXPECT_EQ(least.video.timestep_features, 2);
  EXPECT_EQ(least.parallel.cp_ring, 1);
  EXPECT_EQ(least.data.pack_length, config.data.pack_length);  // of text
  EXPECT_THAT(always->changes, ::testing::Contains("video.files 5 files -> 1"));
  // The failure needs two of the files, of several frames, on ranks that accumulate.
  const auto fails = [](const Trial& trial) -> std::string {
    const auto& files = trial.config.video.files;
    const auto has = [&](const char* name) { return std::count(files.begin(), files.end(), name) > 0; };
    const std::int64_t frames = trial.config.video.max_frames;
    return has("b") && has("e") && (frames == 0 || frames >= 6) && trial.ranks >= 2 &&
                   trial.config.batch.tokens_per_micro_batch < 1000 && trial.config.batch.videos_per_step >= 3
               ? "planted"
               : "";
  };
  const auto found = minimise({config, 4}, fails);
  ASSERT_TRUE(found);
  EXPECT_EQ(fails(found->trial), "planted");
  EXPECT_EQ(found->trial.ranks, 2);
  EXPECT_EQ(found->trial.config.video.files, (std::vector<std::string>{"b", "e"}));
  EXPECT_EQ(found->trial.config.video.max_frames, 6);
  EXPECT_EQ(found->trial.config.batch.videos_per_step, 3);
  EXPECT_EQ(found->trial.config.batch.tokens_per_micro_batch, 1);
  const auto file = root_ / "small.toml";
  write_file(file, minimised_toml(*found, file.string()));
  EXPECT_EQ(to_toml(load_config(file)), to_toml(found->trial.config));
}

// A third of the layouts, each of which is verified above. ISOGRAD_FULL_TESTS=1: all.
TEST_F(VideosVerified, WhileTrainingAndAtTheEnd) {
  std::size_t place = 0;
  for (const auto& layout : kVideoLayouts) {
    if (!full_tests() && place++ % 3 != 2) continue;
    RunConfig config = videos(layout.name);
    layout.change(config);
    config.verify.every = 3;
    config.verify.checksums_every = 1;
    config.train.steps = 4;
    Verdict verdict;
    int checks = 0;
    const auto result = run(config, layout.ranks, [&](World& world, TrainerHooks& hooks) {
      hooks.check = [&checks, &world](RunningRun& running) {
        if (world.rank == 0) ++checks;
        return check_running(running);
      };
      hooks.on_finish = [&verdict](FinishedRun& finished) -> std::vector<ReportTable> {
        Verdict own = verify_finished(finished);
        if (finished.world.rank != 0) return {};
        verdict = std::move(own);
        return {to_table(verdict)};
      };
    });
    EXPECT_EQ(checks, 4) << layout.name;
    EXPECT_EQ(result.outcomes[0].end, Outcome::End::kFinished) << layout.name;
    EXPECT_EQ(result.outcomes[0].exit_status(), 0) << layout.name;
    EXPECT_TRUE(verdict.passed) << layout.name << "\n" << to_text(verdict);
  }
}

}  // namespace
}  // namespace isograd
