// Text of the table of keys (values as TOML, the nearest key, the documentation) and checks of values
// against each other and the ranks.
#include <fmt/format.h>
#include <utf8.h>

#include <algorithm>
#include <cmath>
#include <string_view>

#include "base/files.hpp"
#include "base/paths.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "train/build.hpp"
#include "train/config.hpp"
#include "train/config_table.hpp"
#include "train/device.hpp"
#include "train/task_kind.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

// Quotes a text for TOML. Characters that a terminal would not show are escaped by number.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  auto bad = utf8::find_invalid(text.begin(), text.end());
  for (auto at = text.begin(); at != text.end();) {
    if (at == bad) {
      result += *at++;
      bad = utf8::find_invalid(at, text.end());
      continue;
    }
    const auto begin = at;
    const std::uint32_t character = utf8::next(at, text.end());
    const std::string bytes(begin, at);
    if (bytes == "\"" || bytes == "\\")
      result += '\\' + bytes;
    else if (bytes == "\n")
      result += "\\n";
    else if (bytes == "\t")
      result += "\\t";
    else if (printable(bytes) != bytes)
      result += fmt::format("\\u{:04X}", character);
    else
      result += bytes;
  }
  return result + '"';
}

std::string_view last_name(std::string_view name) {
  return name.substr(name.rfind('.') + 1);
}

// Keys that have a value but no effect with the values of other keys.
std::vector<UnusedKeys> unused_in(const RunConfig& config) {
  std::vector<UnusedKeys> rules;
  const auto add = [&](bool unused, UnusedKeys keys) {
    if (unused) rules.push_back(std::move(keys));
  };
  add(config.data.shards.empty(), {"data.end_of_text", "data.shards is empty, and text has its own marks"});
  add(!config.model.load.empty(), {"model.",
                                   "model.load is given, and its config.json describes the model",
                                   {"model.load", "model.kind"}});
  add(config.model.shape.rope_scaling.kind == "default",
      {"model.rope_scaling.",
       "model.rope_scaling.kind is \"default\": no scaling",
       {"model.rope_scaling.kind"}});
  for (const char* key : {"parallel.sequence_parallel", "parallel.tensor_overlap"})
    add(config.parallel.tp == 1, {key, "parallel.tp is 1"});
  for (const char* key : {"parallel.replicas", "parallel.cp_fsdp_mode"})
    add(stage_of(config.parallel.strategy) == 0,
        {key, fmt::format("parallel.strategy is \"{}\", which does not shard", config.parallel.strategy)});
  add(config.parallel.ep == 1, {"parallel.expert_overlap", "parallel.ep is 1"});
  for (const char* key : {"parallel.schedule", "parallel.stages_per_rank"})
    add(config.parallel.pp == 1, {key, "parallel.pp is 1"});
  add(config.loss.balance == 0, {"loss.balance_", "loss.balance is 0: no balance loss"});
  const TaskKind& own = kind_of(config);
  rules.insert(rules.end(), own.unused.begin(), own.unused.end());
  for (const TaskKind* kind : task_kinds())
    if (kind != &own) rules.insert(rules.end(), kind->of_no_other.begin(), kind->of_no_other.end());
  add(config.optimizer.kind != "sgd", {"optimizer.momentum", "optimizer.kind is not \"sgd\""});
  for (const char* prefix : {"optimizer.beta", "optimizer.epsilon"})
    add(config.optimizer.kind != "adamw", {prefix, "optimizer.kind is not \"adamw\""});
  return rules;
}

