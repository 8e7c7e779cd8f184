#include "comm/hosts/identity.hpp"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <vector>

#include "base/refuse.hpp"
#include "comm/environment.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

// The prefix of a host name from the environment. No machine has such a name.
constexpr const char* kGiven = "given:";

std::uint64_t space(const char* which) {
  struct stat status {};
  ::stat(fmt::format("/proc/self/ns/{}", which).c_str(), &status);
  return status.st_ino;
}

[[noreturn]] void refuse_identity(const std::string& found, const std::string& expected) {
  refuse(fmt::format("the environment variable {}", kHostVariable), found, expected,
         "Correct it, or unset it: ranks then know their machine");
}

std::string given_name(const std::string& text) {
  std::vector<std::string> names;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    names.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  constexpr std::size_t kLongest = 64;
  for (const std::string& name : names) {
    const bool sound = !name.empty() && name.size() <= kLongest && std::ranges::all_of(name, [](char c) {
      return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
             c == '-' || c == '_';
    });
    if (!sound)
      refuse_identity(fmt::format("'{}' in '{}'", name, text),
                      "names of up to 64 letters, digits, dots, dashes and underscores, with commas between");
  }
  if (names.size() == 1) return names[0];
  const auto environment = read_rank_environment();
  const int ranks = environment ? environment->size : 1;
  if (names.size() != static_cast<std::size_t>(ranks))
    refuse_identity(fmt::format("{} names for {} rank{}", names.size(), ranks, ranks == 1 ? "" : "s"),
                    "one name, or one for each rank");
  return names[static_cast<std::size_t>(environment->rank)];
}

}  // namespace

HostIdentity identify_host() {
  HostIdentity host;
  if (const char* given = std::getenv(kHostVariable); given && *given) {
    host.name = given_name(given);
    host.machine = kGiven + host.name;
    return host;
  }
  char name[256] = {};
  ::gethostname(name, sizeof(name) - 1);
  host.name = name;
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  host.machine = fmt::format("{}/{}", boot, space("pid"));
  return host;
}

std::string identify_meeting_place(const HostIdentity& host) {
  return host.machine.starts_with(kGiven) ? host.machine : fmt::format("{}/{}", host.machine, space("net"));
}

}  // namespace isograd
