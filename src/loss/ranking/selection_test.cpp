// Thresholds found by selection over ranks, compared with those of gathered rows: the same bits, and the
// bytes that each sends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <numeric>
#include <set>

#include "full_tests.hpp"
#include "isograd/world.hpp"
#include "loss/loss_testing.hpp"
#include "loss/ranking/ranking_testing.hpp"

namespace isograd {
namespace {

class SelectionAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, SelectionAt, ::testing::Values(1, 2, 3, 4, 5, 8));

// One random forward; every rank draws the same whole.
struct Draw {
  std::vector<std::int64_t> rows;  // of each rank
  at::Tensor scores, targets, iid, weights;
  std::int64_t begin(int rank) const {
    return std::accumulate(rows.begin(), rows.begin() + rank, std::int64_t{0});
  }
};

Draw draw(int number, int ranks, std::int64_t classes, at::ScalarType type) {
  auto g = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(100 * number + ranks));
  Draw made;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto rows = at::randint(12, {1}, g, at::TensorOptions(at::kLong)).item<std::int64_t>();
    made.rows.push_back(rows < 3 ? 0 : rows);  // a quarter of the ranks has none
  }
  const std::int64_t n = made.begin(ranks);
  const auto doubles = at::TensorOptions(at::kDouble);
  at::Tensor scores = at::randn({n, classes}, g, doubles);
  if (number % 3 == 0) scores = (scores * 2).round() / 2;                 // ties, zeros of both signs
  if (number % 3 == 1) scores = scores * std::pow(10, number % 30 - 15);  // all digits matter
  made.scores = scores.to(type);
  made.targets = at::randint(classes == 1 ? 2 : classes, {n}, g, at::TensorOptions(at::kLong));
  if (number % 5 == 4) made.targets.zero_();
  made.iid = at::rand({n}, g, doubles).lt(0.7);
  made.weights = at::rand({n}, g, doubles);
  return made;
}

std::shared_ptr<RankingLoss> make_loss(int which, Interpolation interpolation, const RankingOptions& base,
                                       Group group) {
  if (which == 0) {
    RecallOptions options;
    static_cast<RankingOptions&>(options) = base;
    options.quantile = 0.3, options.interpolation = interpolation;
    return std::make_shared<RecallAtQuantileLoss>(options, group);
  }
  PAUCOptions options;
  static_cast<RankingOptions&>(options) = base;
  options.alpha = 0.1, options.beta = 0.7, options.n_knots = 3, options.interpolation = interpolation;
  if (which == 2) {
    options.pos_numerator = PAUCOptions::Numerator::kLive;
    options.budget_basis = PAUCOptions::Basis::kPopulation;
    options.tau_scale = PAUCOptions::Scale::kBand;
  }
  return std::make_shared<PAUCAtBudgetLoss>(options, group);
}

