// What is logged of a step's terms: exact global values, carried along by the collective of the norm.
#pragma once

#include <string>
#include <vector>

#include "isograd/loss.hpp"
#include "layout/readings.hpp"

namespace isograd {

// Of a rank. A rank without micro-batches does not know the terms; the lowest rank that has one names them.
class TermLedger {
 public:
  static constexpr std::size_t kMostTerms = 8, kLongestName = 30;

  void clear();
  // One micro-batch's terms, the same ones in the same order in every micro-batch and on every rank, and what
  // the normaliser made of them. What lies on a device is added when `readings` are read, before message().
  void add(const LossTerms& terms, const at::Tensor& share, const Denominator& denominator,
           const Census& census, Readings& readings);
  // A fixed number of values, to be added up over the ranks. The first is the loss. Of ranks with the same
  // batch that all give theirs, the stages of a pipeline, one alone `may_name` the terms.
  std::vector<double> message(const Census& census, bool may_name = true) const;
  // The terms from such a sum. ConfigError, on all ranks, where the ranks' terms differ.
  static std::vector<TermValue> read(const std::vector<double>& sums);

 private:
  double loss_ = 0;
  std::vector<TermValue> terms_;
};

}  // namespace isograd
