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

}  // namespace

std::string broadcast_text(Group& group, const std::string& text) {
  if (group.size() == 1) return text;
  at::Tensor length = at::full({1}, static_cast<std::int64_t>(text.size()), at::kLong);
  group.broadcast(length, 0);
  const auto bytes = length.item<std::int64_t>();
  if (bytes == 0) return "";
  at::Tensor content = at::zeros({bytes}, at::kByte);
  if (group.rank() == 0) std::memcpy(content.data_ptr(), text.data(), text.size());
  group.broadcast(content, 0);
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
      const ErrorText text = text_of(error);
      message = {{"config", dynamic_cast<const ConfigError*>(&error) != nullptr},
                 {"where", text.where},
                 {"found", text.found},
                 {"expected", text.expected},
                 {"action", text.action}};
    }
  }
  // Invalid UTF-8 in a path must not hide the error it belongs to.
  const std::string outcome =
      broadcast_text(group, failure ? message.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)
                                    : std::string());
  if (outcome.empty()) return;
  group.barrier();  // nobody leaves, and takes its memory along, before everybody has read the error
  message = nlohmann::json::parse(outcome);
  ErrorText text{.where = message["where"],
                 .found = message["found"],
                 .expected = message["expected"],
                 .action = message["action"]};
  if (message["config"]) throw AgreedConfigError(text);
  if (failure) std::rethrow_exception(failure);
  text.where = "rank 0: " + text.where;
  throw PeerError(text);
}

}  // namespace isograd
