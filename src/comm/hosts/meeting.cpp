#include "comm/hosts/meeting.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <torch/headeronly/version.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>

#include "base/files.hpp"
#include "base/refuse.hpp"
#include "comm/environment.hpp"
#include "comm/store.hpp"
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
  std::istringstream list(text + ",");  // an empty last name is a name too
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
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
  host.torch = fmt::format("{}.{}", TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR);
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

void check_torch(const std::string& where, int rank, const std::string& torch, const std::string& of_rank_0) {
  if (torch != of_rank_0)
    refuse(where, fmt::format("LibTorch {} on rank {} and {} on rank 0", torch, rank, of_rank_0),
           "one version of LibTorch on all ranks",
           "Install the same on every host, with the isograd that was built with it");
}

std::string identify_meeting_place(const HostIdentity& host) {
  return host.machine.starts_with(kGiven) ? host.machine : fmt::format("{}/{}", host.machine, space("net"));
}

bool through_mpi(const std::string& backend) { return backend == "mpi" || backend == "shm+mpi"; }

HostsOfWorld exchange_hosts(c10d::Backend& all, const HostIdentity& own, const std::string& backend) {
  // A rank sends its backend, LibTorch, host, meeting place and the name of a store.
  constexpr std::int64_t kBytes = 256;
  const std::string place = identify_meeting_place(own);
  const std::string text = fmt::format("{}\n{}\n{}\n{}\n{}\n", backend, own.torch, own.name.substr(0, 64),
                                       checksum(place.data(), place.size()), new_store_name());
  ISOGRAD_INVARIANT(text.size() < kBytes, text);
  at::Tensor mine = at::zeros({kBytes}, at::kByte), gathered = at::zeros({kBytes * all.getSize()}, at::kByte);
  std::memcpy(mine.data_ptr(), text.data(), text.size());
  all._allgather_base(gathered, mine)->wait();

  HostsOfWorld world{.hosts = {{}, {}}};
  std::map<std::string, int> seen;
  std::string torch_of_rank_0;
  for (int rank = 0; rank < all.getSize(); ++rank) {
    std::istringstream lines(static_cast<const char*>(gathered.const_data_ptr()) + rank * kBytes);
    std::string theirs, torch, name, machine, store;
    for (std::string* line : {&theirs, &torch, &name, &machine, &store}) std::getline(lines, *line);
    if (theirs != backend)
      refuse("joining through MPI",
             fmt::format("the backend '{}' on rank {} and '{}' on rank {}", backend, all.getRank(), theirs,
                         rank),
             "one backend", "Start all ranks with the same --backend and configuration");
    if (rank == 0) torch_of_rank_0 = torch;
    check_torch("joining through MPI", rank, torch, torch_of_rank_0);
    const auto [found, is_new] = seen.emplace(machine, world.hosts.count());
    if (is_new) {
      world.hosts.names.push_back(name);
      world.stores.push_back(store);
    }
    world.hosts.of_rank.push_back(found->second);
  }
  return world;
}

c10::intrusive_ptr<c10d::Store> meet_on_host(const HostsOfWorld& world, int rank,
                                             std::chrono::milliseconds timeout) {
  const std::vector<int>& host_of = world.hosts.of_rank;
  const int host = host_of[static_cast<std::size_t>(rank)];
  if (std::ranges::count(host_of, host) == 1) return nullptr;
  const bool first = std::ranges::find(host_of, host) - host_of.begin() == rank;
  const std::string& name = world.stores[static_cast<std::size_t>(host)];
  return c10::make_intrusive<LocalStore>(name, timeout,
                                         first ? std::make_shared<LocalStoreServer>(name) : nullptr);
}

}  // namespace isograd
