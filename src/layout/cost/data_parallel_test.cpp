#include <gtest/gtest.h>

#include "isograd/error.hpp"
#include "isograd/parameters.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kNumel = 840 * 64;  // divides by every number of ranks below

DataParallelPlan plan_of(int stage, int shards, std::int64_t micro_batches = 1) {
  return {.numel = kNumel, .stage = stage, .shards = shards, .micro_batches = micro_batches};
}

// The table of the paper, for bf16 with fp32 masters and AdamW's moments.
TEST(PersistentBytes, AreThePapers) {
  for (int n : {1, 2, 3, 4, 5, 8, 64}) {
    EXPECT_EQ(persistent_bytes(plan_of(0, n)).total(), 16 * kNumel);
    EXPECT_EQ(persistent_bytes(plan_of(1, n)).total(), 4 * kNumel + 12 * kNumel / n);
    EXPECT_EQ(persistent_bytes(plan_of(2, n)).total(), 2 * kNumel + 14 * kNumel / n);
    EXPECT_EQ(persistent_bytes(plan_of(3, n)).total(), 16 * kNumel / n);
  }
  const double psi = kNumel;  // with 64 ranks, as the paper prints them
  EXPECT_EQ(static_cast<double>(persistent_bytes(plan_of(1, 64)).total()), 4.1875 * psi);
  EXPECT_EQ(static_cast<double>(persistent_bytes(plan_of(2, 64)).total()), 2.21875 * psi);
  EXPECT_EQ(static_cast<double>(persistent_bytes(plan_of(3, 64)).total()), 0.25 * psi);
}

TEST(PersistentBytes, FollowDtypesAndOptions) {
  auto plan = plan_of(2, 4);
  plan.bytes = {.parameter = 4, .gradient = 4, .master = 0, .state = 8};  // fp32
  EXPECT_EQ(persistent_bytes(plan).total(), 4 * kNumel + 12 * kNumel / 4);
  plan.reduce_once = true;  // stage 1's memory
  EXPECT_EQ(persistent_bytes(plan).total(), 8 * kNumel + 8 * kNumel / 4);
  plan.stage = 3;
  EXPECT_EQ(persistent_bytes(plan).total(), 4 * kNumel + 12 * kNumel / 4);
  plan.stage = 0, plan.share_parameters = true;
  EXPECT_EQ(persistent_bytes(plan).total(), 4 * kNumel + 12 * kNumel / 4);
  EXPECT_EQ(persistent_bytes(plan).parameters, 4 * kNumel / 4);
  plan.stage = 2;
  EXPECT_EQ(persistent_bytes(plan).total(), 4 * kNumel + 12 * kNumel / 4);  // reduce_once: whole gradients
  plan.reduce_once = false;
  EXPECT_EQ(persistent_bytes(plan).total(), 16 * kNumel / 4);
  plan.stage = 0;
  plan.replicas = 3;  // replicas save nothing
  EXPECT_EQ(persistent_bytes(plan).total(), 4 * kNumel + 12 * kNumel / 4);
}

TEST(TrafficBytes, AreThePapers) {
  for (int n : {1, 2, 3, 4, 5, 8}) {
    const double psi = 2.0 * kNumel * (n - 1) / n;  // bytes in bf16, one way
    for (std::int64_t g : {1, 3}) {
      const auto rounds = static_cast<double>(g);
      EXPECT_DOUBLE_EQ(traffic_bytes(plan_of(0, n, g)).total(), 2 * psi);
      EXPECT_DOUBLE_EQ(traffic_bytes(plan_of(1, n, g)).total(), 2 * psi);
      EXPECT_DOUBLE_EQ(traffic_bytes(plan_of(2, n, g)).total(), (rounds + 1) * psi);
      EXPECT_DOUBLE_EQ(traffic_bytes(plan_of(3, n, g)).total(), 3 * rounds * psi);
      auto plan = plan_of(2, n, g);
      plan.reduce_once = true;
      EXPECT_DOUBLE_EQ(traffic_bytes(plan).total(), 2 * psi);
      plan.stage = 3;
      EXPECT_DOUBLE_EQ(traffic_bytes(plan).total(), (2 * rounds + 1) * psi);
      plan = plan_of(1, n, g), plan.share_parameters = true;
      EXPECT_DOUBLE_EQ(traffic_bytes(plan).total(), psi);
      plan.stage = 2;
      EXPECT_DOUBLE_EQ(traffic_bytes(plan).total(), rounds * psi);
    }
  }
}

// Parameters that stay whole from forward to the end of backward are gathered once for both.
TEST(TrafficBytes, OfWhatStaysWholeAreAGatherLess) {
  for (int n : {2, 3, 8}) {
    const double psi = 2.0 * kNumel * (n - 1) / n;
    auto plan = plan_of(3, n, 3);
    plan.whole = kNumel / 4;
    EXPECT_DOUBLE_EQ(traffic_bytes(plan).total(), 3 * 3 * psi - 3 * psi / 4);
    EXPECT_EQ(traffic_formula(plan), "(6Ψ + 12Ψ - 6Ψw)(N - 1)/N");
    plan.whole = kNumel;  // reshard_after_forward = false
    EXPECT_DOUBLE_EQ(traffic_bytes(plan).total(), 3 * 2 * psi);
    plan.whole = kNumel + 1;
    EXPECT_THROW(traffic_bytes(plan), ConfigError);
  }
}

