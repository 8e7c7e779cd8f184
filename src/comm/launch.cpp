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

#include "base/print.hpp"
#include "base/refuse.hpp"
#include "comm/environment.hpp"
#include "comm/hosts/meeting.hpp"
#include "comm/launch_mpi.hpp"
#include "comm/launch_output.hpp"
#include "comm/launch_process.hpp"
#include "comm/launch_signals.hpp"
#include "comm/listen.hpp"
#include "comm/local_store.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using Clock = std::chrono::steady_clock;

// A port for programs whose rank 0 serves its own store, such as torch.distributed's. Nobody listens there
// yet.
int free_port() {
  const Listener listener = listen_on("127.0.0.1", 0);
  ::close(listener.descriptor);
  return listener.port;
}

std::vector<std::string> rank_environment(int rank, int ranks, int port, const std::string& store) {
  std::vector<std::string> variables = {fmt::format("RANK={}", rank),
                                        fmt::format("LOCAL_RANK={}", rank),
                                        fmt::format("WORLD_SIZE={}", ranks),
                                        fmt::format("LOCAL_WORLD_SIZE={}", ranks),
                                        "MASTER_ADDR=127.0.0.1",
                                        fmt::format("MASTER_PORT={}", port),
                                        fmt::format("{}={}", kLaunchedVariable, store)};
  if (!std::getenv("OMP_NUM_THREADS")) variables.push_back("OMP_NUM_THREADS=1");
  return environment_with(std::move(variables));
}

std::string how_it_ended(int status) {
  if (WIFSIGNALED(status))
    return fmt::format("was killed by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
  return fmt::format("ended with status {}", WEXITSTATUS(status));
}

class Launch {
 public:
  Launch(const std::vector<std::string>& command, const LaunchOptions& options) : options_(options) {
    const std::string program = find_program(command[0]);
    const std::string store = new_store_name();
    store_ = std::make_unique<LocalStoreServer>(store);
    const int port = free_port();
    if (options.prefix_output) output_ = std::make_unique<OutputForwarder>();
    try {
      for (int rank = 0; rank < options.ranks; ++rank) {
        const auto [out, err] = output_ ? output_->open(rank) : std::pair{-1, -1};
        children_.push_back(start_process(program, command,
                                          rank_environment(rank, options.ranks, port, store), out, err,
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
    if (output_ && output_->write_error() != 0 && status() == 0)
      refuse("the output of the ranks", std::strerror(output_->write_error()), "a place to write to",
             "Send the output elsewhere");
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

  static void end(Child& child, int signal) {
    child.asked_to_end = true;
    ::kill(-child.pid, signal);
  }

  void end_all(int signal) {
    for (Child& child : children_) {
      if (child.running) end(child, signal);
    }
  }

  void wait_for_something() {
    std::vector<pollfd> waited{{signals_.readable(), POLLIN, 0}};
    for (const Child& child : children_) waited.push_back({child.running ? child.pidfd : -1, POLLIN, 0});
    if (output_) output_->add_to(waited);
    // The poll returns often enough for ended ranks and deadlines, even without pidfds.
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
      if (!child.running || ::waitpid(child.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) != child.pid)
        continue;
      child.stopped = WIFSTOPPED(status);
      if (WIFSTOPPED(status) || WIFCONTINUED(status)) continue;
      child.running = false;
      child.status = status;
      child.ended_by_us = child.asked_to_end && WIFSIGNALED(status) &&
                          (WTERMSIG(status) == SIGTERM || WTERMSIG(status) == SIGKILL);
      const bool failed = WIFSIGNALED(status) || WEXITSTATUS(status) != 0;
      const bool by_user = WIFSIGNALED(status) && WTERMSIG(status) == user_signal_;
      if (WIFSIGNALED(status) && !child.ended_by_us && !by_user) {
        print(stderr, fmt::format("rank {} (pid {}) {}\n", rank, child.pid, how_it_ended(status)));
      }
      if (failed && !failed_) {
        failed_ = true;
        first_failure_ = static_cast<int>(rank);
        failed_at_ = Clock::now();
        // Without this, ranks that wait for the failed rank to join would wait for their whole timeout.
        store_->set(kLaunchFailed, fmt::format("rank {} (pid {}) {}", rank, child.pid, how_it_ended(status)));
      }
    }
  }

  // After a failure: `grace` to end by themselves, then SIGTERM, then SIGKILL. A stopped rank cannot end by
  // itself.
  void end_the_others() {
    if (!failed_ || !running()) return;
    for (std::size_t rank = 0; rank < children_.size(); ++rank) {
      Child& child = children_[rank];
      if (!child.running || !child.stopped || child.asked_to_end) continue;
      print(stderr, fmt::format("rank {} failed and rank {} (pid {}) is stopped: ending it\n", first_failure_,
                                rank, child.pid));
      end(child, SIGKILL);
    }
    const auto elapsed = Clock::now() - failed_at_;
    if (ending_ == Ending::kNotYet && elapsed >= options_.grace) {
      print(stderr, fmt::format("rank {} failed {} ms ago: ending the ranks that still run\n", first_failure_,
                                options_.grace.count()));
      ending_ = Ending::kAsked;
      end_all(SIGTERM);
    } else if (ending_ == Ending::kAsked && elapsed >= 2 * options_.grace) {
      ending_ = Ending::kKilled;
      end_all(SIGKILL);
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
  std::unique_ptr<LocalStoreServer> store_;
  std::unique_ptr<OutputForwarder> output_;
  std::vector<Child> children_;
  int user_signal_ = 0;  // the last signal that was passed on
  bool failed_ = false;
  int first_failure_ = -1;
  Clock::time_point failed_at_;
  enum class Ending { kNotYet, kAsked, kKilled } ending_ = Ending::kNotYet;
};

}  // namespace

int launch_ranks(const std::vector<std::string>& command, const LaunchOptions& options) {
  if (options.ranks < 1 || command.empty()) {
    refuse("starting ranks", command.empty() ? "no command" : fmt::format("{} ranks", options.ranks),
           "a command and 1 rank or more", "Use -n N -- COMMAND");
  }
  if (through_mpi(options.backend)) return launch_through_mpirun(command, options);
  if (options.backend != "shm" && options.backend != "nccl") {
    refuse("starting ranks", fmt::format("the backend '{}'", options.backend),
           "'shm', 'mpi', 'shm+mpi' or 'nccl'", "Use --backend shm, mpi, shm+mpi or nccl");
  }
  return Launch(command, options).run();
}

}  // namespace isograd
