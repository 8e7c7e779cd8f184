#include "comm/launch_process.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/refuse.hpp"
#include "comm/environment.hpp"
#include "comm/launch_signals.hpp"
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

}  // namespace isograd
