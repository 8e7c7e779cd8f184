// What a rank gets of a run's micro-batches: its part where context ranks share them, never more than it has
// memory for, and how level the cuts were.
#pragma once

#include <optional>
#include <string>

#include "isograd/trainer.hpp"
#include "train/task.hpp"

namespace isograd {

class CutBatches {
 public:
  // Of `task` and `mesh`, which outlive it; `world`: all ranks of the run.
  CutBatches(const Task& task, const Mesh& mesh, Group world);

  // This rank's parts. With batch.max_tokens_per_rank collective over the run's ranks: an AgreedConfigError
  // on all of them when one has a micro-batch that is larger.
  MicroBatches of(const MicroBatches& whole);
  // The same of a step that is trained: counted in what follows.
  MicroBatches of_step(const MicroBatches& whole);

  // The least level cut of the first step, in words; empty but after the first step and with context ranks.
  const std::string& first_step() const { return first_step_; }
  // Collective. Over all micro-batches so far and all ranks; nothing without a cut.
  std::optional<Outcome::Balance> balance();

 private:
  const Task& task_;
  const Mesh& mesh_;
  Group world_;
  CutOptions options_;
  std::int64_t most_tokens_;
  std::string first_step_{};
  bool first_ = true;
  double sum_ = 0, worst_ = 0, cuts_ = 0;
};

}  // namespace isograd
