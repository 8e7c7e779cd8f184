// n steps == save at k, reload, n - k steps, bit for bit; and what must not be continued.
#include "train/run_folder.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <csignal>
#include <fstream>

#include "base/error_testing.hpp"
#include "isograd/optimizer.hpp"
#include "model/safetensors.hpp"
#include "train/build.hpp"
#include "train/checkpoint_files.hpp"
#include "train/metrics.hpp"
#include "train/trainer_testing.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing_runs::config_error_of;

class Resume : public testing_runs::TinyRuns {};

// ---- loops of one's own: one parameter, "weight", and no trainer ----

// Saves all of a layout in a folder, with no more of a state than its step and this.
fs::path save_own(const fs::path& root, DataParallel& layout, Optimizer& optimizer, std::int64_t step = 1,
                  std::int64_t updates = 0) {
  TrainingState state;
  state.step = step, state.updates = updates;
  return save_checkpoint(
      {.root = root}, state,
      [](const fs::path& folder, const TensorStream& weights) {
        write_safetensors(folder / "model.safetensors", weights);
      },
      layout, optimizer);
}

std::unique_ptr<DataParallel> layout_of(const at::Tensor& weight, const Group& group, int stage) {
  return bucketed(trainable_parameters({{"weight", weight}}), group, {.stage = stage});
}

// One update by the gradient of `loss`; null: a zero gradient.
void update(DataParallel& layout, Optimizer& optimizer, const std::function<at::Tensor()>& loss) {
  layout.zero_gradients();
  if (loss) layout.begin_backward(true), loss().backward();
  layout.finish_reduction();
  optimizer.update(layout.buckets(), 1);
  layout.publish_parameters();
}

class BitwiseResume : public Resume, public testing::WithParamInterface<std::tuple<int, const char*>> {};

TEST_P(BitwiseResume, SavedAndReloadedEqualsUninterrupted) {
  const auto [ranks, dtype] = GetParam();
  const Run straight = run(tiny("straight", dtype), ranks);

  const Run saved = run(saving("saving", dtype), ranks);
  const RunConfig resumed_config = continued(saving("saving", dtype), "resumed");
  const fs::path middle = resumed_config.checkpoint.resume;
  const Run resumed = run(resumed_config, ranks);

  const fs::path end = straight.outcomes[0].checkpoint;
  ASSERT_EQ(end.filename(), "step-00000007");
  for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
    EXPECT_TRUE(file(saved.outcomes[0].checkpoint, name) == file(end, name))
        << name << ": saving changed the run";
    EXPECT_TRUE(file(resumed.outcomes[0].checkpoint, name) == file(end, name))
        << name << ": resuming changed the run";
    EXPECT_FALSE(file(middle, name) == file(end, name)) << name << " did not move: the test shows nothing";
  }
  ASSERT_EQ(resumed.steps.size(), 4u);
  for (std::size_t i = 0; i < resumed.steps.size(); ++i) {
    const StepEvent &a = straight.steps[3 + i], &b = resumed.steps[i];
    EXPECT_EQ(a.step, b.step);
    EXPECT_EQ(a.report.loss, b.report.loss) << "step " << a.step;
    EXPECT_EQ(a.report.norm, b.report.norm) << "step " << a.step;
    EXPECT_EQ(a.learning_rate, b.learning_rate);
    EXPECT_EQ(a.report.step_counts.targets, b.report.step_counts.targets);
  }
  ASSERT_EQ(straight.evaluations.size(), 4u);  // after 2, 4, 6 and 7
  ASSERT_EQ(resumed.evaluations.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i)
    EXPECT_EQ(straight.evaluations[1 + i].loss, resumed.evaluations[i].loss);
}

INSTANTIATE_TEST_SUITE_P(Ranks, BitwiseResume,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values("float32", "bfloat16")),
                         [](const auto& given) {
                           return std::to_string(std::get<0>(given.param)) + "_" + std::get<1>(given.param);
                         });

