// mpirun starts the ranks and ends all of them when one fails. Signals, output and the exit status are
// handled here.
#include "comm/launch_mpi.hpp"

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
#include "comm/launch_output.hpp"
#include "comm/launch_process.hpp"
#include "comm/launch_signals.hpp"
#include "comm/mpi/mpi.hpp"

namespace isograd {
namespace {

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
  if (::geteuid() ==
      0) {  // Open MPI refuses to run as root otherwise, and our caller has already chosen root
    for (const char* name : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
                             "PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"}) {
      variables.push_back(fmt::format("{}=1", name));
    }
  }
  return environment_with(std::move(variables));
}

}  // namespace

int launch_through_mpirun(const std::vector<std::string>& command, const LaunchOptions& options) {
  std::vector<std::string> arguments = mpi::launcher(options.ranks);
  const std::string mpirun = find_program(arguments[0]);
  find_program(command[0]);  // our error is shorter than mpirun's

  SignalScope signals;
  std::unique_ptr<OutputForwarder> output;
  std::optional<PipedCommand> piped;
  if (options.prefix_output) {
    output = std::make_unique<OutputForwarder>();
    const auto shell = piped.emplace(*output, options.ranks).shell();
    arguments.insert(arguments.end(), shell.begin(), shell.end());
  }
  arguments.insert(arguments.end(), command.begin(), command.end());
  const Child child = start_process(mpirun, arguments, mpirun_environment(), -1, -1, "mpirun");
  int user_signal = 0, status = 0;
  for (;;) {
    std::vector<pollfd> waited{{signals.readable(), POLLIN, 0}, {child.pidfd, POLLIN, 0}};
    if (output) output->add_to(waited);
    ::poll(waited.data(), waited.size(), 100);
    if (output) output->forward();
    signals.take([&](int signal) {
      // Signal the ranks directly: mpirun would end them instead of passing the signal on.
      user_signal = signal;
      const auto ranks = children_of(child.pid);
      for (const pid_t rank : ranks) ::kill(::getpgid(rank) == rank ? -rank : rank, signal);
      if (ranks.empty()) ::kill(child.pid, signal);  // mpirun has not started the ranks yet
    });
    if (::waitpid(child.pid, &status, WNOHANG) == child.pid) break;
  }
  if (child.pidfd >= 0) ::close(child.pidfd);
  if (output) output->finish();

  const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  if (code <= 128 || code == 128 + user_signal) return code;
  print(stderr, fmt::format("a rank under mpirun was killed by signal {} ({})\n", code - 128,
                            ::strsignal(code - 128)));
  return kStatusPeerLost;
}

}  // namespace isograd
