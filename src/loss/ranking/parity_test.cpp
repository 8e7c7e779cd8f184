// Any number of ranks, any cut of the batch: loss and parameter gradients of a scorer are one process's. And
// how many bytes that takes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <numeric>

#include "full_tests.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"
#include "loss/loss_testing.hpp"
#include "loss/ranking/ranking_testing.hpp"

namespace isograd {

// A small scorer, steps cut over ranks in every way, every family of losses next to a naive twin of it, and
// one process on all rows.
namespace ranking_cases {

using Rows = std::vector<std::int64_t>;

at::Generator generator(std::uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

// A small scorer: two matrices between which a tanh stands.
struct Scorer {
  at::Tensor first, second;
  explicit Scorer(std::int64_t classes) {
    auto g = generator(5);
    first = at::randn({3, 4}, g, at::TensorOptions(at::kDouble)).requires_grad_(true);
    second = at::randn({4, classes}, g, at::TensorOptions(at::kDouble)).requires_grad_(true);
  }
  at::Tensor operator()(const at::Tensor& x) const { return at::tanh(x.matmul(first)).matmul(second); }
  std::vector<at::Tensor> gradients(const at::Tensor& loss) const {
    return torch::autograd::grad({loss}, {first, second});
  }
};

enum class Cut { kEven, kUneven, kPositivesOnOneRank, kNoPositive };

struct Step {
  Rows rows;  // of each rank
  at::Tensor x, targets, iid, weights;
};

Step make_step(Cut cut, int ranks, std::int64_t classes, int number) {
  Step step;
  const Rows uneven = {5, 3, 0, 6, 1, 0, 4, 2};
  for (int rank = 0; rank < ranks; ++rank)
    step.rows.push_back(cut == Cut::kUneven ? uneven[static_cast<std::size_t>((rank + number) % 8)] : 6);
  const std::int64_t n = std::accumulate(step.rows.begin(), step.rows.end(), std::int64_t{0});
  auto g = generator(static_cast<std::uint64_t>(100 * number + ranks));
  const auto doubles = at::TensorOptions(at::kDouble);
  step.x = at::randn({n, 3}, g, doubles);
  step.targets = at::randint(classes == 1 ? 2 : classes, {n}, g, at::TensorOptions(at::kLong));
  step.iid = at::rand({n}, g, doubles).lt(0.8);
  step.weights = at::rand({n}, g, doubles) + 0.25;
  if (cut == Cut::kNoPositive) step.targets.zero_();
  if (cut == Cut::kPositivesOnOneRank) {
    const std::int64_t own = step.rows.back();
    step.targets.narrow(0, 0, n - own).zero_();
    step.targets.narrow(0, n - own, own).fill_(1);
    step.targets[n - 1] = 0;
  }
  if (n > 4) step.targets[n / 2] = -100;
  if (n > 4) step.targets[1] = -100;
  return step;
}

struct Family {
  std::string name;
  std::function<std::shared_ptr<RankingLoss>(RankingOptions, Group)> make;
  std::function<twin::OfClass(const twin::Pool&, const at::Tensor&, const at::Tensor&)> naive;
  bool sharded;
  bool selects = false;
};

template <typename Options>
Options with(Options own, const RankingOptions& base) {
  static_cast<RankingOptions&>(own) = base;
  return own;
}

std::vector<Family> families() {
  static const double tau = 0.4;
  RecallOptions recall;
  recall.quantile = 0.3;
  PAUCOptions trapezoid;
  trapezoid.alpha = 0.1, trapezoid.beta = 0.6, trapezoid.n_knots = 4;
  PAUCOptions live = trapezoid;
  live.pos_numerator = PAUCOptions::Numerator::kLive, live.budget_basis = PAUCOptions::Basis::kPopulation;
  live.tau_scale = PAUCOptions::Scale::kBand;
  PAUCOptions pairwise = trapezoid;
  pairwise.surrogate = PAUCOptions::Surrogate::kPairwise;
  const auto of_pauc = [](const std::string& name, const PAUCOptions& options, bool sharded) {
    return Family{name,
                  [options](RankingOptions base, Group group) {
                    return std::make_shared<PAUCAtBudgetLoss>(with(options, base), group);
                  },
                  [options](const auto& pool, const auto& s, const auto& positive) {
                    return twin::pauc(pool, s, positive, tau, options);
                  },
                  sharded};
  };
  std::vector<Family> all = {
      {"SmoothAP",
       [](RankingOptions base, Group group) { return std::make_shared<SmoothAPLoss>(base, group); },
       [](const auto& pool, const auto& s, const auto& positive) {
         return twin::smooth_ap(pool, s, positive, tau);
       },
       true},
      {"Recall",
       [recall](RankingOptions base, Group group) {
         return std::make_shared<RecallAtQuantileLoss>(with(recall, base), group);
       },
       [recall](const auto& pool, const auto& s, const auto& positive) {
         return twin::recall(pool, s, positive, tau, recall);
       },
       false},
      of_pauc("PAUC trapezoid", trapezoid, false),
      of_pauc("PAUC live", live, false),
      of_pauc("PAUC pairwise", pairwise, true)};
  // Thresholds are found by gathering unless rows are many; here by selection too.
  const std::size_t gathering = all.size();
  for (std::size_t i = 0; i < gathering; ++i) {
    if (all[i].sharded) continue;
    Family family = all[i];
    family.name += ", selected";
    family.selects = true;
    family.make = [make = family.make](RankingOptions base, Group group) {
      base.thresholds = Thresholds::kSelect;
      return make(base, group);
    };
    all.push_back(family);
  }
  return all;
}

// One process on the concatenation of all rows, with the rows that a queue held before the step.
struct Wanted {
  double loss = 0;
  std::vector<at::Tensor> gradients;
};

Wanted one_process(const Family& family, const RankingOptions& options, const Step& step, bool weighted,
                   const RankingLoss::State& queue) {
  const auto buffer = [&](const std::string& name) {
    return std::find_if(queue.begin(), queue.end(), [&](const auto& e) { return e.first == name; })->second;
  };
  const Scorer scorer(options.num_classes);
  const at::Tensor filled = buffer("queue_labels").ne(-1), kept = step.targets.ne(-100);
  const auto rows_of = [](const at::Tensor& t, const at::Tensor& mask) {
    return t.index_select(0, mask.nonzero().squeeze(1));
  };
  const auto join = [&](const at::Tensor& live, const char* name) {
    return at::cat({rows_of(live, kept), rows_of(buffer(name), filled)});
  };
  const at::Tensor ones = at::ones({step.targets.numel()}, at::kDouble);
  twin::Pool pool{.scores = join(scorer(step.x), "queue_scores"),
                  .targets = join(step.targets, "queue_labels"),
                  .iid = join(weighted ? step.iid : ones.to(at::kBool), "queue_iid"),
                  .live = {},
                  .weights = join(weighted ? step.weights : ones, "queue_weights")};
  pool.live = at::arange(pool.targets.numel()).lt(kept.sum());
  const at::Tensor loss = twin::loss(pool, options.num_classes, options.reduction, family.naive);
  return {loss.item<double>(), scorer.gradients(loss)};
}

at::Tensor total(const at::Tensor& loss) {  // of kNone: over the valid classes
  return loss.dim() == 0 ? loss : at::where(at::isnan(loss), at::zeros_like(loss), loss).sum();
}

double distance(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& wanted) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    difference += (found[i] - wanted[i]).square().sum().item<double>();
    size += wanted[i].square().sum().item<double>();
  }
  return std::sqrt(difference) / (size > 0 ? std::sqrt(size) : 1);
}

double ratio(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& wanted) {
  double product = 0, size = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    product += (found[i] * wanted[i]).sum().item<double>();
    size += wanted[i].square().sum().item<double>();
  }
  return product / size;
}

