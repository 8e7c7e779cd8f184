#include "verify/run.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <string_view>

#include "data/corpus.hpp"
#include "isograd/error.hpp"
#include "isograd/group.hpp"
#include "train/config_table.hpp"

namespace isograd {
namespace {

// The kinds of run that have something, by TaskKind::name; none named: all.
using Kinds = std::string_view;
constexpr Kinds kAll = "", kText = "decoder", kVideos = "video", kTransformers = "decoder video",
                kRows = "scorer";

bool concerns(Kinds kinds, const RunConfig& config) {
  return kinds.empty() || kinds.find(kind_of(config).name) != Kinds::npos;
}

// One number of a trial that may shrink to `least`.
struct Size {
  Kinds runs;
  std::int64_t (*get)(const Trial&);
  void (*set)(Trial&, std::int64_t);
  std::int64_t (*least)(const Trial&);
  bool of_shape = false;  // of the model: fixed where weights are loaded
};

std::int64_t one(const Trial&) { return 1; }
std::int64_t most_packs(const Trial& trial) {
  return split_rows(trial.config.batch.packs_per_step, trial.ranks)[0];
}
std::int64_t parts(std::int64_t whole, std::int64_t part) { return (whole + part - 1) / part; }

constexpr std::int64_t kManyFrames = 1024;  // where all frames are taken

// Cheap ones to check first: what makes every later trial smaller. Vocabulary is the tokenizer's.
constexpr Size kSizes[] = {
    {kTransformers, [](const Trial& t) { return t.config.model.shape.layers; },
     [](Trial& t, std::int64_t n) { t.config.model.shape.layers = n; }, one, true},
    {kText, [](const Trial& t) { return t.config.data.pack_length; },
     [](Trial& t, std::int64_t n) { t.config.data.pack_length = n; },
     [](const Trial&) { return std::int64_t{2}; }},
    {kText, [](const Trial& t) { return t.config.batch.packs_per_step; },
     [](Trial& t, std::int64_t n) {  // in as many micro-batches
       const std::int64_t rounds = parts(most_packs(t), t.config.batch.packs_per_micro_batch);
       t.config.batch.packs_per_step = n;
       t.config.batch.packs_per_micro_batch = parts(most_packs(t), rounds);
     },
     [](const Trial& t) { return std::int64_t{t.ranks}; }},
    // In whole patches: of the file's first frames, scaled down.
    {kVideos,
     [](const Trial& t) {
       const auto& video = t.config.video;
       return parts(video.max_frames > 0 ? video.max_frames : kManyFrames, video.patch_frames);
     },
     [](Trial& t, std::int64_t n) { t.config.video.max_frames = n * t.config.video.patch_frames; }, one},
    {kVideos, [](const Trial& t) { return t.config.video.height / t.config.video.patch_height; },
     [](Trial& t, std::int64_t n) { t.config.video.height = n * t.config.video.patch_height; }, one},
    {kVideos, [](const Trial& t) { return t.config.batch.videos_per_step; },
     [](Trial& t, std::int64_t n) { t.config.batch.videos_per_step = n; },
     [](const Trial& t) { return std::int64_t{grid_of(t.config, t.ranks).size(kSampleAxes)}; }},
    {kRows, [](const Trial& t) { return t.config.batch.rows_per_step; },
     [](Trial& t, std::int64_t n) { t.config.batch.rows_per_step = n; },
     [](const Trial& t) { return std::int64_t{t.ranks}; }},
    {kRows, [](const Trial& t) { return t.config.ranking.queue_size; },
     [](Trial& t, std::int64_t n) { t.config.ranking.queue_size = n; },
     [](const Trial&) { return std::int64_t{0}; }},
    {kRows, [](const Trial& t) { return t.config.model.scorer_layers; },
     [](Trial& t, std::int64_t n) { t.config.model.scorer_layers = n; }, one, true},
    {kRows, [](const Trial& t) { return t.config.model.scorer_units; },
     [](Trial& t, std::int64_t n) { t.config.model.scorer_units = n; }, one, true},
    {kTransformers, [](const Trial& t) { return t.config.model.shape.feed_forward; },
     [](Trial& t, std::int64_t n) { t.config.model.shape.feed_forward = n; }, one, true},
    {kTransformers, [](const Trial& t) { return t.config.model.shape.hidden; },
     [](Trial& t, std::int64_t n) { t.config.model.shape.hidden = n; }, one, true},
    {kTransformers, [](const Trial& t) { return t.config.model.shape.heads; },
     [](Trial& t, std::int64_t n) {
       auto& shape = t.config.model.shape;
       shape.heads = n;
       if (concerns(kText, t.config) && n % shape.key_value_heads != 0) shape.key_value_heads = n;
     },
     one, true},
    {kTransformers, [](const Trial& t) { return t.config.model.shape.head_dim / 2; },
     [](Trial& t, std::int64_t n) { t.config.model.shape.head_dim = 2 * n; }, one, true},
    {kVideos, [](const Trial& t) { return t.config.video.timestep_features / 2; },
     [](Trial& t, std::int64_t n) { t.config.video.timestep_features = 2 * n; }, one, true},
    // Micro-batches of the fullest rank.
    {kText, [](const Trial& t) { return parts(most_packs(t), t.config.batch.packs_per_micro_batch); },
     [](Trial& t, std::int64_t n) { t.config.batch.packs_per_micro_batch = parts(most_packs(t), n); }, one},
    // A smaller patch of as many patches to a frame: smaller frames, and a smaller model.
    {kVideos, [](const Trial& t) { return t.config.video.patch_frames; },
     [](Trial& t, std::int64_t n) {
       auto& video = t.config.video;
       if (video.max_frames > 0) video.max_frames = parts(video.max_frames, video.patch_frames) * n;
       video.patch_frames = n;
     },
     one, true},
    {kVideos, [](const Trial& t) { return t.config.video.patch_height; },
     [](Trial& t, std::int64_t n) {
       auto& video = t.config.video;
       video.height = video.height / video.patch_height * n;
       video.patch_height = n;
     },
     one, true},
};

// Options that a failure may not need, each towards what is simpler.
struct Simpler {
  Kinds runs;
  void (*change)(RunConfig&);
};

// Before anything shrinks: no number of tokens keeps small videos in micro-batches of their own but this.
constexpr Simpler kFirst[] = {
    {kVideos, [](RunConfig& c) { c.batch.tokens_per_micro_batch = kAllTokens; }},
    {kVideos,
     [](RunConfig& c) {
       if (c.batch.tokens_per_micro_batch != kAllTokens) c.batch.tokens_per_micro_batch = 1;
     }},
    {"video scorer", [](RunConfig& c) { c.data.validation_fraction = 0; }},
};

constexpr Simpler kSimpler[] = {
    {kAll, [](RunConfig& c) { c.parallel.replicas = 1; }},
    {kAll, [](RunConfig& c) { c.parallel.cp_ulysses = 1; }},
    {kAll, [](RunConfig& c) { c.parallel.cp_ring = 1; }},
    {kAll, [](RunConfig& c) { c.parallel.cp_fsdp_mode = RunConfig().parallel.cp_fsdp_mode; }},
    {kAll, [](RunConfig& c) { c.parallel.share_parameters = "off"; }},
    {kAll, [](RunConfig& c) { c.parallel.overlap = false; }},
    {kAll, [](RunConfig& c) { c.parallel.tensor_overlap = RunConfig().parallel.tensor_overlap; }},
    {kText, [](RunConfig& c) { c.parallel.expert_overlap = RunConfig().parallel.expert_overlap; }},
    {kAll, [](RunConfig& c) { c.parallel.prefetch = false; }},
    {kAll, [](RunConfig& c) { c.parallel.checkpoint_activations = false; }},
    {kAll, [](RunConfig& c) { c.parallel.reduce_once = false; }},
    {kAll, [](RunConfig& c) { c.parallel.gather_limit_bytes = 0; }},
    {kText, [](RunConfig& c) { c.loss.fused = "off"; }},
    {kAll, [](RunConfig& c) { c.loss.normalise_over = RunConfig().loss.normalise_over; }},
    {kAll, [](RunConfig& c) { c.loss.kind = "token_mean"; }},
    {kText, [](RunConfig& c) { c.model.shape.key_value_heads = c.model.shape.heads; }},
    {kText, [](RunConfig& c) { c.model.shape.tied_output = false; }},
    {kText, [](RunConfig& c) { c.loss.label_smoothing = 0; }},
    {kText, [](RunConfig& c) { c.loss.z_loss = 0; }},
    {kAll, [](RunConfig& c) { c.train.clip_groups.clear(); }},
    {kAll, [](RunConfig& c) { c.optimizer.groups.clear(); }},
    {kAll, [](RunConfig& c) { c.train.max_norm = 0; }},
    {kAll, [](RunConfig& c) { c.train.dtype = "float64"; }},
    {kText, [](RunConfig& c) { c.data.shuffle_packs = false; }},
};

class Search {
 public:
  Search(const Trial& trial, const FailureOf& failure_of, int most_trials)
      : best_(trial), failure_of_(failure_of), left_(most_trials), most_(most_trials) {}

