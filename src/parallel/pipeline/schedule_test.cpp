// Schedules as data: complete, free of deadlock, as long and as deep as their papers say, and as deep when
// they are carried out; contradictions are found and named.
#include "isograd/pipeline_parallel.hpp"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "base/error_testing.hpp"
#include "parallel/pipeline/split_backward.hpp"
#include "parallel/pipeline/stages.hpp"

namespace isograd {
namespace {

using error_testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Kind = PipelineAction::Kind;

struct Asked {
  std::string schedule;
  int ranks, stages_of_rank, micro_batches;
};

Asked arbitrary_asked(int most_ranks, int most_micro_batches) {
  const auto names = pipeline_schedules();
  Asked asked{.schedule = *rc::gen::elementOf(names),
              .ranks = *rc::gen::inRange(1, most_ranks + 1),
              .stages_of_rank = 1,
              .micro_batches = *rc::gen::inRange(1, most_micro_batches + 1)};
  if (asked.schedule == "zb-v") asked.stages_of_rank = 2;
  if (asked.schedule == "one-after-another") asked.stages_of_rank = *rc::gen::inRange(1, 4);
  if (asked.schedule == "interleaved") {
    asked.stages_of_rank = *rc::gen::inRange(2, 5);
    asked.micro_batches = asked.ranks * *rc::gen::inRange(1, 5);
  }
  return asked;
}

PipelineTable table_of(const Asked& asked) {
  return make_pipeline(asked.schedule, asked.ranks, asked.stages_of_rank, asked.micro_batches);
}

// Plainly: every micro-batch once through every stage and back, in the order of micro-batches.
void expect_complete(const PipelineTable& table) {
  std::map<std::pair<int, Kind>, int> next;
  for (std::size_t rank = 0; rank < table.ranks.size(); ++rank)
    for (const PipelineAction& action : table.ranks[rank]) {
      RC_ASSERT(table.rank_of_stage.at(static_cast<std::size_t>(action.stage)) == static_cast<int>(rank));
      const Kind kind = action.kind;
      RC_ASSERT((next[{action.stage, kind}]++ == action.micro_batch));
    }
  for (int stage = 0; stage < table.stages; ++stage) {
    RC_ASSERT((next[{stage, Kind::kForward}] == table.micro_batches));
    const int whole = next[{stage, Kind::kBackward}], inputs = next[{stage, Kind::kBackwardInputs}];
    RC_ASSERT(whole + inputs == table.micro_batches);
    RC_ASSERT((next[{stage, Kind::kBackwardWeights}] == inputs));
  }
}

// Rank after rank, as far as each comes, until nobody can go on: what simulate() finds, the slow way.
int done_by_turns(const PipelineTable& table) {
  std::vector<std::size_t> at(table.ranks.size(), 0);
  std::map<std::tuple<int, int, bool>, bool> made;
  int done = 0;
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t rank = 0; rank < table.ranks.size(); ++rank)
      for (; at[rank] < table.ranks[rank].size(); ++at[rank], ++done, moved = true) {
        const auto& [kind, stage, i] = table.ranks[rank][at[rank]];
        const bool forward = kind == Kind::kForward;
        if (forward && stage > 0 && !made[{stage - 1, i, true}]) break;
        if ((kind == Kind::kBackward || kind == Kind::kBackwardInputs) && stage + 1 < table.stages &&
            !made[{stage + 1, i, false}])
          break;
        if (kind != Kind::kBackwardWeights) made[{stage, i, forward}] = true;
      }
  }
  return done;
}

RC_GTEST_PROP(PipelineSchedules, AreCompleteAndEnd, ()) {
  for (int draw = 0; draw < 100; ++draw) {  // of a hundred draws of rapidcheck's own: 10,000 tables
    const Asked asked = arbitrary_asked(9, 20);
    const PipelineTable table = table_of(asked);
    expect_complete(table);
    const PipelineTimeline timeline = simulate(table, uniform_times(table.stages));
    std::size_t actions = 0;
    for (const auto& own : table.ranks) actions += own.size();
    RC_ASSERT(done_by_turns(table) == static_cast<int>(actions));
    RC_ASSERT(timeline.bubble() >= 0);
    // With transfers written down nothing else happens.
    const PipelineTimeline sent = simulate(with_transfers(table), uniform_times(table.stages, 1, 1, 1, 0.25));
    RC_ASSERT(sent.length == simulate(table, uniform_times(table.stages, 1, 1, 1, 0.25)).length);
    RC_ASSERT(sent.most_live == timeline.most_live);
    RC_ASSERT(pipeline_from_json(to_json(with_transfers(table)), "a file").ranks ==
              with_transfers(table).ranks);
  }
}

