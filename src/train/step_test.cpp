// One step: what it reports, refuses and moves; of several calls, in any order of micro-batches, with what
// travels in the message of its norm.
#include "isograd/step.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/error_testing.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/error.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/loss.hpp"
#include "isograd/world.hpp"
#include "toy.hpp"

namespace isograd {
namespace {

using error_testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Forward = std::function<LossTerms(const toy::Model& model, const Batch& batch)>;

LossTerms cross_entropy(const toy::Model& model, const Batch& batch) {
  return {{"cross_entropy", cross_entropy_sum(model.logits(batch), batch.targets)}};
}

struct Setup {
  std::unique_ptr<Optimizer> optimizer = sgd({.learning_rate = 0});
  StepOptions options{};
  Forward forward = cross_entropy;
  std::unique_ptr<Normalizer> mean = std::make_unique<TokenMean>();
  int stage = 0;
};

// A rank's model, layout, optimizer and step.
struct Rank {
  toy::Model model;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<Normalizer> mean;
  std::unique_ptr<DataParallel> layout;
  Step step;

  Rank(Group group, Setup setup)
      : optimizer(std::move(setup.optimizer)),
        mean(std::move(setup.mean)),
        layout(bucketed(trainable_parameters(model.named()), std::move(group),
                        {.stage = setup.stage, .bucket_bytes = 300})),
        step([this, forward = std::move(setup.forward)](const Batch& batch) { return forward(model, batch); },
             *layout, *mean, *optimizer, std::move(setup.options)) {}

  std::vector<at::Tensor> weights() const {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& tensor : model.trainable()) copies.push_back(tensor.detach().clone());
    return copies;
  }
  std::vector<at::Tensor> gradients() {
    std::vector<at::Tensor> result;
    for (auto& view : layout->views()) result.push_back(view.gradient);
    return result;
  }
};

bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!at::equal(a[i], b[i])) return false;
  return true;
}

TEST(Step, ReportsGlobalCountsLossAndNorm) {
  const int size = 3;
  const auto batches = toy::make_step(size, 2);
  const auto wanted = toy::reference(toy::Model(), batches);
  const Batch whole = toy::concatenate(batches);
  double squares = 0;
  for (auto& g : wanted.gradients) squares += g.square().sum().item<double>();
  run_ranks(size, [&](World& world) {
    Rank rank(world.group, {.options = {.max_norm = 0}});
    const StepReport report = rank.step(batches[world.rank], world.rank == 2);
    EXPECT_NEAR(report.loss, wanted.loss, 1e-12);
    EXPECT_NEAR(report.norm, std::sqrt(squares), 1e-12);
    EXPECT_EQ(report.clip_coefficient, 1);
    EXPECT_EQ(report.step_counts.targets, whole.num_targets());
    EXPECT_EQ(report.step_counts.tokens, whole.num_tokens());
    EXPECT_EQ(report.step_counts.micro_batches, 5);
    EXPECT_TRUE(report.step_counts.stop_requested);
    EXPECT_FALSE(report.step_counts.save_requested);
    EXPECT_EQ(report.step_counts.targets_by_rank.at(1), 0);  // the rank without micro-batches
    EXPECT_TRUE(report.finite && report.updated);
    EXPECT_EQ(rank.optimizer->updates(), 1);
  });
}

TEST(Step, EveryRankIsToldOfARequestOfAny) {
  const auto batches = toy::make_step(3, 1);
  run_ranks(3, [&](World& world) {
    Rank rank(world.group, {});
    for (const int stops : {-1, 0, 2})
      for (const int saves : {-1, 1}) {
        const StepCounts told =
            rank.step(batches[world.rank], Requests(world.rank == stops, world.rank == saves)).step_counts;
        EXPECT_EQ(told.stop_requested, stops >= 0);
        EXPECT_EQ(told.save_requested, saves >= 0);
      }
  });
}

TEST(Step, ClipsByTheGlobalNorm) {
  const auto batches = toy::make_step(2, 1);
  const auto wanted = toy::reference(toy::Model(), batches);
  run_ranks(2, [&](World& world) {
    Rank rank(world.group, {.optimizer = sgd({.learning_rate = 1}), .options = {.max_norm = 0.01}});
    const auto before = rank.weights();
    const StepReport report = rank.step(batches[world.rank]);
    ASSERT_GT(report.norm, 0.02);
    EXPECT_EQ(report.clip_coefficient, 0.01 / (report.norm + 1e-6));
    const auto after = rank.weights();
    for (std::size_t i = 0; i < after.size(); ++i)
      EXPECT_LT(
          (before[i] - after[i] - report.clip_coefficient * wanted.gradients[i]).abs().max().item<double>(),
          1e-14);
    // The gradients stay as they were reduced.
    EXPECT_LT(toy::worst_error(rank.gradients(), wanted.gradients), 1e-10);
  });
}

TEST(Step, WithoutAnyTargetMovesNothing) {
  for (int size : {1, 2})
    run_ranks(size, [&](World& world) {
      Rank rank(world.group, {.optimizer = adamw({.weight_decay = 0.5})});
      const auto before = rank.weights();
      const StepReport report = rank.step({toy::make_batch({5}, 3, /*silent=*/true)});
      EXPECT_EQ(report.loss, 0);
      EXPECT_EQ(report.norm, 0);
      EXPECT_TRUE(report.finite);
      EXPECT_FALSE(report.updated);
      EXPECT_EQ(rank.optimizer->updates(), 0);
      EXPECT_TRUE(same(before, rank.weights()));
      EXPECT_FALSE(rank.step({}).updated);  // no micro-batch anywhere
    });
}

