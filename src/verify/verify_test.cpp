// The real model, the real loader, real layouts: equal to one process at every number of ranks.
#include "isograd/verify.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "isograd/error.hpp"
#include "verify/compare.hpp"
#include "verify/layout_run.hpp"
#include "verify/oracle.hpp"
#include "verify/test_problem.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;
using verify_test::bucketed_layout;
using verify_test::naive_layout;
using verify_test::Small;
using verify_test::verify_on;

class VerifyAtRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, VerifyAtRanks, ::testing::Values(1, 2, 3, 4, 5));

void expect_parity(const Verdict& verdict) {
  EXPECT_TRUE(verdict.passed) << to_text(verdict, 100);
  EXPECT_TRUE(verdict.diagnosis.empty());
  for (const auto& layout : verdict.layouts) {
    EXPECT_EQ(layout.e1.state, Grade::State::kPassed);
    EXPECT_LE(layout.e1.error, 1e-10);
    EXPECT_EQ(layout.e3.state, Grade::State::kPassed);
    EXPECT_FALSE(layout.parameters.empty());
  }
}

// 7 packs of uneven documents over 1 to 5 ranks: ranks with 1, 2 or more packs in micro-batches of 2.
TEST_P(VerifyAtRanks, ParityOfAllLayoutsTiedWithGroupedQueries) {
  const Verdict verdict = verify_on(GetParam(), Small{}, [](VerifyProblem& problem, World&) {
    problem.layouts = {bucketed_layout(), bucketed_layout(false), naive_layout()};
  });
  expect_parity(verdict);
  ASSERT_EQ(verdict.layouts.size(), 3u);
  EXPECT_EQ(verdict.layouts[0].e2.state, Grade::State::kPassed);
  EXPECT_LT(verdict.oracle.clip_coefficient, 1);             // the clip is part of what was compared
  EXPECT_LT(verdict.oracle.targets, verdict.oracle.tokens);  // documents end inside the packs
}

TEST_P(VerifyAtRanks, ParityUntiedWithAnEmptyRank) {
  // 4 packs: the fifth rank has none.
  const Small small{.tied = false, .key_value_heads = 4, .packs_per_step = 4, .packs_per_micro_batch = 1};
  expect_parity(verify_on(GetParam(), small));
}

TEST_P(VerifyAtRanks, ParityInOneMicroBatch) {
  expect_parity(verify_on(GetParam(), {.packs_per_micro_batch = 100, .max_norm = 0}));
}

TEST(Verify, ParityInBfloat16AndFloat64) {
  const Verdict low = verify_on(3, {.dtype = at::kBFloat16});
  expect_parity(low);
  EXPECT_EQ(low.precision, "bf16");
  EXPECT_GT(low.layouts[0].e2.error, 1e-5);  // it really ran in bf16
  const Verdict high = verify_on(2, {.dtype = at::kDouble});
  expect_parity(high);
  EXPECT_EQ(high.layouts[0].e2.state, Grade::State::kNotClaimed);
}

// Every sample twice: the mean is the same, so is the gradient, and every count doubles. Another token at a
// document's end, where nothing is predicted, changes neither gradient nor counts.
TEST(Verify, AnotherBatchWithTheSameGradientIsRefused) {
  for (const bool doubled : {true, false}) {
    const Verdict verdict = verify_on(3, Small{}, [&](VerifyProblem& problem, World& world) {
      const MicroBatches once = problem.local;
      if (doubled) {
        problem.local.insert(problem.local.end(), once.begin(), once.end());
      } else if (world.rank == 1) {
        at::Tensor& tokens = problem.local[0].tokens;
        tokens = tokens.clone();
        tokens[problem.local[0].targets.eq(kIgnoreIndex).nonzero()[0][0]] -= 1;
      }
    });
    ASSERT_EQ(verdict.layouts.size(), 1u);
    for (const auto& parameter : verdict.layouts[0].parameters)
      EXPECT_TRUE(parameter.exact.passed) << parameter.name << " " << parameter.exact.error;
    EXPECT_EQ(verdict.layouts[0].exact.targets, (doubled ? 2 : 1) * verdict.oracle.targets);
    EXPECT_FALSE(verdict.batch_agrees || verdict.passed);  // verify sees that this was another batch
    EXPECT_THAT(to_text(verdict),
                HasSubstr(doubled ? "6 samples count more than once"
                                  : "did not see every token of the whole step exactly once"));
  }
}

