// Mistakes that real trainers shipped, put in through the public seams: verify must find each, by name and
// ratio.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "isograd/optimizer.hpp"
#include "isograd/verify.hpp"
#include "verify/present.hpp"
#include "verify/test_problem.hpp"

namespace isograd {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using verify_test::Small;
using verify_test::verify_on;

// ---- wrong normalisers ----

// Each rank divides by its own tokens, then by the number of ranks: the mean of per-rank means.
class MeanOfRankMeans : public TokenMean {
 public:
  Census count(const MicroBatches& micro_batches, Group& data, bool stop_requested) override {
    rank_ = static_cast<std::size_t>(data.rank());
    return TokenMean::count(micro_batches, data, stop_requested);
  }
  Denominator denominator(const Census& census) const override {
    Denominator wrong = TokenMean::denominator(census);
    wrong.value = static_cast<double>(census.targets_by_rank[rank_]) *
                  static_cast<double>(census.targets_by_rank.size());
    return wrong;
  }

 private:
  std::size_t rank_ = 0;
};

// The count is this rank's own.
class UnreducedCount : public MeanOfRankMeans {
 public:
  Denominator denominator(const Census& census) const override {
    Denominator wrong = MeanOfRankMeans::denominator(census);
    wrong.value /= static_cast<double>(census.targets_by_rank.size());
    return wrong;
  }
};

// ---- wrong layouts: the naive one with something done to it ----

class Wrapped : public DataParallel {
 public:
  explicit Wrapped(std::unique_ptr<DataParallel> inner) : inner_(std::move(inner)) {}
  void zero_gradients() override { inner_->zero_gradients(); }
  void begin_backward(bool last) override { inner_->begin_backward(last); }
  void finish_reduction() override { inner_->finish_reduction(); }
  std::vector<Bucket>& buckets() override { return inner_->buckets(); }
  const Mesh& mesh() const override { return inner_->mesh(); }

 protected:
  std::unique_ptr<DataParallel> inner_;
};

class Averages : public Wrapped {
 public:
  using Wrapped::Wrapped;
  void finish_reduction() override {
    inner_->finish_reduction();
    for (auto& view : views()) view.gradient.div_(mesh().all().size());
  }
};

class ForgetsOne : public Wrapped {
 public:
  ForgetsOne(std::unique_ptr<DataParallel> inner, std::string name)
      : Wrapped(std::move(inner)), name_(std::move(name)) {}
  void finish_reduction() override {
    inner_->begin_backward(true);  // the naive layout puts its gradients into the buckets then
    for (auto& view : views())
      if (view.name == name_) local_ = view.gradient.clone();
    inner_->finish_reduction();
    for (auto& view : views())
      if (view.name == name_) view.gradient.copy_(local_);
  }

 private:
  std::string name_;
  at::Tensor local_;
};

class SumsNothing : public Wrapped {
 public:
  using Wrapped::Wrapped;
  void finish_reduction() override { inner_->begin_backward(true); }
};

// Rank 1 misses the last bit of what the others have: replicas drift apart.
class DriftsOnRankOne : public Wrapped {
 public:
  using Wrapped::Wrapped;
  void finish_reduction() override {
    inner_->finish_reduction();
    if (mesh().all().rank() == 1) views()[0].gradient.view({-1}).narrow(0, 0, 1).mul_(1 + 1e-6);
  }
};

class NeverTheSame : public Wrapped {
 public:
  using Wrapped::Wrapped;
  void finish_reduction() override {
    inner_->finish_reduction();
    views()[2].gradient.mul_(1 + 1e-7 * ++steps_);
  }

 private:
  int steps_ = 0;
};

template <class Layout, class... Arguments>
std::function<void(VerifyProblem&, World&)> with_layout(Arguments... arguments) {
  return [=](VerifyProblem& problem, World&) {
    problem.layouts = {{"fault", [=](auto parameters, Group group) {
                          return std::make_unique<Layout>(naive(std::move(parameters), group), arguments...);
                        }}};
  };
}

template <class Wrong>
void with_normalizer(VerifyProblem& problem, World&) {
  problem.make_normalizer = [] { return std::make_unique<Wrong>(); };
}

class FaultAtRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, FaultAtRanks, ::testing::Values(2, 3, 4, 5));

