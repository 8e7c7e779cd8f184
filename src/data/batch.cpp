#include "isograd/batch.hpp"

#include <ATen/ops/empty.h>

namespace isograd {

std::int64_t Batch::num_targets() const {
  if (!targets.defined() || targets.numel() == 0) return 0;
  return targets.ne(kIgnoreIndex).sum().item<std::int64_t>();
}

Batch empty_batch() {
  Batch batch;
  batch.tokens = at::empty({0}, at::kLong);
  batch.targets = at::empty({0}, at::kLong);
  batch.positions = at::empty({0}, at::kLong);
  return batch;
}

}  // namespace isograd
