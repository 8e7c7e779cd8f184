// Files of a Hugging Face directory that nothing here reads, but transformers does: kept as they are.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace isograd {

// Those of a tokenizer: the special tokens map, added tokens, chat templates.
class Companions {
 public:
  // Reads those of `names` and of the above that are in the folder.
  explicit Companions(const std::filesystem::path& folder, std::vector<std::string> names = {});
  void write(const std::filesystem::path& directory) const;

 private:
  std::vector<std::pair<std::string, std::string>> files_;  // name, content
};

}  // namespace isograd
