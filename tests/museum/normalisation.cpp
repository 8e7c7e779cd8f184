// Wrong denominators: B1 to B4, B6 to B9, B11, B12, B22, B30 to B33.
#include <algorithm>
#include <cmath>

#include "museum/room.hpp"

namespace isograd::museum {
namespace {

using planted::Wrapped;

// B1: each micro-batch's own mean, divided by the rank's number of micro-batches; the ranks are averaged.
struct MeanOfOwnMicroBatches : planted::MeanOfMicroBatchMeans {
  Denominator denominator(const StepCounts& step_counts) const override {
    // A rank without any divides nothing, and takes part where all make equally many.
    const auto own = std::max<std::int64_t>(
        1, step_counts.micro_batches_by_rank.at(static_cast<std::size_t>(step_counts.rank)));
    return {.value =
                static_cast<double>(own) * static_cast<double>(step_counts.micro_batches_by_rank.size())};
  }
};

// The right count times a number of the step.
template <class Times>
struct TokenMeanTimes : TokenMean {
  Denominator denominator(const StepCounts& step_counts) const override {
    Denominator wrong = TokenMean::denominator(step_counts);
    wrong.value *= Times()(step_counts);
    return wrong;
  }
};
using MicroBatchesSummed =  // B2
    TokenMeanTimes<decltype(
        [](const StepCounts& c) { return 1.0 / static_cast<double>(c.global_micro_batches); })>;
using DividedByAccumulationToo =  // B31
    TokenMeanTimes<decltype([](const StepCounts& c) { return static_cast<double>(c.global_micro_batches); })>;

// B4
struct CountOfOneReplica : TokenMean {
  Denominator denominator(const StepCounts& step_counts) const override {
    Denominator wrong = TokenMean::denominator(step_counts);
    wrong.value = static_cast<double>(*std::find_if(step_counts.targets_by_rank.begin(),
                                                    step_counts.targets_by_rank.end(),
                                                    [](auto count) { return count > 0; }));
    return wrong;
  }
};

// B12: the mean over a micro-batch's own valid targets, times their number.
struct MeanOverNothing : TokenMean {
  mutable double valid = 0;
  Batch prepare(const Batch& batch, const Denominator& denominator) const override {
    valid = static_cast<double>(batch.num_targets());
    return TokenMean::prepare(batch, denominator);
  }
  at::Tensor scale(const LossTerms& terms, const Denominator& denominator) const override {
    return terms[0].sum.to(at::kDouble) / valid * valid / denominator.value;
  }
};

// B32: each micro-batch's own mean, and no division by their number; the ranks are averaged.
struct OwnMicroBatchesSummed : planted::MeanOfMicroBatchMeans {
  Denominator denominator(const StepCounts& step_counts) const override {
    return {.value = static_cast<double>(step_counts.micro_batches_by_rank.size())};
  }
};

// B33
struct ClipsItsOwnPart : Wrapped {
  using Wrapped::Wrapped;
  void finish_reduction() override {
    double squares = 0;
    for (Bucket& bucket : buckets()) squares += bucket.gradients.square().sum().item<double>();
    constexpr double kLimit = 1e-3;  // shorter than any rank's part
    for (Bucket& bucket : buckets())
      bucket.gradients.mul_(std::min(1.0, kLimit / (std::sqrt(squares) + 1e-30)));
    inner->finish_reduction();
  }
};

// B22: the router's own term is multiplied.
void multiply_router(VerifyProblem& problem, double factor) {
  problem.make_model = [factor](at::ScalarType dtype) {
    auto model = std::make_shared<RoomModel>(dtype);
    model->with_router = true;
    return as_verify_model(std::move(model), factor);
  };
}

// A reducer that uses a number of what the rank has counted.
template <class Layout>
Plant counted_layout(double (*number)(const CountedStep&)) {
  return [number](VerifyProblem& problem, World&) {
    auto counted = std::make_shared<CountedStep>();
    count_into(counted, problem);
    with_layout<Layout>(problem, [counted, number] { return number(*counted); });
  };
}

}  // namespace

void add_normalisation(std::vector<Exhibit>& list) {
  const auto any = [](int ranks) { return ranks > 0; };
  list.push_back({.id = "B1", .plant = normalizer<MeanOfOwnMicroBatches>()});
  list.push_back({.id = "B2", .exists = any, .plant = normalizer<MicroBatchesSummed>()});
  list.push_back({.id = "B3", .plant = normalizer<planted::CountNotReduced>()});
  list.push_back({.id = "B4", .plant = normalizer<CountOfOneReplica>()});
  list.push_back({.id = "B6", .plant = [](VerifyProblem& p, World& world) { multiply_log(p, world.size); }});
  list.push_back({.id = "B7", .plant = normalizer<planted::MeanOfRankMeans>()});
  list.push_back({.id = "B8",
                  .exists = any,
                  .plant = counted_layout<planted::MultipliesSums>(
                      [](const CountedStep& counted) { return counted.denominator; })});
  list.push_back({.id = "B9",
                  .exists = any,
                  .plant = counted_layout<planted::RescalesTheBuffer>(
                      [](const CountedStep& counted) { return counted.own_micro_batches(); })});
  list.push_back({.id = "B11", .exists = any, .plant = normalizer<planted::MeanOfMicroBatchMeans>()});
  list.push_back({.id = "B12", .exists = any, .plant = normalizer<MeanOverNothing>()});
  list.push_back(
      {.id = "B22", .plant = [](VerifyProblem& p, World& world) { multiply_router(p, world.size); }});
  list.push_back({.id = "B22g", .plant = [](VerifyProblem& p, World& world) {
                    at::Tensor most = at::full({1}, static_cast<std::int64_t>(p.local.size()), at::kLong);
                    world.group.all_reduce(most, ReduceOp::kMax);
                    multiply_router(p, most.item<double>());
                  }});
  list.push_back({.id = "B30", .exists = any, .plant = normalizer<planted::NothingDivides>()});
  list.push_back({.id = "B31", .exists = any, .plant = normalizer<DividedByAccumulationToo>()});
  list.push_back({.id = "B32", .plant = normalizer<OwnMicroBatchesSummed>()});
  list.push_back({.id = "B33", .plant = layout<ClipsItsOwnPart>()});
}

}  // namespace isograd::museum