// [loss] must declare one loss. For a contradiction the message explains both readings.
void check_loss(const RunConfig& config, const std::string& where) {
  const auto& loss = config.loss;
  const auto refuse = [&](std::string found, std::string expected, std::string action) {
    isograd::refuse(where, std::move(found), std::move(expected), std::move(action));
  };
  const bool fixed = loss.kind == "fixed", counted = !fixed && loss.kind != "none";
  if (fixed && loss.denominator == 0)
    refuse("loss.kind = \"fixed\" without loss.denominator", "the number to divide by",
           "Set loss.denominator");
  if (!fixed && loss.denominator != 0)
    refuse(fmt::format("loss.kind = \"{}\" with loss.denominator = {:g}", loss.kind, loss.denominator),
           fmt::format("one of two readings: {}, or the sum divided by {:g}",
                       counted ? "a mean whose denominator is counted" : "a pure sum", loss.denominator),
           "Leave loss.denominator out for the first, or set loss.kind = \"fixed\" for the second");
  const std::vector<std::string> axes = {"dp_replicate", "dp_shard", "cp_ring", "cp_ulysses"};
  std::vector<std::string> seen;
  for (const auto& axis : loss.normalise_over) {
    if (axis == "tp" || axis == "pp" || axis == "ep")
      refuse(fmt::format("loss.normalise_over with {}", axis),
             "data axes only: dp_replicate, dp_shard, cp_ring, cp_ulysses",
             fmt::format("Leave {} out: its ranks see the same tokens, which would be counted twice", axis));
    if (std::find(axes.begin(), axes.end(), axis) == axes.end())
      refuse(fmt::format("loss.normalise_over with \"{}\"", axis),
             "dp_replicate, dp_shard, cp_ring, cp_ulysses", "Correct the axis");
    if (std::find(seen.begin(), seen.end(), axis) != seen.end())
      refuse(fmt::format("loss.normalise_over with {} twice", axis), "each axis once",
             "Remove the repetition");
    seen.push_back(axis);
  }
  for (const auto& axis : axes)
    if (axis != "dp_replicate" && std::find(seen.begin(), seen.end(), axis) == seen.end())
      refuse(fmt::format("loss.normalise_over without {}", axis), "at least dp_shard, cp_ring and cp_ulysses",
             fmt::format("Add {}: a mean of means over it depends on how one batch was split; only replicas "
                         "(dp_replicate) may be normalised by themselves",
                         axis));
  const bool by_replica = normalises_by_replica(config);
  if (by_replica && !counted)
    refuse(
        fmt::format("loss.kind = \"{}\" with loss.normalise_over without dp_replicate", loss.kind),
        fmt::format(
            "one of two readings: the sum over all ranks divided by {}, or the mean of per-replica means",
            fixed ? fmt::format("{:g}", loss.denominator) : "nothing"),
        "Add dp_replicate for the first, or choose token_mean, sample_mean or weighted_mean for the second");
  const char* const one =
      "Set loss.dp_replicate_reduction = \"sum\" and name dp_replicate in loss.normalise_over "
      "for the first; \"mean\" and leave it out for the second";
  const char* const readings =
      "one of two readings: one mean over every token of the batch, with gradients summed over "
      "replicas; or the mean of per-replica means, which depends on how samples are assigned to "
      "the replicas";
  if (loss.dp_replicate_reduction == "mean" && !by_replica)
    refuse("loss.dp_replicate_reduction = \"mean\" with dp_replicate in loss.normalise_over", readings, one);
  if (loss.dp_replicate_reduction == "sum" && by_replica)
    refuse("loss.dp_replicate_reduction = \"sum\" with loss.normalise_over without dp_replicate", readings,
           one);
}

// "organisation/name" if the text names a repository on the Hugging Face Hub, by its form or its address,
// and no local folder.
std::optional<std::string> hub_id(const std::string& text) {
  std::string_view id = text;
  bool address = false;
  for (const std::string_view begin : {"https://huggingface.co/", "https://hf.co/", "hf://"})
    if (id.starts_with(begin)) id.remove_prefix(begin.size()), address = true;
  while (!id.empty() && id.back() == '/') id.remove_suffix(1);
  const auto slash = id.find('/');
  const auto names = [](std::string_view part) {
    const auto may_be_in = [](char c) {
      return std::isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
    };
    return !part.empty() && part.front() != '.' && std::all_of(part.begin(), part.end(), may_be_in);
  };
  if (slash == std::string_view::npos || !names(id.substr(0, slash)) || !names(id.substr(slash + 1)))
    return std::nullopt;
  std::error_code error;
  if (!address && fs::exists(fs::path(id.substr(0, slash)), error))
    return std::nullopt;  // a path that is wrong
  return std::string(id);
}

}  // namespace

