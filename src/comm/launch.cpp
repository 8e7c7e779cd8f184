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
#include <filesystem>
#include <fstream>
#include <optional>

#include "base/print.hpp"
#include "base/refuse.hpp"
#include "comm/environment.hpp"
#include "comm/hosts/meeting.hpp"
#include "comm/launch_process.hpp"
#include "comm/listen.hpp"
#include "comm/local_store.hpp"
#include "comm/mpi/mpi.hpp"
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

// The signals and the output of the processes under way: ranks, or mpirun.
class Relay {
 public:
  explicit Relay(const LaunchOptions& options) {
    if (options.prefix_output) output_ = std::make_unique<OutputForwarder>();
  }

  // Null: the ranks write to the launcher's output.
  OutputForwarder* output() { return output_.get(); }
  // The last signal that was passed on; 0: none.
  int user_signal() const { return user_signal_; }

  // Waits until something may have happened. The poll returns often enough for ended ranks and deadlines,
  // even without pidfds.
  void wait(const std::vector<Child>& children, const std::function<void(int signal)>& pass_on) {
    std::vector<pollfd> waited{{signals_.readable(), POLLIN, 0}};
    for (const Child& child : children) waited.push_back({child.running ? child.pidfd : -1, POLLIN, 0});
    if (output_) output_->add_to(waited);
    ::poll(waited.data(), waited.size(), 100);
    if (output_) output_->forward();
    signals_.take([&](int signal) {
      user_signal_ = signal;
      pass_on(signal);
    });
  }

 private:
  SignalScope signals_;
  std::unique_ptr<OutputForwarder> output_;
  int user_signal_ = 0;
};

class Launch {
 public:
  Launch(const std::vector<std::string>& command, const LaunchOptions& options)
      : options_(options), relay_(options) {
    const std::string program = find_program(command[0]);
    const std::string store = new_store_name();
    store_ = std::make_unique<LocalStoreServer>(store);
    const int port = free_port();
    OutputForwarder* output = relay_.output();
    try {
      for (int rank = 0; rank < options.ranks; ++rank) {
        const auto [out, err] = output ? output->open(rank) : std::pair{-1, -1};
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
      relay_.wait(children_, [this](int signal) { signal_all(signal); });
      reap();
      end_the_others();
    }
    if (OutputForwarder* output = relay_.output()) {
      output->finish();
      if (output->write_error() != 0 && status() == 0)
        refuse("the output of the ranks", std::strerror(output->write_error()), "a place to write to",
               "Send the output elsewhere");
    }
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
      const bool by_user = WIFSIGNALED(status) && WTERMSIG(status) == relay_.user_signal();
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
      const bool by_user = WIFSIGNALED(child.status) && WTERMSIG(child.status) == relay_.user_signal();
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
  Relay relay_;
  std::unique_ptr<LocalStoreServer> store_;
  std::vector<Child> children_;
  bool failed_ = false;
  int first_failure_ = -1;
  Clock::time_point failed_at_;
  enum class Ending { kNotYet, kAsked, kKilled } ending_ = Ending::kNotYet;
};

// The child processes of `parent`. On one host mpirun itself starts the ranks.
std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const pid_t pid = static_cast<pid_t>(std::atoi(entry.path().filename().c_str()));
    std::string text;
    if (pid <= 0 || !std::getline(std::ifstream(entry.path() / "stat"), text)) continue;
    pid_t above = 0;
    char state = 0;
    const auto name_end = text.rfind(')');  // the name before it may contain anything
    if (name_end == std::string::npos ||
        std::sscanf(text.c_str() + name_end + 1, " %c %d", &state, &above) != 2) {
      continue;
    }
    if (above == parent && state != 'Z') found.push_back(pid);
  }
  return found;
}

// Wraps the command so that each rank's output goes to our pipes. mpirun's own tags appear in the middle of
// lines that are written in parts. The pipes are opened through /proc, because mpirun passes no descriptors
// on.
class PipedCommand {
 public:
  PipedCommand(OutputForwarder& output, int ranks) {
    script_ = "case ${OMPI_COMM_WORLD_RANK:-$PMI_RANK} in";
    const auto path = [this](int end) {
      ends_.push_back(end);
      return fmt::format("/proc/{}/fd/{}", ::getpid(), end);
    };
    for (int rank = 0; rank < ranks; ++rank) {
      const auto [out, err] = output.open(rank);
      script_ += fmt::format(" {}) exec \"$@\" >{} 2>{};;", rank, path(out), path(err));
    }
    script_ += " esac";
  }
  ~PipedCommand() {
    for (const int end : ends_) ::close(end);
  }
  PipedCommand(const PipedCommand&) = delete;
  PipedCommand& operator=(const PipedCommand&) = delete;
  std::vector<std::string> shell() const { return {"/bin/sh", "-c", script_, "sh"}; }

 private:
  std::string script_;
  std::vector<int> ends_;
};

std::vector<std::string> mpirun_environment() {
  std::vector<std::string> variables;
  if (!std::getenv("OMP_NUM_THREADS")) variables.push_back("OMP_NUM_THREADS=1");
  if (::geteuid() == 0) {  // Open MPI refuses root otherwise; our caller has already chosen it
    for (const char* name : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
                             "PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"}) {
      variables.push_back(fmt::format("{}=1", name));
    }
  }
  return environment_with(std::move(variables));
}

// mpirun starts the ranks and ends all of them when one fails. Signals, output and the exit status are
// handled here.
int launch_through_mpirun(const std::vector<std::string>& command, const LaunchOptions& options) {
  std::vector<std::string> arguments = mpi::launcher(options.ranks);
  const std::string mpirun = find_program(arguments[0]);
  find_program(command[0]);  // our error is shorter than mpirun's

  Relay relay(options);
  OutputForwarder* output = relay.output();
  std::optional<PipedCommand> piped;
  if (output) {
    const auto shell = piped.emplace(*output, options.ranks).shell();
    arguments.insert(arguments.end(), shell.begin(), shell.end());
  }
  arguments.insert(arguments.end(), command.begin(), command.end());
  const std::vector<Child> children{start_process(mpirun, arguments, mpirun_environment(), -1, -1, "mpirun")};
  const Child& child = children[0];
  int status = 0;
  do {
    relay.wait(children, [&](int signal) {
      // Signal the ranks directly: mpirun would end them instead of passing the signal on.
      const auto ranks = children_of(child.pid);
      for (const pid_t rank : ranks) ::kill(::getpgid(rank) == rank ? -rank : rank, signal);
      if (ranks.empty()) ::kill(child.pid, signal);  // mpirun has not started the ranks yet
    });
  } while (::waitpid(child.pid, &status, WNOHANG) != child.pid);
  if (child.pidfd >= 0) ::close(child.pidfd);
  if (output) output->finish();

  const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  if (code <= 128 || code == 128 + relay.user_signal()) return code;
  print(stderr, fmt::format("a rank under mpirun was killed by signal {} ({})\n", code - 128,
                            ::strsignal(code - 128)));
  return kStatusPeerLost;
}

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
