#include <gtest/gtest.h>

#include "isograd/error.hpp"
#include "isograd/parameters.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kNumel = 840 * 64;  // divides by every number of ranks below

DataParallelPlan plan_of(int stage, int shards, std::int64_t micro_batches = 1) {
  return {.elements = {{.numel = kNumel, .shards = shards}}, .stage = stage, .micro_batches = micro_batches};
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

// In fp32 on four ranks: whole elements, and a quarter of them.
TEST(PersistentBytes, FollowDtypesAndOptions) {
  struct Case {
    int stage;
    bool once, shared;
    std::int64_t whole, sharded;
  };
  for (const auto& [stage, once, shared, whole, sharded] : {Case{2, false, false, 4, 12},
                                                            {2, true, false, 8, 8},  // stage 1's memory
                                                            {3, true, false, 4, 12},
                                                            {0, true, true, 4, 12},
                                                            {2, true, true, 4, 12},
                                                            {2, false, true, 0, 16}})
    for (const int replicas : {1, 3}) {  // replicas save nothing
      auto plan = plan_of(stage, 4);
      plan.bytes = {.parameter = 4, .gradient = 4, .master = 0, .state = 8};
      plan.reduce_once = once, plan.share_parameters = shared, plan.elements[0].replicas = replicas;
      EXPECT_EQ(persistent_bytes(plan).total(), whole * kNumel + sharded * kNumel / 4) << stage << once;
      if (shared) EXPECT_EQ(persistent_bytes(plan).parameters, 4 * kNumel / 4);
    }
}

// Multiples of psi, the bytes in bf16 one way, for G micro-batches.
TEST(TrafficBytes, AreThePapers) {
  struct Case {
    int stage;
    bool once, shared;
    std::int64_t fixed, of_each;
  };
  for (const auto& [stage, once, shared, fixed, of_each] : {Case{0, false, false, 2, 0},
                                                            {1, false, false, 2, 0},
                                                            {2, false, false, 1, 1},
                                                            {3, false, false, 0, 3},
                                                            {2, true, false, 2, 0},
                                                            {3, true, false, 1, 2},
                                                            {1, false, true, 1, 0},
                                                            {2, false, true, 0, 1},
                                                            {3, false, true, 0, 1},
                                                            {3, true, true, 1, 0}})
    for (int n : {1, 2, 3, 4, 5, 8})
      for (std::int64_t g : {1, 3}) {
        auto plan = plan_of(stage, n, g);
        plan.reduce_once = once, plan.share_parameters = shared;
        EXPECT_DOUBLE_EQ(traffic_bytes(plan).total(),
                         static_cast<double>(fixed + g * of_each) * 2.0 * kNumel * (n - 1) / n)
            << stage << once << shared;
      }
}

// Parameters that stay whole from forward to the end of backward are gathered once for both.
TEST(TrafficBytes, OfWhatStaysWholeAreAGatherLess) {
  for (int n : {2, 3, 8}) {
    const double psi = 2.0 * kNumel * (n - 1) / n;
    auto plan = plan_of(3, n, 3);
    plan.elements[0].whole = kNumel / 4;
    EXPECT_DOUBLE_EQ(traffic_bytes(plan).total(), 3 * 3 * psi - 3 * psi / 4);
    EXPECT_EQ(traffic_formula(plan), "(6Ψ + 12Ψ - 6Ψw)(N - 1)/N");
    plan.elements[0].whole = kNumel;  // reshard_after_forward = false
    EXPECT_DOUBLE_EQ(traffic_bytes(plan).total(), 3 * 2 * psi);
  }
}

TEST(TrafficBytes, OfReplicasAreThoseOfAShard) {
  auto plan = plan_of(2, 4, 3);
  plan.elements[0].replicas = 2;
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
  plan.share_parameters = true, plan.elements[0].replicas = 2;
  EXPECT_EQ(persistent_formula(plan), "2Ψ + 14Ψ/N");
  EXPECT_EQ(traffic_formula(plan), "2Ψ(N - 1)/N + 4Ψ/N (R - 1)/R");
}

TEST(Plans, RefuseWhatMakesNone) {
  for (void (*const break_one)(DataParallelPlan&) :
       {+[](DataParallelPlan& plan) { plan.stage = 4; },
        +[](DataParallelPlan& plan) { plan.micro_batches = 0; },
        +[](DataParallelPlan& plan) { plan.elements[0].shards = 0; },
        +[](DataParallelPlan& plan) { plan.elements[0].whole = kNumel + 1; },
        +[](DataParallelPlan& plan) { plan.elements[0].numel = -1; },
        +[](DataParallelPlan& plan) { plan.elements.push_back({.replicas = 0}); }}) {
    auto plan = plan_of(3, 2);
    EXPECT_NO_THROW(traffic_bytes(plan));
    break_one(plan);
    EXPECT_THROW(persistent_bytes(plan), ConfigError);
    EXPECT_THROW(traffic_bytes(plan), ConfigError);
  }
}

// Experts have copies on fewer ranks: the formulas equal those of two models, one of them a rank's experts.
TEST(Plans, OfExpertsAreThoseOfTwoModels) {
  for (int stage : {0, 1, 2, 3})
    for (int copies : {1, 2, 4}) {
      auto plan = plan_of(stage, 8, 3), rest = plan, experts = plan;
      rest.elements = {{.numel = kNumel, .whole = 100, .shards = 8, .replicas = 2}};
      experts.elements = {{.numel = kNumel / 4, .whole = 64, .shards = copies}};
      plan.elements = {rest.elements[0], experts.elements[0]};
      EXPECT_EQ(persistent_bytes(plan).total(),
                persistent_bytes(rest).total() + persistent_bytes(experts).total());
      EXPECT_DOUBLE_EQ(traffic_bytes(plan).total(),
                       traffic_bytes(rest).total() + traffic_bytes(experts).total());
    }
  auto plan = plan_of(3, 8, 3);
  plan.elements.push_back({.numel = 0, .shards = 2});  // a rank without any
  EXPECT_EQ(persistent_formula(plan), "16Ψ/N");
  plan.elements[1].numel = 64;
  EXPECT_EQ(persistent_formula(plan), "16Ψ/N + 16Ψe/Ne");
  EXPECT_EQ(traffic_formula(plan), "(6Ψ + 12Ψ)(N - 1)/N + (6Ψe + 12Ψe)(Ne - 1)/Ne");
}

}  // namespace
}  // namespace isograd
