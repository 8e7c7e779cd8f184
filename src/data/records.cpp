// A document to tokens and their weights: plain text, a prompt with its completion, a conversation, or
// tokens.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/json.hpp"
#include "data/corpus.hpp"

namespace isograd {
namespace {

constexpr const char* kFields =
    "an object with \"text\", with \"prompt\" and \"completion\", with \"messages\", or with \"tokens\"";

[[noreturn]] void bad_record(std::string found, std::string expected) {
  throw BadLine{std::move(found), std::move(expected)};
}

const std::string& string_of(const nlohmann::json& record, const char* name) {
  const nlohmann::json& field = record.at(name);
  if (!field.is_string())
    bad_record(fmt::format("a field \"{}\" of type {}", name, field.type_name()), "a string");
  return field.get_ref<const std::string&>();
}

double weight_in(const nlohmann::json& value, const char* name) {
  const double weight = value.is_number() ? value.get<double>() : -1;
  if (!(weight >= 0) || std::isinf(static_cast<float>(weight)))
    bad_record(fmt::format("{} = {}", name, brief(value)), "a finite number of 0 or more");
  return weight;
}

void check_messages(const nlohmann::json& record, const char* name) {
  const nlohmann::json& messages = record.at(name);
  if (!messages.is_array() || messages.empty())
    bad_record(fmt::format("\"{}\" without messages", name),
               "a list of objects with \"role\" and \"content\"");
  for (const nlohmann::json& message : messages) {
    if (!message.is_object() || !message.contains("role") || !message["role"].is_string())
      bad_record(fmt::format("a message in \"{}\" without a role", name),
                 "objects with \"role\" (such as \"user\" or \"assistant\") and \"content\"");
    if (message.contains("weight") && std::string_view(name) != "messages")
      bad_record(fmt::format("a weight of a message in \"{}\"", name),
                 "weights of messages in \"messages\" alone, or a \"weight\" of the line");
    if (message.contains("weight")) weight_in(message["weight"], "weight of a message");
  }
}

Encoded encode_chat(const nlohmann::json& record, const Tokenizer& tokenizer, bool all) {
  nlohmann::json request = {{"all", all}};
  for (const char* name : {"messages", "prompt", "completion", "tools", "chat_template_kwargs"})
    if (record.contains(name)) request[name] = record[name];
  Encoded result;
  result.weights = tokenizer.encode_conversation(json_text(request), result.tokens);
  return result;
}

// A completion begins where the tokens of the prompt and of both part, which is not always after the prompt.
Encoded encode_completion(const nlohmann::json& record, const Tokenizer& tokenizer, bool all) {
  const std::string &prompt = string_of(record, "prompt"), &completion = string_of(record, "completion");
  Encoded result{.tokens = tokenizer.encode(prompt + completion), .weights = {}};
  if (all) return result;
  // The mark that the tokenizer puts behind the prompt differs from what stands there in the whole.
  const std::vector<std::uint32_t> before = tokenizer.encode(prompt);
  const auto [end, unused] = std::ranges::mismatch(before, result.tokens);
  result.weights.assign(result.tokens.size(), 1);
  std::fill_n(result.weights.begin(), end - before.begin(), 0.0F);
  return result;
}

Encoded take_tokens(const nlohmann::json& record, const Tokenizer& tokenizer) {
  Encoded result;
  const nlohmann::json& tokens = record.at("tokens");
  if (!tokens.is_array()) bad_record("\"tokens\" that are no list", "a list of numbers");
  for (const nlohmann::json& token : tokens) {
    if (!token.is_number_integer() || token.get<std::int64_t>() < 0 ||
        token.get<std::int64_t>() >= tokenizer.vocabulary())
      bad_record("token " + brief(token), fmt::format("integers from 0 to {}", tokenizer.vocabulary() - 1));
    result.tokens.push_back(token.get<std::uint32_t>());
  }
  if (!record.contains("weights")) return result;
  const nlohmann::json& weights = record["weights"];
  if (!weights.is_array() || weights.size() != result.tokens.size())
    bad_record(
        fmt::format("{} weights of {} tokens", weights.is_array() ? weights.size() : 0, result.tokens.size()),
        "\"weights\" with a number for each token");
  for (const nlohmann::json& weight : weights)
    result.weights.push_back(static_cast<float>(weight_in(weight, "a weight")));
  return result;
}

}  // namespace

bool is_conversation(const Document& document) {
  if (document.record == nullptr) return false;
  const nlohmann::json& record = *document.record;
  return record.contains("messages") || (record.contains("prompt") && record["prompt"].is_array());
}

Encoded encode(const Document& document, const Tokenizer& tokenizer, bool train_on_all) {
  if (document.record == nullptr && document.text.empty()) return {};
  if (document.record == nullptr) return {.tokens = tokenizer.encode(document.text), .weights = {}};
  const nlohmann::json& record = *document.record;
  Encoded result;
  if (record.contains("messages")) {
    check_messages(record, "messages");
    result = encode_chat(record, tokenizer, train_on_all);
  } else if (record.contains("prompt") || record.contains("completion")) {
    if (!record.contains("prompt") || !record.contains("completion"))
      bad_record(record.contains("prompt") ? "\"prompt\" without \"completion\""
                                           : "\"completion\" without \"prompt\"",
                 "both");
    if (record["prompt"].is_array()) {
      check_messages(record, "prompt");
      check_messages(record, "completion");
      result = encode_chat(record, tokenizer, train_on_all);
    } else {
      result = encode_completion(record, tokenizer, train_on_all);
    }
  } else if (record.contains("tokens")) {
    result = take_tokens(record, tokenizer);
    if (train_on_all) result.weights.clear();
  } else if (record.contains("text")) {
    const std::string& text = string_of(record, "text");
    if (text.empty()) return {};
    result.tokens = tokenizer.encode(text);
  } else {
    bad_record("no field \"text\"", kFields);
  }
  if (result.tokens.empty()) return result;
  if (record.contains("weight")) {
    const auto weight = static_cast<float>(weight_in(record["weight"], "weight"));
    if (result.weights.empty()) result.weights.assign(result.tokens.size(), 1);
    for (float& each : result.weights) each *= weight;
    if (std::ranges::any_of(result.weights, [](float each) { return std::isinf(each); }))
      bad_record("a weight times those of the tokens that no float holds", "smaller weights");
  }
  // The first token is no target of any other.
  if (!result.weights.empty() &&
      std::all_of(result.weights.begin() + 1, result.weights.end(), [](float weight) { return weight == 0; }))
    bad_record("weights that are all zero", "at least one token to learn from");
  return result;
}

}  // namespace isograd
