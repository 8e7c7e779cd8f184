// Expands patterns to files, and files to documents.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string_view>
#include <vector>

#include "isograd/data.hpp"

namespace isograd {

struct InputFile {
  std::filesystem::path path;  // canonical
  std::uint64_t bytes = 0;
  // Nanoseconds, compared only for equality. A program may set `modified`; only the file system sets
  // `changed`.
  std::int64_t modified = 0, changed = 0;
  std::uint64_t inode = 0;
  bool operator==(const InputFile&) const = default;
};

// The files that match the patterns, each once, sorted by path. ConfigError: a pattern matches nothing.
std::vector<InputFile> resolve(const std::vector<std::string>& patterns);

// Passes each non-empty document of the file to `document`, in order. Returns their number.
std::int64_t for_each_document(const std::filesystem::path& file,
                               const std::function<void(std::string_view)>& document);

// The shards that pack_corpus() finished in `directory`, whatever its text is by now; none: nothing was
// packed, or a shard is missing.
std::vector<std::filesystem::path> packed_shards(const std::filesystem::path& directory);

}  // namespace isograd
