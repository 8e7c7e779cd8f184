#include "isograd/step.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <torch/csrc/autograd/autograd.h>
#include <cmath>

#include "isograd/error.hpp"
#include "isograd/loss.hpp"
#include "isograd/world.hpp"
#include "toy.hpp"

namespace isograd {
namespace {

// A rank's model, layout and optimizer.
struct Rank {
  toy::Model model;
  std::unique_ptr<DataParallel> layout;
  std::unique_ptr<Optimizer> optimizer;
  TokenMean mean;
  Step step;

  Rank(Group group, std::unique_ptr<Optimizer> optimizer_, StepOptions options, ForwardLossTerms forward = {})
      : layout(bucketed(trainable_parameters(model.named()), std::move(group), {.bucket_bytes = 300})),
        optimizer(std::move(optimizer_)),
        step(forward ? std::move(forward)
                     : ForwardLossTerms([this](const Batch& batch) { return terms(batch); }),
             *layout, mean, *optimizer, options) {}

  LossTerms terms(const Batch& batch) {
    return {{"cross_entropy", cross_entropy_sum(model.logits(batch), batch.targets)}};
  }
  std::vector<at::Tensor> weights() {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& tensor : model.trainable()) copies.push_back(tensor.detach().clone());
    return copies;
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
    Rank rank(world.group, sgd({.learning_rate = 0}), {.max_norm = 0});
    const StepReport report = rank.step(batches[world.rank], world.rank == 2);
    EXPECT_NEAR(report.loss, wanted.loss, 1e-12);
    EXPECT_NEAR(report.norm, std::sqrt(squares), 1e-12);
    EXPECT_EQ(report.clip_coefficient, 1);
    EXPECT_EQ(report.census.targets, whole.num_targets());
    EXPECT_EQ(report.census.tokens, whole.num_tokens());
    EXPECT_EQ(report.census.micro_batches, 5);
    EXPECT_TRUE(report.census.stop_requested);
    EXPECT_EQ(report.census.targets_by_rank.at(1), 0);  // the rank without micro-batches
    EXPECT_TRUE(report.finite && report.updated);
    EXPECT_EQ(rank.optimizer->updates(), 1);
  });
}

TEST(Step, ClipsByTheGlobalNorm) {
  const auto batches = toy::make_step(2, 1);
  const auto wanted = toy::reference(toy::Model(), batches);
  run_ranks(2, [&](World& world) {
    Rank rank(world.group, sgd({.learning_rate = 1}), {.max_norm = 0.01});
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
    std::vector<at::Tensor> gradients;
    for (auto& view : rank.layout->views()) gradients.push_back(view.gradient);
    EXPECT_LT(toy::worst_error(gradients, wanted.gradients), 1e-10);
  });
}

TEST(Step, WithoutAnyTargetMovesNothing) {
  for (int size : {1, 2})
    run_ranks(size, [&](World& world) {
      Rank rank(world.group, adamw({.weight_decay = 0.5}), {});
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
        toy::Model* model = nullptr;
        Rank rank(world.group, adamw({}), {}, [&](const Batch& batch) -> LossTerms {
          at::Tensor sum = cross_entropy_sum(model->logits(batch), batch.targets);
          if (world.rank == bad_rank && in_loss) sum = sum * -std::nan("");  // as 0 / 0 is on x86
          // Finite value, gradient that is not: d√x/dx at 0.
          if (world.rank == bad_rank && !in_loss)
            sum = sum + (model->gain - model->gain.detach()).sqrt().sum();
          return {{"cross_entropy", sum}};
        });
        model = &rank.model;
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
    toy::Model* model = nullptr;
    Rank rank(world.group, sgd({.learning_rate = 0}), {}, [&](const Batch& batch) -> LossTerms {
      at::Tensor sum = cross_entropy_sum(model->logits(batch), batch.targets);
      return {{"cross_entropy", poison && world.rank == 1 ? sum * HUGE_VAL : sum}};
    });
    model = &rank.model;
    EXPECT_FALSE(rank.step(batches[world.rank]).finite);
    poison = false;
    const StepReport report = rank.step(batches[world.rank]);
    EXPECT_TRUE(report.updated);
    EXPECT_NEAR(report.loss, toy::reference(toy::Model(), batches).loss, 1e-12);
  });
}

