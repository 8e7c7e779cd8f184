// Wrong reducers: B14 to B17, B28, B29.
#include "museum/room.hpp"

namespace isograd::museum {
namespace {

using planted::Wrapped;

// A loss that leaves the division by the number of ranks to the reducer.
struct ExpectsAnAverage : TokenMean {
  Denominator denominator(const StepCounts& step_counts) const override {
    Denominator wrong = TokenMean::denominator(step_counts);
    wrong.value /= static_cast<double>(step_counts.targets_by_rank.size());
    return wrong;
  }
};

// B15: divides by the ranks of a replica, where there are several replicas.
struct DividesByTheShards : Wrapped {
  int shards;
  DividesByTheShards(std::unique_ptr<DataParallel> inner_, int shards_)
      : Wrapped(std::move(inner_)), shards(shards_) {}
  void finish_reduction() override {
    inner->finish_reduction();
    for (Bucket& bucket : buckets()) bucket.gradients.div_(shards);
  }
};

// B17: the next use of the buffers begins before the reduction has read them, in every second step: what
// comes first is a matter of timing, here made a matter of counting, so that it shows on every machine.
struct ReusesTheBuffer : Wrapped {
  int steps = 0;
  using Wrapped::Wrapped;
  void finish_reduction() override {
    const bool too_early = steps++ % 2 == 1;
    if (too_early)
      for (Bucket& bucket : buckets()) bucket.gradients.narrow(0, 0, bucket.gradients.numel() / 2).zero_();
    inner->finish_reduction();
  }
};

// B28: each micro-batch's gradient is reduced by itself and added up afterwards. Right values, G times the
// traffic. Every rank has to take part in every round.
struct ReducesEachMicroBatch : Wrapped {
  std::vector<at::Tensor> sums;
  bool first = true;
  using Wrapped::Wrapped;
  bool needs_even_micro_batches() const override { return true; }
  void zero_gradients() override {
    inner->zero_gradients();
    sums.clear();
    first = true;
  }
  void reduce() {
    if (sums.empty())
      for (Bucket& bucket : buckets()) sums.push_back(at::zeros_like(bucket.gradients));
    for (std::size_t b = 0; b < buckets().size(); ++b) {
      at::Tensor& gradients = buckets()[b].gradients;
      mesh().all().all_reduce(gradients);
      sums[b] += gradients;
      gradients.zero_();
    }
  }
  void begin_backward(bool) override {
    if (!first) reduce();
    first = false;
    inner->begin_backward(false);
  }
  void finish_reduction() override {
    reduce();
    for (std::size_t b = 0; b < buckets().size(); ++b) buckets()[b].gradients.copy_(sums[b]);
  }
};

// B29: each rank adds the parts up beginning with its own, as a ring does that passes sums on.
struct SumsFromItself : Wrapped {
  using Wrapped::Wrapped;
  void finish_reduction() override {
    for (Bucket& bucket : buckets()) {
      const at::Tensor parts = mesh().all().all_gather(bucket.gradients);
      at::Tensor sum = at::zeros_like(bucket.gradients);
      for (int i = 0; i < mesh().all().size(); ++i)
        sum += parts[(mesh().all().rank() + i) % mesh().all().size()];
      bucket.gradients.copy_(sum);
    }
  }
};

// B16
struct NeverReduces : Wrapped {
  using Wrapped::Wrapped;
  void finish_reduction() override {}
};

}  // namespace

int replicas_of(int ranks) { return ranks % 2 == 0 && ranks > 2 ? 2 : ranks; }

void add_reduction(std::vector<Exhibit>& list) {
  list.push_back({.id = "B14", .plant = normalizer<ExpectsAnAverage>()});
  list.push_back({.id = "B15", .plant = [](VerifyProblem& p, World& world) {
                    const int replicas = replicas_of(world.size), shards = world.size / replicas;
                    with_normalizer<ExpectsAnAverage>(p);
                    with_layout<DividesByTheShards>(p, shards);
                    p.layouts[0].axes = {{"dp_replicate", replicas}, {"dp_shard", shards}};
                  }});
  list.push_back({.id = "B16", .plant = [](VerifyProblem& p, World& world) {
                    with_layout<NeverReduces>(p);
                    p.layouts[0].axes = {{"dp_replicate", world.size}, {"dp_shard", 1}};
                    p.layouts[0].traffic = nullptr;
                  }});
  list.push_back({.id = "B17", .plant = layout<ReusesTheBuffer>()});
  list.push_back({.id = "B28", .plant = layout<ReducesEachMicroBatch>()});
  list.push_back({.id = "B29",
                  .exists = [](int ranks) { return ranks > 2; },
                  .plant =
                      [](VerifyProblem& p, World& world) {
                        with_layout<SumsFromItself>(p);
                        auto by_rank =
                            toy::make_step(world.size, 2);  // three terms take three ranks with data
                        for (std::size_t rank = 0; rank < by_rank.size(); ++rank)
                          if (by_rank[rank].empty())
                            by_rank[rank] = {toy::make_batch({6, 9}, 1000 + static_cast<std::int64_t>(rank))};
                        p.local = by_rank[static_cast<std::size_t>(world.rank)];
                        p.whole = [by_rank] { return MicroBatches{toy::concatenate(by_rank)}; };
                        p.layouts[0].traffic = nullptr;
                      }});
}

}  // namespace isograd::museum
