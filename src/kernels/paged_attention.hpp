// Attention of queries that share a key head to keys and values in pages (src/sampler).
#pragma once

#include <cstdint>

#include "kernels/bfloat16.hpp"

namespace isograd::kernels {

struct PagedShape {
  std::int64_t rows = 0, groups = 0;  // of queries: query heads that share the key head
  std::int64_t stride = 0;            // from a row of queries, or of results, to the next
  std::int64_t dim = 0, page = 0;     // positions of a page
  std::int64_t visible = 0;           // positions that the first row sees; each next row sees one more

  std::int64_t most() const { return visible + rows - 1; }
  // Numbers of scratch memory that attend_pages() needs.
  std::int64_t scratch() const { return 4 * ((most() + page - 1) / page) * page; }
};

// out = softmax(q kᵀ / √dim) v. Query (r, g) and its result lie at r · stride + g · dim. Page i holds
// positions from i · page on: keys[i] [dim, page], values[i] [page, dim]. Computed in fp64 for fp64, else in
// fp32. The bits of a query's result do not depend on the other queries.
void attend_pages(const PagedShape& shape, const float* queries, const float* const* keys,
                  const float* const* values, float* scratch, float* out);
void attend_pages(const PagedShape& shape, const double* queries, const double* const* keys,
                  const double* const* values, double* scratch, double* out);
void attend_pages(const PagedShape& shape, const Bfloat16* queries, const Bfloat16* const* keys,
                  const Bfloat16* const* values, float* scratch, Bfloat16* out);

}  // namespace isograd::kernels
