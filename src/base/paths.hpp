// Paths: folders that are there after a crash, and what was meant by a path that is not there.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace isograd {

// Optimal string alignment: insertions, deletions, substitutions and swaps of neighbours.
std::size_t edit_distance(std::string_view a, std::string_view b);

// Edits up to which a name is near `text`: two, or a third of it.
std::size_t near_enough(std::string_view text);

// For a path that does not exist: the deepest folder of it that does, with the entry there whose name is
// nearest to the first missing one, and with the rest where that is there too; nothing when none is near.
std::optional<std::filesystem::path> nearest_path(const std::filesystem::path& missing);

// What to do about a path that does not exist: the nearest one that does, or where relative paths start.
std::string missing_path_action(const std::filesystem::path& missing);

// Creates `folder` and those above it, and fsyncs the parent of each that it made. ConfigError when it
// cannot.
void make_folders(const std::filesystem::path& folder);

}  // namespace isograd
