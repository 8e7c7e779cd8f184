#include "train/expert_load.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace isograd {
namespace {

constexpr std::int64_t kMostChoices = std::int64_t{1} << 53;  // of an expert: exact as fp64

// Integers in [0, below); nothing where there is anything else.
std::vector<std::int64_t> choices_below(const nlohmann::json& json, std::int64_t below, bool& fit) {
  std::vector<std::int64_t> values;
  fit = fit && json.is_array();
  for (std::size_t i = 0; fit && i < json.size(); ++i) {
    fit = json[i].is_number_integer();
    if (fit) values.push_back(json[i].get<std::int64_t>());
    fit = fit && values.back() >= 0 && values.back() < below;
  }
  return values;
}

bool ascending(const std::vector<std::int64_t>& values) {
  return std::adjacent_find(values.begin(), values.end(), std::greater_equal<>()) == values.end();
}

}  // namespace

double ExpertLoad::max_over_mean() const {
  const double all = std::accumulate(choices.begin(), choices.end(), 0.0);
  if (all == 0) return std::numeric_limits<double>::quiet_NaN();
  const auto most = static_cast<double>(*std::max_element(choices.begin(), choices.end()));
  return most * static_cast<double>(choices.size()) / all;
}

std::size_t DeadExperts::count() const {
  std::size_t count = 0;
  for (const auto& experts : by_layer) count += experts.size();
  return count;
}

std::string name_dead(const DeadExperts& dead, const std::vector<ExpertLoad>& loads, std::size_t most) {
  std::string text;
  std::size_t named = 0;
  for (std::size_t layer = 0; layer < dead.by_layer.size() && named < most; ++layer) {
    const auto& experts = dead.by_layer[layer];
    const std::size_t here = std::min(experts.size(), most - named);
    if (here > 0) text += fmt::format("{}layer {}: ", text.empty() ? "" : "; ", loads.at(layer).layer);
    for (std::size_t i = 0; i < here; ++i)
      text += fmt::format("{}{}", i == 0 ? "" : i + 1 == experts.size() ? " and " : ", ", experts[i]);
    named += here;
  }
  if (dead.count() > named) text += fmt::format(" and {} more", dead.count() - named);
  return text.empty() ? "none" : text;
}

void IdleExperts::step(const std::vector<ExpertLoad>& loads) {
  if (loads.empty()) return;
  bool same = loads.size() == layers_.size();
  for (std::size_t i = 0; same && i < loads.size(); ++i)
    same = loads[i].layer == layers_[i] && loads[i].choices.size() == idle_[i].size();
  if (!same) {  // another model's log
    steps_ = 0;
    layers_.clear(), idle_.clear();
    for (const ExpertLoad& load : loads) {
      layers_.push_back(load.layer);
      idle_.emplace_back(load.choices.size());
    }
  }
  ++steps_;
  for (std::size_t i = 0; i < loads.size(); ++i)
    for (std::size_t e = 0; e < idle_[i].size(); ++e)
      idle_[i][e] = loads[i].choices[e] > 0 ? 0 : idle_[i][e] + 1;
}

DeadExperts IdleExperts::dead() const {
  DeadExperts dead{.steps = std::min(steps_, kDeadAfter)};
  for (const auto& idle : idle_) {
    auto& experts = dead.by_layer.emplace_back();
    for (std::size_t e = 0; e < idle.size(); ++e)
      if (idle[e] >= dead.steps) experts.push_back(static_cast<std::int64_t>(e));
  }
  return dead;
}

nlohmann::ordered_json experts_json(const std::vector<ExpertLoad>& loads, const DeadExperts& dead) {
  nlohmann::ordered_json json;
  for (const ExpertLoad& load : loads) {
    const double ratio = load.max_over_mean();
    json["layers"].push_back(load.layer);
    json["max_over_mean"].push_back(
        std::isfinite(ratio) ? nlohmann::ordered_json(std::round(ratio * 1e4) / 1e4) : nullptr);
    json["choices"].push_back(load.choices);
  }
  json["dead"] = dead.by_layer;
  json["dead_steps"] = dead.steps;
  return json;
}

std::string read_experts(const nlohmann::json& json, std::vector<ExpertLoad>& loads, DeadExperts& dead) {
  constexpr const char* kMisfit = "loads of experts that do not fit together";
  const nlohmann::json &choices = json.at("choices"), &idle = json.at("dead");
  bool fit = choices.is_array() && idle.is_array();
  const auto layers = choices_below(json.at("layers"), kMostChoices, fit);
  fit = fit && !layers.empty() && ascending(layers) && layers.size() == choices.size() &&
        layers.size() == idle.size();
  for (std::size_t i = 0; fit && i < layers.size(); ++i) {
    loads.push_back({.layer = layers[i], .choices = choices_below(choices[i], kMostChoices, fit)});
    const std::size_t experts = loads.back().choices.size();
    dead.by_layer.push_back(choices_below(idle[i], static_cast<std::int64_t>(experts), fit));
    fit = fit && experts > 0 && ascending(dead.by_layer.back());
  }
  const nlohmann::json& steps = json.at("dead_steps");
  fit = fit && steps.is_number_integer();
  if (fit) dead.steps = steps.get<std::int64_t>();
  return fit && dead.steps >= 0 ? std::string() : kMisfit;
}

}  // namespace isograd
