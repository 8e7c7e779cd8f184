// The load of experts that a run records: every choice of every token once, on any mesh, and what people are
// told of it.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <cmath>
#include <map>

#include "axis_runs.hpp"
#include "full_tests.hpp"
#include "isograd/checkpoint.hpp"
#include "isograd/error.hpp"
#include "isograd/model.hpp"
#include "train/metrics.hpp"
#include "train/run_folder.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

using Table = std::vector<std::vector<std::int64_t>>;  // of one step: by layer with experts, by expert

Table table_of(const std::vector<ExpertLoad>& loads) {
  Table table;
  for (const ExpertLoad& load : loads) table.push_back(load.choices);
  return table;
}

// By plain code: the k largest logits of each token, of equal ones the first.
void recount(const at::Tensor& logits, std::int64_t k, std::vector<std::int64_t>& counts) {
  counts.resize(static_cast<std::size_t>(logits.size(1)));
  for (std::int64_t t = 0; t < logits.size(0); ++t) {
    std::vector<bool> taken(counts.size());
    for (std::int64_t place = 0; place < k; ++place) {
      std::size_t best = counts.size();
      for (std::size_t e = 0; e < counts.size(); ++e)
        if (!taken[e] &&
            (best == counts.size() || logits[t][static_cast<std::int64_t>(e)].item<double>() >
                                          logits[t][static_cast<std::int64_t>(best)].item<double>()))
          best = e;
      taken[best] = true;
      ++counts[best];
    }
  }
}

// Choices of the tokens of step `step` under these weights: one process, the whole batch, logits alone.
Table recount(const Task& task, TaskModel& model, std::int64_t step) {
  const at::NoGradGuard no_grad;
  const auto loader = task.make_loader(0, 1);
  loader->seek(position_of_step(*loader, step));
  std::map<std::int64_t, std::vector<std::int64_t>> by_layer;
  for (const Batch& batch : loader->next()) {
    model.choose_experts(
        [&](const Batch&, std::int64_t layer, const ExpertScores& scores, const at::Tensor& likeliest) {
          recount(scores.values, task.config().model.shape.experts.per_token, by_layer[layer]);
          return likeliest;
        });
    model.outputs(batch);
  }
  model.choose_experts({});
  Table table;
  for (auto& [layer, counts] : by_layer) table.push_back(counts);
  return table;
}

struct OnRanks {
  int ranks;
  const char* set;
};

class ExpertsLoad : public AxisRuns {
 protected:
  RunConfig plain(const std::string& name, const std::string& dtype = "float64") const {
    return on(experts(name, dtype), "model.experts_every=1 model.layers=3 train.steps=7 sample.tokens=0",
              name);
  }
  // A run of one process, each step recounted with the weights that it starts from.
  std::vector<Table> recounted(RunConfig config) const {
    config.run.directory += "-recounted";
    config.verify.every = 1;
    std::vector<Table> tables;
    run(config, 1, [&](World& world, TrainerHooks& hooks) {
      const auto task = make_task(config, world.group);
      tables.push_back(recount(*task, *task->make_model(at::kDouble), 1));
      hooks.check = [&tables](RunningRun& running) {
        const RunConfig& of = running.run.config;
        if (running.step < of.train.steps)
          tables.push_back(recount(running.run.task, running.run.model, running.step + 1));
        return std::string();
      };
    });
    return tables;
  }
  static std::vector<Table> found_in(const Run& run) {
    std::vector<Table> tables;
    for (const StepEvent& event : run.steps) tables.push_back(table_of(event.expert_loads));
    return tables;
  }
  static std::vector<MetricRow> loads_logged(const RunConfig& config) {
    std::vector<MetricRow> rows;
    for (MetricRow& row : read_metrics(fs::path(config.run.directory) / "metrics.jsonl"))
      if (row.loss) rows.push_back(std::move(row));
    return rows;
  }
  static std::string report_of(const RunConfig& config) {
    return read_file(fs::path(config.run.directory) / "report.html");
  }
};

