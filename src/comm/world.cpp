#include "isograd/world.hpp"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/environment.hpp"
#include "comm/listen.hpp"
#include "comm/shm/backend.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

constexpr const char* kWorldName = "world";

void check(const JoinOptions& options) {
  if (options.backend != "shm") {
    throw ConfigError({.where = "the backend of the world's group",
                       .found = fmt::format("'{}'", options.backend),
                       .expected = "'shm'",
                       .action = "Use --backend shm, or wrap a backend of your own in a Group"});
  }
  if (options.timeout.count() < 1) {
    throw ConfigError({.where = "the timeout of the world's group",
                       .found = fmt::format("{} ms", options.timeout.count()),
                       .expected = "1 ms or more",
                       .action = "Raise it"});
  }
}

std::string host_name() {
  char name[256] = {};
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

World make_world(c10::intrusive_ptr<c10d::Store> store, int rank, int size, const JoinOptions& options) {
  World world;
  world.rank = rank;
  world.size = size;
  world.host = host_name();
  auto backend = c10::make_intrusive<ShmBackend>(std::move(store), rank, size, kWorldName, options.timeout);
  world.group = Group(std::move(backend), kWorldName, options.timeout);
  return world;
}

c10::intrusive_ptr<c10d::Store> connect(const RankEnvironment& environment,
                                        std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(environment.port);
  options.waitWorkers = false;
  options.timeout = timeout;
  if (!environment.store_is_hosted && environment.rank == 0) {
    options.isServer = true;
    options.masterListenFd = listen_on(environment.address, environment.port).descriptor;
  }
  try {
    return c10::make_intrusive<c10d::TCPStore>(environment.address, options);
  } catch (const std::exception& error) {
    throw PeerError({.where = fmt::format("joining as rank {} of {}", environment.rank, environment.size),
                     .found = fmt::format("no store at {}:{} within {} ms: {}", environment.address,
                                          environment.port, timeout.count(), error.what()),
                     .expected = "the launcher's store, or rank 0's",
                     .action = "See whether the launcher or rank 0 still runs and whether MASTER_ADDR and "
                               "MASTER_PORT are theirs"});
  }
}

// The error of a rank thread, with the rank in front and its family kept.
[[noreturn]] void rethrow(int rank, const std::exception_ptr& error) {
  const auto with_rank = [&](const Error& original) {
    ErrorText text = original.text();
    text.where = fmt::format("rank {}: {}", rank, text.where);
    return text;
  };
  try {
    std::rethrow_exception(error);
  } catch (const ConfigError& original) {
    throw ConfigError(with_rank(original));
  } catch (const PeerError& original) {
    throw PeerError(with_rank(original));
  } catch (const BrokenInvariant& original) {
    throw BrokenInvariant(with_rank(original));
  } catch (const std::exception& original) {
    throw std::runtime_error(fmt::format("rank {}: {}", rank, original.what()));
  }
}

}  // namespace

World join(const JoinOptions& options) {
  check(options);
  const auto environment = read_rank_environment();
  if (!environment || environment->size == 1) {
    World world;
    world.host = host_name();
    return world;
  }
  if (!std::getenv("OMP_NUM_THREADS")) at::set_num_threads(1);  // the ranks share the cores
  // A process may join more than once, all ranks alike; a restarted one may meet its predecessors' keys.
  static std::atomic<int> joins{0};
  const std::string prefix = fmt::format("isograd/{}/{}", environment->attempt, joins++);
  auto store = c10::make_intrusive<c10d::PrefixStore>(prefix, connect(*environment, options.timeout));
  return make_world(std::move(store), environment->rank, environment->size, options);
}

void run_ranks(int size, const std::function<void(World&)>& body, const JoinOptions& options) {
  check(options);
  if (size < 1) {
    throw ConfigError({.where = "run_ranks",
                       .found = fmt::format("{} ranks", size),
                       .expected = "1 or more",
                       .action = "Ask for at least one rank"});
  }
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex;
  int first_rank = -1;
  std::exception_ptr first;
  const auto run = [&](int rank) {
    at::set_num_threads(1);  // before anything else: it is kept per thread
    World world;
    world.host = host_name();
    try {
      if (size > 1) world = make_world(store, rank, size, options);
      body(world);
    } catch (...) {
      std::string reason = "an exception that is no std::exception";
      std::exception_ptr error = std::current_exception();
      try {
        throw;
      } catch (const std::exception& known) {
        reason = known.what();
      } catch (...) {
        error = std::make_exception_ptr(std::runtime_error(reason));
      }
      {
        const std::lock_guard lock(mutex);
        if (!first) {
          first = error;
          first_rank = rank;
        }
      }
      world.group.poison(reason);
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(run, rank);
  for (std::thread& thread : threads) thread.join();
  if (first) rethrow(first_rank, first);
}

}  // namespace isograd
