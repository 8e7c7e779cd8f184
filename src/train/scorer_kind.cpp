// Keys and rules of runs of a scorer.
#include <algorithm>
#include <filesystem>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "isograd/group.hpp"
#include "train/config_keys.hpp"
#include "train/scorer_task.hpp"
#include "train/task_kind.hpp"

namespace isograd {
namespace key_table {
namespace {

std::vector<ConfigKey> scorer_keys() {
  return {
      KEY("data.table", data.table, "", any(),
          "Of a `scorer`: a CSV file (names of columns, then numbers), or an NPZ file with `x` "
          "[rows, features] and `y` [rows].",
          Ranks::kMayDiffer),
      KEY("data.target", data.target, "", any(),
          "The table's column, or array, of targets 0 and 1. Empty: the last column, or `y`."),

      KEY("batch.rows_per_step", batch.rows_per_step, "rows", at_least(1, kManyTokens),
          "The global batch of a `scorer`, over all ranks; its last step of an epoch may be shorter."),

      KEY("model.scorer_units", model.scorer_units, "", at_least(1, kWide),
          "Of each hidden layer of a `scorer`."),
      KEY("model.scorer_layers", model.scorer_layers, "", at_least(0, 1000),
          "Hidden layers of a `scorer`. 0: a linear one."),

      KEY("ranking.loss", ranking.loss, "",
          one_of(
              {"cross_entropy", "smooth_ap", "recall_at_quantile", "pauc", "pauc_pairwise", "sigmoid_focal"}),
          "What a `scorer` is trained by, over the rows of all ranks (`docs/ranking.md`)."),
      KEY("ranking.temperature", ranking.temperature, "", at_least(0),
          "Of the loss's sigmoids. 0: the loss's own default."),
      KEY("ranking.queue_size", ranking.queue_size, "rows", at_least(0, kManyTokens),
          "Rows of earlier steps that take part in the ranking, with the scores that they had."),
      KEY("ranking.quantile", ranking.quantile, "",
          {.least = 0, .most = 1, .above_least = true, .below_most = true},
          "Share of all rows above the threshold of the recall, trained or measured."),
      KEY("ranking.alpha", ranking.alpha, "", fraction(),
          "Where the partial AUC's band of false-positive rates begins."),
      KEY("ranking.budget", ranking.budget, "", {.least = 0, .most = 1, .above_least = true},
          "Where it ends; the measured partial AUC begins at 0."),
      KEY("ranking.compare", ranking.compare, "", any(),
          "Whether a second scorer is trained by cross entropy, from the same weights on the same "
          "rows, for the report."),
  };
}

}  // namespace
}  // namespace key_table

namespace {

void check_scorer(const RunConfig& config, int ranks) {
  const int sharing = grid_of(config, ranks).size(kContextAxes);
  const auto refuse = [](const char* key, std::string found, const char* expected) {
    isograd::refuse(key, std::move(found) + " with model.kind = \"scorer\"", expected,
                    "Leave it out: a scorer's rows are not cut, nor its gradient proven on the way; isograd "
                    "verify proves it from outside");
  };
  if (sharing > 1) refuse("parallel.cp_ring, parallel.cp_ulysses", std::to_string(sharing) + " ranks", "1");
  if (config.parallel.tp > 1) {
    const std::string& load = config.model.load;
    const ScorerShape shape =
        load.empty() ? ScorerShape{.hidden = config.model.scorer_units, .layers = config.model.scorer_layers}
                     : read_scorer_shape(load);
    if (shape.layers == 0)
      isograd::refuse("parallel.tp",
                      fmt::format("{} for a scorer without a hidden layer", config.parallel.tp),
                      "1: the units of hidden layers are what ranks have some of each", "Leave it out");
    check_dealt(config, {.others = {{"units of a hidden layer", shape.hidden}}});
  }
  if (config.batch.max_tokens_per_rank > 0)
    refuse("batch.max_tokens_per_rank", std::to_string(config.batch.max_tokens_per_rank), "0");
  if (config.verify.every > 0) refuse("verify.every", std::to_string(config.verify.every), "0");
  if (ranks > config.batch.rows_per_step)
    isograd::refuse(
        fmt::format("--ranks {}", ranks),
        fmt::format("more ranks than rows (batch.rows_per_step = {})", config.batch.rows_per_step),
        "a row for each rank at least", "Start fewer ranks, or enlarge batch.rows_per_step");
}

// The same scorer from the same weights on the same rows, by cross entropy.
std::optional<RunConfig> scorer_comparison(const RunConfig& config) {
  constexpr const char* kOther = "cross_entropy";
  if (!config.ranking.compare || config.ranking.loss == kOther) return std::nullopt;
  RunConfig other = config;
  other.ranking.loss = kOther;
  other.run.directory = (std::filesystem::path(config.run.directory) / kOther).string();
  other.run.json_log.clear();
  return other;
}

}  // namespace

const TaskKind& scorer_kind() {
  static const TaskKind kind{
      .name = "scorer",
      .samples = "rows",
      .tokens = "rows",
      .smaller = "batch.rows_per_step",
      .samples_per_step = [](const RunConfig& config) { return config.batch.rows_per_step; },
      .keys = key_table::scorer_keys,
      .unused = {{"sample.", "model.kind is \"scorer\", which generates no text"}},
      .check_ranks = check_scorer,
      .accumulations = [](const RunConfig& config, int) { return std::vector<RunConfig>{config}; },
      .accumulation_text = [](const RunConfig&) -> std::string { return "one micro-batch"; },
      .comparison = scorer_comparison,
      .on_gpu = false,
      .cuts_tokens = false,
      .make = make_scorer_task};
  return kind;
}

}  // namespace isograd
