#include "serve/http/request.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/json.hpp"
#include "base/number_ranges.hpp"

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

std::string type_of(const HttpRequest& request) {
  const auto found = request.headers.find("content-type");
  if (found == request.headers.end()) return "";
  std::string type = lower(found->second.substr(0, found->second.find(';')));
  type.erase(type.find_last_not_of(" \t") + 1);
  return type;
}

// Bytes of one of the ShortParts, and of all.
constexpr std::size_t kShort = 1024, kMostShort = 16 * kShort;

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
    if (length != none) framing.broken = "Expected either Content-Length or Transfer-Encoding";
    if (lower(coding->second) != "chunked") framing.broken = "Expected no Transfer-Encoding but chunked";
  } else {
    framing.length = length == none ? 0 : whole_number(length->second);
    if (!framing.length) framing.broken = "Content-Length is no number";
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

bool is_json(const HttpRequest& request) { return type_of(request) == "application/json"; }

bool is_known_type(const HttpRequest& request) {
  const std::string type = type_of(request);
  return type == "application/json" || type == "application/x-protobuf" || type == "application/protobuf";
}

void ShortParts::add(std::string_view bytes) {
  while (!bytes.empty()) {
    const auto inside = static_cast<std::size_t>(std::min<std::uint64_t>(bytes.size(), left_));
    if (inside == 0) {
      json_ ? add_json(bytes[0]) : add_protobuf(bytes[0]);
      bytes.remove_prefix(1);
    } else {
      if (keeps_) body_ += bytes.substr(0, inside);
      bytes.remove_prefix(inside), left_ -= inside;
    }
  }
}

void ShortParts::add_json(char byte) {
  if (quoted_) {
    quoted_ = escaped_ || byte != '"';
    escaped_ = !escaped_ && byte == '\\';
  } else if (byte == '"') {
    quoted_ = true;
  } else if (byte == '{' || byte == '[') {
    if (depth_++ == 0) return;
  } else if (byte == '}' || byte == ']') {
    depth_ -= 1;
  }
  if (quoted_ || (depth_ > 0 && (depth_ > 1 || byte != ','))) {
    if (part_.size() <= kShort) part_ += byte;
    return;
  }
  if (!part_.empty() && part_.size() <= kShort && body_.size() < kMostShort)
    body_ += (body_.empty() ? "{" : ",") + part_;
  part_.clear();
}

// A byte of a tag, or of the number or length behind it.
void ShortParts::add_protobuf(char byte) {
  constexpr std::uint64_t kRest = ~std::uint64_t{0};  // what is no message is dropped
  part_ += byte;
  number_ |= static_cast<std::uint64_t>(byte & 0x7f) << shift_;
  shift_ += 7;
  if ((byte & 0x80) != 0) {
    if (shift_ > 63) left_ = kRest, keeps_ = false;
    return;
  }
  const std::uint64_t value = std::exchange(number_, 0);
  shift_ = 0;
  const bool is_tag = tag_ == 0;
  if (is_tag) tag_ = value;
  const std::uint64_t wire = tag_ & 7, field = tag_ >> 3;
  if (is_tag && field > 0 && (wire == 0 || wire == 2)) return;
  left_ = !is_tag ? (wire == 2 ? value : 0) : field == 0 ? kRest : wire == 1 ? 8 : wire == 5 ? 4 : kRest;
  keeps_ = left_ <= kShort && field < 64 && (seen_ >> field & 1) == 0;
  if (keeps_) seen_ |= std::uint64_t{1} << field, body_ += part_;
  tag_ = 0, part_.clear();
}

}  // namespace isograd::serve