TEST(Step, AcceptsAConstantOnlyWhereThereIsNoTarget) {
  toy::Model* model = nullptr;
  bool constant_everywhere = false;
  Rank rank(Group::solo(), sgd({}), {}, [&](const Batch& batch) -> LossTerms {
    if (batch.num_targets() == 0 || constant_everywhere)
      return {{"cross_entropy", at::zeros({}, at::kDouble)}};
    return {{"cross_entropy", cross_entropy_sum(model->logits(batch), batch.targets)}};
  });
  model = &rank.model;
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
    toy::Model* own = nullptr;
    const bool first = world.rank == 0;  // the replicated term's gradient comes from one rank
    Rank rank(
        world.group, sgd({.learning_rate = 0}), {.max_norm = 0, .check_denominators = true},
        [&](const Batch& batch) -> LossTerms {
          const at::Tensor x = own->logits(batch);
          const at::Tensor norm = squares(*own);
          // The rank's micro-batches each carry the whole: 1 of its 3 or 2.
          const double part = 1.0 / static_cast<double>(batches[static_cast<std::size_t>(world.rank)].size());
          return {
              {"cross_entropy", cross_entropy_sum(x, batch.targets)},
              {"logit_size", x.square().sum(), Mean::kFixed, 0.01, 1000},
              {"weights", (first ? norm : norm.detach()) * part, Mean::kNone, 0.5, 1, /*replicated=*/true}};
        });
    own = &rank.model;
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
    std::vector<at::Tensor> found;
    for (auto& view : rank.layout->views()) found.push_back(view.gradient);
    EXPECT_LT(toy::worst_error(found, gradients), 1e-10);
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
      toy::Model* own = nullptr;
      BalanceLoss balance({.experts = toy::kHidden, .weight = 0.1, .scope = scope}, world.group);
      Rank rank(world.group, sgd({.learning_rate = 0}), {.max_norm = 0, .even_micro_batches = true},
                [&](const Batch& batch) -> LossTerms {
                  const at::Tensor probabilities = route(*own, batch);
                  return {{"cross_entropy", cross_entropy_sum(own->logits(batch), batch.targets)},
                          balance.term(probabilities, probabilities.detach().argmax(1, true))};
                });
      own = &rank.model;
      if (scope == Scope::kStep) {
        for (const Batch& batch : own_batches) balance.collect(route(*own, batch).argmax(1, true));
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
    Rank plain(world.group, sgd({.learning_rate = 1}), {.max_norm = 0.05});
    const StepReport wanted = plain.step(own);

    toy::Model model;
    auto layout = bucketed(trainable_parameters(model.named()), world.group, {.bucket_bytes = 300});
    auto optimizer = sgd({.learning_rate = 1});
    Deferred mean(std::make_unique<TokenMean>());
    Step step(
        [&](const Batch& batch) -> LossTerms {
          return {{"cross_entropy", cross_entropy_sum(model.logits(batch), batch.targets)}};
        },
        *layout, mean, *optimizer, {.max_norm = 0.05});
    step.accumulate({own.begin(), own.begin() + 1});
    step.accumulate({});
    step.accumulate({own.begin() + 1, own.end()});
    const StepReport report = step.finish();
    EXPECT_TRUE(report.updated);
    EXPECT_EQ(report.census.targets, wanted.census.targets);
    EXPECT_EQ(report.gradient_scale, 1.0 / static_cast<double>(wanted.census.targets));
    EXPECT_NEAR(report.loss, wanted.loss, 1e-13);
    EXPECT_NEAR(report.norm, wanted.norm, 1e-13);
    EXPECT_NEAR(report.clip_coefficient, wanted.clip_coefficient, 1e-13);
    const auto trainable = model.trainable(), others = plain.model.trainable();
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
        toy::Model model;
        auto layout = bucketed(trainable_parameters(model.named()), world.group, {.stage = stage});
        auto optimizer = sgd({.learning_rate = 0});
        Deferred mean(std::make_unique<TokenMean>());
        std::size_t forwards = 0;
        Step step(
            [&](const Batch& batch) -> LossTerms {
              ++forwards;
              return {{"cross_entropy", cross_entropy_sum(model.logits(batch), batch.targets)}};
            },
            *layout, mean, *optimizer, {.max_norm = 0, .even_micro_batches = even});
        for (int call = 0; call < kCalls; ++call) step.accumulate(own);
        const StepReport report = step.finish();
        const std::size_t rounds = stage == 2 || even ? 4 : own.size();
        EXPECT_EQ(forwards, kCalls * rounds) << "stage " << stage << ", even " << even;
        EXPECT_EQ(report.census.global_micro_batches, 4 * kCalls);
        EXPECT_NEAR(report.loss, toy::reference(toy::Model(), batches).loss, 1e-12);
      });
}

