// On what a comparison ran: the processor, and which of its instructions each library may use.
#pragma once

#include <string>
#include <vector>

namespace isograd {

// One line: its name as the system has it, the cores that this process may run on, the level of isograd's and
// of LibTorch's kernels, and what variables hold oneDNN and MKL to.
std::string processor_text();

// "avx2" and "scalar" hold isograd, LibTorch, oneDNN and MKL, and so every side of a comparison, to
// processors that have no more: sets their variables and starts this program again with `arguments` (without
// its name), unless they are set. `level` is one of processor_levels(). ConfigError: the processor lacks it.
void run_as(const std::string& level, const std::vector<std::string>& arguments);
std::vector<std::string> processor_levels();

}  // namespace isograd