  std::optional<Minimised> run() {
    const Trial first = best_;
    failure_ = ask(best_);
    if (failure_.empty()) return std::nullopt;
    for (const Simpler& simpler : kFirst) simplify(simpler);
    while (round()) {
    }
    Minimised result{.trial = best_, .failure = failure_, .tried = most_ - left_, .changes = {}};
    if (first.ranks != best_.ranks)
      result.changes.push_back(fmt::format("ranks {} -> {}", first.ranks, best_.ranks));
    for (const auto& key : config_keys()) {
      const auto before = toml_text(key.get(first.config)), after = toml_text(key.get(best_.config));
      if (before == after) continue;
      if (key.name == "video.files")
        result.changes.push_back(fmt::format("{} {} files -> {}", key.name, first.config.video.files.size(),
                                             best_.config.video.files.size()));
      else
        result.changes.push_back(fmt::format("{} {} -> {}", key.name, before, after));
    }
    return result;
  }

 private:
  std::string ask(const Trial& trial) {
    const std::string key = fmt::format("{} ranks\n{}", trial.ranks, to_toml(trial.config));
    if (const auto known = known_.find(key); known != known_.end()) return known->second;
    if (left_ == 0) return {};  // what is not known does not count as failing
    std::string failure;
    try {
      check(trial.config, trial.ranks);
      if (const TaskKind& kind = kind_of(trial.config); kind.check) kind.check(trial.config);
      check_together(trial.config, "minimise");
      --left_;
      failure = failure_of_(trial);
    } catch (const ConfigError&) {
    }
    return known_[key] = failure;
  }

