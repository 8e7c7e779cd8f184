// Passes over what a rank owns of a bucket's gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "isograd/parameters.hpp"

namespace isograd {

// Places in what the bucket holds: of the elements that this rank counts, and of those among them that belong
// to one parameter (possibly none).
Range owned_part(const Bucket& bucket);
Range owned_part(const Bucket& bucket, const Slot& slot);

// Σ x² in fp64 and max |x|, of an fp32, fp64 or bf16 tensor. The bits do not depend on the number of threads.
double squared_norm(const at::Tensor& flat, Range range);
double max_abs(const at::Tensor& flat, Range range);

// The same by LibTorch's operators, for devices other than the CPU, in LibTorch's order of summation.
namespace by_libtorch {
double squared_norm(const at::Tensor& flat, Range range);
// Sum of squares of all parts, which are on one device: one fp64 number there; undefined if all are empty.
at::Tensor squares_of(const std::vector<at::Tensor>& parts);
double max_abs(const at::Tensor& flat, Range range);
}  // namespace by_libtorch

}  // namespace isograd
