#include "train/resume.hpp"

#include <map>

#include "base/refuse.hpp"
#include "base/shell.hpp"
#include "comm/failures.hpp"
#include "train/checkpoint_files.hpp"
#include "train/config_table.hpp"
#include "train/rank_zero.hpp"

namespace isograd {
namespace fs = std::filesystem;

TrainingState fresh_state(const Task& task) {
  const RunConfig& config = task.config();
  const TaskFacts facts = task.facts();
  return {.position = {},
          .seed = config.run.seed,
          .pack_length = config.data.pack_length,
          .packs_per_step = config.batch.packs_per_step,
          .shuffle_packs = config.data.shuffle_packs ? 1 : 0,
          .validation_fraction = config.data.validation_fraction,
          .documents = facts.train_documents + facts.validation_documents,
          .tokens = facts.num_tokens,
          .optimizer = config.optimizer.kind,
          .dtype = config.train.dtype,
          .tokenizer = facts.tokenizer,
          .config = to_toml(config),
          .order = facts.order};
}

fs::path checkpoint_root(const RunConfig& config) { return fs::path(config.run.directory) / "checkpoints"; }

Resumed resume_run(const Task& task, Group& group) {
  const RunConfig& config = task.config();
  Resumed resumed;
  std::string state;
  on_rank_zero(group, [&] {
    resumed.directory = resolve_checkpoint(checkpoint_root(config), config.checkpoint.resume);
    state = to_json(open_checkpoint(resumed.directory));
  });
  resumed.directory = broadcast_text(group, resumed.directory.string());
  resumed.state = parse_state(broadcast_text(group, state), resumed.directory.string());

  const TrainingState now = fresh_state(task);
  const TrainingState& then = resumed.state;
  const TaskFacts facts = task.facts();
  // Compares this run's values with the checkpoint's, key by key.
  const auto same = [&](const std::string& key, const auto& own, const auto& saved) {
    if (own != saved)
      refuse(key, fmt::format("{}", own),
             fmt::format("{}, as in checkpoint {}", saved, resumed.directory.string()),
             fmt::format("Set {} = {} to continue that run, or leave checkpoint.resume out to start anew",
                         key, saved));
  };
  same("run.seed", now.seed, then.seed);
  same("data.pack_length", now.pack_length, then.pack_length);
  same("batch.packs_per_step", now.packs_per_step, then.packs_per_step);
  same("data.shuffle_packs", now.shuffle_packs, then.shuffle_packs);
  same("data.validation_fraction", now.validation_fraction, then.validation_fraction);
  same("optimizer.kind", now.optimizer, then.optimizer);
  same("train.dtype", now.dtype, then.dtype);
  same("data.tokenizer", now.tokenizer, then.tokenizer);
  for (const auto& [key, value] : now.order)
    same(key, value, then.order.contains(key) ? then.order.at(key) : std::string("nothing"));
  if (now.documents != then.documents || now.tokens != then.tokens)
    refuse("data", fmt::format("{} {} and {} {}", now.documents, facts.documents, now.tokens, facts.tokens),
           fmt::format("{} {} and {} {}, as in checkpoint {}", then.documents, facts.documents, then.tokens,
                       facts.tokens, resumed.directory.string()),
           "Give back the data this run was started with, or train from these weights anew: "
           "model.load = \"" +
               resumed.directory.string() + "\"");
  const ShapeKeys shape = task.saved_shape(resumed.directory);
  const std::map<std::string, std::string> saved(shape.begin(), shape.end());
  for (const auto& [key, value] : task.shape())
    if (const auto found = saved.find(key); found != saved.end()) same(key, value, found->second);
  return resumed;
}

std::string schedule_change(const TrainingState& then, const RunConfig& now) {
  RunConfig before;
  try {
    before = parse_config(then.config, "the checkpoint's configuration");
  } catch (const ConfigError&) {
    return "the checkpoint's configuration is of another version of isograd: its learning rates are "
           "not compared";
  }
  std::string keys;
  for (const ConfigKey& key : config_keys()) {
    if (key.name != "train.steps" && !key.name.starts_with("schedule.")) continue;
    const std::string was = toml_text(key.get(before)), is = toml_text(key.get(now));
    if (was != is) keys += fmt::format("{}{} = {} (was {})", keys.empty() ? "" : ", ", key.name, is, was);
  }
  if (keys.empty()) return {};
  const Schedule was = make_schedule(before), is = make_schedule(now);
  constexpr std::int64_t kLooks = 1000;  // over the steps to come
  const std::int64_t stride = (std::max(was.total, is.total) - then.step) / kLooks + 1;
  for (std::int64_t step = then.step; step < is.total; step += stride)
    if (was.at(step) != is.at(step))
      return fmt::format(
          "the learning rate is not the one that this checkpoint's run would have had: in step {} "
          "{:.4g}, not {:.4g}, by {}",
          step + 1, is.at(step), was.at(step), keys);
  return {};
}

std::string resume_command(const RunConfig& config, int ranks, const fs::path& checkpoint) {
  // The file that started the run is not used: --set may have changed its values, run.directory included.
  return "isograd " +
         shell_words({"train", (fs::path(config.run.directory) / kRunConfig).string(), "--ranks",
                      std::to_string(ranks), "--set", "checkpoint.resume=" + checkpoint.string()});
}

std::string how_to_continue(const RunConfig& config, int ranks, const fs::path& checkpoint) {
  return checkpoint.empty() ? std::string("no checkpoint had been saved yet")
                            : "the last checkpoint is whole: " + resume_command(config, ranks, checkpoint);
}

void rethrow(const PeerError& error, const RunConfig& config, int ranks, std::int64_t step,
             const fs::path& checkpoint) {
  ErrorText text = error.text();
  text.where = fmt::format("after step {}: {}", step, text.where);
  text.action += checkpoint.empty() ? "; no checkpoint had been saved yet"
                                    : "; to continue: " + resume_command(config, ranks, checkpoint) +
                                          " (from the last checkpoint, which is whole)";
  if (const auto* relayed = dynamic_cast<const RelayedError*>(&error))
    throw RelayedError(text, relayed->of_operation());
  throw PeerError(text);
}

}  // namespace isograd
