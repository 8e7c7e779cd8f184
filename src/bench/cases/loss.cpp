// The output projection and its loss, fused and in two operations: time by turns, memory in processes apart.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/waiting.hpp"
#include "bench/bench.hpp"
#include "bench/exchange.hpp"
#include "bench/process_memory.hpp"
#include "isograd/error.hpp"
#include "isograd/loss.hpp"
#include "model/fused.hpp"

namespace isograd {
namespace {

struct LossCase {
  std::string name;
  std::int64_t tokens, hidden, vocabulary;
  bool standard = true;
  bool turns = true;  // false: one run, the one that memory is measured with
};
std::vector<LossCase> loss_cases() {
  std::vector<LossCase> cases = {
      {.name = "tiny", .tokens = 100, .hidden = 32, .vocabulary = 1000, .standard = false},
      {.name = "projection", .tokens = 4096, .hidden = 512, .vocabulary = 32768},
      {.name = "large vocabulary", .tokens = 4096, .hidden = 512, .vocabulary = 128256, .turns = false}};
  // Where fusing begins to pay: what loss.fused = "auto" was decided by.
  for (const std::int64_t tokens : {512, 4096})
    for (const std::int64_t hidden : {192, 512})
      for (const std::int64_t vocabulary : {258, 2048, 8192, 32768})
        cases.push_back({.name = fmt::format("{}x{}x{}", tokens, hidden, vocabulary),
                         .tokens = tokens,
                         .hidden = hidden,
                         .vocabulary = vocabulary,
                         .standard = false});
  return cases;
}
const std::vector<LossCase> kCases = loss_cases();

struct Inputs {
  at::Tensor hidden, weight, targets;
};
Inputs make_inputs(const LossCase& of) {
  at::manual_seed(7);
  Inputs inputs{.hidden = at::randn({of.tokens, of.hidden}),
                .weight = at::randn({of.vocabulary, of.hidden}).mul_(0.05),
                .targets = at::randint(of.vocabulary, {of.tokens}, at::kLong)};
  inputs.hidden.requires_grad_(true), inputs.weight.requires_grad_(true);
  return inputs;
}

enum LossSide : int { kOurs, kLibTorch, kTwoOperations, kSides };
const char* const kNames[] = {"fused", "LibTorch linear + cross_entropy_loss",
                              "isograd linear + cross_entropy_sum"};

at::Tensor loss_of(LossSide side, const Inputs& in) {
  switch (side) {
    case kOurs:
      return linear_cross_entropy_sum(in.hidden, in.weight, in.targets);
    case kLibTorch:
      return at::cross_entropy_loss(at::linear(in.hidden, in.weight), in.targets, {}, at::Reduction::Sum);
    default:
      return cross_entropy_sum(linears(in.hidden, {in.weight}, {at::Tensor()})[0], in.targets);
  }
}

struct LossMeasurement {
  double seconds = 0, loss = 0, hidden_norm = 0, weight_norm = 0;  // the norms of the gradients
  double peak_bytes = 0;
};

// One forward and backward as a training step makes them: the loss is what the backward starts from.
LossMeasurement run_once(LossSide side, const Inputs& inputs) {
  inputs.hidden.mutable_grad().reset(), inputs.weight.mutable_grad().reset();
  const auto start = std::chrono::steady_clock::now();
  const at::Tensor loss = loss_of(side, inputs);
  loss.backward();
  LossMeasurement result;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  result.loss = loss.item<double>();
  result.hidden_norm = inputs.hidden.grad().norm().item<double>();
  result.weight_norm = inputs.weight.grad().norm().item<double>();
  return result;
}

LossMeasurement run_alone(LossSide side, const LossCase& of) {
  run_once(side, make_inputs(kCases.front()));  // code and scratch memory of the libraries
  const Inputs inputs = make_inputs(of);
  std::ofstream("/proc/self/clear_refs")
      << "5";  // the peak starts anew; without it, it began with the inputs
  const double before = status_bytes("bench loss", "VmRSS");
  LossMeasurement result = run_once(side, inputs);
  result.peak_bytes = status_bytes("bench loss", "VmHWM") - before;
  return result;
}

// In a process of its own, so that no allocator's past counts.
LossMeasurement run_in_child(LossSide side, const LossCase& of) {
  int ends[2];
  if (pipe(ends) != 0)
    throw ConfigError({.where = "bench loss",
                       .found = std::string("no pipe: ") + std::strerror(errno),
                       .expected = "file descriptors",
                       .action = "Raise the limit of open files"});
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    int status = 1;
    try {
      const LossMeasurement result = run_alone(side, of);
      if (write(ends[1], &result, sizeof result) == sizeof result) status = 0;
    } catch (const std::exception& error) {
      fmt::print(stderr, "{}: {}\n", kNames[side], error.what());
    }
    _exit(status);
  }
  close(ends[1]);
  LossMeasurement result;
  const bool whole = child > 0 && read(ends[0], &result, sizeof result) == sizeof result;
  close(ends[0]);
  int status = 0;
  if (child > 0) waitpid(child, &status, 0);
  if (!whole)
    throw ConfigError(
        {.where = "bench loss",
         .found = fmt::format("'{}' of '{}' ended early with status {}", kNames[side], of.name, status),
         .expected = "a forward and a backward",
         .action = "See its message; status 9 is the kernel's when memory ran out"});
  return result;
}

struct Result {
  LossMeasurement alone[kSides];
  double seconds[kSides] = {}, spread[kSides] = {};  // median, (third − first quartile) / median
  std::size_t turns = 0;
};

double worst_difference(const Result& result) {
  double worst = 0;
  const LossMeasurement& ours = result.alone[kOurs];
  for (const LossMeasurement& peer : {result.alone[kLibTorch], result.alone[kTwoOperations]})
    for (const auto& [a, b] : {std::pair{ours.loss, peer.loss},
                               {ours.hidden_norm, peer.hidden_norm},
                               {ours.weight_norm, peer.weight_norm}})
      worst = std::fmax(worst, std::isfinite(a) ? std::abs(a - b) / std::abs(b) : INFINITY);
  return worst;
}

void take_turns(const LossCase& of, double seconds, Result& result) {
  constexpr std::size_t kFewest = 3;
  std::vector<double> times[kSides];
  if (!of.turns) {
    for (int side = 0; side < kSides; ++side) result.seconds[side] = result.alone[side].seconds;
    return;
  }
  const Inputs inputs = make_inputs(of);
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  // A B C, C B A, ...
  while (result.turns < kFewest || elapsed() < seconds) {
    for (int i = 0; i < kSides; ++i) {
      const int side = result.turns % 2 == 0 ? i : kSides - 1 - i;
      times[side].push_back(run_once(static_cast<LossSide>(side), inputs).seconds);
    }
    ++result.turns;
  }
  for (int side = 0; side < kSides; ++side) {
    result.seconds[side] = quantile(times[side], 0.5);
    result.spread[side] = (quantile(times[side], 0.75) - quantile(times[side], 0.25)) / result.seconds[side];
  }
}

void print(const LossCase& of, const Result& result, double difference) {
  for (int side = 0; side < kSides; ++side)
    fmt::print("{:<18} {:<38} {:>8.3f} s {:>5.1f}%  {:>8.0f} MiB {:>6.1f}%   {:>6.2f}\n",
               side == 0 ? of.name : "", kNames[side], result.seconds[side], 100 * result.spread[side],
               result.alone[side].peak_bytes / (1 << 20),
               100 * result.alone[kOurs].peak_bytes / result.alone[side].peak_bytes,
               result.seconds[side] / result.seconds[kOurs]);
  if (difference > 1e-4)
    fmt::print("  NOT COMPARABLE: losses or gradients differ by {:.2g} (1e-4 allowed)\n", difference);
  std::fflush(stdout);
}

}  // namespace

