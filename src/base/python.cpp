#include "base/python.hpp"

#include <cstdlib>
#include <fstream>
#include <string_view>

namespace isograd {
namespace fs = std::filesystem;

fs::path checkout_of(const fs::path& program) {
  if (!program.is_absolute()) return {};  // anybody may create a cache in the working folder
  constexpr std::string_view kHome = "CMAKE_HOME_DIRECTORY:INTERNAL=";
  std::ifstream cache(program.parent_path().parent_path() / "CMakeCache.txt");
  for (std::string line; std::getline(cache, line);)
    if (line.starts_with(kHome)) return line.substr(kHome.size());
  return {};
}

std::string find_python(const std::string& wish) {
  if (!wish.empty()) return wish;
  if (const char* variable = std::getenv("PYTHON"); variable && *variable) return variable;
  std::error_code error;
  const fs::path checkout = checkout_of(fs::read_symlink("/proc/self/exe", error));
  const fs::path python = checkout / ".venv/bin/python";
  if (checkout.is_absolute() && fs::exists(python, error)) return python.string();
  return "python3";
}

}  // namespace isograd
