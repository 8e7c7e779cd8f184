// The readers of files from outside, each with sound files to begin from.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace isograd::fuzz {

struct Reader {
  std::string name;
  // Writes sound files into an empty folder; each of them is changed in turn, beside the others.
  std::function<void(const std::filesystem::path& folder)> prepare;
  // Reads `file`, or the folder that it lies in, and looks at all of what was read. What is wrong with it
  // must come as a ConfigError.
  std::function<void(const std::filesystem::path& file)> read;
  std::vector<std::string> words{};  // what the format is made of
  // Makes a changed file's own length or checksum right again, so that changes behind it are seen.
  std::function<std::string(std::string)> mend{};
  bool planted = false;                    // does wrong on purpose; only by name
  std::function<std::string()> missing{};  // what this machine lacks to read such files; empty: nothing
};

const std::vector<Reader>& readers();

}  // namespace isograd::fuzz
