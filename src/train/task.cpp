#include "train/task.hpp"

#include "isograd/error.hpp"

namespace isograd {

std::unique_ptr<Task> make_task(const RunConfig& config, Group& group) {
  if (config.model.kind == "decoder") return make_text_task(config, group);
  if (config.model.kind == "video") return make_video_task(config, group);
  throw ConfigError({.where = "model.kind",
                     .found = config.model.kind,
                     .expected = "decoder or video",
                     .action = "Train a scorer with train_scorer(), as isograd train does"});
}

}  // namespace isograd
