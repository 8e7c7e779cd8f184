// The output of rank processes, forwarded line by line with the rank in front.
#pragma once

#include <poll.h>

#include <string>
#include <utility>
#include <vector>

namespace isograd {

class OutputForwarder {
 public:
  ~OutputForwarder();
  // Pipes for a rank: the ends it writes stdout and stderr to, which the caller closes once it has started.
  std::pair<int, int> open(int rank);
  void add_to(std::vector<pollfd>& waited) const;
  // Passes on the lines that have come, without waiting.
  void forward();
  // The rest, a last line without an end too.
  void finish();
  // errno of a line that could not be written (a full disk); 0 when all were, or nobody reads any more.
  int trouble() const { return trouble_; }

 private:
  struct Stream {
    int rank;
    int from;  // read end, not blocking; -1 once it has ended
    int to;    // 1 or 2
    std::string rest;
  };
  void read(Stream& stream);
  void write(const Stream& stream, const std::string& line);
  std::vector<Stream> streams_;
  int trouble_ = 0;
};

}  // namespace isograd
