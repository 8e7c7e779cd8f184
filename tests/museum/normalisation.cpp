// Wrong denominators: B1 to B4, B6 to B9, B11, B12, B22, B30 to B33.
#include <algorithm>
#include <cmath>

#include "museum/room.hpp"

namespace isograd::museum {
namespace {

using planted::Wrapped;

// B1: each micro-batch's own mean, divided by the rank's number of micro-batches; the ranks are averaged.
struct MeanOfOwnMicroBatches : planted::MeanOfMicroBatchMeans {
  Denominator denominator(const Census& census) const override {
    // A rank without any divides nothing, and takes part where all make equally many.
    const auto own =
        std::max<std::int64_t>(1, census.micro_batches_by_rank.at(static_cast<std::size_t>(census.rank)));
    return {.value = static_cast<double>(own) * static_cast<double>(census.micro_batches_by_rank.size())};
  }
};

// B2
struct MicroBatchesSummed : TokenMean {
  Denominator denominator(const Census& census) const override {
    Denominator wrong = TokenMean::denominator(census);
    wrong.value /= static_cast<double>(census.global_micro_batches);
    return wrong;
  }
};

// B4
struct CountOfOneReplica : TokenMean {
  Denominator denominator(const Census& census) const override {
    Denominator wrong = TokenMean::denominator(census);
    wrong.value = static_cast<double>(*std::find_if(
        census.targets_by_rank.begin(), census.targets_by_rank.end(), [](auto count) { return count > 0; }));
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

// B31
struct DividedByAccumulationToo : TokenMean {
  Denominator denominator(const Census& census) const override {
    Denominator wrong = TokenMean::denominator(census);
    wrong.value *= static_cast<double>(census.global_micro_batches);
    return wrong;
  }
};

// B32: each micro-batch's own mean, and no division by their number; the ranks are averaged.
struct OwnMicroBatchesSummed : planted::MeanOfMicroBatchMeans {
  Denominator denominator(const Census& census) const override {
    return {.value = static_cast<double>(census.micro_batches_by_rank.size())};
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

// A reducer that uses a number of what the rank has counted.
template <class Layout>
void with_counted_layout(VerifyProblem& problem, double (*number)(const CountedStep&)) {
  auto counted = std::make_shared<CountedStep>();
  count_into(counted, problem);
  with_layout<Layout>(problem, [counted, number] { return number(*counted); });
}

}  // namespace

void add_normalisation(std::vector<Exhibit>& list) {
  const auto any = [](int ranks) { return ranks > 0; };
  list.push_back(
      {.id = "B1",
       .title = "mean of micro-batch means",
       .mistake = "Each micro-batch's loss is the mean over its own tokens; accumulation divides by the "
                  "number of micro-batches, the reducer by the number of ranks. A token in a short "
                  "micro-batch then weighs more than one in a long one.",
       .who = "Accumulation loops around a model that returns a mean loss; the widely used ones did it "
              "for years, until it was noticed in 2024 that long and short documents trained differently.",
       .number = "No constant ratio: the direction of every parameter differs. Per-token weights are "
                 "1/(n_kj G_k W).",
       .diagnosis = "mean_of_micro_batch_means_by_rank",
       .plant = [](VerifyProblem& p, World&) { with_normalizer<MeanOfOwnMicroBatches>(p); }});
  list.push_back(
      {.id = "B2",
       .title = "micro-batches summed",
       .mistake = "The losses of the micro-batches are added up and never divided by their number.",
       .who = "Loops that turn accumulation on and forget loss / G.",
       .number = "Every parameter has the ratio G. Adam hides it; SGD and clipping do not.",
       .diagnosis = "summed_over_micro_batches",
       .exists = any,
       .plant = [](VerifyProblem& p, World&) { with_normalizer<MicroBatchesSummed>(p); }});
  list.push_back(
      {.id = "B3",
       .title = "token count not reduced over ranks",
       .mistake = "The sum of losses is divided by this rank's count of tokens; gradients are summed.",
       .who = "Trainers that count tokens on each rank and forget the all-reduce of the count.",
       .number = "About W where ranks hold equally much, another direction where they do not.",
       .diagnosis = "count_not_reduced",
       .plant = [](VerifyProblem& p, World&) { with_normalizer<planted::CountNotReduced>(p); }});
  list.push_back({.id = "B4",
                  .title = "count of one replica only",
                  .mistake =
                      "One process drives several replicas and takes the token count of the first one for "
                      "all of them.",
                  .who = "Single-process data parallelism.",
                  .number = "The same as B3 where replicas hold equally much; otherwise one ratio N/n_0.",
                  .diagnosis = "count_not_reduced",
                  .plant = [](VerifyProblem& p, World&) { with_normalizer<CountOfOneReplica>(p); }});
  list.push_back({.id = "B6",
                  .title = "the loss in the log multiplied",
                  .mistake =
                      "The loss that is logged was summed over ranks that all have the whole of it. The "
                      "gradient is right.",
                  .who = "Evaluation code that reuses the training loss's all-reduce.",
                  .number = "Loss ratio W, gradient ratio 1.",
                  .diagnosis = "loss_scaled",
                  .plant = [](VerifyProblem& p, World& world) { multiply_log(p, world.size); }});
  list.push_back({.id = "B7",
                  .title = "mean of per-rank means",
                  .mistake =
                      "Each rank takes the mean over its own tokens, gradients are averaged over ranks. "
                      "That is the global mean only where all ranks hold equally many tokens.",
                  .who = "Anyone who puts a mean loss under PyTorch's DDP or FSDP: their reducers average.",
                  .number = "No constant ratio; per-token weights are 1/(n_k W).",
                  .diagnosis = "mean_of_rank_means",
                  .plant = [](VerifyProblem& p, World&) { with_normalizer<planted::MeanOfRankMeans>(p); }});
  list.push_back({.id = "B8",
                  .title = "the gradient multiplied, the log right",
                  .mistake = "The loss is divided by the token count for the log, its undivided twin is "
                             "differentiated.",
                  .who = "Trainers that keep a loss for the log and a loss for backward apart.",
                  .number = "Loss ratio 1, gradient ratio N.",
                  .diagnosis = "gradient_scaled_by_count",
                  .exists = any,
                  .plant = [](VerifyProblem& p, World&) {
                    with_counted_layout<planted::MultipliesSums>(
                        p, [](const CountedStep& counted) { return counted.denominator; });
                  }});
  list.push_back(
      {.id = "B9",
       .title = "every micro-batch rescales what was accumulated",
       .mistake = "1/G is applied to the gradient buffer at each backward instead of to the loss, so "
                  "that the first micro-batch is divided again by every later one.",
       .who = "Hooks that scale gradients after backward.",
       .number = "Weights of micro-batches fall geometrically: 1, 1/G, 1/G², ... from the last back.",
       .diagnosis = "accumulation_rescaled",
       .exists = any,
       .plant = [](VerifyProblem& p, World&) {
         with_counted_layout<planted::RescalesTheBuffer>(
             p, [](const CountedStep& counted) { return counted.own_micro_batches(); });
       }});
  list.push_back(
      {.id = "B11",
       .title = "own tokens, then the number of micro-batches",
       .mistake = "Each micro-batch is divided by its own tokens, then by the number of micro-batches of "
                  "all ranks; gradients are summed.",
       .who = "Trainers that normalise in the loss function and again in the schedule.",
       .number = "No constant ratio; per-token weights are 1/(n_kj M).",
       .diagnosis = "mean_of_micro_batch_means",
       .exists = any,
       .plant = [](VerifyProblem& p, World&) { with_normalizer<planted::MeanOfMicroBatchMeans>(p); }});
  list.push_back(
      {.id = "B12",
       .title = "a micro-batch without a valid token",
       .mistake = "A mean over the valid tokens of a micro-batch that has none is 0/0, and 0 times NaN "
                  "is NaN.",
       .who = "Any mean-reduced loss with an ignore index, the day a micro-batch holds nothing but "
              "prompt.",
       .number = "NaN everywhere, on all ranks.",
       .diagnosis = "not_finite_empty_micro_batch",
       .exists = any,
       .plant = [](VerifyProblem& p, World&) { with_normalizer<MeanOverNothing>(p); }});
  list.push_back({.id = "B22",
                  .title = "auxiliary loss multiplied by the ranks",
                  .mistake = "A term beside the main loss is normalised per rank and summed over ranks.",
                  .who = "Router balance and z-losses of mixture-of-experts trainers.",
                  .number = "The router's ratio is W, all others are 1.",
                  .diagnosis = "term_scaled",
                  .plant = [](VerifyProblem& p, World& world) {
                    p.make_model = [ranks = world.size](at::ScalarType dtype) {
                      auto model = std::make_shared<RoomModel>(dtype);
                      model->with_router = true;
                      return as_verify_model(std::move(model), ranks);
                    };
                  }});
  list.push_back({.id = "B22g",
                  .title = "auxiliary loss not divided by accumulation",
                  .mistake =
                      "The main loss is divided by the targets of the step, a term beside it by those of "
                      "its micro-batches on average: it counts once for each of them.",
                  .who = "Trainers that were mended to count targets, and left their auxiliary losses alone.",
                  .number = "The router's ratio is G, all others are 1.",
                  .diagnosis = "term_scaled",
                  .plant = [](VerifyProblem& p, World& world) {
                    at::Tensor most = at::full({1}, static_cast<std::int64_t>(p.local.size()), at::kLong);
                    world.group.all_reduce(most, ReduceOp::kMax);
                    p.make_model = [factor = most.item<double>()](at::ScalarType dtype) {
                      auto model = std::make_shared<RoomModel>(dtype);
                      model->with_router = true;
                      return as_verify_model(std::move(model), factor);
                    };
                  }});
  list.push_back({.id = "B30",
                  .title = "nothing divides",
                  .mistake = "The loss is the plain sum over tokens: the gradient grows with the batch.",
                  .who = "reduction='sum' without a denominator.",
                  .number = "Every parameter has the ratio N, and so has the loss.",
                  .diagnosis = "unscaled_sum",
                  .exists = any,
                  .plant = [](VerifyProblem& p, World&) { with_normalizer<planted::NothingDivides>(p); }});
  list.push_back(
      {.id = "B31",
       .title = "divided by accumulation as well",
       .mistake = "The loss is divided by the targets of the whole step, and by the number of micro-batches "
                  "again.",
       .who = "Loops that were mended to count targets, and kept loss / G.",
       .number = "Every parameter has the ratio 1/G.",
       .diagnosis = "averaged_over_micro_batches",
       .exists = any,
       .plant = [](VerifyProblem& p, World&) { with_normalizer<DividedByAccumulationToo>(p); }});
  list.push_back({.id = "B32",
                  .title = "means of uneven micro-batches summed",
                  .mistake = "Each micro-batch's loss is the mean over its own tokens; they are added up and "
                             "never divided by their number, the ranks are averaged.",
                  .who = "B2's loops around a model that returns a mean loss.",
                  .number = "No constant ratio; per-token weights are 1/(n_kj W).",
                  .diagnosis = "summed_over_micro_batches",
                  .plant = [](VerifyProblem& p, World&) { with_normalizer<OwnMicroBatchesSummed>(p); }});
  list.push_back({.id = "B33",
                  .title = "clipped before the reduction",
                  .mistake =
                      "Each rank clips its own part of the gradient, by its own norm; the clipped parts "
                      "are added up.",
                  .who = "Trainers that clip between backward and an all-reduce of their own.",
                  .number = "Weights of the ranks are inverse to the norms of their parts.",
                  .diagnosis = "clipped_before_reduction",
                  .plant = [](VerifyProblem& p, World&) { with_layout<ClipsItsOwnPart>(p); }});
}

}  // namespace isograd::museum
