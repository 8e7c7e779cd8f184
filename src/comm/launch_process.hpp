// Rank processes: starting one that ends when its launcher does, and passing on signals and output.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/types.h>

#include <functional>
#include <string>
#include <utility>
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

inline constexpr int kForwardedSignals[] = {SIGINT, SIGTERM, SIGHUP};

// Catches kForwardedSignals while it lives, and ignores SIGPIPE, so that ranks do not end because nobody
// reads the launcher's output. A process may have one at a time.
class SignalScope {
 public:
  SignalScope();
  ~SignalScope();
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;
  // For poll(): readable once a signal has arrived.
  int readable() const { return pipe_[0]; }
  // Calls `pass_on` once for each signal that has arrived since the last call.
  void take(const std::function<void(int signal)>& pass_on);

 private:
  int pipe_[2] = {-1, -1};
  struct sigaction before_[3]{};
  struct sigaction child_before_ {};
  struct sigaction pipe_before_ {};
};

// Forwards the output of rank processes line by line, with the rank as a prefix.
class OutputForwarder {
 public:
  ~OutputForwarder();
  // Makes pipes for a rank. Returns the ends for its stdout and stderr, which the caller closes after the
  // start.
  std::pair<int, int> open(int rank);
  void add_to(std::vector<pollfd>& waited) const;
  // Forwards the lines that have arrived, without waiting.
  void forward();
  // Forwards the rest, including a last line without a line feed.
  void finish();
  // errno of a failed write (a full disk); 0: none failed, or nobody reads any more.
  int write_error() const { return write_error_; }

 private:
  struct Stream {
    int rank;
    int from;  // read end, non-blocking; -1: closed
    int to;    // 1 or 2
    std::string rest;
  };
  void read(Stream& stream);
  void write(const Stream& stream, const std::string& line);
  std::vector<Stream> streams_;
  int write_error_ = 0;
};

}  // namespace isograd
