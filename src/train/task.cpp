#include "train/task.hpp"

#include "isograd/error.hpp"
#include "train/checkpoint_files.hpp"
#include "train/rank_zero.hpp"

namespace isograd {

std::unique_ptr<Task> make_task(const RunConfig& config, Group& group) {
  // Once, before anybody reads of them.
  if (!config.model.load.empty()) on_rank_zero(group, [&] { verify_model_files(config.model.load); });
  if (config.model.kind == "decoder") return make_text_task(config, group);
  if (config.model.kind == "video") return make_video_task(config, group);
  throw ConfigError({.where = "model.kind",
                     .found = config.model.kind,
                     .expected = "decoder or video",
                     .action = "Train a scorer with train_scorer(), as isograd train does"});
}

LoaderPosition position_of_step(const BatchLoader& loader, std::int64_t step) {
  if (step < 1)
    throw ConfigError({.where = "step",
                       .found = std::to_string(step),
                       .expected = "1 or more: steps are counted from 1",
                       .action = "Name the step as the run's progress does"});
  const std::int64_t epoch_steps = loader.steps_per_epoch();
  return {(step - 1) / epoch_steps, (step - 1) % epoch_steps};
}

}  // namespace isograd