  // Takes the trial if it fails as the first one did.
  bool take(const Trial& trial) {
    if (ask(trial) != failure_) return false;
    best_ = trial;
    return true;
  }

  bool shrink(const Size& size) {
    const std::int64_t before = size.get(best_);
    std::int64_t passes = size.least(best_), fails = before;
    if (passes >= fails) return false;
    const auto still_fails = [&](std::int64_t value) {
      Trial trial = best_;
      size.set(trial, value);
      return take(trial);
    };
    if (still_fails(passes)) return true;
    while (fails - passes > 1) {
      const std::int64_t middle = passes + (fails - passes) / 2;
      (still_fails(middle) ? fails : passes) = middle;
    }
    return fails < before;
  }

  // The first of these values, up to the one in use, with which it still fails.
  template <typename Values, typename Of>
  bool shrink_to_first(const Values& values, const Of& of) {
    for (const auto& value : values) {
      Trial trial = best_;
      if (of(trial) == value) return false;
      of(trial) = value;
      if (take(trial)) return true;
    }
    return false;
  }

  // Leaves out parts of the list of videos, smaller and smaller ones.
  bool shrink_files() {
    const auto& files = best_.config.video.files;
    bool changed = false;
    for (std::size_t part = files.size() / 2; part > 0; part /= 2)
      for (std::size_t at = 0; at < files.size() && files.size() > 1;) {
        Trial trial = best_;
        auto& left = trial.config.video.files;
        left.erase(left.begin() + static_cast<std::ptrdiff_t>(at),
                   left.begin() + static_cast<std::ptrdiff_t>(std::min(at + part, left.size())));
        if (!left.empty() && take(trial))
          changed = true;
        else
          at += part;
      }
    return changed;
  }

