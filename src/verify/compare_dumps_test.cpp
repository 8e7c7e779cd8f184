// Dumps of a step against each other: named when wrong, innocent when right, refused when not comparable.
#include "verify/diagnosis.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "base/error_testing.hpp"
#include "isograd/error.hpp"
#include "verify/present.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

// Three ranks of 3, 5 and 12 targets, the first in two micro-batches; shares that are random but fixed.
const std::vector<std::vector<std::int64_t>> kCounts = {{1, 2}, {5}, {12}};

StepDump::Named gradient_of(int seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(seed) + 1);
  return {{"embedding", at::randn({7, 4}, generator, at::kDouble)},
          {"block.norm", at::randn({4}, generator, at::kDouble)},
          {"block.weight", at::randn({4, 4}, generator, at::kDouble)},
          {"unused", at::zeros({3}, at::kDouble)}};
}

// Σ weight(rank, micro-batch) · share.
StepDump dump_of(const std::function<double(std::size_t, std::size_t)>& weight, bool with_shares = true) {
  StepDump dump;
  dump.counts = kCounts;
  dump.figures = {.loss = 2, .targets = 20, .tokens = 23, .norm = std::nan(""), .clip_coefficient = 1};
  dump.samples = {0, 1, 2, 3};
  dump.axes = {{"dp_replicate", 3}};
  dump.precision = "fp64";
  dump.gradients = gradient_of(0);
  for (auto& [name, tensor] : dump.gradients) tensor.zero_();
  int seed = 0;
  for (std::size_t rank = 0; rank < kCounts.size(); ++rank) {
    if (with_shares) dump.shares.emplace_back();
    for (std::size_t i = 0; i < kCounts[rank].size(); ++i) {
      const auto share = gradient_of(seed++);
      for (std::size_t p = 0; p < share.size(); ++p)
        dump.gradients[p].second += share[p].second * weight(rank, i);
      if (with_shares) dump.shares[rank].push_back(share);
    }
  }
  return dump;
}

StepDump right(bool with_shares = true) {
  return dump_of([](auto, auto) { return 1.0; }, with_shares);
}
double of_rank(std::size_t rank) {
  double sum = 0;
  for (const auto count : kCounts[rank]) sum += static_cast<double>(count);
  return sum;
}
StepDump in_precision(const char* precision, StepDump dump = right(false)) {
  dump.precision = precision;
  return dump;
}
// The second parameter turned by a share of its norm.
void turn(StepDump& dump, double share) {
  at::Tensor& norm = dump.gradients[1].second;
  at::Tensor off = norm.roll(1);
  off = off - norm * ((off * norm).sum() / norm.square().sum());
  norm = norm + share * off * (norm.norm() / off.norm());
}
StepDump mean_of_rank_means() {
  return dump_of([](auto rank, auto) { return 20 / (3 * of_rank(rank)); }, false);
}

const DumpNames kNames{"A", "B"};

std::string first_id(const DumpComparison& comparison) {
  return comparison.findings.empty() ? "" : comparison.findings[0].id;
}

TEST(CompareDumps, TheSameStepIsTheSame) {
  const auto same = compare_dumps(right(false), right(), kNames);
  EXPECT_TRUE(same.verdict.passed);
  EXPECT_TRUE(same.findings.empty());
  EXPECT_EQ(same.verdict.layouts[0].e1.state, Grade::State::kPassed);
  EXPECT_EQ(same.verdict.layouts[0].e2.state, Grade::State::kNotClaimed);
  EXPECT_EQ(same.verdict.layouts[0].e3.state, Grade::State::kNotClaimed);
  const std::string text =
      to_text(same.verdict, {.left = "A", .right = "B", .reference = "B", .subject = "A"});
  EXPECT_THAT(text, HasSubstr("parity PASS: A = B"));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("nan")));  // the norm was not recorded
}

