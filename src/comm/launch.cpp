// Ranks as processes: starting them, passing signals and output on, ending all when one fails.
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <ranges>
#include <sstream>

#include "base/child.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "comm/environment.hpp"
#include "comm/hosts/meeting.hpp"
#include "comm/mpi/mpi.hpp"
#include "comm/store.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

extern char** environ;

namespace isograd {
namespace {

using Clock = std::chrono::steady_clock;
using Texts = std::vector<std::string>;

// ---- one process -----------------------------------------------------------------------------------------

struct Child {
  pid_t pid = -1;
  int pidfd = -1;  // -1 on old kernels: polled by time
  bool running = false;
  bool stopped = false;       // stopped by a signal, so it cannot end by itself
  int status = 0;             // of waitpid
  bool asked_to_end = false;  // after another rank failed
  bool ended_by_us = false;   // and that ended it
};

constexpr std::array kForwardedSignals = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2};
// The forwarded ones first.
constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD, SIGPIPE};

// The file for execve(). ConfigError when PATH has no such executable.
std::string find_program(const std::string& name) {
  const char* path = std::getenv("PATH");
  // The last colon keeps an empty last entry, which is the working folder as any empty entry is.
  std::istringstream folders(path ? std::string(path) + (*path ? ":" : "") : "/usr/bin:/bin");
  Texts candidates;
  for (std::string folder; std::getline(folders, folder, ':');)
    candidates.push_back((folder.empty() ? "." : folder) + "/" + name);
  if (name.find('/') != std::string::npos) candidates = {name};
  for (const std::string& candidate : candidates)
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
  refuse("starting ranks", fmt::format("no program '{}'", name),
         "an executable file, or a name found in PATH", "Check the command after --");
}

// This process's environment with `replaced` (NAME=value) and one thread for each rank, without the variables
// that say which rank this process is.
Texts environment_with(Texts replaced) {
  if (!std::getenv("OMP_NUM_THREADS")) replaced.push_back("OMP_NUM_THREADS=1");
  const Texts ours = replaced;
  for (char** entry = environ; *entry; ++entry) {
    const std::string variable = *entry, name = variable.substr(0, variable.find('='));
    const bool known =
        std::ranges::any_of(ours, [&](const std::string& other) { return other.starts_with(name + "="); });
    if (!known && !says_rank(name)) replaced.push_back(variable);
  }
  return replaced;
}

// Starts `program` in its own process group. `out` and `err` become its output (-1: inherited) and are closed
// here. `name` is used in the ConfigError when no process can be created.
Child start_process(const std::string& program, const Texts& command, const Texts& environment, int out,
                    int err, const std::string& name, bool holds_user_signals = false) {
  const pid_t pid = start_child(program, command,
                                {.out = out,
                                 .err = err,
                                 .environment = &environment,
                                 .own_group = true,
                                 .holds_user_signals = holds_user_signals,
                                 .unless_executed = "launch: the command could not be executed\n"});
  const int error = errno;
  if (out >= 0) ::close(out);
  if (err >= 0) ::close(err);
  if (pid < 0)
    refuse("starting " + name, fmt::format("fork failed: {}", std::strerror(error)),
           "room for one more process", "Start fewer ranks, or raise the limit on processes (ulimit -u)");
  return {.pid = pid, .pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)), .running = true};
}

