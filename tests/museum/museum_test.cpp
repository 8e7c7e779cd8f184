// The museum, tested: every exhibit on show is caught by name at every number of ranks at which it exists,
// the right implementation is not, and what verify can just see.
#include "museum/museum.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "full_tests.hpp"
#include "museum/room.hpp"
#include "verify/diagnosis.hpp"

namespace isograd::museum {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::string> on_show() {
  std::vector<std::string> ids;
  for (const Exhibit& exhibit : exhibits()) ids.push_back(exhibit.id);
  return ids;
}

class Museum : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Exhibits, Museum, ::testing::ValuesIn(on_show()));

void expect_caught(const Exhibit& exhibit, int ranks, const std::string& where = {}) {
  const Verdict verdict = show(&exhibit, ranks);
  SCOPED_TRACE(fmt::format("{} {} on {} ranks\n{}", exhibit.id, where, ranks, to_text(verdict, 9)));
  EXPECT_FALSE(verdict.passed);
  EXPECT_EQ(first_finding(verdict), exhibit.diagnosis);
  ASSERT_FALSE(verdict.findings.empty());
  EXPECT_THAT(verdict.findings[0].sentence, HasSubstr(exhibit.words));
  if (exhibit.id == "B17") {
    EXPECT_EQ(verdict.layouts.at(0).e3.state, Grade::State::kFailed);
  }
}

// On one of the numbers of ranks, which take turns; `./dev museum` and ISOGRAD_FULL_TESTS=1: on all.
TEST_P(Museum, EveryExhibitIsCaughtByName) {
  const Exhibit& exhibit = *find(GetParam());
  std::vector<int> numbers;
  for (int ranks : {2, 3, 4, 5, 6})
    if (exhibit.exists(ranks) && (ranks < 6 || numbers.size() < 3)) numbers.push_back(ranks);
  ASSERT_GE(numbers.size(), 3u);
  if (!full_tests()) {
    const auto place = static_cast<std::size_t>(&exhibit - exhibits().data()) % numbers.size();
    numbers = {numbers[place]};
  }
  for (const int ranks : numbers) expect_caught(exhibit, ranks);
}

// Mistakes on the context axes, on ring x Ulysses: 3 x 2, and two of 2 x 2. Mistakes on the pipeline axis, on
// stages x data: 3 x 2 and 4 x 2. Half of them, on 6 ranks, a few on 8: on one axis all are caught above,
// and their gradients in the cells of hybrid_mutants_test.cpp. ISOGRAD_FULL_TESTS=1: all, on both.
class OnHybrids : public ::testing::TestWithParam<std::string> {};
std::vector<std::string> on_hybrids() {
  std::vector<std::string> ids = {"B3c",   "B5",  "B7c",   "B19",   "B20b",  "B23",   "B26bc",
                                  "B8p",   "B9p", "B10",   "B16p",  "B18ap", "B18bp", "B18cp",
                                  "B18ep", "B5p", "B18ar", "B18fp", "B18be", "B18ge"};
  std::size_t place = 0;
  if (!full_tests()) std::erase_if(ids, [&](const auto&) { return takes_first(place++); });
  return ids;
}
INSTANTIATE_TEST_SUITE_P(Exhibits, OnHybrids, ::testing::ValuesIn(on_hybrids()));

TEST_P(OnHybrids, ExhibitsOfTwoAxesAreCaughtByName) {
  Exhibit exhibit = *find(GetParam());
  exhibit.words.clear();
  const bool on_eight = (find(GetParam()) - exhibits().data()) % 4 == 0;
  for (const int ranks : {6, 8}) {
    ASSERT_TRUE(exhibit.exists(ranks));
    if (!full_tests() && on_eight != (ranks == 8)) continue;
    expect_caught(exhibit, ranks);
  }
}

// Mistakes of the mean and of accumulation, made where there are other axes than those of plain data: parts
// of documents, experts assigned to data ranks, stages with and without data ranks. Each in one of these
// cells; ISOGRAD_FULL_TESTS=1: in all of them.
struct OtherAxis {
  const char* name;
  void (*make)(VerifyProblem&, World&);
  std::set<std::string> missing{};  // mistakes that need what this step does not have
};
const OtherAxis kOtherAxes[] = {{"context", cut_over_context, {"B12"}},  // no micro-batch is without a target
                                {"experts", shard_over_experts, {"B12"}},  // nor here
                                {"pipeline", lay_in_stages}};

