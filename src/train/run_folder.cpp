#include "train/run_folder.hpp"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "base/paths.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "base/shell.hpp"
#include "comm/failures.hpp"
#include "train/checkpoint_files.hpp"
#include "train/config_table.hpp"
#include "train/rank_zero.hpp"

namespace isograd {

// The checkpoint that a run continues; empty: none. `own`: of its own folder. `compared`: a comparison's run.
struct RunFolder::Continued {
  fs::path checkpoint{};
  bool own = false, compared = false;
};

namespace {

constexpr const char* kLock = "LOCK";

std::string here(const fs::path& directory) {
  return fmt::format("run.directory = \"{}\"", directory.string());
}

bool same_file(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

// Lines of a file, as far as it can be read; the last one may end without a line feed.
std::size_t lines_in(const fs::path& file) {
  std::error_code error;
  if (!fs::is_regular_file(file, error) || fs::file_size(file, error) == 0) return 0;
  const MappedFile mapped(file);
  const auto *begin = mapped.data(), *end = begin + mapped.size();
  return static_cast<std::size_t>(std::count(begin, end, '\n') + (end[-1] == '\n' ? 0 : 1));
}

std::string first_line(int file) {
  char text[200] = {};
  const ssize_t length = ::pread(file, text, sizeof(text) - 1, 0);
  const std::string line(text, static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  return line.substr(0, line.find('\n'));
}

[[noreturn]] void refuse_living_run(const fs::path& directory, const std::string& who) {
  refuse(here(directory), "another run that is writing there" + (who.empty() ? "" : ": " + who),
         "a folder that no other run uses",
         "Wait for that run to end, or give this one a folder of its own (--set run.directory=...)");
}

// The first line of a file that another process has locked; nothing where none has.
std::optional<std::string> locked_by_another(const fs::path& path, int flags = 0) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | flags);
  if (file < 0) return std::nullopt;
  const bool held = ::flock(file, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  const auto who = held ? std::optional(first_line(file)) : std::nullopt;
  ::close(file);
  return who;
}

// Runs before the check for an earlier run's files, because these may belong to a live run.
void check_no_run_lives(const fs::path& directory) {
  if (const auto who = locked_by_another(directory / kLock, O_NOFOLLOW)) refuse_living_run(directory, *who);
}

// The ranks of the start before may still be ending, or a file system may not know yet that they have.
void wait_for_former_start(const RunConfig& config) {
  const auto now = std::chrono::steady_clock::now;
  // Ends before other ranks have waited too long for this one.
  const auto end = now() + std::chrono::duration<double>(0.9 * config.parallel.timeout_seconds);
  const fs::path lock = fs::path(config.run.directory) / kLock;
  bool told = false;
  const auto writer = [&] {
    const fs::path log = json_log_of(config);
    const auto who = locked_by_another(lock, O_NOFOLLOW);
    return who || !locked_by_another(log) ? who : "which writes " + log.string();
  };
  for (auto who = writer(); who && now() < end && !StopSignals::requested(); who = writer()) {
    if (!std::exchange(told, true))
      print(stderr, fmt::format("isograd: {} waits until another run there has ended: {}\n",
                                printable(here(config.run.directory)), printable(*who)));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

std::vector<fs::path> event_files(const fs::path& directory) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(directory / "tensorboard", error), end; !error && entry != end;
       entry.increment(error))
    if (entry->path().filename().string().starts_with("events.out.tfevents.")) found.push_back(entry->path());
  return found;
}

// Files of an earlier run in run.directory that a new run would overwrite; empty: none.
std::string earlier_run(const RunConfig& config) {
  const fs::path directory = config.run.directory, log = json_log_of(config);
  std::string found;
  const auto add = [&](const std::string& what) { found += (found.empty() ? "" : ", ") + what; };
  if (const auto checkpoints = list_checkpoints(checkpoint_root(config)); checkpoints.size() == 1)
    add("the checkpoint " + checkpoints[0].filename().string());
  else if (!checkpoints.empty())
    add(fmt::format("{} checkpoints up to {}", checkpoints.size(), checkpoints.back().filename().string()));
  if (const auto rows = lines_in(log))
    add(fmt::format("{} rows of metrics{}", rows,
                    config.run.json_log.empty() ? std::string() : " in " + log.string()));
  std::error_code error;
  if (fs::exists(directory / "report.html", error)) add("report.html");
  return found;
}

}  // namespace

fs::path json_log_of(const RunConfig& config) {
  return config.run.json_log.empty() ? fs::path(config.run.directory) / "metrics.jsonl"
                                     : fs::path(config.run.json_log);
}

namespace {

// With checkpoint.resume = "auto": whether run.directory has a run of this command that ended before its
// first checkpoint, so that this one begins anew. ConfigError names a key that was another then.
bool ended_unsaved(const RunConfig& config) {
  const fs::path directory = config.run.directory, file = directory / kRunConfig;
  std::error_code error;
  if (config.checkpoint.resume != "auto" || !fs::exists(file, error) ||
      !fs::exists(directory / kLock, error) || fs::exists(directory / "report.html", error) ||
      !list_checkpoints(checkpoint_root(config)).empty())
    return false;
  const RunConfig then = load_config(file);
  if (then.run.json_log != config.run.json_log) return false;
  // A continued run may have other values of these.
  constexpr const char* kFree[] = {"run.directory",
                                   "run.memory",
                                   "run.peak_tflops",
                                   "run.on_signal.",
                                   "data.cache",
                                   "batch.max_tokens_per_rank",
                                   "batch.packs_per_micro_batch",
                                   "batch.tokens_per_micro_batch",
                                   "loss.fused",
                                   "train.steps",
                                   "train.evaluate_",
                                   "schedule.",
                                   "parallel.",
                                   "checkpoint.",
                                   "verify.",
                                   "sample."};
  for (const ConfigKey& key : config_keys()) {
    const std::string was = toml_text(key.get(then)), is = toml_text(key.get(config));
    if (was == is ||
        std::ranges::any_of(kFree, [&](const char* prefix) { return key.name.starts_with(prefix); }))
      continue;
    refuse(key.name, is, fmt::format("{}, as in {}", was, file.string()),
           fmt::format("Set {} = {} to run that configuration, or another run.directory", key.name, was));
  }
  return true;
}

}  // namespace

void RunFolder::refuse_earlier_run(const RunConfig& config, const Continued& from) {
  if (from.own || ended_unsaved(config)) return;
  std::error_code error;
  const fs::path directory = config.run.directory;
  const auto there = [&](const char* name) { return fs::exists(directory / name, error); };
  // A user's own file: every run leaves its lock, and earlier versions left what earlier_run() finds.
  if (there(kRunConfig) && !there(kLock) && earlier_run(config).empty())
    refuse(here(directory), "config.toml, which no run has written",
           "a folder without one: a run writes its whole configuration to that file",
           "Give the run another folder (--set run.directory=...), or move the file");
  if (config.overwrite) return;
  const std::string found = earlier_run(config);
  if (found.empty()) return;
  const bool resumable = !list_checkpoints(checkpoint_root(config)).empty();
  refuse(
      here(config.run.directory),
      found + " of an earlier run" + (from.compared ? ", trained for comparison" : ""),
      from.checkpoint.empty()
          ? "a folder for this new run, which would write over them"
          : fmt::format("a folder for the run that continues {} elsewhere", from.checkpoint.string()),
      fmt::format(
          "Give it a folder of its own (--set run.directory=...){}, or replace the earlier run: --overwrite",
          resumable && from.checkpoint.empty() && !from.compared
              ? ", continue the earlier one (--set checkpoint.resume=latest)"
              : ""));
}

RunFolder::Continued RunFolder::checked(const RunConfig& config) {
  if (config.checkpoint.resume == "auto" && config.overwrite)
    refuse("--overwrite", "checkpoint.resume = \"auto\" in the same command",
           "one of the two: each start of that command would remove what the one before it has saved",
           "Leave --overwrite out to continue, or set checkpoint.resume = \"\" to start anew");
  if (config.checkpoint.resume == "auto") wait_for_former_start(config);
  check_no_run_lives(config.run.directory);
  // A live run locks its log too (metrics.cpp), which may lie elsewhere.
  if (const fs::path log = json_log_of(config); locked_by_another(log))
    refuse(fmt::format("run.json_log = \"{}\"", log.string()), "the log of a run that is under way",
           "a file of this run alone", "Wait for that run, or name another file in run.json_log");
  Continued from;
  std::error_code error;
  if (!config.checkpoint.resume.empty()) {
    const fs::path root = checkpoint_root(config), found = resolve_checkpoint(root, config.checkpoint.resume);
    from.checkpoint = (found.has_filename() ? found : found.parent_path()).lexically_normal();
    from.own = !found.empty() && fs::equivalent(fs::absolute(from.checkpoint).parent_path(), root, error);
  }
  refuse_earlier_run(config, from);
  // The comparison of a continued run continues too.
  if (const auto other = from.own ? std::nullopt : kind_of(config).comparison(config)) {
    check_no_run_lives(other->run.directory);
    refuse_earlier_run(*other, {.checkpoint = from.checkpoint, .compared = true});
  }
  return from;
}

void RunFolder::check_free(const RunConfig& config) { checked(config); }

RunFolder::RunFolder(const RunConfig& config)
    : directory_(config.run.directory),
      checkpoints_(checkpoint_root(config)),
      json_log_(json_log_of(config)) {
  const Continued from = checked(config);
  goes_on_ = from.own;
  std::error_code error;
  made_ = !fs::exists(directory_, error);
  make_folders(directory_);
  lock();
  if (::stat(directory_.c_str(), &folder_) != 0) folder_ = {};  // gone already: check() reports it
  take(config, from);
}

// Requires that the lock is held.
void RunFolder::take(const RunConfig& config, const Continued& from) {
  refuse_earlier_run(config, from);  // of a run that has ended since it was looked for
  const std::string who = fmt::format("process {} since {:%Y-%m-%d %H:%M:%S} UTC{}\n", ::getpid(),
                                      fmt::gmtime(std::time(nullptr)),
                                      config.source.empty() ? std::string() : ", " + config.source.string());
  if (::ftruncate(lock_->file(), 0) == 0)
    (void)!::pwrite(lock_->file(), who.data(), who.size(), 0);  // information for the user only
  if (from.own) {
    const auto step = checkpoint_step(from.checkpoint);
    std::string later;
    for (const auto& other : list_checkpoints(checkpoints_))
      if (step && *checkpoint_step(other) > *step)
        later += (later.empty() ? "" : ", ") + other.filename().string();
    if (!later.empty())
      notice_ =
          fmt::format("continuing from {}: {} of the same folder go when this run saves its first checkpoint",
                      from.checkpoint.filename().string(), later);
  } else if (const std::string found = earlier_run(config); !found.empty()) {
    replaces_ = true;
    notice_ = fmt::format(
        fmt::runtime(config.overwrite ? "--overwrite: {} of an earlier run in {} are removed"
                                      : "checkpoint.resume = \"auto\": {} are removed, the run in {} "
                                        "ended before its first checkpoint; this one begins anew"),
        found, directory_.string());
  }
}

void RunFolder::lock() {
  const fs::path path = directory_ / kLock;
  const FileLock& lock = lock_.emplace(path);
  if (lock.problem() == 0) return;
  const char* problem = std::strerror(lock.problem());
  if (lock.file() < 0)
    refuse(path.string(), problem, "a file that this run can lock",
           "Choose another folder (run.directory) or look at its permissions");
  if (lock.problem() == EWOULDBLOCK) refuse_living_run(directory_, first_line(lock.file()));
  refuse(path.string(), fmt::format("a file system that does not lock: {}", problem),
         "flock(), which keeps a second run out", "Choose a folder on another file system (run.directory)");
}

RunFolder::~RunFolder() {
  if (begun_ || !made_) return;
  std::error_code ignored;  // a run that was refused before it wrote anything
  fs::remove(directory_ / kLock, ignored);
  fs::remove(directory_, ignored);
}

void RunFolder::begin() {
  begun_ = true;
  std::error_code ignored;
  fs::remove(directory_ / kStageTrace, ignored);  // written as a run ends, of that run
  if (!replaces_) return;
  prune_checkpoints(checkpoints_, -1, 1, 0);
  for (const auto& file : event_files(directory_)) fs::remove(file, ignored);
  for (const auto& file : {directory_ / "report.html", directory_ / kLastOperations, json_log_})
    fs::remove(file, ignored);
}

bool RunFolder::is_there() const {
  struct stat held {};
  struct stat named {};
  if (::fstat(lock_->file(), &held) != 0) return false;
  if (::stat((directory_ / kLock).c_str(), &named) == 0) return same_file(held, named);
  return ::stat(directory_.c_str(), &named) == 0 && same_file(folder_, named);
}

void RunFolder::check() const {
  std::error_code error;
  const bool there = is_there();
  if (there && fs::exists(directory_ / kLock, error)) return;
  // A program that empties a folder file by file may have removed the lock but not yet the folder.
  refuse(here(directory_),
         std::string(there ? "a folder whose LOCK" : "a folder that") +
             " was removed or moved while the run wrote to it",
         "the folder that the run began in, and its LOCK, which keeps other runs out",
         "Put it back and continue from its last checkpoint (--set checkpoint.resume=latest), or start anew");
}

// ---- continuing a run ----

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

std::optional<Resumed> resume_run(const Task& task, Group& group) {
  const RunConfig& config = task.config();
  if (config.checkpoint.resume.empty()) return std::nullopt;
  Resumed resumed;
  std::string state;
  on_rank_zero(group, [&] {
    resumed.directory = resolve_checkpoint(checkpoint_root(config), config.checkpoint.resume);
    if (!resumed.directory.empty()) state = to_json(open_checkpoint(resumed.directory));
  });
  resumed.directory = broadcast_text(group, resumed.directory.string());
  if (resumed.directory.empty()) return std::nullopt;
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
  const std::map<std::string, std::string> before{
      {"data.packing", "split"}, {"data.train_on", "assistant"}};  // of checkpoints without the key
  for (const auto& [key, value] : now.order)
    same(key, value,
         then.order.contains(key) ? then.order.at(key)
         : before.contains(key)   ? before.at(key)
                                  : std::string("nothing"));
  if (now.documents != then.documents || now.tokens != then.tokens)
    refuse("data", fmt::format("{} {} and {} {}", now.documents, facts.documents, now.tokens, facts.tokens),
           fmt::format("{} {} and {} {}, as in checkpoint {}", then.documents, facts.documents, then.tokens,
                       facts.tokens, resumed.directory.string()),
           "Give back the data this run was started with, or train from these weights anew: model.load = \"" +
               resumed.directory.string() + "\"");
  const ShapeKeys shape = task.shape(resumed.directory);
  const std::map<std::string, std::string> saved(shape.begin(), shape.end());
  for (const auto& [key, value] : task.shape({}))
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
  bool other_groups = false;
  for (const ConfigKey& key : config_keys()) {
    const bool groups = key.name == "optimizer.groups";
    if (key.name != "train.steps" && !key.name.starts_with("schedule.") && !groups) continue;
    const std::string was = toml_text(key.get(before)), is = toml_text(key.get(now));
    if (was == is) continue;
    keys += fmt::format("{}{} = {} (was {})", keys.empty() ? "" : ", ", key.name, is, was);
    other_groups |= groups;
  }
  if (keys.empty()) return {};
  const Schedule was = make_schedule(before), is = make_schedule(now);
  constexpr std::int64_t kLooks = 1000;  // over the steps to come
  const std::int64_t stride = (std::max(was.total, is.total) - then.step) / kLooks + 1;
  const auto differs = [&](std::int64_t step) { return was.at(step) != is.at(step); };
  // Looks at the last step too, because a decay may be short, then for the first one after `alike`.
  const std::int64_t last = is.total - 1;
  std::int64_t alike = then.step - 1, step = then.step;
  while (step < last && !differs(step)) alike = step, step = std::min(step + stride, last);
  if (step <= last && differs(step)) {
    while (step - alike > 1) {
      const std::int64_t middle = alike + (step - alike) / 2;
      (differs(middle) ? step : alike) = middle;
    }
    return fmt::format(
        "the learning rate is not the one that this checkpoint's run would have had: in step {} "
        "{:.4g}, not {:.4g}, by {}",
        step + 1, is.at(step), was.at(step), keys);
  }
  return other_groups ? "groups of parameters are not updated as in this checkpoint's run, by " + keys
                      : std::string();
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