RankingExtras extras_of(const Step& step, std::int64_t begin, std::int64_t rows, bool weighted) {
  if (!weighted) return {};
  return {.iid_mask = step.iid.narrow(0, begin, rows), .sample_weight = step.weights.narrow(0, begin, rows)};
}

struct Case {
  const Family& family;
  RankingOptions options;
  Cut cut;
  bool weighted;
  std::string text;
};

// Every family with every cut and queue; numbers of classes, reductions, and weights with flags take turns,
// so that any two values meet. ISOGRAD_FULL_TESTS=1: every number of classes with every reduction.
void for_each_case(const std::function<void(const Case&)>& body) {
  static const std::vector<Family> all = families();
  constexpr std::int64_t kClasses[] = {1, 3};
  constexpr LossReduction kReductions[] = {LossReduction::kMean, LossReduction::kSum, LossReduction::kNone};
  int turn = 0;
  for (const Family& family : all)
    for (const Cut cut : {Cut::kEven, Cut::kUneven, Cut::kPositivesOnOneRank, Cut::kNoPositive})
      for (const std::int64_t queue : {0, 3, 40}) {  // 40: wraps in the third step or later
        ++turn;
        for (int c = 0; c < 2; ++c)
          for (int r = 0; r < 3; ++r) {
            if (!full_tests() && (turn + c + r) % 3 != 0) continue;
            const bool weighted = (turn + c) % 2 == 1;
            RankingOptions options;
            options.num_classes = kClasses[c], options.queue_size = queue, options.reduction = kReductions[r];
            options.temperature = 0.4, options.check_queue = true;
            body({family, options, cut, weighted,
                  fmt::format("{} classes {} cut {} queue {} reduction {} weighted {}", family.name,
                              kClasses[c], static_cast<int>(cut), queue, r, weighted)});
          }
      }
}

}  // namespace ranking_cases

