#include "comm/environment.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "isograd/error.hpp"

namespace isograd {
namespace {

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (!value || !*value) return std::nullopt;
  return value;
}

[[noreturn]] void refuse(const std::string& found, const std::string& expected) {
  throw ConfigError(
      {.where = "the environment of this rank",
       .found = found,
       .expected = expected,
       .action = "Start the ranks with torchrun or --ranks N, or unset RANK and WORLD_SIZE to run alone"});
}

std::optional<int> number(const char* name, int low, int high) {
  const auto text = variable(name);
  if (!text) return std::nullopt;
  int value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end != text->data() + text->size() || value < low || value > high) {
    refuse(fmt::format("{}={}", name, *text), fmt::format("a number from {} to {}", low, high));
  }
  return value;
}

}  // namespace

std::optional<RankEnvironment> read_rank_environment() {
  const auto size = number("WORLD_SIZE", 1, 1 << 20);
  const auto rank = number("RANK", 0, 1 << 20);
  if (!size && !rank) return std::nullopt;
  if (!size || !rank) refuse(size ? "WORLD_SIZE without RANK" : "RANK without WORLD_SIZE", "both or neither");
  if (*rank >= *size)
    refuse(fmt::format("RANK={} with WORLD_SIZE={}", *rank, *size), "RANK below WORLD_SIZE");

  const auto local_rank = number("LOCAL_RANK", 0, 1 << 20),
             local_size = number("LOCAL_WORLD_SIZE", 1, 1 << 20);
  if (local_size && *local_size > *size) {
    refuse(fmt::format("LOCAL_WORLD_SIZE={} with WORLD_SIZE={}", *local_size, *size), "at most WORLD_SIZE");
  }
  if (local_rank && *local_rank >= local_size.value_or(*size)) {
    refuse(fmt::format("LOCAL_RANK={} of {} ranks on this host", *local_rank, local_size.value_or(*size)),
           "LOCAL_RANK below LOCAL_WORLD_SIZE");
  }
  if (local_size && *local_size != *size) {
    refuse(fmt::format("{} of {} ranks on this host", *local_size, *size),
           "all ranks on one host, which the shm backend needs");
  }

  RankEnvironment environment;
  environment.rank = *rank;
  environment.size = *size;
  if (*size == 1) return environment;
  const auto address = variable("MASTER_ADDR");
  const auto port = number("MASTER_PORT", 1, 65535);
  if (!address || !port) refuse(address ? "no MASTER_PORT" : "no MASTER_ADDR", "where the store listens");
  environment.address = *address;
  environment.port = *port;
  const auto agent = variable("TORCHELASTIC_USE_AGENT_STORE");
  environment.store_is_hosted = variable(kLaunchedVariable) || (agent && (*agent == "True" || *agent == "1"));
  environment.attempt = variable("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return environment;
}

}  // namespace isograd
