// Seconds of a step of the slowest rank.
#pragma once

#include <memory>
#include <optional>
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
// `pairs`: of a sequence, where they are known already.
LayerWork layer_work(const Problem& problem, const Candidate& candidate, std::int64_t layer,
                     std::optional<double> pairs = std::nullopt);
LayerWork output_work(const Problem& problem, const Candidate& candidate);  // head and loss

// Rates of a device: calibrated ones go before the data sheet's.
class Rates {
 public:
  explicit Rates(const Problem& problem);
  // Between the nearest calibrated shapes, interpolated in their logarithms.
  double seconds(const Product& product) const;
  // Causal, of fragments of `length` tokens.
  double attention(double flops, std::int64_t length, std::int64_t head_dim) const;
  double memory(double bytes) const;
  double operators(int count) const;
  double optimizer(double bytes) const;
  Origin origin() const;

 private:
  std::shared_ptr<struct RatesData> data_;
};

// Pairs of each packed sequence: documents one behind another, cut where a sequence ends.
std::vector<double> pairs_by_sequence(const Work& work);
// Their average, and how much longer the slowest of `ranks` ranks computes than the mean one (1: even).
struct Packs {
  double pairs = 0, slowest = 1;
};
Packs packs_of(const std::vector<double>& pairs, std::int64_t ranks = 1, std::int64_t sequences_of_rank = 1);

// Bytes that an update moves for an element: its gradient is read, masters and states are read and written,
// the parameter is written.
inline double update_bytes(const ElementBytes& bytes) {
  return bytes.gradient + 2 * (bytes.master + bytes.state) + bytes.parameter;
}

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
  // At most of(candidate).total() with any size of buckets, without a simulation: for leaving out.
  double least(const Candidate& candidate);
  // The same without what gradients and parameters take: no strategy is asked.
  double least_length(const Candidate& candidate);
  // At most that of every strategy and schedule on a mesh with this micro-batch, and cheaper still.
  double least_of_mesh(const Candidate& mesh);
  // The size of buckets, at most `most`, that makes latency and tail least.
  std::int64_t best_bucket_bytes(const Candidate& candidate, std::int64_t most = 1 << 30);
  std::vector<Planned::Part> explain(const Candidate& candidate, const StepParts& parts);
  // Seconds of a micro-batch on the slowest rank, and of one layer: collectives hide behind them.
  struct Behind {
    double forward = 0, backward = 0, layer_forward = 0, layer_backward = 0;
    double tp = 0, ep = 0;  // parts of a layer's time (of one with experts) that exchanges take
  };
  Behind behind(const Candidate& candidate);
  StepParts data_parallel(const Candidate& candidate);  // what gradients and parameters take, alone
  double overlap() const;                               // part of a collective that computation hides
  std::vector<Span> timeline(const Candidate& candidate);
  const Network& network() const;
  const Rates& rates() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace isograd::planner
