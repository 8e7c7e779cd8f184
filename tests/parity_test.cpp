// The law, tested: the gradient of many ranks is that of one process on the whole batch, and each planted
// mistake is seen. Numbers B.. are those of the museum of biased gradients.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <random>
#include <thread>

#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "toy.hpp"

namespace isograd {
namespace {

constexpr double kExact = 1e-10;  // E1: in fp64, of the scale s of each parameter
const int kRanks[] = {1, 2, 3, 4, 5, 8};

// ---- planted mistakes, each put in through the seam of the right component ----

// B1, B11: each micro-batch's own mean, then divided by the number of micro-batches.
struct MeanOfMicroBatchMeans : TokenMean {
  mutable std::vector<std::int64_t> counts;
  mutable std::size_t next = 0;
  Census count(const MicroBatches& micro_batches, Group& data, bool stop) override {
    counts.clear();
    next = 0;
    for (const Batch& batch : micro_batches) counts.push_back(batch.num_targets());
    return TokenMean::count(micro_batches, data, stop);
  }
  Denominator denominator(const Census& census) const override {
    return {.value = static_cast<double>(census.micro_batches)};
  }
  at::Tensor scale(const LossTerms& terms, const Denominator& denominator) const override {
    const double own = static_cast<double>(std::max<std::int64_t>(1, counts.at(next++)));
    return TokenMean::scale(terms, {.value = denominator.value * own});
  }
};

// B7: mean over the rank's own tokens, averaged over ranks.
struct MeanOfRankMeans : TokenMean {
  std::int64_t own = 0, ranks = 0;
  Census count(const MicroBatches& micro_batches, Group& data, bool stop) override {
    const Census census = TokenMean::count(micro_batches, data, stop);
    own = std::max<std::int64_t>(1, census.targets_by_rank.at(data.rank()));
    ranks = data.size();
    return census;
  }
  Denominator denominator(const Census&) const override {
    return {.value = static_cast<double>(own * ranks)};
  }
};

// B3: the count stays on its rank, the gradient is summed.
struct CountNotReduced : MeanOfRankMeans {
  Denominator denominator(const Census&) const override { return {.value = static_cast<double>(own)}; }
};

// B30: nothing divides.
struct NothingDivides : TokenMean {
  Denominator denominator(const Census&) const override { return {.value = 1}; }
};

// A layout around the right one.
struct Wrapped : DataParallel {
  std::unique_ptr<DataParallel> inner;
  explicit Wrapped(std::unique_ptr<DataParallel> inner_) : inner(std::move(inner_)) {}
  void zero_gradients() override { inner->zero_gradients(); }
  void begin_backward(bool last) override { inner->begin_backward(last); }
  void finish_reduction() override { inner->finish_reduction(); }
  std::vector<Bucket>& buckets() override { return inner->buckets(); }
  Group& group() override { return inner->group(); }
};

struct Averages : Wrapped {  // B14's opposite: the reducer divides by the ranks
  using Wrapped::Wrapped;
  void finish_reduction() override {
    inner->finish_reduction();
    for (Bucket& bucket : buckets()) bucket.gradients.div_(group().size());
  }
};

struct SkipsABucket : Wrapped {  // B16: replicas drift apart
  using Wrapped::Wrapped;
  void finish_reduction() override {
    const at::Tensor local = buckets().back().gradients.clone();
    inner->finish_reduction();
    buckets().back().gradients.copy_(local);
  }
};

struct ReducesTwice : Wrapped {
  using Wrapped::Wrapped;
  void finish_reduction() override {
    inner->finish_reduction();
    for (Bucket& bucket : buckets()) group().all_reduce(bucket.gradients);
  }
};

// B28 on one accumulating buffer: reducing after every micro-batch multiplies the earlier ones. Every rank
// must reduce equally often, so ranks with fewer micro-batches catch up at the end.
struct ReducesEveryMicroBatch : Wrapped {
  int times = 0, backward = 0;
  ReducesEveryMicroBatch(std::unique_ptr<DataParallel> inner_, int times_)
      : Wrapped(std::move(inner_)), times(times_) {}
  void reduce() {
    for (Bucket& bucket : buckets()) group().all_reduce(bucket.gradients);
  }
  void begin_backward(bool last) override {
    if (backward++ > 0 && --times > 0) reduce();
    inner->begin_backward(last);
  }
  void finish_reduction() override {
    while (--times > 0) reduce();
    inner->finish_reduction();
  }
};

// B17: the next use of a buffer begins while its reduction is under way.
struct ReusesBuffersInFlight : Wrapped {
  using Wrapped::Wrapped;
  void finish_reduction() override {
    for (Bucket& bucket : buckets()) {
      Pending pending = group().all_reduce_async(bucket.gradients);
      bucket.gradients.zero_();
      pending.wait();
    }
  }
};

// ---- one step on many ranks ----

struct Setting {
  std::function<std::unique_ptr<Normalizer>()> mean = [] { return std::make_unique<TokenMean>(); };
  std::function<std::unique_ptr<DataParallel>(std::unique_ptr<DataParallel>)> wrap =
      [](std::unique_ptr<DataParallel> layout) { return layout; };
  decltype(&bucketed) make = bucketed;
  DataParallelOptions options = {.bucket_bytes = 256};  // many buckets
};

struct Outcome {
  std::vector<std::vector<at::Tensor>> local;      // per rank, before the reduction; only without overlap
  std::vector<std::vector<at::Tensor>> gradients;  // per rank
  std::vector<StepReport> reports;
};

Outcome run_step(const std::vector<MicroBatches>& batches, const Setting& setting = {}) {
  const int size = static_cast<int>(batches.size());
  Outcome outcome;
  outcome.local.resize(size);
  outcome.gradients.resize(size);
  outcome.reports.resize(size);
  run_ranks(size, [&](World& world) {
    toy::Model model;
    auto layout =
        setting.wrap(setting.make(trainable_parameters(model.named()), world.group, setting.options));
    auto mean = setting.mean();
    auto optimizer = sgd({.learning_rate = 0});
    Step step(
        [&](const Batch& batch) -> LossTerms {
          return {{"cross_entropy", cross_entropy_sum(model.logits(batch), batch.targets)}};
        },
        *layout, *mean, *optimizer, {});
    step.accumulate(batches[world.rank]);
    if (!setting.options.overlap)
      for (auto& view : layout->views()) outcome.local[world.rank].push_back(view.gradient.clone());
    outcome.reports[world.rank] = step.finish();
    for (auto& view : layout->views()) outcome.gradients[world.rank].push_back(view.gradient.clone());
  });
  return outcome;
}

// The largest error of any parameter on any rank.
double worst_error(const Outcome& outcome, const toy::Reference& wanted) {
  double worst = 0;
  for (auto& gradients : outcome.gradients)
    worst = std::max(worst, toy::worst_error(gradients, wanted.gradients));
  return worst;
}

TEST(Parity, GradientIsThatOfOneProcess) {
  double worst = 0;
  for (int size : kRanks)
    for (int accumulation : {1, 3}) {
      const auto batches = toy::make_step(size, accumulation);
      const auto wanted = toy::reference(toy::Model(), batches);
      for (auto make : {bucketed, naive})
        for (bool overlap : {true, false})
          for (std::int64_t bucket_bytes : {1, 256, 1 << 20}) {
            Setting setting{.make = make, .options = {.bucket_bytes = bucket_bytes, .overlap = overlap}};
            const Outcome outcome = run_step(batches, setting);
            const double error = worst_error(outcome, wanted);
            worst = std::max(worst, error);
            EXPECT_LT(error, kExact) << size << " ranks, accumulation " << accumulation;
            for (auto& report : outcome.reports) EXPECT_NEAR(report.loss, wanted.loss, 1e-12);
          }
    }
  std::printf("largest error of any parameter: %.2e of its scale (allowed %.0e)\n", worst, kExact);
}

// Doing nothing must not pass as parity: before the reduction the ranks hold different gradients, none of
// them the right one.
TEST(Parity, LocalGradientsDifferBeforeTheReduction) {
  for (int size : kRanks) {
    if (size == 1) continue;
    const auto batches = toy::make_step(size, 3);
    const auto wanted = toy::reference(toy::Model(), batches);
    const Outcome outcome = run_step(batches, {.options = {.bucket_bytes = 256, .overlap = false}});
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_GT(toy::worst_error(outcome.local[rank], wanted.gradients), 1e-3) << rank << " of " << size;
      EXPECT_GT(toy::worst_error(outcome.local[rank], outcome.local[(rank + 1) % size]), 1e-3);
    }
  }
}

TEST(Parity, EachPlantedMistakeIsSeen) {
  const auto wrapped = [](auto* type) {
    return [](std::unique_ptr<DataParallel> layout) -> std::unique_ptr<DataParallel> {
      return std::make_unique<std::remove_pointer_t<decltype(type)>>(std::move(layout));
    };
  };
  for (int size : kRanks)
    for (int accumulation : {1, 3}) {
      const auto batches = toy::make_step(size, accumulation);
      const auto wanted = toy::reference(toy::Model(), batches);
      std::vector<std::pair<const char*, Setting>> mistakes = {
          {"B1 mean of micro-batch means",
           {.mean = [] { return std::make_unique<MeanOfMicroBatchMeans>(); }}},
          {"B30 nothing divides", {.mean = [] { return std::make_unique<NothingDivides>(); }}},
      };
      if (size > 1) {
        const Setting late{.options = {.bucket_bytes = 256, .overlap = false}};
        Setting averages = late, skips = late, twice = late, every = late;
        averages.wrap = wrapped(static_cast<Averages*>(nullptr));
        skips.wrap = wrapped(static_cast<SkipsABucket*>(nullptr));
        twice.wrap = wrapped(static_cast<ReducesTwice*>(nullptr));
        mistakes.push_back(
            {"B7 mean of rank means", {.mean = [] { return std::make_unique<MeanOfRankMeans>(); }}});
        mistakes.push_back(
            {"B3 count not reduced", {.mean = [] { return std::make_unique<CountNotReduced>(); }}});
        mistakes.push_back({"averaging reducer", averages});
        mistakes.push_back({"B16 bucket not reduced", skips});
        mistakes.push_back({"bucket reduced twice", twice});
        if (accumulation > 1) {
          every.wrap = [&](std::unique_ptr<DataParallel> layout) -> std::unique_ptr<DataParallel> {
            return std::make_unique<ReducesEveryMicroBatch>(std::move(layout), accumulation + 1);
          };
          mistakes.push_back({"B28 reduced at every micro-batch", every});
        }
      }
      for (auto& [name, setting] : mistakes)
        EXPECT_GT(worst_error(run_step(batches, setting), wanted), 1e-3)
            << name << " passed on " << size << " ranks, accumulation " << accumulation;
    }
}

// Every sample given twice: another batch, the same mean.
TEST(Parity, TheDoubledBatchHasTheSameGradient) {
  for (int size : {1, 3, 4}) {
    const auto batches = toy::make_step(size, 3);
    auto doubled = batches;
    for (int rank = 0; rank < size; ++rank)
      doubled[rank].insert(doubled[rank].end(), batches[rank].begin(), batches[rank].end());
    const Outcome once = run_step(batches), twice = run_step(doubled);
    EXPECT_LT(toy::worst_error(twice.gradients[0], once.gradients[0]), 1e-12);
    EXPECT_NEAR(twice.reports[0].loss, once.reports[0].loss, 1e-13);
    const Outcome wrong = run_step(doubled, {.mean = [] { return std::make_unique<NothingDivides>(); }});
    EXPECT_GT(toy::worst_error(wrong.gradients[0], once.gradients[0]), 1e-3);
  }
}

// The samples of the batch dealt to the ranks in another order, and to another number of ranks.
TEST(Parity, DoesNotDependOnWhoHoldsASample) {
  const auto batches = toy::make_step(5, 2);
  auto rotated = batches;
  std::rotate(rotated.begin(), rotated.begin() + 2, rotated.end());
  const std::vector<MicroBatches> alone = {{toy::concatenate(batches)}};
  const auto wanted = run_step(batches).gradients[0];
  EXPECT_LT(toy::worst_error(run_step(rotated).gradients[0], wanted), 1e-12);
  EXPECT_LT(toy::worst_error(run_step(alone).gradients[0], wanted), 1e-12);
}

TEST(Parity, BucketedEqualsItsNaiveTwin) {
  for (int size : kRanks) {
    const auto batches = toy::make_step(size, 3, 1);
    const Outcome fast = run_step(batches, {.make = bucketed}), slow = run_step(batches, {.make = naive});
    for (int rank = 0; rank < size; ++rank)
      EXPECT_LT(toy::worst_error(fast.gradients[rank], slow.gradients[rank]), 1e-12);
  }
}

// Two ranks with 900 and 100 targets, losses 1 and 11 each: token mean 2, mean of means 6 (losses.md §9).
TEST(Parity, NineHundredAndOneHundredTargets) {
  const auto loss_with = [](auto mean) {
    double loss = 0;
    run_ranks(2, [&](World& world) {
      at::Tensor level = at::full({1}, world.rank == 0 ? 1.0 : 11.0, at::kDouble);
      at::Tensor weight = at::ones({1}, at::kDouble).requires_grad_(true);
      auto layout = bucketed(trainable_parameters({{"weight", weight}}), world.group, {});
      auto optimizer = sgd({.learning_rate = 0});
      Batch batch;
      const std::int64_t count = world.rank == 0 ? 900 : 100;
      batch.tokens = batch.positions = batch.targets = at::zeros({count}, at::kLong);
      batch.cu_seqlens = {0, count};
      batch.sample_ids = {world.rank};
      batch.sample_targets = {count};
      decltype(mean) own = mean;
      Step step(
          [&](const Batch& b) -> LossTerms {
            return {{"loss", (weight * level).sum() * static_cast<double>(b.num_targets())}};
          },
          *layout, own, *optimizer, {});
      const StepReport report = step({batch});
      if (world.rank == 0) loss = report.loss;
      EXPECT_DOUBLE_EQ(report.loss,
                       layout->views()[0].gradient.template item<double>());  // d(loss)/d(weight) = loss here
    });
    return loss;
  };
  EXPECT_DOUBLE_EQ(loss_with(TokenMean()), 2.0);
  EXPECT_DOUBLE_EQ(loss_with(MeanOfRankMeans()), 6.0);
}

// ---- trajectories: several steps with clipping and AdamW against the same written out on one process ----

std::vector<at::Tensor> reference_trajectory(int steps, int size, const AdamWOptions& o, double max_norm) {
  toy::Model model;
  const auto parameters = model.trainable();
  std::vector<at::Tensor> m, v;
  for (auto& p : parameters) {
    m.push_back(at::zeros_like(p.detach()));
    v.push_back(at::zeros_like(p.detach()));
  }
  for (int t = 1; t <= steps; ++t) {
    const auto wanted = toy::reference(model, toy::make_step(size, 2, t));
    double squares = 0;
    for (auto& g : wanted.gradients) squares += g.square().sum().item<double>();
    const double clip = std::min(1.0, max_norm / (std::sqrt(squares) + 1e-6));
    at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor g = wanted.gradients[i] * clip;
      if (parameters[i].dim() >= 2) parameters[i].mul_(1 - o.learning_rate * o.weight_decay);
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
      const at::Tensor m_hat = m[i] / (1 - std::pow(o.beta1, t)), v_hat = v[i] / (1 - std::pow(o.beta2, t));
      parameters[i].sub_(o.learning_rate * m_hat / (v_hat.sqrt() + o.epsilon));
    }
  }
  std::vector<at::Tensor> result;
  for (auto& p : parameters) result.push_back(p.detach());
  return result;
}

