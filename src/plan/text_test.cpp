// Text and JSON of a plan that is filled in by hand.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <sstream>

#include "base/json.hpp"
#include "plan/problem.hpp"
#include "plan/trial.hpp"

namespace isograd::planner {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kGiB = 1 << 30;

Planned planned(const Candidate& candidate, double seconds) {
  return {.candidate = candidate,
          .memory = {.parameters = 2 * kGiB, .states = 5 * kGiB, .reserve = kGiB},
          .step = {.products = seconds / 2, .bubble = seconds / 4, .hidden = {.reduce = 0.125}},
          .seconds = {seconds, 0.9 * seconds, 1.1 * seconds, Origin::kFitted},
          .bytes = {8 * kGiB, 8 * kGiB, 8 * kGiB, Origin::kExact},
          .tokens_per_second = {1.5e6, 1.4e6, 1.6e6, Origin::kFitted},
          .mfu = 0.4321,
          .head_room = 72 * kGiB,
          .proved = candidate.pp == 1,
          .memory_parts = {{"states", "12Ψ/N, with Ψ = 8.03e9, N = 64", {5 * kGiB, 5 * kGiB, 5 * kGiB}}},
          .step_parts = {
              {"products",
               "2 · Σ m · n · k over the calibrated rate of the nearest shapes, of forward and of both "
               "halves of backward, for every micro-batch of the slowest rank",
               {seconds / 2, seconds / 2, seconds / 2, Origin::kCalibrated}}}};
}

Plan filled() {
  const Candidate best{.ranks = 512,
                       .shards = 64,
                       .tp = 8,
                       .strategy = Strategy::kZero3,
                       .micro_batch = 2,
                       .micro_batches = 8};
  const Candidate other{.ranks = 512,
                        .replicas = 8,
                        .shards = 4,
                        .tp = 4,
                        .pp = 4,
                        .stages_per_rank = 2,
                        .strategy = Strategy::kZero1,
                        .schedule = Schedule::kInterleaved,
                        .micro_batches = 32};
  Plan plan{
      .model = {.name = "llama \x1b[31m",
                .layers = 32,
                .hidden = 4096,
                .heads = 32,
                .key_value_heads = 8,
                .head_dim = 128,
                .feed_forward = 14336,
                .vocabulary = 128256},
      .cluster = {.name = "ours",
                  .device = {.name = "chip", .memory = 80 * kGiB, .peak = {0, 0, 989e12, 0}},
                  .devices = 512,
                  .per_host = 8,
                  .links = {{"NVLink", 8, 3.4e-6, 450e9}, {"network", 512, 14e-6, 50e9, Origin::kAssumed}}},
      .work = {.tokens = 4194304},
      .top = {planned(best, 3.25), planned(other, 4)},
      .front = {planned(best, 3.25)},
      .neighbours = {{"tp 16", "its all-reduce leaves the host: +41 %", 4.58},
                     {"micro-batch 4", "lacks 3.1 GiB", {}}},
      .laws = {{.name = "latency of gathers",
                .unit = "devices",
                .statement = "a layer's gather stops hiding behind its forward",
                .moved_by = "replicas 8 instead of shards 1024",
                .at = {568, 440, 700, Origin::kDataSheet},
                .now = 512,
                .reached = true}},
      .recipe = {{"samples", "tokens / sequence", "1024", "exact"}},
      .ways_out = {{"fewer devices", 4194304, planned(best, 5)}},
      .scaling = {{64, planned(best, 3.25), 1, "none"}, {4096, planned(best, 4), 0.5, "latency of gathers"}},
      .warnings = {"1 of 513 devices is idle"},
      .candidates = 12345,
      .fitting = 678};
  return plan;
}

// Without line breaks and blanks behind blanks.
std::string on_one_line(const std::string& text) {
  std::istringstream words(text);
  std::string result, word;
  while (words >> word) result += word + " ";
  return result;
}

// UTF-8 characters of the longest line.
std::size_t widest(const std::string& text) {
  std::size_t most = 0, at = 0;
  for (const char c : text) {
    at = c == '\n' ? 0 : at + ((c & 0xc0) != 0x80 ? 1 : 0);
    most = std::max(most, at);
  }
  return most;
}

TEST(PlanText, NamesLayouts) {
  EXPECT_EQ(to_text(Candidate{}), "bucketed, 1 rank, micro-batch 1 x 1");
  EXPECT_EQ(to_text(filled().top[0].candidate), "zero3, dp 64 x tp 8, micro-batch 2 x 8");
  EXPECT_EQ(to_text(filled().top[1].candidate),
            "zero1, replicas 8 x dp 4 x tp 4 x pp 4 of 2 stages interleaved, micro-batch 1 x 32");
  EXPECT_EQ(to_text(Candidate{.ranks = 4, .replicas = 4, .share_parameters = true}),
            "bucketed, dp 4, micro-batch 1 x 1, shared parameters");
  EXPECT_EQ(
      to_text(Candidate{.ranks = 64,
                        .shards = 2,
                        .cp_ring = 2,
                        .cp_ulysses = 2,
                        .tp = 8,
                        .ep = 2,
                        .strategy = Strategy::kZero3,
                        .sequence_parallel = false,
                        .reduce_once = true,
                        .checkpoint = true,
                        .reshard = false}),
      "zero3, dp 2 x cp ring 2 x cp ulysses 2 x tp 8, ep 2, no sequence parallelism, micro-batch 1 x 1, checkpointed, blocks kept "
      "whole, reduced once");
}

TEST(PlanText, HasAllOfAPlanInNarrowLines) {
  Plan plan = filled();
  const std::string text = to_text(plan);
  EXPECT_LE(widest(text), 100U) << text;
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));
  for (const char* part : {"8.03G parameters",
                           "4194304 tokens, 1024 sequences of 4096; bfloat16 with fp32 gradients",
                           "512 devices in hosts of 8, 80 GiB each",
                           "NVLink over 8: 450 GB/s, 3.4 us (data sheet)",
                           "12345 examined, 678 fit",
                           "1 of 513 devices is idle",
                           " 1 zero3, dp 64 x tp 8, micro-batch 2 x 8",
                           "3.25 s (2.93 s to 3.58 s) a step",
                           "1.50M tokens/s, MFU 43.2 %",
                           "8 GiB of 80 GiB",
                           "a rank; proved by the tests",
                           "composes, not proved by the tests",
                           "states 5 GiB exact 12Ψ/N",
                           "products 1.62 s calibrated 2 · Σ m · n · k",
                           "tp 16: its all-reduce leaves the host: +41 %",
                           "* latency of gathers: 568 (440 to 700) devices, here 512; a layer's gather",
                           "forward; moved by replicas 8",
                           "samples: 1024 = tokens / sequence (exact)",
                           "fewer devices: 4194304 tokens a batch",
                           "4096 4 s 1.50M 50.0 % latency of gathers"})
    EXPECT_THAT(on_one_line(text), HasSubstr(part));
  plan.model.name = std::string(300, 'x'), plan.cluster.name = std::string(300, 'y');
  for (int i = 0; i < 40; ++i) plan.missing += "lacks 3.1 GiB at tp 8, ";
  plan.nearest = plan.top[1], plan.top.clear();
  const std::string nothing = to_text(plan);
  EXPECT_LE(widest(nothing), 100U) << nothing;
  EXPECT_THAT(nothing, HasSubstr("No layout fits: lacks 3.1 GiB"));
  EXPECT_THAT(nothing, HasSubstr("The nearest\n  zero1, replicas 8"));
  EXPECT_EQ(widest("Ψ·\n"), 2U);  // the comparison counts characters
  EXPECT_EQ(widest(std::string(101, 'x')), 101U);
}

