// A step's loss and its terms, as they are logged: exact global values, added up with the gradient's norm.
#pragma once

#include <string>
#include <vector>

#include "isograd/group.hpp"
#include "isograd/loss.hpp"
#include "layout/readings.hpp"

namespace isograd {

// One rank's part of the loss and of each term. A rank without micro-batches does not know the terms.
class TermSums {
 public:
  static constexpr std::size_t kMostTerms = 8, kLongestName = 30;

  void clear();
  // One micro-batch's terms, the same ones in the same order in every micro-batch and on every rank, and the
  // share that the normaliser made of them. Numbers on a device are added when `readings` are read.
  void add(const LossTerms& terms, const at::Tensor& share, const Denominator& denominator,
           const StepCounts& step_counts, Readings& readings);
  double loss() const { return loss_; }
  const std::vector<TermValue>& terms() const { return terms_; }

 private:
  double loss_ = 0;
  std::vector<TermValue> terms_;
};

// The names of the terms, the same on all ranks. In a step only their values travel, in this order.
class TermNames {
 public:
  // Whether this rank has terms with other names than were agreed: then all ranks must agree() anew.
  bool differ_from(const std::vector<TermValue>& own) const;
  // Collective. Afterwards the names are those of the ranks that have terms. ConfigError on all ranks where
  // these differ in names or order.
  void agree(const std::vector<TermValue>& own, Group& all);
  const std::vector<std::string>& names() const { return names_; }

 private:
  std::vector<std::string> names_;
};

}  // namespace isograd
