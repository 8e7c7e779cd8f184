// A client by plain HTTP, for commands that ask a server.
#pragma once

#include <cstddef>
#include <string>

#include "serve/http/http.hpp"

namespace isograd::serve {

struct HttpCall {
  std::string url{}, key{};  // "http://127.0.0.1:8000/metrics"; key: of the header X-API-Key
  std::string method = "GET", type = "application/json", body{};
  int seconds = 10;  // without a byte; and of the whole exchange, with a second more for each 64 KiB of it
  std::size_t most_bytes = std::size_t{64} << 20;  // of the reply
};
// The reply, whatever its status. ConfigError: no such server, no answer in time, one that is not whole.
HttpReply http_call(const HttpCall& call);

}  // namespace isograd::serve
