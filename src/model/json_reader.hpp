// Reads an untrusted JSON object key by key; what nobody asked for is refused.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>

namespace isograd {

// A value in a message: ASCII, cut short.
std::string brief(const nlohmann::json& value);

class JsonReader {
 public:
  // `where` stands in front of keys in messages. Keeps a reference to `object`.
  JsonReader(const nlohmann::json& object, std::string where) : object_(object), where_(std::move(where)) {}

  // ConfigError.
  [[noreturn]] void bad(const std::string& key, const std::string& found, const std::string& expected) const;
  [[noreturn]] void bad_value(const std::string& key, const std::string& expected) const;

  bool has(const std::string& key) const { return object_.contains(key); }
  // Null counts as absent.
  const nlohmann::json* find(const std::string& key);
  // Without `absent` the key must be there. Null is refused, as transformers does where a number, flag or
  // text must be; ask find() first where it may stand for "none".
  std::int64_t integer(const std::string& key, std::optional<std::int64_t> absent = {});
  double number(const std::string& key, std::optional<double> absent = {});
  bool flag(const std::string& key, bool absent);
  std::string text(const std::string& key, std::optional<std::string> absent = {});
  // A key that would change the mathematics: only this value will do, or none.
  // Null counts as none.
  void only(const std::string& key, const nlohmann::json& value);
  // Refuses keys that were not asked for and are not harmless.
  void finish(const std::set<std::string>& harmless) const;

 private:
  const nlohmann::json* value(const std::string& key);  // null included; nullptr: no such key

  const nlohmann::json& object_;
  std::string where_;
  std::set<std::string> seen_;
};

}  // namespace isograd
