#include "fuzz/readers.hpp"

#include <ATen/ATen.h>
#include <xxhash.h>

#include <csignal>
#include <fstream>
#include <stdexcept>

#include "base/files.hpp"
#include "isograd/error.hpp"

namespace isograd::fuzz {

namespace fs = std::filesystem;

void put(const fs::path& file, const std::string& bytes) {
  fs::create_directories(file.parent_path());
  std::ofstream(file, std::ios::binary) << bytes;
}

std::uint64_t look_at(const at::Tensor& tensor) {
  const at::Tensor whole = tensor.contiguous();
  return XXH3_64bits(whole.const_data_ptr(), whole.nbytes());
}

const std::vector<std::string> kJson = {
    "{",    "}",  "[",     "]",           "{\"a\":", "[[",           "\"", ",",  ":",
    "null", "-1", "1e999", "\"\\ud800\"", "\\u0000", "\xEF\xBB\xBF", "{}", "[]", "18446744073709551616"};

std::vector<std::string> lines_of(const fs::path& file, std::size_t most) {
  std::vector<std::string> lines;
  const std::string text = read_file(file);
  for (std::size_t begin = 0; begin < text.size() && lines.size() < most;) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

std::vector<std::string> with(std::vector<std::string> words, std::initializer_list<const char*> more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

namespace {

// Failures that the program must find: a crash, a loop, memory without bound, an error that nobody foresaw.
void read_wrongly(const fs::path& file) {
  const std::string text = read_file(file);
  const int what = static_cast<int>(XXH3_64bits(text.data(), text.size()) % 16);
  if (what == 1) std::raise(SIGSEGV);
  for (volatile bool forever = true; what == 2 && forever;) {
  }
  std::vector<std::string> memory;
  while (what == 3) memory.emplace_back(std::size_t{1} << 20, 'x');
  if (what == 4) throw std::logic_error("nobody foresaw this");
  if (what == 5)
    throw ConfigError({.where = "a file", .found = "this", .expected = "that", .action = "None"});
}

}  // namespace

const std::vector<Reader>& readers() {
  static const std::vector<Reader> all = [] {
    std::vector<Reader> result;
    for (const auto& some :
         {model_readers(), run_readers(), data_readers(), wire_readers(), server_readers()}) {
      result.insert(result.end(), some.begin(), some.end());
    }
    result.push_back({.name = "planted",
                      .prepare = [](const fs::path& folder) { put(folder / "file", "0123456789"); },
                      .read = read_wrongly,
                      .planted = true});
    return result;
  }();
  return all;
}

}  // namespace isograd::fuzz
