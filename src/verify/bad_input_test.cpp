// Input that verify refuses to judge; documents that leak; the data of experiments.
#include "verify/reference.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "isograd/error.hpp"
#include "toy.hpp"
#include "verify/experiments.hpp"
#include "verify/layout_run.hpp"

namespace isograd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using ChangeLogits = std::function<at::Tensor(const toy::Model&, const Batch&)>;

VerifyModel model_with(at::ScalarType dtype, const ChangeLogits& change) {
  auto model = std::make_shared<toy::Model>(dtype);
  const auto logits = [model, change](const Batch& batch) {
    return change ? change(*model, batch) : model->logits(batch);
  };
  return {.named = {{"embedding", model->embedding},
                    {"layers.0.twice", model->twice},
                    {"layers.1.bias", model->bias},
                    {"gain", model->gain},
                    {"sometimes", model->sometimes}},
          .logits = logits,
          .loss_terms = [logits](const Batch& batch) -> LossTerms {
            return {{"cross_entropy", cross_entropy_sum(logits(batch), batch.targets, {})}};
          }};
}

// Rank 0's verdict on two ranks; every rank's error, if any, as "rank: what".
struct Answer {
  Verdict verdict;
  std::string error;
};
Answer ask(const ChangeLogits& logits, const std::function<void(VerifyProblem&, World&)>& change = {}) {
  Answer answer;
  try {
    run_ranks(2, [&](World& world) {
      const auto by_rank = toy::make_step(2, 2);
      VerifyProblem problem;
      problem.updates = 0;
      problem.make_model = [&](at::ScalarType dtype) { return model_with(dtype, logits); };
      problem.local = by_rank[static_cast<std::size_t>(world.rank)];
      problem.whole = [by_rank] { return MicroBatches{toy::concatenate(by_rank)}; };
      problem.layouts = {
          {"naive", [](auto parameters, Group group) { return naive(std::move(parameters), group); }}};
      if (change) change(problem, world);
      Verdict own = verify(problem, world.group);
      if (world.rank == 0) answer.verdict = std::move(own);
    });
  } catch (const ConfigError& error) {
    answer.error = error.what();
  }
  return answer;
}

std::string ids(const Verdict& verdict) {
  std::string text;
  for (const auto& finding : verdict.findings) text += (text.empty() ? "" : " ") + finding.id;
  return text;
}

TEST(BadInput, TheModelOfTheseTestsIsRight) {
  const Answer answer = ask({});
  EXPECT_TRUE(answer.verdict.passed) << to_text(answer.verdict);
  EXPECT_EQ(ids(answer.verdict), "");
}

// Dropout from a generator that runs on: two oracle runs differ, and nothing else is said.
TEST(BadInput, ARandomModel) {
  const Answer answer = ask([](const toy::Model& model, const Batch& batch) {
    const at::Tensor logits = model.logits(batch);
    return logits * at::rand(logits.sizes(), logits.options().requires_grad(false)).gt(0.2);
  });
  EXPECT_FALSE(answer.verdict.passed);
  EXPECT_EQ(ids(answer.verdict), "random_model");
  EXPECT_THAT(answer.verdict.diagnosis.at(0), HasSubstr("nothing else is claimed"));
  EXPECT_THAT(answer.verdict.findings[0].evidence.at(0), HasSubstr("logits differ by up to"));
  EXPECT_TRUE(answer.verdict.layouts.empty());
}

// The first of two runs of the oracle is not finite, or a gradient of the second.
TEST(BadInput, AModelThatIsNotFiniteOnceIsRandom) {
  for (const bool logits_too : {true, false}) {
    int calls = 0;  // in fp64: rank 0's; the first asks whether the model runs in it at all
    const Answer answer = ask([&](const toy::Model& model, const Batch& batch) {
      at::Tensor logits = model.logits(batch);
      if (model.gain.scalar_type() != at::kDouble) return logits;
      ++calls;
      if (logits_too) return calls == 2 ? logits * std::nan("") : logits;
      if (calls == 3)
        logits.register_hook([](const at::Tensor& gradient) { return gradient * std::nan(""); });
      return logits;
    });
    EXPECT_EQ(ids(answer.verdict), "random_model") << logits_too;
  }
}