// `pause` is called in every forward and in every backward.
std::vector<at::Tensor> trajectory(
    int steps, int size, const AdamWOptions& options, double max_norm,
    const std::function<void(int rank)>& pause = [](int) {}, bool reuse_in_flight = false) {
  std::vector<std::vector<at::Tensor>> weights(size);
  run_ranks(size, [&](World& world) {
    toy::Model model;
    auto layout = bucketed(trainable_parameters(model.named()), world.group,
                           {.bucket_bytes = 128, .overlap = !reuse_in_flight});
    if (reuse_in_flight) layout = std::make_unique<ReusesBuffersInFlight>(std::move(layout));
    auto optimizer = adamw(options);
    TokenMean mean;
    Step step(
        [&](const Batch& batch) -> LossTerms {
          pause(world.rank);
          at::Tensor logits = model.logits(batch);
          logits.register_hook([&](const at::Tensor&) { pause(world.rank); });
          return {{"cross_entropy", cross_entropy_sum(logits, batch.targets)}};
        },
        *layout, mean, *optimizer, {.max_norm = max_norm});
    for (auto& p : model.trainable()) p.register_hook([&](const at::Tensor&) { pause(world.rank); });
    for (int t = 1; t <= steps; ++t) {
      EXPECT_TRUE(step(toy::make_step(size, 2, t)[world.rank]).updated);
      pause(world.rank);
    }
    for (auto& p : model.trainable()) weights[world.rank].push_back(p.detach().clone());
  });
  for (auto& rank : weights)
    for (std::size_t i = 0; i < rank.size() && !reuse_in_flight; ++i)
      EXPECT_TRUE(at::equal(rank[i], weights[0][i])) << "replicas drifted apart";
  return weights[0];
}

