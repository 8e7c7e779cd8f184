// The museum's mistakes under a mean over samples, also of samples that are cut over ranks, and under a mean
// of weights: each is named rightly, or called unknown.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "full_tests.hpp"
#include "isograd/error.hpp"
#include "museum/museum.hpp"
#include "museum/room.hpp"

namespace isograd::museum {
namespace {

using ::testing::HasSubstr;

// The amount that a mean counts of a micro-batch: parts of samples, or weights.
double amount_of(const Batch& batch, Mean mean) {
  double sum = 0;
  for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
    const auto begin = batch.cu_seqlens[f], end = batch.cu_seqlens[f + 1];
    const at::Tensor valid = batch.targets.slice(0, begin, end).ne(kIgnoreIndex).to(at::kDouble);
    const double own =
        (batch.weights.defined() ? valid * batch.weights.slice(0, begin, end) : valid).sum().item<double>();
    if (mean == Mean::kWeights) sum += own;
    if (mean == Mean::kSamples && own > 0) sum += own / static_cast<double>(batch.sample_targets.at(f));
  }
  return sum;
}

// The counts of a step that a rank knows.
struct Counted {
  double all = 0, own = 0, first = 0, holders = 0;
  double ranks = 1, rounds = 1, micro_batches = 1, own_micro_batches = 1;
};

// The mean's own normaliser, dividing by another number: of the rank, or of each micro-batch.
struct Divides : Normalizer {
  using By = std::function<double(const Counted&)>;
  By by;
  bool each;  // and by each micro-batch's own amount
  std::shared_ptr<Counted> counted;
  mutable std::vector<double> amounts;
  mutable std::size_t next = 0;
  Divides(Mean mean, By by_, bool each_ = false,
          std::shared_ptr<Counted> counted_ = std::make_shared<Counted>())
      : Normalizer(mean), by(std::move(by_)), each(each_), counted(std::move(counted_)) {}

