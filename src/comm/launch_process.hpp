// Starts a process that ends when its launcher does.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace isograd {

constexpr int kStatusPeerLost = 3;  // exit status of a rank that lost another (docs/errors.md)

struct Child {
  pid_t pid = -1;
  int pidfd = -1;  // -1 on old kernels: polled by time
  bool running = false;
  bool stopped = false;       // stopped by a signal, so it cannot end by itself
  int status = 0;             // of waitpid
  bool asked_to_end = false;  // after another rank failed
  bool ended_by_us = false;   // and that ended it
};

// The file for execve(). ConfigError when PATH has no such executable.
std::string find_program(const std::string& name);

// This process's environment with `replaced` (NAME=value), without the variables that say which rank this
// process is.
std::vector<std::string> environment_with(std::vector<std::string> replaced);

// Starts `program` in its own process group, so that a terminal's Ctrl-C reaches it only through us. The
// kernel kills it if the launcher dies. `out` and `err` become its output (-1: inherited) and are closed
// here. `name` is used in the ConfigError when no process can be created.
Child start_process(const std::string& program, const std::vector<std::string>& command,
                    const std::vector<std::string>& environment, int out, int err, const std::string& name);

}  // namespace isograd
