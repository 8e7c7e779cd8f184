#include "train/task.hpp"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>

#include "base/refuse.hpp"
#include "train/checkpoint_files.hpp"
#include "train/rank_zero.hpp"
#include "train/task_kind.hpp"

namespace isograd {
namespace fs = std::filesystem;

std::unique_ptr<Task> make_task(const RunConfig& config, Group& group) {
  // Once, before anybody reads of them.
  if (!config.model.load.empty()) on_rank_zero(group, [&] { verify_model_files(config.model.load); });
  auto task = kind_of(config).make(config, group);
  check_same_data(task->facts(), group);
  return task;
}

std::shared_ptr<TaskModel> model_without_values(const RunConfig& config) {
  const TaskKind& kind = kind_of(config);
  if (kind.model_without_values) return kind.model_without_values(config);
  Group alone = Group::solo();
  return kind.make(config, alone)->shape_model({}, scalar_type(config.train.dtype));
}

ModelToLayOut Task::to_fill(const fs::path& directory, at::ScalarType dtype) const {
  const fs::path from = directory.empty() ? fs::path(config_.model.load) : directory;
  ModelToLayOut made;
  if (!from.empty()) made.fill = open_weights(from, dtype);
  made.model = shape_model(directory, dtype);
  if (from.empty())
    made.fill = [model = made.model](const std::string& name, at::Tensor& values) {
      model->initialize(name, values);
    };
  else
    made.check_values = [model = made.model, fill = made.fill, dtype] {
      for (const auto& [name, parameter] : model->named()) {
        at::Tensor values = at::empty(parameter.sizes(), dtype);
        fill(name, values);
      }
    };
  return made;
}

ModelToLayOut Task::make_model_to_lay_out(const fs::path& directory) const {
  return to_fill(directory, scalar_type(config_.train.dtype));
}

std::shared_ptr<TaskModel> Task::make_model(at::ScalarType dtype) const {
  const ModelToLayOut made = to_fill({}, dtype);
  give_values(made.model->named(), made.fill, nullptr, at::kCPU);
  return made.model;
}

std::shared_ptr<TaskModel> Task::make_blank_model(at::ScalarType dtype) const {
  auto model = shape_model({}, dtype);
  give_values(
      model->named(), [](const std::string&, at::Tensor&) {}, nullptr, at::kCPU);
  return model;
}

std::string Task::describe_step(std::int64_t step, int ranks) const {
  std::string text;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto loader = make_loader(rank, ranks);
    const LoaderPosition position = position_of_step(*loader, step);
    loader->seek(position);
    if (rank == 0)
      text = fmt::format("step {}: step {} of {} of epoch {}\n", step, position.step + 1,
                         loader->steps_per_epoch(), position.epoch + 1);
    text += describe(*loader, rank);
  }
  return text;
}

std::optional<RunConfig> Task::comparison() const {
  const auto of_kind = kind_of(config_).comparison;
  return of_kind ? of_kind(config_) : std::nullopt;
}

RunConfig Task::micro_sized(int ranks, std::int64_t step) const {
  constexpr std::int64_t kPack = 64;  // tokens
  RunConfig micro = config_;
  micro.batch.*kind_of(micro).per_step = ranks + 1;
  micro.batch.packs_per_micro_batch = micro.batch.tokens_per_micro_batch = 1;
  micro.data.pack_length = std::min(micro.data.pack_length, kPack);
  micro.run.seed += step;
  return micro;
}

ShapeKeys values_of(const RunConfig& config, const std::string& keys) {
  ShapeKeys values;
  std::istringstream names(keys);
  for (std::string name; names >> name;) {
    const auto key = std::ranges::find(config_keys(), name, &ConfigKey::name);
    ISOGRAD_INVARIANT(key != config_keys().end(), "no key " + name);
    values.emplace_back(
        name, std::visit([](const auto& value) { return fmt::format("{}", value); }, key->get(config)));
  }
  return values;
}

const std::vector<const TaskKind*>& task_kinds() {
  static const std::vector<const TaskKind*> kinds{&text_kind(), &scorer_kind(), &video_kind()};
  return kinds;
}

const TaskKind& kind_of(const RunConfig& config) {
  std::string names;
  for (const TaskKind* kind : task_kinds()) {
    if (config.model.kind == kind->name) return *kind;
    names += (names.empty() ? "" : ", ") + std::string(kind->name);
  }
  refuse("model.kind", config.model.kind, names, "Choose one of them");
}

LoaderPosition position_of_step(const BatchLoader& loader, std::int64_t step) {
  if (step < 1)
    refuse("step", std::to_string(step), "1 or more: steps are counted from 1",
           "Name the step as the run's progress does");
  const std::int64_t epoch_steps = loader.steps_per_epoch();
  return {(step - 1) / epoch_steps, (step - 1) % epoch_steps};
}

}  // namespace isograd