std::string toml_text(const ConfigValue& value) {
  if (auto flag = std::get_if<bool>(&value)) return *flag ? "true" : "false";
  if (auto integer = std::get_if<std::int64_t>(&value)) return std::to_string(*integer);
  if (auto text = std::get_if<std::string>(&value)) return quoted(*text);
  if (auto texts = std::get_if<std::vector<std::string>>(&value)) {
    std::string list;
    for (const auto& text : *texts) list += (list.empty() ? "" : ", ") + quoted(text);
    return "[" + list + "]";
  }
  const double number = std::get<double>(value);
  const std::string text = fmt::format("{}", number);  // the shortest that reads back to the same bits
  const bool integral = std::isfinite(number) && text.find_first_of(".e") == std::string::npos;
  return integral ? text + ".0" : text;
}

std::optional<std::string> nearest(std::string_view text, const std::vector<std::string>& candidates) {
  std::optional<std::string> best;
  std::size_t least = near_enough(text) + 1;
  for (const auto& candidate : candidates) {
    // The right key in the wrong section is near. A length difference of `least` or more cannot be within
    // `least` edits.
    const bool same_key = last_name(candidate) == last_name(text) && candidate.find('.') != std::string::npos;
    const std::size_t longer = std::max(candidate.size(), text.size()),
                      shorter = candidate.size() + text.size() - longer;
    if (!same_key && longer - shorter >= least) continue;
    const std::size_t distance = same_key ? candidate != text : edit_distance(candidate, text);
    if (distance < least) {
      least = distance;
      best = candidate;
    }
  }
  return best;
}

bool normalises_by_replica(const RunConfig& config) {
  const auto& axes = config.loss.normalise_over;
  return std::find(axes.begin(), axes.end(), "dp_replicate") == axes.end();
}

void check_together(const RunConfig& config, const std::string& where) {
  check_loss(config, where);
  clip_groups_of(config, where);
  if (!config.data.text.empty() && !config.data.shards.empty())
    isograd::refuse(where, "both data.text and data.shards", "one of them",
                    "Pack the text with `isograd data pack` and add the shards it writes, or leave one of "
                    "the two empty");
  if (config.parallel.strategy == "naive" && config.parallel.share_parameters == "on")
    isograd::refuse(where, "parallel.share_parameters = \"on\" with parallel.strategy = \"naive\"",
                    "a strategy whose ranks may keep one copy of the parameters",
                    "Set parallel.strategy = \"bucketed\", \"zero1\", \"zero2\" or \"zero3\", or leave "
                    "parallel.share_parameters out");
  if (config.parallel.backend == "nccl" && config.parallel.device == "cpu")
    isograd::refuse(where, "parallel.backend = \"nccl\" with parallel.device = \"cpu\"",
                    "ranks on GPUs, which alone NCCL joins",
                    "Set parallel.device = \"cuda\", or leave parallel.backend out");
  const RunConfig defaults;
  const std::vector<UnusedKeys> unused = unused_in(config);
  for (const auto& key : config_keys()) {
    const ConfigValue value = key.get(config), usual = key.get(defaults);
    if (value == usual) continue;
    for (const UnusedKeys& rule : unused) {
      const auto& spared = rule.exceptions;
      if (!key.name.starts_with(rule.prefix)) continue;
      if (std::find(spared.begin(), spared.end(), key.name) != spared.end()) continue;
      isograd::refuse(
          where, fmt::format("{} = {}, which has no effect: {}", key.name, toml_text(value), rule.reason),
          "only keys that have an effect",
          fmt::format("Leave {} out (its default is {})", key.name, toml_text(usual)));
    }
  }
}