void plant_in(VerifyProblem& problem, World& world, const OtherAxis& axis, const Exhibit& exhibit) {
  axis.make(problem, world);
  exhibit.plant(problem, world);
  auto& along = problem.layouts[0].along;
  if (!along) return;
  along = [&world, &exhibit, inner = along](const std::string& name) {
    auto alone = inner(name);
    if (alone) exhibit.plant(*alone, world);
    return alone;
  };
}

class OnOtherAxes : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Exhibits, OnOtherAxes,
                         ::testing::Values("B1", "B2", "B3", "B7", "B11", "B12", "B30", "B31", "B32"));

TEST_P(OnOtherAxes, MistakesOfTheMeanAreCaughtByName) {
  const Exhibit& exhibit = *find(GetParam());
  std::vector<std::pair<const OtherAxis*, int>> cells;
  for (const OtherAxis& axis : kOtherAxes)
    for (const int ranks : {2, 3, 4, 6}) {
      if (axis.missing.count(exhibit.id)) continue;
      // Ranks differ in no count where there are stages alone; there are data ranks too on 4 and 6.
      const bool of_ranks = exhibit.id == "B3" || exhibit.id == "B7" || exhibit.id == "B1";
      if (of_ranks && axis.make == lay_in_stages && ranks < 4) continue;
      // Two context ranks have equally many micro-batches in every experiment: B1 and B11 are the same
      // numbers.
      if ((exhibit.id == "B1" || exhibit.id == "B11") && axis.make == cut_over_context && ranks == 2)
        continue;
      cells.emplace_back(&axis, ranks);
    }
  ASSERT_GE(cells.size(), 4u);
  if (!full_tests())
    cells = {cells[static_cast<std::size_t>(std::stoi(exhibit.id.substr(1))) % cells.size()]};
  for (const auto& [axis, ranks] : cells) {
    const Exhibit there{.id = exhibit.id,
                        .diagnosis = exhibit.diagnosis,
                        .plant = [&exhibit, where = axis](VerifyProblem& problem, World& world) {
                          plant_in(problem, world, *where, exhibit);
                        }};
    expect_caught(there, ranks, axis->name);
  }
}

void expect_passes(const Exhibit& twin, int ranks) {
  const Verdict verdict = show(&twin, ranks);
  EXPECT_TRUE(verdict.passed) << twin.id << "\n" << to_text(verdict, 9);
}

TEST(Hybrids, TheRightTwinPasses) {  // on 8 ranks: below
  expect_passes({.id = "context", .plant = cut_over_context}, 6);
}

class Right : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Right, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(Right, TheCorrectImplementationPasses) {
  const Verdict verdict = show(nullptr, GetParam());
  EXPECT_TRUE(verdict.passed) << to_text(verdict, 9);
  EXPECT_EQ(first_finding(verdict), "pass");
  ASSERT_EQ(verdict.layouts.at(0).trajectories.size(), 2u);
  for (const auto& trajectory : verdict.layouts[0].trajectories)
    EXPECT_TRUE(trajectory.passed) << trajectory.optimizer << " " << trajectory.error;
  EXPECT_LT(verdict.oracle.clip_coefficient, 0.5);
  EXPECT_DOUBLE_EQ(verdict.layouts[0].bytes_moved, verdict.layouts[0].bytes_needed);
}

// The tools of exhibits are right where they are used rightly: the router's term, dropout keyed by the
// sample, a clip of one's own, a resume at the right place.
TEST_P(Right, SoAreTheRightTwinsOfExhibits) {
  const auto model = [](void (*change)(RoomModel&)) -> Plant {
    return [change](VerifyProblem& problem, World&) { with_model(problem, change); };
  };
  const std::vector<Exhibit> twins = {
      {.id = "router", .plant = model([](RoomModel& model) { model.with_router = true; })},
      {.id = "dropout", .plant = model([](RoomModel& model) {
                          model.noise = [](std::int64_t sample, std::int64_t position) {
                            return static_cast<double>((sample * 7 + position * 3) % 10) / 10;
                          };
                        })},
      {.id = "ranking", .plant = rank_all_rows},
      {.id = "context", .plant = cut_over_context},
      {.id = "tensor", .plant = cut_over_tensor},
      {.id = "experts", .plant = shard_over_experts},
      {.id = "pipeline", .plant = lay_in_stages},
      {.id = "pipeline of a tied embedding", .plant = lay_in_stages_tied},
      {.id = "clip", .plant = clips_by(whole_norm)}};
  // On half of the numbers of ranks; ISOGRAD_FULL_TESTS=1: on all.
  auto place = static_cast<std::size_t>(GetParam());
  for (const Exhibit& twin : twins) {
    if (!full_tests() && takes_first(place++)) continue;
    expect_passes(twin, GetParam());
  }
}

