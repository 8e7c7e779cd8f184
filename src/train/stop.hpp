// SIGINT, SIGTERM and SIGHUP as a wish to stop, which the ranks then agree upon in the counting vector.
#pragma once

namespace isograd {

// While one exists, the first SIGINT, SIGTERM or SIGHUP of the process sets a flag; another one, a second or
// more later, ends the process at once as if it had never been caught. (A terminal and a launcher may both
// pass on one Ctrl-C.) A hang-up that was ignored before (nohup) stays so. A file size limit (SIGXFSZ)
// becomes an ordinary write error, and so does output that nobody reads (SIGPIPE). May be nested and shared
// by ranks that are threads.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  static bool requested();
};

}  // namespace isograd
