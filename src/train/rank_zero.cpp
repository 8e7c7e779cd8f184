#include "train/rank_zero.hpp"

#include <nlohmann/json.hpp>

#include <cstring>

namespace isograd {
namespace {

ErrorText text_of(const std::exception& error) {
  if (auto known = dynamic_cast<const Error*>(&error)) return known->text();
  return {.where = "rank 0",
          .found = error.what(),
          .expected = "no failure",
          .action = "See rank 0's own message"};
}

nlohmann::json to_json(const ErrorText& text) {
  return {{"where", text.where}, {"found", text.found}, {"expected", text.expected}, {"action", text.action}};
}

ErrorText from_json(const nlohmann::json& json) {
  return {
      .where = json["where"], .found = json["found"], .expected = json["expected"], .action = json["action"]};
}

// Invalid UTF-8 in a path must not hide the error it belongs to.
std::string dumped(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

std::string broadcast_text(Group& group, const std::string& text, int from) {
  if (group.size() == 1) return text;
  at::Tensor length = at::full({1}, static_cast<std::int64_t>(text.size()), at::kLong);
  group.broadcast(length, from);
  const auto bytes = length.item<std::int64_t>();
  if (bytes == 0) return "";
  at::Tensor content = at::zeros({bytes}, at::kByte);
  if (group.rank() == from) std::memcpy(content.data_ptr(), text.data(), text.size());
  group.broadcast(content, from);
  return std::string(static_cast<const char*>(content.data_ptr()), static_cast<std::size_t>(bytes));
}

void on_rank_zero(Group& group, const std::function<void()>& work) {
  nlohmann::json message;
  std::exception_ptr failure;
  if (group.rank() == 0) {
    try {
      work();
    } catch (const std::exception& error) {
      failure = std::current_exception();
      message = to_json(text_of(error));
      message["config"] = dynamic_cast<const ConfigError*>(&error) != nullptr;
    }
  }
  const std::string outcome = broadcast_text(group, failure ? dumped(message) : std::string());
  if (outcome.empty()) return;
  group.barrier();  // nobody leaves, and takes its memory along, before everybody has read the error
  message = nlohmann::json::parse(outcome);
  ErrorText text = from_json(message);
  if (message["config"]) throw AgreedConfigError(text);
  if (failure) std::rethrow_exception(failure);
  text.where = "rank 0: " + text.where;
  throw PeerError(text);
}

void throw_agreed(Group& group, const std::optional<ErrorText>& problem) {
  at::Tensor first = at::full({1}, problem ? group.rank() : group.size(), at::kLong);
  group.all_reduce(first, ReduceOp::kMin);
  const int from = static_cast<int>(first.item<std::int64_t>());
  if (from == group.size()) return;
  const std::string text =
      broadcast_text(group, group.rank() == from ? dumped(to_json(*problem)) : std::string(), from);
  group.barrier();  // as above
  throw AgreedConfigError(from_json(nlohmann::json::parse(text)));
}

}  // namespace isograd
