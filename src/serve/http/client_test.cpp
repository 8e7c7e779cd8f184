// http_call() against servers of the loopback.
#include "serve/http/client.hpp"

#include <dlfcn.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <netdb.h>

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

}  // namespace
}  // namespace isograd::serve