TEST(BadInput, AModelThatCannotRunInFp64) {
  const Answer mixed = ask([](const toy::Model& model, const Batch& batch) {
    return at::matmul(model.logits(batch), at::eye(toy::kVocabulary, at::kFloat));
  });
  EXPECT_THAT(mixed.error, HasSubstr("the model in fp64"));
  EXPECT_THAT(mixed.error, HasSubstr("it fails"));
  const Answer cast =
      ask([](const toy::Model& model, const Batch& batch) { return model.logits(batch).to(at::kFloat); });
  EXPECT_THAT(cast.error, HasSubstr("logits of type Float"));
}

TEST(BadInput, ZeroGradientEverywhere) {
  const Answer answer =
      ask([](const toy::Model& model, const Batch& batch) { return model.logits(batch) * 0; });
  EXPECT_FALSE(answer.verdict.passed);
  EXPECT_EQ(ids(answer.verdict), "no_gradient");
}

TEST(BadInput, ValuesThatAreNotFinite) {
  const Answer answer = ask([](const toy::Model& model, const Batch& batch) {
    return model.logits(batch) / at::zeros({}, at::kDouble).to(model.gain.scalar_type());
  });
  EXPECT_FALSE(answer.verdict.passed);
  EXPECT_THAT(ids(answer.verdict), HasSubstr("not_finite"));
}

TEST(BadInput, TooLittleMemoryForTheOracle) {
  const auto with = [](std::int64_t bytes) {
    return ask({}, [bytes](VerifyProblem& problem, World&) { problem.memory_bytes = bytes; });
  };
  // 155 elements · 8 bytes · 5 copies; without layers.1 (7 elements) 5920 bytes.
  EXPECT_TRUE(with(6200).verdict.passed);
  EXPECT_THAT(with(5950).error, HasSubstr("0.00595 MB available"));
  EXPECT_THAT(with(5950).error, HasSubstr("0.0062 MB for parameters and gradients in fp64"));
  EXPECT_THAT(with(5950).error, HasSubstr("Verify 1 of the 2 layers, which fit"));
  EXPECT_THAT(with(3000).error, HasSubstr("Verify on a machine with more memory"));
}

// Names and shapes, as a layout that loses something of the model has them.
TEST(BadInput, ParametersMissingOnOneSide) {
  const Answer answer = ask({}, [](VerifyProblem& problem, World&) {
    problem.layouts[0].make = [](std::vector<NamedParameter> parameters, Group group) {
      parameters.erase(parameters.begin() + 1);
      return naive(std::move(parameters), group);
    };
  });
  EXPECT_FALSE(answer.verdict.passed);
  EXPECT_EQ(ids(answer.verdict), "parameters_missing");
  EXPECT_THAT(answer.verdict.diagnosis.at(0), HasSubstr("missing layers.0.twice"));
  const Answer renamed = ask({}, [](VerifyProblem& problem, World&) {
    problem.layouts[0].make = [](std::vector<NamedParameter> parameters, Group group) {
      parameters[0].name = "wte";
      return naive(std::move(parameters), group);
    };
  });
  EXPECT_EQ(ids(renamed.verdict), "parameters_renamed");
}

TEST(Leak, DocumentsThatSeeOneAnotherAreFound) {
  const Batch batch = toy::make_batch({5, 7, 4}, 10);
  EXPECT_FALSE(probe_documents(model_with(at::kDouble, {}), batch));
  // Everything attends to the whole pack; and only backwards in it, so that the last one touches nobody.
  const auto leak = probe_documents(model_with(at::kDouble,
                                               [](const toy::Model& model, const Batch& seen) {
                                                 Batch merged = seen;
                                                 merged.cu_seqlens = {0, seen.num_tokens()};
                                                 merged.sample_ids = {seen.sample_ids[0]};
                                                 return model.logits(merged);
                                               }),
                                    batch);
  ASSERT_TRUE(leak);
  EXPECT_EQ(leak->perturbed, 10);
  EXPECT_GT(leak->logits, 0);
  EXPECT_FALSE(leak->parameter.empty());
  // A leak that only the gradient shows: logits are right, their derivative is not.
  const auto hidden = probe_documents(
      model_with(at::kDouble,
                 [](const toy::Model& model, const Batch& seen) {
                   const at::Tensor logits = model.logits(seen), mean = logits.mean(0, true);
                   return logits + (mean * model.gain.detach() - (mean * model.gain).detach()) * 1e-3 -
                          (mean - mean.detach()) * 1e-3 * model.gain.detach() +
                          (model.gain - model.gain.detach()) * mean.detach() * 1e-3;
                 }),
      batch);
  ASSERT_TRUE(hidden);
  EXPECT_EQ(hidden->logits, 0);
  EXPECT_EQ(hidden->parameter, "gain");
  EXPECT_FALSE(probe_documents(model_with(at::kDouble, {}), toy::make_batch({9}, 1)));
}

