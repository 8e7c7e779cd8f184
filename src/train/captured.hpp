// Forward and backward of micro-batches as CUDA graphs.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "isograd/step.hpp"

namespace isograd {

// A small model's micro-batch is some hundred kernels, which take longer to start than to run. Forward and
// backward are recorded once for each form of batch, and started together from then on. A form is what a
// recording cannot change: the numbers of tokens and fragments, rounded up, and which weights there are. The
// batch is copied into the form's memory and filled up with fragments of tokens without a loss, which add
// exact zeros. Document boundaries and the division's factors are data there.
class CapturedWork {
 public:
  // Null where nothing can be captured: gradients on the CPU, exchanges in a backward, ZeRO-3.
  static std::unique_ptr<CapturedWork> make(DataParallel& layout);
  virtual ~CapturedWork() = default;

  using Look = std::function<void(const LossTerms&)>;
  struct Share {
    LossTerms terms;  // with the sums of this micro-batch
    at::Tensor value;
  };
  // Adds the gradient of the share of `prepared` (on the CPU). Nothing: left to the caller, as it has no form
  // that is captured (no tokens, samples that are no tokens, a term without denominator). `look` sees the
  // terms with their graphs in each pass that runs the forward's code.
  virtual std::optional<Share> run(const Batch& prepared, const ForwardLossTerms& forward,
                                   const Denominator& denominator, const Look& look) = 0;
};

}  // namespace isograd
