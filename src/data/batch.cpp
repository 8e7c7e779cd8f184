#include "isograd/batch.hpp"

#include <ATen/ops/empty.h>

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

Batch empty_batch() {
  Batch batch;
  batch.tokens = at::empty({0}, at::kLong);
  batch.targets = at::empty({0}, at::kLong);
  batch.positions = at::empty({0}, at::kLong);
  return batch;
}

}  // namespace isograd
