// Converts tensors and c10d's reductions to MPI's types.
#pragma once

#include <ATen/core/Tensor.h>
#include <mpi.h>

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace isograd::mpi {

// For copies only the width of the numbers matters.
MPI_Datatype copied_type(const at::Tensor& tensor, const std::string& where);

// A valid pointer for MPI, even for an empty tensor.
void* data_of(const at::Tensor& tensor);

void* at_element(const at::Tensor& tensor, std::int64_t element);

// MPI forbids that buffers of one call overlap.
bool overlap(const at::Tensor& a, const at::Tensor& b);

// Lists of tensors as one flat tensor: their sizes, their contents, an empty tensor of that size, and the way
// back.
std::vector<std::int64_t> sizes_of(const std::vector<at::Tensor>& tensors);
at::Tensor joined(const std::vector<at::Tensor>& tensors);
at::Tensor place_for(const std::vector<at::Tensor>& tensors);
void distribute(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);

// The tensor to combine: the tensor itself, or a copy for 16-bit numbers (combined in float32, rounded once)
// and for numbers that are multiplied first.
struct Operand {
  at::Tensor tensor;
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op operation = MPI_OP_NULL;
  bool mean = false;
};

// ConfigError where MPI or the reduction does not support the type.
Operand operand(const at::Tensor& tensor, const c10d::ReduceOp& op, const std::string& where);

// Writes the combined numbers to `result`. `combined` may be `result` itself.
void deliver(const Operand& form, const at::Tensor& combined, const at::Tensor& result, int size);

}  // namespace isograd::mpi