std::string how_it_ended(int status) {
  if (WIFSIGNALED(status))
    return fmt::format("was killed by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
  return fmt::format("ended with status {}", WEXITSTATUS(status));
}

// ---- signals and output ----------------------------------------------------------------------------------

// Makes a pipe. ConfigError when there are no free file descriptors.
void make_pipe(int ends[2], const std::string& where, const std::string& expected) {
  if (::pipe2(ends, O_CLOEXEC) != 0)
    refuse(where, fmt::format("no pipe: {}", std::strerror(errno)), expected,
           "Raise the limit on open files (ulimit -n)");
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
}

// One counter for each of kForwardedSignals. The pipe wakes the loop.
std::array<std::atomic<int>, kForwardedSignals.size()> arrived;
std::atomic<int> wake_pipe{-1};

void on_signal(int signal) {
  const int kept = errno;
  for (std::size_t i = 0; i < arrived.size(); ++i)
    if (kForwardedSignals[i] == signal) arrived[i].fetch_add(1);
  const char byte = 0;
  if (wake_pipe.load() >= 0) (void)!::write(wake_pipe.load(), &byte, 1);
  errno = kept;
}

// Catches kForwardedSignals while it lives, and ignores SIGPIPE, so that ranks do not end because nobody
// reads the launcher's output. A process may have one at a time.
class SignalScope {
 public:
  SignalScope() {
    make_pipe(pipe_, "starting ranks", "a few free file descriptors");
    ::fcntl(pipe_[1], F_SETFL, O_NONBLOCK);
    for (auto& count : arrived) count = 0;
    wake_pipe = pipe_[1];
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      struct sigaction action {};
      // If SIGCHLD were ignored, waitpid() could not report how a rank ended.
      action.sa_handler = i < arrived.size() ? on_signal : kSignals[i] == SIGCHLD ? SIG_DFL : SIG_IGN;
      sigemptyset(&action.sa_mask);
      ::sigaction(kSignals[i], &action, &before_[i]);
      // nohup: the ranks must survive the hang-up too.
      if (kSignals[i] == SIGHUP && before_[i].sa_handler == SIG_IGN)
        ::sigaction(SIGHUP, &before_[i], nullptr);
    }
    sigset_t held;  // by a caller, until somebody handles them
    sigemptyset(&held), sigaddset(&held, SIGUSR1), sigaddset(&held, SIGUSR2);
    ::pthread_sigmask(SIG_UNBLOCK, &held, &mask_before_);
  }
  ~SignalScope() {
    ::pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);  // first: one that comes now is held again
    for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
    wake_pipe = -1;
    for (const int end : pipe_) ::close(end);
  }
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;

  // For poll(): readable once a signal has arrived.
  int readable() const { return pipe_[0]; }
  // Calls `pass_on` once for each signal that has arrived since the last call.
  void take(const std::function<void(int signal)>& pass_on) {
    char bytes[64];
    while (::read(pipe_[0], bytes, sizeof(bytes)) > 0) {
    }
    for (std::size_t i = 0; i < arrived.size(); ++i)
      for (int n = arrived[i].exchange(0); n > 0; --n) pass_on(kForwardedSignals[i]);
  }

 private:
  int pipe_[2] = {-1, -1};
  std::array<struct sigaction, kSignals.size()> before_{};
  sigset_t mask_before_{};
};

// Forwards the output of rank processes line by line, with the rank as a prefix.
class OutputForwarder {
 public:
  ~OutputForwarder() {
    for (const Stream& stream : streams_)
      if (stream.from >= 0) ::close(stream.from);
  }
  // Makes pipes for a rank. Returns the ends for its stdout and stderr, which the caller closes after the
  // start.
  std::pair<int, int> open(int rank) {
    int out[2], err[2];
    const auto open_pipe = [&](int ends[2], int to) {
      make_pipe(ends, fmt::format("the output of rank {}", rank), "two free file descriptors for each rank");
      streams_.push_back({rank, ends[0], to, {}});
    };
    open_pipe(out, STDOUT_FILENO);
    try {
      open_pipe(err, STDERR_FILENO);
    } catch (...) {
      ::close(out[1]);
      throw;
    }
    return {out[1], err[1]};
  }
  void add_to(std::vector<pollfd>& waited) const {
    for (const Stream& stream : streams_) waited.push_back({stream.from, POLLIN, 0});
  }
  // Forwards the lines that have arrived, without waiting.
  void forward() {
    for (Stream& stream : streams_) read(stream);
  }
  // Forwards the rest, including a last line without a line feed.
  void finish() {
    forward();
    for (Stream& stream : streams_)
      if (!stream.rest.empty()) write(stream, std::exchange(stream.rest, {}) + "\n");
  }
  // errno of a failed write (a full disk); 0: none failed, or nobody reads any more.
  int write_error() const { return write_error_; }