TEST(Catalogue, IsComplete) {
  std::set<std::string> ids, diagnoses;
  for (const Diagnosis& diagnosis : kDiagnoses) EXPECT_TRUE(diagnoses.insert(diagnosis.id).second);
  std::map<std::string, std::set<std::string>> by_class;
  for (const Exhibit& exhibit : exhibits()) {
    EXPECT_TRUE(ids.insert(exhibit.id).second) << exhibit.id;
    EXPECT_FALSE(exhibit.number.empty());
    EXPECT_TRUE(diagnoses.count(exhibit.diagnosis)) << exhibit.diagnosis;
    EXPECT_FALSE(exhibit.who.empty()) << exhibit.id;
    by_class[exhibit.diagnosis].insert(exhibit.id);
  }
  // B1 to B30; B18 and B26 come in parts.
  for (int number = 1; number <= 30; ++number)
    EXPECT_TRUE(std::any_of(ids.begin(), ids.end(), [&](const std::string& id) {
      return id.substr(0, 1 + std::to_string(number).size()) == fmt::format("B{}", number);
    })) << number;
  // Exhibits share a diagnosis only where that was declared.
  for (const auto& [diagnosis, members] : by_class) {
    if (members.size() == 1) continue;
    const auto& classes = shared_classes();
    const auto declared = std::find_if(classes.begin(), classes.end(),
                                       [&](const ExhibitClass& c) { return c.diagnosis == diagnosis; });
    ASSERT_NE(declared, classes.end()) << diagnosis;
    EXPECT_EQ(members, std::set<std::string>(declared->exhibits.begin(), declared->exhibits.end()));
  }
}

// 12 of them in every test run, 200 by `./dev museum` (or with ISOGRAD_CONFIGURATIONS=200).
TEST(FalseAlarms, RandomCorrectConfigurationsPass) {
  const char* wanted = std::getenv("ISOGRAD_CONFIGURATIONS");
  EXPECT_THAT(false_alarms(wanted ? std::atoi(wanted) : full_tests() ? 25 : 12, 1), IsEmpty());
}

struct OffByLittle : planted::Wrapped {
  double factor;
  OffByLittle(std::unique_ptr<DataParallel> inner_, double factor_)
      : Wrapped(std::move(inner_)), factor(factor_) {}
  void finish_reduction() override {
    inner->finish_reduction();
    for (Bucket& bucket : buckets())
      if (bucket.gradients.scalar_type() == at::kFloat) bucket.gradients.mul_(factor);
  }
};

// A scale error that only the run's own precision has: E1 is right, E2 has to see it.
TEST(Sensitivity, AScaleOf10002InFp32) {
  for (int ranks : {2, 3, 5}) {
    const auto with = [&](double factor) {
      const Exhibit little{
          .plant = [factor](VerifyProblem& p, World&) { with_layout<OffByLittle>(p, factor); }};
      return show(&little, ranks);
    };
    const Verdict off = with(1.0002);
    EXPECT_FALSE(off.passed);
    EXPECT_EQ(off.layouts.at(0).e1.state, Grade::State::kPassed);
    EXPECT_EQ(off.layouts.at(0).e2.state, Grade::State::kFailed);
    EXPECT_EQ(first_finding(off), "rounding");
    EXPECT_TRUE(with(1).passed);
  }
}

TEST(Sensitivity, OneSampleInAThousandCountedTwice) {
  const Exhibit twice{.plant = [](VerifyProblem& p, World& world) {
    std::vector<MicroBatches> by_rank(static_cast<std::size_t>(world.size));
    for (std::int64_t sample = 0; sample < 1000; sample += 50) {
      auto& batches = by_rank[static_cast<std::size_t>(sample / 50 % world.size)];
      batches.push_back(toy::make_batch(std::vector<std::int64_t>(50, 5), sample));
    }
    p.whole = [by_rank] { return MicroBatches{toy::concatenate(by_rank)}; };
    p.local = by_rank[static_cast<std::size_t>(world.rank)];
    if (world.rank == 1) p.local.push_back(toy::make_batch({5}, 123));
  }};
  const Verdict verdict = show(&twice, 3);
  EXPECT_FALSE(verdict.passed);
  EXPECT_EQ(first_finding(verdict), "sample_twice");
  EXPECT_THAT(verdict.findings[0].sentence, HasSubstr("1 samples count more than once: ids 123"));
  EXPECT_EQ(verdict.layouts.at(0).e1.state, Grade::State::kFailed);  // and the gradient shows it
}

