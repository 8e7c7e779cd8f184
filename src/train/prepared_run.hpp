// A run that is ready for its steps. Loop, clock, files and output are the trainer's.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "isograd/checkpoint.hpp"
#include "isograd/trainer.hpp"
#include "train/build.hpp"
#include "train/memory.hpp"
#include "train/task.hpp"

namespace isograd {

// A rank's part of micro-batches that context-parallel ranks split; checks the memory limit, measures the
// balance.
class CutBatches {
 public:
  // `task` and `mesh` must outlive this object. `world`: all ranks of the run.
  CutBatches(const Task& task, const Mesh& mesh, Group world);

  // This rank's parts. With batch.max_tokens_per_rank collective: an AgreedConfigError where a rank has more.
  MicroBatches of(const MicroBatches& whole);
  // As of(), for a training step, which the figures below include.
  MicroBatches of_step(const MicroBatches& whole);

  // The least balanced split of the first step, in words; empty after others, and without context ranks.
  const std::string& first_step() const { return first_step_; }
  // Balance over all micro-batches so far and all ranks; nothing without context parallelism. Collective.
  std::optional<Outcome::Balance> balance();

 private:
  const Task& task_;
  const Mesh& mesh_;
  Group world_;
  CutOptions options_;
  std::string first_step_{};
  bool first_ = true;
  double sum_ = 0, worst_ = 0, cuts_ = 0;
};

class PreparedRun {
 public:
  // From fresh weights, or from checkpoint.resume. Keeps references to configuration and world. `accepted`:
  // called once every rank has accepted the configuration. Collective; ConfigError on every rank.
  PreparedRun(const RunConfig& run_config, World& run_world,
              const std::function<ForwardLossTerms(ForwardLossTerms)>& wrap_forward = {},
              const std::function<void()>& accepted = {});
  PreparedRun(const PreparedRun&) = delete;  // the step refers to what it is made of
  PreparedRun& operator=(const PreparedRun&) = delete;

  // The next step, at the schedule's learning rate. One that is not finite counts only where the run skips
  // it. `when_split`: called once context ranks have their parts. Collective.
  StepReport step(Requests requests = {}, const std::function<void()>& when_split = {});
  // The validation loss under the run's normaliser; nothing where nothing is held out. Collective.
  std::optional<Evaluation> evaluate();
  // Saves a checkpoint and returns its folder. Collective.
  std::filesystem::path save();

  bool diverged(const StepReport& report) const {
    return !report.finite && config.train.on_non_finite == "stop";
  }
  const Layout* placed() const { return placed_ ? &*placed_ : nullptr; }  // null: each rank has a whole model
  DataParallelPlan plan() const { return plan_of(config, *layout, rounds, world.group); }

  const RunConfig& config;
  World& world;
  const at::Device device;
  std::unique_ptr<Task> task{};
  std::shared_ptr<TaskModel> model{};
  std::optional<ModelUnits> units{};
  std::optional<Mesh> mesh{};
  std::unique_ptr<DataParallel> layout{};
  std::unique_ptr<Optimizer> optimizer{};
  const ClipsGroups* clips = nullptr;  // the optimizer, where it is one (train.clip_groups)
  std::unique_ptr<Normalizer> normalizer{};
  std::optional<CutBatches> parts{};
  std::unique_ptr<BatchLoader> loader{}, validation{};
  ForwardLossTerms forward{};
  LookAhead look_ahead{};
  std::optional<MemoryWatch> memory{};  // run.memory
  TrainingState state{};
  std::int64_t parameters = 0;           // of the whole model
  std::int64_t rounds = 0;               // micro-batches of the last step; loaders vary
  std::string parameter_map{};           // to_text() of rank 0's RunLayout; empty on other ranks
  std::filesystem::path resumed_from{};  // empty: a fresh run
  std::string learning_rates{};          // a notice that the resume has changed them

 private:
  void lay_out_model(const std::filesystem::path& directory, const std::vector<std::string>& bucket_order);

  std::optional<Layout> placed_{};
  NormParts norm_parts_{};  // train.part_norms
  Schedule schedule_;
  std::unique_ptr<Step> step_{};
};

}  // namespace isograd
