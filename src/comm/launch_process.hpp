// Starting a process that ends when its launcher does.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace isograd {

constexpr int kStatusPeerLost = 3;  // of a rank that lost another (docs/errors.md)

struct Child {
  pid_t pid = -1;
  int pidfd = -1;  // -1 on old kernels: polled by time
  bool running = false;
  bool stopped = false;      // by a signal, so that it cannot end by itself
  int status = 0;            // of waitpid
  bool told_to_end = false;  // after another rank had failed
  bool ended_by_us = false;  // and it did
};

// The file that execve() needs. ConfigError when nothing in PATH can be executed.
std::string find_program(const std::string& name);

// This process's variables with `replaced` (NAME=value) instead of any of those names, and without those that
// say which rank this process itself is.
std::vector<std::string> environment_with(std::vector<std::string> replaced);

// Starts `program` in a process group of its own, so that a terminal's Ctrl-C reaches it once: through us. It
// is killed should the launcher die. `out` and `err` become its output (-1: ours) and are closed here. `name`
// is for the ConfigError when no process can be made.
Child start_process(const std::string& program, const std::vector<std::string>& command,
                    const std::vector<std::string>& environment, int out, int err, const std::string& name);

}  // namespace isograd
