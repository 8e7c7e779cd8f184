// On what a comparison ran: the processor, and which of its instructions each library may use.
#pragma once

#include <string>
#include <vector>

namespace isograd {

struct Processor {
  std::string name;   // as the system calls it
  int cores = 0;      // that this process may run on
  std::string level;  // of isograd's own kernels: "scalar", "avx2" or "avx512"
  // Of LibTorch's kernels ("AVX2", "AVX512", ...) and what variables hold oneDNN and MKL to ("" : nothing).
  std::string torch, onednn, mkl;

  std::string text() const;  // one line for people
};
const Processor& this_processor();

// "avx2" and "scalar" hold isograd, LibTorch, oneDNN and MKL, and so every side of a comparison, to
// processors that have no more: sets their variables and starts this program again with `arguments` (without
// its name), unless they are set. ConfigError for a level that the processor lacks.
void run_as(const std::string& level, const std::vector<std::string>& arguments);
std::vector<std::string> processor_levels();

}  // namespace isograd