TEST(Step, NotFiniteOnOneRankMovesNothingAnywhere) {
  const auto batches = toy::make_step(4, 2);
  for (int bad_rank : {0, 3})
    for (bool in_loss : {true, false})
      run_ranks(4, [&](World& world) {
        const Forward forward = [&](const toy::Model& model, const Batch& batch) {
          LossTerms terms = cross_entropy(model, batch);
          if (world.rank != bad_rank) return terms;
          // -NaN as 0 / 0 is on x86; or a finite value, whose gradient is not: d√x/dx at 0.
          terms[0].sum = in_loss ? terms[0].sum * -std::nan("")
                                 : terms[0].sum + (model.gain - model.gain.detach()).sqrt().sum();
          return terms;
        };
        Rank rank(world.group, {.optimizer = adamw({}), .forward = forward});
        const auto before = rank.weights();
        const StepReport report = rank.step(batches[world.rank]);
        EXPECT_FALSE(report.finite);
        EXPECT_FALSE(report.updated);
        EXPECT_EQ(rank.optimizer->updates(), 0);
        EXPECT_TRUE(same(before, rank.weights()));
        EXPECT_EQ(std::isfinite(report.loss), !in_loss);
        EXPECT_FALSE(std::isnan(report.loss) && std::signbit(report.loss)) << "texts would say -nan";
      });
}

TEST(Step, TakesTheNextStepAfterARefusedOne) {
  const auto batches = toy::make_step(2, 1);
  run_ranks(2, [&](World& world) {
    bool poison = true;
    Rank rank(world.group, {.forward = [&](const toy::Model& model, const Batch& batch) {
                LossTerms terms = cross_entropy(model, batch);
                if (poison && world.rank == 1) terms[0].sum = terms[0].sum * HUGE_VAL;
                return terms;
              }});
    EXPECT_FALSE(rank.step(batches[world.rank]).finite);
    poison = false;
    const StepReport report = rank.step(batches[world.rank]);
    EXPECT_TRUE(report.updated);
    EXPECT_NEAR(report.loss, toy::reference(toy::Model(), batches).loss, 1e-12);
  });
}

TEST(Step, AcceptsAConstantOnlyWhereThereIsNoTarget) {
  bool constant_everywhere = false;
  Rank rank(Group::solo(), {.forward = [&](const toy::Model& model, const Batch& batch) -> LossTerms {
              if (batch.num_targets() == 0 || constant_everywhere)
                return {{"cross_entropy", at::zeros({}, at::kDouble)}};
              return cross_entropy(model, batch);
            }});
  EXPECT_TRUE(rank.step({toy::make_batch({6}, 1), toy::make_batch({}, 2)}).updated);
  constant_everywhere = true;
  EXPECT_ANY_THROW(rank.step({toy::make_batch({6}, 1)}));
}

// Three terms with denominators of their own, one of them the whole on every rank: each logged as itself.
TEST(Step, LogsEachTermAsItsOwnGlobalValue) {
  const int size = 3;
  const auto batches = toy::make_step(size, 2);
  const Batch whole = toy::concatenate(batches);
  toy::Model model;
  const at::Tensor logits = model.logits(whole);
  const auto squares = [](const toy::Model& of) { return of.gain.square().sum() + of.twice.square().sum(); };
  const at::Tensor wanted_ce =
      at::cross_entropy_loss(logits, whole.targets, {}, at::Reduction::Mean, kIgnoreIndex);
  const at::Tensor wanted_size = logits.square().sum() / 1000;  // over all tokens, targets or not
  const at::Tensor wanted_weights = squares(model);
  const auto trainable = model.trainable();
  auto gradients = torch::autograd::grad({wanted_ce + 0.01 * wanted_size + 0.5 * wanted_weights}, trainable,
                                         {}, false, false, /*allow_unused=*/true);
  for (std::size_t i = 0; i < gradients.size(); ++i)
    if (!gradients[i].defined()) gradients[i] = at::zeros_like(trainable[i].detach());

  run_ranks(size, [&](World& world) {
    const bool first = world.rank == 0;  // the replicated term's gradient comes from one rank
    // The rank's micro-batches each carry the whole: 1 of its 3 or 2.
    const double part = 1.0 / static_cast<double>(batches[static_cast<std::size_t>(world.rank)].size());
    const Forward forward = [&](const toy::Model& own, const Batch& batch) -> LossTerms {
      const at::Tensor x = own.logits(batch), norm = squares(own);
      return {{"cross_entropy", cross_entropy_sum(x, batch.targets)},
              {"logit_size", x.square().sum(), Mean::kFixed, 0.01, 1000},
              {"weights", (first ? norm : norm.detach()) * part, Mean::kNone, 0.5, 1, /*replicated=*/true}};
    };
    Rank rank(world.group, {.options = {.max_norm = 0, .check_denominators = true}, .forward = forward});
    const StepReport report = rank.step(batches[static_cast<std::size_t>(world.rank)]);
    ASSERT_EQ(report.terms.size(), 3u);  // rank 1 has no micro-batch and knows them too
    EXPECT_EQ(report.terms[1].name, "logit_size");
    EXPECT_NEAR(report.terms[0].value, wanted_ce.item<double>(), 1e-12);
    EXPECT_NEAR(report.terms[1].value, wanted_size.item<double>(), 1e-12);
    EXPECT_NEAR(report.terms[2].value, wanted_weights.item<double>(), 1e-12);
    EXPECT_NEAR(
        report.loss,
        wanted_ce.item<double>() + 0.01 * wanted_size.item<double>() + 0.5 * wanted_weights.item<double>(),
        1e-12);
    EXPECT_LT(toy::worst_error(rank.gradients(), gradients), 1e-10);
  });
}