TEST(Trajectory, AdamWWithClippingIsThatOfOneProcess) {
  const AdamWOptions options{.learning_rate = 0.02, .weight_decay = 0.1};
  for (int size : {1, 2, 3, 5}) {
    const auto ours = trajectory(5, size, options, 0.05),
               wanted = reference_trajectory(5, size, options, 0.05);
    EXPECT_LT(toy::worst_error(ours, wanted), 1e-9) << size;
    // B18d: without clipping the comparison fails.
    EXPECT_GT(toy::worst_error(trajectory(5, size, options, 0), wanted), 1e-6) << size;
  }
}

// Same layout, same bits (E3), whatever the timing: no buffer is touched while its reduction is under way
// (B17).
TEST(Trajectory, HasTheSameBitsUnderInjectedDelays) {
  const AdamWOptions options{.learning_rate = 0.02};
  const auto delayed = [&](int size, unsigned seed, bool reuse_in_flight) {
    std::vector<std::mt19937> random;
    for (int rank = 0; rank < size; ++rank) random.emplace_back(100 * seed + rank);
    const auto pause = [&](int rank) {
      if (random[rank]() % 4 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random[rank]() % 1500));
    };
    return trajectory(4, size, options, 0.05, pause, reuse_in_flight);
  };
  const auto same = [](const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
    for (std::size_t i = 0; i < a.size(); ++i)
      if (!at::equal(a[i], b[i])) return false;
    return true;
  };
  for (int size : {2, 3, 5}) {
    const auto wanted = trajectory(4, size, options, 0.05);
    for (unsigned seed : {1u, 2u, 3u})
      EXPECT_TRUE(same(delayed(size, seed, false), wanted)) << size << " ranks, seed " << seed;
#ifndef __SANITIZE_THREAD__  // the planted mistake is a data race, which the sanitizer reports as such
    EXPECT_FALSE(same(delayed(size, 1, true), wanted)) << "B17 passed on " << size << " ranks";
#endif
  }
}

}  // namespace
}  // namespace isograd
