#include "verify/minimise.hpp"

#include <algorithm>
#include <map>

#include "isograd/differentiable.hpp"
#include "isograd/error.hpp"
#include "train/config_table.hpp"
#include "verify/layouts.hpp"

namespace isograd {
namespace {

// One number of a trial that may shrink to `least`.
struct Size {
  std::int64_t (*get)(const Trial&);
  void (*set)(Trial&, std::int64_t);
  std::int64_t (*least)(const Trial&);
  bool of_shape = false;  // of the model: fixed where weights are loaded
};

std::int64_t one(const Trial&) {
  return 1;
}
std::int64_t most_packs(const Trial& trial) {
  return split_rows(trial.config.batch.packs_per_step, trial.ranks)[0];
}
std::int64_t parts(std::int64_t whole, std::int64_t part) {
  return (whole + part - 1) / part;
}

// Cheap ones to check first: what makes every later trial smaller. Vocabulary is the tokenizer's.
constexpr Size kSizes[] = {
    {[](const Trial& t) { return t.config.model.shape.layers; },
     [](Trial& t, std::int64_t n) { t.config.model.shape.layers = n; }, one, true},
    {[](const Trial& t) { return t.config.data.pack_length; },
     [](Trial& t, std::int64_t n) { t.config.data.pack_length = n; },
     [](const Trial&) { return std::int64_t{2}; }},
    {[](const Trial& t) { return t.config.batch.packs_per_step; },
     [](Trial& t, std::int64_t n) {  // in as many micro-batches
       const std::int64_t rounds = parts(most_packs(t), t.config.batch.packs_per_micro_batch);
       t.config.batch.packs_per_step = n;
       t.config.batch.packs_per_micro_batch = parts(most_packs(t), rounds);
     },
     [](const Trial& t) { return std::int64_t{t.ranks}; }},
    {[](const Trial& t) { return t.config.model.shape.feed_forward; },
     [](Trial& t, std::int64_t n) { t.config.model.shape.feed_forward = n; }, one, true},
    {[](const Trial& t) { return t.config.model.shape.hidden; },
     [](Trial& t, std::int64_t n) { t.config.model.shape.hidden = n; }, one, true},
    {[](const Trial& t) { return t.config.model.shape.heads; },
     [](Trial& t, std::int64_t n) {
       auto& shape = t.config.model.shape;
       shape.heads = n;
       if (n % shape.key_value_heads != 0) shape.key_value_heads = n;
     },
     one, true},
    {[](const Trial& t) { return t.config.model.shape.head_dim / 2; },
     [](Trial& t, std::int64_t n) { t.config.model.shape.head_dim = 2 * n; }, one, true},
    // Micro-batches of the fullest rank.
    {[](const Trial& t) { return parts(most_packs(t), t.config.batch.packs_per_micro_batch); },
     [](Trial& t, std::int64_t n) { t.config.batch.packs_per_micro_batch = parts(most_packs(t), n); }, one},
};

// Options that a failure may not need, each towards what is simpler.
constexpr void (*kSimpler[])(RunConfig&) = {
    [](RunConfig& c) { c.parallel.replicas = 1; },
    [](RunConfig& c) { c.parallel.share_parameters = "off"; },
    [](RunConfig& c) { c.parallel.overlap = false; },
    [](RunConfig& c) { c.parallel.prefetch = false; },
    [](RunConfig& c) { c.parallel.checkpoint_activations = false; },
    [](RunConfig& c) { c.parallel.reduce_once = false; },
    [](RunConfig& c) { c.parallel.gather_limit_bytes = 0; },
    [](RunConfig& c) { c.loss.fused = "off"; },
    [](RunConfig& c) { c.loss.kind = "token_mean"; },
    [](RunConfig& c) { c.model.shape.key_value_heads = c.model.shape.heads; },
    [](RunConfig& c) { c.model.shape.tied_output = false; },
    [](RunConfig& c) { c.train.max_norm = 0; },
    [](RunConfig& c) { c.train.dtype = "float64"; },
    [](RunConfig& c) { c.data.shuffle_packs = false; },
};

class Search {
 public:
  Search(const Trial& trial, const FailureOf& failure_of, int most_trials)
      : best_(trial), failure_of_(failure_of), left_(most_trials), most_(most_trials) {}

  std::optional<Minimised> run() {
    const Trial first = best_;
    failure_ = ask(best_);
    if (failure_.empty()) return std::nullopt;
    while (round()) {
    }
    Minimised result{.trial = best_, .failure = failure_, .tried = most_ - left_, .changes = {}};
    if (first.ranks != best_.ranks)
      result.changes.push_back(fmt::format("ranks {} -> {}", first.ranks, best_.ranks));
    for (const auto& key : config_keys()) {
      const auto before = toml_text(key.get(first.config)), after = toml_text(key.get(best_.config));
      if (before != after) result.changes.push_back(fmt::format("{} {} -> {}", key.name, before, after));
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
      check(trial.config.model.shape);
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
    const auto with = [&](std::int64_t value) {
      Trial trial = best_;
      size.set(trial, value);
      return trial;
    };
    if (passes >= fails) return false;
    if (take(with(passes))) return true;
    while (fails - passes > 1) {
      const std::int64_t middle = passes + (fails - passes) / 2;
      (take(with(middle)) ? fails : passes) = middle;
    }
    return fails < before;
  }

  bool shrink_ranks() {
    for (int ranks = 1; ranks < best_.ranks; ++ranks) {
      Trial trial = best_;
      trial.ranks = ranks;
      if (take(trial)) return true;
    }
    return false;
  }

  bool simplify(void (*change)(RunConfig&)) {
    Trial trial = best_;
    change(trial.config);
    return to_toml(trial.config) != to_toml(best_.config) && take(trial);
  }

  bool simplify_strategy() {
    for (const auto& strategy : strategy_names()) {  // simplest first
      if (strategy == best_.config.parallel.strategy) return false;
      Trial trial = best_;
      trial.config.parallel.strategy = strategy;
      if (take(trial)) return true;
    }
    return false;
  }

  bool round() {
    bool changed = false;
    for (const Size& size : kSizes)
      if (!size.of_shape || best_.config.model.load.empty()) changed = shrink(size) || changed;
    changed = shrink_ranks() || changed;
    for (auto change : kSimpler) changed = simplify(change) || changed;
    changed = simplify_strategy() || changed;
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
  const bool all = std::find(layouts.begin(), layouts.end(), kAllLayouts) != layouts.end();
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
  for (const RunConfig& cut : all ? accumulation_matrix(config, ranks) : std::vector<RunConfig>{config})
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