  StepCounts count(const MicroBatches& micro_batches, Group& data, Requests requests) override {
    const StepCounts step_counts = Normalizer::count(micro_batches, data, requests);
    amounts.clear();
    next = 0;
    *counted = {};
    for (const Batch& batch : micro_batches) amounts.push_back(amount_of(batch, mean()));
    for (const double amount : amounts) counted->own += amount;
    const at::Tensor all = data.all_gather(at::full({1}, counted->own, at::kDouble)).reshape({-1});
    for (int rank = 0; rank < data.size(); ++rank) {
      const double own = all[rank].item<double>();
      if (own > 0 && counted->first == 0) counted->first = own;
      counted->holders += own > 0;
      counted->all += own;
    }
    counted->ranks = data.size();
    counted->rounds = static_cast<double>(step_counts.global_micro_batches);
    counted->micro_batches = static_cast<double>(step_counts.micro_batches);
    counted->own_micro_batches =
        static_cast<double>(step_counts.micro_batches_by_rank.at(static_cast<std::size_t>(step_counts.rank)));
    return step_counts;
  }
  Denominator denominator(const StepCounts& step_counts) const override {
    Denominator wrong = Normalizer::denominator(step_counts);
    const double value = by(*counted);
    wrong.value = value > 0 ? value : 1;  // a rank without anything divides nothing
    return wrong;
  }
  at::Tensor scale(const LossTerms& terms, const Denominator& denominator) const override {
    if (!each) return Normalizer::scale(terms, denominator);
    const double own = next < amounts.size() ? amounts[next] : 0;  // empty ones may follow
    ++next;
    Denominator wrong = denominator;
    if (own > 0) wrong.value *= own;
    return Normalizer::scale(terms, wrong);
  }
};

// 0/0 where a micro-batch counts for nothing.
struct MeanOverNothing : Divides {
  explicit MeanOverNothing(Mean mean) : Divides(mean, [](const Counted& c) { return c.all; }) {}
  at::Tensor scale(const LossTerms& terms, const Denominator& denominator) const override {
    const double own = next < amounts.size() ? amounts[next] : 1;
    ++next;
    return Normalizer::scale(terms, denominator) / own * own;
  }
};

struct WithoutARank : planted::Wrapped {
  using Wrapped::Wrapped;
  void finish_reduction() override {
    if (mesh().all().rank() == mesh().all().size() - 1)
      for (Bucket& bucket : buckets()) bucket.gradients.zero_();
    inner->finish_reduction();
  }
};

// ---- what is crossed with what ----

struct Setting {
  const char* name;
  Mean mean;
  bool cut;  // one sample lies on the first and on the last rank, another in two micro-batches of rank 0
};
const Setting kSettings[] = {{"sample mean", Mean::kSamples, false},
                             {"sample mean of cut samples", Mean::kSamples, true},
                             {"weighted mean", Mean::kWeights, false}};

void join_samples(Batch& one, std::size_t f, Batch& other, std::size_t g) {
  other.sample_ids.at(g) = one.sample_ids.at(f);
  one.sample_targets.at(f) = other.sample_targets.at(g) =
      one.sample_targets.at(f) + other.sample_targets.at(g);
}

void declare(VerifyProblem& problem, World& world, const Setting& setting) {
  problem.loss.mean = setting.mean;
  auto by_rank = toy::make_step(world.size, 3);
  by_rank[0].push_back(toy::make_batch({6, 4, 5}, 900));  // more samples than any other rank has
  if (setting.cut && world.size > 1) {
    join_samples(by_rank[0].at(1), 0, by_rank.back().at(0), 0);
    join_samples(by_rank[0].at(1), 1, by_rank[0].at(2), 0);
  }
  if (setting.mean == Mean::kWeights)
    for (MicroBatches& batches : by_rank)
      for (Batch& batch : batches)
        batch.weights =
            (at::arange(batch.num_tokens(), at::kDouble) + batch.num_tokens()).remainder(5) / 4 + 0.25;
  MicroBatches all;
  for (const MicroBatches& batches : by_rank) all.insert(all.end(), batches.begin(), batches.end());
  problem.local = by_rank[static_cast<std::size_t>(world.rank)];
  problem.whole = [all] { return all; };
}

using PlantUnder = std::function<void(VerifyProblem&, World&, Mean)>;

PlantUnder divides(Divides::By by, bool each = false) {
  return [by, each](VerifyProblem& p, World&, Mean mean) {
    p.make_normalizer = [=] { return std::make_unique<Divides>(mean, by, each); };
  };
}
// In the problem of an exhibit that has one of its own.
PlantUnder divides_in(const char* exhibit, Divides::By by) {
  return [exhibit, by](VerifyProblem& p, World& world, Mean mean) {
    find(exhibit)->plant(p, world);
    divides(by)(p, world, mean);
  };
}
template <class Layout>
PlantUnder counted_layout(double (*number)(const Counted&)) {
  return [number](VerifyProblem& p, World&, Mean mean) {
    auto counted = std::make_shared<Counted>();
    p.make_normalizer = [=] {
      return std::make_unique<Divides>(
          mean, [](const Counted& c) { return c.all; }, false, counted);
    };
    with_layout<Layout>(p, [counted, number] { return number(*counted); });
  };
}

// In place of exhibits whose normaliser or count is that of tokens, and causes that no exhibit has.
const std::map<std::string, PlantUnder>& own_plants() {
  static const std::map<std::string, PlantUnder> plants = {
      {"B1", divides([](const Counted& c) { return c.own_micro_batches * c.ranks; }, true)},
      {"B2", divides([](const Counted& c) { return c.all / c.rounds; })},
      {"B3", divides([](const Counted& c) { return c.own; })},
      {"B3c", divides_in("B3c", [](const Counted& c) { return c.own; })},
      {"B4", divides([](const Counted& c) { return c.first; })},
      {"B5",
       [](VerifyProblem& p, World& world, Mean mean) {
         find("B5")->plant(p, world);
         const double peers = world.size == 4 ? 2 : world.size;
         divides([peers](const Counted& c) { return c.all * peers; })(p, world, mean);
       }},
      {"B5p",
       [](VerifyProblem& p, World& world, Mean mean) {
         find("B5p")->plant(p, world);
         const double stages = p.mesh->size({kStageAxis});
         divides([stages](const Counted& c) { return c.all * stages; })(p, world, mean);
       }},
      {"B5t",
       [](VerifyProblem& p, World& world, Mean mean) {
         find("B5t")->plant(p, world);
         divides([ranks = world.size](const Counted& c) { return c.all * ranks; })(p, world, mean);
       }},
      {"B7", divides([](const Counted& c) { return c.own * c.ranks; })},
      {"B7c", divides_in("B7c", [](const Counted& c) { return c.own * c.ranks; })},
      {"B11", divides([](const Counted& c) { return c.micro_batches; }, true)},
      {"B12",
       [](VerifyProblem& p, World&, Mean mean) {
         p.make_normalizer = [mean] { return std::make_unique<MeanOverNothing>(mean); };
       }},
      {"B14", divides([](const Counted& c) { return c.all / c.ranks; })},
      {"B15",
       [](VerifyProblem& p, World& world, Mean mean) {
         const int replicas = world.size % 2 == 0 && world.size > 2 ? 2 : world.size;
         divides([](const Counted& c) { return c.all / c.ranks; })(p, world, mean);
         with_layout<planted::MultipliesSums>(p, [own = world.size / replicas] { return 1.0 / own; });
         p.layouts[0].axes = {{"dp_replicate", replicas}, {"dp_shard", world.size / replicas}};
       }},
      {"B30", divides([](const Counted&) { return 1; })},
      {"B31", divides([](const Counted& c) { return c.all * c.rounds; })},
      {"B32", divides([](const Counted& c) { return c.ranks; }, true)},
      {"averaged_over_axis", [](VerifyProblem& p, World&, Mean) { with_layout<planted::Averages>(p); }},
      {"averaged_over_holders",
       counted_layout<planted::MultipliesSums>([](const Counted& c) { return 1 / c.holders; })},
      {"missing_rank_part", [](VerifyProblem& p, World&, Mean) { with_layout<WithoutARank>(p); }},
      {"missing_data_part",
       [](VerifyProblem& p, World& world, Mean) {
         const auto lost = toy::make_step(world.size, 3).back();
         std::vector<std::int64_t> ids;
         for (const Batch& batch : lost)
           ids.insert(ids.end(), batch.sample_ids.begin(), batch.sample_ids.end());
         p.make_model = [make = p.make_model, ids](at::ScalarType dtype) {
           VerifyModel model = make(dtype);
           model.loss_terms = [right = model.loss_terms, ids](const Batch& batch) {
             LossTerms terms = right(batch);
             const bool gone = std::any_of(batch.sample_ids.begin(), batch.sample_ids.end(), [&](auto id) {
               return std::find(ids.begin(), ids.end(), id) != ids.end();
             });
             if (gone)  // its gradient; the loss is logged
               for (auto& term : terms) term.sum = term.sum.detach() + 0 * term.sum;
             return terms;
           };
           return model;
         };
       }},
  };
  return plants;
}

std::string expected_of(const std::string& id) {
  const Exhibit* exhibit = find(id);
  return exhibit ? exhibit->diagnosis : id;
}

// An exhibit that never looks at the mean is caught under the mean of tokens (museum_test.cpp): half of them.
// ISOGRAD_FULL_TESTS=1: all.
std::vector<std::string> crossed() {
  std::vector<std::string> ids;
  std::size_t place = 0;
  for (const Exhibit& exhibit : exhibits()) {
    if (exhibit.id == "B24") continue;  // its loss is over rows, without any such mean
    const bool looks = own_plants().contains(exhibit.id) || exhibit.id == "B25";
    if (full_tests() || looks || takes_first(place++)) ids.push_back(exhibit.id);
  }
  for (const auto& [id, plant] : own_plants())
    if (!find(id)) ids.push_back(id);
  return ids;
}

Verdict shown(const std::string& id, const Setting& setting, int ranks) {
  const Exhibit crossing{.plant = [&](VerifyProblem& p, World& world) {
    declare(p, world, setting);
    const auto own = own_plants().find(id);
    if (own != own_plants().end())
      own->second(p, world, setting.mean);
    else if (!id.empty())
      find(id)->plant(p, world);
    p.loss.mean = setting.mean;
  }};
  return show(&crossing, ranks);
}

// At one of the numbers of ranks at which it exists: settings and exhibits take turns. ISOGRAD_FULL_TESTS=1:
// at all of them.
std::vector<int> ranks_of(const std::string& id, const Setting& setting) {
  std::vector<int> all = setting.cut ? std::vector<int>{2, 4} : std::vector<int>{2, 3, 5};
  if (const Exhibit* exhibit = find(id))
    all.erase(std::remove_if(all.begin(), all.end(), [&](int ranks) { return !exhibit->exists(ranks); }),
              all.end());
  if (full_tests() || all.empty()) return all;
  const auto ids = crossed();
  const auto turn = std::find(ids.begin(), ids.end(), id) - ids.begin() + (&setting - kSettings);
  return {all[static_cast<std::size_t>(turn) % all.size()]};
}

// Each stands in one setting, by turns. ISOGRAD_FULL_TESTS=1: in every one.
bool stands_in(const std::string& id, const Setting& setting) {
  if (full_tests() || id == "B25") return true;
  const auto ids = crossed();
  const auto turn = static_cast<std::size_t>(std::find(ids.begin(), ids.end(), id) - ids.begin());
  return turn % std::size(kSettings) == static_cast<std::size_t>(&setting - kSettings);
}

class OtherMeans : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Exhibits, OtherMeans, ::testing::ValuesIn(crossed()));

