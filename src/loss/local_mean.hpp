// A term that is a mean over its micro-batch, where the step wants a sum.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "isograd/batch.hpp"
#include "isograd/error.hpp"
#include "isograd/loss.hpp"

namespace isograd {

// Looks at the graphs of a rank's loss terms, micro-batch by micro-batch, for a mean that LibTorch takes and
// for a division by a number of this micro-batch: its targets, tokens, samples or weights. It computes
// nothing and changes nothing. A mean as it is and a sum divided by the targets are known in the first
// micro-batch; with another factor (0.5 * mse_loss) two micro-batches of different sizes are needed, since
// the factor may hold the count (0.1 * n * mean). Functions of other libraries' own are not looked into.
class LocalMeans {
 public:
  // `step`: what the step divides by. The batch is a prepared one, on the CPU.
  void look(const LossTerms& terms, const Batch& batch, const Normalizer& step);
  // The finding that all micro-batches so far agree on; nothing while that is not certain.
  std::optional<ErrorText> found() const;

 private:
  struct Evidence {
    double size = 0;      // of the first micro-batch
    bool varied = false;  // another one had another size
    bool certain = false;
    int looks = 0;
    std::string said{};
  };
  struct Term {
    int looks = 0;
    std::map<std::string, Evidence> evidence{};
    Mean mean = Mean::kTargets;
  };
  std::map<std::string, Term> terms_;
  int looks_ = 0;
};

}  // namespace isograd
