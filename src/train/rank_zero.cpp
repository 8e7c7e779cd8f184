#include "train/rank_zero.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include <cstring>

#include "base/json.hpp"
#include "base/refuse.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

ErrorText text_of(const std::exception& error) {
  if (auto known = dynamic_cast<const Error*>(&error)) return known->text();
  if (auto file = dynamic_cast<const fs::filesystem_error*>(&error)) return isograd::text_of(*file);
  return {.where = "rank 0",
          .found = error.what(),
          .expected = "no failure",
          .action = "See rank 0's own message"};
}

nlohmann::json to_json(const ErrorText& text) {
  return {{"where", text.where}, {"found", text.found}, {"expected", text.expected}, {"action", text.action}};
}

ErrorText from_json(const nlohmann::json& json) {
  const auto part = [&](const char* key) {
    const auto found = json.find(key);
    return found != json.end() && found->is_string() ? found->get<std::string>() : std::string("(nothing)");
  };
  return {
      .where = part("where"), .found = part("found"), .expected = part("expected"), .action = part("action")};
}

// Invalid UTF-8 in a path must not hide the error it belongs to.
std::string dumped(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

std::string first_text(Group& group, const std::string& own) {
  at::Tensor first = at::full({1}, own.empty() ? group.size() : group.rank(), at::kLong);
  group.all_reduce(first, ReduceOp::kMin);
  const int rank = static_cast<int>(first.item<std::int64_t>());
  return rank == group.size() ? "" : fmt::format("{} on rank {}", broadcast_text(group, own, rank), rank);
}

bool of_rank_zero(Group& group, bool own) {
  at::Tensor said = at::full({1}, own ? 1 : 0, at::kLong);
  group.broadcast(said, 0);
  return said.item<std::int64_t>() != 0;
}

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
      message["config"] = exit_status(error) == 2;
    }
  }
  const std::string outcome = broadcast_text(group, failure ? dumped(message) : std::string());
  if (outcome.empty()) return;
  group.barrier();  // a rank that leaves would free memory that others still read the error from
  message = parse_json(outcome).value;
  ErrorText text = from_json(message);
  if (message.is_object() && message.value("config", nlohmann::json()) == true) throw AgreedConfigError(text);
  if (failure) std::rethrow_exception(failure);
  text.where = "rank 0: " + text.where;
  throw PeerError(text);
}

void on_every_rank(Group& group, const std::function<void()>& work) {
  std::optional<ErrorText> problem;
  try {
    work();
  } catch (const ConfigError& error) {
    problem = error.text();
  }
  throw_agreed(group, problem);
}

void throw_agreed(Group& group, const std::optional<ErrorText>& problem) {
  at::Tensor first = at::full({1}, problem ? group.rank() : group.size(), at::kLong);
  group.all_reduce(first, ReduceOp::kMin);
  const int from = static_cast<int>(first.item<std::int64_t>());
  if (from == group.size()) return;
  const std::string text =
      broadcast_text(group, group.rank() == from ? dumped(to_json(*problem)) : std::string(), from);
  group.barrier();  // as above
  throw AgreedConfigError(from_json(parse_json(text).value));
}

}  // namespace isograd