 private:
  struct Stream {
    int rank;
    int from;  // read end, non-blocking; -1: closed
    int to;    // 1 or 2
    std::string rest;
  };

  void read(Stream& stream) {
    char bytes[4096];
    while (stream.from >= 0) {
      const ssize_t n = ::read(stream.from, bytes, sizeof(bytes));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return;  // nothing more for now
      if (n == 0) ::close(std::exchange(stream.from, -1));
      stream.rest.append(bytes, static_cast<std::size_t>(n));
      for (std::size_t end; (end = stream.rest.find('\n')) != std::string::npos;) {
        write(stream, stream.rest.substr(0, end + 1));
        stream.rest.erase(0, end + 1);
      }
    }
  }

  void write(const Stream& stream, const std::string& line) {
    const std::string text = fmt::format("[{}] {}", stream.rank, line);
    for (std::size_t at = 0; at < text.size();) {
      const ssize_t n = ::write(stream.to, text.data() + at, text.size() - at);
      if (n < 0 && errno != EINTR) {
        if (errno != EPIPE) write_error_ = errno;
        return;
      }
      if (n > 0) at += static_cast<std::size_t>(n);
    }
  }

  std::vector<Stream> streams_;
  int write_error_ = 0;
};

// The signals and the output of the processes under way: ranks, or mpirun.
struct Relay {
  explicit Relay(const LaunchOptions& options) {
    if (options.prefix_output) output.emplace();
  }

  // Waits until something may have happened. The poll returns often enough for ended ranks and deadlines,
  // even without pidfds.
  void wait(const std::vector<Child>& children, const std::function<void(int signal)>& pass_on) {
    std::vector<pollfd> waited{{signals.readable(), POLLIN, 0}};
    for (const Child& child : children) waited.push_back({child.running ? child.pidfd : -1, POLLIN, 0});
    if (output) output->add_to(waited);
    ::poll(waited.data(), waited.size(), 100);
    if (output) output->forward();
    signals.take([&](int signal) {
      user_signal = signal;
      pass_on(signal);
    });
  }

  SignalScope signals{};
  std::optional<OutputForwarder> output{};  // none: the ranks write to the launcher's output
  int user_signal = 0;                      // the last signal that was passed on; 0: none
};

// ---- ranks that we start ---------------------------------------------------------------------------------

Texts rank_environment(int rank, int ranks, int port, const std::string& store) {
  return environment_with({fmt::format("RANK={}", rank), fmt::format("LOCAL_RANK={}", rank),
                           fmt::format("WORLD_SIZE={}", ranks), fmt::format("LOCAL_WORLD_SIZE={}", ranks),
                           "MASTER_ADDR=127.0.0.1", fmt::format("MASTER_PORT={}", port),
                           fmt::format("{}={}", kLaunchedVariable, store)});
}

class Launch {
 public:
  Launch(const Texts& command, const LaunchOptions& options) : options_(options), relay_(options) {
    const std::string program = find_program(command[0]), store = new_store_name();
    store_ = std::make_unique<LocalStoreServer>(store);
    // A port for programs whose rank 0 serves its own store, such as torch.distributed's. Nobody listens
    // there yet.
    const Listener free = listen_on("127.0.0.1", 0);
    ::close(free.descriptor);
    try {
      for (int rank = 0; rank < options.ranks; ++rank) {
        const auto [out, err] = relay_.output ? relay_.output->open(rank) : std::pair{-1, -1};
        children_.push_back(
            start_process(program, command, rank_environment(rank, options.ranks, free.port, store), out, err,
                          fmt::format("rank {} of {}", rank, options.ranks), options.holds_user_signals));
      }
    } catch (...) {
      signal_all(SIGKILL);
      while (running()) reap();
      throw;
    }
  }
  ~Launch() {
    for (const Child& child : children_)
      if (child.pidfd >= 0) ::close(child.pidfd);
  }

