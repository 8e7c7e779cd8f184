#pragma once

#include <string>
#include <vector>

namespace isograd {

// LibTorch computes cos, exp, sqrt and other functions of dense tensors on a CPU with MKL, which chooses a
// function's code in its first call. If several threads make that call at once, one of them may be given code
// for AVX2 that has half of the digits, 1e-8 in fp64 (oneMKL 2024.2 on Intel processors,
// https://github.com/pytorch/pytorch/issues/188792): a wrong table of positions, for the whole life of a
// model. So this makes all first calls in one thread, once in a process; it takes about a millisecond.
// Everything that starts ranks calls it before there are several threads.
void make_first_calls();

// The functions concerned, by their names in ATen/cpu/vml.h.
std::vector<std::string> functions_of_first_calls();

}  // namespace isograd