// A balance term of either scope inside the step, with a rank that has fewer micro-batches.
TEST(Step, CarriesATermThatDoesNotDecompose) {
  const int size = 3;
  const auto batches = toy::make_step(size, 3);  // rank 1 has none, rank 0 four
  const auto route = [](const toy::Model& model, const Batch& batch) {
    return at::softmax(at::linear(at::embedding(model.embedding, batch.tokens), model.twice), 1);
  };
  const auto plain = [&](const toy::Model& model, const MicroBatches& of) {
    at::Tensor places = at::zeros({toy::kHidden}, at::kDouble), p = places;
    double tokens = 0;
    for (const Batch& batch : of) {
      if (batch.num_tokens() == 0) continue;
      const at::Tensor probabilities = route(model, batch);
      places = places + at::one_hot(probabilities.argmax(1), toy::kHidden).sum(0);
      p = p + probabilities.sum(0);
      tokens += static_cast<double>(batch.num_tokens());
    }
    return tokens > 0 ? toy::kHidden * (places / tokens * (p / tokens)).sum() : at::zeros({}, at::kDouble);
  };
  for (const Scope scope : {Scope::kMicroBatch, Scope::kStep}) {
    toy::Model alone;
    MicroBatches all;
    at::Tensor wanted = at::zeros({}, at::kDouble);
    std::size_t rounds = 0;
    for (const auto& of_rank : batches) rounds = std::max(rounds, of_rank.size());
    for (std::size_t round = 0; round < rounds; ++round) {
      MicroBatches together;
      for (const auto& of_rank : batches)
        if (round < of_rank.size()) together.push_back(of_rank[round]);
      wanted = wanted + plain(alone, together) / static_cast<double>(rounds);
      all.insert(all.end(), together.begin(), together.end());
    }
    if (scope == Scope::kStep) wanted = plain(alone, all);
    const auto reference = toy::reference(alone, batches);
    auto gradients = torch::autograd::grad({wanted}, {alone.embedding, alone.twice});
    gradients[0] = reference.gradients[0] + 0.1 * gradients[0];
    gradients[1] = reference.gradients[1] + 0.1 * gradients[1];

    run_ranks(size, [&](World& world) {
      const MicroBatches& own_batches = batches[static_cast<std::size_t>(world.rank)];
      BalanceLoss balance({.experts = toy::kHidden, .weight = 0.1, .scope = scope}, world.group);
      const Forward forward = [&](const toy::Model& own, const Batch& batch) {
        const at::Tensor probabilities = route(own, batch);
        LossTerms terms = cross_entropy(own, batch);
        terms.push_back(balance.term(probabilities, probabilities.detach().argmax(1, true)));
        return terms;
      };
      Rank rank(world.group, {.options = {.max_norm = 0, .even_micro_batches = true}, .forward = forward});
      if (scope == Scope::kStep) {
        for (const Batch& batch : own_batches) balance.collect(route(rank.model, batch).argmax(1, true));
        balance.finish_collecting();
      }
      const StepReport report = rank.step(own_batches);
      EXPECT_NEAR(report.terms.at(1).value, wanted.item<double>(), 1e-12);
      EXPECT_NEAR(report.loss, reference.loss + 0.1 * wanted.item<double>(), 1e-12);
      const auto views = rank.layout->views();
      EXPECT_LT((views[0].gradient - gradients[0]).norm().item<double>(), 1e-11);
      EXPECT_LT((views[1].gradient - gradients[1]).norm().item<double>(), 1e-11);
    });
  }
}

// Raw sums and one scale at the end: the same update as that of a step whose batch is known beforehand.
TEST(Step, DeferredUpdatesAsIfTheBatchHadBeenKnown) {
  const auto batches = toy::make_step(2, 3);
  run_ranks(2, [&](World& world) {
    const MicroBatches& own = batches[static_cast<std::size_t>(world.rank)];
    Rank plain(world.group, {.optimizer = sgd({.learning_rate = 1}), .options = {.max_norm = 0.05}});
    const StepReport wanted = plain.step(own);

    Rank rank(world.group, {.optimizer = sgd({.learning_rate = 1}),
                            .options = {.max_norm = 0.05},
                            .mean = std::make_unique<Deferred>(std::make_unique<TokenMean>())});
    Step& step = rank.step;
    step.accumulate({own.begin(), own.begin() + 1});
    step.accumulate({});
    step.accumulate({own.begin() + 1, own.end()});
    const StepReport report = step.finish();
    EXPECT_TRUE(report.updated);
    EXPECT_EQ(report.step_counts.targets, wanted.step_counts.targets);
    EXPECT_EQ(report.gradient_scale, 1.0 / static_cast<double>(wanted.step_counts.targets));
    EXPECT_NEAR(report.loss, wanted.loss, 1e-13);
    EXPECT_NEAR(report.norm, wanted.norm, 1e-13);
    EXPECT_NEAR(report.clip_coefficient, wanted.clip_coefficient, 1e-13);
    const auto trainable = rank.model.trainable(), others = plain.model.trainable();
    for (std::size_t i = 0; i < trainable.size(); ++i)
      EXPECT_LT((trainable[i] - others[i]).abs().max().item<double>(), 1e-14);
  });
}