// A finding of the recorder fails a step whose numbers are right. Where these are wrong, what is not proven
// is no cause of it.
TEST(CompareDumps, WhatTheRecorderSawIsAFinding) {
  const auto with = [](StepDump dump) {
    dump.findings = {{"updates_differ", "rank 2 did not step", {}},
                     {finding_id::reduction_not_proven, "the same samples", {}}};
    return compare_dumps(std::move(dump), right(), kNames);
  };
  const auto only = with(right(false));
  EXPECT_FALSE(only.verdict.passed);
  ASSERT_EQ(only.findings.size(), 1);
  EXPECT_EQ(only.findings[0].sentence, "rank 2 did not step");
  EXPECT_THAT(only.notices, ::testing::Contains("the same samples"));
  // A clip in the middle of the step is the cause of a gradient that fits nothing else.
  StepDump odd = dump_of([](auto rank, auto i) { return rank == 0 && i == 0 ? 0.37 : 0.81; }, false);
  odd.findings = {{"clipped_before_reduction", "clipped 3 times", {}}};
  const auto clipped = compare_dumps(odd, right(), kNames);
  ASSERT_EQ(clipped.findings.size(), 1);
  EXPECT_EQ(first_id(clipped), "clipped_before_reduction");
  EXPECT_FALSE(clipped.findings[0].evidence.empty());
  odd.findings.clear();
  EXPECT_EQ(first_id(compare_dumps(odd, right(), kNames)), "unknown");
  StepDump same = right(false);
  same.findings = {{finding_id::reduction_not_proven, "the same samples", {}}};
  const auto unproven = compare_dumps(same, right(), kNames);
  EXPECT_FALSE(unproven.verdict.passed);
  EXPECT_EQ(first_id(unproven), finding_id::reduction_not_proven);
  const auto both = with(mean_of_rank_means());
  ASSERT_EQ(both.findings.size(), 2);
  EXPECT_EQ(first_id(both), "mean_of_rank_means");
}

TEST(CompareDumps, MeansOfRankMeansAreNamedFromTheShares) {
  const auto guilty = compare_dumps(mean_of_rank_means(), right(), kNames);
  EXPECT_FALSE(guilty.verdict.passed);
  EXPECT_EQ(first_id(guilty), "mean_of_rank_means");
  // Without shares the numbers do not tell, nothing is guessed, and what would help is said.
  const auto unknown = compare_dumps(mean_of_rank_means(), right(false), kNames);
  EXPECT_FALSE(unknown.verdict.passed);
  EXPECT_EQ(first_id(unknown), "unknown");
  ASSERT_EQ(unknown.notices.size(), 1u);
  EXPECT_THAT(unknown.notices[0], HasSubstr("holds no shares"));
}

TEST(CompareDumps, OtherWeightsHaveOtherNames) {
  const auto id = [](const std::function<double(std::size_t, std::size_t)>& weight) {
    return first_id(compare_dumps(dump_of(weight, false), right(), kNames));
  };
  EXPECT_EQ(id([](auto, auto) { return 1 / 3.0; }), "averaged_over_axis");
  EXPECT_EQ(id([](auto rank, auto) { return 20 / of_rank(rank); }), "count_not_reduced");
  EXPECT_EQ(id([](auto rank, auto) { return rank == 1 ? 0.0 : 1.0; }), "missing_rank_part");
  EXPECT_EQ(id([](auto rank, auto i) { return 20 / (4.0 * static_cast<double>(kCounts[rank][i])); }),
            "mean_of_micro_batch_means");
  EXPECT_EQ(id([](auto rank, auto i) { return 1.0 + 0.1 * static_cast<double>(rank + i); }), "unknown");
}

// Rounding hides in each parameter whether one factor or one rank's weight is wrong; the parts tell.
// A rank at the end of its data has fewer micro-batches, and divides by as many as the others.
TEST(CompareDumps, MeansOverTheMostMicroBatchesAreNamed) {
  const auto fewer =
      dump_of([](auto rank, auto i) { return 20 / (static_cast<double>(kCounts[rank][i]) * 2 * 3); }, false);
  const auto comparison = compare_dumps(fewer, right(), kNames);
  EXPECT_EQ(first_id(comparison), "mean_of_micro_batch_means");
  EXPECT_THAT(comparison.findings[0].sentence, HasSubstr("1/(n_kj G W)"));
}

