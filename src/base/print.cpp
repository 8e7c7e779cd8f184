#include "base/print.hpp"

#include <fmt/format.h>
#include <utf8.h>

#include <cstdint>
#include <iterator>

namespace isograd {
namespace {

bool is_shown(std::uint32_t character) {
  const bool control = character < 0x20 || (character >= 0x7F && character < 0xA0);
  const bool separator = character == 0x2028 || character == 0x2029 || character == 0xFEFF;
  const bool direction = character == 0x061C || character == 0x200E || character == 0x200F ||
                         (character >= 0x202A && character <= 0x202E) ||
                         (character >= 0x2066 && character <= 0x2069);
  return !control && !separator && !direction;
}

std::string escaped(std::string_view text, bool keep_lines, std::size_t most) {
  std::string result;
  result.reserve(text.size());
  std::size_t count = 0;
  const char *at = text.data(), *end = at + text.size(), *bad = utf8::find_invalid(at, end);
  for (; at != end; ++count) {
    if (count == most) return result + "…";
    if (at == bad) {
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(*at));
      bad = utf8::find_invalid(++at, end);
      continue;
    }
    const char* begin = at;
    const std::uint32_t character = utf8::next(at, end);
    if (is_shown(character) || (keep_lines && (character == '\n' || character == '\t')))
      result.append(begin, at);
    else if (character == '\n')
      result += "\\n";
    else if (character == '\t')
      result += "\\t";
    else
      result += fmt::format("\\u{{{:x}}}", character);
  }
  return result;
}

}  // namespace

std::string escape_html(std::string_view text) {
  std::string valid, result;
  utf8::replace_invalid(text.begin(), text.end(), std::back_inserter(valid));
  result.reserve(valid.size());
  for (const char *at = valid.data(), *end = at + valid.size(); at != end;) {
    const char* begin = at;
    switch (const std::uint32_t character = utf8::next(at, end)) {
      case '&': result += "&amp;"; break;
      case '<': result += "&lt;"; break;
      case '>': result += "&gt;"; break;
      case '"': result += "&quot;"; break;
      case '\'': result += "&#39;"; break;
      default: {
        const bool space = character == '\n' || character == '\t' || character == '\r';
        is_shown(character) || space ? result.append(begin, at) : result.append("\uFFFD");
      }
    }
  }
  return result;
}

std::string printable(std::string_view foreign, std::size_t most) {
  return escaped(foreign, /*keep_lines=*/false, most);
}

void print(std::FILE* out, std::string_view text) {
  const std::string shown = escaped(text, /*keep_lines=*/true, std::string_view::npos);
  std::fwrite(shown.data(), 1, shown.size(), out);  // a caller that flushes checks the result
}

}  // namespace isograd
