// Diagnoses of dumps alone: gradients put together from parts whose weights are known.
#include "verify/diagnosis_testing.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace isograd {
namespace {

using namespace diagnosis_test;

using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Counts = ToyTrainer::Counts;

TEST(Diagnosis, SaysNothingWhenAllIsWell) {
  EXPECT_THAT(ToyTrainer().diagnosis(), IsEmpty());
  EXPECT_THAT(ToyTrainer().diagnosis(false), IsEmpty());
}

TEST(Diagnosis, NamesEveryWeighting) {
  struct Known {
    const char* id;
    std::function<double(const Counts&, std::size_t, std::size_t)> weight;
    double loss = 1;
  };
  const auto all = [](const Counts& c) { return ToyTrainer::all(c); };
  const std::vector<Known> known = {
      {"averaged_over_axis", [](auto&, auto, auto) { return 1.0 / 3; }},
      {"multiplied_by_axis", [](auto&, auto, auto) { return 3.0; }},
      {"summed_over_micro_batches",
       [](const Counts& c, auto, auto) {
         std::size_t most = 0;
         for (auto& rank : c) most = std::max(most, rank.size());
         return static_cast<double>(most);
       }},
      {"unscaled_sum", [&](const Counts& c, auto, auto) { return all(c); }, 105},
      {"gradient_scaled_by_count", [&](const Counts& c, auto, auto) { return all(c); }},
      {"count_not_reduced", [&](const Counts& c, auto k, auto) { return all(c) / ToyTrainer::of(c[k]); }},
      {"count_not_reduced", [&](const Counts& c, auto, auto) { return all(c) / ToyTrainer::of(c[0]); }},
      {"mean_of_rank_means",
       [&](const Counts& c, auto k, auto) { return all(c) / ToyTrainer::of(c[k]) / 3; }},
      {"mean_of_micro_batch_means",
       [&](const Counts& c, auto k, auto j) {
         double number = 0;
         for (auto& rank : c) number += static_cast<double>(rank.size());
         return all(c) / static_cast<double>(c[k][j]) / number;
       }},
      {"mean_of_micro_batch_means_by_rank",
       [&](const Counts& c, auto k, auto j) {
         return all(c) / static_cast<double>(c[k][j]) / static_cast<double>(c[k].size()) / 3;
       }},
      {"accumulation_rescaled",
       [](const Counts& c, auto k, auto j) {
         const auto own = static_cast<double>(c[k].size());
         return std::pow(own, static_cast<double>(j) - own + 1);
       }},
      {"missing_rank_part", [](auto&, auto k, auto) { return k == 1 ? 0.0 : 1.0; }},
  };
  for (const auto& one : known) {
    ToyTrainer trainer;
    trainer.weight = one.weight;
    trainer.loss_ratio = one.loss;
    // The sum's loss grows with whatever is in the batch.
    if (one.loss != 1)
      trainer.change = [](RunPair& pair, const Experiment&) {
        pair.found.figures.loss =
            pair.expected.figures.loss * static_cast<double>(pair.expected.figures.targets);
      };
    const auto findings = trainer.diagnosis();
    EXPECT_EQ(ids(findings), one.id) << (findings.empty() ? "" : findings[0].sentence);
    ASSERT_FALSE(findings.empty());
    EXPECT_GE(findings[0].evidence.size(), 2u) << one.id;
  }
}

TEST(Diagnosis, NamesTheFactor) {
  ToyTrainer trainer;
  trainer.weight = [](auto&, auto, auto) { return 1.0 / 3; };
  EXPECT_EQ(trainer.diagnosis()[0].sentence, "all parameters scaled by 1/3: averaged over dp_shard (3)");
  trainer.axes = {{"dp_replicate", 3}, {"dp_shard", 5}};
  EXPECT_THAT(trainer.diagnosis()[0].sentence, HasSubstr("averaged over dp_replicate (3)"));
  trainer.axes = {};
  EXPECT_THAT(trainer.diagnosis()[0].sentence, HasSubstr("averaged over the ranks (3)"));
}

// Two of everything: as given, a sum over micro-batches, a sum over ranks and a count of one's own are the
// same numbers. Experiments tell them apart; without experiments nothing is guessed.
TEST(Diagnosis, TellsApartWhatIsTheSameAsGiven) {
  ToyTrainer trainer{.counts = {{10, 10}, {10, 10}}, .axes = {{"dp_shard", 2}}};
  const std::vector<std::pair<const char*, decltype(trainer.weight)>> weights = {
      {"multiplied_by_axis", [](auto&, auto, auto) { return 2.0; }},
      {"summed_over_micro_batches",
       [](const Counts& c, auto, auto) { return static_cast<double>(c[0].size()); }},
      {"count_not_reduced",
       [](const Counts& c, auto k, auto) { return ToyTrainer::all(c) / ToyTrainer::of(c[k]); }},
  };
  for (const auto& [id, weight] : weights) {
    trainer.weight = weight;
    EXPECT_EQ(ids(trainer.diagnosis()), id);
    EXPECT_EQ(ids(trainer.diagnosis(false)), "undecided");
  }
}

TEST(Diagnosis, WhatFitsNothingIsUnknownWithItsNumbers) {
  ToyTrainer trainer;
  trainer.weight = [](auto&, auto k, auto) { return k == 0 ? 0.7 : k == 1 ? 1.9 : 1.2; };
  const auto findings = trainer.diagnosis();
  ASSERT_EQ(ids(findings), "unknown");
  EXPECT_THAT(findings[0].sentence, HasSubstr("unknown pattern: the direction of 3 of 3 parameters differs"));
  EXPECT_THAT(findings[0].evidence.back(), HasSubstr("ranks' parts: 0.7, 1.9, 1.2"));
  trainer.weight = [](auto&, auto, auto) { return 0.77; };
  EXPECT_THAT(trainer.diagnosis()[0].sentence, HasSubstr("scaled by 0.77, which is no size in the run"));
  trainer.weight = [](auto&, auto, auto) { return 1 + 1e-8; };  // too close to be called a known factor
  EXPECT_EQ(ids(trainer.diagnosis()), "scaled_by_factor");
}

TEST(Diagnosis, SomeParameters) {
  ToyTrainer trainer;
  trainer.change = [](RunPair& pair, const Experiment&) { pair.found.gradients[1].second *= 1.0 / 3; };
  auto findings = trainer.diagnosis();
  ASSERT_EQ(ids(findings), "some_parameters_scaled");
  EXPECT_EQ(findings[0].sentence, "only 1 of 3 parameters (b) scaled by 1/3: averaged over dp_shard (3)");
  // A term of the loss that says the same names itself.
  trainer.change = [](RunPair& pair, const Experiment&) {
    pair.found.gradients[1].second *= 3;
    pair.expected.terms = {{"cross_entropy", 1}, {"router", 0.5}};
    pair.found.terms = {{"cross_entropy", 1}, {"router", 1.5}};
  };
  findings = trainer.diagnosis();
  ASSERT_EQ(ids(findings), "term_scaled");
  EXPECT_EQ(findings[0].sentence, "the loss term router is scaled by 3, dp_shard (3): it reaches b");
  // One parameter without one rank's part.
  const ToyTrainer without{.weight = [](auto&, auto k, auto) { return k == 2 ? 0.0 : 1.0; }};
  trainer.change = [&](RunPair& pair, const Experiment& experiment) {
    pair.found.gradients[0] = without.run(experiment)->found.gradients[0];
  };
  findings = trainer.diagnosis();
  ASSERT_EQ(ids(findings), "missing_rank_part");
  EXPECT_EQ(findings[0].sentence, "only 1 of 3 parameters (a): without the part of rank 2");
}

TEST(Diagnosis, Structure) {
  const auto with = [](std::function<void(RunPair&)> change) {
    ToyTrainer trainer;
    trainer.change = [change](RunPair& pair, const Experiment&) { change(pair); };
    const auto findings = trainer.diagnosis();
    return findings.empty() ? std::string() : ids(findings) + ": " + findings[0].sentence;
  };
  EXPECT_EQ(with([](RunPair& pair) { pair.found.gradients.pop_back(); }),
            "parameters_missing: not on both sides: missing c");
  EXPECT_EQ(with([](RunPair& pair) { pair.found.gradients[2].first = "z"; }),
            "parameters_renamed: 1 parameters have other names: found z, expected c");
  EXPECT_EQ(with([](RunPair& pair) {
              pair.found.gradients[2].second = pair.found.gradients[2].second.reshape({5, 10});
            }),
            "parameters_reshaped: 1 parameters have another shape: c [5, 10], expected [50]");
  EXPECT_EQ(with([](RunPair& pair) {
              pair.expected.samples = {1, 2, 3, 4};
              pair.found.samples = {1, 2, 3, 3, 4, 4};
            }),
            "sample_twice: 2 samples count more than once: ids 3, 4");
  EXPECT_THAT(with([](RunPair& pair) {
                pair.expected.samples = {1, 2, 3, 4};
                pair.found.samples = {1, 2, 3, 9};
              }),
              HasSubstr("other_batch: the runs did not see the same samples"));
  EXPECT_EQ(with([](RunPair& pair) { pair.found.figures.targets = 45; }),
            "other_batch: counts differ: 45 targets of 210 tokens, expected 105 targets of 210 tokens");
  EXPECT_THAT(with([](RunPair& pair) {
                for (auto* dump : {&pair.found, &pair.expected})
                  for (auto& [name, gradient] : dump->gradients) gradient = at::zeros({50}, at::kDouble);
              }),
              HasSubstr("no_gradient: the expected gradient is zero everywhere"));
  EXPECT_EQ(with([](RunPair& pair) { pair.found.gradients[0].second[7] = NAN; }),
            "not_finite: not finite: 1 parameters (a)");
}

TEST(Diagnosis, Ranks) {
  const auto with = [](std::function<void(RunPair&)> change) {
    ToyTrainer trainer;
    trainer.change = [change](RunPair& pair, const Experiment&) { change(pair); };
    return ids(trainer.diagnosis());
  };
  const StepDump::RankView like{.initial = {1, 2, 3}, .gradients = {4, 5, 6}};
  EXPECT_EQ(with([&](RunPair& pair) { pair.found.ranks = {like, like, like}; }), "");
  EXPECT_EQ(with([&](RunPair& pair) {
              pair.found.ranks = {like, like, like};
              pair.found.ranks[1].initial[2] = 9;
            }),
            "initial_parameters_differ");
  EXPECT_EQ(with([&](RunPair& pair) {
              pair.found.ranks = {like, like, like};
              pair.found.ranks[2].gradients[0] = 9;
              pair.found.ranks[2].spread = 0.3;
            }),
            "replicas_differ");
  EXPECT_EQ(with([&](RunPair& pair) {
              pair.found.ranks = {like, like, like};
              pair.found.ranks[2].gradients[0] = 9;
              pair.found.ranks[2].spread = 1e-16;
            }),
            "sum_order_depends_on_rank");
}

TEST(Diagnosis, WhatChangesFromRunToRunIsNotCalledAnythingElse) {
  ToyTrainer trainer;
  int runs = 0;
  trainer.change = [&runs](RunPair& pair, const Experiment&) {
    pair.found.gradients[1].second *= 1 + ++runs;
  };
  EXPECT_EQ(ids(trainer.diagnosis()), "not_repeatable");
}

// The gradient is right; something else is not.
// Dumps of other trainers are in fp32: what rounding hides there is not called a difference.
TEST(Diagnosis, InSinglePrecision) {
  ToyTrainer trainer;
  trainer.change = [](RunPair& pair, const Experiment&) {
    pair.found.precision = "fp32";
    for (auto& [name, gradient] : pair.found.gradients) gradient = gradient.to(at::kFloat);
  };
  EXPECT_THAT(trainer.diagnosis(), IsEmpty());
  trainer.weight = [](const Counts& c, auto k, auto) {
    return ToyTrainer::all(c) / ToyTrainer::of(c[k]) / 3;
  };
  EXPECT_EQ(ids(trainer.diagnosis()), "mean_of_rank_means");
}

// What a term's value does not tell: whether it is multiplied or made of other rows.
TEST(Diagnosis, ATermIsCalledScaledByASizeOfTheRunAlone) {
  ToyTrainer trainer;
  double ratio = 1.0147;
  trainer.change = [&](RunPair& pair, const Experiment&) {
    pair.found.gradients[1].second += 0.01 * diagnosis_test::random_gradient(7);
    pair.expected.terms = {{"cross_entropy", 1}, {"router", 0.5}};
    pair.found.terms = {{"cross_entropy", 1}, {"router", 0.5 * ratio}};
  };
  auto findings = trainer.diagnosis();
  ASSERT_EQ(ids(findings), "undecided");
  EXPECT_THAT(findings[0].sentence, HasSubstr("the loss term router is another one: 0.50735, expected 0.5"));
  ratio = 2;
  EXPECT_EQ(ids(trainer.diagnosis()), "term_scaled");
  // Where all parameters are off, too, another term is told of.
  ratio = 1.0147;
  trainer.weight = [](auto&, auto k, auto) { return k == 0 ? 0.7 : 1.2; };
  EXPECT_THAT(sentence_of(trainer.diagnosis()), HasSubstr("terms of the loss: router 0.50735, expected 0.5"));
}

// As the bias of keys in attention has it: its gradient is what rounding leaves of zero.
TEST(Diagnosis, AParameterWithNextToNoGradientHasNoVote) {
  ToyTrainer trainer{.weight = [](auto&, auto, auto) { return 1 / 3.0; }};
  trainer.change = [](RunPair& pair, const Experiment&) {
    pair.expected.gradients.emplace_back("key.bias", 1e-17 * diagnosis_test::random_gradient(8));
    pair.found.gradients.emplace_back("key.bias", 1e-17 * diagnosis_test::random_gradient(9));
  };
  const auto findings = trainer.diagnosis();
  ASSERT_EQ(ids(findings), "averaged_over_axis");
  EXPECT_THAT(findings[0].sentence, HasSubstr("all parameters scaled by 1/3"));
  EXPECT_THAT(sentence_of(findings), HasSubstr("ratios 0.333333 to 0.333333"));
  trainer.weight = [](auto&, auto, auto) { return 0.0; };
  EXPECT_EQ(ids(trainer.diagnosis()), "gradient_lost");
}

TEST(Diagnosis, AnAverageOverRanksWithDataIsNamedWhateverIsLogged) {
  ToyTrainer trainer{.counts = {{40}, {0}, {30}}, .weight = [](auto&, auto, auto) { return 0.5; }};
  for (const double logged : {0.5, 1.0}) {
    trainer.loss_ratio = logged;
    EXPECT_EQ(ids(trainer.diagnosis(/*again=*/false)), "averaged_over_holders") << logged;
  }
}

TEST(Diagnosis, PartsThatAreNotInTheSumAreNamed) {
  ToyTrainer trainer{.weight = [](auto&, auto k, auto j) { return k == 0 && j == 1 ? 0.0 : 1.0; }};
  auto findings = trainer.diagnosis();
  ASSERT_EQ(ids(findings), "missing_data_part");
  EXPECT_THAT(findings[0].sentence, HasSubstr("without the part of micro-batch 1 of rank 0;"));
  trainer = {.counts = {{40}, {5}, {30}, {20}},
             .weight = [](auto&, auto k, auto) { return k > 1 ? 0.0 : 1.0; },
             .axes = {{"dp_shard", 4}}};
  findings = trainer.diagnosis();
  ASSERT_EQ(ids(findings), "missing_rank_part");
  EXPECT_THAT(findings[0].sentence, HasSubstr("without the part of rank 2, rank 3;"));
}

TEST(Diagnosis, RatiosByName) {
  EXPECT_EQ(ratio_text(3), "3");
  EXPECT_EQ(ratio_text(1.0 / 7), "1/7");
  EXPECT_EQ(ratio_text(0.75), "0.75");
  EXPECT_EQ(ratio_text(-1), "-1");
}

}  // namespace
}  // namespace isograd