namespace {

using namespace ranking_cases;

class RankingAt : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, RankingAt, ::testing::Values(1, 2, 3, 4, 5, 8));

constexpr int kSteps = 4;
constexpr double kAllowed = 1e-10;

// A step of a case as one process makes it.
struct Expected {
  Step step;
  Wanted wanted;
  RankingLoss::State after;
};

// Once for all ranks. The queue of a loss alone is what the twin is given.
std::vector<Expected> expected_alone(const Case& test, int ranks) {
  std::vector<Expected> all;
  const auto alone = test.family.make(test.options, Group::solo());
  for (int number = 0; number < kSteps; ++number) {
    const Step step = make_step(test.cut, ranks, test.options.num_classes, number);
    const Wanted wanted = one_process(test.family, test.options, step, test.weighted, alone->state());
    alone->forward(Scorer(test.options.num_classes)(step.x).detach(), step.targets,
                   extras_of(step, 0, step.targets.numel(), test.weighted));
    RankingLoss::State after;
    for (const auto& [name, values] : alone->state()) after.emplace_back(name, values.clone());
    all.push_back({step, wanted, after});
  }
  return all;
}

TEST_P(RankingAt, LossAndParameterGradientsAreOneProcesss) {
  const int ranks = GetParam();
  std::map<Cut, int> differentiated, all_steps;  // a test that compares zeros only shows nothing
  std::vector<std::pair<Case, std::vector<Expected>>> cases;
  for_each_case([&](const Case& test) { cases.emplace_back(test, expected_alone(test, ranks)); });
  run_ranks(ranks, [&](World& world) {
    for (const auto& [test, steps] : cases) {
      const auto loss = test.family.make(test.options, world.group);
      for (std::size_t number = 0; number < steps.size(); ++number) {
        const auto& [step, wanted, of_one] = steps[number];
        const auto begin =
            std::accumulate(step.rows.begin(), step.rows.begin() + world.rank, std::int64_t{0});
        const std::int64_t rows = step.rows[static_cast<std::size_t>(world.rank)];
        if (world.rank == 0) ++all_steps[test.cut];
        const Scorer scorer(test.options.num_classes);
        const at::Tensor value =
            total(loss->forward(scorer(step.x.narrow(0, begin, rows)), step.targets.narrow(0, begin, rows),
                                extras_of(step, begin, rows, test.weighted)));
        ASSERT_NEAR(value.item<double>(), wanted.loss, kAllowed) << test.text;
        std::vector<at::Tensor> sum = scorer.gradients(value);
        for (auto& gradient : sum) world.group.all_reduce(gradient);
        ASSERT_LT(distance(sum, wanted.gradients), kAllowed) << test.text << " step " << number;
        if (wanted.gradients[0].norm().item<double>() > 1e-6) {
          if (world.rank == 0) ++differentiated[test.cut];
          // Planted fault (museum B24): the gradients averaged instead.
          std::vector<at::Tensor> average;
          for (const auto& gradient : sum) average.push_back(gradient / ranks);
          if (ranks > 1) {
            ASSERT_GT(distance(average, wanted.gradients), kAllowed);
          }
          ASSERT_NEAR(ratio(average, wanted.gradients), 1.0 / ranks, 1e-9) << test.text;
        }
        const auto mine = loss->state();
        for (std::size_t i = 0; i < mine.size(); ++i)
          ASSERT_TRUE(mine[i].second.equal(of_one[i].second) ||
                      mine[i].second.allclose(of_one[i].second, 1e-12, 1e-14))
              << test.text << ": " << mine[i].first;
      }
    }
  });
  const auto part = [&](Cut cut) { return double(differentiated[cut]) / all_steps[cut]; };
  EXPECT_GT(part(Cut::kEven), 0.43);
  EXPECT_GT(part(Cut::kUneven), 0.26);
  EXPECT_GT(part(Cut::kPositivesOnOneRank), 0.26);
}

