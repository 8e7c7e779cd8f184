// Which host a process is on, as far as memory and messages are concerned.
#pragma once

#include <string>

namespace isograd {

struct HostIdentity {
  std::string name;     // for people
  std::string machine;  // equal for processes that can reach one another's memory
};

// Says which host a rank is on in place of the machine: one name, or one for each rank of the job, with
// commas between. For tests of several hosts on one machine, and for machines that should count as several.
inline constexpr const char* kHostVariable = "ISOGRAD_HOST";

// Of this process: the running kernel and its process namespace, or what ISOGRAD_HOST says. ConfigError when
// that is no name, or has another number of names than there are ranks.
HostIdentity identify_host();

// The same with the network namespace: ranks that meet at a LocalStore must share it.
std::string identify_meeting_place(const HostIdentity& host);

}  // namespace isograd
