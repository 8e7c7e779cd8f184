// Patterns to files, files to documents.
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
  // Nanoseconds; only compared for equality. A program may set `modified`; `changed` is the file system's
  // own.
  std::int64_t modified = 0, changed = 0;
  std::uint64_t inode = 0;
};

// The files that the patterns name, each once, sorted by path. ConfigError: a pattern matches nothing.
std::vector<InputFile> resolve(const std::vector<std::string>& patterns);

// Hands each document of the file to `document`, in order; empty ones are left out. Returns how many were.
std::int64_t for_each_document(const std::filesystem::path& file,
                               const std::function<void(std::string_view)>& document);

}  // namespace isograd