// The ranks' own means, averaged, and their own counts under a sum, whatever is counted.
template <class Mean, bool Averaged>
struct OwnCount : Mean {
  Denominator denominator(const StepCounts& step_counts) const override {
    Denominator wrong = Mean::denominator(step_counts);
    const auto rank = static_cast<std::size_t>(step_counts.rank);
    const double own = std::is_same_v<Mean, SampleMean>
                           ? static_cast<double>(step_counts.samples_by_rank.at(rank))
                           : step_counts.weights_by_rank.at(rank);
    wrong.value =
        std::max(own, 1e-9) * (Averaged ? static_cast<double>(step_counts.samples_by_rank.size()) : 1);
    return wrong;
  }
};

template <class Mean, bool Averaged>
Plant own_count() {
  return [](VerifyProblem& p, World& world) {
    const bool samples = std::is_same_v<Mean, SampleMean>;
    p.loss.mean = samples ? isograd::Mean::kSamples : isograd::Mean::kWeights;
    auto by_rank = toy::make_step(world.size, 2);
    if (!samples)
      for (MicroBatches& batches : by_rank)
        for (Batch& batch : batches)
          batch.weights =
              (at::arange(batch.num_tokens(), at::kDouble) + batch.num_tokens()).remainder(5) / 4 + 0.25;
    p.local = by_rank[static_cast<std::size_t>(world.rank)];
    MicroBatches all;
    for (const MicroBatches& batches : by_rank) all.insert(all.end(), batches.begin(), batches.end());
    p.whole = [all] { return all; };
    with_normalizer<OwnCount<Mean, Averaged>>(p);
  };
}

// Wrong weights of ranks are named under the other means too, in what they count.
TEST(OtherMeans, DirectionsAreNamed) {
  std::size_t turn = 0;
  for (const int ranks : {2, 3, 4, 5}) {
    const auto expect = [&](Plant plant, const char* id, const char* words) {
      if (!full_tests() && takes_first(turn++)) return;
      expect_caught({.diagnosis = id, .words = words, .plant = std::move(plant)}, ranks);
    };
    expect(own_count<SampleMean, true>(), "mean_of_rank_means", "per-sample weights fit 1/n_k");
    expect(own_count<SampleMean, false>(), "count_not_reduced", "per-sample weights fit 1/n_k");
    expect(own_count<WeightedMean, true>(), "mean_of_rank_means", "per-weight weights fit 1/n_k");
    expect(own_count<WeightedMean, false>(), "count_not_reduced", "per-weight weights fit 1/n_k");
  }
}

struct ForgetsARank : planted::Wrapped {
  std::string name;
  ForgetsARank(std::unique_ptr<DataParallel> inner_, std::string name_)
      : Wrapped(std::move(inner_)), name(std::move(name_)) {}
  void finish_reduction() override {
    if (mesh().all().rank() == mesh().all().size() - 1)
      for (Bucket& bucket : buckets())
        for (const Slot& slot : bucket.plan.slots)
          if (slot.name == name) bucket.gradients.narrow(0, slot.offset, slot.numel).zero_();
    inner->finish_reduction();
  }
};

TEST(Sensitivity, OneParameterWithoutOneRanksPart) {
  std::size_t turn = 0;
  for (int ranks : {2, 3, 4, 5})
    for (const char* name : {"embedding", "twice", "bias"}) {
      if (!full_tests() && turn++ % 3 != static_cast<std::size_t>(ranks) % 3) continue;
      expect_caught(
          {.diagnosis = "missing_rank_part",
           .words = fmt::format("({}): without the part of rank {}", name, ranks - 1),
           .plant = [name](VerifyProblem& p, World&) { with_layout<ForgetsARank>(p, std::string(name)); }},
          ranks);
    }
}

}  // namespace
}  // namespace isograd::museum
