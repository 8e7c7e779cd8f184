// Identifies the host of a process by the memory and messages that it can reach.
#pragma once

#include <string>

namespace isograd {

struct HostIdentity {
  std::string name;     // human-readable
  std::string machine;  // equal for processes that can map each other's memory
};

// Overrides the host of a rank: one name, or one for each rank of the job, separated by commas. It lets tests
// simulate several hosts on one machine.
inline constexpr const char* kHostVariable = "ISOGRAD_HOST";

// The host of this process: the running kernel and its process namespace, or ISOGRAD_HOST. ConfigError when
// ISOGRAD_HOST is not a valid name, or does not have one name for each rank.
HostIdentity identify_host();

// As above, with the network namespace, which ranks that share a LocalStore must have in common.
std::string identify_meeting_place(const HostIdentity& host);

}  // namespace isograd