// The cosine ends at train.steps: going on for longer is another learning rate at once.
TEST_F(Resume, AnotherNumberOfStepsIsSaidToChangeTheLearningRate) {
  RunConfig config = tiny("run");
  config.train.steps = 40;
  config.schedule.kind = Schedule::Kind::kCosine;
  TrainingState then;
  then.step = 20, then.config = to_toml(config);
  EXPECT_EQ(schedule_change(then, config), "");
  config.train.evaluate_every = 3;
  EXPECT_EQ(schedule_change(then, config), "");
  config.train.steps = 80;
  Schedule was = config.schedule, is = config.schedule;
  was.total = 40, is.total = 80;
  EXPECT_THAT(
      schedule_change(then, config),
      ::testing::AllOf(::testing::HasSubstr("in step 21"), ::testing::HasSubstr("train.steps = 80 (was 40)"),
                       ::testing::HasSubstr(fmt::format("{:.4g}, not {:.4g}", is.at(20), was.at(20)))));
  config.train.steps = 40;
  config.schedule.peak *= 0.5;
  EXPECT_THAT(schedule_change(then, config), ::testing::HasSubstr("schedule.peak"));
  config.schedule.kind = Schedule::Kind::kConstant;
  then.config = to_toml(config);
  config.train.steps = 80;
  EXPECT_EQ(schedule_change(then, config), "") << "after the warm-up a constant rate has no end";
}

// The decay ends at train.steps: a longer run begins it later. The end alone may differ, which is looked at
// too.
TEST_F(Resume, ALaterDecayIsSaidToChangeTheLearningRate) {
  for (const auto kind : {Schedule::Kind::kWsd, Schedule::Kind::kConstant}) {
    RunConfig config = tiny("run");
    config.train.steps = 5000;
    config.schedule.kind = kind, config.schedule.decay = 2;
    TrainingState then;
    then.step = 20, then.config = to_toml(config);
    EXPECT_EQ(schedule_change(then, config), "");
    config.train.steps = 4000;
    EXPECT_THAT(schedule_change(then, config),
                ::testing::AllOf(HasSubstr("in step 4000"), HasSubstr("train.steps = 4000 (was 5000)"),
                                 HasSubstr(fmt::format("{:.4g}, not {:.4g}", 0.01 * 0.55, 0.01))));
    config.train.steps = 6000;
    EXPECT_THAT(schedule_change(then, config), HasSubstr("train.steps = 6000 (was 5000)"));
    config.train.steps = 5000, config.schedule.decay = 4;
    EXPECT_THAT(schedule_change(then, config), HasSubstr("schedule.decay = 4 (was 2)"));
    // The first step that differs is named, which lies between two of those that are looked at.
    config.train.steps = 1000, config.schedule.decay = 100;
    then.step = 500, then.config = to_toml(config);
    config.train.steps = 2000;
    const Schedule was = make_schedule(parse_config(then.config, "then")), is = make_schedule(config);
    std::int64_t first = then.step;
    while (was.at(first) == is.at(first)) ++first;
    EXPECT_EQ(first, 901);
    EXPECT_THAT(schedule_change(then, config), HasSubstr("in step 902 "));
  }
  RunConfig config = tiny("run");
  TrainingState then;
  then.step = 2, then.config = to_toml(config);
  config.optimizer.groups = {"*norm.weight: rate=0.5"};
  EXPECT_THAT(schedule_change(then, config),
              HasSubstr("optimizer.groups = [\"*norm.weight: rate=0.5\"] (was [])"));
}