TEST_P(FaultAtRanks, MeanOfPerRankMeansIsFound) {
  const Verdict verdict = verify_on(GetParam(), Small{}, with_normalizer<MeanOfRankMeans>);
  EXPECT_FALSE(verdict.passed);
  const LayoutVerdict& layout = verdict.layouts.at(0);
  EXPECT_EQ(layout.e1.state, Grade::State::kFailed);
  EXPECT_EQ(layout.e2.state, Grade::State::kFailed);  // visible in the run's own precision too
  EXPECT_EQ(layout.e1.failed, static_cast<std::int64_t>(layout.parameters.size()));
  EXPECT_EQ(verdict.findings.at(0).id, "mean_of_rank_means");
}

TEST_P(FaultAtRanks, ACountThatIsNotReducedIsFound) {
  const Verdict verdict = verify_on(GetParam(), Small{}, with_normalizer<UnreducedCount>);
  EXPECT_FALSE(verdict.passed);
  // Uneven ranks: about W times the gradient, in another direction.
  const Comparison& first = verdict.layouts.at(0).parameters.at(0).exact;
  EXPECT_NEAR(first.ratio, GetParam(), 0.5 * GetParam());
  EXPECT_GT(first.residual, 1e-6);
  EXPECT_EQ(verdict.findings.at(0).id, "count_not_reduced");
}

TEST_P(FaultAtRanks, AveragedGradientsAreNamedWithTheirRatio) {
  const int ranks = GetParam();
  const Verdict verdict = verify_on(ranks, Small{}, with_layout<Averages>());
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

TEST(Fault, AStepThatDoesNotRepeatIsFound) {
  const Verdict verdict = verify_on(2, Small{}, with_layout<NeverTheSame>());
  EXPECT_FALSE(verdict.passed);
  EXPECT_EQ(verdict.layouts.at(0).e3.state, Grade::State::kFailed);
  EXPECT_THAT(verdict.diagnosis, Contains(HasSubstr("the same step made twice gives different bits")));
}

TEST(Fault, InitialParametersThatDependOnTheRankAreFound) {
  const Verdict verdict = verify_on(3, Small{}, [](VerifyProblem& problem, World& world) {
    problem.make_model = [make = problem.make_model, rank = world.rank](at::ScalarType dtype) {
      VerifyModel model = make(dtype);
      if (rank == 2) model.named[3].second.detach().view({-1}).narrow(0, 0, 1).add_(1e-3);
      return model;
    };
  });
  EXPECT_FALSE(verdict.passed);
  EXPECT_THAT(verdict.diagnosis,
              Contains(HasSubstr("1 of 20 parameters differ over the ranks before the step")));
}

TEST(Fault, ASampleSeenTwiceIsFound) {
  const Verdict verdict = verify_on(2, Small{}, [](VerifyProblem& problem, World& world) {
    if (world.rank == 1) problem.local.push_back(problem.local.back());
  });
  EXPECT_FALSE(verdict.passed);
  EXPECT_FALSE(verdict.batch_agrees);
  EXPECT_EQ(verdict.findings.at(0).id, "sample_twice");
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
        problem.make_model = [make = problem.make_model, more](at::ScalarType type) {
          VerifyModel model = make(type);
          if (type == at::kDouble) return model;
          model.loss_terms = [inner = model.loss_terms, more](const Batch& batch) {
            LossTerms terms = inner(batch);
            for (auto& term : terms) term.sum = term.sum + more * term.sum.detach();
            return terms;
          };
          return model;
        };
      });
      EXPECT_EQ(verdict.passed, of_bound < 1) << c10::toString(dtype) << "\n" << to_text(verdict);
      if (of_bound > 1) {
        ASSERT_FALSE(verdict.findings.empty());
        EXPECT_EQ(verdict.findings[0].id, "loss_differs");
      }
    }
}

// What is logged must be what was differentiated: a loss of another scale fails although the gradient is
// right.
TEST(Fault, ALossThatIsNotWhatWasDifferentiatedIsFound) {
  const Verdict verdict = verify_on(2, Small{}, [](VerifyProblem& problem, World&) {
    problem.make_model = [make = problem.make_model](at::ScalarType dtype) {
      VerifyModel model = make(dtype);
      model.loss_terms = [inner = model.loss_terms](const Batch& batch) {
        LossTerms terms = inner(batch);
        for (auto& term : terms) term.sum = term.sum + term.sum.detach();
        return terms;
      };
      return model;
    };
  });
  EXPECT_FALSE(verdict.passed);
  EXPECT_EQ(verdict.layouts.at(0).e1.failed, 0);
  EXPECT_THAT(verdict.diagnosis, Contains(HasSubstr("(ratio 2")));
}

}  // namespace
}  // namespace isograd
