// Weights, degenerate classes, number types, queue, subsampling, quantiles, metrics, warm-up.
#include <ATen/Version.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "isograd/world.hpp"
#include "loss/loss_testing.hpp"
#include "loss/ranking/ranking_testing.hpp"

namespace isograd {
namespace {

using twin::column;
using twin::labels;
using twin::plain;
using twin::plain_as;

using ::testing::HasSubstr;

TEST(Weights, OfOneGiveTheSameBitsAsNone) {
  for (const auto type : {at::kFloat, at::kDouble}) {
    at::manual_seed(1);
    const at::Tensor scores = leaf(at::randn({50, 1}, type)), targets = at::randint(2, {50}, at::kLong);
    SmoothAPLoss a(plain(0.2)), b(plain(0.2));
    const at::Tensor x = a.forward(scores, targets), y = b.forward(scores, targets, {{}, at::ones({50})});
    EXPECT_TRUE(x.equal(y));
    EXPECT_TRUE(gradient_of(x, scores).equal(gradient_of(y, scores)));
    EXPECT_FALSE(b.evaluate(scores, targets, {{}, at::zeros({50})}).valid.item<bool>());
  }
}

TEST(Degenerate, ClassesAreInvalidAndGiveZeroGradients) {
  const at::Tensor scores = column({1, 2, 3}), ones = labels({1, 1, 1}), zeros = labels({0, 0, 0});
  SmoothAPLoss ap(plain(1));
  RecallAtQuantileLoss recall(plain_as<RecallOptions>(1));
  PAUCAtBudgetLoss pauc(plain_as<PAUCOptions>(1));
  EXPECT_FALSE(ap.evaluate(scores, ones).valid.item<bool>());
  EXPECT_TRUE(recall.evaluate(scores, ones).valid.item<bool>());
  EXPECT_FALSE(pauc.evaluate(scores, ones).valid.item<bool>());
  for (RankingLoss* loss : std::initializer_list<RankingLoss*>{&ap, &recall, &pauc}) {
    const RankingResult result = loss->evaluate(scores, zeros);
    EXPECT_FALSE(result.valid.item<bool>());
    EXPECT_TRUE(std::isnan(result.per_class.item<double>()));
    EXPECT_EQ(result.loss.item<double>(), 0);
    EXPECT_EQ(gradient_of(result.loss, scores).abs().sum().item<double>(), 0);
    const at::Tensor none = at::zeros({0, 1}, at::kDouble).requires_grad_(true);
    EXPECT_EQ(gradient_of(loss->forward(none, labels({})), none).numel(), 0);
  }
  // No dispersion: another reason.
  EXPECT_FALSE(pauc.evaluate(column({1, 1, 1, 2}), labels({0, 0, 0, 1})).valid.item<bool>());
}

TEST(Types, OfHalfPrecisionAreComputedInSingle) {
  at::manual_seed(2);
  const at::Tensor scores = at::randn({40, 1}).to(at::kBFloat16), targets = at::randint(2, {40}, at::kLong);
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const at::Tensor low = leaf(scores.to(type)), high = leaf(scores.to(type).to(at::kFloat));
    RecallAtQuantileLoss a(plain_as<RecallOptions>(0.5)), b(plain_as<RecallOptions>(0.5));
    const at::Tensor x = a.forward(low, targets), y = b.forward(high, targets);
    EXPECT_TRUE(x.equal(y));
    const at::Tensor gradient = gradient_of(x, low);
    EXPECT_EQ(gradient.scalar_type(), type);
    EXPECT_TRUE(gradient.equal(gradient_of(y, high).to(type)));
  }
}

TEST(Queue, HoldsWhatItShouldInOrder) {
  RankingOptions options = plain(1);
  options.queue_size = 5;
  SmoothAPLoss loss(options);
  const auto scores = [&] { return loss.state()[0].second.flatten(); };
  ASSERT_EQ(loss.state()[0].first, "queue_scores");
  loss.forward(column({1, 2, 3}), labels({0, -100, 1}));
  EXPECT_EQ(loss.queue_rows(), 2) << "ignored rows are not kept";
  loss.forward(column({4, 5, 6, 7}), labels({0, 0, 0, 1}));
  EXPECT_TRUE(scores().equal(at::tensor({7., 3., 4., 5., 6.}, at::kDouble)));  // wraps
  loss.eval();
  loss.forward(column({8}), labels({0}));
  EXPECT_TRUE(scores().equal(at::tensor({7., 3., 4., 5., 6.}, at::kDouble)));  // frozen
  const auto saved = loss.state();
  SmoothAPLoss other(options);
  other.load_state(saved);
  const at::Tensor s = column({1.5, 0.5});
  EXPECT_TRUE(other.forward(s, labels({1, 0})).equal(loss.forward(s, labels({1, 0}))));
  loss.reset_queue();
  EXPECT_EQ(loss.queue_rows(), 0);
  options.queue_size = 6;
  SmoothAPLoss larger(options);
  EXPECT_THAT(error_of([&] { larger.load_state(saved); }), HasSubstr("queue_size"));
}

// A batch of more rows than the queue: what is kept favours neither the last rows nor the last rank.
TEST(Queue, KeepsAFairDrawOfALargeBatch) {
  RankingOptions options = plain(1);
  options.queue_size = 50;
  at::Tensor kept = at::zeros({4});
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    options.seed = seed;
    SmoothAPLoss loss(options);
    loss.forward(at::arange(200, at::kDouble).unsqueeze(1), at::zeros({200}, at::kLong));
    const at::Tensor rows = loss.state()[0].second.flatten();
    EXPECT_EQ(std::get<0>(at::_unique(rows)).numel(), 50);
    kept += at::bincount(rows.floor_divide(50).to(at::kLong), {}, 4);
  }
  // 2,000 draws over four quarters: 500 each, standard deviation about 17 without replacement.
  EXPECT_LT((kept - 500).abs().max().item<double>(), 6 * 17);
}

