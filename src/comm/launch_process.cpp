#include "comm/launch_process.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/refuse.hpp"
#include "comm/environment.hpp"
#include "isograd/error.hpp"

extern char** environ;

namespace isograd {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> list;
  for (const std::string& text : texts) list.push_back(const_cast<char*>(text.c_str()));
  list.push_back(nullptr);
  return list;
}

// One counter for each of kForwardedSignals. The pipe wakes the loop.
std::atomic<int> arrived[3];
std::atomic<int> wake_pipe{-1};

void on_signal(int signal) {
  const int kept = errno;
  for (int i = 0; i < 3; ++i) {
    if (kForwardedSignals[i] == signal) arrived[i].fetch_add(1);
  }
  const char byte = 0;
  if (wake_pipe.load() >= 0) (void)!::write(wake_pipe.load(), &byte, 1);
  errno = kept;
}

}  // namespace

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
  refuse("starting ranks", fmt::format("no program '{}'", name),
         "an executable file, or a name found in PATH", "Check the command after --");
}

std::vector<std::string> environment_with(std::vector<std::string> replaced) {
  const std::size_t ours = replaced.size();
  for (char** entry = environ; *entry; ++entry) {
    const std::string variable = *entry;
    const std::string name = variable.substr(0, variable.find('='));
    const bool known = std::any_of(replaced.begin(), replaced.begin() + static_cast<std::ptrdiff_t>(ours),
                                   [&](const std::string& other) { return other.rfind(name + "=", 0) == 0; });
    if (!known && !says_rank(name)) replaced.push_back(variable);
  }
  return replaced;
}

Child start_process(const std::string& program, const std::vector<std::string>& command,
                    const std::vector<std::string>& environment, int out, int err, const std::string& name) {
  const auto variables = pointers(environment);
  const auto arguments = pointers(command);
  const pid_t launcher = ::getpid();
  struct sigaction hang_up {};
  ::sigaction(SIGHUP, nullptr, &hang_up);
  const bool outlives_hang_up = hang_up.sa_handler == SIG_IGN;  // nohup
  const pid_t pid = ::fork();
  if (pid == 0) {  // async-signal-safe calls only: other threads of the launcher may hold any lock
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != launcher) ::_exit(kStatusPeerLost);
    sigset_t none;
    sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    for (int signal : kForwardedSignals)
      if (signal != SIGHUP || !outlives_hang_up) ::signal(signal, SIG_DFL);
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
    refuse("starting " + name, fmt::format("fork failed: {}", std::strerror(error)),
           "room for one more process", "Start fewer ranks, or raise the limit on processes (ulimit -u)");
  }
  ::setpgid(pid, pid);  // parent and child both call it, because either may run first
  Child child;
  child.pid = pid;
  child.running = true;
  child.pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  return child;
}

SignalScope::SignalScope() {
  if (::pipe2(pipe_, O_CLOEXEC | O_NONBLOCK) != 0) {
    refuse("starting ranks", fmt::format("no pipe: {}", std::strerror(errno)), "a few free file descriptors",
           "Raise the limit on open files (ulimit -n)");
  }
  for (auto& count : arrived) count = 0;
  wake_pipe = pipe_[1];
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < 3; ++i) {
    ::sigaction(kForwardedSignals[i], &action, &before_[i]);
    // nohup: the ranks must survive the hang-up too.
    if (kForwardedSignals[i] == SIGHUP && before_[i].sa_handler == SIG_IGN)
      ::sigaction(SIGHUP, &before_[i], nullptr);
  }
  action.sa_handler = SIG_DFL;  // if it were ignored, waitpid() could not report how a rank ended
  ::sigaction(SIGCHLD, &action, &child_before_);
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, &pipe_before_);
}

SignalScope::~SignalScope() {
  for (int i = 0; i < 3; ++i) ::sigaction(kForwardedSignals[i], &before_[i], nullptr);
  ::sigaction(SIGCHLD, &child_before_, nullptr);
  ::sigaction(SIGPIPE, &pipe_before_, nullptr);
  wake_pipe = -1;
  ::close(pipe_[0]);
  ::close(pipe_[1]);
}

void SignalScope::take(const std::function<void(int signal)>& pass_on) {
  char bytes[64];
  while (::read(pipe_[0], bytes, sizeof(bytes)) > 0) {
  }
  for (int i = 0; i < 3; ++i) {
    for (int n = arrived[i].exchange(0); n > 0; --n) pass_on(kForwardedSignals[i]);
  }
}

OutputForwarder::~OutputForwarder() {
  for (const Stream& stream : streams_) {
    if (stream.from >= 0) ::close(stream.from);
  }
}

std::pair<int, int> OutputForwarder::open(int rank) {
  int ends[2] = {-1, -1};
  for (int i = 0; i < 2; ++i) {
    int both[2];
    if (::pipe2(both, O_CLOEXEC) != 0) {
      const int error = errno;
      if (ends[0] >= 0) ::close(ends[0]);
      refuse(fmt::format("the output of rank {}", rank), fmt::format("no pipe: {}", std::strerror(error)),
             "two free file descriptors for each rank", "Raise the limit on open files (ulimit -n)");
    }
    ::fcntl(both[0], F_SETFL, O_NONBLOCK);
    streams_.push_back({rank, both[0], i + 1, {}});
    ends[i] = both[1];
  }
  return {ends[0], ends[1]};
}

void OutputForwarder::add_to(std::vector<pollfd>& waited) const {
  for (const Stream& stream : streams_) waited.push_back({stream.from, POLLIN, 0});
}

void OutputForwarder::forward() {
  for (Stream& stream : streams_) read(stream);
}

void OutputForwarder::read(Stream& stream) {
  char bytes[4096];
  while (stream.from >= 0) {
    const ssize_t n = ::read(stream.from, bytes, sizeof(bytes));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return;  // nothing more for now
    if (n == 0) {
      ::close(stream.from);
      stream.from = -1;
      return;
    }
    stream.rest.append(bytes, static_cast<std::size_t>(n));
    for (std::size_t end; (end = stream.rest.find('\n')) != std::string::npos;) {
      write(stream, stream.rest.substr(0, end + 1));
      stream.rest.erase(0, end + 1);
    }
  }
}

void OutputForwarder::finish() {
  for (Stream& stream : streams_) {
    read(stream);
    if (!stream.rest.empty()) write(stream, stream.rest + "\n");
    stream.rest.clear();
  }
}

void OutputForwarder::write(const Stream& stream, const std::string& line) {
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

}  // namespace isograd
