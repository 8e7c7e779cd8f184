// Forward and backward of micro-batches as CUDA graphs.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "isograd/step.hpp"

namespace isograd {

// A small model's micro-batch is some hundred kernels, which take longer to start than to run. Its forward
// and backward are recorded once for each form of batch, and started together from then on.
//
// A form is what a recording cannot change: how many tokens and fragments there are, both rounded up, and
// which weights. The batch is copied into memory of the form. It is filled up with tokens without a loss, in
// fragments of their own, which add exact zeros to every gradient. Document boundaries and the factors of the
// one division are data there, so that one recording serves all packs of its form.
class CapturedWork {
 public:
  // Null where nothing can be captured: gradients on the CPU, ranks that exchange something in a backward,
  // ZeRO-3.
  static std::unique_ptr<CapturedWork> make(DataParallel& layout);
  virtual ~CapturedWork() = default;

  using Look = std::function<void(const LossTerms&)>;
  struct Share {
    LossTerms terms;  // with the sums of this micro-batch
    at::Tensor value;
  };
  // Adds the gradient of the micro-batch's share, as StepWork's forward and backward do. `prepared` on the
  // CPU. Nothing: it has no form that is captured (no tokens, samples that are no tokens, a term without
  // denominator) and is left to the caller.
  // `look`, not null, sees the terms with their graphs in each pass that runs the forward's code.
  virtual std::optional<Share> run(const Batch& prepared, const ForwardLossTerms& forward,
                                   const Denominator& denominator, const Look& look) = 0;
};

}  // namespace isograd
