#include "model/json_reader.hpp"

#include <cmath>

#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {

std::string brief(const nlohmann::json& value) {
  auto text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() <= 120) return text;
  text.resize(120);
  text += "...";
  return text;
}

void JsonReader::bad(const std::string& key, const std::string& found, const std::string& expected) const {
  refuse(where_ + key, found, expected,
         "Use a model that isograd computes to the letter: Llama, Qwen2, Qwen3, Mistral, Mixtral, "
         "Qwen2-MoE, Qwen3-MoE or dots1, with full attention or a sliding window that documents "
         "fit into");
}

void JsonReader::bad_value(const std::string& key, const std::string& expected) const {
  bad(key, object_.contains(key) ? brief(object_[key]) : "no such key", expected);
}

const nlohmann::json* JsonReader::value(const std::string& key) {
  seen_.insert(key);
  const auto place = object_.find(key);
  return place == object_.end() ? nullptr : &*place;
}

const nlohmann::json* JsonReader::find(const std::string& key) {
  const auto* found = value(key);
  return found && found->is_null() ? nullptr : found;
}

std::int64_t JsonReader::integer(const std::string& key, std::optional<std::int64_t> absent) {
  const auto* found = value(key);
  if (!found && absent) return *absent;
  constexpr std::int64_t kMost = std::int64_t{1} << 53;
  if (!found || !found->is_number_integer() ||
      (found->is_number_unsigned() && found->get<std::uint64_t>() > kMost) ||
      found->get<std::int64_t>() < -kMost)
    bad_value(key, "a whole number");
  return found->get<std::int64_t>();
}

double JsonReader::number(const std::string& key, std::optional<double> absent) {
  const auto* found = value(key);
  if (!found && absent) return *absent;
  if (!found || !found->is_number() || !std::isfinite(found->get<double>())) bad_value(key, "a number");
  return found->get<double>();
}

bool JsonReader::flag(const std::string& key, bool absent) {
  const auto* found = value(key);
  if (!found) return absent;
  if (!found->is_boolean()) bad_value(key, "true or false");
  return found->get<bool>();
}

std::string JsonReader::text(const std::string& key, std::optional<std::string> absent) {
  const auto* found = value(key);
  if (!found && absent) return *absent;
  if (!found || !found->is_string()) bad_value(key, "a text");
  return found->get<std::string>();
}

void JsonReader::only(const std::string& key, const nlohmann::json& value) {
  const auto* found = find(key);
  if (found && *found != value) bad_value(key, brief(value) + ", or no such key");
}

void JsonReader::finish(const std::set<std::string>& harmless) const {
  for (const auto& [key, value] : object_.items())
    if (!seen_.contains(key) && !harmless.contains(key))
      bad_value(key, "no such key: it may change what the model computes");
}

}  // namespace isograd