  int run() {
    while (running()) {
      relay_.wait(children_, [this](int signal) { signal_all(signal); });
      reap();
      end_the_others();
    }
    if (relay_.output) {
      relay_.output->finish();
      if (const int error = relay_.output->write_error(); error != 0 && status() == 0)
        refuse("the output of the ranks", std::strerror(error), "a place to write to",
               "Send the output elsewhere");
    }
    return status();
  }

 private:
  bool running() const { return std::ranges::any_of(children_, &Child::running); }

  void signal_all(int signal) {
    for (const Child& child : children_)
      if (child.running) ::kill(-child.pid, signal);
  }
  void end_all(int signal) {
    for (Child& child : children_) child.asked_to_end |= child.running;
    signal_all(signal);
  }
  bool killed(int status) const {  // by a signal that the user did not send
    return WIFSIGNALED(status) && WTERMSIG(status) != relay_.user_signal;
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
      const std::string ended = fmt::format("rank {} (pid {}) {}", rank, child.pid, how_it_ended(status));
      if (killed(status) && !child.ended_by_us) print(stderr, ended + "\n");
      if (status == 0 || child.ended_by_us || first_failure_ >= 0) continue;
      if (WIFEXITED(status) && WEXITSTATUS(status) == kStatusAgain)
        again_ = true;
      else
        first_failure_ = static_cast<int>(rank);
      if (!first_ended_.empty()) continue;
      first_ended_ = fmt::format("rank {} {}", rank, again_ ? how_it_ended(status) : "failed");
      ended_at_ = Clock::now();
      // Without this, ranks that wait for that rank to join would wait for their whole timeout.
      store_->set(kLaunchFailed, ended);
    }
  }

  // After a failure or kStatusAgain: `grace` to end by themselves, then SIGTERM, then SIGKILL. A stopped rank
  // cannot end by itself.
  void end_the_others() {
    if (first_ended_.empty() || !running()) return;
    for (std::size_t rank = 0; rank < children_.size(); ++rank) {
      Child& child = children_[rank];
      if (!child.running || !child.stopped || child.asked_to_end) continue;
      print(stderr,
            fmt::format("{} and rank {} (pid {}) is stopped: ending it\n", first_ended_, rank, child.pid));
      child.asked_to_end = true;
      ::kill(-child.pid, SIGKILL);
    }
    const auto elapsed = Clock::now() - ended_at_;
    if (ending_ == Ending::kNotYet && elapsed >= options_.grace) {
      print(stderr, fmt::format("{} {} ms ago: ending the ranks that still run\n", first_ended_,
                                options_.grace.count()));
      ending_ = Ending::kAsked;
      end_all(SIGTERM);
    } else if (ending_ == Ending::kAsked && elapsed >= 2 * options_.grace) {
      ending_ = Ending::kKilled;
      end_all(SIGKILL);
    }
  }

  int status() const {
    for (const Child& child : children_) {
      if (child.ended_by_us) continue;
      const bool lost_a_peer = WIFEXITED(child.status) && WEXITSTATUS(child.status) == kStatusPeerLost;
      if (lost_a_peer || killed(child.status)) return kStatusPeerLost;
    }
    if (first_failure_ < 0) return again_ ? kStatusAgain : 0;
    const int status = children_[static_cast<std::size_t>(first_failure_)].status;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  }

  const LaunchOptions options_;
  Relay relay_;
  std::unique_ptr<LocalStoreServer> store_;
  std::vector<Child> children_;
  int first_failure_ = -1;   // the rank; -1: none has failed
  bool again_ = false;       // a rank has ended with kStatusAgain
  std::string first_ended_;  // the first rank that failed or ended with kStatusAgain, in words; empty: none
  Clock::time_point ended_at_;
  enum class Ending { kNotYet, kAsked, kKilled } ending_ = Ending::kNotYet;
};

// ---- ranks that mpirun starts ----------------------------------------------------------------------------