TEST(TrafficBytes, OfReplicasAreThoseOfAShard) {
  auto plan = plan_of(2, 4, 3);
  plan.replicas = 2;
  EXPECT_DOUBLE_EQ(traffic_bytes(plan).replicate, 2 * (2.0 * kNumel / 4) / 2);
  plan.stage = 0;  // all ranks at once
  EXPECT_DOUBLE_EQ(traffic_bytes(plan).total(), 2 * 2.0 * kNumel * 7 / 8);
}

TEST(Formulas, ReadAsInThePaper) {
  EXPECT_EQ(persistent_formula(plan_of(0, 2)), "16Ψ");
  EXPECT_EQ(persistent_formula(plan_of(1, 2)), "4Ψ + 12Ψ/N");
  EXPECT_EQ(persistent_formula(plan_of(2, 2)), "2Ψ + 14Ψ/N");
  EXPECT_EQ(persistent_formula(plan_of(3, 2)), "16Ψ/N");
  EXPECT_EQ(traffic_formula(plan_of(0, 2)), "4Ψ(N - 1)/N");
  EXPECT_EQ(traffic_formula(plan_of(1, 2)), "(2Ψ + 2Ψ)(N - 1)/N");
  EXPECT_EQ(traffic_formula(plan_of(3, 2, 3)), "(6Ψ + 12Ψ)(N - 1)/N");
  auto plan = plan_of(1, 2);
  plan.share_parameters = true, plan.replicas = 2;
  EXPECT_EQ(persistent_formula(plan), "2Ψ + 14Ψ/N");
  EXPECT_EQ(traffic_formula(plan), "2Ψ(N - 1)/N + 4Ψ/N (R - 1)/R");
}

TEST(Plans, RefuseWhatMakesNone) {
  EXPECT_THROW(persistent_bytes(plan_of(4, 2)), ConfigError);
  EXPECT_THROW(persistent_bytes(plan_of(1, 0)), ConfigError);
  EXPECT_THROW(traffic_bytes(plan_of(1, 2, 0)), ConfigError);
}

// Experts have copies on fewer ranks: the formulas equal those of two models, one of them a rank's experts.
TEST(Plans, OfDealtExpertsAreThoseOfTwoModels) {
  constexpr std::int64_t kExperts = 840 * 16;
  for (int stage : {0, 1, 2, 3})
    for (int copies : {1, 2, 4}) {
      auto plan = plan_of(stage, 8, 3), rest = plan, experts = plan;
      plan.replicas = rest.replicas = 2;  // of the rest alone
      plan.dealt = kExperts, plan.dealt_copies = copies;
      rest.numel -= kExperts;
      experts.numel = kExperts, experts.shards = copies;
      if (stage == 3) plan.whole = rest.whole = 100, plan.dealt_whole = experts.whole = 64, plan.whole += 64;
      EXPECT_EQ(persistent_bytes(plan).total(),
                persistent_bytes(rest).total() + persistent_bytes(experts).total());
      EXPECT_DOUBLE_EQ(traffic_bytes(plan).total(),
                       traffic_bytes(rest).total() + traffic_bytes(experts).total());
      auto all_alike = plan;
      all_alike.dealt = all_alike.dealt_whole = 0;
      EXPECT_NE(traffic_bytes(plan).total(), traffic_bytes(all_alike).total());
    }
  auto plan = plan_of(3, 8, 3);
  plan.dealt = kExperts, plan.dealt_copies = 2;
  EXPECT_EQ(persistent_formula(plan), "16Ψ/N + 16Ψe/Ne");
  EXPECT_EQ(traffic_formula(plan), "(6Ψ + 12Ψ)(N - 1)/N + (6Ψe + 12Ψe)(Ne - 1)/Ne");
  plan.dealt_whole = 1;
  EXPECT_THROW(traffic_bytes(plan), ConfigError);
  plan.dealt_whole = 0, plan.dealt = kNumel + 1;
  EXPECT_THROW(persistent_bytes(plan), ConfigError);
}

// All ranks use one copy of the parameters, so nothing is gathered in stage 3, which then equals stage 2.
TEST(Plans, OfStage3WithOneCopyAreThoseOfStage2) {
  for (bool once : {false, true}) {
    auto three = plan_of(3, 4, 3), two = plan_of(2, 4, 3);
    three.share_parameters = two.share_parameters = true;
    three.reduce_once = two.reduce_once = once;
    EXPECT_EQ(persistent_bytes(three).total(), persistent_bytes(two).total());
    EXPECT_EQ(traffic_bytes(three).total(), traffic_bytes(two).total());
    EXPECT_EQ(traffic_bytes(three).gather, 0);
  }
}

}  // namespace
}  // namespace isograd