TEST(CompareDumps, AFactorThatSinglePartsMayExplainIsNotNamed) {
  const auto in_bf16 = [](const std::function<double(std::size_t)>& weight) {
    StepDump dump = dump_of([&](auto rank, auto) { return weight(rank); }, false);
    dump.precision = "bf16";
    for (auto& [name, tensor] : dump.gradients) tensor = tensor.to(at::kBFloat16).to(at::kDouble);
    return compare_dumps(dump, right(), kNames);
  };
  EXPECT_EQ(first_id(in_bf16([](auto) { return 0.93; })), "scaled_by_factor");
  for (const std::size_t guilty : {0u, 1u, 2u})
    for (const double weight : {0.85, 0.87, 1.15}) {
      const auto told = in_bf16([&](auto rank) { return rank == guilty ? weight : 1.0; });
      EXPECT_NE(first_id(told), "scaled_by_factor") << "rank " << guilty << " times " << weight;
    }
  const auto told = in_bf16([](auto rank) { return rank == 0 ? 0.85 : 1.0; });
  ASSERT_EQ(first_id(told), "undecided");
  EXPECT_THAT(told.findings[0].evidence.back(), HasSubstr("--alone"));
}

// Found by `verify` alone, in steps of the library, or in dumps that are not of one model; or by a recorder,
// which says by itself what to change.
bool of_no_loop(const std::string& id) {
  static const std::set<std::string> ids = {
      "buffers_differ",     "sum_order_depends_on_rank", "not_repeatable",      "documents_leak",
      "composition",        "noise_depends_on_layout",   "resume_changes_step", "reduced_every_micro_batch",
      "traffic_differs",    "elements_not_owned_once",   "shares_differ",       "random_model",
      "parameters_renamed", "parameters_reshaped",       "other_experts"};
  return ids.contains(id) || id.ends_with("_layout_differs");
}

TEST(CompareDumps, EachFindingSaysInOneLineWhatToChange) {
  for (const Diagnosis& diagnosis : kDiagnoses)
    for (const char* mean : {"token", "sample", "weighted", "batch", "4096"}) {
      const std::string change = change_of(diagnosis.id, mean);
      EXPECT_EQ(change.empty(), of_no_loop(diagnosis.id)) << diagnosis.id;
      EXPECT_EQ(change.find('\n'), std::string::npos);
      EXPECT_EQ(std::ranges::count(change, '`') % 2, 0) << change;
      EXPECT_EQ(change.find('`') == std::string::npos, change.empty()) << change;
    }
  EXPECT_THAT(change_of("mean_of_rank_means", "sample"),
              HasSubstr("isograd.SampleMean().count(samples, targets)"));
  // Where other ranks see the same samples, those that see different ones are a group.
  EXPECT_THAT(change_of("mean_of_rank_means", "sample", true),
              HasSubstr("isograd.SampleMean(mesh[\"dp\"]).count(samples, targets)"));
  EXPECT_THAT(change_of("mean_of_rank_means", "4096", true),
              HasSubstr("isograd.FixedDenominator(denominator, mesh[\"dp\"]).count(micro_batches)"));
  EXPECT_THAT(change_of("not_summed_over_axis"), HasSubstr("`isograd.all_reduce_gradients(model)`"));
  EXPECT_THAT(change_of("not_summed_over_axis", "token", true),
              HasSubstr("`isograd.all_reduce_gradients(model, mesh[\"dp\"])`"));

  const auto comparison = compare_dumps(mean_of_rank_means(), right(), kNames);
  const Wording wording = compare_wording(comparison, kNames, "");
  const std::string change = change_of("mean_of_rank_means");
  EXPECT_THAT(to_text(comparison.verdict, wording),
              HasSubstr("change (mean_of_rank_means): " + change + "\n"));
  EXPECT_THAT(to_json(comparison.verdict, wording), HasSubstr("\"change\": \"" + change));
}

