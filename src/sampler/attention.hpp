// Attention of a pass's rows to each sequence's own keys and values, which lie in pages.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "isograd/model.hpp"
#include "sampler/cache.hpp"

namespace isograd {

// Rows [row, row + count) of a pass: positions [begin, begin + count) of a sequence. Its pages reach to the
// last.
struct PagedPiece {
  std::int64_t row = 0, begin = 0, count = 0;
  const std::vector<Page*>* pages = nullptr;
};

class PagedAttention {
 public:
  PagedAttention(std::int64_t page, const DecoderConfig& config, const ModelHooks& hooks);
  // Writes k and v [T, Hkv, D] to the pages; then q [T, H, D] attends to what the pages hold up to each row.
  // On the CPU by kernels::attend_pages, else, or with `by_products`, on the pages put together.
  at::Tensor attend(const std::vector<PagedPiece>& pieces, std::int64_t layer, const at::Tensor& q,
                    const at::Tensor& k, const at::Tensor& v, bool by_products = false) const;

 private:
  const std::int64_t page_;
  std::int64_t layers_ = 0;
  std::vector<std::int64_t> places_;  // of the layers of this rank in a page's memory
};

}  // namespace isograd
