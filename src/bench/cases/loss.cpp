// `isograd bench loss`: the output projection and its loss, fused and in two operations, on one thread.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "bench/runner.hpp"
#include "isograd/loss.hpp"
#include "layout/cost/meter.hpp"
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
    std::vector<LossCase> made = {{"tiny", 100, 32, 1000, false},
                                  {"projection", 4096, 512, 32768},
                                  {"large vocabulary", 4096, 512, 128256, true, false}};
    // Where fusing begins to pay: loss.fused = "auto" was decided by these.
    for (const std::int64_t tokens : {512, 4096})
      for (const std::int64_t hidden : {192, 512})
        for (const std::int64_t vocabulary : {258, 2048, 8192, 32768})
          made.push_back(
              {fmt::format("{}x{}x{}", tokens, hidden, vocabulary), tokens, hidden, vocabulary, false});
    return made;
  }();
  return all;
}

struct LossInputs {
  at::Tensor hidden, weight, targets;

  explicit LossInputs(const LossCase& of) {
    at::manual_seed(7);
    hidden = at::randn({of.tokens, of.hidden}).requires_grad_(true);
    weight = at::randn({of.vocabulary, of.hidden}).mul_(0.05).requires_grad_(true);
    targets = at::randint(of.vocabulary, {of.tokens}, at::kLong);
  }
};

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

struct LossRun {
  double seconds = 0, peak_bytes = 0;
  std::vector<double> values{};  // the loss and the norms of the gradients
};

// One forward and backward as a training step makes them: the loss is what the backward starts from. Memory
// is what LibTorch's allocator had at its peak on top of the inputs.
LossRun run_once(const LossSide& side, const LossInputs& inputs) {
  inputs.hidden.mutable_grad().reset(), inputs.weight.mutable_grad().reset();
  const MemoryMeter meter;
  LossRun run;
  at::Tensor loss;
  run.seconds = seconds_of([&] {
    loss = side.loss(inputs);
    loss.backward();
  });
  run.peak_bytes = static_cast<double>(meter.peak());
  for (const at::Tensor& value : {loss, inputs.hidden.grad().norm(), inputs.weight.grad().norm()})
    run.values.push_back(value.item<double>());
  return run;
}

void bench_loss(Bench& bench) {
  at::set_num_threads(1);
  MemoryMeter::install();
  const auto cases = chosen(loss_cases(), bench.options.cases);
  bench.say("output projection and cross entropy, forward and backward, fp32, one thread\n");
  bench.expect(std::ssize(cases), bench.options.seconds);
  for (const LossSide& side : kLossSides) run_once(side, LossInputs(loss_cases().front()));  // warms up
  for (const LossCase& of : cases) {
    bench.begin(of.name);
    const LossInputs inputs(of);
    std::vector<LossRun> runs;
    std::vector<std::vector<double>> times;
    std::vector<std::function<double()>> sides;
    for (const LossSide& side : kLossSides) {
      runs.push_back(run_once(side, inputs));
      times.push_back({runs.back().seconds});
      sides.push_back([&] { return run_once(side, inputs).seconds; });
    }
    if (of.turns) times = race(sides, until(bench.options.seconds));
    bench.end();
    const double ours = median(times[0]), our_memory = runs[0].peak_bytes;
    TextRows rows{{of.name, "median", "spread", "peak memory", "ours /", "times ours"}};
    double difference = 0;
    for (std::size_t side = 0; side < std::size(kLossSides); ++side) {
      const double seconds = median(times[side]), memory = runs[side].peak_bytes;
      const char* name = kLossSides[side].name;
      rows.push_back({name, fixed(seconds, 3) + " s", spread(times[side]), fixed(memory / kMiB, 0) + " MiB",
                      fixed(100 * our_memory / memory, 1) + "%", fixed(seconds / ours)});
      if (side == 0) continue;
      const auto tokens = static_cast<double>(of.tokens);
      bench.record(of.name, tokens / ours, tokens / seconds, name, "tokens/s", seconds / ours);
      bench.record_less(of.name, our_memory / kMiB, memory / kMiB, name, "MiB");
      difference = std::max(difference, relative_difference(runs[0].values, runs[side].values));
    }
    bench.say(rows);
    if (difference > 1e-4)
      bench.refuse_comparison(fmt::format("losses or gradients differ by {:.2g} (1e-4 allowed)", difference));
  }
}

}  // namespace

BenchVerb loss_verb() {
  return verb("loss",
              "Time and memory of the fused linear cross entropy, compared with LibTorch's two operations",
              kSpeedOrMemory + status("the losses or gradients"), {.seconds = 24}, {}, bench_loss,
              {cases("sizes to measure", names_of(loss_cases()))}, ", for each case", nullptr);
}

}  // namespace isograd