TEST(PlanText, CountsOneInTheSingular) {
  EXPECT_EQ(unit_of(440, "data ranks"), "data ranks");
  EXPECT_EQ(unit_of(1, "data ranks"), "data rank");
  EXPECT_EQ(unit_of(1, "micro-batches of a data rank"), "micro-batch of a data rank");
  EXPECT_EQ(unit_of(1, "ranks that share parameters"), "rank that shares parameters");
  EXPECT_EQ(unit_of(1, "hidden size"), "hidden size");
  Plan plan = filled();
  plan.laws[0].unit = "data ranks", plan.laws[0].at = {1, 1, 1, Origin::kExact};
  EXPECT_THAT(on_one_line(to_text(plan)), HasSubstr("1 data rank, here"));
}

TEST(PlanText, HasTrials) {
  ProgramRun run;
  run.seconds_of_step = 2.5, run.peak_bytes = 10 * kGiB;
  const Plan plan = filled();
  Trials trials{
      .layouts = {{.planned = plan.top[0], .run = run},
                  {.planned = plan.top[1], .why_not = "8 cores; here are 2"}},
      .largest = {"zero3, dp 2", 24, 20, {{1, true}, {32, false}}, "micro-batch 25: no answer in 300 s"}};
  const std::string text = to_text(trials);
  EXPECT_LE(widest(text), 100U) << text;
  for (const char* part : {"3.25 s (2.93 s to 3.58 s) predicted, 2.5 s measured (+30.0 %)",
                           "8 GiB predicted, 10 GiB measured (-20.0 %)", "not run: 8 cores; here are 2",
                           "at least 24 measured, 20 predicted"})
    EXPECT_THAT(on_one_line(text), HasSubstr(part));
  EXPECT_THAT(to_text(Trials{}), Not(HasSubstr("largest")));
}

