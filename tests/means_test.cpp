// Every kind of mean: many ranks give the gradient of one process on the whole batch, however it is cut, and
// each planted mistake is seen.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <cmath>

#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "planted.hpp"
#include "toy_means.hpp"

namespace isograd {
namespace {

using MakeMean = std::function<std::unique_ptr<Normalizer>()>;

constexpr double kExact = 1e-10;  // E1: in fp64, of the scale s of each parameter
const Mean kMeans[] = {Mean::kTargets, Mean::kSamples, Mean::kWeights, Mean::kFixed, Mean::kNone};

struct Outcome {
  std::vector<std::vector<at::Tensor>> gradients;  // per rank
  std::vector<StepReport> reports;
};

struct Setting {
  MakeMean mean;
  bool averages = false;  // B19: gradients averaged over the ranks
  int calls = 1;          // accumulate() is called with this many parts of the micro-batches
  at::ScalarType type = at::kDouble;
};

Outcome run(const toy::Dealt& dealt, const Setting& setting) {
  const int size = static_cast<int>(dealt.by_rank.size());
  Outcome outcome;
  outcome.gradients.resize(static_cast<std::size_t>(size));
  outcome.reports.resize(static_cast<std::size_t>(size));
  run_ranks(size, [&](World& world) {
    toy::Model model(setting.type);
    std::unique_ptr<DataParallel> layout =
        bucketed(trainable_parameters(model.named()), world.group, {.bucket_bytes = 256});
    if (setting.averages) layout = std::make_unique<planted::Averages>(std::move(layout));
    const auto mean = setting.mean();
    const auto optimizer = sgd({.learning_rate = 0});
    Step step(
        [&](const Batch& batch) -> LossTerms {
          return {{"cross_entropy",
                   toy::weighted_sum(toy::token_losses(model.logits(batch), batch.targets), batch.weights)}};
        },
        *layout, *mean, *optimizer, {.check_denominators = false});
    const auto rank = static_cast<std::size_t>(world.rank);
    const MicroBatches& own = dealt.by_rank[rank];
    for (int call = 0; call < setting.calls; ++call) {
      const auto cut = [&](int i) {
        return own.begin() + static_cast<std::ptrdiff_t>(own.size() * static_cast<std::size_t>(i) /
                                                         static_cast<std::size_t>(setting.calls));
      };
      step.accumulate({cut(call), cut(call + 1)});
    }
    outcome.reports[rank] = step.finish();
    for (auto& view : layout->views())
      outcome.gradients[rank].push_back(view.gradient.to(at::kDouble) * outcome.reports[rank].gradient_scale);
  });
  return outcome;
}

double worst_error(const Outcome& outcome, const toy::Reference& wanted) {
  double worst = 0;
  for (auto& gradients : outcome.gradients)
    worst = std::max(worst, toy::worst_error(gradients, wanted.gradients));
  return worst;
}

class EveryMean : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, EveryMean, testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(EveryMean, GivesTheGradientOfOneProcess) {
  const int ranks = GetParam();
  double worst = 0;
  int cases = 0, faults = 0;
  for (int accumulation : {1, 3})
    for (const std::string& name : toy::kDeals)
      for (Mean mean : kMeans) {
        const bool weighted = mean != Mean::kTargets;
        const auto dealt = toy::deal(name, ranks, accumulation, weighted);
        const auto wanted = toy::reference(toy::Model(), dealt, mean, weighted);
        const std::string where =
            fmt::format("{}, {}, {} ranks, accumulation {}", name_of(mean), name, ranks, accumulation);
        const Outcome outcome = run(dealt, {.mean = [&] { return toy::make_normalizer(mean); }});
        ++cases;
        if (name == "all invalid") {
          for (const auto& report : outcome.reports) {
            EXPECT_EQ(report.loss, 0) << where;
            EXPECT_FALSE(report.updated) << where;
            EXPECT_TRUE(report.finite) << where;
          }
          for (const auto& gradient : outcome.gradients[0])
            EXPECT_EQ(gradient.abs().max().item<double>(), 0) << where;
          if (mean == Mean::kTargets || mean == Mean::kWeights) {
            ++faults;
            EXPECT_FALSE(run(dealt, {.mean = [&] { return std::make_unique<toy::Mistaken>(mean, "B12"); }})
                             .reports[0]
                             .finite)
                << where;
          }
          continue;
        }
        const double error = worst_error(outcome, wanted);
        worst = std::max(worst, error);
        EXPECT_LE(error, kExact) << where;
        for (const auto& report : outcome.reports) {
          EXPECT_NEAR(report.loss, wanted.loss, 1e-12 * std::max(1.0, wanted.loss)) << where;
          ASSERT_EQ(report.terms.size(), 1u);
          EXPECT_EQ(report.terms[0].name, "cross_entropy");
          EXPECT_NEAR(report.terms[0].value, wanted.loss, 1e-12 * std::max(1.0, wanted.loss)) << where;
        }
        auto mistakes = toy::mistakes_that_show(dealt, mean, weighted);
        if (ranks > 1) mistakes.push_back("B19");
        for (const std::string& mistake : mistakes) {
          ++faults;
          const Outcome wrong = run(dealt, {.mean = [&]() -> std::unique_ptr<Normalizer> {
                                              return std::make_unique<toy::Mistaken>(mean, mistake);
                                            },
                                            .averages = mistake == "B19"});
          EXPECT_GT(worst_error(wrong, wanted), 1e-6) << mistake << " passed: " << where;
        }
      }
  std::printf("%d ranks: %d cases, largest error %.2e of %.0e allowed; %d planted mistakes\n", ranks, cases,
              worst, kExact, faults);
}

// Random samples, cut at random places, dealt at random.
RC_GTEST_PROP(SampleMeanOf, AnyPartition, ()) {
  const int ranks = *rc::gen::inRange(1, 6), accumulation = *rc::gen::inRange(1, 4);
  const bool weighted = *rc::gen::arbitrary<bool>();
  toy::Dealt dealt;
  const int samples = *rc::gen::inRange(1, 7);
  for (int s = 0; s < samples; ++s) {
    const std::int64_t length = *rc::gen::inRange(1, 25);
    dealt.samples.push_back(
        toy::make_sample(length, static_cast<std::uint64_t>(100 + s), *rc::gen::inRange(0, 6) == 0));
    auto cuts = *rc::gen::container<std::vector<std::int64_t>>(*rc::gen::inRange(0, 5),
                                                               rc::gen::inRange<std::int64_t>(0, length + 1));
    cuts.push_back(0);
    cuts.push_back(length);
    std::sort(cuts.begin(), cuts.end());
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i)
      dealt.pieces.push_back(
          {s, cuts[i], cuts[i + 1], *rc::gen::inRange(0, ranks), *rc::gen::inRange(0, accumulation)});
  }
  std::vector<int> micro_batches(static_cast<std::size_t>(ranks));
  for (const auto& piece : dealt.pieces) {
    int& most = micro_batches[static_cast<std::size_t>(piece.rank)];
    most = std::max(most, piece.micro_batch + 1);
  }
  toy::build(dealt, micro_batches, weighted);
  for (Mean mean : {Mean::kSamples, weighted ? Mean::kWeights : Mean::kTargets}) {
    const auto wanted = toy::reference(toy::Model(), dealt, mean, weighted);
    const Outcome outcome = run(dealt, {.mean = [&] { return toy::make_normalizer(mean); }});
    RC_ASSERT(std::abs(outcome.reports[0].loss - wanted.loss) < 1e-12 * std::max(1.0, wanted.loss));
    if (wanted.loss != 0) RC_ASSERT(worst_error(outcome, wanted) <= kExact);
  }
}

// Every sample given twice, under ids of its own; and the samples dealt to the ranks in another order.
TEST(EveryMeanIs, TheSameForTheDoubledAndThePermutedBatch) {
  for (int ranks : {1, 3, 4})
    for (Mean mean : {Mean::kTargets, Mean::kSamples, Mean::kWeights}) {
      const bool weighted = mean != Mean::kTargets;
      for (const char* name : {"uneven", "packs", "one sample in five"}) {
        const auto once = toy::deal(name, ranks, 3, weighted);
        auto twice = once, rotated = once;
        for (auto& batches : twice.by_rank)
          for (std::size_t i = 0, n = batches.size(); i < n; ++i) {
            Batch copy = batches[i];
            for (auto& id : copy.sample_ids) id += 600;  // even: parity of ids is seen by the model
            batches.push_back(copy);
          }
        std::rotate(rotated.by_rank.begin(), rotated.by_rank.begin() + ranks / 2, rotated.by_rank.end());
        const auto make = [&] { return toy::make_normalizer(mean); };
        const Outcome wanted = run(once, {.mean = make});
        for (const auto& changed : {twice, rotated}) {
          const Outcome same = run(changed, {.mean = make});
          EXPECT_LT(toy::worst_error(same.gradients[0], wanted.gradients[0]), 1e-12) << name_of(mean) << name;
          EXPECT_NEAR(same.reports[0].loss, wanted.reports[0].loss, 1e-12);
        }
        const Outcome sum = run(twice, {.mean = [] { return std::make_unique<NoDenominator>(); }});
        EXPECT_NEAR(sum.reports[0].loss /
                        run(once, {.mean = [] { return std::make_unique<NoDenominator>(); }}).reports[0].loss,
                    2, 1e-12);
      }
    }
}

// s of a parameter: max(‖g64‖, 1e-3 · RMS · √numel).
double scale_of(const std::vector<at::Tensor>& gradients, std::size_t which) {
  double squares = 0, count = 0;
  for (const at::Tensor& g : gradients) {
    squares += g.square().sum().item<double>();
    count += static_cast<double>(g.numel());
  }
  return std::max(gradients[which].norm().item<double>(),
                  1e-3 * std::sqrt(squares / count * static_cast<double>(gradients[which].numel())));
}

// 200 ways of splitting one batch into calls give one gradient.
TEST(Deferred, DoesNotDependOnHowTheStepIsSplitIntoCalls) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
  const auto draw = [&](std::int64_t n) {
    return at::randint(0, n, {1}, generator, at::kLong).item<std::int64_t>();
  };
  double worst = 0, worst_of_allowed = 0;
  for (Mean mean : {Mean::kTargets, Mean::kFixed, Mean::kSamples}) {
    const int ranks = 2;
    std::vector<toy::Sample> samples;
    for (std::uint64_t s = 0; s < 9; ++s)
      samples.push_back(toy::make_sample(2 + static_cast<std::int64_t>(s * 5 % 13), s));
    toy::Reference wanted;
    // ‖g32 − g64‖ of one process, the largest of ten that take the pieces in other orders: a single one may
    // be right by luck in a parameter of one element.
    std::vector<double> alone(toy::Model().trainable().size());
    for (int way = 0; way < 200; ++way) {
      // Each sample goes to a call and a micro-batch of it; cut over the two ranks at a random place. Under
      // the token mean and the fixed denominator its two parts may lie in different calls.
      const int calls = 1 + static_cast<int>(draw(5));
      toy::Dealt dealt{.samples = samples, .pieces = {}, .by_rank = {}};
      for (std::int64_t s = 0; s < 9; ++s) {
        const std::int64_t length = samples[static_cast<std::size_t>(s)].tokens.size(0), cut = 4;
        const int first = static_cast<int>(draw(calls)),
                  second = mean == Mean::kSamples ? first : static_cast<int>(draw(calls));
        const auto rank = static_cast<int>(draw(2));
        dealt.pieces.push_back({s, 0, std::min(cut, length), rank, first});
        if (length > cut) dealt.pieces.push_back({s, cut, length, static_cast<int>(draw(2)), second});
      }
      toy::build(dealt, {calls, calls}, mean == Mean::kFixed);
      if (way == 0) {
        wanted = toy::reference(toy::Model(), dealt, mean, mean == Mean::kFixed);
        toy::Dealt turned = dealt;
        for (int order = 0; order < 10; ++order) {
          std::rotate(turned.pieces.begin(), turned.pieces.begin() + 1, turned.pieces.end());
          const auto g32 =
              toy::reference(toy::Model(at::kFloat), turned, mean, mean == Mean::kFixed).gradients;
          for (std::size_t p = 0; p < alone.size(); ++p)
            alone[p] =
                std::max(alone[p], (g32[p].to(at::kDouble) - wanted.gradients[p]).norm().item<double>());
        }
      }
      const Outcome outcome = run(
          dealt,
          {.mean = [&] { return std::make_unique<Deferred>(toy::make_normalizer(mean)); }, .calls = calls});
      const double error = worst_error(outcome, wanted);
      worst = std::max(worst, error);
      ASSERT_LT(error, 1e-12) << name_of(mean) << ", way " << way << " in " << calls << " calls on " << ranks
                              << " ranks";
      ASSERT_NEAR(outcome.reports[1].loss, wanted.loss, 1e-12 * std::max(1.0, wanted.loss));
      ASSERT_TRUE(outcome.reports[0].updated);
      const Outcome rounded =
          run(dealt, {.mean = [&] { return std::make_unique<Deferred>(toy::make_normalizer(mean)); },
                      .calls = calls,
                      .type = at::kFloat});
      for (std::size_t p = 0; p < alone.size(); ++p) {
        // E2: 4 ‖g32 − g64‖ + u √(W G) s.
        const double allowed =
            4 * alone[p] + 0x1p-24 * std::sqrt(ranks * calls) * scale_of(wanted.gradients, p);
        const double found = (rounded.gradients[0][p] - wanted.gradients[p]).norm().item<double>();
        ASSERT_LE(found, allowed) << name_of(mean) << ", way " << way << ", parameter " << p;
        worst_of_allowed = std::max(worst_of_allowed, found / allowed);
      }
    }
  }
  std::printf("600 ways: largest error %.2e in fp64, %.2f of what E2 allows in fp32\n", worst,
              worst_of_allowed);
}

}  // namespace
}  // namespace isograd