TEST(Subsampling, KeepsQuotasAndTheSameRowsForTheSameSeed) {
  RankingOptions options = plain(0.5);
  options.max_pool_size = 20, options.seed = 3;
  const at::Tensor scores = leaf(at::randn({200, 1}, at::kDouble));
  at::Tensor targets = at::zeros({200}, at::kLong);
  targets.narrow(0, 0, 8).fill_(1);
  SmoothAPLoss a(options), b(options);
  const at::Tensor x = a.forward(scores, targets);
  EXPECT_TRUE(x.equal(b.forward(scores, targets)));
  const at::Tensor gradient = gradient_of(x, scores).flatten();
  EXPECT_LE(gradient.ne(0).sum().item<std::int64_t>(), 20);
  EXPECT_GE(gradient.narrow(0, 0, 8).ne(0).sum().item<std::int64_t>(), 5) << "quota 20 / (2 · 2)";
  EXPECT_FALSE(x.equal(a.forward(scores, targets))) << "another draw in the next step";
}

// Ours rounds a + f (b - a) once on every processor, as LibTorch does where it has fused multiply-adds: the
// same bits. Held to plain instructions LibTorch rounds the product too, by at most u |b - a|, after which
// the sum may round to a neighbour, at most 2 u of the larger end away.
double interpolation_error(const at::Tensor& values, double q) {
  if (at::get_cpu_capability() != "DEFAULT") return 0;
  const double a = twin::quantile(values, q, Interpolation::kLower).item<double>(),
               b = twin::quantile(values, q, Interpolation::kHigher).item<double>();
  const double u = values.scalar_type() == at::kFloat ? 0x1p-24 : 0x1p-53;
  return u * (std::abs(b - a) + 2 * std::max(std::abs(a), std::abs(b)));
}

TEST(Quantiles, AreTorchsInEveryModeAndType) {
  at::manual_seed(5);
  for (const auto type : {at::kFloat, at::kDouble})
    for (const std::int64_t n : {1, 2, 3, 10, 101, 1000, 4096})
      for (int mode = 0; mode < 5; ++mode)
        for (const double q : {0.0, 0.0025, 0.005, 0.1, 0.25, 0.5, 0.75, 0.9, 0.995, 1.0}) {
          const at::Tensor values = (at::randn({n}, type) * 4).round() / (n > 50 ? 1 : 4);  // ties
          for (const at::Tensor& x : {values, at::randn({n}, type)}) {
            const double found = quantiles(x, {q}, static_cast<Interpolation>(mode))[0];
            const double wanted = twin::quantile(x, q, static_cast<Interpolation>(mode)).item<double>();
            ASSERT_LE(std::abs(found - wanted), interpolation_error(x, q)) << n << " " << mode << " " << q;
          }
        }
  EXPECT_TRUE(std::isnan(quantiles(at::tensor({1., NAN}), {0.5})[0]));
  EXPECT_THAT(error_of([] { quantiles(at::zeros({3}), {1.5}); }), HasSubstr("q = 1.5"));
  EXPECT_THAT(error_of([] { quantiles(at::zeros({0}), {0.5}); }), HasSubstr("no values"));
}

