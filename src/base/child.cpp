#include "base/child.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <thread>

#include "base/files.hpp"

extern char** environ;

namespace isograd {
namespace {

using ChildClock = std::chrono::steady_clock;

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> list;
  for (const std::string& text : texts) list.push_back(const_cast<char*>(text.c_str()));
  list.push_back(nullptr);
  return list;
}

}  // namespace

pid_t start_child(const std::string& program, const std::vector<std::string>& command,
                  const ChildSetup& setup) {
  const auto arguments = pointers(command);
  std::vector<char*> variables;
  if (setup.environment) variables = pointers(*setup.environment);
  char** const environment = setup.environment ? variables.data() : environ;
  const auto ignores = [](int signal) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    return action.sa_handler == SIG_IGN;
  };
  // nohup; a shell's background, whose Ctrl-C is not this program's either.
  const bool outlives_hang_up = ignores(SIGHUP), no_interrupt = !setup.own_group && ignores(SIGINT);
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid == 0) {  // async-signal-safe calls only: other threads of the parent may hold any lock
    if (setup.own_group) ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);  // it ended before that call
    sigset_t blocked;
    sigemptyset(&blocked);
    if (setup.holds_user_signals) sigaddset(&blocked, SIGUSR1), sigaddset(&blocked, SIGUSR2);
    ::sigprocmask(SIG_SETMASK, &blocked, nullptr);
    for (const int signal : {SIGINT, SIGTERM, SIGPIPE, SIGHUP})
      if (!(signal == SIGHUP && outlives_hang_up) && !(signal == SIGINT && no_interrupt))
        ::signal(signal, SIG_DFL);
    if (std::isfinite(setup.most_bytes)) {
      const rlimit limit{static_cast<rlim_t>(setup.most_bytes), static_cast<rlim_t>(setup.most_bytes)};
      ::setrlimit(RLIMIT_DATA, &limit);
    }
    const int null = ::open("/dev/null", O_RDONLY);  // a background process group may not read the terminal
    if (null >= 0) ::dup2(null, STDIN_FILENO);
    if (setup.out >= 0) ::dup2(setup.out, STDOUT_FILENO);
    if (setup.err >= 0) ::dup2(setup.err, STDERR_FILENO);
    ::execvpe(program.c_str(), arguments.data(), environment);
    (void)!::write(STDERR_FILENO, setup.unless_executed.data(), setup.unless_executed.size());
    ::_exit(setup.unless_executed.empty() ? 127 : 2);
  }
  if (pid > 0 && setup.own_group) ::setpgid(pid, pid);  // both call it, because either may run first
  return pid;
}

ChildRun run_child(const std::vector<std::string>& command, double most_seconds, double most_bytes,
                   std::size_t kept) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) refuse_file("open", "a pipe", errno);
  const pid_t child =
      start_child(command.at(0), command, {.out = ends[1], .err = ends[1], .most_bytes = most_bytes});
  const int failed = errno;
  ::close(ends[1]);
  if (child < 0) {
    ::close(ends[0]);
    refuse_file("start", command.at(0), failed);
  }
  ChildRun run;
  std::array<char, 4096> read{};
  // False: nothing came within this time, or there is no more.
  const auto take = [&](double milliseconds) {
    pollfd output{ends[0], POLLIN, 0};
    if (::poll(&output, 1, static_cast<int>(milliseconds)) <= 0) return false;
    const ssize_t bytes = ::read(ends[0], read.data(), read.size());
    if (bytes > 0) run.output.append(read.data(), static_cast<std::size_t>(bytes));
    if (bytes == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (run.output.size() > 2 * kept) run.output.erase(0, run.output.size() - kept);
    return bytes > 0;
  };
  const auto deadline = ChildClock::now() + std::chrono::duration<double>(most_seconds);
  int state = 0;
  for (pid_t ended = 0; ended == 0 || (ended < 0 && errno == EINTR);
       ended = ::waitpid(child, &state, WNOHANG)) {
    const auto left = std::chrono::duration<double, std::milli>(deadline - ChildClock::now()).count();
    if (left <= 0) run.late = ::kill(child, SIGKILL) == 0;  // its own children, if started so, end with it
    constexpr double kLook = 50;
    take(std::clamp(left, 0.0, kLook));
  }
  while (take(0)) {  // what it wrote last
  }
  ::close(ends[0]);
  run.late &= WIFSIGNALED(state) && WTERMSIG(state) == SIGKILL;  // it may have ended by itself just before
  run.status = WIFSIGNALED(state) ? 128 + WTERMSIG(state) : WEXITSTATUS(state);
  return run;
}

}  // namespace isograd