std::vector<std::string> bench_loss_cases() {
  std::vector<std::string> names;
  for (const LossCase& of : kCases) names.push_back(of.name);
  return names;
}

int bench_loss(const BenchLossOptions& options) {
  at::set_num_threads(1);
  std::vector<LossCase> cases;
  for (const LossCase& of : kCases)
    if (options.cases.empty()
            ? of.standard
            : std::find(options.cases.begin(), options.cases.end(), of.name) != options.cases.end())
      cases.push_back(of);
  // All children first: after a backward of its own this process's children could make none.
  std::vector<Result> results(cases.size());
  for (std::size_t i = 0; i < cases.size(); ++i)
    for (int side = 0; side < kSides; ++side)
      results[i].alone[side] = run_in_child(static_cast<LossSide>(side), cases[i]);
  fmt::print(
      "output projection and cross entropy, forward and backward, fp32, one thread\n"
      "{:<18} {:<38} {:>10} {:>6}  {:>12} {:>7}   {:>6}\n",
      "case", "", "median", "spread", "peak memory", "ours /", "times ours");
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  bool comparable = true;
  Waiting waiting("case", std::ssize(cases), options.seconds);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const LossCase& of = cases[i];
    Result& result = results[i];
    waiting.begin(of.name);
    take_turns(of, options.seconds, result);
    waiting.end();
    const double difference = worst_difference(result);
    comparable = comparable && difference <= 1e-4;
    print(of, result, difference);
    for (int side = kLibTorch; side < kSides; ++side) {
      const auto record = [&](const char* unit, double ours, double peer, double ratio) {
        records.push_back({{"bench", "loss"},
                           {"case", of.name},
                           {"ours", ours},
                           {"peer", peer},
                           {"peer_name", kNames[side]},
                           {"unit", unit},
                           {"ratio", ratio}});
      };
      const auto tokens = static_cast<double>(of.tokens);
      record("tokens/s", tokens / result.seconds[kOurs], tokens / result.seconds[side],
             result.seconds[side] / result.seconds[kOurs]);
      const double ours = result.alone[kOurs].peak_bytes / (1 << 20),
                   peer = result.alone[side].peak_bytes / (1 << 20);
      record("MiB", ours, peer, peer / ours);
    }
  }
  if (!options.json.empty()) write_file(options.json, records.dump(2) + "\n");
  return comparable ? 0 : 1;
}

}  // namespace isograd