// In the middle of the decay, with groups of parameters and all terms of the loss.
TEST_F(Resume, OfADecayWithGroupsAndTermsHasTheSameBits) {
  for (const char* strategy : {"bucketed", "zero1", "zero3"})
    for (const char* kind : {"adamw", "sgd"}) {
      RunConfig config = tiny(fmt::format("{}-{}", strategy, kind));
      config.parallel.strategy = strategy;
      config.optimizer.kind = kind;
      if (config.optimizer.kind == "sgd") config.optimizer.momentum = 0.9;
      config.optimizer.groups = {"*norm.weight: rate=0.5 weight_decay=0.2", "*embed_tokens*: rate=2"};
      config.schedule.kind = Schedule::Kind::kWsd;
      config.schedule.decay = 5, config.schedule.shape = Schedule::Shape::kOneMinusSqrt;
      config.loss.label_smoothing = 0.1, config.loss.z_loss = 1e-3;
      expect_continued_alike(config, 3, {"model.safetensors", "optimizer.safetensors"});
    }
}

TEST(ResumeCommand, IsByTheRunsOwnConfigurationAndQuotedForAShell) {
  RunConfig config;
  config.source = "other.toml";
  config.run.directory = "my runs/$(reboot)";
  config.parallel.device = "cuda";  // as in config.toml
  EXPECT_EQ(resume_command(config, 3, fs::path(config.run.directory) / "checkpoints/step-00000002"),
            "isograd train 'my runs/$(reboot)/config.toml' --ranks 3 --set "
            "'checkpoint.resume=my runs/$(reboot)/checkpoints/step-00000002'");
  config.run.directory = "run";
  EXPECT_EQ(resume_command(config, 1, "saved"),
            "isograd train run/config.toml --ranks 1 --set checkpoint.resume=saved");
}

TEST_F(Resume, LatestContinuesInTheSameFolderAndOldOnesGo) {
  RunConfig config = tiny("run");
  config.checkpoint.every = 2;
  config.train.steps = 5;
  run(config, 1);
  EXPECT_EQ(list_checkpoints(checkpoint_root(config)).size(), 2u);  // 4 and 5
  config.train.steps = 8;
  config.checkpoint.resume = "latest";
  const Run more = run(config, 2);
  EXPECT_EQ(more.steps.front().step, 6);
  EXPECT_EQ(more.outcomes[1].steps, 8);
  const auto kept = list_checkpoints(checkpoint_root(config));
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_EQ(kept[0].filename(), "step-00000006");
  EXPECT_EQ(kept[1].filename(), "step-00000008");
  // All its steps made already: nothing to train, still an answer.
  const Run none = run(config, 2);
  EXPECT_TRUE(none.steps.empty());
  EXPECT_EQ(none.outcomes[0].validation_loss, more.outcomes[0].validation_loss);
}

// A stop saves without the validation that is due in its step.
TEST_F(Resume, AValidationThatTheStopLeftOutIsMadeUpFor) {
  for (const std::int64_t steps : {3, 4}) {  // in the last step too
    RunConfig config = tiny(fmt::format("run-{}", steps));
    config.train.steps = steps, config.checkpoint.keep_best = 1;
    const auto last_loss = [&] {
      return open_checkpoint(list_checkpoints(checkpoint_root(config)).back()).validation_loss;
    };
    config.train.evaluate_every = 3;
    const Run stopped = run(config, 2, [](World& world, TrainerHooks& hooks) {
      if (world.rank == 0)
        hooks.on_step = [](const StepEvent& event) {
          if (event.step == 2) std::raise(SIGTERM);  // taken in step 3
        };
    });
    ASSERT_EQ(stopped.outcomes[0].end, Outcome::End::kStopped);
    ASSERT_EQ(stopped.outcomes[0].steps, 3);
    EXPECT_EQ(last_loss(), std::nullopt);
    config.checkpoint.resume = "latest";
    const auto evaluated = [](const Run& run) {
      std::vector<std::pair<std::int64_t, double>> made;
      for (const Evaluation& each : run.evaluations) made.emplace_back(each.step, each.loss);
      return made;
    };
    const Run resumed = run(config, 2);
    RunConfig other = config;
    other.run.directory += "-straight", other.checkpoint.resume.clear();
    const Run straight = run(other, 2);
    EXPECT_EQ(evaluated(resumed), evaluated(straight));
    ASSERT_EQ(straight.evaluations.front().step, 3);
    const auto saved = open_checkpoint(checkpoint_path(checkpoint_root(config), 3)).validation_loss;
    if (steps == 3 || straight.evaluations[0].loss <= straight.evaluations[1].loss)
      EXPECT_EQ(saved, straight.evaluations[0].loss);
    EXPECT_EQ(last_loss(), straight.evaluations.back().loss);
    run(config, 2);  // all steps were made: the row is not written twice
    std::size_t rows = 0;
    for (const MetricRow& row : read_metrics(json_log_of(config))) rows += row.validation_loss ? 1 : 0;
    EXPECT_EQ(rows, straight.evaluations.size());
  }
}

