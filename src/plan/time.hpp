// Seconds of a step of the slowest rank.
#pragma once

#include <memory>
#include <vector>

#include "plan/collectives.hpp"
#include "plan/memory.hpp"
#include "plan/schedule.hpp"

namespace isograd::planner {

// A product [m, k] by [k, n], `count` times.
struct Product {
  std::int64_t m = 0, n = 0, k = 0;
  double count = 1;
};
// A rank's work for one micro-batch in a layer, or at an end of the model. Exchanges are whole buffers.
struct LayerWork {
  std::vector<Product> forward{}, inputs{}, weights{};  // backward in its two halves
  double pairs = 0;                                     // FLOPs of attention, forward
  double bytes = 0;   // read and written by operators that no product hides, forward
  int operators = 0;  // launches or calls, forward
  double tp_bytes = 0, ring_bytes = 0, ulysses_bytes = 0, expert_bytes = 0;
};
LayerWork layer_work(const Problem& problem, const Candidate& candidate, std::int64_t layer);
LayerWork output_work(const Problem& problem, const Candidate& candidate);  // head and loss

// Rates of a device: calibrated ones go before the data sheet's.
class Rates {
 public:
  explicit Rates(const Problem& problem);
  // By the nearest calibrated shapes, interpolated in their logarithms.
  double seconds(const Product& product) const;
  double attention(double flops) const;
  double memory(double bytes) const;
  double operators(int count) const;
  double optimizer(double bytes) const;
  Origin origin() const;

 private:
  std::shared_ptr<const struct RatesData> data_;
};

// Average pairs of a packed sequence, and how much longer the slowest of `ranks` ranks computes than the mean
// one (1: even).
struct Packs {
  double pairs = 0, slowest = 1;
};
Packs packs_of(const Work& work, std::int64_t ranks, std::int64_t sequences_of_rank);

// The rest of `seconds` that `behind` seconds do not hide, of which a part can hide: the
// overlap law, forward + max(backward, reduce) = forward + backward + exposed(reduce, backward, 1).
inline double exposed(double seconds, double behind, double part) {
  return seconds > part * behind ? seconds - part * behind : 0;
}

// Steps of other programs (published.cpp), with their own stages.
StepParts published_step(const Problem& problem, const Candidate& candidate,
                         const std::vector<StageShape>& stages);

class StepModel {
 public:
  StepModel(const Problem& problem, Pipelines& pipelines, MemoryModel& memory);
  ~StepModel();

  StepParts of(const Candidate& candidate);
  // At most of(candidate).total(), from products and the bubble of even stages alone: for leaving out.
  double least(const Candidate& candidate);
  // The size of buckets that makes latency and tail least.
  std::int64_t best_bucket_bytes(const Candidate& candidate);
  std::vector<Planned::Part> explain(const Candidate& candidate, const StepParts& parts);
  std::vector<Span> timeline(const Candidate& candidate);
  const Network& network() const;
  const Rates& rates() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace isograd::planner