const OnRanks kLoads[] = {{1, "batch.packs_per_micro_batch=1"},
                          {2, "ep=2 batch.packs_per_micro_batch=1 share_parameters=off"},
                          {2, "strategy=naive cp_ring=2"},
                          {3, "strategy=zero3 batch.packs_per_micro_batch=1 checkpoint_activations=true"},
                          {3, "ep=3 strategy=naive batch.packs_per_micro_batch=1 share_parameters=off"},
                          {4, "strategy=zero2 cp_ring=2 batch.packs_per_micro_batch=1"},
                          {4, "strategy=zero3 replicas=2 checkpoint_activations=true"},
                          {4, "ep=2 cp_ring=2 share_parameters=off"},
                          {5, "strategy=zero1 batch.packs_per_micro_batch=1"}};

// With the losses of routers or without them by turns; ISOGRAD_FULL_TESTS=1: both.
TEST_F(ExpertsLoad, IsAPlainRecountOfTheStepOnEveryMesh) {
  std::size_t turn = 0;
  for (const bool losses : {true, false}) {
    RunConfig config = plain(losses ? "losses" : "none");
    if (!losses) config.loss.balance = config.loss.router_z = 0;
    const std::vector<Table> wanted = recounted(config);
    ASSERT_EQ(wanted.size(), 7u);
    EXPECT_NE(wanted[0], wanted[6]);  // the steps are not alike
    for (const OnRanks& cell : kLoads) {
      if (!full_tests() && turn++ % 4 != 0) continue;  // of nine
      const RunConfig own = on(config, cell.set, "cell");
      const Run result = run(own, cell.ranks);
      EXPECT_EQ(found_in(result), wanted) << cell.set << losses;
      for (const StepEvent& event : result.steps)
        for (const ExpertLoad& load : event.expert_loads) {
          std::int64_t all = 0;
          for (const std::int64_t choices : load.choices) all += choices;
          EXPECT_EQ(all, 2 * event.report.step_counts.tokens) << cell.set;
        }
      std::vector<Table> logged;
      for (const MetricRow& row : loads_logged(own)) logged.push_back(table_of(row.expert_loads));
      EXPECT_EQ(logged, wanted) << cell.set;
    }
  }
}

// Layers without experts are not counted and keep their numbers; every scope and mean counts alike.
TEST_F(ExpertsLoad, IsOfTheLayersThatHaveExperts) {
  RunConfig config = plain("some");
  config.model.experts_every = 2;
  config.loss.balance_scope = "micro_batch";
  config.loss.kind = "sample_mean";
  config.verify.at_end = false;
  const Run result = run(on(config, kLoads[3].set, "cell"), 3);
  for (const StepEvent& event : result.steps) {
    ASSERT_EQ(event.expert_loads.size(), 1u);
    EXPECT_EQ(event.expert_loads[0].layer, 1);
    EXPECT_EQ(event.expert_loads[0].choices.size(), 5u);
  }
}

// The selection bias of the last checkpoint, by layer and expert.
Table bias_of(const RunConfig& config, double rate) {
  const auto model = read_hf(list_checkpoints(checkpoint_root(config)).back(), at::kDouble);
  Table steps;  // in units of the rate
  for (const auto& [name, values] : model->named()) {
    if (!name.ends_with("e_score_correction_bias")) continue;
    steps.emplace_back();
    for (std::int64_t e = 0; e < values.numel(); ++e)
      steps.back().push_back(std::llround(values[e].item<double>() / rate));
  }
  return steps;
}

// By plain code: up by one step where an expert got less than the mean, down where more.
Table bias_after(const std::vector<Table>& tables) {
  Table steps;
  for (const auto& layer : tables.front()) steps.emplace_back(layer.size());
  for (const Table& table : tables)
    for (std::size_t layer = 0; layer < table.size(); ++layer) {
      std::int64_t all = 0;
      for (const std::int64_t choices : table[layer]) all += choices;
      for (std::size_t e = 0; e < table[layer].size(); ++e) {
        const std::int64_t above = table[layer][e] * static_cast<std::int64_t>(table[layer].size()) - all;
        steps[layer][e] += above > 0 ? -1 : above < 0 ? 1 : 0;
      }
    }
  return steps;
}

