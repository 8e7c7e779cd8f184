#include "train/task.hpp"
#include "base/refuse.hpp"

#include "isograd/error.hpp"
#include "train/build.hpp"
#include "train/checkpoint_files.hpp"
#include "train/rank_zero.hpp"
#include "train/task_kind.hpp"

namespace isograd {

std::unique_ptr<Task> make_task(const RunConfig& config, Group& group) {
  // Once, before anybody reads of them.
  if (!config.model.load.empty()) on_rank_zero(group, [&] { verify_model_files(config.model.load); });
  auto task = kind_of(config).make(config, group);
  check_same_data(task->facts(), group);
  return task;
}

Layout::Named TaskModel::placements(const Grid& grid) {
  Layout::Named copies;
  for (const auto& [name, tensor] : named()) copies.emplace_back(name, placed(grid, tensor.sizes().vec()));
  return copies;
}

Layout TaskModel::cut(const Mesh& mesh) {
  return Layout(mesh, placements(mesh.grid()));
}

std::shared_ptr<TaskModel> model_without_values(const RunConfig& config) {
  const TaskKind& kind = kind_of(config);
  if (kind.model_without_values) return kind.model_without_values(config);
  Group alone = Group::solo();
  return kind.make(config, alone)->make_model_without_values();
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
