#include "data/corpus.hpp"

#include <fmt/format.h>
#include <glob.h>
#include <sys/stat.h>
#include <utf8.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
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

std::string not_utf8(std::string_view text) {
  const auto bad = utf8::find_invalid(text.begin(), text.end());
  return bad == text.end() ? ""
                           : fmt::format("the byte 0x{:02x} at offset {}, which is not UTF-8",
                                         static_cast<unsigned char>(*bad), bad - text.begin());
}

// The bytes of a file, decompressed if its name ends in .gz or .zst. Memory: a buffer.
class FileBytes {
 public:
  explicit FileBytes(const fs::path& path) : path_(path), zstd_(path.extension() == ".zst") {
    if (zstd_) {
      file_ = std::fopen(path.c_str(), "rb");
      stream_ = ZSTD_createDStream();
      if (stream_ == nullptr) fail("no memory to decompress it");
      ZSTD_DCtx_setParameter(stream_, ZSTD_d_windowLogMax, kWindowLog);
    } else {
      zip_ = gzopen(path.c_str(), "rb");  // reads what is not compressed as it is
    }
    if (file_ == nullptr && zip_ == nullptr) refuse_file("open", path, errno);
    if (zip_ != nullptr) gzbuffer(zip_, kBuffer);
  }
  ~FileBytes() {
    if (zip_ != nullptr) gzclose_r(zip_);
    if (file_ != nullptr) std::fclose(file_);
    ZSTD_freeDStream(stream_);
  }
  FileBytes(const FileBytes&) = delete;
  FileBytes& operator=(const FileBytes&) = delete;

  // Returns 0 at the end. ConfigError: a file that is cut short, damaged, or not of its name's format.
  std::size_t read(char* out, std::size_t most) { return zstd_ ? read_zstd(out, most) : read_zip(out, most); }
  const fs::path& path() const { return path_; }

 private:
  static constexpr unsigned kBuffer = 1 << 17;
  static constexpr int kWindowLog = 27;  // 128 MiB, the most that zstd itself accepts without --long

  [[noreturn]] void fail(const std::string& found) const {
    refuse(path_.string(), found, "a whole file of its name's format",
           "Copy it again, or decompress it to see how much of it is whole");
  }

  std::size_t read_zip(char* out, std::size_t most) {
    const int got = gzread(zip_, out, static_cast<unsigned>(most));
    int code = Z_OK;
    const char* text = gzerror(zip_, &code);
    if (code == Z_ERRNO) refuse_file("read", path_, errno);
    if (code == Z_BUF_ERROR) fail("gzip data that is cut short");
    if (got < 0 || code != Z_OK) fail(fmt::format("damaged gzip data ({})", text));
    if (path_.extension() == ".gz" && gzdirect(zip_) == 1) fail("no gzip data");
    return static_cast<std::size_t>(got);
  }

  std::size_t read_zstd(char* out, std::size_t most) {
    ZSTD_outBuffer to{out, most, 0};
    while (to.pos == 0) {
      if (from_.pos == from_.size) {
        from_ = {buffer_.data(), std::fread(buffer_.data(), 1, buffer_.size(), file_), 0};
        if (std::ferror(file_) != 0) refuse_file("read", path_, errno);
        if (from_.size == 0) {
          if (wanted_ != 0) fail("zstd data that is cut short");
          return 0;
        }
      }
      wanted_ = ZSTD_decompressStream(stream_, &to, &from_);
      if (ZSTD_isError(wanted_) != 0) fail(fmt::format("damaged zstd data ({})", ZSTD_getErrorName(wanted_)));
    }
    return to.pos;
  }

  fs::path path_;
  bool zstd_;
  gzFile zip_ = nullptr;
  std::FILE* file_ = nullptr;
  ZSTD_DStream* stream_ = nullptr;
  std::vector<char> buffer_ = std::vector<char>(zstd_ ? kBuffer : 0);
  ZSTD_inBuffer from_{nullptr, 0, 0};
  std::size_t wanted_ = 1;  // 0: a frame has ended; an empty file is cut short
};

// The lines of a file, one after another. Memory: the longest line.
class Lines {
 public:
  explicit Lines(const fs::path& path) : bytes_(path) {}

  // False: no more. `line` is without its end, and valid until the next call.
  bool next(std::string_view& line) {
    text_.erase(0, taken_);
    taken_ = 0;
    for (std::size_t looked = 0;;) {
      const std::size_t end = text_.find('\n', looked);
      if (end != std::string::npos || (ended_ && !text_.empty())) {
        line = std::string_view(text_).substr(0, end);
        taken_ = std::min(line.size() + 1, text_.size());
        return true;
      }
      if (ended_) return false;
      looked = text_.size();
      if (looked > kMostJsonBytes)
        refuse(bytes_.path().string(), "a line of more than 1 GiB", "a JSON object on each line",
               "Write each document on a line of its own");
      text_.resize(looked + kPiece);
      const std::size_t got = bytes_.read(text_.data() + looked, kPiece);
      text_.resize(looked + got);
      ended_ = got == 0;
    }
  }

 private:
  static constexpr std::size_t kPiece = 1 << 16;
  FileBytes bytes_;
  std::string text_;
  std::size_t taken_ = 0;
  bool ended_ = false;
};

bool has_records(const fs::path& file) {
  const std::string extension = file.extension().string();
  return (extension == ".gz" || extension == ".zst" ? file.stem() : file).extension() == ".jsonl";
}

nlohmann::json record_of(std::string_view line) {
  if (const std::string problem = not_utf8(line); !problem.empty()) throw BadLine{problem, "UTF-8 text"};
  auto [record, problem] = parse_json(line, {.keys_once = false});  // other fields are not isograd's
  if (!problem.empty()) throw BadLine{problem, "a JSON object"};
  return std::move(record);
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

void for_each_document(const fs::path& file, const std::function<void(const Document&)>& visit,
                       const std::function<void(const LinePlace&, const BadLine&)>& bad) {
  if (has_records(file)) {
    Lines lines(file);
    std::string_view line;
    for (LinePlace place{file, 1}; lines.next(line); ++place.line) {
      if (place.line == 1 && line.starts_with("\xEF\xBB\xBF")) line.remove_prefix(3);
      if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
      try {
        const nlohmann::json record = record_of(line);
        visit({.text = {}, .record = &record});
      } catch (const BadLine& problem) {
        bad(place, problem);
      }
    }
    return;
  }
  const MappedFile mapped(file);
  std::string_view text(reinterpret_cast<const char*>(mapped.data()), mapped.size());
  if (const std::string problem = not_utf8(text); !problem.empty())
    refuse(file.string(), problem, "UTF-8 text",
           "Convert the file to UTF-8 or leave it out; a glob such as dir/*.txt chooses files");
  if (text.starts_with("\xEF\xBB\xBF")) text.remove_prefix(3);
  visit({.text = text, .record = nullptr});
}

}  // namespace isograd