// One id, of which the dumps tell more: the change is that of the cause.
TEST(CompareDumps, TheChangeIsThatOfTheCauseWhereAnIdHasSeveral) {
  const auto change_in = [](const StepDump& found, const StepDump& expected, const std::string& id) {
    const auto comparison = compare_dumps(found, expected, kNames);
    EXPECT_EQ(first_id(comparison), id);
    return compare_wording(comparison, kNames, "").changes[id];
  };
  StepDump found = dump_of([](auto rank, auto) { return rank == 0 ? 1.0 : 0.0; }, false);
  EXPECT_EQ(change_in(found, right(), "not_summed_over_axis"), change_of("not_summed_over_axis"));
  for (std::size_t p = 1; p < found.gradients.size(); ++p) found.gradients[p] = right(false).gradients[p];
  EXPECT_EQ(change_in(found, right(), "not_summed_over_axis"), change_of("not_summed_over_axis some"));
  // The same where two ranks each see a batch: the group of those that see different ones is named.
  found.axes.push_back({"tp", 2});
  StepDump reference = right();
  reference.axes = found.axes;
  EXPECT_EQ(change_in(found, reference, "not_summed_over_axis"),
            change_of("not_summed_over_axis some", "token", true));
  StepDump unlogged = right(false);
  unlogged.figures.loss = std::nan("");
  unlogged.not_numbers = {"loss"};
  EXPECT_EQ(change_in(unlogged, right(), "not_finite"), change_of("not_finite figures"));
  for (const char* known : {"not_summed_over_axis some", "not_summed_over_axis peers", "not_finite figures",
                            "some_parameters_scaled applied"})
    EXPECT_THAT(change_of(known), HasSubstr("`")) << known;
}

TEST(CompareDumps, ACauseThatTheRecorderTriedStandsForWhatHasNoName) {
  StepDump found =
      dump_of([](auto rank, auto i) { return 1 + 0.3 * static_cast<double>(rank) - 0.2 * i; }, false);
  StepDump reference = right(false);
  ASSERT_EQ(first_id(compare_dumps(found, reference, kNames)), "unknown");
  found.findings = {{"term_scaled", "terms[0] is twice what it should be", {}}};
  const auto told = compare_dumps(found, reference, kNames);
  ASSERT_EQ(told.findings.size(), 1u);
  EXPECT_EQ(first_id(told), "term_scaled");
  EXPECT_FALSE(told.verdict.passed);
}

TEST(CompareDumps, WhatTheRecorderKnowsBetterStandsForANameThatFitsByChance) {
  StepDump found = dump_of([](auto, auto) { return 1 / 3.0; }, false);
  const auto told = [&](const std::string& id) {
    found.findings = {{id, "seen", {}}};
    return compare_dumps(found, right(), kNames).findings;
  };
  const auto open = told("undecided");
  ASSERT_EQ(open.size(), 1u);
  EXPECT_EQ(open[0].id, "undecided");
  const auto by_outputs = told("scaled_by_factor");
  ASSERT_EQ(by_outputs.size(), 1u);
  EXPECT_EQ(by_outputs[0].id, "scaled_by_factor");
  // Another name does not take its place: both are said.
  const auto both = told("clip_differs");
  ASSERT_EQ(both.size(), 2u);
  EXPECT_EQ(both[0].id, "averaged_over_axis");
}

TEST(CompareDumps, SharesThatDoNotAddUpProveNothing) {
  StepDump reference = right();
  reference.shares[2][0][0].second.mul_(1.5);
  EXPECT_EQ(first_id(compare_dumps(mean_of_rank_means(), reference, kNames)), "unknown");
}