// Many values are told apart by bins first, whose width a sample decides: here it sees neither the outliers
// nor, of some, more than one number; bins of others hold nearly all values.
TEST(Quantiles, OfManyValuesAreThoseOfASort) {
  auto g = at::make_generator<at::CPUGeneratorImpl>(3);
  const std::vector<double> q = {0, 1e-4, .02, .2, .5, .501, .7, .98, .9999, 1};
  for (const auto type : {at::kFloat, at::kDouble})
    for (const std::int64_t n : {2047, 2048, 2049, 30011}) {
      const at::Tensor normal = at::randn({n}, g, at::TensorOptions(at::kDouble));
      at::Tensor outliers = normal.clone(), ends = normal.clone(), sampled = normal.clone();
      outliers[1] = 1e30, outliers[2] = -1e30, ends[1] = INFINITY, ends[2] = -INFINITY,
      sampled[0] = -INFINITY;
      at::Tensor apart = at::zeros_like(normal);
      apart.slice(0, 1, n, 2) = normal.slice(0, 1, n, 2);
      const std::vector<at::Tensor> shapes = {normal,
                                              normal.round(),
                                              at::full_like(normal, -2.5),
                                              normal.sign(),
                                              (normal * 15).exp() * normal.sign(),
                                              normal * 1e-38,
                                              normal * 1e37,
                                              std::get<0>(normal.sort()),
                                              outliers,
                                              ends,
                                              sampled,
                                              apart};
      for (std::size_t shape = 0; shape < shapes.size(); ++shape)
        for (const auto interpolation : {Interpolation::kLower, Interpolation::kHigher}) {
          const at::Tensor values = shapes[shape].to(type),
                           sorted = std::get<0>(values.sort()).to(at::kDouble);
          const std::vector<double> found = quantiles(values, q, interpolation);
          for (std::size_t k = 0; k < q.size(); ++k) {
            const double rank =
                type == at::kFloat ? static_cast<double>(static_cast<float>(q[k]) * static_cast<float>(n - 1))
                                   : q[k] * static_cast<double>(n - 1);
            const double at = interpolation == Interpolation::kLower ? std::floor(rank) : std::ceil(rank);
            const double wanted = sorted[static_cast<std::int64_t>(at)].item<double>();
            if (std::isinf(wanted)) continue;  // between two of them lies none
            ASSERT_EQ(found[k], wanted) << "shape " << shape << ", " << n << " values, q = " << q[k];
            ASSERT_EQ(quantiles(values, {q[k]}, interpolation)[0], found[k]);
          }
        }
    }
}

TEST(Quantiles, OverRanksAreThoseOfOneProcess) {
  for (const int ranks : {1, 2, 3, 5})
    run_ranks(ranks, [&](World& world) {
      for (const auto type : {at::kFloat, at::kDouble})
        for (const double spread : {1e-3, 1.0, 1e30})
          for (const std::int64_t n : {1, 7, 500}) {
            auto g = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(n));
            at::Tensor all = (at::randn({n}, g, at::TensorOptions(at::kDouble)) * spread).to(type);
            if (n == 500) all = at::where(all.lt(0), at::zeros_like(all), all);  // many ties
            // Rank 1 has nothing, rank 0 most.
            const std::int64_t own = world.rank == 1 ? 0 : n;
            at::Tensor mine = all.narrow(0, 0, 0);
            const int holders = ranks > 1 ? ranks - 1 : 1, place = world.rank > 1 ? world.rank - 1 : 0;
            if (own > 0) mine = all.slice(0, place, n, holders);
            const std::vector<double> q = {0.0, 0.01, 0.3, 0.5, 0.77, 0.995, 1.0};
            for (int mode = 0; mode < 5; ++mode) {
              const auto interpolation = static_cast<Interpolation>(mode);
              ASSERT_EQ(distributed_quantiles(world.group, mine.contiguous(), q, interpolation),
                        quantiles(all, q, interpolation));
            }
          }
      EXPECT_TRUE(std::isnan(distributed_quantiles(
          world.group, at::full({world.rank == 0 ? 1 : 2}, world.rank == 0 ? NAN : 1.0), {0.5})[0]));
      EXPECT_THAT(error_of([&] { distributed_quantiles(world.group, at::zeros({0}), {0.5}); }),
                  HasSubstr("no values on any rank"));
    });
}

TEST(Targets, MayIgnoreOneOfTheClasses) {
  at::manual_seed(9);
  const at::Tensor scores = at::randn({60, 3}, at::kDouble), targets = at::randint(3, {60}, at::kLong);
  const at::Tensor kept = targets.ne(1).nonzero().squeeze(1);
  RecallOptions options;
  options.num_classes = 3, options.quantile = 0.3, options.temperature = 0.5;
  RecallAtQuantileLoss whole(options);
  options.ignore_index = 1;
  RecallAtQuantileLoss ignores(options);
  const at::Tensor all = leaf(scores), few = leaf(scores.index_select(0, kept));
  const at::Tensor found = ignores.forward(all, targets),
                   wanted = whole.forward(few, targets.index_select(0, kept));
  EXPECT_EQ(found.item<double>(), wanted.item<double>());
  const at::Tensor gradient = gradient_of(found, all);
  EXPECT_TRUE(at::equal(gradient.index_select(0, kept), gradient_of(wanted, few)));
  EXPECT_EQ(gradient.index_select(0, targets.eq(1).nonzero().squeeze(1)).abs().max().item<double>(), 0);
}