TEST_F(Resume, AnotherRunIsRefusedByKey) {
  const RunConfig saving = tiny("run");
  run(saving, 1);
  const auto refused = [&](const std::function<void(RunConfig&)>& change) {
    RunConfig config = saving;
    config.checkpoint.resume = "latest";
    change(config);
    return config_error_of([&] { run(config, 2); });
  };
  EXPECT_EQ(refused([](RunConfig&) {}), "no error");
  const std::pair<const char*, void (*)(RunConfig&)> changes[] = {
      {"run.seed: found 4; expected 3", [](RunConfig& c) { c.run.seed = 4; }},
      {"data.pack_length", [](RunConfig& c) { c.data.pack_length = 32; }},
      {"batch.packs_per_step", [](RunConfig& c) { c.batch.packs_per_step = 4; }},
      {"data.validation_fraction", [](RunConfig& c) { c.data.validation_fraction = 0.5; }},
      {"train.dtype", [](RunConfig& c) { c.train.dtype = "bfloat16"; }},
      {"optimizer.kind", [](RunConfig& c) { c.optimizer.kind = "sgd"; }},
      {"model.feed_forward", [](RunConfig& c) { c.model.shape.feed_forward = 32; }},
      {"model.tied_output", [](RunConfig& c) { c.model.shape.tied_output = true; }}};
  for (const auto& [key, change] : changes) EXPECT_THAT(refused(change), HasSubstr(key));
  write_file(root_ / "text/999.txt", "one document more");
  EXPECT_THAT(refused([](RunConfig&) {}), HasSubstr("25 documents"));
}

TEST_F(Resume, OptimizerTensorsThatDoNotFitAreNamed) {
  const RunConfig saving = tiny("run");
  const fs::path checkpoint = run(saving, 1).outcomes[0].checkpoint;
  const TrainingState state = open_checkpoint(checkpoint);
  EXPECT_EQ(state.step, 7);
  EXPECT_EQ(state.updates, 7);
  EXPECT_EQ(checkpoint_tokenizer(checkpoint, state)->name(), "bytes");
  auto other = saving;
  other.train.dtype = "bfloat16";
  auto model = read_hf(checkpoint, at::kBFloat16);
  World alone;
  const ModelUnits units = model_units(*model, other);
  auto layout = make_layout(other, model->named(), units, Mesh(alone.group));
  auto optimizer = make_optimizer(other);
  EXPECT_THAT(config_error_of([&] { restore_optimizer(checkpoint, state, *layout, *optimizer); }),
              HasSubstr("master: found no such tensor"));
  other.optimizer.kind = "sgd";
  auto plain = make_optimizer(other);
  EXPECT_THAT(config_error_of([&] { restore_optimizer(checkpoint, state, *layout, *plain); }),
              HasSubstr("a tensor that this run has no place for"));
}