// With F = I = W = 1.
TEST(PipelineSchedules, AreAsLongAsTheirPapersSay) {
  for (const int p : {1, 2, 3, 4, 5, 8})
    for (const int m : {p, 2 * p + 1, 4 * p}) {
      const auto length = [&](const char* name, int v = 1) {
        const PipelineTable table = make_pipeline(name, p, v, m);
        return simulate(table, uniform_times(table.stages)).length;
      };
      EXPECT_EQ(length("one-after-another"), 3 * m * p) << p << ", " << m;
      EXPECT_EQ(length("gpipe"), 3 * (m + p - 1)) << p << ", " << m;
      EXPECT_EQ(length("1f1b"), 3 * (m + p - 1)) << p << ", " << m;
      EXPECT_EQ(length("zb-h1"), 3 * m + (p - 1)) << p << ", " << m;  // a bubble of (p - 1)(F + I - W)
      if (m >= 2 * p) {
        EXPECT_EQ(length("zb-v", 2), 6 * m + (p - 1)) << p << ", " << m;
      }
      for (const int v : {2, 3}) {  // a bubble of (p - 1)(F + B), where each action is 1 / v of a rank's
        if (m % p != 0) continue;
        EXPECT_EQ(length("interleaved", v), 3 * v * m + 3 * (p - 1)) << p << ", " << m;
      }
    }
}

// Micro-batches of a rank's stages whose activations it keeps.
TEST(PipelineSchedules, KeepAsMuchAsTheirPapersSay) {
  for (const int p : {1, 2, 3, 4, 5, 8}) {
    const int m = 4 * p;
    const auto most = [&](const char* name, int v = 1) {
      const PipelineTable table = make_pipeline(name, p, v, m);
      return simulate(table, uniform_times(table.stages)).most_live;
    };
    for (int rank = 0; rank < p; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      EXPECT_EQ(most("one-after-another")[r], 1);
      EXPECT_EQ(most("gpipe")[r], m);
      EXPECT_EQ(most("1f1b")[r], p - rank);
      EXPECT_LE(most("zb-h1")[r], p);        // as rank 0 under 1f1b
      EXPECT_LE(most("zb-v", 2)[r], 2 * p);  // of half stages
    }
    if (p == 1) continue;
    EXPECT_EQ(most("interleaved", 2)[0], 2 * (p - 1) + p + 1);
  }
}

TEST(PipelineSchedules, WhatIsKeptBetweenHalvesHasAWeightOfItsOwn) {
  // Rank 1 keeps, action by action of F0 I0 F1 I1 W0 W1: 1, h, 1 + h, 2 h, h, 0; rank 0, of F0 F1 I0 W0 I1
  // W1: 1, 2, 1 + h, 1, h, 0.
  const PipelineTable table = pipeline_from_json(
      R"({"name": "two", "stages": 2, "micro_batches": 2,
          "ranks": [["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"], ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]]})",
      "two");
  const auto most = [&](double h) { return simulate(table, uniform_times(2), h).most_kept; };
  EXPECT_EQ(most(1), (std::vector<double>{2, 2}));
  EXPECT_EQ(most(0), (std::vector<double>{2, 1}));
  EXPECT_EQ(most(0.75), (std::vector<double>{2, 1.75}));
  EXPECT_EQ(most(1.5), (std::vector<double>{2.5, 3}));
  EXPECT_EQ(simulate(table, uniform_times(2), 1.5).most_live, (std::vector<int>{2, 2}));
  for (const double h : {-0.5, std::nan(""), HUGE_VAL})
    EXPECT_THROW(simulate(table, uniform_times(2), h), ConfigError) << h;
}