// On half of the meshes; ISOGRAD_FULL_TESTS=1: on all.
TEST_F(ExpertsLoad, MovesTheSelectionBiasAlikeOnEveryMesh) {
  RunConfig config = with_sigmoid_routers(plain("moved"));
  config.loss.balance = 0;
  config.checkpoint.every = 4;
  const Run alone = run(config, 1);
  const auto wanted = found_in(alone);
  EXPECT_EQ(recounted(config), wanted);
  const Table moved = bias_after(wanted);
  EXPECT_EQ(bias_of(config, 0.05), moved);
  RunConfig still = config;
  still.run.directory += "-still";
  still.loss.selection_bias_rate = 0;
  EXPECT_NE(found_in(run(still, 1)), wanted);  // it steers
  std::size_t turn = 0;
  for (const OnRanks& cell : kLoads) {
    if (!full_tests() && takes_first(turn++)) continue;
    const RunConfig own = on(config, cell.set, "moved");
    EXPECT_EQ(found_in(run(own, cell.ranks)), wanted) << cell.set;
    EXPECT_EQ(bias_of(own, 0.05), moved) << cell.set;
  }
  // Continued from step 4, on another mesh.
  RunConfig again = on(config, kLoads[1].set, "again");
  again.checkpoint.resume = list_checkpoints(checkpoint_root(config)).front().string();
  const Run rest = run(again, 2);
  ASSERT_EQ(rest.steps.size(), 3u);
  EXPECT_EQ(found_in(rest), (std::vector<Table>(wanted.begin() + 4, wanted.end())));
}

// In bf16 a step of the bias would be lost in rounding: it is kept in fp32.
TEST_F(ExpertsLoad, KeepsTheSelectionBiasExactInLowPrecision) {
  for (const char* strategy : {"bucketed", "zero3"}) {
    RunConfig config = with_sigmoid_routers(plain(std::string("low-") + strategy, "bfloat16"));
    config.loss.balance = 0;
    config.loss.selection_bias_rate = 1e-4;
    config.parallel.strategy = strategy;
    const Run result = run(config, 2);
    EXPECT_EQ(bias_of(config, 1e-4), bias_after(found_in(result))) << strategy;
  }
}

// A check between steps computes by the run's own forward; what that counts is no step's.
TEST_F(ExpertsLoad, ChecksBetweenStepsCountForNothing) {
  const RunConfig config = plain("checked");
  const auto wanted = found_in(run(config, 1));
  RunConfig checked = on(config, kLoads[0].set, "every-step");
  checked.verify.every = 1;
  int checks = 0;
  const Run result = run(checked, 2, [&](World& world, TrainerHooks& hooks) {
    hooks.check = [&checks, rank = world.rank](RunningRun& running) {
      if (rank == 0) ++checks;
      return check_running(running);
    };
  });
  EXPECT_EQ(checks, 7);
  EXPECT_EQ(found_in(result), wanted);
}

// Planted: a forward that is made twice on one rank. These tests would see it.
TEST_F(ExpertsLoad, AForwardCountedTwiceIsSeen) {
  RunConfig config = plain("twice");
  config.loss.balance = config.loss.router_z = 0;
  const auto wanted = found_in(run(config, 1));
  const RunConfig own = on(config, kLoads[8].set, "planted");
  const Run result = run(own, 3, [](World& world, TrainerHooks& hooks) {
    if (world.rank == 1)
      hooks.wrap_forward = [](const ForwardLossTerms& forward) -> ForwardLossTerms {
        return [forward](const Batch& batch) {
          forward(batch);
          return forward(batch);
        };
      };
  });
  const auto found = found_in(result);
  for (std::size_t step = 0; step < wanted.size(); ++step) EXPECT_NE(found[step], wanted[step]);
}