// A term that its weight switches off may be anything, whole or a share, on any rank.
TEST(Step, ATermOfWeightZeroStopsNothing) {
  const auto batches = toy::make_step(3, 2);
  const auto wanted = toy::reference(toy::Model(), batches);
  for (const bool replicated : {false, true})
    run_ranks(3, [&](World& world) {
      toy::Model* model = nullptr;
      Rank rank(world.group, sgd({.learning_rate = 0}), {}, [&](const Batch& batch) -> LossTerms {
        const double value = world.rank == 2 || replicated ? std::nan("") : 1;
        return {{"cross_entropy", cross_entropy_sum(model->logits(batch), batch.targets)},
                {"off", model->gain.sum() * value, Mean::kTargets, 0.0, 1, replicated}};
      });
      model = &rank.model;
      const StepReport report = rank.step(batches[static_cast<std::size_t>(world.rank)]);
      EXPECT_TRUE(report.finite && report.updated);
      EXPECT_NEAR(report.loss, wanted.loss, 1e-12);
      EXPECT_TRUE(std::isnan(report.terms.at(1).value)) << "it is logged as it is";
    });
}

// On demand in any build, always in debug builds.
TEST(Step, ChecksThatRanksDivideByTheSame) {
  struct OnItsOwn : TokenMean {
    Denominator denominator(const Census& census) const override {
      Denominator own = TokenMean::denominator(census);
      own.value = 1 + census.rank;
      return own;
    }
  };
  EXPECT_THROW(run_ranks(2,
                         [&](World& world) {
                           toy::Model model;
                           auto layout = bucketed(trainable_parameters(model.named()), world.group);
                           auto optimizer = sgd({});
                           OnItsOwn mean;
                           Step step([&](const Batch&) -> LossTerms { return {}; }, *layout, mean, *optimizer,
                                     {.check_denominators = true});
                           step({toy::make_batch({4}, 1)});
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
  const auto first_step = [&](const Loss& loss, auto make_mean, int stage, bool only_first, const LossTerm& like) {
    std::vector<std::string> errors(3);
    run_ranks(3, [&](World& world) {
      toy::Model model;
      auto layout = bucketed(trainable_parameters(model.named()), world.group, {.stage = stage});
      auto optimizer = sgd({.learning_rate = 1});
      auto mean_of_step = make_mean();
      Step step(
          [&](const Batch& batch) -> LossTerms {
            const bool wrong = !only_first || world.rank == 0;
            LossTerm own = like;  // ranks are threads
            own.name = "cross_entropy";
            own.sum = wrong ? loss(model.logits(batch), batch)
                            : cross_entropy_sum(model.logits(batch), batch.targets);
            return {own};
          },
          *layout, mean_of_step, *optimizer, {});
      const at::Tensor before = model.twice.detach().clone();
      try {
        step(batches[static_cast<std::size_t>(world.rank)]);
      } catch (const ConfigError& error) {
        errors[static_cast<std::size_t>(world.rank)] = error.what();
        EXPECT_TRUE(at::equal(before, model.twice)) << "no weight moves";
        world.group.barrier();  // nobody was left behind in a collective
      }
    });
    EXPECT_TRUE(errors[0] == errors[1] && errors[0] == errors[2]) << errors[0] << errors[1] << errors[2];
    return errors[1];
  };
  const auto token_mean = [] { return TokenMean(); };
  for (const Loss& loss : {mean, divided})
    for (const int stage : {0, 1, 2})
      for (const bool only_first : {false, true})
        EXPECT_NE(first_step(loss, token_mean, stage, only_first, {.name = ""}), "") << stage << only_first;
  const auto fixed = [&] { return FixedDenominator(double(whole.num_targets())); };
  EXPECT_NE(first_step(mean, fixed, 0, false, {.name = ""}), "");
  EXPECT_NE(first_step(mean, [] { return Deferred(std::make_unique<TokenMean>()); }, 0, false, {.name = ""}),
            "");
  // A loss that is normalised already, and one that is the whole on every rank.
  EXPECT_EQ(first_step(mean, [] { return NoDenominator(); }, 0, false, {.name = ""}), "");
  EXPECT_EQ(first_step(mean, token_mean, 0, false, {.name = "", .replicated = true}), "");
  const std::string error = first_step(mean, token_mean, 0, true, {.name = ""});
  for (const char* part : {"loss term 'cross_entropy'", "a mean over", "token_mean", "NoDenominator"})
    EXPECT_NE(error.find(part), std::string::npos) << error;
}

TEST(Step, RefusesALimitThatIsNoNumber) {
  EXPECT_THROW(Rank(Group::solo(), sgd({}), {.max_norm = std::nan("")}), ConfigError);
}

// Frozen by mistake, or cut off by a detach().
TEST(Step, SaysThatNothingIsTrained) {
  for (const int stage : {0, 1, 2})
    for (const bool frozen : {true, false}) {
      std::vector<std::string> errors(3);
      EXPECT_ANY_THROW(run_ranks(3, [&](World& world) {
        toy::Model model;
        auto layout = bucketed(trainable_parameters(model.named()), world.group, {.stage = stage});
        if (frozen)
          for (at::Tensor tensor : model.trainable()) tensor.set_requires_grad(false);
        auto optimizer = sgd({});
        TokenMean mean;
        Step step(
            [&](const Batch& batch) -> LossTerms {
              const at::Tensor sum = cross_entropy_sum(model.logits(batch), batch.targets);
              return {{"cross_entropy", frozen ? sum : sum.detach()}};
            },
            *layout, mean, *optimizer, {});
        try {
          step({toy::make_batch({6}, 1)});
        } catch (const std::exception& error) {
          errors[static_cast<std::size_t>(world.rank)] = error.what();
          throw;
        }
      }));
      EXPECT_NE(errors[0].find("depends on no parameter with requires_grad"), std::string::npos)
          << stage << frozen << errors[0] << errors[1] << errors[2];
    }
}

TEST(Step, FinishNeedsAccumulate) {
  Rank rank(Group::solo(), sgd({}), {});
  EXPECT_THROW(rank.step.finish(), ConfigError);
  rank.step.accumulate({toy::make_batch({6}, 1)});
  EXPECT_TRUE(rank.step.finish().updated);
  EXPECT_THROW(rank.step.finish(), ConfigError);
}

}  // namespace
}  // namespace isograd
