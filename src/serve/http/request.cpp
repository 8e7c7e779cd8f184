#include "serve/http/request.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <charconv>

#include "base/json.hpp"

namespace isograd::serve {
namespace {

std::string lower(std::string_view text) {
  std::string made(text);
  for (char& letter : made)
    if (letter >= 'A' && letter <= 'Z') letter = static_cast<char>(letter - 'A' + 'a');
  return made;
}

// Appends the decoded text.
bool decode(std::string_view text, bool plus_is_space, std::string& to) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    char byte = text[i] == '+' && plus_is_space ? ' ' : text[i];
    if (byte == '%') {
      unsigned value = 0;
      if (text.size() - i < 3) return false;
      const char* digits = text.data() + i + 1;
      if (std::from_chars(digits, digits + 2, value, 16).ptr != digits + 2) return false;
      byte = static_cast<char>(value), i += 2;
    }
    if (byte == '\0') return false;
    to += byte;
  }
  return true;
}

}  // namespace

HttpReply error_reply(int status, const std::string& detail) {
  return {.status = status, .body = nlohmann::json{{"detail", detail}}.dump()};
}

void add_header(HttpRequest& request, std::string_view name, std::string_view value) {
  const auto [at, is_new] = request.headers.emplace(lower(name), value);
  if (!is_new) at->second += ", " + std::string(value);
}

Framing framing_of(const HttpRequest& request) {
  const auto length = request.headers.find("content-length"),
             coding = request.headers.find("transfer-encoding"), none = request.headers.end();
  Framing framing;
  if (coding != none) {
    framing.has_body = true;
    if (length != none) framing.broken = "Expected either Content-Length or Transfer-Encoding";
    if (lower(coding->second) != "chunked") framing.broken = "Expected no Transfer-Encoding but chunked";
  } else {
    framing.length = 0;
    if (length != none) {
      const char *begin = length->second.data(), *end = begin + length->second.size();
      const auto [last, bad] = std::from_chars(begin, end, *framing.length);
      if (bad != std::errc() || last != end || *framing.length < 0)
        framing.broken = "Content-Length is no number";
    }
    framing.has_body = *framing.length > 0;
  }
  return framing;
}

bool read_target(std::string_view target, HttpRequest& request) {
  const std::size_t mark = target.find('?');
  if (!target.starts_with('/') || !decode(target.substr(0, mark), false, request.path)) return false;
  std::string_view rest = mark == target.npos ? "" : target.substr(mark + 1);
  while (!rest.empty()) {
    const std::string_view pair = rest.substr(0, rest.find('&'));
    rest.remove_prefix(std::min(rest.size(), pair.size() + 1));
    const std::size_t equals = pair.find('=');
    std::string name, value;
    if (!decode(pair.substr(0, equals), true, name)) return false;
    if (equals != pair.npos && !decode(pair.substr(equals + 1), true, value)) return false;
    request.query[name] = value;
  }
  return true;
}

bool is_local_host(std::string_view host, std::string_view own) {
  if (host.starts_with('[')) return host.substr(0, host.find(']') + 1) == "[::1]";
  const std::string name = lower(host.substr(0, host.find(':')));
  in_addr address{};
  return name == "localhost" || name == lower(own) ||
         (inet_pton(AF_INET, name.c_str(), &address) == 1 && ntohl(address.s_addr) >> 24 == 127);
}

bool is_known_type(const HttpRequest& request) {
  const auto found = request.headers.find("content-type");
  if (found == request.headers.end()) return false;
  std::string type = lower(found->second.substr(0, found->second.find(';')));
  type.erase(type.find_last_not_of(" \t") + 1);
  return type == "application/json" || type == "application/x-protobuf" || type == "application/protobuf";
}

}  // namespace isograd::serve
