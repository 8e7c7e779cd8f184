// Gives a rank its part of a run's micro-batches: context-parallel ranks split them, the memory limit is
// checked, and the balance of the split is measured.
#pragma once

#include <optional>
#include <string>

#include "isograd/trainer.hpp"
#include "train/task.hpp"

namespace isograd {

class CutBatches {
 public:
  // `task` and `mesh` must outlive this object. `world`: all ranks of the run.
  CutBatches(const Task& task, const Mesh& mesh, Group world);

  // This rank's parts. With batch.max_tokens_per_rank collective over the run's ranks: an AgreedConfigError
  // on all of them when one has a micro-batch that is larger.
  MicroBatches of(const MicroBatches& whole);
  // As of(), for a training step, which the figures below include.
  MicroBatches of_step(const MicroBatches& whole);

  // The least balanced split of the first step, in words; empty except after the first step with
  // context-parallel ranks.
  const std::string& first_step() const { return first_step_; }
  // Balance over all micro-batches so far and all ranks; nothing without context parallelism. Collective.
  std::optional<Outcome::Balance> balance();

 private:
  const Task& task_;
  const Mesh& mesh_;
  Group world_;
  CutOptions options_;
  std::string first_step_{};
  bool first_ = true;
  double sum_ = 0, worst_ = 0, cuts_ = 0;
};

}  // namespace isograd
