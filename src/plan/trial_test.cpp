// Trials with a program that only says how long it took and how much it needed, and children that fail.
#include "plan/trial.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "base/files.hpp"
#include "plan/problem.hpp"
#include "train/metrics.hpp"

namespace isograd::planner {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

constexpr double kMost = 8e9;

Plan plan_of(std::vector<Candidate> candidates) {
  Plan plan{.model = {.layers = 2,
                      .hidden = 64,
                      .heads = 2,
                      .key_value_heads = 2,
                      .head_dim = 32,
                      .feed_forward = 96,
                      .vocabulary = 258},
            .cluster = {.name = "tested", .devices = 1, .per_host = 1, .host_memory = true},
            .work = {.tokens = 64 * 16, .sequence = 64, .precision = Precision::kFloat32}};
  plan.cluster.device.memory = 64 << 20, plan.cluster.device.memory_bandwidth = 1e10;
  for (const Candidate& candidate : candidates)
    plan.top.push_back({.candidate = candidate, .bytes = {1e6, 1e6, 1e6}});
  return plan;
}

// A run whose steps take `seconds` and whose ranks need `megabytes`.
ProgramRun told(const std::vector<std::string>& arguments, const std::vector<double>& seconds,
                double megabytes) {
  for (const std::string& argument : arguments)
    if (argument.starts_with("run.directory=")) {
      const fs::path folder = argument.substr(argument.find('=') + 1);
      fs::create_directories(folder);
      std::string rows;
      for (std::size_t i = 0; i < seconds.size(); ++i)
        rows += to_json_line({.step = static_cast<std::int64_t>(i) + 1, .seconds = seconds[i]});
      write_file(folder / "metrics.jsonl", rows);
    }
  return {.output = fmt::format("MB  parameters\nrank 0  1.00 2.00 3.00 4.00 10.00 1.00 {:.2f} 9.00\n"
                                "rank 1  1.00 2.00 3.00 4.00 10.00 1.00 0.00 9.00\nformula 1 2 3 4 1e9\n",
                                megabytes - 11)};
}

std::int64_t micro_batch_of(const std::vector<std::string>& arguments) {
  return load_config(arguments[1]).batch.packs_per_micro_batch;
}

class PlanTrials : public ::testing::Test {
 protected:
  void SetUp() override { fs::create_directories(folder_); }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path folder_ = fs::temp_directory_path() / ("isograd_trials_" + std::to_string(::getpid()));
};

TEST_F(PlanTrials, TakeTurnsAndGiveTheMedian) {
  const Plan plan = plan_of({{.micro_batch = 4, .micro_batches = 4},
                             {.micro_batch = 2, .micro_batches = 8},
                             {.micro_batch = 8, .micro_batches = 2}});
  std::vector<std::int64_t> order;
  const auto run = [&](const std::vector<std::string>& arguments, double, double) {
    order.push_back(micro_batch_of(arguments));
    const double round = static_cast<double>(order.size()) / 2;  // 0.5, 1, 1.5, ...
    return told(arguments, {100, round, round, round}, order.size() == 3 ? 40 : 30);
  };
  const auto tried = try_layouts(plan, 2, run, folder_);
  EXPECT_EQ(order, (std::vector<std::int64_t>{4, 2, 2, 4, 4, 2}));
  ASSERT_EQ(tried.size(), 2U);
  EXPECT_EQ(tried[0].run->seconds_of_step, 2);    // of 0.5, 2, 2.5
  EXPECT_EQ(tried[1].run->seconds_of_step, 1.5);  // of 1, 1.5, 3
  EXPECT_EQ(tried[0].run->peak_bytes, 30e6);
  EXPECT_EQ(tried[1].run->peak_bytes, 40e6);
}

TEST_F(PlanTrials, SayWhyALayoutDoesNotRun) {
  const auto ranks = static_cast<int>(std::thread::hardware_concurrency()) + 1;
  Plan plan = plan_of({{.ranks = ranks, .replicas = ranks}, {}, {.micro_batch = 2}});
  plan.top[1].bytes.value = 1e15;
  const auto failing = [](const std::vector<std::string>&, double, double) {
    return ProgramRun{.status = 2, .output = "isograd: ConfigError: no such corpus\n"};
  };
  const auto tried = try_layouts(plan, 1, failing, folder_);
  ASSERT_EQ(tried.size(), 3U);
  EXPECT_THAT(tried[0].why_not,
              HasSubstr(fmt::format("{} cores, one for each rank; here are {}", ranks, ranks - 1)));
  EXPECT_THAT(tried[1].why_not, HasSubstr("GiB for all ranks; here are"));
  EXPECT_EQ(tried[2].why_not, "status 2: isograd: ConfigError: no such corpus");
  for (const Tried& one : tried) EXPECT_FALSE(one.run);
  plan.cluster.host_memory = false, plan.top[0].candidate.ranks = 1 << 20;
  EXPECT_THAT(try_layouts(plan, 1, failing, folder_)[0].why_not, HasSubstr("GPUs; here are"));
  EXPECT_EQ(largest_micro_batch(plan_of({{.ranks = ranks, .replicas = ranks}}), failing, folder_).layout, "");
}

TEST_F(PlanTrials, FindTheLargestMicroBatch) {
  const Plan plan = plan_of({{.micro_batch = 4, .micro_batches = 4}});
  for (const std::int64_t most : {0, 1, 2, 3, 21, 64, 100}) {
    const auto by_memory = [&](const std::vector<std::string>& arguments, double, double most_bytes) {
      EXPECT_GE(most_bytes, plan.cluster.device.memory);
      const std::int64_t size = micro_batch_of(arguments);
      EXPECT_EQ(load_config(arguments[1]).batch.packs_per_step, size);  // one micro-batch a step
      return told(arguments, {1, 1}, size <= most ? 60 : 70);           // of 67.1
    };
    const auto by_failing = [&](const std::vector<std::string>& arguments, double, double) {
      if (micro_batch_of(arguments) > most) return ProgramRun{.status = 137, .out_of_memory = true};
      return told(arguments, {1, 1}, 60);
    };
    for (const RunProgram& run : {RunProgram(by_memory), RunProgram(by_failing)}) {
      const LargestMicroBatch found = largest_micro_batch(plan, run, folder_);
      EXPECT_EQ(found.measured, most);
      EXPECT_EQ(found.ended_early, "");
      EXPECT_LE(found.tried.size(), 16U);
    }
  }
  const auto slow = [&](const std::vector<std::string>& arguments, double, double) {
    if (micro_batch_of(arguments) > 8) return ProgramRun{.status = 137, .late = true};
    return told(arguments, {1, 1}, 20);
  };
  const LargestMicroBatch found = largest_micro_batch(plan, slow, folder_);
  EXPECT_EQ(found.measured, 8);
  EXPECT_THAT(found.ended_early, HasSubstr("micro-batch 16: no answer"));
  const auto of_short_corpus = [&](const std::vector<std::string>& arguments, double, double) {
    const ProgramRun run = told(arguments, {1, 1}, 20);
    const std::string folder =
        arguments[std::ranges::find_if(
                      arguments, [](const std::string& one) { return one.starts_with("run.directory="); }) -
                  arguments.begin()]
            .substr(14);
    write_file(
        fs::path(folder) / "metrics.jsonl",
        to_json_line({.step = 1, .tokens = 64 * std::min<std::int64_t>(micro_batch_of(arguments), 11)}));
    return run;
  };
  const LargestMicroBatch short_of = largest_micro_batch(plan, of_short_corpus, folder_);
  EXPECT_EQ(short_of.measured, 8);
  EXPECT_THAT(short_of.ended_early, HasSubstr("the corpus has 704 of the 1024 tokens"));
  // The predicted one is the largest that fits: the next one does not.
  const auto total = [&](std::int64_t size) {
    Work work = plan.work;
    work.tokens = static_cast<double>(64 * size);
    return memory_of(plan.model, plan.cluster, work, {.micro_batch = size}).total();
  };
  EXPECT_LE(total(found.predicted), plan.cluster.device.memory);
  EXPECT_GT(total(found.predicted + 1), plan.cluster.device.memory);
}

TEST(PlanChildren, EndAsTheyDo) {
  const auto shell = [](const std::string& script, double seconds = 20) {
    return run_program({"/bin/sh", "-c", script}, seconds, kMost);
  };
  const ProgramRun good = shell("echo one; echo two >&2; cat; exit 3");
  EXPECT_EQ(good.status, 3);
  EXPECT_THAT(good.output, HasSubstr("one\ntwo\n"));
  EXPECT_FALSE(good.out_of_memory || good.late);
  EXPECT_TRUE(shell("kill -9 $$").out_of_memory);
  EXPECT_TRUE(shell("echo DefaultCPUAllocator: can\\'t allocate memory; exit 4").out_of_memory);
  EXPECT_FALSE(shell("echo out of memory").out_of_memory);  // it did not fail
  EXPECT_EQ(shell("ulimit -d").output, fmt::format("{:.0f}\n", kMost / 1024));
  const auto begin = std::chrono::steady_clock::now();
  const ProgramRun late = shell("sleep 60", 0.2);
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 20);
  EXPECT_TRUE(late.late);
  EXPECT_FALSE(late.out_of_memory);
  EXPECT_EQ(run_program({"/no/such/program"}, 5, kMost).status, 127);
  EXPECT_GT(shell("yes | head -c 1000000").output.size(), 60000U);
}

}  // namespace
}  // namespace isograd::planner
