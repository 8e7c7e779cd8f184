// What travels in the message of a step's norm: StepOptions::tally and norm_parts.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "base/error_testing.hpp"
#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "toy.hpp"

namespace isograd {
namespace {

struct Counted {
  std::vector<StepReport> reports{};
  std::int64_t calls = 0;                 // of collectives
  std::map<std::string, double> norms{};  // of the first step's gradient, by parameter
};

// Two steps of `size` ranks, each of which counts its rank, its tokens, and one thing between the steps.
Counted counted(int size, bool with_tally, bool with_parts = false) {
  Counted result;
  const auto batches = toy::make_step(size, 2);
  run_ranks(size, [&](World& world) {
    toy::Model model;
    std::vector<double> counts = {0, 0};
    const auto optimizer = sgd({.learning_rate = 0});
    const auto layout = bucketed(trainable_parameters(model.named()), world.group, {.bucket_bytes = 300});
    TokenMean mean;
    StepOptions options;
    if (with_tally) options.tally = [&] { return std::exchange(counts, {0, 0}); };
    if (with_parts) {  // each parameter but the first; parts of nothing too
      for (const auto& [name, tensor] : model.named()) options.norm_parts.names.push_back(name);
      options.norm_parts.of = [names = options.norm_parts.names](const std::string& name) {
        const auto place = std::find(names.begin(), names.end(), name) - names.begin();
        return place == 0 ? -1 : static_cast<int>(place);
      };
    }
    Step step(
        [&](const Batch& batch) -> LossTerms {
          counts[0] += world.rank + 1;
          counts[1] += static_cast<double>(batch.num_tokens());
          return {{"cross_entropy", cross_entropy_sum(model.logits(batch), batch.targets)}};
        },
        *layout, mean, *optimizer, options);
    for (int i = 0; i < 2; ++i) {
      const StepReport report = step(batches[static_cast<std::size_t>(world.rank)]);
      counts[0] += 1000;  // of a forward that is no step's
      if (world.rank == 0) result.reports.push_back(report);
      for (const auto& view : layout->views())
        if (i == 0 && world.rank == 0) result.norms[view.name] = view.gradient.norm().item<double>();
    }
    if (world.rank > 0) return;
    for (const auto& [name, operation] : world.group.traffic().operations) result.calls += operation.calls;
  });
  return result;
}

TEST(StepTally, IsAddedUpOverTheRanksAndCostsNoCollective) {
  for (const int size : {1, 2, 3}) {
    const auto batches = toy::make_step(size, 2);
    double ranks = 0;
    for (int rank = 0; rank < size; ++rank)
      ranks += (rank + 1) * static_cast<double>(batches[static_cast<std::size_t>(rank)].size());
    const Counted with = counted(size, true), without = counted(size, false);
    for (const StepReport& report : with.reports) {
      ASSERT_EQ(report.tally.size(), 2u);
      EXPECT_EQ(report.tally[0], ranks) << size;
      EXPECT_EQ(report.tally[1], static_cast<double>(report.census.tokens)) << size;
      ASSERT_EQ(report.terms.size(), 1u);
      EXPECT_EQ(report.loss, without.reports[0].loss);
      EXPECT_EQ(report.norm, without.reports[0].norm);
    }
    EXPECT_TRUE(without.reports[0].tally.empty());
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
    EXPECT_EQ(report.tally, without.reports[0].tally) << size;
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
    const auto rank = static_cast<std::size_t>(world.rank);
    toy::Model model;
    const auto optimizer = sgd({.learning_rate = 0});
    const auto layout = bucketed(trainable_parameters(model.named()), world.group, {.bucket_bytes = 300});
    TokenMean mean;
    Names names;
    Step step(
        [&](const Batch& batch) {
          LossTerms terms;
          for (const std::string& name : names)
            terms.push_back({name, cross_entropy_sum(model.logits(batch), batch.targets)});
          return terms;
        },
        *layout, mean, *optimizer, {.max_norm = 0});
    const auto calls = [&] {
      std::int64_t sum = 0;
      for (const auto& [name, operation] : world.group.traffic().operations) sum += operation.calls;
      return sum;
    };
    result.errors[rank] = error_testing::error_of([&] {
      for (const auto& of_rank : steps) {
        names = of_rank[rank];
        const std::int64_t before = calls();
        MicroBatches own;
        if (!names.empty())
          own = {toy::make_batch({4}, 1 + world.rank), toy::make_batch({3}, 9 + world.rank)};
        const StepReport report = step(own);
        if (rank > 0) continue;
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
    for (const std::string& error : with_names(wrong[i]).errors) {
      EXPECT_NE(error.find("another order on some rank"), std::string::npos) << i << ": " << error;
      EXPECT_NE(error.find("rank "), std::string::npos) << i << ": " << error;
    }
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