TEST(PipelineSchedules, TimesAreAnybodys) {
  // Two stages of unequal cost, by hand: F 1 and 2, I 1 and 2, W 1 and 1, transfers 0.5.
  const PipelineTable table = make_pipeline("gpipe", 2, 1, 2);
  const PipelineTimes times{
      .forward = {1, 2}, .backward_inputs = {1, 2}, .backward_weights = {1, 1}, .transfer = 0.5};
  // Stage 1: F0 1.5 .. 3.5, F1 .. 5.5, B0 .. 8.5, B1 .. 11.5; stage 0: B0 9 .. 11, B1 12 .. 14.
  const PipelineTimeline timeline = simulate(table, times);
  EXPECT_EQ(timeline.length, 14);
  EXPECT_EQ(timeline.busy, (std::vector<double>{6, 10}));
  EXPECT_NEAR(timeline.bubble(), 1 - 16.0 / 28, 1e-12);
  EXPECT_EQ(timeline.spans[1][2].begin, 5.5);
}

TEST(PipelineSchedules, OfTenThousandRanksAreSimulated) {
  const PipelineTable table = make_pipeline("zb-h1", 10'000, 1, 133);
  std::size_t actions = 0;
  for (const auto& own : table.ranks) actions += own.size();
  EXPECT_EQ(actions, 3'990'000u);
  EXPECT_GT(simulate(table, uniform_times(table.stages)).length, 3 * 133);
}

// ---- carried out ----

// Tensors that exist, now and at most.
struct Alive {
  int now = 0, most = 0;
  at::Tensor one_more() {
    most = std::max(most, ++now);
    auto* values = new double[2]{0.5, 2};
    return at::from_blob(
        values, {2}, [this, values](void*) { --now, delete[] values; }, at::kDouble);
  }
};

// The most micro-batches of stages whose activations each rank has kept at a time in a run of the table: each
// forward makes one that its backward needs. `released`: with that, as steps do; or at the end.
std::vector<int> most_live_when_run(const Asked& asked, bool released = true) {
  std::vector<int> most(static_cast<std::size_t>(asked.ranks));
  run_ranks(asked.ranks, [&](World& world) {
    Pipeline pipeline(Mesh(world, Grid({{kStageAxis, asked.ranks}})),
                      {.schedule = asked.schedule, .stages_of_rank = asked.stages_of_rank});
    Alive alive;
    std::map<std::pair<std::size_t, std::size_t>, at::Tensor> results;
    // Both halves of a backward have a gradient to compute; that of the weight needs what the forward keeps.
    const at::Tensor weight = at::ones({2}, at::kDouble).requires_grad_();
    std::map<std::pair<std::size_t, std::size_t>, WeightsBackward> left;
    const auto forward = [&](std::size_t i, std::size_t part) {
      const at::Tensor x =
          pipeline.is_first() ? at::ones({2}, at::kDouble).requires_grad_() : pipeline.receive({2});
      const at::Tensor y = x + weight * alive.one_more();
      results[{i, part}] = pipeline.is_last() ? y.sum() : pipeline.pass_on(y);
    };
    const auto backward = [&](std::size_t i, bool, std::size_t part) {
      results.at({i, part}).backward({}, /*retain_graph=*/!released);
      if (released) results.erase({i, part});
    };
    const auto inputs = [&](std::size_t i, std::size_t part) {
      left[{i, part}] = backward_of_inputs(results.at({i, part}));
      results.erase({i, part});
    };
    const auto weights = [&](std::size_t i, bool, std::size_t part) {
      left.at({i, part}).run();
      if (released) left.erase({i, part});
    };
    pipeline.run(static_cast<std::size_t>(asked.micro_batches),
                 {.forward = forward, .backward = backward, .inputs = inputs, .weights = weights});
    results.clear(), left.clear();
    EXPECT_EQ(alive.now, 0);
    most[static_cast<std::size_t>(world.rank)] = alive.most;
  });
  return most;
}

RC_GTEST_PROP(PipelineSchedules, KeepAsMuchWhenRunAsWhenSimulated, ()) {
  const Asked asked = arbitrary_asked(4, 12);
  const PipelineTable table = table_of(asked);
  RC_LOG() << asked.schedule << ", " << asked.ranks << " ranks of " << asked.stages_of_rank << " stages, "
           << asked.micro_batches << " micro-batches\n";
  RC_ASSERT(most_live_when_run(asked) == simulate(table, uniform_times(table.stages)).most_live);
}

TEST(PipelineSchedules, ARunThatKeepsTooMuchIsSeen) {
  const Asked asked{.schedule = "1f1b", .ranks = 3, .stages_of_rank = 1, .micro_batches = 5};
  EXPECT_EQ(most_live_when_run(asked), (std::vector<int>{3, 2, 1}));
  EXPECT_EQ(most_live_when_run(asked, /*released=*/false), (std::vector<int>{5, 5, 5}));
}

// ---- what is not admitted ----

TEST(PipelineSchedules, AreTheFactsThatAreSaidOfThem) {
  for (const std::string& name : pipeline_schedules()) {
    const ScheduleFacts* facts = find_schedule(name);
    ASSERT_NE(facts, nullptr) << name;
    EXPECT_EQ(&schedule_named(name), facts);
    EXPECT_EQ(facts->name, name);
    for (int each = 1; each < 5; ++each)
      for (const int micro_batches : {6, 7}) {
        const bool admitted = each >= facts->least_stages &&
                              (facts->most_stages == 0 || each <= facts->most_stages) &&
                              !(facts->whole_rounds && micro_batches == 7);
        bool halves = facts->halves;
        const std::string error =
            error_of([&] { halves = has_halves(make_pipeline(name, 3, each, micro_batches)); });
        EXPECT_EQ(error == "no error", admitted) << name << " " << each << ": " << error;
        EXPECT_EQ(halves, facts->halves) << name;
      }
  }
  EXPECT_EQ(find_schedule("none"), nullptr);
  EXPECT_THAT(error_of([] { schedule_named("none"); }), HasSubstr("1f1b"));
}

TEST(PipelineSchedules, NameWhatTheyAdmit) {
  const auto refused = [](const char* name, int p, int v, int m) {
    return error_of([&] { make_pipeline(name, p, v, m); });
  };
  EXPECT_THAT(refused("2f2b", 2, 1, 2), AllOf(HasSubstr("2f2b"), HasSubstr("zb-h1")));
  EXPECT_THAT(refused("1f1b", 2, 2, 2), HasSubstr("2 stages on each rank"));
  EXPECT_THAT(refused("zb-v", 2, 1, 2), HasSubstr("1 stages on each rank"));
  EXPECT_THAT(refused("interleaved", 2, 1, 2), HasSubstr("2 or more"));
  EXPECT_THAT(refused("interleaved", 4, 2, 9),
              AllOf(HasSubstr("9 micro-batches on 4 ranks"), HasSubstr("8 or 12")));
  EXPECT_THAT(refused("interleaved", 4, 2, 3), HasSubstr("a multiple of the ranks: 4."));
  EXPECT_THAT(refused("gpipe", 0, 1, 2), HasSubstr("0 ranks"));
  EXPECT_THAT(refused("gpipe", 2, 1, 0), HasSubstr("0 micro-batches"));
  EXPECT_THAT(refused("interleaved", 2048, 2, 1 << 20), HasSubstr("at most 4000000 forwards"));
}

// Contradictions, each planted in a right table.
class PipelineContradictions : public ::testing::Test {
 protected:
  static PipelineAction at(Kind kind, int stage, int i) { return {kind, stage, i}; }
  static std::string found_in(PipelineTable table) {
    return error_of([&] { check_pipeline(table); });
  }
  PipelineTable right = make_pipeline("1f1b", 3, 1, 4);
};

TEST_F(PipelineContradictions, AreNamed) {
  EXPECT_EQ(found_in(right), "no error");
  const PipelineTable halves = make_pipeline("zb-h1", 2, 1, 3), sent = with_transfers(right);
  const auto without = [](int rank, Kind kind, int stage, int i) {
    return [=](PipelineTable& table) {
      std::erase(table.ranks[static_cast<std::size_t>(rank)], at(kind, stage, i));
    };
  };
  const auto with = [](int rank, Kind kind, int stage, int i) {
    return [=](PipelineTable& table) {
      table.ranks[static_cast<std::size_t>(rank)].push_back(at(kind, stage, i));
    };
  };
  struct Case {
    const PipelineTable& right;
    std::function<void(PipelineTable&)> plant;
    const char* found;
  };
  for (const auto& [table, plant, found] :
       std::vector<Case>{{right, without(1, Kind::kBackward, 1, 2), "no 1B2 on rank 1"},
                         {right, with(1, Kind::kForward, 1, 0), "1F0 on rank 1 a second time"},
                         {right, with(0, Kind::kForward, 1, 0), "1F0 on rank 0, stage 1 on rank 1"},
                         {right, with(2, Kind::kForward, 2, 4), "2F4 on rank 2"},
                         {right, with(2, Kind::kForward, 3, 0), "stages 0 to 2"},
                         {right, [](auto& wrong) { std::swap(wrong.ranks[2][0], wrong.ranks[2][1]); },
                          "2B0 on rank 2 before 2F0"},
                         {right, with(2, Kind::kBackwardWeights, 2, 0), "2W0 on rank 2 and 2B0"},
                         {right, [](auto& wrong) { wrong.rank_of_stage[1] = 7; }, "stage 1 on rank 7"},
                         {halves, without(1, Kind::kBackwardWeights, 1, 1), "no 1W1 on rank 1"},
                         {sent, without(0, Kind::kSendOutput, 0, 3), "no 0SEND_F3 on rank 0"},
                         {sent, without(1, Kind::kReceiveInput, 1, 3), "1F3 on rank 1 before 1RECV_F3"}}) {
    PipelineTable wrong = table;
    plant(wrong);
    EXPECT_THAT(found_in(wrong), HasSubstr(found));
  }
}

// Rank 1 wants the second micro-batch's gradient before it has passed on the first one's output.
TEST_F(PipelineContradictions, WhoWaitsForWhomIsSaid) {
  PipelineTable wrong = right;
  wrong.ranks[0] = {at(Kind::kForward, 0, 0), at(Kind::kBackward, 0, 0)};
  for (int i = 1; i < 4; ++i) {
    wrong.ranks[0].push_back(at(Kind::kForward, 0, i));
    wrong.ranks[0].push_back(at(Kind::kBackward, 0, i));
  }
  wrong.ranks[1] = {at(Kind::kForward, 1, 0), at(Kind::kForward, 1, 1)};
  for (int i = 0; i < 4; ++i) {
    wrong.ranks[1].push_back(at(Kind::kBackward, 1, i));
    if (i < 2) wrong.ranks[1].push_back(at(Kind::kForward, 1, i + 2));
  }
  EXPECT_THAT(found_in(wrong), AllOf(HasSubstr("rank 0 waits before 0B0 for 1B0 of rank 1"),
                                     HasSubstr("rank 1 waits before 1F1 for 0F1 of rank 0")));
}

// A swap of two actions, or one that is lost or doubled: found, unless the table still ends without it.
RC_GTEST_PROP(PipelineSchedules, ContradictionsAreFound, ()) {
  PipelineTable table = table_of(arbitrary_asked(5, 8));
  auto& own = table.ranks[*rc::gen::inRange<std::size_t>(0, table.ranks.size())];
  const auto place = *rc::gen::inRange<std::size_t>(0, own.size());
  const int mistake = *rc::gen::inRange(0, 3);
  if (mistake == 0) own.erase(own.begin() + static_cast<std::ptrdiff_t>(place));
  if (mistake == 1) own.push_back(own[place]);
  if (mistake == 2) std::swap(own[place], own[*rc::gen::inRange<std::size_t>(0, own.size())]);
  std::size_t actions = 0;
  for (const auto& each : table.ranks) actions += each.size();
  const bool ends = mistake == 2 && done_by_turns(table) == static_cast<int>(actions);
  const bool passed = error_of([&] { check_pipeline(table); }) == "no error";
  if (mistake < 2) RC_ASSERT(!passed);
  if (passed) RC_ASSERT(ends);
}

TEST(PipelineSchedules, NameTheTimeThatCannotBeTaken) {
  const PipelineTable table = make_pipeline("1f1b", 2, 1, 2);
  const auto refused = [&](const std::function<void(PipelineTimes&)>& change) {
    PipelineTimes times = uniform_times(2);
    change(times);
    return error_of([&] { simulate(table, times); });
  };
  for (const double time : {1e308, -1.0, double(NAN), double(INFINITY), 1e-320}) {
    EXPECT_THAT(refused([&](PipelineTimes& times) { times.forward[1] = time; }),
                HasSubstr("a forward of stage 1"));
    EXPECT_THAT(refused([&](PipelineTimes& times) { times.backward_inputs[0] = time; }),
                HasSubstr("a backward of inputs of stage 0"));
    EXPECT_THAT(refused([&](PipelineTimes& times) { times.backward_weights[1] = time; }),
                HasSubstr("a backward of weights of stage 1"));
    EXPECT_THAT(refused([&](PipelineTimes& times) { times.transfer = time; }),
                HasSubstr("a transfer that takes"));
  }
  EXPECT_THAT(refused([&](PipelineTimes& times) { times.forward.pop_back(); }),
              HasSubstr("1 times of a forward"));
  PipelineTimes apart = uniform_times(2, 1e-100, 1e100, 0);
  EXPECT_THAT(to_picture(table, simulate(table, apart)), HasSubstr("rank 1   stage 1"));
}

TEST(PipelineText, IsReadOrRefused) {
  const auto refused = [](const std::string& text) {
    return error_of([&] { pipeline_from_json(text, "mine.json"); });
  };
  const std::string right =
      R"({"stages": 2, "micro_batches": 1, "ranks": [["0F0", "0B0"], ["1F0", "1I0", "1W0"]]})";
  EXPECT_EQ(pipeline_from_json(right, "mine.json").name, "mine.json");
  EXPECT_EQ(pipeline_from_json(right, "mine.json").rank_of_stage, (std::vector<int>{0, 1}));
  for (const auto& [text, found] : std::vector<std::pair<const char*, const char*>>{
           {"[]", "mine.json"},
           {R"({"stages": 2})", "no micro_batches"},
           {R"({"stages": 0, "micro_batches": 1, "ranks": [[]]})", "stages 0"},
           {R"({"stages": 1, "micro_batches": 1, "ranks": [["0X0"]]})", "0X0"},
           {R"({"stages": 1, "micro_batches": 1, "ranks": [["0F99999999999"]]})", "99999999999"},
           {R"({"stages": 2, "micro_batches": 1, "ranks": [["0F0", "0B0"]]})", "no action of stage 1"},
           {R"({"stages": 1, "micro_batches": 1000000, "ranks": [["0F0", "0B0"]]})",
            "2 actions for 1 stages and 1000000 micro-batches"},
           {R"({"stages": 1, "micro_batches": 1, "rank": []})", "'rank'"},
           {R"({"stages": 1, "micro_batches": 1, "ranks": [["0B0", "0F0"]]})", "0B0"}})
    EXPECT_THAT(refused(text), HasSubstr(found));
}

// In time in proportion to the stages, on a rank each or all on one.
TEST(PipelinePicture, OfManyStages) {
  constexpr int kStages = 40'000;
  for (const bool apart : {true, false}) {
    PipelineTable table{.name = "long", .stages = kStages, .micro_batches = 1};
    table.ranks.resize(apart ? kStages : 1);
    for (int stage = 0; stage < kStages; ++stage) table.rank_of_stage.push_back(apart ? stage : 0);
    for (int stage = 0; stage < kStages; ++stage)
      table.ranks[apart ? static_cast<std::size_t>(stage) : 0].push_back({Kind::kForward, stage, 0});
    for (int stage = kStages - 1; stage >= 0; --stage)
      table.ranks[apart ? static_cast<std::size_t>(stage) : 0].push_back({Kind::kBackward, stage, 0});
    const PipelineTable read = pipeline_from_json(to_json(table), "long");
    EXPECT_EQ(read, table);
    const PipelineTimeline timeline = simulate(read, uniform_times(kStages));
    EXPECT_EQ(std::ranges::count(to_picture(read, timeline), '\n'), kStages);
  }
}

TEST(PipelinePicture, ShowsWhenEachRankDoesWhat) {
  const PipelineTable table = make_pipeline("1f1b", 2, 1, 2);
  const PipelineTimeline timeline = simulate(table, uniform_times(2));
  EXPECT_EQ(to_picture(table, timeline),
            "rank 0   stage 0   F0 F1 ......B0    ...B1    \n"
            "rank 1   stage 1   ...F0 B0    F1 B1    ......\n");
}

}  // namespace
}  // namespace isograd
