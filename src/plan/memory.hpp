// Memory of the rank that needs most, at the moment that needs most.
#pragma once

#include <memory>
#include <vector>

#include "plan/schedule.hpp"
#include "plan/stage.hpp"

namespace isograd::planner {

// Keeps what candidates share: stages by (tp, ep, stages), a layer's bytes by (tp, cp, micro-batch,
// precision). 0.3 us a candidate once these are there.
class MemoryModel {
 public:
  MemoryModel(const Problem& problem, Pipelines& pipelines);
  ~MemoryModel();

  MemoryParts of(const Candidate& candidate);
  MemoryParts of_rank(const Candidate& candidate, int rank_of_pipeline);
  // At most of(candidate).total(), cheaper, and no less with larger micro-batches: for leaving out.
  double least(const Candidate& candidate) { return kept(candidate) + least_beyond_kept(candidate); }
  // The first rank's bytes from step to step, which micro-batches do not change, and the least of the others.
  double kept(const Candidate& candidate);
  double least_beyond_kept(const Candidate& candidate);
  // The parts with formulas and origins.
  std::vector<Planned::Part> explain(const Candidate& candidate, const MemoryParts& parts);
  const std::vector<StageShape>& stages(const Candidate& candidate);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace isograd::planner
