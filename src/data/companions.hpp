// Files of a Hugging Face directory that only transformers reads. They are kept unchanged.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "base/files.hpp"

namespace isograd {

// The tokenizer's files: special tokens map, added tokens, chat templates.
class Companions {
 public:
  // Reads the files of `names` and of the list above that are in the folder.
  explicit Companions(const fs::path& folder, std::vector<std::string> names = {}) {
    for (const char* name :
         {"special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"})
      names.emplace_back(name);
    for (const std::string& name : names)
      if (fs::is_regular_file(folder / name)) files_.emplace_back(name, read_file(folder / name));
  }
  void write(const fs::path& directory) const {
    for (const auto& [name, content] : files_) write_file(directory / name, content);
  }
  std::string fingerprint() const {
    std::string text;
    for (const auto& [name, content] : files_) text += name + '\n' + content + '\n';
    return text;
  }

 private:
  std::vector<std::pair<std::string, std::string>> files_;  // name, content
};

}  // namespace isograd