TEST(Experiments, AssignTheData) {
  const DataByRank data = {{toy::make_batch({9, 6}, 0), toy::make_batch({}, 2)}, {toy::make_batch({12}, 3)}};
  const auto counts = [&](const Experiment& experiment) {
    return counts_of(arrange(data, experiment).value());
  };
  using Rank = std::vector<std::int64_t>;
  EXPECT_THAT(counts({}), ElementsAre(Rank{11, 0}, Rank{10}));
  EXPECT_THAT(counts({.counts = Experiment::Counts::kEqual}), ElementsAre(Rank{10, 0}, Rank{10}));
  EXPECT_THAT(counts({.counts = Experiment::Counts::kUneven}), ElementsAre(Rank{2, 0}, Rank{9}));
  EXPECT_THAT(counts({.split_micro_batches = true}), ElementsAre(Rank{7, 4, 0}, Rank{10}));
  EXPECT_THAT(counts({.one_micro_batch = true}), ElementsAre(Rank{11}, Rank{10}));
  EXPECT_THAT(counts({.without_silent = true}), ElementsAre(Rank{11}, Rank{10}));
  EXPECT_THAT(counts({.empty_rank = 0}), ElementsAre(Rank{}, Rank{10}));
  EXPECT_THAT(counts({.only_rank = 0, .only_micro_batch = 0}), ElementsAre(Rank{11}, Rank{}));
  EXPECT_THAT(counts({.swapped = {0, 1}}), ElementsAre(Rank{10}, Rank{11, 0}));
  EXPECT_THAT(counts({.ranks = 1}), ElementsAre(Rank{11, 0, 10}));
  EXPECT_FALSE(arrange(data, {.only_rank = 0, .only_micro_batch = 1}));  // has no target
  // A document that carries no loss, and then has other tokens: nothing else changes.
  EXPECT_THAT(counts({.muted_document = 1}), ElementsAre(Rank{7, 0}, Rank{10}));
  const auto muted = arrange(data, {.muted_document = 1}).value()[0][0];
  const auto perturbed = arrange(data, {.muted_document = 1, .perturbed = true}).value()[0][0];
  EXPECT_TRUE(perturbed.targets.equal(muted.targets));
  EXPECT_TRUE(perturbed.tokens.slice(0, 0, 9).equal(muted.tokens.slice(0, 0, 9)));
  EXPECT_FALSE(perturbed.tokens.equal(muted.tokens));
  EXPECT_TRUE(data[0][0].tokens.equal(muted.tokens));
  EXPECT_FALSE(arrange({{data[1][0]}}, {.one_micro_batch = true}));  // would change nothing
  // Samples' lengths are those of the new step.
  const auto uneven = arrange(data, {.counts = Experiment::Counts::kUneven}).value();
  EXPECT_EQ(uneven[0][0].sample_targets[0] + uneven[0][0].sample_targets[1], 2);
}

// Rows of several types that belong to samples, which have two targets each.
Batch samples(std::int64_t first, std::int64_t count) {
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < count; ++i) ids.push_back(first + i);
  const at::Tensor numbers = at::arange(first, first + count);
  return batch_of_samples({numbers.to(at::kDouble).view({count, 1, 1}).expand({count, 2, 3}).clone(),
                           numbers.to(at::kByte), (numbers % 2).to(at::kBool).view({count, 1})},
                          at::stack({numbers % 5, numbers % 3}, 1), ids);
}
void expect_rows_of_their_samples(const Batch& batch) {
  ASSERT_EQ(batch.inputs.size(), 3u);
  for (std::int64_t f = 0; f < batch.num_fragments(); ++f) {
    const std::int64_t id = batch.sample_ids[static_cast<std::size_t>(f)];
    EXPECT_TRUE(batch.inputs[0][f].eq(static_cast<double>(id)).all().item<bool>());
    EXPECT_EQ(batch.inputs[1][f].item<std::int64_t>(), id);
    EXPECT_EQ(batch.inputs[2][f][0].item<bool>(), id % 2 == 1);
    EXPECT_EQ(batch.targets[2 * f].item<std::int64_t>(), id % 5);
  }
}

