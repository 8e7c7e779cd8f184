// Folders that survive a crash, and suggestions for paths that do not exist.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace isograd {

// Optimal string alignment: insertions, deletions, substitutions and swaps of neighbours.
std::size_t edit_distance(std::string_view a, std::string_view b);

// The most edits for a similar name: two, or a third of its length.
std::size_t near_enough(std::string_view text);

// A suggestion for a path that does not exist: its deepest existing folder, the entry there with the name
// nearest to the first missing one, and the rest of the path if that exists there. Nothing when no name is
// near.
std::optional<std::filesystem::path> nearest_path(const std::filesystem::path& missing);

// Advice for a path that does not exist: the nearest existing path, or the folder where relative paths start.
std::string missing_path_action(const std::filesystem::path& missing);

// Creates `folder` and its parents, and fsyncs the parent of each new folder. ConfigError on failure.
void make_folders(const std::filesystem::path& folder);

// A folder among the temporary files that nobody else reads, removed with everything in it. ConfigError.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace isograd