TEST(CompareDumps, InLowerPrecisionRoundingIsAllowedAndNoMore) {
  const auto rounded = [](double more) {
    StepDump dump = in_precision("fp32");
    for (auto& [name, tensor] : dump.gradients) tensor = (tensor * more).to(at::kFloat).to(at::kDouble);
    return dump;
  };
  const auto good = compare_dumps(rounded(1), right(), kNames);
  EXPECT_TRUE(good.verdict.passed);
  EXPECT_EQ(good.verdict.layouts[0].e1.state, Grade::State::kNotClaimed);
  EXPECT_EQ(good.verdict.layouts[0].e2.state, Grade::State::kPassed);
  EXPECT_THAT(good.verdict.layouts[0].e2.bound, HasSubstr("--alone"));
  // All parameters together show less than any single one does.
  EXPECT_TRUE(good.verdict.layouts[0].e2.scale.passed);
  EXPECT_LT(good.verdict.layouts[0].e2.uniform_found, 1e-6);
  for (const double more : {1.0002, 1 + 2e-5, 1 + 1e-6, 1 - 1e-6})
    EXPECT_EQ(first_id(compare_dumps(rounded(more), right(), kNames)), "scaled_by_factor") << more;
  // With the step of one process in the same precision the bound of a single parameter is E2's own.
  EXPECT_TRUE(compare_dumps(rounded(1), right(), kNames, rounded(1)).verdict.passed);
  StepDump one_off = rounded(1);
  one_off.gradients[2].second.mul_(1 + 8e-6);
  EXPECT_FALSE(compare_dumps(one_off, right(), kNames, rounded(1)).verdict.passed);
  EXPECT_GT(good.verdict.layouts[0].e2.single_found, 8e-6);
  // The error that is given for one process never widens the bound; another step is refused.
  const auto refused = [&](const StepDump& found, const StepDump& alone) {
    return error_testing::error_of([&] { compare_dumps(found, right(), kNames, alone); });
  };
  EXPECT_THAT(refused(rounded(1.3), rounded(1.3)), HasSubstr("no right step of one process"));
  const std::pair<const char*, std::function<void(StepDump&)>> no_such_step[] = {
      {"block.norm", [](auto& dump) { dump.gradients[1].second = at::ones({4}, at::kDouble); }},
      {"samples",
       [](auto& dump) {
         dump.samples = {7, 8, 9, 10};
       }},
      {"targets", [](auto& dump) { dump.figures.targets = 19; }},
      {"loss", [](auto& dump) { dump.figures.loss = 3; }},
      {"bf16, where A is in fp32", [](auto& dump) { dump.precision = "bf16"; }}};
  for (const auto& [words, change] : no_such_step) {
    StepDump other = rounded(1);
    change(other);
    EXPECT_THAT(refused(rounded(1), other), HasSubstr(words));
  }
  // One process that is off by 6e-6 in one parameter: four times of it would let 1.8e-5 pass.
  StepDump rough = rounded(1), far = rounded(1);
  turn(rough, 6e-6), turn(far, 1.8e-5);
  EXPECT_TRUE(compare_dumps(rounded(1), right(), kNames, rough).verdict.passed);
  EXPECT_FALSE(compare_dumps(far, right(), kNames, rough).verdict.passed);
  StepDump others = rounded(1);
  others.gradients.pop_back();
  EXPECT_THROW(compare_dumps(rounded(1), right(), kNames, others), ConfigError);
  EXPECT_THROW(compare_dumps(rounded(1), rounded(1), kNames, rounded(1)), ConfigError);
}

// diagnosis_test has the others.
TEST(CompareDumps, ADumpOfAnotherStepOrModelIsSaidToBeOne) {
  StepDump other = right(false);
  other.samples = {7, 8, 9, 10};
  const auto result = compare_dumps(other, right(), kNames);
  EXPECT_FALSE(result.verdict.passed || result.verdict.batch_agrees);
  EXPECT_EQ(first_id(result), "other_batch");
  EXPECT_THAT(result.verdict.diagnosis.at(0), HasSubstr("the runs did not see the same samples"));
  StepDump others;
  others.gradients = {{"x", at::ones({2}, at::kDouble)}};
  others.precision = "fp64";
  EXPECT_FALSE(compare_dumps(others, right(), kNames).verdict.passed);
}

TEST(CompareDumps, AWrappersPrefixIsTakenOffAndSaid) {
  StepDump wrapped = right(false);
  for (auto& [name, tensor] : wrapped.gradients) name = "module._orig_mod." + name;
  const auto result = compare_dumps(wrapped, right(), kNames);
  EXPECT_TRUE(result.verdict.passed);
  ASSERT_EQ(result.notices.size(), 1u);
  EXPECT_THAT(result.notices[0], HasSubstr("\"module._orig_mod.\""));
  // Whichever of the three has it.
  const auto renamed = [](StepDump dump) {
    for (auto& [name, tensor] : dump.gradients) name = "module." + name;
    for (auto& rank : dump.shares)
      for (auto& share : rank)
        for (auto& [name, tensor] : share) name = "module." + name;
    return dump;
  };
  EXPECT_EQ(first_id(compare_dumps(mean_of_rank_means(), renamed(right()), kNames)), "mean_of_rank_means");
  const auto fp32 = [] { return in_precision("fp32"); };
  for (int which = 0; which < 8; ++which) {
    const auto in = [&](int bit, const StepDump& dump) { return which & bit ? renamed(dump) : dump; };
    EXPECT_TRUE(compare_dumps(in(1, fp32()), in(2, right()), kNames, in(4, fp32())).verdict.passed) << which;
  }
  wrapped.gradients[2].first = "block.weight";  // not all of them: no prefix
  EXPECT_FALSE(compare_dumps(wrapped, right(), kNames).verdict.passed);
}

