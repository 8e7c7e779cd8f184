// Layouts in child processes: steps and peaks as they are, and the largest micro-batch.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <sstream>
#include <thread>

#include "base/child.hpp"
#include "base/files.hpp"
#include "plan/problem.hpp"
#include "plan/trial.hpp"
#include "train/device.hpp"
#include "train/metrics.hpp"

namespace isograd::planner {
namespace {

constexpr int kTurns = 3, kStepsOfTurn = 4;  // the first step of a turn makes buffers and is left out
constexpr double kMostSecondsOfTurn = 300;
constexpr std::size_t kKeptOutput = 1 << 16;
// A process has them with LibTorch, before it has a model. The meter, not this limit, says what fits.
constexpr double kProgramBytes = 1 << 30;
constexpr std::int64_t kMostMicroBatch = 1 << 20;

// Why this machine cannot run it; empty: it can.
std::string lacks_here(const Cluster& cluster, const Planned& planned) {
  const int ranks = planned.candidate.ranks;
  if (!cluster.host_memory) {
    const FoundGpus gpus = find_gpus();
    return gpus.count >= ranks ? ""
                               : fmt::format("{} GPUs; here are {} ({})", ranks, gpus.count, gpus.text());
  }
  if (const unsigned cores = std::thread::hardware_concurrency(); static_cast<unsigned>(ranks) > cores)
    return fmt::format("{} cores, one for each rank; here are {}", ranks, cores);
  const double all = planned.bytes.value * ranks,
               here = double(::sysconf(_SC_PHYS_PAGES)) * double(::sysconf(_SC_PAGESIZE));
  return all <= here ? ""
                     : fmt::format("{:.1f} GiB for all ranks; here are {:.1f}", all / 0x1p30, here / 0x1p30);
}

// The largest of its ranks, from the table of `train --memory`, in megabytes: total, other and in passing.
double peak_of(const std::string& output) {
  std::istringstream lines(output);
  double most = 0;
  for (std::string line; std::getline(lines, line);) {
    int rank = 0;
    std::array<double, 7> at{};
    if (std::sscanf(line.c_str(), "rank %d %lf %lf %lf %lf %lf %lf %lf", &rank, &at[0], &at[1], &at[2],
                    &at[3], &at[4], &at[5], &at[6]) == 8)
      most = std::max(most, 1e6 * (at[4] + at[5] + at[6]));
  }
  return most;
}

// The first line of an error, or the last of all.
std::string told_by(const std::string& output) {
  std::istringstream lines(output);
  std::string told = "no output";
  for (std::string line; std::getline(lines, line) && !told.starts_with("isograd: ");)
    if (!line.empty()) told = line;
  return told;
}

class Turns {
 public:
  Turns(const RunProgram& run, const fs::path& folder) : run_(run), folder_(folder) {}

  // One run of `steps` steps; its times are added to `seconds`. A layout that only a plan can have: status 2.
  ProgramRun operator()(const Plan& plan, const Planned& planned, int steps, std::vector<double>& seconds) {
    const fs::path file = folder_ / "plan.toml", results = folder_ / "run";
    try {
      write_file(file, to_toml(plan, planned));
    } catch (const ConfigError& error) {
      return {.status = exit_status(error), .output = error.what()};
    }
    std::vector<std::string> arguments = {"train",    file.string(),
                                          "--ranks",  std::to_string(planned.candidate.ranks),
                                          "--memory", "--overwrite"};
    for (const std::string& set :
         {"run.directory=" + results.string(), fmt::format("train.steps={}", steps),
          std::string("run.json_log="), std::string("run.peak_tflops=1"), std::string("verify.at_end=false"),
          std::string("verify.every=0"), std::string("verify.checksums_every=0"),
          std::string("checkpoint.every=0"), std::string("checkpoint.resume="),
          std::string("data.validation_fraction=0"), std::string("sample.prompt=")})
      arguments.insert(arguments.end(), {"--set", set});
    ProgramRun done = run_(arguments, kMostSecondsOfTurn, plan.cluster.device.memory + kProgramBytes);
    if (done.status == 0) {
      for (const MetricRow& row : read_metrics(results / "metrics.jsonl")) {
        if (row.seconds && row.step > 1) seconds.push_back(*row.seconds);
        if (row.tokens) tokens_ = double(*row.tokens);
      }
      done.peak_bytes = std::max(done.peak_bytes, peak_of(done.output));
    }
    fs::remove_all(results);
    return done;
  }

  // The last step has them, as it has the memory: where an epoch ends, the packs that are left.
  double tokens() const { return tokens_; }

