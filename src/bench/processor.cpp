// The processor that a comparison runs on, and which of its instructions each library may use.
#include <ATen/Version.h>
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/refuse.hpp"
#include "bench/runner.hpp"
#include "isograd/error.hpp"
#include "kernels/versions.hpp"

namespace isograd {
namespace {

// The variables that hold isograd, LibTorch, oneDNN and MKL to a level. tests/processors.py holds the tests
// to the same.
constexpr const char* kVariables[] = {"ISOGRAD_PROCESSOR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA",
                                      "MKL_ENABLE_INSTRUCTIONS"};
constexpr const char* kLevels[][4] = {{"scalar", "default", "SSE41", "SSE4_2"},
                                      {"avx2", "avx2", "AVX2", "AVX2"},
                                      {"avx512", "avx512", "AVX512_CORE", "AVX512"}};

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

}  // namespace

std::string processor_text() {
  const auto held = [](const char* library, const char* by) {
    const std::string to = variable(by);
    return to.empty() ? "" : fmt::format(", {} {}", library, to);
  };
  cpu_set_t cores;
  return fmt::format("{}, {} cores; kernels: isograd {}, LibTorch {}{}{}", kernels::processor_name(),
                     sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 0,
                     kLevels[kernels::processor_level()][0], at::get_cpu_capability(),
                     held("oneDNN", kVariables[2]), held("MKL", kVariables[3]));
}

std::vector<std::string> processor_levels() {
  std::vector<std::string> names;
  for (const auto& level : kLevels) names.emplace_back(level[0]);
  return names;
}

void run_as(const std::string& level, const std::vector<std::string>& arguments) {
  const auto* found =
      std::ranges::find(kLevels, level, [](const auto& each) { return std::string(each[0]); });
  ISOGRAD_INVARIANT(found != std::end(kLevels), level);
  bool set = true;
  for (std::size_t i = 0; i < std::size(kVariables); ++i) set = set && variable(kVariables[i]) == (*found)[i];
  if (set) return;
  unsetenv(kVariables[0]);
  if (const int best = kernels::processor_level(); found - kLevels > best)
    refuse("isograd bench --as", level + " on a processor of level " + kLevels[best][0],
           "a level that the processor has", "Choose a lower one");
  for (std::size_t i = 0; i < std::size(kVariables); ++i) setenv(kVariables[i], (*found)[i], 1);
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
