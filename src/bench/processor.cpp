// The processor that a comparison runs on, and which of its instructions each library may use.
#include <ATen/Version.h>
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <tuple>
#include <utility>

#include "base/refuse.hpp"
#include "bench/runner.hpp"
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
  static const std::vector<Level> all = [] {
    std::vector<Level> made;
    for (const auto& [name, torch, one_dnn, mkl] : {std::tuple{"scalar", "default", "SSE41", "SSE4_2"},
                                                    {"avx2", "avx2", "AVX2", "AVX2"},
                                                    {"avx512", "avx512", "AVX512_CORE", "AVX512"}})
      made.push_back({name,
                      {{kOwn, name},
                       {"ATEN_CPU_CAPABILITY", torch},
                       {"ONEDNN_MAX_CPU_ISA", one_dnn},
                       {"MKL_ENABLE_INSTRUCTIONS", mkl}}});
    return made;
  }();
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
    refuse("isograd bench --as",
           level + " on a processor of level " + levels()[static_cast<std::size_t>(best)].name,
           "a level that the processor has", "Choose a lower one");
  for (const auto& [name, value] : found->variables) setenv(name, value, 1);
  std::vector<std::string> copies = arguments;
  copies.insert(copies.begin(), "isograd");
  std::vector<char*> pointers;
  for (std::string& argument : copies) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  execv(bench_self().c_str(), pointers.data());
  refuse("isograd bench --as", fmt::format("cannot start {} again: {}", bench_self(), std::strerror(errno)),
         "a program that can be started", "Set the variables of tests/processors.py by hand");
}

}  // namespace isograd
