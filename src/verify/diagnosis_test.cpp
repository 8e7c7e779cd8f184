// Diagnoses of dumps alone: gradients put together from parts whose weights are known.
#include "verify/diagnosis.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace isograd::diagnosis_test {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

at::Tensor random_gradient(std::uint64_t seed, std::int64_t numel = 50) {
  return at::randn({numel}, at::make_generator<at::CPUGeneratorImpl>(seed), at::kDouble);
}

constexpr double kClip = 0.25;  // of the dumps that say nothing else

double norm_of(const StepDump& dump) {
  double squares = 0;
  for (const auto& [name, gradient] : dump.gradients) squares += gradient.square().sum().item<double>();
  return std::sqrt(squares);
}

// A trainer whose gradient is Σ over ranks k and micro-batches j of weight(k, j) / N · (sum of n_kj tokens),
// on parameters a, b and c.
struct ToyTrainer {
  using Counts = std::vector<std::vector<std::int64_t>>;
  Counts counts = {{40, 10}, {5}, {30, 20}};
  std::function<double(const Counts&, std::size_t k, std::size_t j)> weight = [](const Counts&, std::size_t,
                                                                                 std::size_t) { return 1.0; };
  std::function<double(std::size_t home)> of_data = [](std::size_t) { return 1.0; };  // by whose data it was
  using Axes = std::vector<Axis>;
  std::function<double(const Axes&)> of_axes = [](const Axes&) { return 1.0; };
  double loss_ratio = 1;
  Axes axes = {{"dp_shard", 3}};
  std::function<void(RunPair&, const Experiment&)> change = [](RunPair&, const Experiment&) {};

  static double of(const std::vector<std::int64_t>& rank) {
    return static_cast<double>(std::accumulate(rank.begin(), rank.end(), std::int64_t{0}));
  }
  static double all(const Counts& counts) {
    double sum = 0;
    for (const auto& rank : counts) sum += of(rank);
    return sum;
  }

  std::optional<RunPair> run(const Experiment& experiment) const {
    if (experiment.without_noise || experiment.without_resume || experiment.ranks > 0) return std::nullopt;
    Counts now = counts;
    std::vector<std::size_t> home(now.size());
    std::iota(home.begin(), home.end(), std::size_t{0});
    if (const auto [a, b] = experiment.swapped; a >= 0) {
      std::swap(home[static_cast<std::size_t>(a)], home[static_cast<std::size_t>(b)]);
      std::swap(now[static_cast<std::size_t>(a)], now[static_cast<std::size_t>(b)]);
    }
    for (std::size_t k = 0; k < now.size(); ++k) {
      if (experiment.counts == Experiment::Counts::kEqual)
        for (auto& count : now[k]) count = count > 0 ? 5 : 0;
      if (experiment.counts == Experiment::Counts::kUneven)
        for (std::size_t j = 0; j < now[k].size(); ++j)
          now[k][j] = now[k][j] ? 1 + (now[k][j] * static_cast<std::int64_t>(k + 2 * j)) % 11 : 0;
      if (static_cast<int>(k) == experiment.empty_rank)
        for (auto& count : now[k]) count = 0;
      if (experiment.one_micro_batch) now[k] = {static_cast<std::int64_t>(of(now[k]))};
      if (experiment.only_rank >= 0)
        for (std::size_t j = 0; j < now[k].size(); ++j)
          if (static_cast<int>(k) != experiment.only_rank ||
              (experiment.only_micro_batch >= 0 && static_cast<int>(j) != experiment.only_micro_batch))
            now[k][j] = 0;
    }
    Axes along = axes;
    if (experiment.only_axis >= 0) {
      int ranks = 1;
      for (auto& [name, size] : along) {
        ranks *= size;
        size = 1;
      }
      along.at(static_cast<std::size_t>(experiment.only_axis)).size = ranks;
    }
    RunPair pair;
    const double total = all(now);
    for (std::uint64_t p = 0; p < 3; ++p) {
      at::Tensor found = at::zeros({50}, at::kDouble), expected = at::zeros({50}, at::kDouble);
      for (std::size_t k = 0; k < now.size(); ++k)
        for (std::size_t j = 0; j < now[k].size(); ++j) {
          if (now[k][j] == 0) continue;
          const auto part =
              random_gradient(100 * p + 10 * home[k] + j) * static_cast<double>(now[k][j]) / total;
          expected += part;
          found += part * weight(now, k, j) * of_data(home[k]) * of_axes(along);
        }
      const std::string name(1, static_cast<char>('a' + p));
      pair.found.gradients.emplace_back(name, found);
      pair.expected.gradients.emplace_back(name, expected);
    }
    pair.expected.figures = {5, static_cast<std::int64_t>(total), 2 * static_cast<std::int64_t>(total),
                             norm_of(pair.expected), kClip};
    pair.found.figures = pair.expected.figures;
    pair.found.figures.loss *= loss_ratio;
    for (StepDump* dump : {&pair.found, &pair.expected}) {
      dump->counts = now;
      dump->axes = along;
      dump->precision = "fp64";
    }
    change(pair, experiment);
    return pair;
  }
  std::vector<Finding> diagnosis(bool again = true) const {
    return diagnose(*run({}), again ? RunAgain([this](const Experiment& e) { return run(e); }) : RunAgain());
  }
};

std::string ids(const std::vector<Finding>& findings) {
  std::string text;
  for (const auto& finding : findings) text += (text.empty() ? "" : " ") + finding.id;
  return text;
}

// Ids, sentences and evidence.
std::string sentence_of(const std::vector<Finding>& findings) {
  std::string text = ids(findings);
  for (const auto& finding : findings) {
    text += "\n" + finding.sentence;
    for (const auto& line : finding.evidence) text += "\n  " + line;
  }
  return text;
}

