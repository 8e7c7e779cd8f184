#include "base/json.hpp"

#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

namespace isograd {
namespace {

constexpr std::size_t kShown = 120;  // bytes of foreign text in an error

// Removes the bracketed part of "[json.exception.parse_error.101] parse error at line 1, column 5: ...".
std::string reason(const std::string& said) {
  const std::size_t end = said.starts_with('[') ? said.find("] ") : std::string::npos;
  std::string text = end == std::string::npos ? said : said.substr(end + 2);
  if (text.size() > 2 * kShown) text = text.substr(0, 2 * kShown) + "...";
  return text;
}

// Builds the value from the parser's events. The library's own builder with a callback searches every key of
// an object whenever one of its values ends, and it searches an ordered object from its start for each key.
template <class Json>
class Builder final : public nlohmann::json_sax<Json> {
 public:
  using Base = nlohmann::json_sax<Json>;
  using typename Base::binary_t;
  using typename Base::number_float_t;
  using typename Base::number_integer_t;
  using typename Base::number_unsigned_t;
  using typename Base::string_t;

  explicit Builder(JsonRules rules) : rules_(rules) {}

  bool null() override { return add(nullptr) != nullptr; }
  bool boolean(bool value) override { return add(value) != nullptr; }
  bool number_integer(number_integer_t value) override { return add(value) != nullptr; }
  bool number_unsigned(number_unsigned_t value) override { return add(value) != nullptr; }
  bool number_float(number_float_t value, const string_t&) override { return add(value) != nullptr; }
  bool string(string_t& value) override { return add(std::move(value)) != nullptr; }
  bool binary(binary_t&) override { return stop("binary data"); }  // JSON text has no binary data

  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    Level& level = levels_.back();
    if (rules_.keys_once && !level.seen.insert(name).second)
      return stop("the key \"" + name.substr(0, kShown) + "\" twice");
    level.key = std::move(name);
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    return stop("no JSON object (" + reason(error.what()) + ")");
  }

  ParsedJson<Json> take() {
    if (problem.empty() && !root_.is_object())
      stop(std::string("no JSON object, but JSON of type ") + root_.type_name());
    if (!problem.empty()) return {nullptr, std::move(problem)};
    return {std::move(root_), {}};
  }

  std::string problem;

 private:
  struct Level {
    Json* value;
    std::string key{};
    std::unordered_set<std::string> seen{};
  };

  bool stop(std::string found) {
    if (problem.empty()) problem = std::move(found);
    return false;
  }

  // Adds a value and returns its place; null when there are too many. Only the innermost list or object
  // grows, so the outer ones do not move.
  Json* add(Json value) {
    if (++values_ > kMostJsonValues) {
      stop("no JSON object: more than " + std::to_string(kMostJsonValues) + " values");
      return nullptr;
    }
    if (levels_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Level& level = levels_.back();
    if (level.value->is_array()) {
      level.value->push_back(std::move(value));
      return &level.value->back();
    }
    auto& object = level.value->template get_ref<typename Json::object_t&>();
    if constexpr (std::is_same_v<Json, nlohmann::ordered_json>) {
      if (rules_.keys_once) return &object.emplace_back(std::move(level.key), std::move(value)).second;
    }
    return &(object[std::move(level.key)] = std::move(value));
  }

  bool open(Json value) {
    if (levels_.size() == kDeepestJson)
      return stop("no JSON object: more than " + std::to_string(kDeepestJson) + " levels");
    Json* place = add(std::move(value));
    if (place) levels_.push_back({place});
    return place != nullptr;
  }

  bool close() {
    levels_.pop_back();
    return true;
  }

  JsonRules rules_;
  Json root_;
  std::vector<Level> levels_{};
  std::size_t values_ = 0;
};

}  // namespace

template <class Json>
ParsedJson<Json> parse_json(std::string_view text, JsonRules rules) {
  if (text.size() > kMostJsonBytes)
    return {nullptr, std::to_string(text.size()) + " bytes, more than " + std::to_string(kMostJsonBytes)};
  if (text.starts_with("\xEF\xBB\xBF"))
    return {nullptr, "a byte order mark in front of the JSON"};  // the library would skip it
  if (text.find('\0') != std::string_view::npos)
    return {nullptr, "a zero byte"};  // the library would take it for the end
  Builder<Json> builder(rules);
  const bool sound = Json::sax_parse(text.begin(), text.end(), &builder);
  if (!sound && builder.problem.empty()) builder.problem = "no JSON object";
  return builder.take();
}

std::string brief(const nlohmann::json& value) {
  const std::string text = json_text(value, -1, true);
  return text.size() <= kShown ? text : text.substr(0, kShown) + "...";
}

template ParsedJson<nlohmann::json> parse_json(std::string_view, JsonRules);
template ParsedJson<nlohmann::ordered_json> parse_json(std::string_view, JsonRules);

}  // namespace isograd
