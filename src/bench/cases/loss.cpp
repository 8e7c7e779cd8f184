// `isograd bench loss`: the output projection and its loss, fused and in two operations, on one thread: time
// by turns in one process, memory in a process of its own.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "base/refuse.hpp"
#include "bench/cases/verbs.hpp"
#include "bench/runner.hpp"
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
const std::vector<LossCase>& loss_cases() {
  static const std::vector<LossCase> all = [] {
    std::vector<LossCase> cases = {{"tiny", 100, 32, 1000, false},
                                   {"projection", 4096, 512, 32768},
                                   {"large vocabulary", 4096, 512, 128256, true, false}};
    // Where fusing begins to pay: loss.fused = "auto" was decided by these.
    for (const std::int64_t tokens : {512, 4096})
      for (const std::int64_t hidden : {192, 512})
        for (const std::int64_t vocabulary : {258, 2048, 8192, 32768})
          cases.push_back(
              {fmt::format("{}x{}x{}", tokens, hidden, vocabulary), tokens, hidden, vocabulary, false});
    return cases;
  }();
  return all;
}

struct LossInputs {
  at::Tensor hidden, weight, targets;
};
LossInputs make_inputs(const LossCase& of) {
  at::manual_seed(7);
  return {at::randn({of.tokens, of.hidden}).requires_grad_(true),
          at::randn({of.vocabulary, of.hidden}).mul_(0.05).requires_grad_(true),
          at::randint(of.vocabulary, {of.tokens}, at::kLong)};
}

struct LossSide {
  const char* name;
  at::Tensor (*loss)(const LossInputs&);
};
const LossSide kLossSides[] = {
    {"fused",
     [](const LossInputs& in) { return linear_cross_entropy_sum(in.hidden, in.weight, in.targets); }},
    {"LibTorch linear + cross_entropy_loss",
     [](const LossInputs& in) {
       return at::cross_entropy_loss(at::linear(in.hidden, in.weight), in.targets, {}, at::Reduction::Sum);
     }},
    {"isograd linear + cross_entropy_sum", [](const LossInputs& in) {
       return cross_entropy_sum(linears(in.hidden, {in.weight}, {at::Tensor()})[0], in.targets);
     }}};
constexpr std::size_t kLosses = std::size(kLossSides);

struct LossRun {
  double seconds = 0, loss = 0, hidden_norm = 0, weight_norm = 0;  // the norms of the gradients
  double peak_bytes = 0;
};

// One forward and backward as a training step makes them: the loss is what the backward starts from.
LossRun run_once(const LossSide& side, const LossInputs& inputs) {
  inputs.hidden.mutable_grad().reset(), inputs.weight.mutable_grad().reset();
  LossRun run;
  at::Tensor loss;
  run.seconds = seconds_of([&] {
    loss = side.loss(inputs);
    loss.backward();
  });
  run.loss = loss.item<double>();
  run.hidden_norm = inputs.hidden.grad().norm().item<double>();
  run.weight_norm = inputs.weight.grad().norm().item<double>();
  return run;
}

// In a process of its own, so that no allocator's past counts.
LossRun run_in_child(const LossSide& side, const LossCase& of) {
  int ends[2];
  if (pipe(ends) != 0)
    refuse("bench loss", std::string("no pipe: ") + std::strerror(errno), "file descriptors",
           "Raise the limit of open files");
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    int status = 1;
    try {
      run_once(side, make_inputs(loss_cases().front()));  // code and scratch memory of the libraries
      const LossInputs inputs = make_inputs(of);
      LossRun run;
      const double peak = peak_growth("loss", [&] { run = run_once(side, inputs); });
      run.peak_bytes = peak;
      if (write(ends[1], &run, sizeof run) == sizeof run) status = 0;
    } catch (const std::exception& error) {
      fmt::print(stderr, "{}: {}\n", side.name, error.what());
    }
    _exit(status);
  }
  close(ends[1]);
  LossRun run;
  const bool whole = child > 0 && read(ends[0], &run, sizeof run) == sizeof run;
  close(ends[0]);
  int status = 0;
  if (child > 0) waitpid(child, &status, 0);
  if (!whole)
    refuse("bench loss", fmt::format("'{}' of '{}' ended early with status {}", side.name, of.name, status),
           "a forward and a backward", "See its message; status 9 is the kernel's when memory ran out");
  return run;
}

}  // namespace

std::vector<std::string> bench_loss_cases() {
  return names_of(loss_cases());
}

void bench_loss(Bench& bench) {
  at::set_num_threads(1);
  const auto cases = chosen(loss_cases(), bench.options.cases);
  // All children first: after a backward of its own this process's children could make none.
  std::vector<std::array<LossRun, kLosses>> alone(cases.size());
  for (std::size_t i = 0; i < cases.size(); ++i)
    for (std::size_t side = 0; side < kLosses; ++side)
      alone[i][side] = run_in_child(kLossSides[side], cases[i]);
  fmt::print(
      "output projection and cross entropy, forward and backward, fp32, one thread\n"
      "{:<18} {:<38} {:>10} {:>6}  {:>12} {:>7}   {:>6}\n",
      "case", "", "median", "spread", "peak memory", "ours /", "times ours");
  bench.expect(std::ssize(cases), bench.options.seconds);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const LossCase& of = cases[i];
    const auto& runs = alone[i];
    bench.begin(of.name);
    std::array<std::vector<double>, kLosses> times;
    if (of.turns) {
      const LossInputs inputs = make_inputs(of);
      by_turns(kLosses, until(bench.options.seconds),
               [&](std::size_t side) { times[side].push_back(run_once(kLossSides[side], inputs).seconds); });
    } else {
      for (std::size_t side = 0; side < kLosses; ++side) times[side] = {runs[side].seconds};
    }
    bench.end();
    const double ours = median(times[0]), our_memory = runs[0].peak_bytes;
    double difference = 0;
    for (std::size_t side = 0; side < kLosses; ++side) {
      const double seconds = median(times[side]), memory = runs[side].peak_bytes;
      fmt::print("{:<18} {:<38} {:>8.3f} s {:>5.1f}%  {:>8.0f} MiB {:>6.1f}%   {:>6.2f}\n",
                 side == 0 ? of.name : "", kLossSides[side].name, seconds, 100 * spread(times[side]),
                 memory / kMiB, 100 * our_memory / memory, seconds / ours);
      if (side == 0) continue;
      const auto tokens = static_cast<double>(of.tokens);
      bench.record(of.name, tokens / ours, tokens / seconds, kLossSides[side].name, "tokens/s",
                   seconds / ours);
      bench.record_less(of.name, our_memory / kMiB, memory / kMiB, kLossSides[side].name, "MiB");
      difference = std::max(
          difference, relative_difference({runs[0].loss, runs[0].hidden_norm, runs[0].weight_norm},
                                          {runs[side].loss, runs[side].hidden_norm, runs[side].weight_norm}));
    }
    if (difference > 1e-4)
      bench.refuse_comparison(fmt::format("losses or gradients differ by {:.2g} (1e-4 allowed)", difference));
    std::fflush(stdout);
  }
}

}  // namespace isograd
