#include "comm/launch_output.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {

OutputForwarder::~OutputForwarder() {
  for (const Stream& stream : streams_) {
    if (stream.from >= 0) ::close(stream.from);
  }
}

std::pair<int, int> OutputForwarder::open(int rank) {
  int ends[2] = {-1, -1};
  for (int i = 0; i < 2; ++i) {
    int both[2];
    if (::pipe2(both, O_CLOEXEC) != 0) {
      const int error = errno;
      if (ends[0] >= 0) ::close(ends[0]);
      refuse(fmt::format("the output of rank {}", rank), fmt::format("no pipe: {}", std::strerror(error)),
             "two free file descriptors for each rank", "Raise the limit on open files (ulimit -n)");
    }
    ::fcntl(both[0], F_SETFL, O_NONBLOCK);
    streams_.push_back({rank, both[0], i + 1, {}});
    ends[i] = both[1];
  }
  return {ends[0], ends[1]};
}

void OutputForwarder::add_to(std::vector<pollfd>& waited) const {
  for (const Stream& stream : streams_) waited.push_back({stream.from, POLLIN, 0});
}

void OutputForwarder::forward() {
  for (Stream& stream : streams_) read(stream);
}

void OutputForwarder::read(Stream& stream) {
  char bytes[4096];
  while (stream.from >= 0) {
    const ssize_t n = ::read(stream.from, bytes, sizeof(bytes));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return;  // nothing more for now
    if (n == 0) {
      ::close(stream.from);
      stream.from = -1;
      return;
    }
    stream.rest.append(bytes, static_cast<std::size_t>(n));
    for (std::size_t end; (end = stream.rest.find('\n')) != std::string::npos;) {
      write(stream, stream.rest.substr(0, end + 1));
      stream.rest.erase(0, end + 1);
    }
  }
}

void OutputForwarder::finish() {
  for (Stream& stream : streams_) {
    read(stream);
    if (!stream.rest.empty()) write(stream, stream.rest + "\n");
    stream.rest.clear();
  }
}

void OutputForwarder::write(const Stream& stream, const std::string& line) {
  const std::string text = fmt::format("[{}] {}", stream.rank, line);
  for (std::size_t at = 0; at < text.size();) {
    const ssize_t n = ::write(stream.to, text.data() + at, text.size() - at);
    if (n < 0 && errno != EINTR) {
      if (errno != EPIPE) write_error_ = errno;
      return;
    }
    if (n > 0) at += static_cast<std::size_t>(n);
  }
}

}  // namespace isograd
