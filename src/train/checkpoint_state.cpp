#include "train/checkpoint_state.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/json.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

constexpr int kFormat = 1;

// Visits every field with its key, for writing and reading alike. Counts are checked to be 0 or more.
template <class State, class Visit>
void state_fields(State& state, Visit visit) {
  visit("step", state.step);
  visit("updates", state.updates);
  visit("skipped", state.skipped);
  visit("epoch", state.position.epoch);
  visit("step_of_epoch", state.position.step);
  visit("seed", state.seed);
  visit("pack_length", state.pack_length);
  visit("packs_per_step", state.packs_per_step);
  visit("shuffle_packs", state.shuffle_packs);
  visit("validation_fraction", state.validation_fraction);
  visit("documents", state.documents);
  visit("tokens", state.tokens);
  visit("optimizer", state.optimizer);
  visit("dtype", state.dtype);
  visit("tokenizer", state.tokenizer);
  visit("config", state.config);
  visit("bucket_order", state.bucket_order);
  visit("order", state.order);
  visit("missed_updates", state.missed_updates);
}

struct Reader {
  const nlohmann::json& json;
  const std::string& file;

  [[noreturn]] void bad(const char* key, const std::string& found, const std::string& expected) const {
    refuse(file + ": " + key, found, expected, "Restore the file or resume from another checkpoint");
  }
  const nlohmann::json& at(const char* key) const {
    if (!json.contains(key)) bad(key, "no such key", "a value");
    return json[key];
  }
  void operator()(const char* key, std::int64_t& value) const {
    const auto& item = at(key);
    const bool any_sign = std::string_view(key) == "seed";
    if (!item.is_number_integer() || (!any_sign && item.get<std::int64_t>() < 0))
      bad(key, item.dump(), any_sign ? "an integer" : "an integer, 0 or more");
    value = item.get<std::int64_t>();
  }
  void operator()(const char* key, double& value) const {
    if (!at(key).is_number()) bad(key, at(key).dump(), "a number");
    value = at(key).get<double>();
  }
  void operator()(const char* key, std::vector<std::string>& value) const {
    if (!json.contains(key)) return;
    const auto& list = json[key];
    const auto is_text = [](const auto& item) { return item.is_string(); };
    if (!list.is_array() || !std::all_of(list.begin(), list.end(), is_text))
      bad(key, list.dump(), "a list of texts");
    value = list.get<std::vector<std::string>>();
  }
  void operator()(const char* key, std::map<std::string, std::string>& value) const {
    if (!json.contains(key)) return;
    const auto& table = json[key];
    const auto is_text = [](const auto& item) { return item.is_string(); };
    if (!table.is_object() || !std::all_of(table.begin(), table.end(), is_text))
      bad(key, table.dump(), "a table of texts");
    value = table.get<std::map<std::string, std::string>>();
  }
  void operator()(const char* key, std::map<std::string, std::int64_t>& value) const {
    if (!json.contains(key)) return;
    const auto& table = json[key];
    const auto is_count = [](const auto& item) { return item.is_number_unsigned(); };
    if (!table.is_object() || !std::all_of(table.begin(), table.end(), is_count))
      bad(key, table.dump(), "a table of integers, 0 or more");
    value = table.get<std::map<std::string, std::int64_t>>();
  }
  void operator()(const char* key, std::string& value) const {
    if (!at(key).is_string()) bad(key, at(key).dump(), "a text");
    value = at(key).get<std::string>();
  }
};

}  // namespace

std::string to_json(const TrainingState& state) {
  nlohmann::ordered_json json{{"format", kFormat}};
  state_fields(state, [&](const char* key, const auto& value) { json[key] = value; });
  return json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

TrainingState parse_state(const std::string& text, const std::string& file) {
  const auto [json, problem] = parse_json(text);
  const Reader reader{json, file};
  if (!problem.empty()) reader.bad("the whole file", problem, "the state of a run");
  if (reader.at("format") != kFormat)
    reader.bad("format", json["format"].dump(),
               std::to_string(kFormat) + ", the only one this version reads");
  TrainingState state;
  state_fields(state, reader);
  return state;
}

}  // namespace isograd
