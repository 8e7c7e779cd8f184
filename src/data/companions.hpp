// Files of a Hugging Face directory that only transformers reads. They are kept unchanged.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace isograd {

// The tokenizer's files: special tokens map, added tokens, chat templates.
class Companions {
 public:
  // Reads the files of `names` and of the list above that are in the folder.
  explicit Companions(const std::filesystem::path& folder, std::vector<std::string> names = {});
  void write(const std::filesystem::path& directory) const;

 private:
  std::vector<std::pair<std::string, std::string>> files_;  // name, content
};

}  // namespace isograd
