// Loops over LibTorch's threads, for code outside LibTorch (README.md explains why at::parallel_for does not
// serve).
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace isograd {

// Calls body(b, e) for parts [b, e) that cover [begin, end), in parallel on several threads. No part except a
// single one is shorter than `grain` (at least 1). Returns when all are done, and throws what one of them
// threw. A call within a part runs in order.
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                  c10::function_ref<void(std::int64_t begin, std::int64_t end)> body);

}  // namespace isograd
