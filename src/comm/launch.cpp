// Ranks as processes: starting them, passing signals and output on, ending all when one fails.
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/environment.hpp"
#include "comm/launch_mpi.hpp"
#include "comm/launch_output.hpp"
#include "comm/launch_process.hpp"
#include "comm/launch_signals.hpp"
#include "comm/listen.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kStatusPeerLost = 3;

std::vector<std::string> rank_environment(int rank, int ranks, int port) {
  std::vector<std::string> variables = {fmt::format("RANK={}", rank),
                                        fmt::format("LOCAL_RANK={}", rank),
                                        fmt::format("WORLD_SIZE={}", ranks),
                                        fmt::format("LOCAL_WORLD_SIZE={}", ranks),
                                        "MASTER_ADDR=127.0.0.1",
                                        fmt::format("MASTER_PORT={}", port),
                                        fmt::format("{}=1", kLaunchedVariable)};
  if (!std::getenv("OMP_NUM_THREADS")) variables.push_back("OMP_NUM_THREADS=1");
  return environment_with(std::move(variables));
}

class Launch {
 public:
  Launch(const std::vector<std::string>& command, const LaunchOptions& options) : options_(options) {
    const std::string program = find_program(command[0]);
    const Listener listener = listen_on("127.0.0.1", 0);
    c10d::TCPStoreOptions store;
    store.isServer = true;
    store.waitWorkers = false;
    store.port = static_cast<std::uint16_t>(listener.port);
    store.masterListenFd = listener.descriptor;
    store_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", store);
    if (options.prefix_output) output_ = std::make_unique<OutputForwarder>();
    try {
      for (int rank = 0; rank < options.ranks; ++rank) {
        const auto [out, err] = output_ ? output_->open(rank) : std::pair{-1, -1};
        children_.push_back(start_process(program, command,
                                          rank_environment(rank, options.ranks, listener.port), out, err,
                                          fmt::format("rank {} of {}", rank, options.ranks)));
      }
    } catch (...) {
      signal_all(SIGKILL);
      while (running()) reap();
      throw;
    }
  }

  ~Launch() {
    for (const Child& child : children_) {
      if (child.pidfd >= 0) ::close(child.pidfd);
    }
  }

  int run() {
    while (running()) {
      wait_for_something();
      forward_signals();
      reap();
      end_the_others();
    }
    if (output_) output_->finish();
    return status();
  }

 private:
  bool running() const {
    return std::any_of(children_.begin(), children_.end(), [](const Child& child) { return child.running; });
  }

  void signal_all(int signal) {
    for (const Child& child : children_) {
      if (child.running) ::kill(-child.pid, signal);
    }
  }

  void wait_for_something() {
    std::vector<pollfd> waited{{signals_.readable(), POLLIN, 0}};
    for (const Child& child : children_) waited.push_back({child.running ? child.pidfd : -1, POLLIN, 0});
    if (output_) output_->add_to(waited);
    // Ended ranks and deadlines are looked at often enough even without pidfds.
    ::poll(waited.data(), waited.size(), 100);
    if (output_) output_->forward();
  }

  void forward_signals() {
    signals_.take([this](int signal) {
      user_signal_ = signal;
      signal_all(signal);
    });
  }

  void reap() {
    for (std::size_t rank = 0; rank < children_.size(); ++rank) {
      Child& child = children_[rank];
      int status = 0;
      if (!child.running || ::waitpid(child.pid, &status, WNOHANG) != child.pid) continue;
      child.running = false;
      child.status = status;
      child.ended_by_us = ending_ != Ending::kNotYet && WIFSIGNALED(status) &&
                          (WTERMSIG(status) == SIGTERM || WTERMSIG(status) == SIGKILL);
      const bool failed = WIFSIGNALED(status) || WEXITSTATUS(status) != 0;
      const bool by_user = WIFSIGNALED(status) && WTERMSIG(status) == user_signal_;
      if (WIFSIGNALED(status) && !child.ended_by_us && !by_user) {
        std::fprintf(stderr, "rank %zu (pid %d) was killed by signal %d (%s)\n", rank, child.pid,
                     WTERMSIG(status), ::strsignal(WTERMSIG(status)));
      }
      if (failed && !failed_) {
        failed_ = true;
        first_failure_ = static_cast<int>(rank);
        failed_at_ = Clock::now();
      }
    }
  }

  // After a failure: `grace` to end by themselves, then SIGTERM, then SIGKILL.
  void end_the_others() {
    if (!failed_ || !running()) return;
    const auto elapsed = Clock::now() - failed_at_;
    if (ending_ == Ending::kNotYet && elapsed >= options_.grace) {
      std::fprintf(stderr, "rank %d failed %lld ms ago: ending the ranks that still run\n", first_failure_,
                   static_cast<long long>(options_.grace.count()));
      ending_ = Ending::kAsked;
      signal_all(SIGTERM);
    } else if (ending_ == Ending::kAsked && elapsed >= 2 * options_.grace) {
      ending_ = Ending::kKilled;
      signal_all(SIGKILL);
    }
  }

  int status() const {
    int first = 0;
    bool lost = false;
    for (const Child& child : children_) {
      if (child.ended_by_us) continue;
      const bool by_user = WIFSIGNALED(child.status) && WTERMSIG(child.status) == user_signal_;
      if (WIFSIGNALED(child.status) && !by_user) lost = true;
      if (!WIFSIGNALED(child.status) && WEXITSTATUS(child.status) == kStatusPeerLost) lost = true;
    }
    if (lost) return kStatusPeerLost;
    if (first_failure_ >= 0) {
      const int status = children_[static_cast<std::size_t>(first_failure_)].status;
      first = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    }
    return first;
  }

  const LaunchOptions options_;
  SignalScope signals_;
  c10::intrusive_ptr<c10d::TCPStore> store_;
  std::unique_ptr<OutputForwarder> output_;
  std::vector<Child> children_;
  int user_signal_ = 0;  // the last one passed on
  bool failed_ = false;
  int first_failure_ = -1;
  Clock::time_point failed_at_;
  enum class Ending { kNotYet, kAsked, kKilled } ending_ = Ending::kNotYet;
};

}  // namespace

int launch_ranks(const std::vector<std::string>& command, const LaunchOptions& options) {
  if (options.ranks < 1 || command.empty()) {
    throw ConfigError({.where = "starting ranks",
                       .found = command.empty() ? "no command" : fmt::format("{} ranks", options.ranks),
                       .expected = "a command and 1 rank or more",
                       .action = "Use -n N -- COMMAND"});
  }
  if (options.backend == "mpi") return launch_through_mpirun(command, options);
  if (options.backend != "shm" && options.backend != "nccl") {
    throw ConfigError({.where = "starting ranks",
                       .found = fmt::format("the backend '{}'", options.backend),
                       .expected = "'shm', 'mpi' or 'nccl'",
                       .action = "Use --backend shm, --backend mpi or --backend nccl"});
  }
  return Launch(command, options).run();
}

}  // namespace isograd