// Where ranks make equally many forwards, each call adds its own rounds to them, not the step's so far: K
// calls would cost K (K + 1) / 2.
TEST(Step, DeferredMakesAsManyForwardsAsItsCallsHaveRounds) {
  constexpr int kCalls = 7;
  const auto batches = toy::make_step(3, 3);  // rank 0 has 4 micro-batches, rank 1 none, rank 2 three
  for (const int stage : {0, 2})
    for (const bool even : {false, true})
      run_ranks(3, [&](World& world) {
        const auto& own = batches[static_cast<std::size_t>(world.rank)];
        std::size_t forwards = 0;
        Rank rank(world.group, {.options = {.max_norm = 0, .even_micro_batches = even},
                                .forward =
                                    [&](const toy::Model& model, const Batch& batch) {
                                      ++forwards;
                                      return cross_entropy(model, batch);
                                    },
                                .mean = std::make_unique<Deferred>(std::make_unique<TokenMean>()),
                                .stage = stage});
        for (int call = 0; call < kCalls; ++call) rank.step.accumulate(own);
        const StepReport report = rank.step.finish();
        const std::size_t rounds = stage == 2 || even ? 4 : own.size();
        EXPECT_EQ(forwards, kCalls * rounds) << "stage " << stage << ", even " << even;
        EXPECT_EQ(report.step_counts.global_micro_batches, 4 * kCalls);
        EXPECT_NEAR(report.loss, toy::reference(toy::Model(), batches).loss, 1e-12);
      });
}

// A term that its weight switches off may be anything, whole or a share, on any rank.
TEST(Step, ATermOfWeightZeroStopsNothing) {
  const auto batches = toy::make_step(3, 2);
  const auto wanted = toy::reference(toy::Model(), batches);
  for (const bool replicated : {false, true})
    run_ranks(3, [&](World& world) {
      Rank rank(world.group, {.forward = [&](const toy::Model& model, const Batch& batch) {
                  const double value = world.rank == 2 || replicated ? std::nan("") : 1;
                  LossTerms terms = cross_entropy(model, batch);
                  terms.push_back({"off", model.gain.sum() * value, Mean::kTargets, 0.0, 1, replicated});
                  return terms;
                }});
      const StepReport report = rank.step(batches[static_cast<std::size_t>(world.rank)]);
      EXPECT_TRUE(report.finite && report.updated);
      EXPECT_NEAR(report.loss, wanted.loss, 1e-12);
      EXPECT_TRUE(std::isnan(report.terms.at(1).value)) << "it is logged as it is";
    });
}

// On demand in any build, always in debug builds.
TEST(Step, ChecksThatRanksDivideByTheSame) {
  struct OnItsOwn : TokenMean {
    Denominator denominator(const StepCounts& step_counts) const override {
      Denominator own = TokenMean::denominator(step_counts);
      own.value = 1 + step_counts.rank;
      return own;
    }
  };
  EXPECT_THROW(run_ranks(2,
                         [&](World& world) {
                           Rank rank(world.group, {.options = {.check_denominators = true},
                                                   .mean = std::make_unique<OnItsOwn>()});
                           rank.step({toy::make_batch({4}, 1)});
                         }),
               BrokenInvariant);
}

// The commonest mistake of a forward. Refused in the first step, on every rank at once, before a weight
// moves.
TEST(Step, RefusesAMeanOverAMicroBatch) {
  const auto batches = toy::make_step(3, 3);  // rank 1 has no micro-batch
  const Batch whole = toy::concatenate(batches);
  using Loss = std::function<at::Tensor(const at::Tensor& logits, const Batch& batch)>;
  const Loss mean = [](const at::Tensor& logits, const Batch& batch) {
    return at::cross_entropy_loss(logits, batch.targets, {}, at::Reduction::Mean, kIgnoreIndex);
  };
  const Loss divided = [](const at::Tensor& logits, const Batch& batch) {
    return cross_entropy_sum(logits, batch.targets) / static_cast<double>(batch.num_targets());
  };
  const auto first_step = [&](const Loss& loss, auto make_mean, int stage = 0, bool only_first = false,
                              bool replicated = false) {
    std::vector<std::string> errors(3);
    run_ranks(3, [&](World& world) {
      const Forward forward = [&](const toy::Model& model, const Batch& batch) {
        LossTerms terms = cross_entropy(model, batch);
        if (!only_first || world.rank == 0) terms[0].sum = loss(model.logits(batch), batch);
        terms[0].replicated = replicated;
        return terms;
      };
      Rank rank(
          world.group,
          {.optimizer = sgd({.learning_rate = 1}), .forward = forward, .mean = make_mean(), .stage = stage});
      const at::Tensor before = rank.model.twice.detach().clone();
      try {
        rank.step(batches[static_cast<std::size_t>(world.rank)]);
      } catch (const ConfigError& error) {
        errors[static_cast<std::size_t>(world.rank)] = error.what();
        EXPECT_TRUE(at::equal(before, rank.model.twice)) << "no weight moves";
        world.group.barrier();  // nobody was left behind in a collective
      }
    });
    EXPECT_TRUE(errors[0] == errors[1] && errors[0] == errors[2]) << errors[0] << errors[1] << errors[2];
    return errors[1];
  };
  const auto token_mean = [] { return std::make_unique<TokenMean>(); };
  for (const Loss& loss : {mean, divided})
    for (const int stage : {0, 1, 2})
      for (const bool only_first : {false, true})
        EXPECT_NE(first_step(loss, token_mean, stage, only_first), "") << stage << only_first;
  const auto targets = static_cast<double>(whole.num_targets());
  EXPECT_NE(first_step(mean, [&] { return std::make_unique<FixedDenominator>(targets); }), "");
  EXPECT_NE(first_step(mean, [] { return std::make_unique<Deferred>(std::make_unique<TokenMean>()); }), "");
  // A loss that is normalised already, and one that is the whole on every rank.
  EXPECT_EQ(first_step(mean, [] { return std::make_unique<NoDenominator>(); }), "");
  EXPECT_EQ(first_step(mean, token_mean, 0, false, /*replicated=*/true), "");
  const std::string error = first_step(mean, token_mean, 0, true);
  for (const char* part : {"loss term 'cross_entropy'", "a mean over", "token_mean", "NoDenominator"})
    EXPECT_NE(error.find(part), std::string::npos) << error;
}