// A parameter that was frozen for a while has a time of its own.
TEST_F(Resume, UpdatesThatAParameterMissedAreKept) {
  const RunConfig config = tiny("run");
  const fs::path checkpoint = run(config, 1).outcomes[0].checkpoint;
  auto model = read_hf(checkpoint, at::kFloat);
  World alone;
  const ModelUnits units = model_units(*model, config);
  auto layout = make_layout(config, model->named(), units, Mesh(alone.group));
  const auto optimizer = make_optimizer(config), resumed = make_optimizer(config);
  restore_optimizer(checkpoint, open_checkpoint(checkpoint), *layout, *optimizer);
  at::Tensor frozen = model->named()[0].second;
  frozen.set_requires_grad(false);
  for (int i = 0; i < 2; ++i) update(*layout, *optimizer, {});
  frozen.set_requires_grad(true);
  TrainingState state = open_checkpoint(checkpoint);
  state.step = 9;
  state.updates = optimizer->updates();
  const fs::path saved = save_checkpoint(
      {.root = checkpoint.parent_path()}, state, [](const fs::path&, const TensorStream&) {}, *layout,
      *optimizer);
  restore_optimizer(saved, open_checkpoint(saved), *layout, *resumed);
  EXPECT_EQ(resumed->updates(), 9);
  EXPECT_EQ(resumed->missed_updates(), (Optimizer::Missed{{model->named()[0].first, 2}}));
}

// A loop of one's own that fills in nothing but the step goes on as if it had never stopped.
TEST_F(Resume, TheOptimizersOwnNumbersAreSavedByThemselves) {
  for (const int stage : {0, 1, 2})
    run_ranks(3, [&](World& world) {
      for (const bool clips : {false, true}) {
        const auto make_adamw = [&]() -> std::unique_ptr<Optimizer> {
          auto inner = adamw({.learning_rate = 0.1});
          if (!clips) return inner;
          return std::make_unique<ClipsGroups>(std::move(inner), std::vector<ClipGroup>{}, 1.0, world.group);
        };
        const auto loss_of = [](const at::Tensor& weight, int step) {
          return [=] { return (weight * at::arange(1.0, 8.0)).sin().sum().mul(step + 1); };
        };
        const at::Tensor weight = at::ones({7}).requires_grad_();
        const auto layout = layout_of(weight, world.group, stage);
        const auto optimizer = make_adamw();
        for (int step = 0; step < 3; ++step) update(*layout, *optimizer, loss_of(weight, step));
        const fs::path saved =
            save_own(root_ / fmt::format("own-{}-{}", stage, clips), *layout, *optimizer, 3);
        TrainingState read = open_checkpoint(saved);
        EXPECT_EQ(read.updates, 3);
        EXPECT_EQ(read.optimizer, "adamw");
        EXPECT_EQ(read.dtype, "float32");
        EXPECT_EQ(read.bucket_order, std::vector<std::string>{"weight"});
        const at::Tensor again =
            read_safetensors(saved / "model.safetensors").at("weight").clone().requires_grad_();
        const auto resumed_layout = layout_of(again, world.group, stage);
        const auto resumed = make_adamw();
        restore_optimizer(saved, read, *resumed_layout, *resumed);
        update(*layout, *optimizer, loss_of(weight, 3)), update(*resumed_layout, *resumed, loss_of(again, 3));
        EXPECT_TRUE(at::equal(weight, again)) << stage;
        // A state of before, whose caller left the number out, is refused: moments without updates.
        read.updates = 0;
        const auto other_layout = layout_of(at::ones({7}).requires_grad_(), world.group, stage);
        const auto other = make_adamw();
        EXPECT_THAT(config_error_of([&] { restore_optimizer(saved, read, *other_layout, *other); }),
                    HasSubstr("updates: found 0, with values in weight.exp_avg"));
        world.group.barrier();
      }
    });
}

