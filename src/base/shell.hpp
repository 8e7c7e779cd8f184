// Command lines for users to paste.
#pragma once

#include <string>
#include <vector>

namespace isograd {

// One command line of `words`, each quoted if a shell would change it.
inline std::string shell_words(const std::vector<std::string>& words) {
  constexpr const char* kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=./:,@%";
  std::string line;
  for (const std::string& word : words) {
    line += line.empty() ? "" : " ";
    if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) {
      line += word;
      continue;
    }
    line += '\'';
    for (const char c : word) line += c == '\'' ? std::string("'\\''") : std::string(1, c);
    line += '\'';
  }
  return line;
}

}  // namespace isograd