ChangeProblem with_loss(DeclaredLoss loss) {
  return [loss](VerifyProblem& problem, World&) {
    problem.loss = loss;
    problem.layouts = {bucketed_layout(), naive_layout()};
  };
}

// Documents longer than the pack, cut over micro-batches and ranks.
TEST_P(VerifyAtRanks, ParityOfEveryMean) {
  const Small small{.packs_per_step = 9, .pack_length = 24};
  for (const Mean mean : {Mean::kSamples, Mean::kWeights, Mean::kFixed, Mean::kNone}) {
    const Verdict verdict =
        verify_on(GetParam(), small, with_loss({.mean = mean, .denominator = 40, .replicas = {}}));
    expect_parity(verdict);
    EXPECT_NE(verdict.loss, "token mean");
    EXPECT_THAT(to_text(verdict), HasSubstr("under the loss that was declared: " + verdict.loss));
  }
  const auto whole = verify_test::loader_of(small, 0, 1)->whole_step({});
  std::int64_t cut = 0;
  for (const auto& batch : whole)
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) cut += batch.sample_targets[f] > 24;
  EXPECT_GT(cut, 2);  // samples that cannot lie in one pack
}

// Means of replicas: another loss, and verify compares with that one.
TEST(Verify, ParityOfAMeanOfReplicas) {
  for (int ranks : {2, 3}) {
    const Small small{.packs_per_step = 7};
    const Verdict verdict = verify_on(ranks, small, [&](VerifyProblem& problem, World& world) {
      problem.loss.replicas = [=] {
        std::vector<MicroBatches> replicas;
        for (int rank = 0; rank < ranks; ++rank)
          replicas.push_back(verify_test::loader_of(small, rank, ranks)->next());
        return replicas;
      };
    });
    expect_parity(verdict);
    EXPECT_THAT(verdict.loss, HasSubstr("per-replica token means, which depends on the layout"));
    EXPECT_NE(verdict.oracle.loss, verify_on(ranks, small).oracle.loss);
  }
}

// A run that declares one mean and divides by another.
TEST(Verify, AnotherMeanThanTheDeclaredOneIsFound) {
  struct FragmentsAsSamples : SampleMean {  // T_b of the micro-batch's own tokens
    Batch prepare(const Batch& batch, const Denominator& denominator) const override {
      Denominator own = denominator;
      own.sample_sizes.clear();
      for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
        own.sample_sizes[batch.sample_ids[f]] +=
            static_cast<double>(batch.targets.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1])
                                    .ne(kIgnoreIndex)
                                    .sum()
                                    .item<std::int64_t>());
      return SampleMean::prepare(batch, own);
    }
  };
  const Small small{.packs_per_step = 9, .packs_per_micro_batch = 1, .pack_length = 24};
  const std::vector<MakeNormalizer> wrong = {[] { return std::make_unique<TokenMean>(); },
                                             [] { return std::make_unique<FragmentsAsSamples>(); },
                                             [] { return std::make_unique<NoDenominator>(); }};
  for (const auto& make : wrong)
    EXPECT_FALSE(verify_on(3, small, [&](VerifyProblem& problem, World&) {
                   problem.loss.mean = Mean::kSamples;
                   problem.make_normalizer = make;
                 }).passed);
}

// The oracle against central differences of its own loss: it is right, not only equal to the product.
class OracleOf : public ::testing::TestWithParam<Mean> {};
INSTANTIATE_TEST_SUITE_P(Means, OracleOf, ::testing::Values(Mean::kTargets, Mean::kSamples));

