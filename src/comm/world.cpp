#include "isograd/world.hpp"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/refuse.hpp"
#include "comm/environment.hpp"
#include "comm/failures.hpp"
#include "comm/group_impl.hpp"
#include "comm/hosts/backend.hpp"
#include "comm/hosts/meeting.hpp"
#include "comm/mpi/mpi.hpp"
#include "comm/nccl/nccl.hpp"
#include "comm/shm/backend.hpp"
#include "comm/store.hpp"
#include "isograd/error.hpp"
#include "kernels/threads/first_calls.hpp"

namespace isograd {
namespace {

constexpr const char* kWorldName = "world";

void check(const JoinOptions& options) {
  if (options.backend != "shm" && !through_mpi(options.backend) && options.backend != "nccl")
    refuse("the backend of the world's group", fmt::format("'{}'", options.backend),
           "'shm', 'mpi', 'shm+mpi' or 'nccl'",
           "Use --backend shm, or wrap a backend of your own in a Group");
  if (options.timeout.count() < 1)
    refuse("the timeout of the world's group", fmt::format("{} ms", options.timeout.count()), "1 ms or more",
           "Raise it");
}

c10::intrusive_ptr<c10d::Store> connect(const RankEnvironment& environment, int join,
                                        std::chrono::milliseconds timeout) {
  if (const std::string name = local_store_name(environment, join); !name.empty()) {
    const bool serves = environment.store.empty() && environment.rank == 0;
    return c10::make_intrusive<LocalStore>(name, timeout,
                                           serves ? std::make_shared<LocalStoreServer>(name) : nullptr);
  }
  // The ranks may be on several hosts: they meet in a store that all can reach.
  const std::string& address = environment.address;
  const int port = environment.port;
  c10d::TCPStoreOptions options;
  options.waitWorkers = false;
  options.timeout = timeout;
  options.isServer = !environment.store_is_hosted && environment.rank == 0;
  if (options.isServer) options.masterListenFd = listen_on(address, port).descriptor;
  options.port = static_cast<std::uint16_t>(port);
  try {
    return c10::make_intrusive<c10d::TCPStore>(address, options);
  } catch (const std::exception& error) {
    throw_peer_error(
        fmt::format("joining as rank {} of {}", environment.rank, environment.size),
        fmt::format("no store at {}:{} within {} ms: {}", address, port, timeout.count(), error.what()),
        "torchrun's store, or rank 0's",
        "See whether the launcher or rank 0 still runs and whether MASTER_ADDR and MASTER_PORT are theirs");
  }
}

// Rethrows the error of a rank thread, with the rank in front and the same type.
[[noreturn]] void rethrow(int rank, const std::exception_ptr& error) {
  const std::string prefix = fmt::format("rank {}: ", rank);
  try {
    std::rethrow_exception(error);
  } catch (const Error& original) {
    ErrorText text = original.text();
    text.where = prefix + text.where;
    if (dynamic_cast<const ConfigError*>(&original)) throw ConfigError(text);
    if (dynamic_cast<const PeerError*>(&original)) throw PeerError(text);
    throw BrokenInvariant(text);
  } catch (const std::exception& original) {
    throw std::runtime_error(prefix + original.what());
  }
}

}  // namespace

struct World::Membership {
  c10::intrusive_ptr<c10d::Store> store;  // of all ranks of this host; null: over MPI alone
  HostsOfWorld hosts;
  std::shared_ptr<WorldBytes> bytes = std::make_shared<WorldBytes>();
  std::string backend;
  std::mutex mutex;
  std::map<std::string, int> groups_made;  // by ranks and name; all members count alike
};

struct WorldMaker {
  // Over shared memory or NCCL the ranks meet in the store. Over MPI they exchange their hosts first.
  static World make(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const JoinOptions& options) {
    World world;
    world.rank = rank;
    world.size = size;
    const HostIdentity host = identify_host();
    world.host = host.name;
    world.membership_ = std::make_shared<World::Membership>();
    World::Membership& membership = *world.membership_;
    membership.store = std::move(store);
    membership.backend = options.backend;
    c10::intrusive_ptr<c10d::Backend> over_mpi;
    if (through_mpi(options.backend)) {
      over_mpi = mpi::make_world(kWorldName, options.timeout);
      membership.hosts = exchange_hosts(*over_mpi, host, options.backend);
      if (options.backend == "shm+mpi")
        membership.store = meet_on_host(membership.hosts, rank, options.timeout);
    } else {
      membership.hosts.hosts = {std::vector<int>(static_cast<std::size_t>(size), 0), {host.name}};
    }
    std::vector<int> all(static_cast<std::size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    world.group = make_group(membership, all, rank, "", kWorldName, options.timeout, {}, std::move(over_mpi));
    return world;
  }

  // Makes the group of these ranks of the world; `place` is this rank's. `key`: unique for each group.
  // `over_mpi`: their MPI backend, if it exists. `by_hosts`: ranks of one host use its shared memory.
  static Group make_group(World::Membership& membership, const std::vector<int>& ranks, int place,
                          const std::string& key, const std::string& name, std::chrono::milliseconds timeout,
                          GroupOptions options, c10::intrusive_ptr<c10d::Backend> over_mpi = nullptr,
                          bool by_hosts = true) {
    const std::vector<int>& host_of = membership.hosts.hosts.of_rank;
    std::vector<int> of_rank;
    for (const int rank : ranks) of_rank.push_back(host_of[static_cast<std::size_t>(rank)]);
    const int size = static_cast<int>(ranks.size());
    auto hosts = std::make_shared<HostsOfGroup>(of_rank, place, membership.bytes);
    const bool one_host = !hosts->several();

    // Each group has its own prefix in the store. The world uses the store itself.
    const auto store = [&](const std::string& part) -> c10::intrusive_ptr<c10d::Store> {
      const std::string prefix = (key.empty() ? "" : "group " + key) + part;
      if (prefix.empty()) return membership.store;
      return c10::make_intrusive<c10d::PrefixStore>(prefix, membership.store);
    };
    c10::intrusive_ptr<c10d::Backend> backend, messages;
    if (membership.backend == "nccl") {
      backend = nccl::make(store(""), place, size, name, timeout);
      messages = c10::make_intrusive<ShmBackend>(store(" messages"), place, size, name, timeout);
    } else if (membership.backend == "shm" || (membership.backend == "shm+mpi" && one_host && by_hosts)) {
      backend = c10::make_intrusive<ShmBackend>(store(""), place, size, name, timeout);
    } else {
      if (!over_mpi) over_mpi = mpi::make_subgroup(ranks, name, key, timeout);
      backend = over_mpi;
    }
    if (membership.backend == "shm+mpi" && !one_host && by_hosts) {
      HostsBackend::Parts parts{std::move(over_mpi), nullptr, nullptr};
      const auto here = static_cast<int>(hosts->members[hosts->host].size());
      const std::string& host =
          membership.hosts.hosts.names[static_cast<std::size_t>(hosts->numbers[hosts->host])];
      const auto within = [&](const std::string& use) -> c10::intrusive_ptr<ShmBackend> {
        if (here == 1) return nullptr;
        return c10::make_intrusive<ShmBackend>(store(" " + use), static_cast<int>(hosts->place), here,
                                               fmt::format("{}, {} on host {}", name, use, host), timeout);
      };
      parts.reducing = within("summing"), parts.gathering = within("gathering");
      backend = make_over_hosts(std::move(parts), hosts, membership.hosts.hosts.names, name, timeout);
    }
    Group group = Group::Impl::make_group(std::move(backend), std::move(messages), name, timeout, options);
    hosts->restart();
    Group::Impl::of(group)->hosts = std::move(hosts);
    return group;
  }

  static Group subgroup(const World& world, const std::vector<int>& ranks, const std::string& name,
                        GroupOptions options, bool by_hosts) {
    World::Membership& membership = *world.membership_;
    std::string key = fmt::format("{} {}", fmt::join(ranks, ","), name);
    {
      const std::lock_guard lock(membership.mutex);
      key += fmt::format(" {}", membership.groups_made[key]++);
    }
    const auto place = std::ranges::find(ranks, world.rank) - ranks.begin();
    return make_group(membership, ranks, static_cast<int>(place), key, name, world.group.timeout(), options,
                      nullptr, by_hosts);
  }

  static const World::Membership* of(const World& world) { return world.membership_.get(); }
};

Group mesh_subgroup(const World& world, const Grid& grid, const std::vector<int>& ranks,
                    const std::string& name) {
  const Hosts hosts = hosts_of(world);
  const bool use_default_backend =
      ranks.size() == 1 || hosts.count() == 1 || siblings_split_alike(grid, hosts, ranks);
  return use_default_backend ? world.subgroup(ranks, name)
                             : WorldMaker::subgroup(world, ranks, name, {}, /*by_hosts=*/false);
}

Hosts hosts_of(const World& world) {
  const auto* membership = WorldMaker::of(world);
  return membership ? membership->hosts.hosts : Hosts{{0}, {world.host}};
}

HostBytes host_bytes(const World& world) {
  HostBytes bytes;
  const auto* membership = WorldMaker::of(world);
  if (!membership) return bytes;
  bytes.across = membership->bytes->across;
  bytes.within = std::max<std::int64_t>(0, membership->bytes->all - bytes.across);
  return bytes;
}

Group World::subgroup(const std::vector<int>& ranks, const std::string& name, GroupOptions options) const {
  const auto own = std::find(ranks.begin(), ranks.end(), rank);
  const std::set<int> distinct(ranks.begin(), ranks.end());
  if (own == ranks.end() || distinct.size() != ranks.size() || *distinct.begin() < 0 ||
      *distinct.rbegin() >= size)
    refuse(fmt::format("making group '{}' on rank {} of {}", name, rank, size),
           fmt::format("ranks {}", fmt::join(ranks, ", ")),
           fmt::format("different ranks from 0 to {}, {} among them", size - 1, rank),
           "Make a group on its members only");
  if (ranks.size() == 1) return Group::solo();
  return WorldMaker::subgroup(*this, ranks, name, options, /*by_hosts=*/true);
}

std::vector<std::string> backends() {
  std::vector<std::string> built = {"shm"};
  if (mpi::built()) built.insert(built.end(), {"mpi", "shm+mpi"});
  if (nccl::built()) built.emplace_back("nccl");
  return built;
}

World join(const JoinOptions& options) {
  check(options);
  make_first_calls();
  if (through_mpi(options.backend)) mpi::require();
  const auto environment = read_rank_environment();
  if (!environment || environment->size == 1) {
    World world;
    world.host = identify_host().name;
    return world;
  }
  if (!std::getenv("OMP_NUM_THREADS")) at::set_num_threads(1);  // the ranks share the cores
  if (through_mpi(options.backend)) {
    identify_host();  // refuse a bad ISOGRAD_HOST before anybody waits
    check_mpi(*environment);
    const mpi::Rank found = mpi::start(options.timeout);
    if (found.rank != environment->rank || found.size != environment->size)
      refuse("joining through MPI",
             fmt::format("rank {} of {} where the launcher says {} of {}", found.rank, found.size,
                         environment->rank, environment->size),
             "a launcher that this MPI understands",
             "Start the ranks with the mpirun of the MPI isograd was built with, or with the right "
             "srun --mpi=...");
    return WorldMaker::make(nullptr, environment->rank, environment->size, options);
  }
  check_one_host(*environment);
  if (options.backend == "nccl")
    nccl::take_device(environment->rank);  // one host: the rank is its place on it
  // A process may join more than once, all ranks alike. A restarted one may find its predecessor's keys.
  static std::atomic<int> joins{0};
  const int count = joins++;
  auto store = connect(*environment, count, options.timeout);
  return WorldMaker::make(
      c10::make_intrusive<c10d::PrefixStore>(store_prefix(*environment, count), std::move(store)),
      environment->rank, environment->size, options);
}

void run_ranks(int size, const std::function<void(World&)>& body, const JoinOptions& options) {
  check(options);
  if (options.backend != "shm")
    refuse("run_ranks", fmt::format("the backend '{}'", options.backend), "'shm', as ranks are threads here",
           "Start processes for other backends: isograd launch --backend mpi");
  constexpr int kMost = 4096;  // threads
  if (size < 1 || size > kMost)
    refuse("run_ranks", fmt::format("{} ranks", size), fmt::format("1 to {}", kMost),
           size < 1 ? "Ask for at least one rank" : "Start processes on several hosts (docs/hosts.md)");
  make_first_calls();
  auto store = c10::make_intrusive<c10d::HashStore>();
  struct Failure {
    int rank = -1;
    std::exception_ptr error{};
  };
  std::mutex mutex;
  // The first failure of each kind. A rank that throws leaves its groups before its error is recorded, so a
  // peer's error that follows from it may be recorded earlier.
  Failure cause, consequence;
  const auto run = [&](int rank) {
    at::set_num_threads(1);  // first, because it is kept per thread
    World world;
    world.host = identify_host().name;
    ended_by_another_rank = false;
    try {
      if (size > 1) world = WorldMaker::make(store, rank, size, options);
      body(world);
    } catch (...) {
      std::string reason = "an exception that is no std::exception";
      std::exception_ptr error = std::current_exception();
      bool is_peer_error = false;
      try {
        throw;
      } catch (const std::exception& known) {
        reason = known.what(), is_peer_error = dynamic_cast<const PeerError*>(&known) != nullptr;
      } catch (...) {
        error = std::make_exception_ptr(std::runtime_error(reason));
      }
      {
        const std::lock_guard lock(mutex);
        Failure& first = is_peer_error && ended_by_another_rank ? consequence : cause;
        if (!first.error) first = {rank, error};
      }
      world.group.poison(reason);
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  for (const Failure& first : {cause, consequence})
    if (first.error) rethrow(first.rank, first.error);
}

}  // namespace isograd
