#include "base/output.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cctype>
#include <cstdlib>

#include "base/files.hpp"
#include "base/print.hpp"

namespace isograd {

Printing& printing() {
  static Printing chosen;
  return chosen;
}

bool is_terminal(std::FILE* out) {
  const char* kind = std::getenv("TERM");
  return isatty(fileno(out)) != 0 && (!kind || std::string_view(kind) != "dumb");
}

bool in_colour(std::FILE* out) {
  const std::string& colour = printing().colour;
  const char* no = std::getenv("NO_COLOR");
  return colour == "always" || (colour == "auto" && is_terminal(out) && !(no && *no));
}

void print_verdict(std::FILE* out, std::string_view text) {
  if (!in_colour(out)) return print(out, text);
  const auto in_word = [&](std::size_t at) {
    return at < text.size() && std::isalnum(static_cast<unsigned char>(text[at]));
  };
  std::size_t printed = 0;
  for (std::size_t at = 0; at + 4 <= text.size(); ++at) {
    const std::string_view word = text.substr(at, 4);
    if ((word != "PASS" && word != "FAIL") || in_word(at + 4) || (at > 0 && in_word(at - 1))) continue;
    print(out, text.substr(printed, at - printed));
    const std::string painted = fmt::format("\033[{}m{}\033[0m", word == "PASS" ? 32 : 31, word);
    std::fwrite(painted.data(), 1, painted.size(), out);  // print() would write the sequences out
    printed = at + 4;
  }
  print(out, text.substr(printed));
}

void write_output(const std::string& file, std::string_view text) {
  file == kStandardOutput ? print(stdout, text) : write_file(file, text);
}

}  // namespace isograd
