#include "verify/layouts.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "base/refuse.hpp"
#include "isograd/group.hpp"
#include "train/build.hpp"
#include "train/device.hpp"
#include "verify/meshes.hpp"

namespace isograd {
namespace {

[[noreturn]] void refuse_layout(const std::string& text) {
  refuse("--layout", text,
         fmt::format("{}, or {} or {}; behind a name :replicas=N and :share=on or :share=off",
                     fmt::join(strategy_names(), ", "), kAllMeshes, kAllLayouts),
         "Choose one of them");
}

bool shards(const std::string& strategy) {
  return strategy.starts_with("zero");
}

// Strategies that keep gradients one by one have no use for one copy of the parameters.
bool may_share(const std::string& strategy) {
  return strategy != "naive" && strategy != "overlapped";
}

}  // namespace

std::string LayoutChoice::text() const {
  std::string text = strategy;
  if (replicas) text += fmt::format(":replicas={}", *replicas);
  if (share_parameters) text += *share_parameters ? ":share=on" : ":share=off";
  return text;
}

RunConfig LayoutChoice::in(RunConfig config) const {
  config.parallel.strategy = strategy;
  if (replicas) config.parallel.replicas = *replicas;
  if (!shards(strategy)) {  // what only shards have
    config.parallel.replicas = 1;
    config.parallel.cp_fsdp_mode = RunConfig{}.parallel.cp_fsdp_mode;
  }
  if (share_parameters) config.parallel.share_parameters = *share_parameters ? "on" : "off";
  return config;
}

LayoutChoice parse_layout(const std::string& text) {
  LayoutChoice choice;
  std::size_t begin = 0;
  for (bool first = true; begin <= text.size(); first = false) {
    const std::size_t end = std::min(text.find(':', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    begin = end + 1;
    if (first) {
      const auto names = strategy_names();
      if (std::find(names.begin(), names.end(), part) == names.end()) refuse_layout(text);
      choice.strategy = part;
    } else if (part == "share=on" || part == "share=off") {
      choice.share_parameters = part == "share=on";
    } else if (part.starts_with("replicas=")) {
      std::int64_t replicas = 0;
      const char* last = part.data() + part.size();
      const auto [stop, problem] = std::from_chars(part.data() + 9, last, replicas);
      if (problem != std::errc() || stop != last || replicas < 1 || !shards(choice.strategy))
        refuse_layout(text);
      choice.replicas = replicas;
    } else {
      refuse_layout(text);
    }
  }
  return choice;
}

std::vector<LayoutChoice> layout_matrix(const RunConfig& config, int ranks, bool host_memory) {
  std::vector<LayoutChoice> all;
  const bool by_replica = normalises_by_replica(config);
  for (const auto& strategy : strategy_names()) {
    // Refused by that strategy.
    if (strategy == "zero3" && (!config.train.fp32_gradients || cuts_backwards(config))) continue;
    const int data_ranks =
        grid_of(config, ranks).size(kSampleAxes);  // ranks that share samples belong to one replica
    for (std::int64_t replicas = 1; replicas <= (shards(strategy) ? data_ranks : 1); ++replicas) {
      if (data_ranks % replicas != 0) continue;
      for (const bool share : {false, true}) {
        LayoutChoice choice{.strategy = strategy};
        if (shards(strategy)) choice.replicas = replicas;
        // One copy needs somebody to share it with.
        const RunConfig chosen = choice.in(config);
        const Grid grid = grid_of(chosen, ranks);
        if (share && (!may_share(strategy) || !host_memory || grid.size(sharded_axes(chosen)) == 1)) continue;
        if (may_share(strategy) || config.parallel.share_parameters == "on") choice.share_parameters = share;
        if (by_replica && grid.size({"dp_replicate"}) != grid_of(config, ranks).size({"dp_replicate"}))
          continue;
        all.push_back(std::move(choice));
      }
    }
  }
  return all;
}

std::vector<LayoutChoice> chosen_layouts(const RunConfig& config, const std::vector<std::string>& names,
                                         const World& world) {
  std::vector<LayoutChoice> choices;
  const bool host_memory = world.group.has_host_memory() && device_kind(config) == "cpu";
  for (const auto& name : names) {
    if (name == kAllMeshes) continue;
    if (name != kAllLayouts) {
      choices.push_back(parse_layout(name));
      continue;
    }
    const auto all = layout_matrix(config, world.size, host_memory);
    choices.insert(choices.end(), all.begin(), all.end());
  }
  if (names.empty()) choices.push_back({.strategy = config.parallel.strategy});
  return choices;
}

}  // namespace isograd