TEST(Step, RefusesALimitThatIsNoNumber) {
  EXPECT_THROW(Rank(Group::solo(), {.options = {.max_norm = std::nan("")}}), ConfigError);
}

// Frozen by mistake, or cut off by a detach().
TEST(Step, SaysThatNothingIsTrained) {
  for (const int stage : {0, 1, 2})
    for (const bool frozen : {true, false}) {
      std::vector<std::string> errors(3);
      EXPECT_ANY_THROW(run_ranks(3, [&](World& world) {
        Rank rank(world.group, {.forward =
                                    [&](const toy::Model& model, const Batch& batch) {
                                      LossTerms terms = cross_entropy(model, batch);
                                      if (!frozen) terms[0].sum = terms[0].sum.detach();
                                      return terms;
                                    },
                                .stage = stage});
        if (frozen)
          for (at::Tensor tensor : rank.model.trainable()) tensor.set_requires_grad(false);
        try {
          rank.step({toy::make_batch({6}, 1)});
        } catch (const std::exception& error) {
          errors[static_cast<std::size_t>(world.rank)] = error.what();
          throw;
        }
      }));
      EXPECT_NE(errors[0].find("depends on no parameter with requires_grad"), std::string::npos)
          << stage << frozen << errors[0] << errors[1] << errors[2];
    }
}

TEST(Step, SaysThatALossIsUndefined) {
  const auto forward = [](const toy::Model&, const Batch&) { return LossTerms{{"ce", {}}}; };
  Rank rank(Group::solo(), {.forward = forward});
  EXPECT_THAT(error_of([&] { rank.step({toy::make_batch({6}, 1)}); }),
              HasSubstr("'ce': found an undefined tensor; expected a scalar"));
}

TEST(Step, FinishNeedsAccumulate) {
  Rank rank(Group::solo(), {});
  EXPECT_THROW(rank.step.finish(), ConfigError);
  rank.step.accumulate({toy::make_batch({6}, 1)});
  EXPECT_TRUE(rank.step.finish().updated);
  EXPECT_THROW(rank.step.finish(), ConfigError);
}

// ---- steps of several calls, and what looks ahead of one ----

// Cross entropy over targets, and a term over all tokens, whether they have a target or not.
LossTerms two_terms(const toy::Model& model, const Batch& batch) {
  const at::Tensor logits = model.logits(batch);
  return {{"cross_entropy", cross_entropy_sum(logits, batch.targets)},
          {"squares", logits.square().sum(), Mean::kStep, 0.1}};
}

// The whole batch in one process, with LibTorch's functions.
toy::Reference two_terms_plainly(const std::vector<MicroBatches>& by_rank, double divisor) {
  const toy::Model model;
  const Batch whole = toy::concatenate(by_rank);
  const at::Tensor logits = model.logits(whole);
  const at::Tensor loss =
      (at::cross_entropy_loss(logits, whole.targets, {}, at::Reduction::Sum, kIgnoreIndex) +
       0.1 * logits.square().sum()) /
      divisor;
  toy::Reference result;
  result.loss = loss.item<double>();
  result.gradients =
      torch::autograd::grad({loss}, model.trainable(), {}, false, false, /*allow_unused=*/true);
  return result;
}

// A call without any target on any rank, before, between and after those with some: in each order the same.
TEST(StepOfCalls, KeepsCallsWithoutTargets) {
  const auto silent = [](std::int64_t length, std::int64_t id) {
    return toy::make_batch({length}, id, true);
  };
  const std::vector<MicroBatches> of_rank_0 = {{silent(6, 1)}, {toy::make_batch({5, 3}, 2)}, {silent(2, 4)}};
  const std::vector<MicroBatches> of_rank_1 = {{silent(4, 11), silent(1, 12)}, {}, {silent(3, 13)}};
  std::vector<MicroBatches> all(2);
  for (const MicroBatches& call : of_rank_0) all[0].insert(all[0].end(), call.begin(), call.end());
  for (const MicroBatches& call : of_rank_1) all[1].insert(all[1].end(), call.begin(), call.end());
  const auto targets = static_cast<double>(toy::concatenate(all).num_targets());
  const std::vector<std::pair<double, std::function<std::unique_ptr<Normalizer>()>>> means = {
      {targets, [] { return std::make_unique<TokenMean>(); }},
      {targets, [] { return std::make_unique<WeightedMean>(); }},
      {8, [] { return std::make_unique<FixedDenominator>(8.); }},
      {1, [] { return std::make_unique<NoDenominator>(); }}};
  for (const auto& [divisor, make] : means) {
    const toy::Reference wanted = two_terms_plainly(all, divisor);
    for (const std::vector<std::size_t>& order :
         {std::vector<std::size_t>{0, 1, 2}, {1, 0, 2}, {2, 0, 1}, {1, 2, 0}})
      run_ranks(2, [&](World& world) {
        Rank rank(world.group, {.optimizer = sgd({.learning_rate = 0.1}),
                                .options = {.max_norm = 0},
                                .forward = two_terms,
                                .mean = std::make_unique<Deferred>(make())});
        for (const std::size_t call : order)
          rank.step.accumulate((world.rank == 0 ? of_rank_0 : of_rank_1)[call]);
        const StepReport report = rank.step.finish();
        EXPECT_TRUE(report.updated);
        EXPECT_NEAR(report.loss, wanted.loss, 1e-11);
        double terms = 0;
        for (const TermValue& term : report.terms) terms += (term.name == "squares" ? 0.1 : 1) * term.value;
        EXPECT_NEAR(terms, wanted.loss, 1e-11) << "logged";
        const auto views = rank.layout->views();
        for (std::size_t i = 0; i < views.size(); ++i)
          if (wanted.gradients[i].defined()) {
            EXPECT_LT((views[i].gradient * report.gradient_scale - wanted.gradients[i]).norm().item<double>(),
                      1e-11)
                << views[i].name;
          }
      });
  }
}

