#include "serve/http/client.hpp"

#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>

#include "base/print.hpp"
#include "base/refuse.hpp"

namespace isograd::serve {
namespace {

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
  const auto fail = [&](const std::string& found) {
    refuse(printable(call.url, 300), found, "a server started by `isograd serve`",
           "Give its address, as in http://127.0.0.1:8000");
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
  const timeval timeout{.tv_sec = call.seconds, .tv_usec = 0};
  for (const addrinfo* address = found; address; address = address->ai_next) {  // localhost is ::1 first
    socket.emplace(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO})
      ::setsockopt(socket->file, SOL_SOCKET, option, &timeout, sizeof timeout);
    if (::connect(socket->file, address->ai_addr, address->ai_addrlen) == 0) break;
    if (!address->ai_next) fail(std::strerror(errno));
  }
  std::string request = fmt::format("{} {} HTTP/1.1\r\nHost: {}\r\nX-API-Key: {}\r\nConnection: close\r\n",
                                    call.method, path, authority, call.key);
  if (call.method != "GET")
    request += fmt::format("Content-Type: {}\r\nContent-Length: {}\r\n", call.type, call.body.size());
  request += "\r\n" + call.body;
  for (std::size_t sent = 0; sent < request.size();) {
    const auto more = ::send(socket->file, request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
    if (more <= 0) fail(std::strerror(errno));
    sent += static_cast<std::size_t>(more);
  }
  std::string text;
  for (char piece[1 << 16];;) {
    const auto more = ::recv(socket->file, piece, sizeof piece, 0);
    if (more < 0) fail(std::strerror(errno));
    if (more == 0) break;
    text.append(piece, static_cast<std::size_t>(more));
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
