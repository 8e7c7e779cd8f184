#include "train/build.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <map>
#include <set>

#include "base/pattern.hpp"
#include "base/refuse.hpp"

namespace isograd {
namespace {

std::string stripped(const std::string& text) {
  const auto first = text.find_first_not_of(" \t"), last = text.find_last_not_of(" \t");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

bool is_number(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(),
                                      [](unsigned char letter) { return std::isdigit(letter) != 0; });
}

std::string layer_of(const std::string& name) {
  for (std::size_t begin = 0; begin < name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    if (is_number(name.substr(begin, end - begin))) return name.substr(0, end);
    begin = end + 1;
  }
  const std::size_t last = name.rfind('.');
  return last == std::string::npos ? name : name.substr(0, last);
}

std::string part_of(const std::string& by, const std::string& name) {
  if (by == "layers") return layer_of(name);
  if (by == "groups") return name.find(".experts.") == std::string::npos ? "dense" : "experts";
  return name;
}

}  // namespace

at::ScalarType scalar_type(const std::string& dtype) {
  if (dtype == "float64") return at::kDouble;
  if (dtype == "float32") return at::kFloat;
  if (dtype == "bfloat16") return at::kBFloat16;
  refuse("train.dtype", dtype, "float64, float32 or bfloat16", "Choose one of them");
}

DecoderConfig configured_shape(const RunConfig& config) {
  if (!config.model.load.empty()) return read_hf_config(config.model.load);
  DecoderConfig shape = config.model.shape;
  shape.experts.sigmoid = shape.family == "dots1";
  for (std::int64_t layer = 0; layer < shape.layers; ++layer)
    if (layer < config.model.dense_layers || (layer + 1) % config.model.experts_every != 0)
      shape.experts.dense_layers.push_back(layer);
  return shape;
}

Mean mean_of(const RunConfig& config) {
  static const std::map<std::string, Mean> means = {{"sample_mean", Mean::kSamples},
                                                    {"weighted_mean", Mean::kWeights},
                                                    {"fixed", Mean::kFixed},
                                                    {"none", Mean::kNone}};
  const auto found = means.find(config.loss.kind);
  return found == means.end() ? Mean::kTargets : found->second;
}

std::unique_ptr<Normalizer> make_normalizer(Mean mean, double fixed, const NormalizerOptions& options) {
  if (mean == Mean::kSamples) return std::make_unique<SampleMean>(options);
  if (mean == Mean::kWeights) return std::make_unique<WeightedMean>(options);
  if (mean == Mean::kFixed) return std::make_unique<FixedDenominator>(fixed, options);
  if (mean == Mean::kNone) return std::make_unique<NoDenominator>(options);
  return std::make_unique<TokenMean>(options);
}

std::unique_ptr<Normalizer> make_normalizer(const RunConfig& config, int ranks) {
  const int replicas = normalises_by_replica(config) ? grid_of(config, ranks).size({"dp_replicate"}) : 1;
  return make_normalizer(mean_of(config), config.loss.denominator, {.replicas = replicas});
}

Schedule make_schedule(const RunConfig& config) {
  Schedule schedule = config.schedule;
  schedule.total = config.train.steps;
  return schedule;
}

std::unique_ptr<Optimizer> make_optimizer(const RunConfig& config) {
  if (config.optimizer.kind == "adamw") {
    AdamWOptions options = config.optimizer.adamw;
    options.learning_rate = config.schedule.peak;
    return adamw(options);
  }
  if (config.optimizer.kind == "sgd")
    return sgd({.learning_rate = config.schedule.peak,
                .momentum = config.optimizer.momentum,
                .weight_decay = config.optimizer.adamw.weight_decay});
  refuse("optimizer.kind", config.optimizer.kind, "adamw or sgd", "Choose one of them");
}

std::vector<ClipGroup> clip_groups_of(const RunConfig& config, const std::string& where) {
  std::vector<ClipGroup> groups;
  for (const std::string& text : config.train.clip_groups) {
    if (text.size() > kMostPattern)
      refuse(where, fmt::format("train.clip_groups with {} characters", text.size()),
             fmt::format("at most {}", kMostPattern), "Shorten the pattern");
    const auto refuse_if = [&](bool wrong, const char* what, const char* action) {
      if (wrong)
        refuse(where, fmt::format("train.clip_groups with \"{}\", {}", text, what),
               "\"PATTERN: LIMIT\", as in \"*.experts.*: 0.5\"", action);
    };
    const auto colon = text.rfind(':');
    refuse_if(colon == std::string::npos, "which names no limit", "Write the limit behind a colon");
    const std::string pattern = stripped(text.substr(0, colon)), number = stripped(text.substr(colon + 1));
    refuse_if(pattern.empty(), "which names no parameter", "Write a pattern before the colon");
    double limit = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), limit);
    refuse_if(
        error != std::errc() || end != number.data() + number.size() || !std::isfinite(limit) || limit <= 0,
        "whose limit is no number above 0", "Give a norm above 0, or leave the group out");
    refuse_if(std::ranges::find(groups, pattern, &ClipGroup::pattern) != groups.end(),
              "a pattern that is there already", "Leave one of the two out");
    groups.push_back({pattern, limit});
  }
  return groups;
}

void check_clip_groups(const RunConfig& config, const NamedTensors& named) {
  std::set<std::string> used;
  const std::vector<ClipGroup> groups = clip_groups_of(config, "train.clip_groups");
  for (const auto& [name, tensor] : named) {
    const ClipGroup* first = nullptr;
    for (const ClipGroup& group : groups) {
      if (!tensor.requires_grad() || !matches(group.pattern, name)) continue;
      if (first)
        refuse("train.clip_groups",
               fmt::format("{} in two groups, {} and {}", name, first->pattern, group.pattern),
               "each parameter in one group at most", "Make the patterns such that they exclude one another");
      first = &group;
      used.insert(group.pattern);
    }
  }
  for (const ClipGroup& group : groups)
    if (!used.contains(group.pattern))
      refuse("train.clip_groups", fmt::format("{}, which fits no trained parameter", group.pattern),
             "patterns of names such as model.layers.0.mlp.up_proj.weight",
             "Change it or leave it out; isograd layout lists the names");
}

NormParts norm_parts_of(const RunConfig& config, const NamedTensors& named) {
  const std::string& by = config.train.part_norms;
  NormParts parts;
  if (by == "off") return parts;
  std::map<std::string, int> places, of_parameter;
  for (const auto& [name, tensor] : named) {
    if (!tensor.requires_grad()) continue;
    const std::string part = part_of(by, name);
    const auto [place, fresh] = places.emplace(part, static_cast<int>(parts.names.size()));
    if (fresh) parts.names.push_back(part);
    of_parameter[name] = place->second;
  }
  parts.of = [of_parameter = std::move(of_parameter)](const std::string& name) {
    const auto found = of_parameter.find(name);
    return found == of_parameter.end() ? -1 : found->second;
  };
  return parts;
}

}  // namespace isograd
