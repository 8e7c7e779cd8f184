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

MicroBatches own_parts(const Task& task, const ContextMesh& mesh, MicroBatches micro_batches) {
  if (mesh.context.size() == 1) return micro_batches;
  CutOptions options = task.cut_options();
  options.ring = static_cast<int>(task.config().parallel.cp_ring);
  options.ulysses = static_cast<int>(task.config().parallel.cp_ulysses);
  return cut_micro_batches(micro_batches, options, mesh.context.rank());
}

}  // namespace isograd
