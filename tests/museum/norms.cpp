// Wrong norms and clips: B18a to B18f. All of them have the right gradient.
#include <cmath>

#include "museum/room.hpp"

namespace isograd::museum {
namespace {

// B18ar: each replica deals the elements to its shards, and all replicas' squares are added up.
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

void add_norms(std::vector<Exhibit>& list) {
  list.push_back({.id = "B18a",
                  .title = "the norm counts every copy",
                  .mistake = "Squares are summed over ranks that hold copies of the same elements.",
                  .who = "Norms taken over the whole mesh, whatever is replicated on it.",
                  .number = "Norm ratio √k; gradients agree, parameters after a clipped step do not.",
                  .diagnosis = "norm_counts_replicas",
                  .plant = [](VerifyProblem& p, World&) { with_layout<OwnedOnEveryRank>(p); }});
  list.push_back({.id = "B18ar",
                  .title = "the norm counts every replica",
                  .mistake =
                      "Each replica's shards make up the whole gradient; their squares are summed over "
                      "the replicas too.",
                  .who = "Hybrid sharding whose norm is all-reduced over the world: one group for both axes.",
                  .number = "Norm ratio √R, R the number of replicas; gradients agree, clipped parameters do "
                            "not.",
                  .diagnosis = "norm_counts_replicas",
                  .plant = [](VerifyProblem& p, World& world) {
                    const int replicas = replicas_of(world.size), shards = world.size / replicas;
                    with_layout<OwnedInEachReplica>(p, shards);
                    p.layouts[0].axes = {{"dp_replicate", replicas}, {"dp_shard", shards}};
                  }});
  list.push_back({.id = "B18b",
                  .title = "the norm of the own shard",
                  .mistake = "Each rank takes the norm of the part it keeps and clips by that.",
                  .who = "clip_grad_norm of a single-device library on sharded gradients.",
                  .number = "A norm that is too small, and another one on every rank.",
                  .diagnosis = "norm_of_own_shard",
                  .plant = [](VerifyProblem& p, World&) {
                    p.clipping = OwnClipping{
                        .norm = [](std::vector<Bucket>& buckets, Group&) { return norm_of_own(buckets); }};
                  }});
  list.push_back({.id = "B18c",
                  .title = "norms averaged",
                  .mistake = "The norms of the parts are averaged over ranks; the squares should be summed.",
                  .who = "An all-reduce with AVG put behind a local norm.",
                  .number = "A wrong norm, the same on all ranks, with no constant factor.",
                  .diagnosis = "norms_averaged",
                  .plant = [](VerifyProblem& p, World&) {
                    p.clipping = OwnClipping{.norm = [](std::vector<Bucket>& buckets, Group& group) {
                      return mean_over(group, norm_of_own(buckets));
                    }};
                  }});
  list.push_back(
      {.id = "B18d",
       .title = "the clip is never applied",
       .mistake = "The coefficient is computed and logged, the update uses the unclipped gradient.",
       .who = "Fused optimizers that were handed the scale and did not multiply by it.",
       .number = "Parameters differ as soon as the norm exceeds the limit.",
       .diagnosis = "clip_not_applied",
       .exists = [](int ranks) { return ranks > 0; },
       .plant =
           [](VerifyProblem& p, World&) {
             p.wrap_optimizer = [](std::unique_ptr<Optimizer> inner) {
               return std::make_unique<NeverClips>(std::move(inner));
             };
           }});
  list.push_back(
      {.id = "B18e",
       .title = "groups clipped by coefficients of their own",
       .mistake = "Each group of parameters (expert and dense, or each bucket) is clipped by its own norm.",
       .who = "Trainers with several optimizers or parameter groups.",
       .number = "The applied gradient's ratio differs between groups.",
       .diagnosis = "groups_clipped_apart",
       .exists = [](int ranks) { return ranks > 0; },
       .plant =
           [](VerifyProblem& p, World&) {
             p.clipping = OwnClipping{
                 .norm = [](std::vector<Bucket>& buckets,
                            Group& group) { return global_norm(buckets, 0, group).norm; },
                 .coefficients =
                     [](std::vector<Bucket>& buckets, double, double limit) {
                       std::vector<double> own;
                       for (const Bucket& bucket : buckets)
                         own.push_back(clip_coefficient(bucket.gradients.norm().item<double>(), limit));
                       return own;
                     }};
           }});
  list.push_back({.id = "B18f",
                  .title = "the largest norm of a shard",
                  .mistake =
                      "The norm of the whole is taken to be the maximum over ranks of their parts' norms; "
                      "that is how the infinity norm goes.",
                  .who = "An all-reduce with MAX, right for the infinity norm, kept for the 2-norm.",
                  .number = "A norm that is too small, the same on all ranks, with no constant factor.",
                  .diagnosis = "norm_of_largest_part",
                  .plant = [](VerifyProblem& p, World&) {
                    p.clipping = OwnClipping{.norm = [](std::vector<Bucket>& buckets, Group& group) {
                      return largest_over(group, norm_of_own(buckets));
                    }};
                  }});
}

}  // namespace isograd::museum