TEST_F(ExpertsLoad, IsInMetricsTheReportAndOnTheTerminal) {
  RunConfig config = plain("shown");
  auto& experts = config.model.shape.experts;
  experts.count = 48, experts.per_token = 1, experts.normalise = false;  // more than some steps' tokens reach
  config.loss.balance = config.loss.router_z = 0;
  const RunConfig own = on(config, kLoads[1].set, "on-two");
  ::testing::internal::CaptureStdout();
  const Run result = run(own, 2);
  const std::string printed = ::testing::internal::GetCapturedStdout();

  const auto rows = loads_logged(own);
  ASSERT_EQ(rows.size(), 7u);
  std::vector<Table> dead_by_step;
  for (std::size_t step = 0; step < 7; ++step) {  // plainly: no token in any step so far
    Table dead(3);
    for (std::size_t layer = 0; layer < 3; ++layer)
      for (std::size_t e = 0; e < 48; ++e) {
        std::int64_t all = 0;
        for (std::size_t i = 0; i <= step; ++i) all += result.steps[i].expert_loads[layer].choices[e];
        if (all == 0) dead[layer].push_back(static_cast<std::int64_t>(e));
      }
    EXPECT_EQ(rows[step].dead.by_layer, dead);
    EXPECT_EQ(rows[step].dead.steps, static_cast<std::int64_t>(step) + 1);
    dead_by_step.push_back(dead);
  }
  EXPECT_NE(dead_by_step[0], dead_by_step[6]);
  ASSERT_FALSE(dead_by_step[6][0].empty());

  const std::string named = name_dead(rows[6].dead, rows[6].expert_loads);
  EXPECT_THAT(named, HasSubstr(fmt::format("layer 0: {}", dead_by_step[6][0][0])));
  const std::string said = named + ", without a token in the last 7 logged steps";
  EXPECT_THAT(printed,
              AllOf(HasSubstr("dead experts      " + said), HasSubstr("load of experts   at most ")));
  EXPECT_THAT(report_of(own), AllOf(HasSubstr("<h3>Load of experts<"), HasSubstr(said),
                                    HasSubstr("<h2>Experts by layer</h2>")));

  std::string events;
  for (const auto& file : fs::directory_iterator(fs::path(own.run.directory) / "tensorboard"))
    events += read_file(file.path());
  for (const char* tag : {"experts/max_over_mean/layer_0", "experts/max_over_mean/layer_2", "experts/dead"})
    EXPECT_NE(events.find(tag), std::string::npos) << tag;

  // Continued, the steps before count too.
  RunConfig longer = own;
  longer.train.steps = 9;
  longer.checkpoint.resume = "latest";
  run(longer, 2);
  EXPECT_EQ(loads_logged(longer).size(), 9u);
  EXPECT_EQ(loads_logged(longer).back().dead.steps, 9);
}

TEST_F(ExpertsLoad, OfAModelWithoutExpertsIsNowhere) {
  const RunConfig config = tiny("dense");
  const Run result = run(config, 2);
  EXPECT_TRUE(result.steps.back().expert_loads.empty());
  EXPECT_TRUE(result.steps.back().report.counters.empty());
  EXPECT_THAT(report_of(config), Not(AnyOf(HasSubstr("Load of experts"), HasSubstr("Dead experts"))));
  EXPECT_THAT(read_file(fs::path(config.run.directory) / "metrics.jsonl"), Not(HasSubstr("experts")));
}

// A step that is refused says nothing of its load.
TEST_F(ExpertsLoad, OfAStepThatIsNotFiniteIsNotRecorded) {
  RunConfig config = plain("infinite");
  config.optimizer.kind = "sgd";
  config.schedule.peak = 1e150;
  config.schedule.warmup = 0;
  config.train.max_norm = 0;
  config.loss.balance = config.loss.router_z = 0;
  config.train.on_non_finite = "skip";
  const Run result = run(config, 2);
  EXPECT_FALSE(result.steps[0].expert_loads.empty());
  ASSERT_FALSE(result.steps[1].report.finite);
  EXPECT_TRUE(result.steps[1].expert_loads.empty());
  EXPECT_TRUE(loads_logged(config)[1].expert_loads.empty());
}

}  // namespace
}  // namespace isograd
