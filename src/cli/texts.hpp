// The file of texts that bin/isograd prints by itself.
#pragma once

#include <string>
#include <vector>

namespace isograd {

// Stands before a text: the words after `isograd` that it answers. No word and no text has a zero byte in it.
inline std::string text_key(const std::vector<std::string>& words) {
  std::string key("\0>", 2);
  for (const std::string& word : words) key += word + '\0';
  return key + '\0';
}

}  // namespace isograd
