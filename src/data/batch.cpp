#include "isograd/batch.hpp"

namespace isograd {

std::int64_t Batch::num_targets() const {
  if (!targets.defined() || targets.numel() == 0) return 0;
  return targets.ne(kIgnoreIndex).sum().item<std::int64_t>();
}

}  // namespace isograd
