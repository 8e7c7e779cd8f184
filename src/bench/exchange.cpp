#include "bench/exchange.hpp"

#include <stdlib.h>

#include <algorithm>
#include <cstdlib>

#include "isograd/error.hpp"

namespace isograd {

namespace fs = std::filesystem;

ExchangeFolder::ExchangeFolder() {
  std::string name = (fs::temp_directory_path() / "isograd-bench-XXXXXX").string();
  if (!mkdtemp(name.data()))
    throw ConfigError({.where = "isograd bench",
                       .found = "cannot make a folder in " + fs::temp_directory_path().string(),
                       .expected = "a temporary folder that can be written",
                       .action = "Set TMPDIR"});
  path_ = name;
}

ExchangeFolder::~ExchangeFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

fs::path find_peer(const std::string& script) {
  const char* elsewhere = std::getenv("ISOGRAD_PEERS");  // of a program that was built on another machine
  const fs::path path = fs::path(elsewhere ? elsewhere : ISOGRAD_PEERS) / script;
  if (!fs::exists(path))
    throw ConfigError(
        {.where = "isograd bench",
         .found = "no " + path.string(),
         .expected = "the peer's script",
         .action = "Run a build whose source tree is still there, or name its bench/peers in ISOGRAD_PEERS"});
  return path;
}

fs::path find_module() {
  const fs::path folder = fs::read_symlink("/proc/self/exe").parent_path().parent_path() / "python";
  if (!fs::exists(folder / "isograd_comm.so"))
    throw ConfigError({.where = "isograd bench",
                       .found = "no isograd_comm.so in " + folder.string(),
                       .expected = "the Python module, which carries isograd into the peer's processes",
                       .action = "Install Python's headers (python3-dev) and build again"});
  return folder;
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const double place = q * static_cast<double>(values.size() - 1);
  const auto low = static_cast<std::size_t>(place);
  const auto high = std::min(low + 1, values.size() - 1);
  return values[low] + (place - static_cast<double>(low)) * (values[high] - values[low]);
}

}  // namespace isograd
