// The parts of a request that the server itself judges, and its own replies.
#pragma once

#include <cstdint>
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
  std::optional<std::int64_t> length{};  // none: chunked
  const char* broken = nullptr;          // two readers could take such a request for two different ones
};
Framing framing_of(const HttpRequest& request);

// Sets path and query from "/path?query", decoded once. False: not of that form, a bad escape, a NUL.
bool read_target(std::string_view target, HttpRequest& request);

// Whether a Host header names this machine: localhost, an address of the loopback, `own`.
bool is_local_host(std::string_view host, std::string_view own);

bool is_json(const HttpRequest& request);        // by its Content-Type
bool is_known_type(const HttpRequest& request);  // JSON or protobuf

// Keeps the short members of a JSON object, or the first short field of each number of a protobuf message,
// whose body is too large to keep: enough to tell what it was about.
class ShortParts {
 public:
  explicit ShortParts(bool json) : json_(json) {}
  void add(std::string_view bytes);
  bool is_message() const { return left_ >> 63 == 0; }  // false: nothing that follows can be read
  std::string body() const { return json_ ? (body_.empty() ? "{" : body_) + "}" : body_; }

 private:
  void add_json(char byte);
  void add_protobuf(char byte);

  bool json_;
  std::string body_{}, part_{};  // what is kept; what is read now
  // JSON
  bool quoted_ = false, escaped_ = false;
  int depth_ = 0;
  // protobuf
  std::uint64_t tag_ = 0, number_ = 0, left_ = 0, seen_ = 0;  // left: bytes of a value
  unsigned shift_ = 0;
  bool keeps_ = false;
};

}  // namespace isograd::serve
