// Does not compile, on purpose: each argument of a Step is wrong in a way that is natural to who knows
// LibTorch. The compiler's messages are the test (tests/CMakeLists.txt).
#include <isograd/isograd.hpp>

namespace isograd {

void misuse(std::unique_ptr<DataParallel>& layout, std::unique_ptr<AdamW>& adamw) {
  const auto number = [](const Batch&) { return 1.0; };
  Step step(number, layout, TokenMean(), adamw, {.max_norm = 1.0});
}

}  // namespace isograd
