// Wrong norms and clips: B18a to B18f. All of them have the right gradient.
#include <cmath>

#include "museum/room.hpp"

namespace isograd::museum {
namespace {

// B18ar: each replica assigns the elements to its shards, and all replicas' squares are added up.
struct OwnedInEachReplica : planted::Wrapped {
  OwnedInEachReplica(std::unique_ptr<DataParallel> inner_, int shards) : Wrapped(std::move(inner_)) {
    for (Bucket& bucket : buckets())
      bucket.owned = owned_slice(bucket.plan.numel, mesh().all().rank() % shards, shards);
  }
};

// B18d
struct NeverClips : planted::WrappedOptimizer {
  using WrappedOptimizer::WrappedOptimizer;
  void update(std::vector<Bucket>& buckets, double) override { inner->update(buckets, 1); }
};

}  // namespace

double norm_of_own(const std::vector<Bucket>& buckets) {
  double squares = 0;
  for (const Bucket& bucket : buckets)
    squares += bucket.gradients
                   .slice(0, bucket.owned.begin - bucket.held.begin, bucket.owned.end - bucket.held.begin)
                   .to(at::kDouble)
                   .square()
                   .sum()
                   .item<double>();
  return std::sqrt(squares);
}

double mean_over(Group group, double norm) {
  at::Tensor sum = at::full({1}, norm, at::kDouble);
  group.all_reduce(sum);
  return sum.item<double>() / group.size();
}

double largest_over(Group group, double norm) {
  at::Tensor largest = at::full({1}, norm, at::kDouble);
  group.all_reduce(largest, ReduceOp::kMax);
  return largest.item<double>();
}

double whole_norm(std::vector<Bucket>& buckets, Group& group) { return global_norm(buckets, 0, group).norm; }
double own_norm(std::vector<Bucket>& buckets, Group&) { return norm_of_own(buckets); }
double mean_of_own_norms(std::vector<Bucket>& buckets, Group& group) {
  return mean_over(group, norm_of_own(buckets));
}
double largest_of_own_norms(std::vector<Bucket>& buckets, Group& group) {
  return largest_over(group, norm_of_own(buckets));
}

Plant clips_by(NormOf norm) {
  return [norm](VerifyProblem& problem, World&) { problem.clipping = OwnClipping{.norm = norm}; };
}

void add_norms(std::vector<Exhibit>& list) {
  const auto any = [](int ranks) { return ranks > 0; };
  list.push_back({.id = "B18a", .plant = layout<OwnedOnEveryRank>()});
  list.push_back({.id = "B18ar", .plant = [](VerifyProblem& p, World& world) {
                    const int replicas = replicas_of(world.size), shards = world.size / replicas;
                    with_layout<OwnedInEachReplica>(p, shards);
                    p.layouts[0].axes = {{"dp_replicate", replicas}, {"dp_shard", shards}};
                  }});
  list.push_back({.id = "B18b", .plant = clips_by(own_norm)});
  list.push_back({.id = "B18c", .plant = clips_by(mean_of_own_norms)});
  list.push_back({.id = "B18d", .exists = any, .plant = [](VerifyProblem& p, World&) {
                    p.wrap_optimizer = [](auto inner) {
                      return std::make_unique<NeverClips>(std::move(inner));
                    };
                  }});
  list.push_back({.id = "B18e", .exists = any, .plant = [](VerifyProblem& p, World&) {
                    const auto by_bucket = [](std::vector<Bucket>& buckets, double, double limit) {
                      std::vector<double> own;
                      for (const Bucket& bucket : buckets)
                        own.push_back(clip_coefficient(bucket.gradients.norm().item<double>(), limit));
                      return own;
                    };
                    p.clipping = OwnClipping{whole_norm, by_bucket};
                  }});
  list.push_back({.id = "B18f", .plant = clips_by(largest_of_own_norms)});
}

}  // namespace isograd::museum
