// bin/isograd: prints help, the version, completions and the man page from the file that the program wrote
// when it was built, and becomes the program, libexec/isograd, for anything else. The program needs 0.2 s to
// load LibTorch, which these texts do without.
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "cli/texts.hpp"

namespace {

namespace fs = std::filesystem;

std::string content(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool written(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t count = ::write(descriptor, text.data(), text.size());
    if (count < 0 && errno != EINTR) return false;
    if (count > 0) text.remove_prefix(static_cast<std::size_t>(count));
  }
  return true;
}

// Whether the text for these words is known and was written. The program says why if it could not be written.
bool answered(const std::vector<std::string>& words, const fs::path& texts) {
  const std::string all = content(texts), key = isograd::text_key(words);
  const auto at = all.find(key);
  if (at == std::string::npos) return false;
  const std::string_view text = std::string_view(all).substr(at + key.size());
  return written(STDOUT_FILENO, text.substr(0, text.find('\0')));
}

}  // namespace

int main(int argc, char** argv) {
  std::error_code error;
  const fs::path own = fs::read_symlink("/proc/self/exe", error);
  if (error) {  // without it a relative path would name a program of the working directory
    written(STDERR_FILENO, "isograd: found no /proc/self/exe (" + error.message() +
                               "); expected the path of this program there. Mount /proc.\n");
    return 2;
  }
  const std::string program = (own.parent_path().parent_path() / "libexec/isograd").string();
  if (argc > 1 && answered({argv + 1, argv + argc}, program + ".texts")) return 0;
  ::execv(program.c_str(), argv);
  const std::string why = std::strerror(errno);
  written(STDERR_FILENO, "isograd: found no program in " + program + " (" + why +
                             "); expected the one that is installed together with " + own.string() +
                             ". Install isograd again.\n");
  return 2;
}
