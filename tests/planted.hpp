// Mistakes that real trainers made, each put in at the right component. Numbers B.. are
// those of the museum of biased gradients.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/loss.hpp"
#include "isograd/optimizer.hpp"

namespace isograd::planted {

// B1, B11: each micro-batch's own mean, then divided by the number of micro-batches.
struct MeanOfMicroBatchMeans : TokenMean {
  mutable std::vector<std::int64_t> counts;
  mutable std::size_t next = 0;
  StepCounts count(const MicroBatches& micro_batches, Group& data, Requests requests) override {
    counts.clear();
    next = 0;
    for (const Batch& batch : micro_batches) counts.push_back(batch.num_targets());
    return TokenMean::count(micro_batches, data, requests);
  }
  Denominator denominator(const StepCounts& step_counts) const override {
    return {.value = static_cast<double>(step_counts.micro_batches)};
  }
  at::Tensor scale(const LossTerms& terms, const Denominator& denominator) const override {
    // Empty ones may follow, where every rank makes equally many.
    const double own =
        static_cast<double>(next < counts.size() ? std::max<std::int64_t>(1, counts[next]) : 1);
    ++next;
    return TokenMean::scale(terms, {.value = denominator.value * own});
  }
};

// B7: mean over the rank's own tokens, averaged over ranks.
struct MeanOfRankMeans : TokenMean {
  std::int64_t own = 0, ranks = 0;
  StepCounts count(const MicroBatches& micro_batches, Group& data, Requests requests) override {
    const StepCounts step_counts = TokenMean::count(micro_batches, data, requests);
    own = std::max<std::int64_t>(1, step_counts.targets_by_rank.at(data.rank()));
    ranks = data.size();
    return step_counts;
  }
  Denominator denominator(const StepCounts&) const override {
    return {.value = static_cast<double>(own * ranks)};
  }
};

// B3: the count stays on its rank, the gradient is summed.
struct CountNotReduced : MeanOfRankMeans {
  Denominator denominator(const StepCounts&) const override { return {.value = static_cast<double>(own)}; }
};

// B5: targets are counted once for each of the ranks that see the same ones.
struct CountsPeers : TokenMean {
  int peers;
  explicit CountsPeers(int peers_) : peers(peers_) {}
  StepCounts count(const MicroBatches& micro_batches, Group& data, Requests requests) override {
    StepCounts step_counts = TokenMean::count(micro_batches, data, requests);
    step_counts.targets *= peers;
    return step_counts;
  }
};

// B30: nothing divides.
struct NothingDivides : TokenMean {
  Denominator denominator(const StepCounts&) const override { return {.value = 1}; }
};

// A layout around the right one.
struct Wrapped : DataParallel {
  std::unique_ptr<DataParallel> inner;
  explicit Wrapped(std::unique_ptr<DataParallel> inner_) : inner(std::move(inner_)) {}
  void zero_gradients() override { inner->zero_gradients(); }
  void begin_backward(bool last) override { inner->begin_backward(last); }
  void finish_reduction() override { inner->finish_reduction(); }
  std::vector<Bucket>& buckets() override { return inner->buckets(); }
  const Mesh& mesh() const override { return inner->mesh(); }
  void publish_parameters() override { inner->publish_parameters(); }
  bool needs_even_micro_batches() const override { return inner->needs_even_micro_batches(); }
};

struct WrappedOptimizer : Optimizer {
  std::unique_ptr<Optimizer> inner;
  explicit WrappedOptimizer(std::unique_ptr<Optimizer> inner_) : inner(std::move(inner_)) {}
  void update(std::vector<Bucket>& buckets, double scale) override { inner->update(buckets, scale); }
  void set_learning_rate(double rate) override { inner->set_learning_rate(rate); }
  double learning_rate() const override { return inner->learning_rate(); }
  std::int64_t updates() const override { return inner->updates(); }
  OptimizerState state(const std::vector<Bucket>& buckets) override { return inner->state(buckets); }
  void set_updates(std::int64_t updates) override { inner->set_updates(updates); }
};

struct Averages : Wrapped {  // B14's opposite: the reducer divides by the ranks
  using Wrapped::Wrapped;
  void finish_reduction() override {
    inner->finish_reduction();
    for (Bucket& bucket : buckets()) bucket.gradients.div_(mesh().all().size());
  }
};

// Known by the time when it is asked for, as what a rank has counted.
using Number = std::function<double()>;

struct MultipliesSums : Wrapped {  // of the gradient over ranks
  Number factor;
  MultipliesSums(std::unique_ptr<DataParallel> inner_, Number factor_)
      : Wrapped(std::move(inner_)), factor(std::move(factor_)) {}
  void finish_reduction() override {
    inner->finish_reduction();
    for (Bucket& bucket : buckets()) bucket.gradients.mul_(factor());
  }
};

// B9: the buffer is scaled at every backward, what is in it already included.
struct RescalesTheBuffer : Wrapped {
  Number divisor;
  bool first = true;
  RescalesTheBuffer(std::unique_ptr<DataParallel> inner_, Number divisor_)
      : Wrapped(std::move(inner_)), divisor(std::move(divisor_)) {}
  void zero_gradients() override {
    inner->zero_gradients();
    first = true;
  }
  void begin_backward(bool last) override {
    if (!first)
      for (Bucket& bucket : buckets()) bucket.gradients.div_(divisor());
    first = false;
    inner->begin_backward(last);
  }
};

struct HalvesWhatReplicasSum : Wrapped {  // B15: another divide factor where there are replicas
  using Wrapped::Wrapped;
  void finish_reduction() override {
    inner->finish_reduction();
    for (Bucket& bucket : buckets()) bucket.gradients.mul_(0.5);
  }
};

// B16: the axis of replicas does nothing, e.g. because some code takes its size for 1.
struct SkipsReductions : c10d::Backend {
  struct Done : c10d::Work {
    bool isCompleted() override { return true; }
    bool wait(std::chrono::milliseconds) override { return true; }
  };
  using c10d::Backend::Backend;
  const std::string getBackendName() const override { return "skips"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override {
    return c10::make_intrusive<Done>();
  }
};
inline Group skips_reductions(const Group& like) {
  return Group(c10::make_intrusive<SkipsReductions>(like.rank(), like.size()), like.name(), like.timeout(),
               {.self_test = false});
}

// A mesh on which ranks along these axes sum nothing.
inline Mesh skips_sums_along(const World& world, const Grid& grid, const AxisSet& axes) {
  return Mesh(world.group, grid,
              [world, skipped = grid.ranks_along(axes, world.rank)](const std::vector<int>& ranks,
                                                                    const std::string& name) {
                const Group right = world.subgroup(ranks, name);
                return ranks == skipped ? skips_reductions(right) : right;
              });
}

struct SkipsABucket : Wrapped {  // B16: replicas drift apart
  using Wrapped::Wrapped;
  void finish_reduction() override {
    const at::Tensor local = buckets().back().gradients.clone();
    inner->finish_reduction();
    buckets().back().gradients.copy_(local);
  }
};

struct ReducesTwice : Wrapped {
  using Wrapped::Wrapped;
  void finish_reduction() override {
    inner->finish_reduction();
    for (Bucket& bucket : buckets()) mesh().all().all_reduce(bucket.gradients);
  }
};

// B28 on one accumulating buffer: reducing after every micro-batch multiplies the earlier ones. Every rank
// must reduce equally often, so ranks with fewer micro-batches catch up at the end.
struct ReducesEveryMicroBatch : Wrapped {
  int times = 0, backward = 0;
  ReducesEveryMicroBatch(std::unique_ptr<DataParallel> inner_, int times_)
      : Wrapped(std::move(inner_)), times(times_) {}
  void reduce() {
    for (Bucket& bucket : buckets()) mesh().all().all_reduce(bucket.gradients);
  }
  void begin_backward(bool last) override {
    if (backward++ > 0 && --times > 0) reduce();
    inner->begin_backward(last);
  }
  void finish_reduction() override {
    while (--times > 0) reduce();
    inner->finish_reduction();
  }
};

// B17: the next use of a buffer begins while its reduction is under way.
struct ReusesBuffersInFlight : Wrapped {
  using Wrapped::Wrapped;
  void finish_reduction() override {
    for (Bucket& bucket : buckets()) {
      Pending pending = mesh().all().all_reduce_async(bucket.gradients);
      bucket.gradients.zero_();
      pending.wait();
    }
  }
};

}  // namespace isograd::planted
