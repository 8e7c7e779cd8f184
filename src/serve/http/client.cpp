#include "serve/http/client.hpp"

#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>

#include "base/print.hpp"
#include "base/refuse.hpp"

namespace isograd::serve {
namespace {

constexpr int kLeastRate = 64 << 10;  // bytes a second, after the first HttpCall::seconds

struct OwnSocket {
  explicit OwnSocket(int open) : file(open) {}
  OwnSocket(const OwnSocket&) = delete;
  OwnSocket& operator=(const OwnSocket&) = delete;
  const int file;
  ~OwnSocket() {
    if (file >= 0) ::close(file);
  }
};

}  // namespace

HttpReply http_call(const HttpCall& call) {
  constexpr std::string_view kScheme = "http://";
  const auto fail = [&](const std::string& found,
                        const std::string& expected = "a server started by `isograd serve`",
                        const std::string& action = "Give its address, as in http://127.0.0.1:8000") {
    refuse(printable(call.url, 300), found, expected, action);
  };
  if (!call.url.starts_with(kScheme)) fail("no http:// address");
  const std::string rest = call.url.substr(kScheme.size());
  const std::string authority = rest.substr(0, rest.find('/'));
  const std::string path = rest.size() > authority.size() ? rest.substr(authority.size()) : "/";
  const auto colon = authority.rfind(':');
  const bool has_port = colon != std::string::npos && authority.find(']', colon) == std::string::npos;
  std::string name = authority.substr(0, has_port ? colon : std::string::npos);
  if (name.starts_with('[') && name.ends_with(']')) name = name.substr(1, name.size() - 2);

  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (const int code =
          ::getaddrinfo(name.c_str(), has_port ? authority.substr(colon + 1).c_str() : "80", &hints, &found))
    fail(::gai_strerror(code));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> addresses(found, ::freeaddrinfo);
  std::optional<OwnSocket> socket;
  std::size_t moved = 0;  // bytes, either way
  // A transfer within the time that is left: silence is limited, and so is a byte now and then.
  auto begun = std::chrono::steady_clock::now();
  const auto timed = [&](const auto& transfer) -> std::size_t {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begun;
    const double left = call.seconds + static_cast<double>(moved) / kLeastRate - taken.count();
    const auto wait = static_cast<std::int64_t>(1e6 * std::clamp<double>(left, 1e-3, call.seconds));
    const timeval timeout{.tv_sec = wait / 1000000, .tv_usec = wait % 1000000};
    for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO})
      ::setsockopt(socket->file, SOL_SOCKET, option, &timeout, sizeof timeout);
    const ssize_t more = left > 0 ? transfer() : -1;
    if (left <= 0 || (more < 0 && (errno == EAGAIN || errno == EINPROGRESS)))
      fail(
          fmt::format("{} bytes in {:.1f} s", moved, taken.count()),
          fmt::format(
              "none later than {} s after the one before, and all within {} s and a second for each {} bytes",
              call.seconds, call.seconds, kLeastRate),
          "Look at the server, and at the network on the way to it");
    if (more < 0) fail(std::strerror(errno));
    return moved += static_cast<std::size_t>(more), static_cast<std::size_t>(more);
  };
  bool connected = false;
  for (const addrinfo* address = found; !connected; address = address->ai_next) {  // localhost is ::1 first
    socket.emplace(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    begun = std::chrono::steady_clock::now();  // an address that is silent leaves the next one its time
    timed([&] {
      connected = ::connect(socket->file, address->ai_addr, address->ai_addrlen) == 0;
      return connected || address->ai_next ? 0 : -1;
    });
  }
  std::string request = fmt::format("{} {} HTTP/1.1\r\nHost: {}\r\nX-API-Key: {}\r\nConnection: close\r\n",
                                    call.method, path, authority, call.key);
  if (call.method != "GET")
    request += fmt::format("Content-Type: {}\r\nContent-Length: {}\r\n", call.type, call.body.size());
  request += "\r\n" + call.body;
  while (moved < request.size())
    timed([&] { return ::send(socket->file, request.data() + moved, request.size() - moved, MSG_NOSIGNAL); });
  std::string text;
  for (char piece[1 << 16];;) {
    const std::size_t more = timed([&] { return ::recv(socket->file, piece, sizeof piece, 0); });
    if (more == 0) break;
    text.append(piece, more);
    if (text.size() > call.most_bytes) fail(fmt::format("a reply of over {} bytes", call.most_bytes));
  }

  const auto end = text.find("\r\n\r\n");
  if (end == std::string::npos || !text.starts_with("HTTP/1.1 ")) fail("no answer by HTTP/1.1");
  HttpReply reply;
  std::from_chars(text.data() + 9, text.data() + end, reply.status);
  for (auto line = text.find("\r\n"); line < end;) {
    const auto next = text.find("\r\n", line + 2), colon_at = text.find(": ", line + 2);
    if (colon_at < next) {
      std::string header = text.substr(line + 2, colon_at - line - 2);
      std::ranges::transform(header, header.begin(), [](unsigned char c) { return std::tolower(c); });
      reply.headers[header] = text.substr(colon_at + 2, next - colon_at - 2);
    }
    line = next;
  }
  reply.body = text.substr(end + 4), reply.type = reply.headers["content-type"];
  if (reply.headers["content-length"] != std::to_string(reply.body.size()))
    fail(fmt::format(
        "{} bytes of a body of {}", reply.body.size(),
        reply.headers["content-length"].empty() ? "unknown length" : reply.headers["content-length"]));
  return reply;
}

}  // namespace isograd::serve