// The coarser of two precisions gives the bound, and is the one that is printed.
TEST(CompareDumps, AReferenceThatIsCoarserThanTheRunLimitsTheVerdictAndIsSaidTo) {
  for (const auto& [own, theirs] : {std::pair{"fp32", "bf16"}, {"fp64", "bf16"}, {"fp64", "fp32"}}) {
    StepDump found = in_precision(own), expected = in_precision(theirs, right());
    const auto result = compare_dumps(found, expected, kNames);
    EXPECT_EQ(result.verdict.passed, theirs != std::string("bf16"));  // which tells too little of a vector
    if (!result.verdict.passed) {
      EXPECT_EQ(first_id(result), "unresolved");
    }
    EXPECT_EQ(result.verdict.precision, theirs);
    EXPECT_THAT(result.verdict.layouts[0].e2.bound, ::testing::StartsWith(theirs));
    ASSERT_EQ(result.notices.size(), 1u) << own << " " << theirs;
    EXPECT_THAT(result.notices[0],
                HasSubstr(std::string("B is in ") + theirs + ", coarser than A in " + own));
    std::swap(found.precision, expected.precision);
    EXPECT_EQ(compare_dumps(found, expected, kNames).verdict.precision, theirs);
    EXPECT_TRUE(compare_dumps(found, expected, kNames).notices.empty());
  }
}

// A run that says to be of a million ranks, or of a million empty micro-batches, is allowed no more.
TEST(CompareDumps, WhatARunSaysOfItselfNeverWidensABound) {
  const auto far = [](double off, int ranks, std::size_t empty) {
    StepDump dump = in_precision("fp32");
    turn(dump, off);
    dump.axes = {{"dp_replicate", ranks}};
    dump.counts[0].resize(2 + empty);
    return dump;
  };
  const StepDump alone = in_precision("fp32");
  for (const int ranks : {3, 1 << 20})
    EXPECT_FALSE(compare_dumps(far(2e-5, ranks, 0), right(), kNames, alone).verdict.passed) << ranks;
  EXPECT_FALSE(compare_dumps(far(2e-6, 3, 10000), right(), kNames, alone).verdict.passed);
  EXPECT_TRUE(compare_dumps(far(1e-7, 3, 10000), right(), kNames, alone).verdict.passed);
  const auto far_of_all = [&](double off) {  // in the whole: 32 u are 1.9e-6
    StepDump dump = far(0, 1 << 20, 0);
    for (auto& [name, tensor] : dump.gradients)
      if (name != "unused") tensor = tensor + off * tensor.roll(1) * (tensor.norm() / tensor.roll(1).norm());
    return compare_dumps(dump, right(), kNames, alone).verdict.passed;
  };
  EXPECT_FALSE(far_of_all(4e-6));
}

// A loss that multiplies all of the gradient by a number that rounding makes wrong: what is measured of that
// is allowed, and no more.
struct Conditioned {
  double found = 0, alone = 0;                 // errors of scale
  double scale_moves = 0, scale_rounding = 0;  // as recorded
  double moves = 0;                            // of each parameter, as a share of its norm
};
DumpComparison conditioned(const Conditioned& of, bool with_alone = true) {
  const auto times = [](double factor) {
    StepDump dump = in_precision("fp32");
    for (auto& [name, tensor] : dump.gradients) tensor = tensor * factor;
    return dump;
  };
  StepDump expected = right(), alone = times(1 + of.alone);
  for (const auto& [name, tensor] : expected.gradients)
    if (of.moves > 0) expected.moves.push_back(of.moves * tensor.norm().item<double>());
  expected.scale_moves = of.scale_moves;
  alone.scale_rounding = of.scale_rounding;
  return compare_dumps(times(1 + of.found), expected, kNames,
                       with_alone ? std::optional(alone) : std::nullopt);
}

