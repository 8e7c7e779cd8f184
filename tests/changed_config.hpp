// A configuration changed in a few words: "tp=2 strategy=zero3 model.heads=6".
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "train/config.hpp"

namespace isograd {

// `set`: "key=value ..."; a key without a section is of [parallel], and of several values the last one
// counts.
inline RunConfig changed(const RunConfig& base, const std::string& set) {
  std::istringstream words(set);
  std::vector<std::string> keys;
  for (std::string word; words >> word;) {
    const std::string key = word.substr(0, word.find('=') + 1);
    if (key.find('.') == std::string::npos) word = "parallel." + word;
    std::erase_if(
        keys, [&](const std::string& one) { return one.starts_with(word.substr(0, word.find('=') + 1)); });
    keys.push_back(word);
  }
  return parse_config(to_toml(base), "changed.toml", keys);
}

}  // namespace isograd
