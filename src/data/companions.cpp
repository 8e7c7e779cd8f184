#include "data/companions.hpp"

#include "base/files.hpp"

namespace isograd {

Companions::Companions(const std::filesystem::path& folder, std::vector<std::string> names) {
  for (const char* name :
       {"special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"})
    names.emplace_back(name);
  for (const std::string& name : names)
    if (std::filesystem::is_regular_file(folder / name)) files_.emplace_back(name, read_file(folder / name));
}

void Companions::write(const std::filesystem::path& directory) const {
  for (const auto& [name, content] : files_) write_file(directory / name, content);
}

}  // namespace isograd