TEST(CompareDumps, TheScaleOfTheWholeIsAllowedWhatRoundingIsMeasuredToDo) {
  const Conditioned measured{.alone = 8e-7, .scale_moves = 1e-6, .scale_rounding = 1e-6, .moves = 1.1e-6};
  const auto with = [&](double found) {
    Conditioned of = measured;
    of.found = found;
    return of;
  };
  for (const double sign : {1.0, -1.0}) {
    EXPECT_FALSE(conditioned({.found = sign * 9e-7, .alone = 0}).verdict.passed) << "without";
    for (const bool alone : {true, false}) {
      const auto right_one = conditioned(with(sign * 3e-6), alone);
      EXPECT_TRUE(right_one.verdict.passed) << alone << " " << first_id(right_one);
      ASSERT_FALSE(right_one.notices.empty());
      EXPECT_THAT(right_one.notices[0], HasSubstr("1e-06 in the scale of the whole"));
      EXPECT_GT(right_one.verdict.layouts[0].e2.uniform_found, 4e-6) << "and says what it finds";
      for (const double wrong : {4.4e-6, 1e-5, 2e-4}) {  // 4 times what is measured are 4e-6
        const auto found = conditioned(with(sign * wrong), alone);
        EXPECT_FALSE(found.verdict.passed) << alone << " " << wrong;
        EXPECT_EQ(first_id(found), "scaled_by_factor") << alone << " " << wrong;
      }
    }
    // One process is right: so has the run to be.
    EXPECT_FALSE(conditioned({.found = sign * 3e-6, .scale_moves = 1e-6, .moves = 1e-6}).verdict.passed);
    // The right gradient does not move, and one process is wrong: it is no bound.
    EXPECT_THAT(error_testing::error_of([&] { conditioned({.found = sign * 3e-6, .alone = sign * 3e-6}); }),
                HasSubstr("--alone"));
  }
}

TEST(CompareDumps, AScaleThatMovesFurtherThanTheGradientIsRefused) {
  for (const double moves : {0.0, 1e-6})
    for (const bool alone : {true, false}) {
      const auto said = error_testing::error_of(
          [&] { conditioned({.found = 1e-6, .scale_moves = 1, .moves = moves}, alone); });
      EXPECT_THAT(said, HasSubstr("B: \"scale_moves\"")) << moves;
      EXPECT_THAT(said, HasSubstr(fmt::format("at most {:.3g}", moves))) << moves;
      EXPECT_THAT(said, HasSubstr("Record both of the same steps")) << moves;
    }
  // With `moves` as large: a bound that is wider than a gradient is no pass.
  const auto wide = conditioned({.found = 1e-5, .scale_moves = 1, .moves = 1}, false);
  EXPECT_FALSE(wide.verdict.passed);
  EXPECT_EQ(first_id(wide), "unresolved");
}

// Weights of ranks that are nearly equal move the gradient by 1e-5: just above what is allowed they are
// named.
TEST(CompareDumps, ASmallMeanOfRankMeansIsFoundBesideAScaleThatMoves) {
  const std::vector<std::vector<std::int64_t>> counts = {{500000, 500010}, {1000030}, {999990}};
  constexpr double kTargets = 3000030;
  const auto made = [&](const char* precision, bool wrong) {
    StepDump dump = in_precision(precision, dump_of([&](std::size_t rank, auto) {
                                   double own = 0;
                                   for (const auto count : counts[rank]) own += static_cast<double>(count);
                                   return wrong ? kTargets / (3 * own) : 1.0;
                                 }));
    dump.counts = counts;
    dump.figures.targets = dump.figures.tokens = static_cast<std::int64_t>(kTargets);
    return dump;
  };
  StepDump expected = made("fp64", false), found = made("fp32", true);
  found.shares.clear();
  Tensors right, off;
  for (std::size_t i = 0; i < expected.gradients.size(); ++i) {
    right.push_back(expected.gradients[i].second);
    off.push_back(found.gradients[i].second - right.back());
  }
  const double moves = norm_of(off) / norm_of(right) / (1.05 * kRoundingFactor);
  ASSERT_GT(moves, 8 * 0x1p-24) << "what is measured is more than 32 u";
  for (const at::Tensor& gradient : right) expected.moves.push_back(moves * norm_of(gradient));
  expected.scale_moves = moves;
  const auto result = compare_dumps(found, expected, kNames);
  EXPECT_FALSE(result.verdict.passed);
  ASSERT_FALSE(result.verdict.diagnosis.empty());
  EXPECT_THAT(result.verdict.diagnosis[0], HasSubstr("mean of per-rank means"));
}