TEST_P(OtherMeans, EveryMistakeIsNamedRightly) {
  for (const Setting& setting : kSettings) {
    if (!stands_in(GetParam(), setting)) continue;
    for (const int ranks : ranks_of(GetParam(), setting)) {
      // Half of a sample is not one rank's data.
      if (setting.cut && GetParam() == "missing_data_part") continue;
      // Samples whose fragments say different lengths are refused by the count, before any gradient.
      if (setting.cut && GetParam() == "B25") {
        EXPECT_THROW(shown("B25", setting, ranks), ConfigError);
        continue;
      }
      const Verdict verdict = shown(GetParam(), setting, ranks);
      SCOPED_TRACE(::testing::Message() << setting.name << ", " << ranks << " ranks\n"
                                        << to_text(verdict, 4));
      EXPECT_FALSE(verdict.passed);
      EXPECT_EQ(first_finding(verdict), expected_of(GetParam()));
    }
  }
}

TEST(OtherMeansRight, Pass) {
  std::size_t turn = 0;
  for (const Setting& setting : kSettings)
    for (const int ranks : {1, 2, 3, 4, 5}) {
      if (!full_tests() && takes_first(turn++)) continue;
      const Verdict verdict = shown("", setting, ranks);
      EXPECT_TRUE(verdict.passed) << setting.name << ", " << ranks << " ranks\n" << to_text(verdict, 9);
    }
}

