// Whole runs on 8 ranks of three axes at once: each step of SGD is the step of one process that takes
// it by plain code; the run proves its own gradient, and goes on on another mesh.
#include <gtest/gtest.h>

#include "full_tests.hpp"
#include "hybrid_testing.hpp"
#include "train/task.hpp"

namespace isograd::hybrid {
namespace {

namespace fs = std::filesystem;

const std::int64_t kSteps = full_tests() ? 50 : 20;

struct PlainRun {
  std::vector<double> losses{}, norms{};
  Values values{};  // after the last step
};

// SGD with momentum and decay of matrices as its definition has it, on gradients of text_oracle(); the loader
// of one rank.
PlainRun trained_plainly(const RunConfig& config) {
  PlainRun run;
  run_ranks(1, [&](World& world) {
    const auto task = make_task(config, world.group);
    for (const auto& [name, tensor] : task->make_model(at::kDouble)->named())
      run.values.emplace_back(name, tensor.detach().clone());
    const auto loader = task->make_loader(0, 1);
    std::map<std::string, at::Tensor> moved;
    for (std::int64_t step = 0; step < kSteps; ++step) {
      const Wanted wanted = text_oracle(config, {loader->next()}, run.values);
      double squares = 0;
      for (const auto& [name, gradient] : wanted.gradients) squares += gradient.square().sum().item<double>();
      run.losses.push_back(wanted.loss), run.norms.push_back(std::sqrt(squares));
      const double kept = std::min(1.0, config.train.max_norm / (std::sqrt(squares) + 1e-6));
      for (auto& [name, value] : run.values) {
        const auto gradient = wanted.gradients.find(name);
        if (gradient == wanted.gradients.end()) continue;
        at::Tensor move = gradient->second * kept;
        if (value.dim() >= 2) move = move + config.optimizer.adamw.weight_decay * value;
        at::Tensor& momentum = moved[name];
        momentum = momentum.defined() ? config.optimizer.momentum * momentum + move : move;
        value = value - config.schedule.peak * momentum;
      }
    }
  });
  return run;
}

class HybridRuns : public HybridCells {
 protected:
  RunConfig configured(const Cell& cell, const std::string& name) const {
    RunConfig config = config_for(cell);
    config.run.directory = (root_ / name).string();
    config.train.steps = kSteps;
    config.train.evaluate_every = 0;
    config.optimizer.kind = "sgd";
    config.optimizer.momentum = 0.9;
    config.schedule = {.kind = Schedule::Kind::kConstant, .peak = 0.02};
    config.verify.checksums_every = 1;
    return config;
  }
  // With the checks and the proof that `isograd train` makes.
  static Run trained(const RunConfig& config, int ranks) {
    return run(config, ranks, [](World&, TrainerHooks& hooks) {
      hooks.check = [](RunningRun& running) { return check_running(running); };
      hooks.on_finish = [](FinishedRun& finished) -> std::vector<ReportTable> {
        const Verdict verdict = verify_finished(finished);
        if (finished.world.rank != 0) return {};
        EXPECT_TRUE(verdict.passed) << to_text(verdict);
        return {to_table(verdict)};
      };
    });
  }
  static void expect_same(const Run& found, const PlainRun& wanted, std::size_t from,
                          const std::string& where) {
    ASSERT_EQ(found.steps.size() + from, wanted.losses.size()) << where;
    for (std::size_t i = 0; i < found.steps.size(); ++i) {
      const StepReport& report = found.steps[i].report;
      EXPECT_LT(off(report.loss, wanted.losses[from + i]), 1e-9) << where << ", step " << from + i;
      EXPECT_LT(off(report.norm, wanted.norms[from + i]), 1e-9) << where << ", step " << from + i;
    }
    EXPECT_EQ(found.outcomes[0].exit_status(), 0) << where;
    const auto trained = read_hf(found.outcomes[0].checkpoint, at::kDouble);
    double worst = 0;
    for (const auto& [name, value] : wanted.values)
      for (const auto& [own, tensor] : trained->named())
        if (own == name)
          worst = std::max(worst, (tensor - value).norm().item<double>() / value.norm().item<double>());
    EXPECT_LT(worst, 1e-9) << where;
    std::printf("%s: loss %.3f to %.3f, weights off by %.1e after %lld steps\n", where.c_str(),
                wanted.losses.front(), wanted.losses.back(), worst, static_cast<long long>(kSteps));
  }
};

// 20 of them, and one run; ISOGRAD_FULL_TESTS=1: 50, and four.
TEST_F(HybridRuns, AllStepsAreThoseOfOneProcess) {
  constexpr int kFirst = 8;  // of the first mesh

  const Cell plain, text = plain.with(kPacks, "1");
  const Cell three = text.with(kPp, "2").with(kSchedule, "1f1b").with(kTp, "2").with(kShard, "2");
  const Cell moe = text.with(kModel, "experts").with(kPp, "2").with(kSchedule, "1f1b").with(kTp, "2");
  struct Trained {
    Cell first, second;  // the mesh that the run begins on, and the one that it goes on on
  };
  std::vector<Trained> all = {
      {three.with(kModel, "tied").with(kStrategy, "zero1"),
       text.with(kModel, "tied").with(kShard, "3").with(kStrategy, "zero3")},
      {three.with(kSchedule, "interleaved").with(kStrategy, "zero3"),
       text.with(kTp, "3").with(kTokens, "whole")},
      {moe.with(kShard, "2").with(kEp, "2").with(kStrategy, "zero2"),
       text.with(kModel, "experts").with(kReplicate, "4").with(kEp, "4")},
      {moe.with(kReplicate, "2").with(kEp, "2").with(kSchedule, "zb-h1"), text.with(kModel, "experts")
                                                                              .with(kRing, "2")
                                                                              .with(kTp, "2")
                                                                              .with(kShard, "2")
                                                                              .with(kStrategy, "zero1")}};
  if (!full_tests()) all = {all[2]};
  int number = 0;
  for (const auto& [first, second] : all) {
    const std::string where = first.name();
    ASSERT_EQ(first.ranks(), 8) << where;
    RunConfig config = configured(first, fmt::format("run{}", number));
    config.checkpoint.every = kFirst, config.checkpoint.keep = 10;
    const PlainRun wanted = trained_plainly(config);
    EXPECT_LT(wanted.losses.back(), wanted.losses.front() - 0.5) << where;
    expect_same(trained(config, first.ranks()), wanted, 0, where);
    RunConfig going_on = configured(second, fmt::format("run{}-goes-on", number++));
    going_on.model = config.model;
    going_on.checkpoint.resume =
        (fs::path(config.run.directory) / fmt::format("checkpoints/step-{:08}", kFirst)).string();
    expect_same(trained(going_on, second.ranks()), wanted, kFirst, where + ", then " + second.name());
  }
}

// A stream that is off by a millionth in what the run differentiates: its steps are others, and its proof
// fails.
TEST_F(HybridRuns, AStepThatIsOffIsSeen) {
  const Cell cell = Cell{}.with(kPp, "2").with(kSchedule, "1f1b").with(kTp, "2").with(kPacks, "1");
  RunConfig config = configured(cell, "off");
  config.train.steps = 2;
  config.verify.every = 2;
  const PlainRun wanted = trained_plainly(config);
  const Run found = run(config, cell.ranks(), [](World&, TrainerHooks& hooks) {
    hooks.wrap_forward = [](ForwardLossTerms right) -> ForwardLossTerms {
      return [right](const Batch& batch) {
        LossTerms terms = right(batch);
        for (LossTerm& term : terms) term.sum = term.sum * (1 + 1e-6);
        return terms;
      };
    };
    hooks.check = [](RunningRun& running) { return check_running(running); };
  });
  EXPECT_GT(off(found.steps[0].report.loss, wanted.losses[0]), 1e-7);
  EXPECT_EQ(found.outcomes[0].end, Outcome::End::kRefuted);
}

}  // namespace
}  // namespace isograd::hybrid
