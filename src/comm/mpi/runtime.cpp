#include "comm/mpi/runtime.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "base/print.hpp"
#include "base/refuse.hpp"
#include "comm/launch_process.hpp"
#include "comm/mpi/mpi.hpp"
#include "isograd/error.hpp"

namespace isograd::mpi {
namespace {

// A finished rank waits for ranks that still write reports. mpirun ends it if one fails.
constexpr std::chrono::milliseconds kLeastFinish = std::chrono::minutes(5);

// MPI_Init and MPI_Finalize wait for all ranks without a timeout and must run in the same thread. This thread
// is kept for them, so that callers can wait with a timeout. It is never destroyed, because it may outlive
// static objects.
struct Keeper {
  std::mutex mutex;
  std::condition_variable changed;
  enum class Phase { kNotStarted, kStarting, kRunning, kFinalizing, kFinalized } phase = Phase::kNotStarted;
  int code = MPI_SUCCESS;
  int level = MPI_THREAD_SINGLE;
  bool ours = false;  // this library initialised MPI, so it finalises it
  MPI_Comm control = MPI_COMM_NULL;
  std::chrono::milliseconds timeout{};
  std::atomic<bool> running{false}, serial{true}, abandoned{false};
  std::mutex calls;

  void run() {
    int provided = MPI_THREAD_SINGLE;
    int result = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
    MPI_Comm copy = MPI_COMM_NULL;
    if (result == MPI_SUCCESS) result = MPI_Comm_dup(MPI_COMM_WORLD, &copy);
    std::unique_lock lock(mutex);
    settle(result, provided, copy);
    changed.wait(lock, [this] { return phase == Phase::kFinalizing; });
    lock.unlock();
    MPI_Comm_free(&copy);
    MPI_Finalize();
    lock.lock();
    phase = Phase::kFinalized;
    changed.notify_all();
  }

  void settle(int result, int provided, MPI_Comm copy) {  // REQUIRES: mutex held
    code = result;
    level = provided;
    control = copy;
    if (result == MPI_SUCCESS) MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN);
    serial = provided < MPI_THREAD_MULTIPLE;
    running = result == MPI_SUCCESS;
    phase = Phase::kRunning;
    changed.notify_all();
  }
};

Keeper& keeper() {
  static Keeper* kept = new Keeper;
  return *kept;
}

// A failed rank exits without MPI_Finalize, because that would wait for ranks that wait for this one.
void finalize_at_exit(int status, void*) {
  Keeper& kept = keeper();
  std::unique_lock lock(kept.mutex);
  if (kept.phase != Keeper::Phase::kRunning || !kept.ours) return;
  kept.running = false;
  if (status != 0 || kept.abandoned) return;
  kept.phase = Keeper::Phase::kFinalizing;
  kept.changed.notify_all();
  if (kept.changed.wait_for(lock, kept.timeout, [&] { return kept.phase == Keeper::Phase::kFinalized; }))
    return;
  print(stderr, fmt::format("isograd: the other ranks did not reach MPI_Finalize within {} ms\n",
                            kept.timeout.count()));
  std::_Exit(kStatusPeerLost);
}

}  // namespace

bool built() {
  return true;
}

void require() {}

CallScope::CallScope() {
  if (keeper().serial) lock_ = std::unique_lock(keeper().calls);
}

void check(int code, const std::string& where) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw PeerError(
      {.where = where,
       .found = "MPI says: " + std::string(text, static_cast<std::size_t>(length)),
       .expected = "a completed operation",
       .action = "See whether all ranks call the same operation with the same sizes, and still run"});
}

MPI_Comm control() {
  return keeper().control;
}

bool running() {
  return keeper().running;
}

void abandon() {
  keeper().abandoned = true;
}

Rank start(std::chrono::milliseconds timeout) {
  timeout = std::max<std::chrono::milliseconds>(timeout, kLeastStart);
  Keeper& kept = keeper();
  std::unique_lock lock(kept.mutex);
  kept.timeout = std::max({kept.timeout, timeout, kLeastFinish});
  if (kept.phase == Keeper::Phase::kNotStarted) {
    int initialized = 0;
    MPI_Initialized(&initialized);
    if (initialized) {  // by the host program, which finalises it
      int provided = MPI_THREAD_SINGLE;
      MPI_Query_thread(&provided);
      MPI_Comm copy = MPI_COMM_NULL;
      const int result = MPI_Comm_dup(MPI_COMM_WORLD, &copy);
      kept.settle(result, provided, copy);
    } else {
      kept.ours = true;
      kept.phase = Keeper::Phase::kStarting;
      std::thread([&kept] { kept.run(); }).detach();
      ::on_exit(finalize_at_exit, nullptr);
    }
  }
  if (!kept.changed.wait_for(lock, timeout, [&] { return kept.phase >= Keeper::Phase::kRunning; })) {
    throw PeerError(
        {.where = "joining through MPI",
         .found = fmt::format("MPI_Init still waits for other ranks after {} ms", timeout.count()),
         .expected = "all ranks to start",
         .action = "See which rank does not start, or raise parallel.timeout_seconds"});
  }
  check(kept.code, "joining through MPI");
  if (kept.ours && kept.level < MPI_THREAD_SERIALIZED) {
    refuse("joining through MPI", "an MPI that only the thread which initialised it may call",
           "MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE",
           "Use an MPI that was built with support for threads");
  }
  if (!kept.running) {
    refuse("joining through MPI", "MPI that is finalised", "a process that has not begun to exit",
           "Join earlier");
  }
  Rank rank;
  MPI_Comm_rank(kept.control, &rank.rank);
  MPI_Comm_size(kept.control, &rank.size);
  return rank;
}

std::vector<std::string> launcher(int ranks) {
  std::vector<std::string> command = {"mpirun", "-n", std::to_string(ranks)};
#ifdef OPEN_MPI  // others bind nothing and take any number
  command.insert(command.end(), {"-q", "--oversubscribe", "--bind-to", "none"});
#endif
  return command;
}

}  // namespace isograd::mpi