TEST_P(RankingAt, TheMeanSettingIsExactUnderAnAverage) {
  const int ranks = GetParam();
  run_ranks(ranks, [&](World& world) {
    for (const Family& family : families()) {
      RankingOptions options;
      options.temperature = 0.4, options.queue_size = 0, options.grad_reduction = GradReduction::kMean;
      const Step step = make_step(Cut::kUneven, ranks, 1, 3);
      const auto begin = std::accumulate(step.rows.begin(), step.rows.begin() + world.rank, std::int64_t{0});
      const std::int64_t rows = step.rows[static_cast<std::size_t>(world.rank)];
      const auto loss = family.make(options, world.group);
      const Wanted wanted = one_process(family, options, step, true, loss->state());
      const Scorer scorer(1);
      const at::Tensor value =
          loss->forward(scorer(step.x.narrow(0, begin, rows)), step.targets.narrow(0, begin, rows),
                        extras_of(step, begin, rows, true));
      EXPECT_NEAR(value.item<double>(), wanted.loss, kAllowed);
      std::vector<at::Tensor> average = scorer.gradients(value);
      for (auto& gradient : average) world.group.all_reduce(gradient), gradient /= ranks;
      EXPECT_LT(distance(average, wanted.gradients), kAllowed) << family.name;
    }
  });
}

// docs/ranking.md, "The rule": scored without gradient, ranked as one, scored again by micro-batches.
TEST_P(RankingAt, AStepOfSeveralMicroBatchesIsRankedAsOne) {
  const int ranks = GetParam();
  run_ranks(ranks, [&](World& world) {
    for (const Family& family : families()) {
      RankingOptions options;
      options.temperature = 0.4, options.queue_size = 0;
      const Step step = make_step(Cut::kUneven, ranks, 1, 3);
      const auto begin = std::accumulate(step.rows.begin(), step.rows.begin() + world.rank, std::int64_t{0});
      const std::int64_t rows = step.rows[static_cast<std::size_t>(world.rank)], half = rows / 2;
      const auto loss = family.make(options, world.group);
      const Wanted wanted = one_process(family, options, step, false, loss->state());
      const Scorer scorer(1);
      const at::Tensor x = step.x.narrow(0, begin, rows), all = leaf(scorer(x));
      loss->forward(all, step.targets.narrow(0, begin, rows)).backward();
      const auto again = [&](std::int64_t from, std::int64_t count) {
        return scorer.gradients((scorer(x.narrow(0, from, count)) * all.grad().narrow(0, from, count)).sum());
      };
      auto sum = again(0, half);
      const auto rest = again(half, rows - half);
      for (std::size_t i = 0; i < sum.size(); ++i) world.group.all_reduce(sum[i] += rest[i]);
      EXPECT_LT(distance(sum, wanted.gradients), kAllowed) << family.name;
    }
  });
}

