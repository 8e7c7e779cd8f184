#include "bench/exchange.hpp"

#include <fmt/ranges.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "base/shell.hpp"
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

void require_packages(const std::string& bench, const std::string& wish,
                      const std::vector<std::string>& packages) {
  const std::string python = find_python(wish);
  // Nothing is imported, and nothing of the working folder, which `python -c` puts first, is found.
  std::string script =
      "import importlib.util, sys\nsys.path[:] = [p for p in sys.path if p]\nprint('isograd', *(n for n in (";
  for (const std::string& package : packages) script += "'" + package + "', ";
  script += ") if not importlib.util.find_spec(n)))";
  std::string answer;
  if (std::FILE* process =
          popen((shell_words({python, "-W", "ignore", "-c", script}) + " 2>/dev/null").c_str(), "re")) {
    char buffer[4096];
    for (std::size_t size; (size = std::fread(buffer, 1, sizeof buffer, process)) > 0;)
      answer.append(buffer, size);
    if (pclose(process) != 0) answer.clear();
  }
  const std::string where = "isograd bench " + bench;
  const std::string needed =
      fmt::format("a Python that has {}, which the peer needs", fmt::join(packages, " and "));
  std::istringstream words(answer);
  std::string word;
  if (!(words >> word) || word != "isograd")
    throw ConfigError({.where = where,
                       .found = fmt::format("{}, which does not run as a Python", python),
                       .expected = needed,
                       .action = "Name one with --python or in the variable PYTHON"});
  std::vector<std::string> missing;
  while (words >> word) missing.push_back(word);
  if (missing.empty()) return;
  std::vector<std::string> install = {python, "-m", "pip", "install"};
  for (const std::string& name : missing)
    install.push_back(name == "torch"               ? "torch==2.13.0"
                      : name == "imbalanced_losses" ? "imbalanced-losses==0.6.0"
                                                    : name);
  throw ConfigError(
      {.where = where,
       .found = fmt::format("{} without {}", python, fmt::join(missing, " and ")),
       .expected = needed,
       .action = fmt::format("Run `{}`, or name another Python with --python", shell_words(install))});
}

fs::path find_module() {
  const fs::path folder = fs::read_symlink("/proc/self/exe").parent_path().parent_path() / "python";
  if (!fs::exists(folder / "isograd_comm.so"))
    throw ConfigError(
        {.where = "isograd bench",
         .found = "no isograd_comm.so in " + folder.string(),
         .expected = "the Python module, which carries isograd into the peer's processes",
         .action = "Run ./dev build isograd_python_comm; it needs Python's headers (python3-dev)"});
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
