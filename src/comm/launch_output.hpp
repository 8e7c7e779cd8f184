// Forwards the output of rank processes line by line, with the rank as a prefix.
#pragma once

#include <poll.h>

#include <string>
#include <utility>
#include <vector>

namespace isograd {

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
