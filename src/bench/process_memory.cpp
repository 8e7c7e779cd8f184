#include "bench/process_memory.hpp"

#include <fstream>

#include "isograd/error.hpp"

namespace isograd {

double status_bytes(const std::string& benchmark, const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(name + ":")) return 1024 * std::stod(line.substr(name.size() + 1));
  throw ConfigError({.where = benchmark,
                     .found = "no " + name + " in /proc/self/status",
                     .expected = "Linux's account of a process's memory",
                     .action = "Run it on Linux"});
}

}  // namespace isograd
