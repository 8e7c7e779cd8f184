// Mistakes put in through the public interfaces that the museum has none of: verify must find each, by name
// and ratio.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "isograd/optimizer.hpp"
#include "isograd/verify.hpp"
#include "planted.hpp"
#include "verify/present.hpp"
#include "verify/test_problem.hpp"

namespace isograd {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using verify_test::Small;
using verify_test::verify_on;

// ---- wrong layouts: the naive one with something done to it ----

struct ForgetsOne : planted::Wrapped {
  std::string name;
  ForgetsOne(std::unique_ptr<DataParallel> inner_, std::string name_)
      : Wrapped(std::move(inner_)), name(std::move(name_)) {}
  void finish_reduction() override {
    inner->begin_backward(true);  // the naive layout puts its gradients into the buckets then
    at::Tensor local;
    for (auto& view : views())
      if (view.name == name) local = view.gradient.clone();
    inner->finish_reduction();
    for (auto& view : views())
      if (view.name == name) view.gradient.copy_(local);
  }
};

struct SumsNothing : planted::Wrapped {
  using Wrapped::Wrapped;
  void finish_reduction() override { inner->begin_backward(true); }
};

// Rank 1 misses the last bit of what the others have: replicas drift apart.
struct DriftsOnRankOne : planted::Wrapped {
  using Wrapped::Wrapped;
  void finish_reduction() override {
    inner->finish_reduction();
    if (mesh().all().rank() == 1) views()[0].gradient.view({-1}).narrow(0, 0, 1).mul_(1 + 1e-6);
  }
};

template <class Layout, class... Arguments>
ChangeProblem with_layout(Arguments... arguments) {
  return [=](VerifyProblem& problem, World&) {
    problem.layouts = {{"fault", [=](auto parameters, Group group) {
                          return std::make_unique<Layout>(naive(std::move(parameters), group), arguments...);
                        }}};
  };
}

// The loss that is logged gets more of itself, its gradient does not.
void add_to_loss(VerifyModel& model, double more) {
  model.loss_terms = [inner = model.loss_terms, more](const Batch& batch) {
    LossTerms terms = inner(batch);
    for (auto& term : terms) term.sum = term.sum + more * term.sum.detach();
    return terms;
  };
}

class FaultAtRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, FaultAtRanks, ::testing::Values(2, 3, 4, 5));

TEST_P(FaultAtRanks, AveragedGradientsAreNamedWithTheirRatio) {
  const int ranks = GetParam();
  const Verdict verdict = verify_on(ranks, Small{}, with_layout<planted::Averages>());
  EXPECT_FALSE(verdict.passed);
  for (const auto& parameter : verdict.layouts.at(0).parameters)
    EXPECT_NEAR(parameter.exact.ratio * ranks, 1, 1e-9) << parameter.name;
  EXPECT_THAT(
      verdict.diagnosis,
      Contains(fmt::format("all parameters scaled by 1/{}: averaged over the ranks ({})", ranks, ranks)));
  EXPECT_THAT(parity_line(verdict), HasSubstr("parity FAIL"));
}

TEST_P(FaultAtRanks, AParameterThatIsNotSummedIsNamed) {
  const std::string name = "model.layers.1.mlp.up_proj.weight";
  const Verdict verdict = verify_on(GetParam(), Small{}, with_layout<ForgetsOne>(name));
  EXPECT_FALSE(verdict.passed);
  EXPECT_EQ(verdict.layouts.at(0).e1.worst, name);
  for (const auto& parameter : verdict.layouts.at(0).parameters) {
    EXPECT_EQ(parameter.exact.passed, parameter.name != name) << parameter.name;
    EXPECT_EQ(parameter.replicas_agree, parameter.name != name) << parameter.name;
  }
  EXPECT_THAT(verdict.diagnosis,
              Contains(fmt::format("only 1 of {} parameters ({}): not summed over the ranks ({})",
                                   verdict.layouts[0].parameters.size(), name, GetParam())));
}

// So that doing nothing can never pass as parity.
TEST_P(FaultAtRanks, ALayoutThatSumsNothingIsFound) {
  const Verdict verdict = verify_on(GetParam(), Small{}, with_layout<SumsNothing>());
  EXPECT_FALSE(verdict.passed);
  EXPECT_EQ(verdict.layouts.at(0).e1.failed, static_cast<std::int64_t>(verdict.layouts[0].parameters.size()));
}

TEST(Fault, ReplicasThatDriftApartAreFound) {
  const Verdict verdict = verify_on(3, Small{}, with_layout<DriftsOnRankOne>());
  EXPECT_FALSE(verdict.passed);
  EXPECT_EQ(verdict.layouts.at(0).e1.failed, 0);  // rank 0 has the right gradient
  EXPECT_EQ(verdict.layouts[0].e3.failed, 1);
}

// fp64 says nothing of what only the run's precision gets wrong.
TEST(Fault, ANormThatIsWrongInTheRunsPrecisionAloneIsFound) {
  const Verdict verdict = verify_on(2, Small{}, [](VerifyProblem& problem, World&) {
    problem.clipping = OwnClipping{.norm = [](std::vector<Bucket>& buckets, Group& group) {
      const double norm = global_norm(buckets, 0, group).norm;
      return !buckets.empty() && buckets[0].gradients.scalar_type() == at::kFloat ? 2 * norm : norm;
    }};
  });
  EXPECT_FALSE(verdict.passed);
  EXPECT_EQ(verdict.layouts.at(0).e1.state, Grade::State::kPassed);
  EXPECT_EQ(verdict.layouts[0].e2.state, Grade::State::kFailed);
  ASSERT_EQ(verdict.findings.size(), 1u) << to_text(verdict);
  EXPECT_EQ(verdict.findings[0].id, "norm_differs");
}

TEST(Fault, ALossThatIsWrongInTheRunsPrecisionAloneIsFoundFromTheBoundOn) {
  for (const auto& [dtype, bound] : {std::pair{at::kFloat, 1e-4}, {at::kBFloat16, 1e-2}})
    for (const double of_bound : {0.8, 1.2}) {
      const double more = bound * of_bound;
      const Verdict verdict = verify_on(2, Small{.dtype = dtype}, [more](VerifyProblem& problem, World&) {
        verify_test::change_model(problem, [more](VerifyModel& model) {
          if (model.named[0].second.scalar_type() != at::kDouble) add_to_loss(model, more);
        });
      });
      EXPECT_EQ(verdict.passed, of_bound < 1) << c10::toString(dtype) << "\n" << to_text(verdict);
      if (of_bound > 1) {
        ASSERT_FALSE(verdict.findings.empty());
        EXPECT_EQ(verdict.findings[0].id, "loss_differs");
      }
    }
}

}  // namespace
}  // namespace isograd