// Weights and masters of a checkpoint are of one moment, whatever was written in place before it.
TEST_F(Resume, ValuesWrittenInPlaceSurviveACheckpoint) {
  for (int stage : {0, 1, 2})
    for (int ranks : {1, 2, 3})
      run_ranks(ranks, [&](World& world) {
        const auto leaf = [](double value) { return at::full({64}, value, at::kBFloat16).requires_grad_(); };
        const auto sum_of = [](const at::Tensor& weight) {
          return [=] { return weight.to(at::kFloat).sum(); };
        };
        fs::path saved;
        {
          const at::Tensor weight = leaf(1);
          const auto layout = layout_of(weight, world.group, stage);
          const auto optimizer = adamw({.learning_rate = 1e-3});
          update(*layout, *optimizer, sum_of(weight));
          weight.detach().fill_(3);
          saved = save_own(root_ / fmt::format("{}-{}", stage, ranks), *layout, *optimizer, 1, 1);
          world.group.barrier();
        }
        EXPECT_EQ(read_safetensors(saved / "model.safetensors").at("weight")[0].item<double>(), 3);
        EXPECT_EQ(read_safetensors(saved / "optimizer.safetensors").at("weight.master")[0].item<double>(), 3);
        {
          const at::Tensor weight = leaf(3);
          const auto layout = layout_of(weight, world.group, stage);
          const auto optimizer = adamw({.learning_rate = 1e-7, .weight_decay = 0});
          restore_optimizer(saved, open_checkpoint(saved), *layout, *optimizer);
          update(*layout, *optimizer, sum_of(weight));
          EXPECT_EQ(weight[0].item<double>(), 3) << stage << " " << ranks;
          world.group.barrier();
        }
        // Weights of another step: the masters would replace them at the first update. All ranks throw.
        const auto layout = layout_of(leaf(1), world.group, stage);
        const auto optimizer = adamw({.learning_rate = 1e-7});
        EXPECT_THAT(
            config_error_of([&] { restore_optimizer(saved, open_checkpoint(saved), *layout, *optimizer); }),
            HasSubstr("weight.master: found values that do not round to the parameter's"))
            << stage << " " << ranks;
        world.group.barrier();
      });
}

// A loop of one's own that trains a part of its model saves all of it.
TEST_F(Resume, FrozenParametersAreSavedWithTheOthers) {
  for (int stage : {0, 1, 2})
    for (int ranks : {1, 3})
      run_ranks(ranks, [&](World& world) {
        const std::vector<std::pair<std::string, at::Tensor>> named{
            {"weight", at::arange(7.0).requires_grad_()},
            {"frozen", at::arange(5.0) + 10},
            {"second", at::arange(4.0).to(at::kBFloat16)}};
        const auto layout = bucketed(trainable_parameters(named), world.group, {.stage = stage});
        const auto optimizer = sgd({.learning_rate = 1e-3});
        const fs::path saved = save_own(root_ / fmt::format("{}-{}", stage, ranks), *layout, *optimizer);
        world.group.barrier();
        const auto read = read_safetensors(saved / "model.safetensors");
        ASSERT_EQ(read.size(), 3u) << stage << " " << ranks;
        EXPECT_TRUE(read.at("weight").equal(at::arange(7.0)));
        EXPECT_TRUE(read.at("frozen").equal(at::arange(5.0) + 10));
        EXPECT_TRUE(read.at("second").equal(at::arange(4.0).to(at::kBFloat16)));
        world.group.barrier();
      });
}

// Values that only one rank has are in no checkpoint.
TEST_F(Resume, ValuesThatOneRankAloneHasWrittenAreNotSaved) {
  std::vector<std::string> said(2);
  try {
    run_ranks(2,
              [&](World& world) {
                const at::Tensor weight = at::ones({64}).requires_grad_();
                const auto layout = layout_of(weight, world.group, 1);
                const auto optimizer = adamw({});
                if (world.rank == 0) weight.detach().fill_(3);
                said[world.rank] =
                    error_testing::error_of<Error>([&] { save_own(root_, *layout, *optimizer); });
              },
              {.timeout = std::chrono::seconds(5)});
  } catch (const std::exception&) {
  }
  EXPECT_THAT(said[0], HasSubstr("parameter 'weight': found values written in place on this rank, and not"));
  EXPECT_NE(said[1], "no error");
  EXPECT_TRUE(list_checkpoints(root_).empty());
}

}  // namespace
}  // namespace isograd