TEST(Metrics, AreThoseOfPlainLoops) {
  at::manual_seed(8);
  for (int round = 0; round < 20; ++round) {
    const std::int64_t n = 60;
    const at::Tensor scores = (at::randn({n}, at::kDouble) * 3).round();  // many ties
    const at::Tensor targets = at::rand({n}).lt(0.3).to(at::kLong);
    const RankingMetrics found = ranking_metrics(scores, targets, 0.2, 1.0);
    double ap = 0, auc = 0;
    const double positives = targets.sum().item<double>(), negatives = static_cast<double>(n) - positives;
    for (std::int64_t i = 0; i < n; ++i) {
      if (targets[i].item<std::int64_t>() == 0) continue;
      const at::Tensor at_least = scores.ge(scores[i]);
      ap += (at_least.logical_and(targets.eq(1))).sum().item<double>() / at_least.sum().item<double>();
      const at::Tensor negative = scores.masked_select(targets.eq(0));
      auc += negative.lt(scores[i]).sum().item<double>() + 0.5 * negative.eq(scores[i]).sum().item<double>();
    }
    EXPECT_NEAR(found.average_precision, ap / positives, 1e-12);
    EXPECT_NEAR(found.partial_auc, auc / (positives * negatives), 1e-12);  // budget 1: the whole area
    EXPECT_EQ(found.positives, static_cast<std::int64_t>(positives));
  }
  // Ten rows, two highest taken; of three tied for them, one is positive: 2/3 of it.
  EXPECT_NEAR(ranking_metrics(at::tensor({5, 5, 5, 1, 1, 1, 1, 1, 1, 1}, at::kDouble),
                              labels({1, 0, 0, 1, 0, 0, 0, 0, 0, 0}), 0.2, 0.5)
                  .recall_at_quantile,
              0.5 * 2 / 3, 1e-15);
  run_ranks(3, [](World& world) {
    const at::Tensor scores = at::arange(10, at::kDouble), targets = labels({0, 1, 0, 0, 1, 0, 0, 1, 0, 1});
    const RankingMetrics one = ranking_metrics(scores, targets, 0.3, 0.4);
    const std::int64_t begin = world.rank == 0   ? 0
                               : world.rank == 1 ? 7
                                                 : 10,
                       rows = world.rank == 0   ? 7
                              : world.rank == 1 ? 3
                                                : 0;
    const RankingMetrics all =
        ranking_metrics(world.group, scores.narrow(0, begin, rows), targets.narrow(0, begin, rows), 0.3, 0.4);
    EXPECT_EQ(all.average_precision, one.average_precision);
    EXPECT_EQ(all.partial_auc, one.partial_auc);
  });
}

TEST(Warmup, BlendsTwoLossesAndKeepsItsProgress) {
  RankingOptions options = plain(1);
  options.queue_size = 8;
  const auto make = [&] {
    return std::make_unique<LossWarmup>(
        [](const auto& s, const auto&, const auto& w) { return w.defined() ? s.sum() * 3 : s.sum(); },
        std::make_shared<SmoothAPLoss>(options),
        WarmupOptions{.warmup_steps = 2, .blend_steps = 1, .final_main_weight = 0.8});
  };
  const auto loss = make();
  const at::Tensor s = column({1, 0}), t = labels({1, 0});
  EXPECT_THAT(error_of([&] { loss->forward(s, t); }), HasSubstr("on_train_batch_start"));
  loss->on_train_batch_start(0);
  EXPECT_EQ(loss->forward(s, t).item<double>(), 1);
  EXPECT_EQ(loss->forward(s, t, {{}, at::ones({2})}).item<double>(), 3) << "weights reach the warm-up loss";
  EXPECT_EQ(loss->main().queue_rows(), 0);
  loss->on_train_batch_start(2);
  EXPECT_EQ(loss->main_weight(), 0.4);
  EXPECT_EQ(loss->main().temperature(), 0.05);
  const double main_value = 1 - 1 / (1 + 1 / (1 + std::exp(1 / 0.05)));
  EXPECT_NEAR(loss->forward(s, t).item<double>(), 0.6 + 0.4 * main_value, 1e-12);
  EXPECT_EQ(loss->main().queue_rows(), 2);
  loss->on_train_batch_start(3);
  EXPECT_EQ(loss->main_weight(), 0.8);
  const auto other = make();
  other->load_state(loss->state());
  EXPECT_EQ(other->main_weight(), 0.8);
  EXPECT_EQ(other->main().temperature(), loss->main().temperature());
  EXPECT_TRUE(other->forward(s, t).equal(loss->forward(s, t)));
}

}  // namespace
}  // namespace isograd
