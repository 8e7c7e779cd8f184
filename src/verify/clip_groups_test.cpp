// Groups of parameters that are clipped apart: verify's reference clips each by its own norm.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "isograd/optimizer.hpp"
#include "planted.hpp"
#include "verify/test_problem.hpp"

namespace isograd {
namespace {

using verify_test::Small;
using verify_test::verify_on;

// The norms' group is multiplied by the coefficient of the others: a thousandth off. It shows in the
// gradients that the clip leaves.
struct MixesGroupsUp : planted::WrappedOptimizer {
  using WrappedOptimizer::WrappedOptimizer;
  void update(std::vector<Bucket>& buckets, double scale) override {
    inner->update(buckets, scale);
    const at::NoGradGuard no_grad;
    for (Bucket& bucket : buckets)
      for (const Slot& slot : bucket.plan.slots)
        if (slot.name.ends_with("norm.weight"))
          bucket.gradients.narrow(0, slot.offset - bucket.held.begin, slot.numel).mul_(1.001);
  }
};

// Gives the norm more than it has summed: what is logged is wrong, and nothing that is applied.
struct CountsMore : planted::Wrapped {
  using Wrapped::Wrapped;
  void finish_reduction_with(const Reduced& reduced) override {
    inner->finish_reduction_with([&](const Bucket& bucket, std::optional<double> squares) {
      reduced(bucket, (squares ? *squares : owned_squares(bucket)) * (1 + 1e-6));
    });
  }
};

Verdict verdict_of(int ranks, at::ScalarType dtype, bool planted = false, bool counts_more = false) {
  const Small small{.packs_per_micro_batch = 2, .dtype = dtype, .max_norm = 0.1};
  return verify_on(ranks, small, [&](VerifyProblem& problem, World&) {
    problem.clip_groups = {{"*norm.weight", 0.002}, {"*.mlp.*", 0.02}};
    problem.updates = 2;
    problem.experiments = false;
    problem.layouts = {verify_test::bucketed_layout(), verify_test::naive_layout()};
    if (counts_more)
      for (LayoutUnderTest& layout : problem.layouts)
        layout.make = [right = layout.make](auto parameters, Group group) -> std::unique_ptr<DataParallel> {
          return std::make_unique<CountsMore>(right(std::move(parameters), group));
        };
    if (planted)
      problem.wrap_optimizer = [](auto inner) { return std::make_unique<MixesGroupsUp>(std::move(inner)); };
  });
}

TEST(ClipGroupsVerified, EachIsClippedByItsOwnNorm) {
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const int ranks : {1, 3, 4}) {
      const Verdict verdict = verdict_of(ranks, dtype);
      EXPECT_TRUE(verdict.passed) << ranks << " ranks\n" << to_text(verdict, 100);
      for (const LayoutVerdict& layout : verdict.layouts) {
        EXPECT_LE(layout.e1.error, 1e-10) << layout.name;
        EXPECT_EQ(layout.e2.state, Grade::State::kPassed) << layout.name;
        for (const auto& trajectory : layout.trajectories) EXPECT_TRUE(trajectory.passed) << layout.name;
      }
    }
}

TEST(ClipGroupsVerified, AGroupWithTheWrongCoefficientIsSeen) {
  const Verdict verdict = verdict_of(3, at::kFloat, true);
  EXPECT_FALSE(verdict.passed);
  for (const LayoutVerdict& layout : verdict.layouts)
    EXPECT_EQ(layout.e1.state, Grade::State::kFailed) << layout.name;
}

// The compared gradients are clipped, each group by its own norm: the norm that the step logs is the one
// before.
TEST(ClipGroupsVerified, TheNormBeforeTheClipIsComparedToo) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const Verdict verdict = verdict_of(3, dtype, false, true);
    EXPECT_FALSE(verdict.passed);
    for (const LayoutVerdict& layout : verdict.layouts) {
      EXPECT_EQ(layout.e1.failed, 0) << layout.name;
      EXPECT_EQ(layout.e1.state, Grade::State::kFailed) << layout.name;
      ASSERT_EQ(layout.findings.size(), 1u) << layout.name;
      EXPECT_EQ(layout.findings[0].id, "norm_differs");
      EXPECT_THAT(layout.findings[0].sentence, ::testing::HasSubstr("the norm before the clip of groups"));
    }
  }
}

}  // namespace
}  // namespace isograd