// Another mean than the declared one is no known mistake of it: unknown, with numbers, and never a name.
TEST(OtherMeansUndeclared, AreUnknownWithTheirNumbers) {
  struct Unweighted : TokenMean {
    StepCounts count(const MicroBatches& micro_batches, Group& data, Requests requests) override {
      MicroBatches plain = micro_batches;
      for (Batch& batch : plain) batch.weights = at::Tensor();
      return TokenMean::count(plain, data, requests);
    }
    Batch prepare(const Batch& batch, const Denominator& denominator) const override {
      Batch plain = batch;
      plain.weights = at::Tensor();
      return TokenMean::prepare(plain, denominator);
    }
  };
  std::size_t turn = 0;
  for (const Setting& setting : kSettings)
    for (const int ranks : {1, 2, 3, 5}) {
      if (!full_tests() && takes_first(turn++)) continue;
      const Exhibit other{.plant = [&](VerifyProblem& p, World& world) {
        declare(p, world, setting);
        with_normalizer<Unweighted>(p);
      }};
      const Verdict verdict = show(&other, ranks);
      SCOPED_TRACE(::testing::Message() << setting.name << ", " << ranks << " ranks\n"
                                        << to_text(verdict, 4));
      EXPECT_FALSE(verdict.passed);
      // Or undecided between what is not made of this step's parts: no name either.
      EXPECT_THAT(first_finding(verdict), ::testing::AnyOf("unknown", "undecided"));
      ASSERT_FALSE(verdict.findings.empty());
      EXPECT_THAT(verdict.findings[0].sentence, HasSubstr("ratios"));
    }
}

}  // namespace
}  // namespace isograd::museum