void require_model_folder(const std::string& text, const std::string& where) {
  std::error_code error;
  if (fs::is_directory(text, error)) return;
  if (const auto id = hub_id(text)) {
    const std::string folder = "models/" + id->substr(id->find('/') + 1);
    refuse(
        where, fmt::format("\"{}\", no such folder", text),
        "a folder of a run, or with config.json and weights",
        fmt::format("Correct the path; if it is the name of a model on the Hugging Face Hub, fetch it with "
                    "`hf download {} --local-dir {}` and name {}",
                    *id, folder, folder));
  }
  refuse(where,
         fmt::format("\"{}\", {}", text, fs::exists(text, error) ? "which is no folder" : "no such folder"),
         "a Hugging Face directory (config.json and weights) or a checkpoint",
         fs::exists(text, error) ? "Name the folder that the file is in" : missing_path_action(text));
}

void check(const RunConfig& config, int ranks) {
  check_device(config, ranks);
  check_but_devices(config, ranks);
}

void check_but_devices(const RunConfig& config, int ranks) {
  if (!config.model.load.empty()) require_model_folder(config.model.load, "model.load");
  const Grid grid = grid_of(config, ranks);
  const int distinct = grid.size(kSampleAxes), sharing = ranks / distinct;
  const TaskKind& kind = kind_of(config);
  if (kind.check_ranks) kind.check_ranks(config, ranks);
  if (config.parallel.share_parameters == "on" && grid.size(sharded_axes(config)) == 1)
    refuse("parallel.share_parameters",
           fmt::format("\"on\" for {}, of which none has another one's parameters",
                       ranks == 1 ? "one rank" : fmt::format("{} ranks", ranks)),
           "ranks along an axis that the strategy spreads parameters or their sums over",
           "Leave it out (\"auto\" shares wherever there are ranks to share with)");
  const std::int64_t batch = kind.samples_per_step(config);
  const std::string samples = kind.samples, key = "batch." + samples + "_per_step";
  if (distinct > batch)
    refuse(fmt::format("--ranks {}", ranks),
           fmt::format("more ranks than {} in the batch ({} = {}): some would never have anything to do",
                       samples, key, batch),
           fmt::format("at most {} ranks", batch * sharing),
           fmt::format("Start with --ranks {}, or enlarge the batch with --set {}={}", batch * sharing, key,
                       distinct));
}

std::string configuration_markdown() {
  std::string text =
      "# Configuration\n\n"
      "A run is described by a TOML file; every key has a default, so the file holds only what "
      "differs. `--set section.key=value` on the command line overrides the file. Unknown "
      "keys, wrong types and impossible values are errors that name file, line, what is "
      "allowed and the nearest key.\n\n"
      "This page is generated from the table that parses the file: `isograd config --markdown "
      "> docs/configuration.md`. `isograd config CONFIG.toml` prints a file with every key "
      "written out.\n\n"
      "The ranks of a run must have the same configuration. Only keys marked *may differ* may "
      "have other values on other hosts: they name files, and what is in the files must still "
      "be the same.\n";
  for (const auto& section : config_sections()) {
    text += fmt::format("\n## [{}]\n\n{}\n\n| key | default | allowed | meaning |\n|---|---|---|---|\n",
                        section.name, section.description);
    for (const auto& key : config_keys()) {
      const auto dot = key.name.rfind('.');
      if (key.name.substr(0, dot) != section.name) continue;
      text += fmt::format("| `{}` | `{}` | {} | {} |\n", key.name.substr(dot + 1),
                          toml_text(key.get(RunConfig{})), allowed_text(key),
                          key.description + (key.ranks == Ranks::kMayDiffer ? " *May differ.*" : ""));
    }
  }
  return text;
}

}  // namespace isograd