TEST_P(SelectionAt, GivesTheBitsThatGatheredRowsGive) {
  const int ranks = GetParam();
  int valid = 0;
  run_ranks(ranks, [&](World& world) {
    int number = 0;
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16})
      for (const std::int64_t classes : {1, 3})
        for (int mode = 0; mode < 5; ++mode)
          for (int which = 0; which < 3; ++which)
            for (const std::int64_t queue : {0, 7, 50}) {  // 7: batches are larger, a draw of them is kept
              // From 3 ranks on each second case, others on other numbers; ISOGRAD_FULL_TESTS=1: all.
              if (!full_tests() && ranks > 2 && takes_first(static_cast<std::size_t>(number / 3 + ranks))) {
                number += 3;
                continue;
              }
              RankingOptions base;
              base.num_classes = classes, base.temperature = 0.4, base.queue_size = queue;
              base.check_queue = true;
              const auto with = [&](Thresholds how) {
                RankingOptions options = base;
                options.thresholds = how;
                return make_loss(which, static_cast<Interpolation>(mode), options, world.group);
              };
              const auto selected = with(Thresholds::kSelect), gathered = with(Thresholds::kGather);
              const bool weighted = number % 2 == 0;  // of all steps: the queue keeps weights
              for (int step = 0; step < 3; ++step) {
                const Draw all = draw(number++, ranks, classes, type);
                const std::int64_t begin = all.begin(world.rank),
                                   rows = all.rows[static_cast<std::size_t>(world.rank)];
                RankingExtras extras{.iid_mask = all.iid.narrow(0, begin, rows)};
                if (weighted) extras.sample_weight = all.weights.narrow(0, begin, rows);
                const auto run = [&](RankingLoss& loss, const at::Tensor& leaf_scores) {
                  return loss.evaluate(leaf_scores, all.targets.narrow(0, begin, rows), extras);
                };
                const at::Tensor a = leaf(all.scores.narrow(0, begin, rows)), b = leaf(a);
                const RankingResult x = run(*selected, a), y = run(*gathered, b);
                ASSERT_TRUE(x.valid.equal(y.valid));
                if (world.rank == 0) valid += static_cast<int>(y.valid.sum().item<std::int64_t>());
                for (const auto part : {&RankingDiagnostics::t_alpha, &RankingDiagnostics::t_beta,
                                        &RankingDiagnostics::tau_eff, &RankingDiagnostics::band_neg_count})
                  ASSERT_TRUE(at::allclose(x.diagnostics.*part, y.diagnostics.*part, 0, 0, true));
                // Sums of up to 100 numbers of one sign, in fp64, in another order; then rounded to the type.
                const double order = 100 * std::ldexp(1.0, -53);
                const double allowed = type == at::kDouble ? order : std::ldexp(1.0, -23);
                ASSERT_TRUE(at::allclose(x.per_class, y.per_class, allowed, allowed, true));
                const at::Tensor of_x = gradient_of(x.loss, a), of_y = gradient_of(y.loss, b);
                if (weighted)
                  ASSERT_LE(relative(of_x, of_y), type == at::kBFloat16 ? std::ldexp(1.0, -8) : allowed);
                else
                  ASSERT_TRUE(of_x.equal(of_y)) << mode << which << " " << queue;
                const auto mine = selected->state(), theirs = gathered->state();
                for (std::size_t i = 0; i < mine.size(); ++i)
                  ASSERT_TRUE(mine[i].second.equal(theirs[i].second)) << mine[i].first;
              }
            }
  });
  EXPECT_GT(valid, 500);
}

// Planted fault: one unit in the last place of the one score that the threshold is.
TEST(Selection, SeesAUnitInTheLastPlace) {
  run_ranks(3, [](World& world) {
    const auto t_alpha = [&](float moved) {
      PAUCOptions options;
      options.queue_size = 0, options.alpha = 0.25, options.beta = 0.9, options.temperature = 0.5;
      options.thresholds = Thresholds::kSelect;
      at::Tensor scores = at::arange(5, at::kFloat).unsqueeze(1) * 3 + world.rank;  // 0 ... 14 over all ranks
      if (world.rank == 1) scores[3][0] = moved;                                    // 10
      return PAUCAtBudgetLoss(options, world.group)
          .evaluate(at::cat({scores, at::full({1, 1}, 20.f)}), at::tensor({0, 0, 0, 0, 0, 1}, at::kLong))
          .diagnostics.t_alpha.item<double>();
    };
    EXPECT_EQ(t_alpha(10.f), 11);  // ⌈0.75 · 14⌉
    EXPECT_EQ(t_alpha(11.f), 11);
    EXPECT_EQ(t_alpha(std::nextafter(11.f, 12.f)), static_cast<double>(std::nextafter(11.f, 12.f)));
  });
}