// The child processes of `parent`. On one host mpirun itself starts the ranks.
std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/proc", error)) {
    const pid_t pid = static_cast<pid_t>(std::atoi(entry.path().filename().c_str()));
    std::string text;
    if (pid <= 0 || !std::getline(std::ifstream(entry.path() / "stat"), text)) continue;
    std::istringstream fields(text.substr(text.rfind(')') + 1));  // the name before it may contain anything
    char state = 'Z';
    pid_t above = 0;
    if (fields >> state >> above && above == parent && state != 'Z') found.push_back(pid);
  }
  return found;
}

// mpirun starts the ranks and ends all of them when one fails. Signals, output and the exit status are
// handled here.
int launch_through_mpirun(const Texts& command, const LaunchOptions& options) {
  Texts arguments = mpi::launcher(options.ranks), variables;
  const std::string mpirun = find_program(arguments[0]);
  find_program(command[0]);  // our error is shorter than mpirun's
  if (::geteuid() == 0)      // Open MPI refuses root otherwise; our caller has already chosen it
    variables = {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "PRTE_ALLOW_RUN_AS_ROOT=1",
                 "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1"};

  Relay relay(options);
  struct Ends : std::vector<int> {
    ~Ends() {
      for (const int end : *this) ::close(end);
    }
  } ends;
  if (relay.output) {
    // A shell sends each rank's output to our pipes: mpirun's own tags appear in the middle of lines that are
    // written in parts. The pipes are opened through /proc, because mpirun passes no descriptors on.
    std::string script = "case ${OMPI_COMM_WORLD_RANK:-$PMI_RANK} in";
    for (int rank = 0; rank < options.ranks; ++rank) {
      const auto [out, err] = relay.output->open(rank);
      script +=
          fmt::format(" {0}) exec \"$@\" >/proc/{1}/fd/{2} 2>/proc/{1}/fd/{3};;", rank, ::getpid(), out, err);
      ends.insert(ends.end(), {out, err});
    }
    arguments.insert(arguments.end(), {"/bin/sh", "-c", script + " esac", "sh"});
  }
  arguments.insert(arguments.end(), command.begin(), command.end());
  const std::vector<Child> children{
      start_process(mpirun, arguments, environment_with(variables), -1, -1, "mpirun")};
  const Child& child = children[0];
  int status = 0;
  std::vector<int> early;  // signals to save, which would end mpirun while it has not started the ranks yet
  do {
    const auto pass_on = [&](int signal) {
      // Signal the ranks directly: mpirun would end them instead of passing the signal on.
      const auto ranks = children_of(child.pid);
      for (const pid_t rank : ranks) ::kill(::getpgid(rank) == rank ? -rank : rank, signal);
      if (!ranks.empty()) return;
      if (signal == SIGUSR1 || signal == SIGUSR2)
        early.push_back(signal);
      else
        ::kill(child.pid, signal);
    };
    for (const int signal : std::exchange(early, {})) pass_on(signal);
    relay.wait(children, pass_on);
  } while (::waitpid(child.pid, &status, WNOHANG) != child.pid);
  if (child.pidfd >= 0) ::close(child.pidfd);
  if (relay.output) relay.output->finish();

  const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  if (code <= 128 || code == 128 + relay.user_signal) return code;
  print(stderr, fmt::format("a rank under mpirun was killed by signal {} ({})\n", code - 128,
                            ::strsignal(code - 128)));
  return kStatusPeerLost;
}

}  // namespace

int launch_ranks(const Texts& command, const LaunchOptions& options) {
  if (options.ranks < 1 || command.empty())
    refuse("starting ranks", command.empty() ? "no command" : fmt::format("{} ranks", options.ranks),
           "a command and 1 rank or more", "Use -n N -- COMMAND");
  if (through_mpi(options.backend)) return launch_through_mpirun(command, options);
  if (options.backend != "shm" && options.backend != "nccl")
    refuse("starting ranks", fmt::format("the backend '{}'", options.backend),
           "'shm', 'mpi', 'shm+mpi' or 'nccl'", "Use --backend shm, mpi, shm+mpi or nccl");
  return Launch(command, options).run();
}

}  // namespace isograd
