#include "kernels/versions.hpp"

#include <cstdlib>
#include <fstream>
#include <iterator>

#include "base/refuse.hpp"

namespace isograd::kernels {
namespace {

constexpr const char* kVariable = "ISOGRAD_PROCESSOR";
constexpr const char* kLevels[] = {"scalar", "avx2", "avx512"};

int level_of_processor() {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                 __builtin_cpu_supports("avx512cd")
             ? 2
             : 1;
#else
  return 0;
#endif
}

int chosen_level() {
  const int best = level_of_processor();
  const char* variable = std::getenv(kVariable);
  if (!variable || !*variable) return best;
  for (int level = 0; level < static_cast<int>(std::size(kLevels)); ++level) {
    if (std::string(variable) != kLevels[level]) continue;
    if (level <= best) return level;
    refuse(kVariable, std::string(variable) + " on a processor of level " + kLevels[best],
           "a level that the processor has", "Unset the variable, or lower it");
  }
  refuse(kVariable, variable, "scalar, avx2 or avx512", "Unset the variable, or correct it");
}

}  // namespace

int& processor_level() {
  static int level = chosen_level();
  return level;
}

std::string processor_name() {
  std::ifstream information("/proc/cpuinfo");
  for (std::string line; std::getline(information, line);)
    if (line.starts_with("model name"))
      if (const auto at = line.find(": "); at != std::string::npos) return line.substr(at + 2);
  return "unknown";
}

}  // namespace isograd::kernels