std::uint32_t key(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Recall: counts for each order statistic that the digits so far tell apart, by a sort of all rows.
TEST_P(SelectionAt, MovesCountsAndSumsAlone) {
  const int ranks = GetParam();
  if (ranks == 1) return;
  run_ranks(ranks, [&](World& world) {
    for (const std::int64_t classes : {1, 3})
      for (const auto interpolation : {Interpolation::kHigher, Interpolation::kLinear})
        for (const std::int64_t queue : {0, 4}) {
          const Draw all = draw(1, ranks, classes, at::kFloat);
          const std::int64_t n = all.scores.size(0);
          std::set<std::pair<std::int64_t, std::uint32_t>> first, second;
          for (std::int64_t c = 0; c < classes; ++c) {
            const at::Tensor sorted = std::get<0>(all.scores.select(1, c).sort());
            const double rank = static_cast<double>(0.7f * static_cast<float>(n - 1));
            for (const double at : {std::floor(rank), std::ceil(rank)}) {
              if (interpolation == Interpolation::kHigher && at < rank) continue;
              const std::uint32_t bits = key(sorted[static_cast<std::int64_t>(at)].item<float>());
              first.emplace(c, bits >> 21), second.emplace(c, bits >> 10);
            }
          }
          RankingOptions base;
          base.num_classes = classes, base.queue_size = queue, base.thresholds = Thresholds::kSelect;
          const auto loss = make_loss(0, interpolation, base, world.group);
          const std::int64_t rows = all.rows[static_cast<std::size_t>(world.rank)];
          const at::Tensor scores = leaf(all.scores.narrow(0, all.begin(world.rank), rows));
          const Traffic before = world.group.traffic();
          loss->forward(scores, all.targets.narrow(0, all.begin(world.rank), rows)).backward();
          const Traffic after = world.group.traffic();
          const auto moved = [&](const char* name) {
            const auto was = before.operations.find(name), now = after.operations.find(name);
            if (now == after.operations.end()) return std::pair<std::int64_t, std::int64_t>();
            Traffic::Operation op = now->second;
            if (was != before.operations.end()) op.calls -= was->second.calls, op.bytes -= was->second.bytes;
            return std::pair(op.calls, op.bytes);
          };
          const auto part = [&](std::int64_t whole) { return whole * (ranks - 1) / ranks; };
          const std::int64_t kept = std::min(queue, n) * (4 * classes + (classes == 1 ? 1 : 4));
          EXPECT_EQ(moved("all_gather"),
                    std::pair(std::int64_t{queue > 0 ? 2 : 1}, part(88 * ranks) + part(kept)));
          const auto counts = [](const auto& found, std::int64_t bins) {
            return static_cast<std::int64_t>(found.size()) * bins * 4;
          };
          EXPECT_EQ(
              moved("all_reduce"),
              std::pair(std::int64_t{4}, part(2 * 4 * 2049 * classes) + part(2 * counts(first, 2048)) +
                                             part(2 * counts(second, 1024)) + part(2 * 8 * 7 * classes)));
          EXPECT_EQ(moved("reduce_scatter").first, 0);
        }
  });
}

// docs/ranking.md: 2 · (3 · 8,192 + 56) + 4 · 32,768 bytes < 5 a row + 32,768 from 29,514 rows on.
TEST(Selection, IsTakenWhereItIsCheaper) {
  run_ranks(2, [](World& world) {
    const auto selects = [&](std::int64_t rows, std::int64_t queue, const RankingOptions& given) {
      RecallOptions options;
      static_cast<RankingOptions&>(options) = given;
      options.queue_size = queue;
      RecallAtQuantileLoss loss(options, world.group);
      const std::int64_t own = world.rank == 0 ? rows - 100 : 100;
      const std::int64_t before = world.group.traffic().operations["all_reduce"].calls;
      loss.forward(at::randn({own, 1}), at::arange(own) % 2);
      return world.group.traffic().operations["all_reduce"].calls > before;
    };
    EXPECT_FALSE(selects(29513, 0, {}));
    EXPECT_TRUE(selects(29514, 0, {}));
    EXPECT_FALSE(selects(29514, 1024, {})) << "the queue's rows travel all the same";
    EXPECT_TRUE(selects(37200, 1024, {}));
    EXPECT_FALSE(selects(37200, 37200, {}));
    RankingOptions gathers, subsamples;
    gathers.thresholds = Thresholds::kGather, subsamples.max_pool_size = 500;
    EXPECT_FALSE(selects(37200, 0, gathers));
    EXPECT_FALSE(selects(37200, 0, subsamples));
  });
}

}  // namespace
}  // namespace isograd