TEST_P(RankingAt, AForwardMovesTheDocumentedMinimum) {
  const int ranks = GetParam();
  run_ranks(ranks, [&](World& world) {
    for (const Family& family : families()) {
      if (family.selects) continue;  // selection_test.cpp
      for (const std::int64_t classes : {1, 3})
        for (const bool weighted : {false, true})
          for (const bool differentiated : {false, true}) {
            RankingOptions options;
            options.num_classes = classes, options.queue_size = 16, options.temperature = 0.4;
            const Step step = make_step(Cut::kUneven, ranks, classes, 3);
            const auto begin =
                std::accumulate(step.rows.begin(), step.rows.begin() + world.rank, std::int64_t{0});
            const std::int64_t rows = step.rows[static_cast<std::size_t>(world.rank)];
            const auto loss = family.make(options, world.group);
            const at::Tensor scores = Scorer(classes)(step.x.narrow(0, begin, rows)).detach().to(at::kFloat);
            if (differentiated) scores.requires_grad_(true);
            const Traffic before = world.group.traffic();
            const at::Tensor value = loss->forward(scores, step.targets.narrow(0, begin, rows),
                                                   extras_of(step, begin, rows, weighted));
            if (differentiated) value.backward();  // moves nothing
            Traffic after = world.group.traffic();
            if (ranks == 1) {
              EXPECT_EQ(after.bytes(), before.bytes());
              continue;
            }
            const auto moved = [&](const char* name) {
              const auto was = before.operations.find(name);
              Traffic::Operation op = after.operations[name];
              if (was != before.operations.end())
                op.calls -= was->second.calls, op.bytes -= was->second.bytes;
              return std::pair(op.calls, op.bytes);
            };
            const auto part = [&](std::int64_t whole) { return whole * (ranks - 1) / ranks; };
            const std::int64_t n = step.targets.ne(-100).sum().item<std::int64_t>();
            const std::int64_t row = 4 * classes + (classes == 1 ? 1 : 4) + (weighted ? 8 : 0);
            EXPECT_EQ(moved("all_gather"), std::pair(std::int64_t{2}, part(88 * ranks) + part(n * row)));
            const bool scatters = family.sharded && differentiated,
                       reduces = family.sharded && !differentiated;
            EXPECT_EQ(moved("reduce_scatter"),
                      scatters ? std::pair(std::int64_t{1}, part(4 * classes * (n + 3 * ranks)))
                               : std::pair(std::int64_t{0}, std::int64_t{0}));
            EXPECT_EQ(moved("all_reduce"), reduces ? std::pair(std::int64_t{1}, part(2 * 8 * 3 * classes))
                                                   : std::pair(std::int64_t{0}, std::int64_t{0}))
                << family.name;
          }
    }
  });
}

// Without the gather each rank ranks its own rows: another loss, whatever the factor.
TEST(Ranking, OfOnesOwnRowsAloneIsSeen) {
  run_ranks(4, [](World& world) {
    const Family family = families()[0];
    RankingOptions options;
    options.temperature = 0.4, options.queue_size = 0;
    const Step step = make_step(Cut::kEven, 4, 1, 2);
    const auto alone = family.make(options, Group::solo());
    const Wanted wanted = one_process(family, options, step, false, alone->state());
    const Scorer scorer(1);
    const std::int64_t begin = 6 * world.rank;
    auto own = scorer.gradients(
        alone->forward(scorer(step.x.narrow(0, begin, 6)), step.targets.narrow(0, begin, 6)));
    double norm = 0, product = 0, size = 0;
    for (std::size_t i = 0; i < own.size(); ++i) {
      world.group.all_reduce(own[i]);
      norm += own[i].square().sum().item<double>(), size += wanted.gradients[i].square().sum().item<double>();
      product += (own[i] * wanted.gradients[i]).sum().item<double>();
    }
    EXPECT_LT(product / std::sqrt(norm * size), 0.99);
  });
}

}  // namespace
}  // namespace isograd