 private:
  const RunProgram& run_;
  fs::path folder_;
  double tokens_ = 0;
};

std::string why_failed(const ProgramRun& run) {
  if (run.status == 0) return "";
  if (run.late) return fmt::format("no answer in {:.0f} s", kMostSecondsOfTurn);
  return run.out_of_memory ? "out of memory" : fmt::format("status {}: {}", run.status, told_by(run.output));
}

// The plan of a batch in which every data rank has micro-batches of that size: one, in a pipeline as many as
// the plan's.
std::pair<Plan, Planned> with_micro_batch(const Plan& plan, const Planned& planned, std::int64_t size) {
  std::pair<Plan, Planned> made{plan, planned};
  Candidate& candidate = made.second.candidate;
  candidate.micro_batch = size;
  if (candidate.pp == 1) candidate.micro_batches = 1, candidate.reduce_once = false;
  made.first.work.tokens =
      double(size * candidate.data_ranks() * candidate.micro_batches) * double(plan.work.sequence);
  return made;
}

template <class Fits>
std::int64_t largest_that(const Fits& fits) {
  std::int64_t good = 0, bad = 1;
  while (bad <= kMostMicroBatch && fits(bad)) good = bad, bad *= 2;
  while (bad <= kMostMicroBatch && bad - good > 1) {
    const std::int64_t between = good + (bad - good) / 2;
    (fits(between) ? good : bad) = between;
  }
  return good;
}

}  // namespace

ProgramRun run_program(const std::vector<std::string>& command, double most_seconds, double most_bytes) {
  const ChildRun child = run_child(command, most_seconds, most_bytes, kKeptOutput);
  const auto says = [&](const char* words) { return child.output.find(words) != std::string::npos; };
  const bool refused =
      says("out of memory") || says("can't allocate memory") || says("Cannot allocate memory");
  return {.status = child.status,
          .out_of_memory = child.status != 0 && !child.late && (child.status == 128 + SIGKILL || refused),
          .late = child.late,
          .output = child.output};
}

std::vector<Tried> try_layouts(const Plan& plan, std::size_t count, const RunProgram& run,
                               const fs::path& folder) {
  std::vector<Tried> all;
  std::size_t fit = 0;
  for (const Planned& planned : plan.top) {
    if (fit == count) break;
    all.push_back({.planned = planned, .why_not = lacks_here(plan.cluster, planned)});
    fit += all.back().why_not.empty();
  }
  Turns turn(run, folder);
  std::vector<std::vector<double>> seconds(all.size());
  for (int round = 0; round < kTurns; ++round)
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::size_t at = round % 2 == 0 ? i : all.size() - 1 - i;  // nobody is always first
      Tried& tried = all[at];
      if (!tried.why_not.empty()) continue;
      ProgramRun done = turn(plan, tried.planned, kStepsOfTurn, seconds[at]);
      tried.why_not = why_failed(done);
      if (tried.run) done.peak_bytes = std::max(done.peak_bytes, tried.run->peak_bytes);
      if (tried.why_not.empty()) tried.run = std::move(done);
    }
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!all[i].why_not.empty()) all[i].run.reset();
    if (!all[i].run || seconds[i].empty()) continue;
    std::ranges::nth_element(seconds[i], seconds[i].begin() + std::ssize(seconds[i]) / 2);
    all[i].run->seconds_of_step = seconds[i][seconds[i].size() / 2];
  }
  return all;
}

LargestMicroBatch largest_micro_batch(const Plan& plan, const RunProgram& run, const fs::path& folder) {
  LargestMicroBatch found;
  const auto planned = std::ranges::find_if(
      plan.top, [&](const Planned& one) { return lacks_here(plan.cluster, one).empty(); });
  if (planned == plan.top.end()) return found;
  found.layout = to_text(planned->candidate);
  const double memory = plan.cluster.device.memory;
  found.predicted = largest_that([&](std::int64_t size) {
    const auto [with, candidate] = with_micro_batch(plan, *planned, size);
    return memory_of(with.model, with.cluster, with.work, candidate.candidate).total() <= memory;
  });
  Turns turn(run, folder);
  found.measured = largest_that([&](std::int64_t size) {
    if (!found.ended_early.empty()) return false;
    const auto [with, candidate] = with_micro_batch(plan, *planned, size);
    std::vector<double> seconds;
    const ProgramRun done = turn(with, candidate, /*steps=*/2, seconds);
    if (done.status != 0 && !done.out_of_memory) {
      found.ended_early = fmt::format("micro-batch {}: {}", size, why_failed(done));
      return false;
    }
    const bool fits = done.status == 0 && done.peak_bytes + plan.cluster.reserve <= memory;
    constexpr double kFull = 0.95;  // packs may end in pads
    if (fits && turn.tokens() > 0 && turn.tokens() < kFull * with.work.tokens) {
      found.ended_early =
          fmt::format("micro-batch {}: the corpus has {:.0f} of the {:.0f} tokens of such a step", size,
                      turn.tokens(), with.work.tokens);
      return false;
    }
    found.tried.emplace_back(size, fits);
    return fits;
  });
  return found;
}

}  // namespace isograd::planner