TEST_P(OracleOf, ItsGradientIsTheDerivativeOfItsLoss) {
  const Small small;
  const DeclaredLoss declared{.mean = GetParam(), .replicas = {}};
  VerifyModel model = verify_test::model_of(small, at::kDouble);
  const MicroBatches whole = verify_test::loader_of(small, 0, 1)->whole_step({});
  const auto nothing = [] {};
  const OracleStep step = oracle_step(model, {whole}, declared, {}, nothing);
  ASSERT_EQ(step.names.size(), model.named.size());
  for (std::size_t i = 0; i < step.names.size(); ++i) {
    at::Tensor flat = model.named[i].second.detach().view({-1});
    const at::Tensor direction = step.gradients[i].view({-1}) / step.gradients[i].norm();
    // Truncation h² · L'''/6 and rounding 1e-16 · L / h: both below 1e-7 here.
    const double h = 1e-5;
    flat.add_(direction, h);
    const double above = oracle_step(model, {whole}, declared, {}, nothing).figures.loss;
    flat.sub_(direction, 2 * h);
    const double below = oracle_step(model, {whole}, declared, {}, nothing).figures.loss;
    flat.add_(direction, h);
    const double norm = step.gradients[i].norm().item<double>();
    EXPECT_NEAR((above - below) / (2 * h), norm, 1e-5 * norm + 1e-8) << step.names[i];
  }
}

TEST(Digest, CountsEveryTokenOnce) {
  const auto loader = verify_test::loader_of(Small{}, 0, 1);
  const MicroBatches packs = loader->whole_step({});
  const MicroBatches micro_batches = verify_test::loader_of(Small{}, 0, 1)->next();
  EXPECT_EQ(digest(packs), digest(micro_batches));  // another cut of the same step
  MicroBatches changed = packs;
  changed.pop_back();
  EXPECT_NE(digest(changed), digest(packs));
  changed = packs;
  changed[0].tokens = changed[0].tokens.clone();
  changed[0].tokens[1] += 1;
  EXPECT_NE(digest(changed), digest(packs));
  changed = packs;
  changed[0].positions = changed[0].positions.clone();
  changed[0].positions[1] += 1;
  EXPECT_NE(digest(changed), digest(packs));
  changed = packs;
  changed[0].weights = at::ones({changed[0].num_tokens()}, at::kFloat);
  EXPECT_EQ(digest(changed), digest(packs));  // as where none are given
  changed[0].weights[1] = 0.5;
  EXPECT_NE(digest(changed), digest(packs));
}

// One rank works more than twice as long as the timeout, in pieces; then one piece is too long.
TEST(Heartbeat, ALongOracleDoesNotTripTheTimeout) {
  const auto work = [](int pieces, int milliseconds) {
    run_ranks(3,
              [&](World& world) {
                Heartbeat heartbeat(world.group);
                if (world.rank == 0)
                  for (int i = 0; i < pieces; ++i) {
                    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
                    heartbeat.tick();
                  }
                heartbeat.finish();
                world.group.barrier();
              },
              {.timeout = std::chrono::milliseconds(500)});
  };
  EXPECT_NO_THROW(work(12, 100));
  EXPECT_THROW(work(1, 1500), PeerError);
}

TEST(Verify, RefusesWhatItCannotJudge) {
  const auto refused = [](const ChangeProblem& change) {
    try {
      verify_on(2, Small{}, change);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("nothing was refused");
  };
  EXPECT_THAT(refused([](VerifyProblem& problem, World&) { problem.layouts.clear(); }),
              HasSubstr("no layout"));
  EXPECT_THAT(refused([](VerifyProblem& problem, World&) {
                for (auto& batch : problem.local) batch.targets = at::full_like(batch.targets, kIgnoreIndex);
              }),
              HasSubstr("without a valid target"));
  EXPECT_THAT(refused([](VerifyProblem& problem, World&) {
                verify_test::change_model(problem, [](VerifyModel& model) {
                  for (auto& [name, tensor] : model.named) tensor.requires_grad_(false);
                });
              }),
              HasSubstr("without trainable parameters"));
}

}  // namespace
}  // namespace isograd
