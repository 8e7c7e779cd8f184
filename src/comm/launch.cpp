// Ranks as processes: starting them, passing signals and output on, ending all when one fails.
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/environment.hpp"
#include "comm/launch_output.hpp"
#include "comm/listen.hpp"
#include "isograd/error.hpp"
#include "isograd/world.hpp"

extern char** environ;

namespace isograd {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kStatusPeerLost = 3;
constexpr int kForwarded[] = {SIGINT, SIGTERM, SIGHUP};

// Signals that arrived, one count for each of kForwarded; the pipe wakes the loop.
std::atomic<int> arrived[3];
std::atomic<int> wake_pipe{-1};

void on_signal(int signal) {
  const int kept = errno;
  for (int i = 0; i < 3; ++i) {
    if (kForwarded[i] == signal) arrived[i].fetch_add(1);
  }
  const char byte = 0;
  if (wake_pipe.load() >= 0) (void)!::write(wake_pipe.load(), &byte, 1);
  errno = kept;
}

// Catches the signals above while it lives.
class SignalScope {
 public:
  SignalScope() {
    if (::pipe2(pipe_, O_CLOEXEC | O_NONBLOCK) != 0) {
      throw ConfigError({.where = "starting ranks",
                         .found = fmt::format("no pipe: {}", std::strerror(errno)),
                         .expected = "a few free file descriptors",
                         .action = "Raise the limit on open files (ulimit -n)"});
    }
    for (auto& count : arrived) count = 0;
    wake_pipe = pipe_[1];
    struct sigaction action {};
    action.sa_handler = on_signal;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < 3; ++i) ::sigaction(kForwarded[i], &action, &before_[i]);
    action.sa_handler = SIG_DFL;  // were it ignored, nobody could ask how a rank ended
    ::sigaction(SIGCHLD, &action, &child_before_);
  }
  ~SignalScope() {
    for (int i = 0; i < 3; ++i) ::sigaction(kForwarded[i], &before_[i], nullptr);
    ::sigaction(SIGCHLD, &child_before_, nullptr);
    wake_pipe = -1;
    ::close(pipe_[0]);
    ::close(pipe_[1]);
  }
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;
  int readable() const { return pipe_[0]; }
  void drain() const {
    char bytes[64];
    while (::read(pipe_[0], bytes, sizeof(bytes)) > 0) {
    }
  }

 private:
  int pipe_[2] = {-1, -1};
  struct sigaction before_[3]{};
  struct sigaction child_before_ {};
};

// The file that execve() needs, found before fork(): afterwards only little may be called.
std::string find_program(const std::string& name) {
  std::vector<std::string> candidates;
  if (name.find('/') != std::string::npos) {
    candidates.push_back(name);
  } else {
    const char* path = std::getenv("PATH");
    std::string folders = path ? path : "/usr/bin:/bin";
    for (std::size_t begin = 0; begin <= folders.size();) {
      const std::size_t end = std::min(folders.find(':', begin), folders.size());
      candidates.push_back((end > begin ? folders.substr(begin, end - begin) : ".") + "/" + name);
      begin = end + 1;
    }
  }
  for (const std::string& candidate : candidates) {
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  throw ConfigError({.where = "starting ranks",
                     .found = fmt::format("no program '{}'", name),
                     .expected = "an executable file, or a name found in PATH",
                     .action = "Check the command after --"});
}

std::vector<std::string> rank_environment(int rank, int ranks, int port) {
  std::vector<std::string> variables = {fmt::format("RANK={}", rank),
                                        fmt::format("LOCAL_RANK={}", rank),
                                        fmt::format("WORLD_SIZE={}", ranks),
                                        fmt::format("LOCAL_WORLD_SIZE={}", ranks),
                                        "MASTER_ADDR=127.0.0.1",
                                        fmt::format("MASTER_PORT={}", port),
                                        fmt::format("{}=1", kLaunchedVariable)};
  if (!std::getenv("OMP_NUM_THREADS")) variables.push_back("OMP_NUM_THREADS=1");
  // A launcher that itself runs under torchrun must not pass that one's store on.
  for (char** entry = environ; *entry; ++entry) {
    const std::string variable = *entry;
    const std::string name = variable.substr(0, variable.find('=') + 1);
    const bool ours = std::any_of(variables.begin(), variables.end(),
                                  [&](const std::string& other) { return other.rfind(name, 0) == 0; });
    if (!ours && name.rfind("TORCHELASTIC_", 0) != 0) variables.push_back(variable);
  }
  return variables;
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> list;
  for (const std::string& text : texts) list.push_back(const_cast<char*>(text.c_str()));
  list.push_back(nullptr);
  return list;
}

struct Child {
  pid_t pid = -1;
  int pidfd = -1;
  bool running = false;
  int status = 0;            // of waitpid
  bool ended_by_us = false;  // after another rank had failed
};

// Starts one rank in a process group of its own, so that a terminal's Ctrl-C reaches it once: through us. It
// is killed should the launcher die.
Child start(const std::string& program, const std::vector<std::string>& command, int rank,
            const LaunchOptions& options, int port, OutputForwarder* output) {
  const auto environment = rank_environment(rank, options.ranks, port);
  const auto variables = pointers(environment);
  const auto arguments = pointers(command);
  int out = -1, err = -1;
  if (output) std::tie(out, err) = output->open(rank);
  const pid_t launcher = ::getpid();
  const pid_t pid = ::fork();
  if (pid == 0) {  // async-signal-safe calls only: other threads of the launcher may hold any lock
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != launcher) ::_exit(kStatusPeerLost);
    sigset_t none;
    sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    for (int signal : kForwarded) ::signal(signal, SIG_DFL);
    ::signal(SIGPIPE, SIG_DFL);
    const int null = ::open("/dev/null", O_RDONLY);  // a background process group may not read the terminal
    if (null >= 0) ::dup2(null, STDIN_FILENO);
    if (out >= 0) ::dup2(out, STDOUT_FILENO);
    if (err >= 0) ::dup2(err, STDERR_FILENO);
    ::execve(program.c_str(), arguments.data(), variables.data());
    constexpr char kMessage[] = "launch: the command could not be executed\n";
    (void)!::write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
    ::_exit(2);
  }
  const int error = errno;
  if (out >= 0) ::close(out);
  if (err >= 0) ::close(err);
  if (pid < 0) {
    throw ConfigError({.where = fmt::format("starting rank {}", rank),
                       .found = fmt::format("fork failed: {}", std::strerror(error)),
                       .expected = fmt::format("{} processes", options.ranks),
                       .action = "Start fewer ranks, or raise the limit on processes (ulimit -u)"});
  }
  ::setpgid(pid, pid);  // also here: whoever comes first
  Child child;
  child.pid = pid;
  child.running = true;
  child.pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));  // -1 on old kernels: polled by time
  return child;
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
        children_.push_back(start(program, command, rank, options, listener.port, output_.get()));
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
    signals_.drain();
    for (int i = 0; i < 3; ++i) {
      for (int n = arrived[i].exchange(0); n > 0; --n) {
        user_signal_ = kForwarded[i];
        signal_all(kForwarded[i]);
      }
    }
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
  return Launch(command, options).run();
}

}  // namespace isograd
