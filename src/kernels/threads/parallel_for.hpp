// Loops over LibTorch's threads, for code outside LibTorch (README.md says why at::parallel_for is no such
// loop).
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace isograd {

// Calls body(b, e) for parts [b, e) that cover [begin, end), at the same time where there are several
// threads; no part but the only one is shorter than `grain` (at least 1). Returns when all are done; throws
// what one of them threw. Called from within a part it runs in order.
void parallel_for(std::int64_t begin, std::int64_t end, std::int64_t grain,
                  c10::function_ref<void(std::int64_t begin, std::int64_t end)> body);

}  // namespace isograd