TEST(Experiments, CarryInputsAlong) {
  run_ranks(3, [](World& world) {
    MicroBatches own;
    if (world.rank != 1) own = {samples(10 * world.rank, 3), empty_batch(), samples(10 * world.rank + 3, 2)};
    const DataByRank data = gather_batches(own, world.group);
    for (const int rank : {0, 2}) {
      const MicroBatches& of_rank = data[static_cast<std::size_t>(rank)];
      ASSERT_EQ(of_rank.size(), 3u);
      EXPECT_TRUE(of_rank[1].inputs.empty());
      for (const std::size_t j : {0, 2}) {
        EXPECT_EQ(of_rank[j].sample_ids.front(), 10 * rank + (j == 0 ? 0 : 3));
        expect_rows_of_their_samples(of_rank[j]);
      }
    }
    for (const Experiment& experiment : {Experiment{.split_micro_batches = true},
                                         Experiment{.one_micro_batch = true}, Experiment{.ranks = 2}}) {
      const DataByRank arranged = arrange(data, experiment).value();
      for (const MicroBatches& of_rank : arranged)
        for (const Batch& batch : of_rank)
          if (batch.num_fragments() > 0) expect_rows_of_their_samples(batch);
    }
    const Batch perturbed = arrange(data, {.muted_document = 21, .perturbed = true}).value()[2][0];
    EXPECT_EQ(perturbed.inputs[0].eq(samples(20, 3).inputs[0]).sum().item<std::int64_t>(), 2 * 6);
    expect_rows_of_their_samples(data[2][0]);
  });
}

TEST(Digest, SeesAnInputThatIsAnother) {
  const MicroBatches batches = {samples(1, 3), samples(4, 2)};
  EXPECT_EQ(digest(batches), digest(MicroBatches{samples(4, 2), samples(1, 3)}));
  EXPECT_EQ(digest(batches), digest(MicroBatches{samples(1, 5)}));
  MicroBatches changed = {samples(1, 3), samples(4, 2)};
  changed[1].inputs[0][1][0][2] += 1e-9;
  EXPECT_NE(digest(batches), digest(changed));
}

TEST(Leak, ImagesThatSeeOneAnotherAreFound) {
  const Batch batch = samples(1, 4);
  const auto model = [](bool mixed) {
    at::Tensor weight = (at::arange(30, at::kDouble).view({5, 6}) * 0.1).sin().requires_grad_(true);
    VerifyModel made;
    made.named = {{"weight", weight}};
    made.logits = [weight, mixed](const Batch& seen) {
      const at::Tensor x = seen.inputs[0].flatten(1);
      return at::linear(mixed ? x - x.mean(0, true) : x, weight).repeat_interleave(2, 0);
    };
    return made;
  };
  EXPECT_FALSE(probe_documents(model(false), batch));
  const auto leak = probe_documents(model(true), batch);
  ASSERT_TRUE(leak);
  EXPECT_EQ(leak->perturbed, 1);
}

TEST(Experiments, TravelBetweenRanks) {
  run_ranks(3, [](World& world) {
    const auto by_rank = toy::make_step(3, 2);
    const DataByRank all = gather_batches(by_rank[static_cast<std::size_t>(world.rank)], world.group);
    ASSERT_EQ(all.size(), 3u);
    for (std::size_t rank = 0; rank < 3; ++rank) {
      ASSERT_EQ(all[rank].size(), by_rank[rank].size());
      for (std::size_t j = 0; j < all[rank].size(); ++j) {
        EXPECT_TRUE(all[rank][j].tokens.equal(by_rank[rank][j].tokens));
        EXPECT_TRUE(all[rank][j].targets.equal(by_rank[rank][j].targets));
        EXPECT_TRUE(all[rank][j].positions.equal(by_rank[rank][j].positions));
        EXPECT_EQ(all[rank][j].cu_seqlens, by_rank[rank][j].cu_seqlens);
        EXPECT_EQ(all[rank][j].sample_ids, by_rank[rank][j].sample_ids);
        EXPECT_EQ(all[rank][j].sample_targets, by_rank[rank][j].sample_targets);
      }
    }
    const Experiment asked{.counts = Experiment::Counts::kUneven,
                           .one_micro_batch = true,
                           .empty_rank = 2,
                           .swapped = {1, 2},
                           .muted_document = 5'000'000'000,
                           .perturbed = true,
                           .ranks = 2,
                           .without_noise = true};
    const auto heard = share_experiment(world.rank == 0 ? std::optional(asked) : std::nullopt, world.group);
    ASSERT_TRUE(heard);
    EXPECT_TRUE(*heard == asked);
    EXPECT_FALSE(share_experiment(std::nullopt, world.group));
  });
}

}  // namespace
}  // namespace isograd
