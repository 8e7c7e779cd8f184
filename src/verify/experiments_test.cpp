// Experiments: each tells a pair of causes apart that are the same numbers in the step as given.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "verify/diagnosis_testing.hpp"

namespace isograd {
namespace {

using namespace diagnosis_test;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Counts = ToyTrainer::Counts;

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

}  // namespace
}  // namespace isograd
