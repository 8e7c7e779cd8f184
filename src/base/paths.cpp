#include "base/paths.hpp"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <system_error>

#include "base/files.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before, above(b.size() + 1), row(b.size() + 1);
  std::iota(above.begin(), above.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before = above;
    std::swap(above, row);
  }
  return above[b.size()];
}

std::size_t near_enough(std::string_view text) { return std::max<std::size_t>(2, text.size() / 3); }

std::optional<fs::path> nearest_path(const fs::path& missing) {
  constexpr int kMostEntries = 10000;        // of a folder: this is help, not a search
  constexpr std::size_t kLongestName = 255;  // of most file systems
  fs::path folder;
  for (auto part = missing.begin(); part != missing.end(); ++part) {
    std::error_code error;
    if (fs::exists(folder / *part, error)) {
      folder /= *part;
      continue;
    }
    const std::string name = part->string();
    if (name.empty() || name.size() > kLongestName) return std::nullopt;
    std::optional<std::string> best;
    std::size_t least = near_enough(name) + 1;
    int seen = 0;
    for (fs::directory_iterator entry(folder.empty() ? "." : folder, error), end;
         !error && entry != end && seen < kMostEntries; entry.increment(error), ++seen) {
      const std::string candidate = entry->path().filename().string();
      const std::size_t distance = edit_distance(candidate, name);
      if (distance < least || (distance == least && best && candidate < *best)) {
        least = distance;
        best = candidate;
      }
    }
    if (!best) return std::nullopt;
    fs::path found = folder / *best;
    for (++part; part != missing.end(); ++part) found /= *part;  // the rest, if it exists there too
    return fs::exists(found, error) ? found : folder / *best;
  }
  return std::nullopt;
}

std::string missing_path_action(const fs::path& missing) {
  if (const auto near = nearest_path(missing)) return "Did you mean " + near->string() + "? Correct the path";
  std::error_code error;
  if (missing.is_absolute()) return "Correct the path";
  return "Correct the path; relative ones start at " + fs::current_path(error).string();
}

void make_folders(const fs::path& folder) {
  std::error_code problem;
  std::vector<fs::path> missing;
  for (auto path = folder; !path.empty() && !fs::exists(path, problem); path = path.parent_path())
    if (path.has_filename()) missing.push_back(path);
  fs::create_directories(folder, problem);
  if (!problem && !fs::is_directory(folder, problem))
    problem = std::make_error_code(std::errc::not_a_directory);
  if (problem)
    refuse(folder.string(), "that the system refuses it: " + problem.message(),
           "a folder that can be created", "Choose another folder, or look at its permissions and its disk");
  for (const auto& made : missing) fsync_directory(made.parent_path());
}

TemporaryFolder::TemporaryFolder() {
  std::string name = (fs::temp_directory_path() / "isograd-XXXXXX").string();
  if (!mkdtemp(name.data()))
    refuse(name, "no room, or no permission, to make this folder", "both", "Set TMPDIR");
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

}  // namespace isograd
