// A rank's part of a run's micro-batches: the memory limit, and the balance of the split over
// context-parallel ranks.
#include "train/prepared_run.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "train/build.hpp"
#include "train/rank_zero.hpp"
#include "train/video_testing.hpp"

namespace isograd {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

class Parts : public testing_runs::TinyVideos {
 protected:
  // Ranks of 2 data ranks, of which only the first one has two packs at a time.
  RunConfig uneven(int ring) const {
    RunConfig config = tiny(fmt::format("ring{}", ring));
    config.batch.packs_per_step = 3;
    config.batch.packs_per_micro_batch = 2;
    config.parallel.cp_ring = ring;
    return config;
  }

  // Each rank's error, and the steps that were made.
  struct Refused {
    std::vector<std::string> by_rank;
    std::int64_t steps = 0;
  };
  static Refused refused(const RunConfig& config, int ranks) {
    Refused result{.by_rank = std::vector<std::string>(static_cast<std::size_t>(ranks))};
    run_ranks(ranks,
              [&](World& world) {
                TrainerHooks hooks;
                hooks.on_step = [&](const StepEvent&) { result.steps += world.rank == 0; };
                std::string& said = result.by_rank[static_cast<std::size_t>(world.rank)];
                try {
                  Trainer(config, world, hooks).run();
                  said = "no error";
                } catch (const AgreedConfigError& error) {
                  said = error.what();
                }
              },
              {.timeout = std::chrono::seconds(20)});
    return result;
  }
};

// One data rank's micro-batch is too large: all ranks throw, and no step is made.
TEST_F(Parts, AreRefusedOnAllRanksAlike) {
  const auto clips = [&](int ring) {
    RunConfig config = videos(fmt::format("clips{}", ring));
    config.parallel.cp_ring = ring;
    return config;
  };
  struct {
    RunConfig config;
    std::int64_t most;
    std::vector<const char*> says;
  } const cases[] = {{uneven(1), 60, {"a micro-batch of 96 tokens", "2 context ranks or more"}},
                     {uneven(2), 36, {"the longest document", "3 context ranks or more"}},
                     {clips(1), 11, {"at most 11 on a rank"}},
                     {clips(2), 11, {"at most 11 on a rank"}}};
  for (auto [config, most, says] : cases) {
    config.batch.max_tokens_per_rank = most;
    const Refused found = refused(config, 2 * static_cast<int>(config.parallel.cp_ring));
    EXPECT_EQ(found.steps, 0);
    EXPECT_THAT(found.by_rank, Each(AllOf(found.by_rank[0], HasSubstr("batch.max_tokens_per_rank"))));
    for (const char* part : says) EXPECT_THAT(found.by_rank[0], HasSubstr(part));
  }
}

// A later step is too large: the earlier ones are made, and nothing of this one.
TEST_F(Parts, AreRefusedBeforeTheStepThatIsTooLarge) {
  RunConfig config = videos("later");
  config.batch.videos_per_step = 2;
  config.batch.tokens_per_micro_batch = 1;  // one by one, in an order of its own
  config.train.evaluate_every = 0;
  std::vector<std::int64_t> most;  // tokens of each step's longest video
  run_ranks(1, [&](World& world) {
    const auto task = make_task(config, world.group);
    const auto loader = task->make_loader(0, 1);
    for (int step = 0; step < config.train.steps; ++step) {
      most.push_back(0);
      for (const Batch& batch : loader->next()) most.back() = std::max(most.back(), batch.num_tokens());
    }
  });
  const auto worst = std::max_element(most.begin(), most.end());
  const auto small = std::count_if(most.begin(), worst, [&](std::int64_t n) { return n == *worst; });
  ASSERT_EQ(small, 0);
  config.batch.max_tokens_per_rank = *worst - 1;
  EXPECT_EQ(refused(config, 2).steps, worst - most.begin());
  EXPECT_GT(worst - most.begin(), 0) << "the first step has the longest video: choose another seed";
  config.batch.max_tokens_per_rank = *worst;
  config.overwrite = true;
  EXPECT_EQ(refused(config, 2).by_rank[1], "no error");
}

TEST_F(Parts, WithinTheLimitAreTrainedAsWithoutOne) {
  for (const int ring : {1, 2}) {
    RunConfig config = uneven(ring);
    const double loss = run(config, 2 * ring).outcomes[0].loss;
    config.batch.max_tokens_per_rank = ring == 1 ? 96 : 60;
    config.run.directory += "-within";
    EXPECT_EQ(run(config, 2 * ring).outcomes[0].loss, loss);
  }
}

// The figures of the summary are those of the cuts, over both data ranks and all steps.
TEST_F(Parts, BalanceIsThatOfAllCuts) {
  for (const int ring : {1, 2}) {
    RunConfig config = uneven(ring);
    config.batch.packs_per_micro_batch = 1;
    config.parallel.cp_ulysses = ring == 1 ? 1 : 2;
    const int ranks = 2 * ring * static_cast<int>(config.parallel.cp_ulysses);
    config.model.shape.key_value_heads = 2;
    const Run made = run(config, ranks);
    if (ring == 1) {
      for (const Outcome& outcome : made.outcomes) EXPECT_FALSE(outcome.balance);
      continue;
    }
    double sum = 0, worst = 0;
    int cuts = 0;
    run_ranks(1, [&](World& world) {
      const auto task = make_task(config, world.group);
      const CutOptions options{
          .ring = 2, .ulysses = 2, .causal = true, .token_cost = 6 * config.model.shape.hidden};
      for (const int data_rank : {0, 1}) {
        const auto loader = task->make_loader(data_rank, 2);
        for (int step = 0; step < config.train.steps; ++step)
          for (const Batch& batch : loader->next()) {
            const double now = cost_of(cut_documents(batch.cu_seqlens, options), options).imbalance;
            sum += now, worst = std::max(worst, now), ++cuts;
          }
      }
    });
    EXPECT_EQ(cuts, 3 * config.train.steps);
    EXPECT_GT(worst, sum / cuts);  // so that one is not taken for the other
    for (const Outcome& outcome : made.outcomes) {
      ASSERT_TRUE(outcome.balance);
      EXPECT_DOUBLE_EQ(outcome.balance->mean, sum / cuts);
      EXPECT_EQ(outcome.balance->worst, worst);
    }
  }
}

}  // namespace
}  // namespace isograd
