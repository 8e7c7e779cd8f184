// For tests of ranking losses over ranks: a small scorer, steps cut over ranks in every way, every family of
// losses beside a naive twin of it, and one process on all rows.
#pragma once

#include <torch/csrc/autograd/autograd.h>

#include <numeric>

#include "full_tests.hpp"
#include "loss/loss_testing.hpp"
#include "loss/ranking/ranking_testing.hpp"

namespace isograd::ranking_cases {

using Rows = std::vector<std::int64_t>;

inline at::Generator generator(std::uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

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

inline Step make_step(Cut cut, int ranks, std::int64_t classes, int number) {
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
  bool dealt;
  bool selects = false;
};

template <typename Options>
Options with(Options own, const RankingOptions& base) {
  static_cast<RankingOptions&>(own) = base;
  return own;
}

inline std::vector<Family> families() {
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
  const auto of_pauc = [](const std::string& name, const PAUCOptions& options, bool dealt) {
    return Family{name,
                  [options](RankingOptions base, Group group) {
                    return std::make_shared<PAUCAtBudgetLoss>(with(options, base), group);
                  },
                  [options](const auto& pool, const auto& s, const auto& positive) {
                    return twin::pauc(pool, s, positive, tau, options);
                  },
                  dealt};
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
    if (all[i].dealt) continue;
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

inline Wanted one_process(const Family& family, const RankingOptions& options, const Step& step,
                          bool weighted, const RankingLoss::State& queue) {
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

inline at::Tensor total(const at::Tensor& loss) {  // of kNone: over the valid classes
  return loss.dim() == 0 ? loss : at::where(at::isnan(loss), at::zeros_like(loss), loss).sum();
}

inline double distance(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& wanted) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    difference += (found[i] - wanted[i]).square().sum().item<double>();
    size += wanted[i].square().sum().item<double>();
  }
  return std::sqrt(difference) / (size > 0 ? std::sqrt(size) : 1);
}

inline double ratio(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& wanted) {
  double product = 0, size = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    product += (found[i] * wanted[i]).sum().item<double>();
    size += wanted[i].square().sum().item<double>();
  }
  return product / size;
}

inline RankingExtras extras_of(const Step& step, std::int64_t begin, std::int64_t rows, bool weighted) {
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
inline void for_each_case(const std::function<void(const Case&)>& body) {
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

}  // namespace isograd::ranking_cases