TEST(StepOfCalls, OfNothingMovesNothing) {
  run_ranks(2, [](World& world) {
    Rank rank(world.group, {.optimizer = sgd({.learning_rate = 0.1}),
                            .forward = two_terms,
                            .mean = std::make_unique<Deferred>(std::make_unique<NoDenominator>())});
    rank.step.accumulate({toy::make_batch({4}, 1, /*silent=*/true)});
    rank.step.accumulate({});
    const auto before = rank.weights();
    const StepReport report = rank.step.finish();
    EXPECT_TRUE(report.finite);
    EXPECT_FALSE(report.updated);
    EXPECT_EQ(report.loss, 0);
    EXPECT_EQ(report.norm, 0);
    EXPECT_EQ(report.gradient_scale, 0);
    EXPECT_TRUE(same(before, rank.weights()));
    EXPECT_EQ(rank.optimizer->updates(), 0);
  });
}

struct Normalised : torch::nn::Module {
  std::shared_ptr<SyncBatchNorm> norm;
  at::Tensor weight, seen;  // `seen`: a buffer of its own that its forward changes
  explicit Normalised(Group group) {
    norm = register_module(
        "norm", std::make_shared<SyncBatchNorm>(SyncBatchNormOptions{.channels = 3}, std::move(group)));
    norm->to(at::kDouble);
    weight = register_parameter("weight", at::eye(3, at::kDouble));
    seen = register_buffer("seen", at::zeros({}, at::kLong));
  }
  at::Tensor forward(const Batch& batch) {
    if (!recomputing()) seen += batch.num_tokens();
    const at::Tensor x = batch.tokens.to(at::kDouble);
    return at::linear(norm->forward(at::stack({x * 0.1, x * x * 0.1, x.sin()}, 1)), weight);
  }
};

// Buffers after a step with a look-ahead are those after the same step without one.
TEST(LookAhead, ChangesBuffersOnce) {
  run_ranks(2, [](World& world) {
    std::vector<at::Tensor> buffers[2];
    for (const bool ahead : {false, true}) {
      auto net = std::make_shared<Normalised>(world.group);
      auto layout = bucketed(trainable_parameters(*net), world.group);
      auto optimizer = sgd({.learning_rate = 0.1});
      TokenMean mean;
      BalanceLoss balance({.experts = 3, .weight = 0.1}, world.group);
      bool collecting = false, was_recomputing = false;
      const auto forward = [&](const Batch& batch) -> LossTerms {
        const at::Tensor p = at::softmax(net->forward(batch), 1), chosen = p.argmax(1, true);
        LossTerms terms = {{"confidence", p.square().sum()}};
        if (collecting) balance.collect(chosen);
        if (collecting || !ahead) return terms;
        terms.push_back(balance.term(p, chosen));
        return terms;
      };
      StepOptions options;
      if (ahead)
        options.look_ahead = [&](const MicroBatches& micro_batches, const Group&) {
          const at::NoGradGuard no_grad;
          was_recomputing = recomputing();
          collecting = true;
          for (const Batch& batch : micro_batches) forward(batch);
          collecting = false;
          balance.finish_collecting();
        };
      Step step(forward, *layout, mean, *optimizer, options);
      step({toy::make_batch({5 + world.rank}, 1), toy::make_batch({7}, 2)});
      EXPECT_EQ(was_recomputing, ahead);
      EXPECT_FALSE(recomputing());
      EXPECT_EQ(net->norm->num_batches_tracked.item<std::int64_t>(), 2);
      for (const at::Tensor& buffer : net->buffers()) buffers[ahead].push_back(buffer.clone());
    }
    for (std::size_t i = 0; i < buffers[0].size(); ++i)
      EXPECT_TRUE(at::equal(buffers[0][i], buffers[1][i])) << i;
  });
}

// ---- the order of micro-batches ----

// All forwards first, then the backwards from the last to the first: what a schedule may do.
void backwards_at_the_end(MicroBatchWork& work) {
  for (std::size_t i = 0; i < work.size(); ++i) work.forward(i);
  for (std::size_t i = work.size(); i-- > 0;) work.backward(i, i == 0);
}

// Gradients of weights are put off by one micro-batch, and the last backward is whole.
void in_halves(MicroBatchWork& work) {
  const std::size_t all = work.size();
  for (std::size_t i = 0; i < all; ++i) {
    work.forward(i);
    if (i + 1 < all) work.backward_inputs(i);
    if (i > 0) work.backward_weights(i - 1, false);
    if (i + 1 == all) work.backward(i, true);
  }
}

TEST(Schedule, AnyScheduleGivesTheGradientOfOneDevice) {
  const auto batches = toy::make_step(3, 4);
  const auto wanted = toy::reference(toy::Model(), batches);
  for (const auto& schedule : {backwards_at_the_end, in_halves})
    run_ranks(3, [&](World& world) {
      Rank rank(world.group, {.options = {.max_norm = 0, .schedule = schedule}});
      EXPECT_NEAR(rank.step(batches[static_cast<std::size_t>(world.rank)]).loss, wanted.loss, 1e-12);
      EXPECT_LT(toy::worst_error(rank.gradients(), wanted.gradients), 1e-10);
    });
}

std::string error_of_schedule(const MicroBatches& batches, const MicroBatchSchedule& schedule,
                              std::size_t parts = 1) {
  Rank rank(Group::solo(), {.options = {.max_norm = 0, .schedule = schedule, .parts = parts}});
  return error_of([&] { rank.step(batches); });
}

