#include "base/python.hpp"

#include <cstdlib>
#include <filesystem>

namespace isograd {

std::string find_python(const std::string& wish) {
  if (!wish.empty()) return wish;
  if (const char* variable = std::getenv("PYTHON"); variable && *variable) return variable;
  if (std::filesystem::exists(".venv/bin/python")) return ".venv/bin/python";
  return "python3";
}

}  // namespace isograd
