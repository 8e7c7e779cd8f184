// http_call() against servers of the loopback.
#include "serve/http/client.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "base/error_testing.hpp"

// The name two.test is that of an address where nobody listens, and of the loopback.
extern "C" int getaddrinfo(const char* name, const char* port, const addrinfo* hints, addrinfo** found) {
  static const auto real = reinterpret_cast<decltype(&getaddrinfo)>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  if (!name || std::string_view(name) != "two.test") return real(name, port, hints, found);
  if (const int code = real("127.0.0.2", port, hints, found)) return code;
  addrinfo* last = *found;
  while (last->ai_next) last = last->ai_next;
  return real("127.0.0.1", port, hints, &last->ai_next);
}

namespace isograd::serve {
namespace {

using error_testing::error_of;
using ::testing::HasSubstr;

constexpr std::size_t kBytes = 1 << 20;

void answer(const HttpRequest&, const Respond& respond) { respond({.body = std::string(kBytes, 'x')}); }

TEST(HttpCall, TriesEveryAddressOfAName) {
  const HttpServer server({.host = "127.0.0.1"}, {}, answer);
  const std::string url = fmt::format("http://two.test:{}/", server.port());
  EXPECT_EQ(http_call({.url = url}).status, 421) << "on the loopback no foreign name is served, but answered";
  EXPECT_THAT(error_of([] { http_call({.url = "http://two.test:1/"}); }), HasSubstr("refused"));
}

TEST(HttpCall, LimitsAReply) {
  const HttpServer server({}, {}, answer);
  const std::string url = fmt::format("http://127.0.0.1:{}/", server.port());
  EXPECT_EQ(http_call({.url = url}).body.size(), kBytes);
  EXPECT_THAT(error_of([&] { http_call({.url = url, .most_bytes = kBytes / 2}); }),
              HasSubstr("a reply of over 524288 bytes"));
}

// The result of a call whose reply of one million bytes comes in pieces, one every 100 ms.
HttpReply from_slow_server(const HttpCall& asked, std::size_t piece) {
  using namespace std::chrono_literals;
  const int listening = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{
      .sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
  socklen_t size = sizeof address;
  auto* bound = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(listening, bound, size) + ::listen(listening, 1) + ::getsockname(listening, bound, &size),
            0);
  std::jthread server([&](const std::stop_token& ends) {
    const int client = ::accept(listening, nullptr, nullptr);
    char request[4096];
    EXPECT_GT(::recv(client, request, sizeof request, 0), 0);
    const std::string head = "HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", body(1000000, 'x');
    ::send(client, head.data(), head.size(), MSG_NOSIGNAL);
    const auto last = std::chrono::steady_clock::now() + 5s;
    for (std::size_t sent = 0; sent < body.size() && std::chrono::steady_clock::now() < last; sent += piece) {
      if (ends.stop_requested()) break;
      ::send(client, body.data(), std::min(piece, body.size() - sent), MSG_NOSIGNAL);
      std::this_thread::sleep_for(100ms);
    }
    ::close(client), ::close(listening);
  });
  HttpCall call = asked;
  call.url = fmt::format("http://127.0.0.1:{}/", ntohs(address.sin_port));
  return http_call(call);
}

TEST(HttpCall, LimitsTheTimeOfAWholeExchange) {
  EXPECT_THAT(error_of([] { from_slow_server({.seconds = 1}, 1); }),
              HasSubstr("expected none later than 1 s after the one before, and all within 1 s"));
  // A reply at a good rate may take longer than that.
  EXPECT_EQ(from_slow_server({.seconds = 1}, 64 << 10).body.size(), 1000000);
}

}  // namespace
}  // namespace isograd::serve
