#include "bench/processor.hpp"

#include <ATen/Version.h>
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <utility>

#include "bench/rounds.hpp"
#include "isograd/error.hpp"
#include "kernels/versions.hpp"

namespace isograd {
namespace {

constexpr const char* kOwn = "ISOGRAD_PROCESSOR";

// tests/processors.py holds the tests to the same.
struct Level {
  const char* name;
  std::vector<std::pair<const char*, const char*>> variables;
};
const std::vector<Level>& levels() {
  static const std::vector<Level> all = {{"scalar",
                                          {{kOwn, "scalar"},
                                           {"ATEN_CPU_CAPABILITY", "default"},
                                           {"ONEDNN_MAX_CPU_ISA", "SSE41"},
                                           {"MKL_ENABLE_INSTRUCTIONS", "SSE4_2"}}},
                                         {"avx2",
                                          {{kOwn, "avx2"},
                                           {"ATEN_CPU_CAPABILITY", "avx2"},
                                           {"ONEDNN_MAX_CPU_ISA", "AVX2"},
                                           {"MKL_ENABLE_INSTRUCTIONS", "AVX2"}}},
                                         {"avx512",
                                          {{kOwn, "avx512"},
                                           {"ATEN_CPU_CAPABILITY", "avx512"},
                                           {"ONEDNN_MAX_CPU_ISA", "AVX512_CORE"},
                                           {"MKL_ENABLE_INSTRUCTIONS", "AVX512"}}}};
  return all;
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string name_of_processor() {
  std::ifstream information("/proc/cpuinfo");
  for (std::string line; std::getline(information, line);)
    if (line.starts_with("model name"))
      if (const auto at = line.find(": "); at != std::string::npos) return line.substr(at + 2);
  return "unknown";
}

int cores_of_process() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
}

}  // namespace

std::string processor_text() {
  const auto held = [](const char* library, const char* by) {
    const std::string to = variable(by);
    return to.empty() ? "" : fmt::format(", {} {}", library, to);
  };
  return fmt::format("{}, {} cores; kernels: isograd {}, LibTorch {}{}{}", name_of_processor(),
                     cores_of_process(), levels()[static_cast<std::size_t>(kernels::processor_level())].name,
                     at::get_cpu_capability(), held("oneDNN", "ONEDNN_MAX_CPU_ISA"),
                     held("MKL", "MKL_ENABLE_INSTRUCTIONS"));
}

std::vector<std::string> processor_levels() {
  std::vector<std::string> names;
  for (const Level& level : levels()) names.emplace_back(level.name);
  return names;
}

void run_as(const std::string& level, const std::vector<std::string>& arguments) {
  const auto found = std::find_if(levels().begin(), levels().end(),
                                  [&](const Level& candidate) { return candidate.name == level; });
  ISOGRAD_INVARIANT(found != levels().end(), level);
  const auto is_set = [](const auto& pair) { return variable(pair.first) == pair.second; };
  if (std::all_of(found->variables.begin(), found->variables.end(), is_set)) return;
  unsetenv(kOwn);
  if (const int best = kernels::processor_level(); found - levels().begin() > best)
    throw ConfigError(
        {.where = "isograd bench --as",
         .found = level + " on a processor of level " + levels()[static_cast<std::size_t>(best)].name,
         .expected = "a level that the processor has",
         .action = "Choose a lower one"});
  for (const auto& [name, value] : found->variables) setenv(name, value, 1);
  std::vector<std::string> copies = arguments;
  copies.insert(copies.begin(), "isograd");
  std::vector<char*> pointers;
  for (std::string& argument : copies) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  execv(bench_self().c_str(), pointers.data());
  throw ConfigError({.where = "isograd bench --as",
                     .found = fmt::format("cannot start {} again: {}", bench_self(), std::strerror(errno)),
                     .expected = "a program that can be started",
                     .action = "Set the variables of tests/processors.py by hand"});
}

}  // namespace isograd