TEST(Schedule, AScheduleThatLeavesSomethingOutIsRefused) {
  const auto batches = toy::make_step(1, 3)[0];
  ASSERT_GT(batches.size(), 1u);
  EXPECT_EQ(error_of_schedule(batches, backwards_at_the_end), "no error");
  const auto expect = [&](const MicroBatchSchedule& schedule, const char* what) {
    EXPECT_THAT(error_of_schedule(batches, schedule),
                AllOf(HasSubstr(what), HasSubstr("StepOptions::schedule")));
  };
  // Calls for micro-batch 0: forward, backward, the halves `inputs` and `weights`; capitals: with `last`.
  for (const auto& [calls, what] : {std::pair("", "a forward and a backward of each"),
                                    {"b", "forward(i) before backward(i)"},
                                    {"fbb", "each once"},
                                    {"fB", "`last` with the last backward"},
                                    {"i", "forward(i) before backward_inputs(i)"},
                                    {"fw", "backward_inputs(i) before backward_weights(i)"},
                                    {"fib", "each once"},
                                    {"fii", "each once"},
                                    {"fiww", "each once"},
                                    {"fiW", "`last` with the last backward"}})
    expect(
        [letters = std::string(calls)](MicroBatchWork& work) {
          for (const char call : letters) {
            if (call == 'f') work.forward(0);
            if (call == 'b' || call == 'B') work.backward(0, call == 'B');
            if (call == 'i') work.backward_inputs(0);
            if (call == 'w' || call == 'W') work.backward_weights(0, call == 'W');
          }
        },
        what);
  expect(
      [](MicroBatchWork& work) {
        for (std::size_t i = 0; i < work.size(); ++i) {
          work.forward(i);
          work.backward_inputs(i);
          if (i > 0) work.backward_weights(i, false);
        }
      },
      "a forward and a backward of each");
}

// A message counts backwards that ran, of all parts, or the index of the micro-batch that was asked
// for.
TEST(Schedule, ARefusalSaysWhichMicroBatchOrHowManyBackwards) {
  const auto batches = toy::make_step(1, 4)[0];
  const std::size_t all = batches.size();
  ASSERT_GT(all, 1u);
  EXPECT_THAT(error_of_schedule(
                  batches, [](MicroBatchWork&) {}, 2),
              HasSubstr(fmt::format("0 of {} backwards ({} micro-batches in 2 parts)", 2 * all, all)));
  const auto one = [](MicroBatchWork& work) {
    work.forward(0);
    work.backward(0, false);
  };
  EXPECT_THAT(error_of_schedule(batches, one), HasSubstr(fmt::format("1 of {} backwards", all)));
  EXPECT_THAT(error_of_schedule(batches, [](MicroBatchWork& work) { work.backward(1, false); }),
              HasSubstr(fmt::format("micro-batch 1 (they are numbered 0 to {})", all - 1)));
}

// ZeRO-3's units gather their parameters for a whole backward; and work of one's own need not have halves.
TEST(Schedule, HalvesThatThereAreNoneOfAreRefused) {
  struct Wholly : MicroBatchWork {
    std::size_t size() const override { return 1; }
    void forward(std::size_t, std::size_t) override {}
    void backward(std::size_t, bool, std::size_t) override {}
  } work;
  EXPECT_THAT(error_of([&] { work.backward_inputs(0); }), HasSubstr("computes backwards whole"));
  EXPECT_THAT(error_of([&] { work.backward_weights(0, true); }), HasSubstr("1f1b"));
}

// ---- what travels in the message of the norm ----

struct Counted {
  std::vector<StepReport> reports{};
  std::int64_t calls = 0;                 // of collectives
  std::map<std::string, double> norms{};  // of the first step's gradient, by parameter
};

// Two steps of `size` ranks, each of which counts its rank, its tokens, and one thing between the steps.
Counted counted(int size, bool with_counters, bool with_parts = false) {
  Counted result;
  const auto batches = toy::make_step(size, 2);
  run_ranks(size, [&](World& world) {
    std::vector<double> counts = {0, 0};
    StepOptions options;
    if (with_counters) options.counters = [&] { return std::exchange(counts, {0, 0}); };
    if (with_parts) {  // each parameter but the first; parts of nothing too
      for (const auto& [name, tensor] : toy::Model().named()) options.norm_parts.names.push_back(name);
      options.norm_parts.of = [names = options.norm_parts.names](const std::string& name) {
        const auto place = std::find(names.begin(), names.end(), name) - names.begin();
        return place == 0 ? -1 : static_cast<int>(place);
      };
    }
    Rank rank(world.group, {.options = options, .forward = [&](const toy::Model& model, const Batch& batch) {
                              counts[0] += world.rank + 1;
                              counts[1] += static_cast<double>(batch.num_tokens());
                              return cross_entropy(model, batch);
                            }});
    for (int i = 0; i < 2; ++i) {
      const StepReport report = rank.step(batches[static_cast<std::size_t>(world.rank)]);
      counts[0] += 1000;  // of a forward that is no step's
      if (world.rank == 0) result.reports.push_back(report);
      for (const auto& view : rank.layout->views())
        if (i == 0 && world.rank == 0) result.norms[view.name] = view.gradient.norm().item<double>();
    }
    if (world.rank > 0) return;
    for (const auto& [name, operation] : world.group.traffic().operations) result.calls += operation.calls;
  });
  return result;
}

