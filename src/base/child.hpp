// Programs as children of this process: the kernel ends them when this process ends.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

namespace isograd {

struct ChildSetup {
  int out = -1, err = -1;  // for its output; -1: this process's. Its input is empty
  const std::vector<std::string>* environment = nullptr;  // NAME=value; null: this process's
  // A process group of its own: a terminal's Ctrl-C reaches it through this process alone, and its own
  // children can be ended with it.
  bool own_group = false;
  // SIGUSR1 and SIGUSR2 wait until the program unblocks them; by default they would end one that is starting.
  bool holds_user_signals = false;
  double most_bytes = std::numeric_limits<double>::infinity();  // of private memory
  // A line for its error output where the program cannot be executed, with status 2; empty: 127 alone, as a
  // shell.
  std::string unless_executed = {};
};

// `program`: a path, or a name in PATH; `command`: its name and arguments. -1: there is no room for a process
// (errno).
pid_t start_child(const std::string& program, const std::vector<std::string>& command,
                  const ChildSetup& setup);

struct ChildRun {
  int status = 0;      // 128 + n: ended by signal n
  bool late = false;   // killed after `most_seconds`
  std::string output;  // the end of both streams, `kept` characters and more
};
// Waits for it. ConfigError: it cannot be started.
ChildRun run_child(const std::vector<std::string>& command, double most_seconds, double most_bytes,
                   std::size_t kept);

}  // namespace isograd