using Change = std::function<void(StepDump& found, StepDump& expected)>;

// The findings about a right gradient with all its figures, after `change`.
std::vector<Finding> findings_with(const Change& change, std::vector<std::string>* notices = nullptr) {
  ToyTrainer trainer;
  trainer.change = [change](RunPair& pair, const Experiment&) {
    const double norm = norm_of(pair.expected);
    for (auto& [name, gradient] : pair.expected.gradients)
      pair.expected.applied.emplace_back(name, gradient * kClip);
    pair.found.applied = pair.expected.applied;
    pair.expected.figures.norm = pair.found.figures.norm = norm;
    pair.expected.ranks.assign(1, {});
    pair.found.ranks.assign(3, {});
    for (std::size_t r = 0; r < 3; ++r) {
      pair.found.ranks[r].owned_norm = norm * std::sqrt(r == 0 ? 0.5 : 0.25);
      pair.found.ranks[r].norm = norm;
    }
    pair.found.owners.assign(3, {1, 1});
    change(pair.found, pair.expected);
  };
  const auto again = [&](const Experiment& experiment) { return trainer.run(experiment); };
  return diagnose(*trainer.run({}), again, notices);
}
std::string with(const Change& change, std::vector<std::string>* notices = nullptr) {
  return ids(findings_with(change, notices));
}

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
      {"summed_over_micro_batches",
       [](const Counts& c, auto, auto) {
         std::size_t most = 0;
         for (auto& rank : c) most = std::max(most, rank.size());
         return static_cast<double>(most * c.size());
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
      // Summed after each micro-batch, the loss of each as for an average.
      {"reduced_while_accumulating",
       [](const Counts& c, auto k, auto j) { return std::pow(3.0, static_cast<double>(c[k].size() - j)); }},
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
  EXPECT_THAT(trainer.diagnosis()[0].sentence,
              HasSubstr("as if divided by about 136.4 targets, where there are 105"));
  trainer.weight = [](auto&, auto, auto) { return 105.0 / 140; };
  EXPECT_THAT(trainer.diagnosis()[0].sentence, EndsWith("as if divided by 140 targets, where there are 105"));
  trainer.change = [](RunPair& pair, const Experiment&) { pair.found.figures.tokens = 140; };
  EXPECT_THAT(trainer.diagnosis()[0].sentence,
              EndsWith("the number of tokens, also of those that carry no loss"));
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

// Three ranks with the same checksums.
std::vector<StepDump::RankView>& of_ranks(RunPair& pair) {
  pair.found.ranks.assign(3, {.initial = {1, 2, 3}, .gradients = {4, 5, 6}});
  return pair.found.ranks;
}

TEST(Diagnosis, Structure) {
  const std::pair<const char*, std::function<void(RunPair&)>> cases[] = {
      {"parameters_missing\nnot on both sides: missing c",
       [](auto& pair) { pair.found.gradients.pop_back(); }},
      {"parameters_renamed\n1 parameters have other names: found z, expected c",
       [](auto& pair) { pair.found.gradients[2].first = "z"; }},
      {"parameters_reshaped\n1 parameters have another shape: c [5, 10], expected [50]",
       [](auto& pair) {
         pair.found.gradients[2].second = pair.found.gradients[2].second.reshape({5, 10});
       }},
      {"sample_twice\n2 samples count more than once: ids 3, 4",
       [](auto& pair) {
         pair.expected.samples = {1, 2, 3, 4}, pair.found.samples = {1, 2, 3, 3, 4, 4};
       }},
      {"other_batch\nthe runs did not see the same samples",
       [](auto& pair) {
         pair.expected.samples = {1, 2, 3, 4}, pair.found.samples = {1, 2, 3, 9};
       }},
      {"other_batch\ncounts differ: 45 targets of 210 tokens, expected 105 targets of 210 tokens",
       [](auto& pair) { pair.found.figures.targets = 45; }},
      {"no_gradient\nthe expected gradient is zero everywhere",
       [](auto& pair) {
         for (auto* dump : {&pair.found, &pair.expected})
           for (auto& [name, gradient] : dump->gradients) gradient = at::zeros({50}, at::kDouble);
       }},
      {"not_finite\nnot finite: 1 parameters (a)",
       [](auto& pair) { pair.found.gradients[0].second[7] = NAN; }},
      {"initial_parameters_differ\n", [](auto& pair) { of_ranks(pair)[1].initial[2] = 9; }},
      {"replicas_differ\n",
       [](auto& pair) { of_ranks(pair)[2].gradients[0] = 9, pair.found.ranks[2].spread = 0.3; }},
      {"sum_order_depends_on_rank\n",
       [](auto& pair) { of_ranks(pair)[2].gradients[0] = 9, pair.found.ranks[2].spread = 1e-16; }},
      {"", [](auto& pair) { of_ranks(pair); }}};
  for (const auto& [said, change] : cases) {
    ToyTrainer trainer;
    trainer.change = [&](RunPair& pair, const Experiment&) { change(pair); };
    const std::string found = sentence_of(trainer.diagnosis());
    EXPECT_THAT(found, StartsWith(said));
    EXPECT_EQ(found.empty(), *said == '\0') << found;
  }
}

TEST(Diagnosis, WhatChangesFromRunToRunIsNotCalledAnythingElse) {
  ToyTrainer trainer;
  int runs = 0;
  trainer.change = [&runs](RunPair& pair, const Experiment&) {
    pair.found.gradients[1].second *= 1 + ++runs;
  };
  EXPECT_EQ(ids(trainer.diagnosis()), "not_repeatable");
}

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

// A term's value does not tell whether it is multiplied or made of other rows.
TEST(Diagnosis, ATermIsCalledScaledByASizeOfTheRunAlone) {
  ToyTrainer trainer;
  double ratio = 1.0147;
  trainer.change = [&](RunPair& pair, const Experiment&) {
    pair.found.gradients[1].second += 0.01 * random_gradient(7);
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
    pair.expected.gradients.emplace_back("key.bias", 1e-17 * random_gradient(8));
    pair.found.gradients.emplace_back("key.bias", 1e-17 * random_gradient(9));
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

// Rank 0's gradient, where ranks hold different ones: what it has of each micro-batch of the others.
TEST(Diagnosis, MicroBatchesThatAreNotReducedAreNamed) {
  const Counts counts = {{40, 10, 6}, {5, 7, 8}, {30, 20, 9}};
  const auto means = [](const Counts& c, auto k, auto j) {
    return ToyTrainer::all(c) / static_cast<double>(c[k][j]) / 3;
  };
  using Weight = decltype(ToyTrainer::weight);
  const std::tuple<const char*, const char*, Weight> cases[] = {
      {"not_summed_over_axis", "not summed over dp_shard (3)",
       [](auto&, auto k, auto) { return k == 0 ? 1.0 : 0.0; }},
      {"not_summed_over_axis", "not summed over dp_shard (3)",
       [](auto&, auto k, auto) { return k == 0 ? 3.0 : 0.0; }},
      {"micro_batches_not_reduced", "not summed over dp_shard (3) from micro-batch 1 on",
       [](auto&, auto k, auto j) { return k == 0 || j == 0 ? 1.0 : 0.0; }},
      {"micro_batches_not_reduced", "not summed over dp_shard (3) from micro-batch 2 on",
       [](auto&, auto k, auto j) { return j < 2    ? 1.0
                                          : k == 0 ? 3.0
                                                   : 0.0; }},
      {"micro_batches_not_reduced", "not summed over dp_shard (3) up to micro-batch 1",
       [](auto&, auto k, auto j) { return k == 0 || j == 2 ? 1.0 : 0.0; }},
      {"micro_batches_not_reduced", "not summed over dp_shard (3) from micro-batch 1 on",
       [&](const Counts& c, auto k, auto j) {
         return j == 0 ? means(c, k, j) / 3 : k == 0 ? means(c, k, j) : 0.0;
       }},
      {"replicas_differ", "the ranks hold different gradients",
       [](auto&, auto k, auto j) { return k == 0 || j == 0 ? 1.0 : 0.1; }},
      {"replicas_differ", "the ranks hold different gradients",
       [](auto&, auto k, auto j) { return k == 0 || j == 0 ? 1.0 + 1e-8 : 0.0; }}};
  for (const auto& [id, sentence, weight] : cases) {
    ToyTrainer trainer{.counts = counts, .weight = weight};
    trainer.change = [](RunPair& pair, const Experiment&) {
      of_ranks(pair)[1].gradients[0] = 9, pair.found.ranks[1].spread = 0.3;
    };
    const auto findings = trainer.diagnosis();
    EXPECT_EQ(ids(findings), id) << sentence;
    EXPECT_THAT(findings[0].sentence, HasSubstr(sentence));
  }
}

TEST(Diagnosis, RatiosByName) {
  EXPECT_EQ(ratio_text(3), "3");
  EXPECT_EQ(ratio_text(1.0 / 7), "1/7");
  EXPECT_EQ(ratio_text(0.75), "0.75");
  EXPECT_EQ(ratio_text(-1), "-1");
}

// ---- experiments: each tells a pair of causes apart that are the same numbers in the step as given ----

TEST(Experiments, ARankEmptiedTellsWhoIsAveragedOver) {
  ToyTrainer trainer;
  trainer.weight = [](auto&, auto, auto) { return 1.0 / 3; };
  EXPECT_THAT(sentence_of(trainer.diagnosis()),
              AllOf(StartsWith("averaged_over_axis\n"), HasSubstr("rank 2 emptied"),
                    HasSubstr("not averaged_over_holders")));
  trainer.weight = [](const Counts& c, auto, auto) {
    return 1.0 / static_cast<double>(
                     std::count_if(c.begin(), c.end(), [](auto& own) { return ToyTrainer::of(own) > 0; }));
  };
  EXPECT_THAT(sentence_of(trainer.diagnosis()),
              AllOf(StartsWith("averaged_over_holders\n"),
                    HasSubstr("1/3: averaged over the ranks that have data (3 of 3)"),
                    HasSubstr("not averaged_over_axis")));
}

TEST(Experiments, RanksSwappedTellARankFromItsData) {
  ToyTrainer trainer;
  trainer.weight = [](auto&, auto k, auto) { return k == 1 ? 0.0 : 1.0; };
  EXPECT_THAT(sentence_of(trainer.diagnosis()),
              AllOf(StartsWith("missing_rank_part\n"), HasSubstr("without the part of rank 1"),
                    HasSubstr("ranks 1 and 0 swapped")));
  trainer.weight = [](auto&, auto, auto) { return 1.0; };
  trainer.of_data = [](std::size_t home) { return home == 1 ? 0.0 : 1.0; };
  EXPECT_THAT(sentence_of(trainer.diagnosis()),
              AllOf(StartsWith("missing_data_part\n"), HasSubstr("without the data that rank 1 has"),
                    HasSubstr("not missing_rank_part")));
}

TEST(Experiments, EachAxisAloneTellsAxesOfOneSizeApart) {
  ToyTrainer trainer{.counts = {{40, 10}, {5}, {30, 20}, {7}}, .axes = {{"dp_shard", 2}, {"cp_ring", 2}}};
  for (const char* axis : {"dp_shard", "cp_ring"}) {
    trainer.of_axes = [&](const ToyTrainer::Axes& axes) {
      return axes[0].name == axis ? 1.0 / axes[0].size : 1.0 / axes[1].size;
    };
    const auto findings = trainer.diagnosis();
    EXPECT_EQ(ids(findings), "averaged_over_axis");
    EXPECT_EQ(findings[0].sentence, fmt::format("all parameters scaled by 1/2: averaged over {} (2)", axis));
    EXPECT_THAT(sentence_of(findings), HasSubstr(axis == std::string("dp_shard")
                                                     ? "all ranks along dp_shard: ratio of a 0.25, 3 of 3"
                                                     : "all ranks along dp_shard: ratio of a 1, 0 of 3"));
    // Nor, without a run, from a division by the two micro-batches.
    EXPECT_EQ(trainer.diagnosis(false)[0].id, "undecided");
    EXPECT_EQ(
        trainer.diagnosis(false)[0].sentence,
        "all parameters scaled by 1/2: averaged over dp_shard (2); or 1/2: averaged over cp_ring (2); or "
        "1/2: divided by accumulation (2), though the count covers the whole step");
  }
}

TEST(Experiments, APerturbedDocumentTellsALeakFromTheUnknown) {
  ToyTrainer trainer;
  bool leaks = true;
  trainer.change = [&leaks](RunPair& pair, const Experiment& experiment) {
    pair.found.samples = pair.expected.samples = {4, 5, 6};
    pair.found.gradients[1].second[3] +=
        experiment.perturbed && leaks && experiment.muted_document == 4 ? 0.25 : 0.5;
  };
  EXPECT_THAT(sentence_of(trainer.diagnosis()),
              AllOf(StartsWith("documents_leak\n"), HasSubstr("changing document 4"),
                    HasSubstr("gradient of b by 0.25")));
  leaks = false;
  EXPECT_EQ(ids(trainer.diagnosis()), "unknown");
}

TEST(Experiments, RightAloneAndWrongTogether) {
  ToyTrainer trainer{.counts = {{40, 10}, {5}, {30, 20}, {7}}, .axes = {{"dp_shard", 2}, {"cp_ring", 2}}};
  const auto wrong_where = [&](std::function<bool(const RunPair&, const Experiment&)> where) {
    trainer.change = [where](RunPair& pair, const Experiment& experiment) {
      if (where(pair, experiment)) pair.found.gradients[1].second[3] += 0.5;
    };
    return sentence_of(trainer.diagnosis());
  };
  EXPECT_THAT(
      wrong_where([](auto& pair, auto& experiment) {
        return pair.found.axes[1].size > 1 && !experiment.one_micro_batch;
      }),
      AllOf(StartsWith("composition\n"), HasSubstr("wrong with accumulation (2) and cp_ring (2) together")));
  EXPECT_THAT(wrong_where([](auto& pair, auto&) { return pair.found.axes[0].size == 2; }),
              AllOf(StartsWith("composition\n"), HasSubstr("cp_ring (2) and dp_shard (2) together")));
  EXPECT_THAT(wrong_where([](auto& pair, auto&) { return pair.found.axes[1].size > 1; }),
              AllOf(StartsWith("unknown\n"), HasSubstr("it takes cp_ring (2) to be wrong")));
}

TEST(Experiments, CountedOnPeersMakesTheLossTooSmallAsWell) {
  ToyTrainer trainer;
  trainer.weight = [](auto&, auto, auto) { return 1.0 / 3; };
  trainer.loss_ratio = 1.0 / 3;
  EXPECT_EQ(ids(trainer.diagnosis()), "counted_on_peers");
  trainer.change = [](RunPair& pair, const Experiment&) {  // and the log counts so
    pair.found.samples = pair.expected.samples = {1, 2};
    pair.found.figures.targets *= 3;
  };
  EXPECT_EQ(ids(trainer.diagnosis()), "counted_on_peers");
}

// ---- the gradient is right, something else is not ----

struct Said {
  const char* ids;
  Change change;
};
void expect_said(const std::vector<Said>& cases) {
  for (std::size_t i = 0; i < cases.size(); ++i)
    EXPECT_EQ(with(cases[i].change), cases[i].ids) << "case " << i;
}

void times(at::Tensor& applied, double factor) { applied = applied * factor; }
void norm_becomes(StepDump& dump, double norm) {
  dump.figures.norm = norm;
  for (auto& rank : dump.ranks) rank.norm = norm;
}
// Nothing to compare with on this side.
void without_norms(StepDump& dump) {
  dump.figures.norm = NAN;
  for (auto& rank : dump.ranks) rank.norm = rank.owned_norm = NAN;
}
void without_coefficients(StepDump& found, StepDump& expected) {
  found.figures.clip_coefficient = expected.figures.clip_coefficient = NAN;
}

TEST(Diagnosis, Figures) {
  expect_said({
      {"", [](auto&, auto&) {}},
      {"loss_scaled", [](auto& found, auto&) { found.figures.loss *= 3; }},
      {"loss_differs", [](auto& found, auto&) { found.figures.loss *= 1.1; }},
      {"norm_counts_replicas",
       [](auto& found, auto&) { norm_becomes(found, found.figures.norm * std::sqrt(3.0)); }},
      {"norm_of_own_shard",
       [](auto& found, auto&) {
         for (auto& rank : found.ranks) rank.norm = rank.owned_norm;
         found.figures.norm = found.ranks[0].norm;
       }},
      {"norms_averaged",
       [](auto& found, auto&) {
         double sum = 0;
         for (auto& rank : found.ranks) sum += rank.owned_norm;
         norm_becomes(found, sum / 3);
       }},
      {"norm_differs", [](auto& found, auto&) { norm_becomes(found, found.figures.norm * 1.1); }},
      {"elements_not_owned_once",
       [](auto& found, auto&) {
         found.owners[1] = {0, 1};
       }},
      {"clip_not_applied",
       [](auto& found, auto&) {
         for (std::size_t i = 0; i < 3; ++i) found.applied[i].second = found.gradients[i].second.clone();
       }},
      {"groups_clipped_apart", [](auto& found, auto&) { times(found.applied[1].second, 2); }},
      {"some_parameters_scaled", [](auto& found, auto&) { times(found.applied[1].second, 0.5); }},
      {"clip_differs", [](auto& found, auto&) { found.figures.clip_coefficient = 1; }},
      // No clip makes longer, takes nothing away, or turns.
      {"optimizer_differs",
       [](auto& found, auto&) {
         for (auto& [name, applied] : found.applied) times(applied, 2);
       }},
      {"optimizer_differs", [](auto& found, auto&) { times(found.applied[1].second, 8); }},
      {"optimizer_differs", [](auto& found, auto&) { times(found.applied[1].second, 0); }},
      {"optimizer_differs",
       [](auto& found, auto&) { found.applied[1].second = found.applied[1].second.roll(1); }},
      // A turn by less than a thousandth, and of one parameter whose gradient is next to nothing.
      {"optimizer_differs",
       [](auto& found, auto&) {
         at::Tensor& applied = found.applied[1].second;
         const at::Tensor turned = applied.roll(1);
         applied = applied + 9e-4 * turned * (applied.norm() / turned.norm());
       }},
      {"optimizer_differs",
       [](auto& found, auto& expected) {
         for (StepDump* dump : {&found, &expected}) {
           dump->gradients[2].second.mul_(1e-5);
           dump->applied[2].second = dump->gradients[2].second * kClip;
           without_norms(*dump);
         }
         times(found.applied[2].second, -50);
       }},
      {"clip_differs",
       [](auto& found, auto& expected) {
         found.applied.clear();
         found.figures.clip_coefficient = 1.5, expected.figures.clip_coefficient = NAN;
       }},
      // The ranks contradict each other.
      {"norm_differs", [](auto& found, auto&) { found.ranks[1].owned_norm = 1e9; }},
      {"norm_differs",
       [](auto& found, auto&) {
         found.owners.clear();
         found.ranks[1].owned_norm = found.figures.norm * 1.01;
       }},
      {"elements_not_owned_once",
       [](auto& found, auto&) {
         without_norms(found), found.owners[1] = {0, 1};
       }},
      {"replicas_differ", [](auto& found, auto&) { found.ranks[1].spread = 0.5; }},
      {"other_targets", [](auto& found, auto&) { found.counts[1][0] += 1; }},
      {"other_targets", [](auto&, auto& expected) { expected.counts[1][0] += 1; }},
      {"not_finite", [](auto& found, auto&) { found.ranks[1].norm = HUGE_VAL; }},
      {"not_finite", [](auto& found, auto&) { found.ranks[1].owned_norm = HUGE_VAL; }},
      {"not_finite", [](auto& found, auto&) { found.ranks[1].bytes_moved = HUGE_VAL; }},
      // Rank 0 recorded no checksums, and those of the others differ.
      {"replicas_differ",
       [](auto& found, auto&) {
         found.ranks[1].gradients = {1, 2, 3}, found.ranks[2].gradients = {1, 2, 4};
         found.ranks[2].spread = NAN;
       }},
      {"initial_parameters_differ",
       [](auto& found, auto&) {
         found.ranks[1].initial = {1, 2, 3}, found.ranks[2].initial = {1, 2, 4};
       }},
      {"reduced_every_micro_batch",
       [](auto& found, auto& expected) {
         expected.ranks[0].bytes_moved = 1000, found.ranks[0].bytes_moved = 2000;
       }},
      {"traffic_differs",
       [](auto& found, auto& expected) {
         expected.ranks[0].bytes_moved = 1000, found.ranks[0].bytes_moved = 1500;
       }},
      // One process moves nothing, and asks for nothing.
      {"", [](auto& found,
              auto& expected) { expected.ranks[0].bytes_moved = 0, found.ranks[0].bytes_moved = 1500; }},
  });
  // Where no coefficient was recorded, what the reference takes away says what is right. Against no reference
  // at all an update of plain SGD does not turn around, and takes no more than the gradient.
  const auto takes = [](double own, double reference) {
    return with([=](StepDump& found, StepDump& expected) {
      without_coefficients(found, expected);
      for (std::size_t i = 0; i < 3; ++i) {
        found.applied[i].second = found.gradients[i].second * own;
        expected.applied[i].second = expected.gradients[i].second * reference;
      }
      if (reference == 0) expected.applied.clear();
    });
  };
  EXPECT_EQ(takes(0.5, 0.5), "");
  for (const double own : {3.0, 0.9, -1.0, 1 + 1e-7}) EXPECT_EQ(takes(own, 0.5), "optimizer_differs");
  for (const double own : {-1.0, 3.0}) EXPECT_EQ(takes(own, 0), "optimizer_differs");
  // Terms, with a loss that is right or was not recorded.
  const auto terms = [](double cross_entropy, double balance, double loss) {
    return with([=](StepDump& found, StepDump& expected) {
      found.terms = {{"cross_entropy", cross_entropy}, {"balance", balance}, {"another", 7}};
      expected.terms = {{"cross_entropy", 1.5}, {"balance", 0.5}, {"recorded by none", NAN}};
      found.figures.loss *= loss;
    });
  };
  EXPECT_EQ(terms(1.5, 0.5, 1), "");
  EXPECT_EQ(terms(0.1, 9.9, 1), "loss_differs");
  EXPECT_EQ(terms(1.5, 0.5 + 1e-8, NAN), "loss_differs");
  EXPECT_EQ(terms(1.5, 0.5, 1.1), "loss_differs");
}

// Two stages on two data ranks each: squares that are summed along one axis alone, and the mean of what
// comes of that.
TEST(Diagnosis, ElementsThatAreClippedEachByItself) {
  const auto clamped = [](const at::Tensor& of, double most) { return of.clamp(-most, most); };
  // The update, with or without a clip by the norm behind it; and the gradient itself.
  for (const double times : {1.0, 0.3})
    for (const bool norm_too : {false, true}) {
      const auto findings = findings_with([&](auto& found, auto&) {
        for (std::size_t i = 0; i < 3; ++i)
          found.applied[i].second = times * clamped(found.gradients[i].second, 0.25);
        if (norm_too) norm_becomes(found, 0.8 * found.figures.norm);
      });
      EXPECT_EQ(ids(findings), "values_clipped");
      EXPECT_THAT(findings[0].sentence, StartsWith("elements beyond 0.25 are cut to that, "));
    }
  const auto gradient_with = [&](const std::function<at::Tensor(const at::Tensor&)>& change) {
    ToyTrainer trainer;
    trainer.change = [&](RunPair& pair, const Experiment& experiment) {
      if (experiment.only_rank < 0)
        for (auto& [name, gradient] : pair.found.gradients) gradient = change(gradient);
    };
    return sentence_of(trainer.diagnosis());
  };
  EXPECT_THAT(gradient_with([&](const at::Tensor& g) { return clamped(g, 0.25); }),
              AllOf(StartsWith("values_clipped"), HasSubstr("elements beyond 0.25 are cut to that")));
  // Signs have no element inside; one that is cut less than the others; each parameter by a value of its own.
  for (const auto& change : std::initializer_list<std::function<at::Tensor(const at::Tensor&)>>{
           [](const at::Tensor& g) { return g.sign(); },
           [&](const at::Tensor& g) { return clamped(g, 0.25) + 1e-6 * g.abs().gt(0.4); },
           [&](const at::Tensor& g) { return clamped(g, 0.3 * g.abs().max().template item<double>()); }})
    EXPECT_THAT(gradient_with(change), Not(HasSubstr("values_clipped")));
}

// Each rank clips the sum by the norm that its own data's part had.
TEST(Diagnosis, NormsOfPartsBeforeTheSum) {
  for (const bool own_count : {false, true})
    for (const double times : {1.0, 3.0, std::nan("")}) {
      ToyTrainer trainer;
      trainer.change = [&](RunPair& pair, const Experiment& experiment) {
        if (experiment != Experiment{}) return;
        pair.found.ranks.assign(3, {});
        for (std::size_t rank = 0; rank < 3; ++rank) {
          const auto part = trainer.run({.only_rank = static_cast<int>(rank)});
          const double share = ToyTrainer::of(trainer.counts[rank]) / ToyTrainer::all(trainer.counts);
          pair.found.ranks[rank].norm = norm_of(part->expected) * (own_count ? 1 : share) *
                                        (std::isnan(times) ? 1.0 + 0.1 * static_cast<double>(rank) : times);
        }
        pair.found.figures.norm = pair.found.ranks[0].norm;
      };
      const auto findings = trainer.diagnosis();
      EXPECT_EQ(ids(findings), std::isnan(times) ? "norm_differs" : "norm_before_reduction");
      if (std::isnan(times)) continue;
      EXPECT_THAT(findings[0].sentence,
                  HasSubstr(times == 1 ? "each rank has the norm" : "has 3 times the norm"));
      EXPECT_EQ(findings[0].sentence.find("divided by their number") != std::string::npos, own_count);
    }
}

TEST(Diagnosis, NormsOfPartsAlongOneAxis) {
  using Norms = std::vector<double>;
  const auto pair_of = [](double a, double b) { return std::hypot(a, b); };
  const auto of_stages = [=](const Norms& o) {
    const double first = pair_of(o[0], o[1]), second = pair_of(o[2], o[3]);
    return Norms{first, first, second, second};
  };
  struct Case {
    const char *id, *sentence;
    std::function<Norms(const Norms& owned)> norms;
  };
  const Case cases[] = {
      {"", "", [](auto& o) { return Norms(4, std::hypot(std::hypot(o[0], o[1], o[2]), o[3])); }},
      {"norm_of_own_shard", "each rank has the norm of the part it keeps", [](auto& o) { return o; }},
      {"norm_of_own_shard", "squares are not summed over pp (2)", of_stages},
      {"norm_of_own_shard", "squares are not summed over dp_shard (2)",
       [=](auto& o) {
         const double first = pair_of(o[0], o[2]), second = pair_of(o[1], o[3]);
         return Norms{first, second, first, second};
       }},
      {"norms_averaged", "the mean over pp (2) of the norms",
       [=](auto& o) { return Norms(4, (of_stages(o)[0] + of_stages(o)[2]) / 2); }},
      {"norms_averaged", "the mean of the norms of the ranks' parts",
       [](auto& o) { return Norms(4, (o[0] + o[1] + o[2] + o[3]) / 4); }},
      {"norm_differs", "", [=](auto& o) {  // of no axis
         const Norms of = of_stages(o);
         return Norms{of[0], of[2], of[2], of[0]};
       }}};
  for (const Case& one : cases) {
    ToyTrainer trainer{.counts = {{40, 10}, {30, 20}}, .axes = {{"pp", 2}, {"dp_shard", 2}}};
    trainer.change = [&](RunPair& pair, const Experiment&) {
      Norms owned;
      for (const double share : {0.1, 0.2, 0.3, 0.4})
        owned.push_back(pair.expected.figures.norm * std::sqrt(share));
      const Norms found = one.norms(owned);
      pair.found.ranks.assign(4, {});
      for (std::size_t r = 0; r < 4; ++r)
        pair.found.ranks[r].owned_norm = owned[r], pair.found.ranks[r].norm = found[r];
      pair.found.figures.norm = found[0];
      pair.found.owners.assign(3, {1, 1});
    };
    const auto findings = trainer.diagnosis();
    EXPECT_EQ(ids(findings), one.id);
    EXPECT_THAT(sentence_of(findings), HasSubstr(one.sentence));
  }
}

// Where nobody recorded a coefficient, all parameters are held to the one that the large ones show.
TEST(Diagnosis, WhatIsTooSmallForARatioOfItsOwnIsAppliedAsTheOthersAre) {
  const auto takes = [](double of_small) {
    return with([=](StepDump& found, StepDump& expected) {
      without_coefficients(found, expected);
      for (StepDump* dump : {&found, &expected}) {
        times(dump->gradients[2].second, 1e-5);
        without_norms(*dump);
      }
      expected.applied.clear();
      for (std::size_t i = 0; i < 3; ++i)
        found.applied[i].second = found.gradients[i].second * (i == 2 ? of_small : 0.5);
    });
  };
  EXPECT_EQ(takes(0.5), "");
  EXPECT_EQ(takes(-50000), "optimizer_differs");
}

// A loss that cancels is known to the rounding of its terms, or of numbers of size 1.
TEST(Diagnosis, ALossThatCancels) {
  const auto losses = [](const char* precision, double own, double expected_loss, bool terms) {
    return with([=](StepDump& found, StepDump& expected) {
      found.figures.loss = own, expected.figures.loss = expected_loss;
      found.precision = precision;
      if (terms) found.terms = expected.terms = {{"a", 1.0}, {"b", -1.0}};
    });
  };
  EXPECT_EQ(losses("fp64", 3e-16, 0, false), "");
  EXPECT_EQ(losses("fp32", 1e-9, 0, false), "");
  EXPECT_EQ(losses("fp32", 9e-7, 0, false), "");
  EXPECT_EQ(losses("fp32", 1e-6, 0, false), "loss_differs");  // 16 u are 9.5e-7
  EXPECT_EQ(losses("fp64", 1e-14, 0, false), "loss_differs");
  EXPECT_EQ(losses("fp32", 9e-7, 0, true), "");
  EXPECT_EQ(losses("fp32", 1e-6, 0, true), "loss_differs");
  EXPECT_EQ(losses("fp32", 5.001, 5, true), "loss_differs");
}

// Shares, which the toy's gradient is made of.
void add_shares(StepDump& dump) {
  dump.shares.resize(dump.counts.size());
  for (std::size_t k = 0; k < dump.counts.size(); ++k)
    for (const auto count : dump.counts[k]) {
      dump.shares[k].emplace_back();
      for (const auto& [name, gradient] : dump.gradients)
        dump.shares[k].back().emplace_back(name, gradient * (static_cast<double>(count) / 105));
    }
}

// A dump that contradicts itself is no right step, and no reference.
TEST(Diagnosis, DumpsThatContradictThemselves) {
  using ChangeOne = std::function<void(StepDump&)>;
  const auto spoilt_shares = [](double factor) {
    return [factor](StepDump& dump) { add_shares(dump), times(dump.shares[2][1][0].second, factor); };
  };
  const std::pair<const char*, ChangeOne> cases[] = {
      {"", [](auto&) {}},
      {"norm_differs", [](auto& dump) { dump.figures.norm *= 1 + 2e-9; }},
      {"norm_differs", [](auto& dump) { dump.ranks[1].norm *= 1 + 2e-9; }},
      {"replicas_differ", [](auto& dump) { dump.ranks[2].spread = 0.5; }},
      {"sum_order_depends_on_rank",
       [](auto& dump) {
         for (std::uint64_t r = 0; r < 3; ++r) dump.ranks[r].gradients = {1, 2, 3 + r / 2};
       }},
      {"elements_not_owned_once",
       [](auto& dump) {
         dump.owners[1] = {0, 1};
       }},
      {"norm_differs",
       [](auto& dump) {
         dump.owners.clear();
         for (auto& rank : dump.ranks) rank.owned_norm *= 0.9;
       }},
      {"",
       [](auto& dump) {
         dump.owners.clear();  // each element may count on several ranks
         for (auto& rank : dump.ranks) rank.owned_norm *= 1.2;
       }},
      {"other_targets", [](auto& dump) { dump.figures.tokens = dump.figures.targets - 1; }},
      {"", add_shares},
      {"shares_differ", spoilt_shares(1.001)},
      {"shares_differ", spoilt_shares(NAN)},
      {"", [](auto& dump) { add_shares(dump), dump.shares[0][1].clear(); }}};
  for (const bool theirs : {false, true})
    for (const auto& [expected_ids, change] : cases) {
      std::vector<std::string> notices;
      const auto in_one = [&](StepDump& found, StepDump& expected) {
        if (theirs) expected.ranks = found.ranks, expected.owners = found.owners;
        without_norms(theirs ? found : expected);
        change(theirs ? expected : found);
      };
      EXPECT_EQ(with(in_one, &notices), expected_ids)
          << (theirs ? "reference" : "run") << ", case " << &change - &cases[0].second;
      if (&change != &std::end(cases)[-1].second) continue;
      ASSERT_EQ(notices.size(), 1u);
      EXPECT_THAT(notices[0], HasSubstr("1 micro-batches with targets have none"));
    }
  expect_said({{"norm_differs",
                [](auto& found, auto& expected) { norm_becomes(found, 5), norm_becomes(expected, 5); }},
               {"other_targets other_targets",
                [](auto& found, auto& expected) {
                  for (StepDump* dump : {&found, &expected}) dump->figures.targets = 0, dump->counts.clear();
                }},
               {"clip_differs", [](auto& found, auto& expected) {
                  for (StepDump* dump : {&found, &expected}) dump->applied.clear();
                  found.figures.clip_coefficient = NAN, expected.figures.clip_coefficient = 2;
                }}});
}

// Checksums of the start are those of parameters, wherever they stand, and of one precision.
TEST(Diagnosis, StartsAreAlignedByName) {
  using Sums = std::vector<std::uint64_t>;
  const auto starts = [](const char* precision, const Sums& own, const Sums& theirs) {
    return with([=](StepDump& found, StepDump& expected) {
      found.precision = precision;
      for (auto& rank : found.ranks) rank.initial = own;
      expected.ranks[0].initial = theirs;
      std::ranges::reverse(expected.gradients);
    });
  };
  EXPECT_EQ(starts("fp64", {1, 2, 3}, {3, 2, 1}), "");
  EXPECT_EQ(starts("fp64", {1, 2, 3}, {1, 2, 3}), "initial_parameters_differ");
  EXPECT_EQ(starts("fp32", {1, 2, 3}, {7, 8, 9}), "");
  expect_said({{"initial_parameters_differ", [](auto&, auto& expected) {
                  expected.ranks.resize(2);
                  expected.ranks[0].initial = {1, 2, 3}, expected.ranks[1].initial = {1, 2, 4};
                }}});
}

// An update is held to the gradient of its own dump, on either side, and the side is named.
TEST(Diagnosis, UpdatesThatContradictTheirOwnGradient) {
  const auto times = [](std::size_t first, std::size_t end, double factor) {
    return [=](StepDump& dump) {
      for (std::size_t i = first; i < end; ++i) dump.applied[i].second = dump.applied[i].second * factor;
    };
  };
  const std::vector<std::pair<const char*, std::function<void(StepDump&)>>> wrong = {
      {"optimizer_differs", times(0, 3, 3)},
      {"optimizer_differs", times(0, 3, -1)},
      {"optimizer_differs", times(1, 2, -1)},
      {"optimizer_differs", times(1, 2, 0)},
      {"clip_not_applied", times(0, 3, 4)},
      {"groups_clipped_apart", times(1, 2, 2)},
      {"optimizer_differs",
       [](StepDump& dump) { std::swap(dump.applied[0].second, dump.applied[1].second); }}};
  const auto said = [](const Change& change, std::vector<std::string>* notices = nullptr) {
    return sentence_of(findings_with(change, notices));
  };
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != text.npos; };
  for (const auto& [id, change] : wrong) {
    // The run says nothing of its update; says a right one; says the same.
    EXPECT_EQ(with([&](StepDump& run, StepDump& one) { change(one), run.applied.clear(); }), id);
    EXPECT_EQ(with([&](StepDump&, StepDump& one) { change(one); }), id);
    EXPECT_TRUE(
        has(said([&](StepDump&, StepDump& one) { change(one); }), "the reference contradicts itself"));
    const auto both = said([&](StepDump& run, StepDump& one) { change(one), change(run); });
    EXPECT_TRUE(both.starts_with(std::string(id) + " " + id) && has(both, "the reference contradicts"))
        << both;
  }
  // Where no coefficient is recorded, no clip turns around or makes longer.
  for (const double factor : {-1.0, 8.0}) {
    const auto both = said([&](StepDump& run, StepDump& one) {
      for (StepDump* dump : {&run, &one}) dump->figures.clip_coefficient = NAN, times(1, 2, factor)(*dump);
    });
    EXPECT_TRUE(both.starts_with("optimizer_differs optimizer_differs")) << both;
    EXPECT_TRUE(has(both, "the reference contradicts") && has(both, "the run contradicts")) << both;
  }
  // Right ones: weight decay of some parameters that both have, each group clipped by itself where nobody
  // says otherwise, a reference alone.
  const auto decayed = [](StepDump& dump, std::size_t end = 2) {
    for (std::size_t i = 0; i < end; ++i)
      dump.applied[i].second = dump.applied[i].second + random_gradient(70 + i);
  };
  for (const std::size_t end : {2, 3})
    for (const double coefficient : {kClip, double{NAN}}) {
      std::vector<std::string> notices;
      EXPECT_EQ(said(
                    [&](StepDump& run, StepDump& one) {
                      run.figures.clip_coefficient = one.figures.clip_coefficient = coefficient;
                      decayed(run, end), decayed(one, end);
                    },
                    &notices),
                "");
      ASSERT_EQ(notices.size(), 1u);
      EXPECT_TRUE(has(notices[0], "weight decay")) << notices[0];
    }
  EXPECT_EQ(with([&](StepDump& run, StepDump& one) {
              for (StepDump* dump : {&run, &one}) dump->figures.clip_coefficient = NAN, times(1, 2, 2)(*dump);
            }),
            "");
  EXPECT_EQ(with([](StepDump& run, StepDump&) { run.applied.clear(); }), "");
  // A run that forgot the decay: that is no contradiction.
  const auto forgot = said([&](StepDump&, StepDump& one) { decayed(one); });
  EXPECT_TRUE(has(forgot, "optimizer_differs") && !has(forgot, "contradicts")) << forgot;
}

}  // namespace
}  // namespace isograd::diagnosis_test
