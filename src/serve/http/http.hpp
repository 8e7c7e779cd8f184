// An HTTP server: libmicrohttpd with one I/O thread, whose requests may be answered later, from any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>

namespace isograd::serve {

struct HttpRequest {
  std::string method, path;  // path: percent-decoded once, without the query
  std::map<std::string, std::string> query;
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;
  std::int64_t too_large = 0;  // the limit, where the body is beyond it: `body` has its short parts alone
};

struct HttpReply {
  int status = 200;
  std::string type = "application/json";
  std::string body;
  std::map<std::string, std::string> headers{};
  std::filesystem::path file{};  // in place of `body`: read piece by piece while it is sent
};

// Answers its request once, at once or later, from any thread; destroyed without an answer: 500.
using Respond = std::function<void(HttpReply)>;

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 0;                                     // 0: any free one
  std::int64_t most_body = std::int64_t{64} << 20;  // 413 beyond
  // A body that is too large is read and dropped to its end; where nobody knows its length (chunked), up to
  // this: no message of protobuf has more.
  std::int64_t most_dropped = std::int64_t{1} << 31;
  unsigned connections = 4096;
  unsigned idle_seconds = 120;   // without a byte, or between requests
  unsigned header_seconds = 10;  // from connecting to the end of the first request's headers
};

class HttpServer {
 public:
  // Called on the I/O thread and must return at once.
  using Handler = std::function<void(const HttpRequest& request, Respond respond)>;
  // Asked before a body is read, with all but the body, on the I/O thread: an answer refuses the request. Of
  // a body that is too large it is asked again, with its short parts: an answer replaces the 413.
  using Admit = std::function<std::unique_ptr<HttpReply>(const HttpRequest& request)>;
  HttpServer(HttpOptions options, Admit admit, Handler handler);  // ConfigError: the address cannot be had
  ~HttpServer();                                                  // answers what waits with 503
  int port() const;
  std::int64_t connections() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace isograd::serve
