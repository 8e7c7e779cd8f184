// The variables with which ranks are started (those of torchrun, which our own launcher sets too).
#pragma once

#include <optional>
#include <string>

namespace isograd {

struct RankEnvironment {
  int rank = 0;
  int size = 1;
  std::string address;  // of the store; empty when size == 1
  int port = 0;
  bool store_is_hosted = false;  // by the launcher; otherwise rank 0 hosts it
  std::string attempt = "0";     // differs between restarts of the same ranks, which may share a store
};

// Set by launch_ranks(): the launcher hosts the store.
inline constexpr const char* kLaunchedVariable = "ISOGRAD_LAUNCHED";

// Empty when neither RANK nor WORLD_SIZE is set. ConfigError, naming the variable, when they contradict.
std::optional<RankEnvironment> read_rank_environment();

}  // namespace isograd
