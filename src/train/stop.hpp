// SIGINT, SIGTERM and SIGHUP as a stop request. The ranks agree on it in the counting vector.
#pragma once

namespace isograd {

// While one exists, the first SIGINT, SIGTERM or SIGHUP of the process sets a flag. Another one a second or
// more later ends the process at once, as if it had never been caught (a terminal and a launcher may both
// forward one Ctrl-C). A SIGHUP that was ignored before (nohup) stays ignored. A file size limit (SIGXFSZ)
// and a closed output (SIGPIPE) become ordinary write errors. May be nested and shared by ranks that are
// threads.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  static bool requested();
};

}  // namespace isograd