TEST(PlanJson, HasTheNumbersOfThePlan) {
  const Plan plan = filled();
  const auto [json, problem] = parse_json(to_json(plan));
  ASSERT_EQ(problem, "");
  EXPECT_EQ(json["model"]["parameters"], plan.model.parameters());
  EXPECT_EQ(json["cluster"]["hosts"], 64);
  EXPECT_EQ(json["cluster"]["device"]["peak"], (nlohmann::json{{"bfloat16", 989e12}}));
  EXPECT_EQ(json["cluster"]["links"][1]["origin"], "assumed");
  EXPECT_EQ(json["work"]["samples"], 1024);
  EXPECT_EQ(json["top"].size(), 2U);
  const auto& best = json["top"][0];
  EXPECT_EQ(best["layout"], to_text(plan.top[0].candidate));
  EXPECT_EQ(best["candidate"]["tp"], 8);
  EXPECT_EQ(best["candidate"]["strategy"], "zero3");
  EXPECT_EQ(best["memory"]["total"], 8 * kGiB);
  EXPECT_EQ(best["memory"]["kept"], 7 * kGiB);
  EXPECT_EQ(best["step"]["hidden"]["reduce"], 0.125);
  EXPECT_EQ(
      best["seconds"],
      (nlohmann::json{{"value", 3.25}, {"low", 0.9 * 3.25}, {"high", 1.1 * 3.25}, {"origin", "fitted"}}));
  EXPECT_EQ(best["step_parts"][0]["number"]["origin"], "calibrated");
  EXPECT_EQ(json["top"][1]["candidate"]["schedule"], "interleaved");
  EXPECT_EQ(json["neighbours"][1]["seconds"], nullptr);
  EXPECT_EQ(json["laws"][0]["at"]["value"], 568);
  EXPECT_EQ(json["scaling"][1]["best"]["seconds"]["value"], 4);
  EXPECT_EQ(json["nearest"], nullptr);
  EXPECT_EQ(json["warnings"], plan.warnings);
  EXPECT_FALSE(json.contains("tried"));
  EXPECT_EQ(to_json(plan), to_json(filled()));
  Plan other = filled();  // the comparison can fail
  other.top[0].candidate.tp = 4;
  EXPECT_NE(to_json(plan), to_json(other));
}

TEST(PlanJson, HasTrialsAndNoNumberThatIsNone) {
  Plan plan = filled();
  plan.laws[0].at.value = std::numeric_limits<double>::infinity();
  plan.model.name = "\xff\xfe";
  ProgramRun run;
  run.seconds_of_step = 2.5;
  const Trials trials{
      .layouts = {{.planned = plan.top[0], .run = run}, {.planned = plan.top[1], .why_not = "no"}},
      .largest = {"zero3", 24, 20, {{32, false}}}};
  const auto [json, problem] = parse_json(to_json(plan, &trials));
  ASSERT_EQ(problem, "");
  EXPECT_EQ(json["laws"][0]["at"]["value"], nullptr);
  EXPECT_EQ(json["tried"][0]["measured_seconds"], 2.5);
  EXPECT_EQ(json["tried"][1]["measured_seconds"], nullptr);
  EXPECT_EQ(json["tried"][1]["why_not"], "no");
  EXPECT_EQ(json["largest_micro_batch"]["tried"][0], (nlohmann::json{{"micro_batch", 32}, {"fits", false}}));
}

}  // namespace
}  // namespace isograd::planner
