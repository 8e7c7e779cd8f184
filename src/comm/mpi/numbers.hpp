// How tensors and c10d's reductions look to MPI.
#pragma once

#include <ATen/core/Tensor.h>
#include <mpi.h>

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

namespace isograd::mpi {

// For copies, whatever the numbers mean: only their width counts.
MPI_Datatype copied_type(const at::Tensor& tensor, const std::string& where);

// A buffer that may be handed to MPI even where nothing is in it.
void* data_of(const at::Tensor& tensor);

void* at_element(const at::Tensor& tensor, std::int64_t element);

// MPI forbids that buffers of one call overlap.
bool overlap(const at::Tensor& a, const at::Tensor& b);

// Lists of tensors as one flat tensor: how long each is, their contents, room for them, and back.
std::vector<std::int64_t> sizes_of(const std::vector<at::Tensor>& tensors);
at::Tensor joined(const std::vector<at::Tensor>& tensors);
at::Tensor place_for(const std::vector<at::Tensor>& tensors);
void distribute(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);

// What is combined in place of a tensor: the tensor itself, or a copy where numbers have 16 bits (combined in
// float32, rounded once) or are multiplied beforehand.
struct Operand {
  at::Tensor tensor;
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op operation = MPI_OP_NULL;
  bool mean = false;
};

// ConfigError where MPI or the reduction does not know the type.
Operand operand(const at::Tensor& tensor, const c10d::ReduceOp& op, const std::string& where);

// Puts the combined numbers where they are wanted; `combined` may be `result` itself.
void deliver(const Operand& form, const at::Tensor& combined, const at::Tensor& result, int size);

}  // namespace isograd::mpi
