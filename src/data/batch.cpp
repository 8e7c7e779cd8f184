#include "isograd/batch.hpp"

#include <ATen/ATen.h>

#include "data/move.hpp"

namespace isograd {

std::int64_t Batch::num_targets() const {
  if (!targets.defined() || targets.numel() == 0) return 0;
  return targets.ne(kIgnoreIndex).sum().item<std::int64_t>();
}

std::int64_t ContextCut::document_length(std::int64_t document) const {
  const auto fragments = static_cast<std::int64_t>(cu_seqlens.size()) - 1;
  if (document < fragments)
    return cu_seqlens[static_cast<std::size_t>(document) + 1] -
           cu_seqlens[static_cast<std::size_t>(document)];
  std::int64_t length = 0;
  for (const Piece& piece : pieces[static_cast<std::size_t>(document - fragments)])
    if (piece.document == document) length += piece.length;
  return length;
}

std::int64_t ContextCut::tokens_of(int of_rank) const {
  std::int64_t length = 0;
  for (const Piece& piece : pieces[static_cast<std::size_t>(of_rank)]) length += piece.length;
  return length;
}

at::Tensor moved(const at::Tensor& tensor, at::Device device) {
  if (tensor.device() == device) return tensor;
  // Pinned memory goes back to its pool when the copy has been made, not before: LibTorch sees to that.
  const bool pinned = device.is_cuda() && tensor.is_cpu();
  return (pinned ? tensor.pin_memory() : tensor).to(device, /*non_blocking=*/pinned);
}

Batch to_device(const Batch& batch, at::Device device) {
  Batch moved = batch;
  for (at::Tensor* tensor : {&moved.tokens, &moved.targets, &moved.positions, &moved.weights,
                             &moved.given_weights, &moved.sample_weights}) {
    if (tensor->defined()) *tensor = isograd::moved(*tensor, device);
  }
  return moved;
}

Batch empty_batch() {
  Batch batch;
  batch.tokens = at::empty({0}, at::kLong);
  batch.targets = at::empty({0}, at::kLong);
  batch.positions = at::empty({0}, at::kLong);
  return batch;
}

}  // namespace isograd
