#include "comm/hosts/meeting.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>

#include "base/files.hpp"
#include "base/refuse.hpp"
#include "comm/local_store.hpp"
#include "isograd/error.hpp"

namespace isograd {

bool through_mpi(const std::string& backend) {
  return backend == "mpi" || backend == "shm+mpi";
}

HostsOfWorld exchange_hosts(c10d::Backend& all, const HostIdentity& own, const std::string& backend) {
  constexpr std::int64_t kBytes = 256;  // of a rank: its backend, host, meeting place and a store's name
  const std::string place = identify_meeting_place(own);
  const std::string text = fmt::format("{}\n{}\n{}\n{}\n", backend, own.name.substr(0, 64),
                                       checksum(place.data(), place.size()), new_store_name());
  ISOGRAD_INVARIANT(text.size() < kBytes, text);
  at::Tensor mine = at::zeros({kBytes}, at::kByte), gathered = at::zeros({kBytes * all.getSize()}, at::kByte);
  std::memcpy(mine.data_ptr(), text.data(), text.size());
  all._allgather_base(gathered, mine)->wait();

  HostsOfWorld world{.hosts = {{}, {}}};
  std::map<std::string, int> seen;
  for (int rank = 0; rank < all.getSize(); ++rank) {
    std::istringstream lines(static_cast<const char*>(gathered.const_data_ptr()) + rank * kBytes);
    std::string theirs, name, machine, store;
    std::getline(lines, theirs), std::getline(lines, name), std::getline(lines, machine);
    std::getline(lines, store);
    if (theirs != backend)
      refuse("joining through MPI",
             fmt::format("the backend '{}' on rank {} and '{}' on rank {}", backend, all.getRank(), theirs,
                         rank),
             "one backend", "Start all ranks with the same --backend and configuration");
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