TEST(CompareDumps, SharesOfTheReferenceThatDoNotAddUpAreAFindingAndMissingOnesANotice) {
  StepDump reference = right();
  reference.shares[2][0][0].second = reference.shares[2][0][0].second * 1.5;
  const auto wrong = compare_dumps(right(false), reference, kNames);
  EXPECT_FALSE(wrong.verdict.passed);
  EXPECT_EQ(first_id(wrong), "shares_differ");
  EXPECT_THAT(wrong.findings[0].sentence, HasSubstr("of the reference"));
  reference = right();
  reference.shares[2][0].clear();
  const auto missing = compare_dumps(right(false), reference, kNames);
  EXPECT_TRUE(missing.verdict.passed);
  ASSERT_EQ(missing.notices.size(), 1u);
  EXPECT_THAT(missing.notices[0], HasSubstr("not complete"));
}

TEST(CompareDumps, TermsWithoutANameInCommonAreSaidNotToBeCompared) {
  StepDump found = right(false), expected = right();
  found.terms = {{"ce", 2.0}}, expected.terms = {{"cross_entropy", 7.0}};
  const auto result = compare_dumps(found, expected, kNames);
  EXPECT_TRUE(result.verdict.passed);
  ASSERT_EQ(result.notices.size(), 1u);
  EXPECT_THAT(result.notices[0], HasSubstr("no term of the loss has one name in both"));
}

// A term is logged in another unit, and a cause explains the gradient: the cause is named.
TEST(CompareDumps, ACauseIsNotCalledAScaledTerm) {
  StepDump found = right(false), expected = right();
  found.gradients[0].second = found.gradients[0].second / 3;  // not summed but averaged, in one parameter
  found.terms = {{"a", 2.0}, {"b", 3.0}}, expected.terms = {{"a", 2.0}, {"b", 1.0}};
  EXPECT_EQ(first_id(compare_dumps(found, expected, kNames)), "some_parameters_scaled");
  const StepDump lost = dump_of([](auto rank, auto) { return rank == 1 ? 0.0 : 1.0; }, false);
  found.gradients[0].second = lost.gradients[0].second;
  EXPECT_EQ(first_id(compare_dumps(found, expected, kNames)), "missing_rank_part");
}

// Squares of such numbers are 0 or infinite.
TEST(CompareDumps, GradientsOfAnyMagnitude) {
  for (const double size : {1e-200, 1e-165, 1e160, 1e200}) {
    const auto of = [size](double more) {
      StepDump dump = right(false);
      for (auto& [name, tensor] : dump.gradients) tensor = tensor * size;
      dump.gradients[2].second = dump.gradients[2].second * more;
      return dump;
    };
    EXPECT_TRUE(compare_dumps(of(1), of(1), kNames).verdict.passed) << size;
    for (const double more : {2.0, -1.0, 0.0, 1 + 1e-9})
      EXPECT_FALSE(compare_dumps(of(more), of(1), kNames).verdict.passed) << size << " " << more;
  }
}

TEST(CompareDumps, NothingIsClaimedOfAGradientThatIsZeroEverywhere) {
  StepDump zero = right(false);
  for (auto& [name, tensor] : zero.gradients) tensor = at::zeros_like(tensor);
  auto result = compare_dumps(zero, zero, kNames);
  EXPECT_FALSE(result.verdict.passed);
  EXPECT_EQ(first_id(result), "no_gradient");
  EXPECT_FALSE(compare_dumps(zero, right(), kNames).verdict.passed);
  EXPECT_FALSE(compare_dumps(right(false), zero, kNames).verdict.passed);
}

TEST(CompareDumps, WhatIsNotFiniteFailsOnEitherSide) {
  for (const double value : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    StepDump broken = right(false);
    broken.gradients[2].second[0][0] = value;
    const auto result = compare_dumps(broken, right(), kNames);
    EXPECT_FALSE(result.verdict.passed);
    EXPECT_EQ(first_id(result), "not_finite");
    EXPECT_THAT(result.verdict.diagnosis[0], HasSubstr("block.weight"));
    EXPECT_FALSE(compare_dumps(right(false), broken, kNames).verdict.passed);
    EXPECT_FALSE(compare_dumps(broken, broken, kNames).verdict.passed);
  }
}

}  // namespace
}  // namespace isograd