TEST(StepCounters, IsAddedUpOverTheRanksAndCostsNoCollective) {
  for (const int size : {1, 2, 3}) {
    const auto batches = toy::make_step(size, 2);
    double ranks = 0;
    for (int rank = 0; rank < size; ++rank)
      ranks += (rank + 1) * static_cast<double>(batches[static_cast<std::size_t>(rank)].size());
    const Counted with = counted(size, true), without = counted(size, false);
    for (const StepReport& report : with.reports) {
      ASSERT_EQ(report.counters.size(), 2u);
      EXPECT_EQ(report.counters[0], ranks) << size;
      EXPECT_EQ(report.counters[1], static_cast<double>(report.step_counts.tokens)) << size;
      ASSERT_EQ(report.terms.size(), 1u);
      EXPECT_EQ(report.loss, without.reports[0].loss);
      EXPECT_EQ(report.norm, without.reports[0].norm);
    }
    EXPECT_TRUE(without.reports[0].counters.empty());
    EXPECT_EQ(with.calls, without.calls) << size;
    EXPECT_EQ(with.calls > 0, size > 1);
  }
}

TEST(StepNorms, OfPartsTravelWithTheNormAndLeaveItsBits) {
  for (const int size : {1, 2, 3}) {
    const Counted with = counted(size, true, true), without = counted(size, true);
    EXPECT_EQ(with.calls, without.calls) << size;
    const StepReport& report = with.reports[0];
    EXPECT_EQ(report.norm, without.reports[0].norm) << size;
    EXPECT_EQ(report.counters, without.reports[0].counters) << size;
    EXPECT_TRUE(without.reports[0].part_norms.empty());
    ASSERT_EQ(report.part_norms.size(), toy::Model().named().size());
    EXPECT_EQ(report.part_norms[0].name, "embedding");
    for (const TermValue& part : report.part_norms) {
      const auto own = with.norms.find(part.name);
      const double wanted = own == with.norms.end() || part.name == "embedding" ? 0 : own->second;
      EXPECT_NEAR(part.value, wanted, 1e-14 * wanted) << size << " " << part.name;
    }
    EXPECT_GT(with.norms.at("twice"), 0);
  }
}

using Names = std::vector<std::string>;

struct NamedSteps {
  std::vector<std::string> errors{};  // by rank; "no error"
  std::vector<Names> reported{};      // by step, on rank 0
  std::vector<std::int64_t> calls{};  // of collectives in each step, on rank 0
};

// Steps whose loss terms have these names: by step, then by rank. A rank without names has no micro-batch.
NamedSteps with_names(const std::vector<std::vector<Names>>& steps) {
  const int size = static_cast<int>(steps[0].size());
  NamedSteps result;
  result.errors.resize(steps[0].size());
  run_ranks(size, [&](World& world) {
    const auto own_place = static_cast<std::size_t>(world.rank);
    Names names;
    Rank rank(world.group,
              {.options = {.max_norm = 0}, .forward = [&](const toy::Model& model, const Batch& batch) {
                 LossTerms terms;
                 for (const std::string& name : names)
                   terms.push_back({name, cross_entropy_sum(model.logits(batch), batch.targets)});
                 return terms;
               }});
    const auto calls = [&] {
      std::int64_t sum = 0;
      for (const auto& [name, operation] : world.group.traffic().operations) sum += operation.calls;
      return sum;
    };
    result.errors[own_place] = error_of([&] {
      for (const auto& of_rank : steps) {
        names = of_rank[own_place];
        const std::int64_t before = calls();
        MicroBatches own;
        if (!names.empty())
          own = {toy::make_batch({4}, 1 + world.rank), toy::make_batch({3}, 9 + world.rank)};
        const StepReport report = rank.step(own);
        if (world.rank > 0) continue;
        result.calls.push_back(calls() - before);
        result.reported.emplace_back();
        for (const TermValue& term : report.terms) result.reported.back().push_back(term.name);
      }
    });
  });
  return result;
}

TEST(StepTerms, OfOtherNamesOnSomeRankAreRefusedOnAll) {
  const std::vector<std::vector<std::vector<Names>>> wrong = {
      {{{"cross_entropy", "aux"}, {"aux", "cross_entropy"}}},
      {{{"cross_entropy"}, {"cross_entropy", "aux"}}},
      // Hashes of three names (FNV-1a) of which two add up to twice the third.
      {{{"cross_entropy"}, {"term167145"}, {"term371221"}}},
      {{{"a"}, {}, {"b"}}},
      {{{"a"}, {}}, {{"a"}, {"b"}}},     // named late
      {{{}, {}}, {{"a"}, {"b"}}},        // nothing before
      {{{"a"}, {"a"}}, {{"a"}, {"b"}}},  // one changes
      {{{"a"}, {"a"}}, {{}, {"b"}}, {{"a"}, {"a"}}, {{"a"}, {"b"}}}};
  for (std::size_t i = 0; i < wrong.size(); ++i)
    for (const std::string& error : with_names(wrong[i]).errors)
      EXPECT_THAT(error, AllOf(HasSubstr("another order on some rank"), HasSubstr("rank "))) << i;
}

TEST(StepTerms, NamesTravelOnceAndWhenTheyChange) {
  const Names first = {"cross_entropy", "a_name_of_thirty_letters______"}, later = {"other"};
  const NamedSteps of_two =
      with_names({{first, {}}, {first, first}, {{}, first}, {later, later}, {{}, later}, {first, {}}});
  for (const std::string& error : of_two.errors) EXPECT_EQ(error, "no error");
  EXPECT_EQ(of_two.reported, (std::vector<Names>{first, first, first, later, later, first}));
  ASSERT_EQ(of_two.calls.size(), 6u);
  const std::int64_t plain = of_two.calls[1];
  EXPECT_EQ(of_two.calls,
            (std::vector<std::int64_t>{of_two.calls[0], plain, plain, plain + 1, plain, plain + 1}));
  EXPECT_GT(of_two.calls[0], plain);
}

}  // namespace
}  // namespace isograd
