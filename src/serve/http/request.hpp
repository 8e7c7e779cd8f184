// The parts of a request that the server itself judges, and its own replies.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "serve/http/http.hpp"

namespace isograd::serve {

HttpReply error_reply(int status, const std::string& detail);  // {"detail": ...}, as Tinker's servers say it

// A header that comes twice has both values, with a comma.
void add_header(HttpRequest& request, std::string_view name, std::string_view value);

// How the body is sent.
struct Framing {
  bool has_body = false;
  std::optional<std::int64_t> length{};  // none: chunked
  const char* broken = nullptr;          // two readers could take such a request for two different ones
};
Framing framing_of(const HttpRequest& request);

// Sets path and query from "/path?query", decoded once. False: not of that form, a bad escape, a NUL.
bool read_target(std::string_view target, HttpRequest& request);

// Whether a Host header names this machine: localhost, an address of the loopback, `own`.
bool is_local_host(std::string_view host, std::string_view own);

bool is_known_type(const HttpRequest& request);  // Content-Type: JSON or protobuf

}  // namespace isograd::serve