  bool simplify(const Simpler& simpler) {
    if (!concerns(simpler.runs, best_.config)) return false;
    Trial trial = best_;
    simpler.change(trial.config);
    return to_toml(trial.config) != to_toml(best_.config) && take(trial);
  }

  bool round() {
    bool changed = false;
    if (concerns(kVideos, best_.config)) changed = shrink_files();
    for (const Size& size : kSizes)
      if (concerns(size.runs, best_.config) && (!size.of_shape || best_.config.model.load.empty()))
        changed = shrink(size) || changed;
    std::vector<int> fewer(static_cast<std::size_t>(best_.ranks));
    std::iota(fewer.begin(), fewer.end(), 1);
    changed = shrink_to_first(fewer, [](Trial& trial) -> int& { return trial.ranks; }) || changed;
    for (const Simpler& simpler : kSimpler) changed = simplify(simpler) || changed;
    const auto strategy = [](Trial& trial) -> std::string& { return trial.config.parallel.strategy; };
    changed = shrink_to_first(strategy_names(), strategy) || changed;  // simplest first
    return changed;
  }

  Trial best_;
  const FailureOf& failure_of_;
  std::map<std::string, std::string> known_;
  std::string failure_;
  int left_, most_;
};

}  // namespace

std::optional<Minimised> minimise(const Trial& trial, const FailureOf& failure_of, int most_trials) {
  return Search(trial, failure_of, most_trials).run();
}

std::optional<Minimised> minimise_run(const RunConfig& config, int ranks,
                                      const std::vector<std::string>& layouts, const ChangeProblem& change) {
  const FailureOf failure_of = [&](const Trial& trial) {
    std::string failure;
    const auto timeout = std::chrono::duration<double>(trial.config.parallel.timeout_seconds);
    run_ranks(trial.ranks,
              [&](World& world) {
                const Verdict verdict = verify_run(trial.config, world, {}, change);
                if (world.rank == 0 && !verdict.passed)
                  failure =
                      verdict.findings.empty() ? "not the gradient of one device" : verdict.findings[0].id;
              },
              {.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(timeout)});
    return failure;
  };
  const bool all = std::ranges::find(layouts, kAllLayouts) != layouts.end();
  std::vector<LayoutChoice> choices;
  for (const auto& name : layouts)
    if (name != kAllLayouts) choices.push_back(parse_layout(name));
  if (all)
    run_ranks(ranks, [&](World& world) {
      if (world.rank != 0) return;
      const auto matrix = layout_matrix(config, ranks, world.group.has_host_memory());
      choices.insert(choices.end(), matrix.begin(), matrix.end());
    });
  if (choices.empty()) choices.push_back({.strategy = config.parallel.strategy});
  RunConfig run = config;
  if (concerns(kVideos, config)) {  // one by one, so that some may be left out
    run.video.files.clear();
    for (const InputFile& file : resolve(config.video.files)) run.video.files.push_back(file.path.string());
  }
  for (const RunConfig& cut : all ? kind_of(run).accumulations(run, ranks) : std::vector<RunConfig>{run})
    for (const auto& choice : choices)
      if (auto found = minimise({choice.in(cut), ranks}, failure_of)) return found;
  return std::nullopt;
}

std::string verify_command(const std::string& file, int ranks) {
  return fmt::format("isograd verify {} --ranks {}", file, ranks);
}

std::string minimised_toml(const Minimised& minimised, const std::string& file) {
  std::string text = fmt::format("# The smallest configuration found that fails, after {} trials:\n#   {}\n",
                                 minimised.tried, verify_command(file, minimised.trial.ranks));
  for (const auto& change : minimised.changes) text += "# " + change + "\n";
  return text + "\n" + to_toml(minimised.trial.config);
}

}  // namespace isograd
