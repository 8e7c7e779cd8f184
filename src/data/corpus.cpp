#include "data/corpus.hpp"

#include <fmt/format.h>
#include <glob.h>
#include <sys/stat.h>
#include <utf8.h>

#include <algorithm>
#include <set>

#include "base/files.hpp"
#include "base/json.hpp"
#include "base/paths.hpp"
#include "base/refuse.hpp"

namespace isograd {
namespace {

[[noreturn]] void no_text(const std::string& pattern, const std::string& found) {
  refuse("data pattern " + pattern, found, "at least one file",
         pattern.find_first_of("*?[") == std::string::npos && !fs::exists(pattern)
             ? missing_path_action(pattern)
             : "Correct the pattern: a file, a directory or a glob such as dir/*.txt");
}

// All regular files below, through links too, each folder once: links may form a loop. Dangling links and
// names that start with a dot are skipped.
void add_directory(const fs::path& directory, std::set<fs::path>& files) {
  std::set<fs::path> seen{fs::canonical(directory)};
  std::vector<fs::path> open{*seen.begin()};
  while (!open.empty()) {
    const fs::path folder = open.back();
    open.pop_back();
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().filename().native().front() == '.' || !fs::exists(entry.path())) continue;
      const fs::path path = fs::canonical(entry.path());
      if (fs::is_regular_file(path)) files.insert(path);
      if (fs::is_directory(path) && seen.insert(path).second) open.push_back(path);
    }
  }
}

void add_path(const fs::path& path, std::set<fs::path>& files) {
  if (fs::is_directory(path))
    add_directory(path, files);
  else if (fs::is_regular_file(path))
    files.insert(fs::canonical(path));
}

std::set<fs::path> files_of(const std::string& pattern) {
  std::set<fs::path> files;
  if (pattern.empty()) no_text(pattern, "an empty pattern");
  if (fs::exists(pattern)) {  // checked before globbing, so that a name with brackets means itself
    add_path(pattern, files);
    if (files.empty()) no_text(pattern, fs::is_directory(pattern) ? "no file in it" : "not a regular file");
    return files;
  }
  glob_t matches{};
  const int result = glob(pattern.c_str(), GLOB_NOSORT, nullptr, &matches);
  try {
    for (std::size_t i = 0; i < matches.gl_pathc; ++i) add_path(matches.gl_pathv[i], files);
  } catch (...) {
    globfree(&matches);
    throw;
  }
  globfree(&matches);
  if (result != 0 && result != GLOB_NOMATCH) no_text(pattern, "a folder that cannot be read");
  if (files.empty()) no_text(pattern, "nothing of that name");
  return files;
}

void check_utf8(std::string_view text, const fs::path& file) {
  const auto bad = utf8::find_invalid(text.begin(), text.end());
  if (bad == text.end()) return;
  refuse(file.string(),
         fmt::format("the byte 0x{:02x} at offset {}, which is not UTF-8", static_cast<unsigned char>(*bad),
                     bad - text.begin()),
         "UTF-8 text", "Convert the file to UTF-8 or leave it out; a glob such as dir/*.txt chooses files");
}

std::int64_t for_each_line(std::string_view text, const fs::path& file,
                           const std::function<void(std::string_view)>& document) {
  std::int64_t empty = 0;
  for (std::int64_t line = 1; !text.empty(); ++line) {
    const std::string_view record = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), record.size() + 1));
    if (record.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    auto fail = [&](const std::string& found) {
      refuse(fmt::format("{}:{}", file.string(), line), found, "a JSON object with a string field \"text\"",
             "Correct or remove the line");
    };
    const auto [value, problem] = parse_json(record, {.keys_once = false});  // other fields are not isograd's
    if (!problem.empty()) fail(problem);
    const auto field = value.find("text");
    if (field == value.end()) fail("no field \"text\"");
    if (!field->is_string()) fail(std::string("a field \"text\" of type ") + field->type_name());
    const auto& content = field->get_ref<const std::string&>();
    if (content.empty())
      ++empty;
    else
      document(content);
  }
  return empty;
}

}  // namespace

std::vector<InputFile> resolve(const std::vector<std::string>& patterns) {
  std::set<fs::path> paths;
  try {
    for (const auto& pattern : patterns) paths.merge(files_of(pattern));
  } catch (const fs::filesystem_error& error) {
    no_text(error.path1().string(), error.code().message());
  }
  std::vector<InputFile> files;
  files.reserve(paths.size());
  for (const auto& path : paths) {
    struct stat status {};
    if (stat(path.c_str(), &status) != 0) no_text(path.string(), "a file that cannot be read");
    const auto nanoseconds = [](const timespec& time) { return time.tv_sec * 1'000'000'000 + time.tv_nsec; };
    files.push_back({path, static_cast<std::uint64_t>(status.st_size), nanoseconds(status.st_mtim),
                     nanoseconds(status.st_ctim), static_cast<std::uint64_t>(status.st_ino)});
  }
  return files;
}

std::int64_t for_each_document(const fs::path& file, const std::function<void(std::string_view)>& document) {
  const MappedFile mapped(file);
  std::string_view text(reinterpret_cast<const char*>(mapped.data()), mapped.size());
  check_utf8(text, file);
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  if (file.extension() == ".jsonl") return for_each_line(text, file, document);
  if (text.empty()) return 1;
  document(text);
  return 0;
}

}  // namespace isograd
