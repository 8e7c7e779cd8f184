// Compiled kernels, kept for the next process.
#pragma once

#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <string>
#include <system_error>

#include "base/files.hpp"

namespace isograd::gpu {

// Where programs of this user keep what can be made anew; empty: nowhere.
inline fs::path kept_in() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache && *cache == '/')
    return fs::path(cache) / "isograd/kernels";
  if (const char* home = std::getenv("HOME"); home && *home == '/')
    return fs::path(home) / ".cache/isograd/kernels";
  return {};
}

// The result of `make` for `key`, read from `folder` where some process has kept it. A file there that is not
// whole is made anew. Several processes may come at once: each writes a file of its own and renames it. Where
// nothing can be written it is made each time.
inline std::string kept(const fs::path& folder, const std::string& key,
                        const std::function<std::string()>& make) {
  if (folder.empty()) return make();
  constexpr std::size_t kDigits = 16;  // of the checksum in front
  const fs::path path = folder / checksum(key.data(), key.size());
  std::error_code none;
  if (fs::is_regular_file(path, none)) try {
      const std::string found = read_file(path);
      if (found.size() > kDigits &&
          found.compare(0, kDigits, checksum(found.data() + kDigits, found.size() - kDigits)) == 0)
        return found.substr(kDigits);
    } catch (const std::exception&) {  // as if it were not there
    }
  const std::string made = make();
  try {
    fs::create_directories(folder);
    write_file(path, checksum(made.data(), made.size()) + made);
  } catch (const std::exception&) {
  }
  return made;
}

}  // namespace isograd::gpu
