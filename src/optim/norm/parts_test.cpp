// Norms from ownership: replicated, sharded and both, on 1 to 8 ranks, against one process in fp64. Planted:
// B18a (elements counted once per replica), B18b (of the own shard only), B18c (norms averaged).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "isograd/optimizer.hpp"
#include "isograd/world.hpp"
#include "layout/flat.hpp"

namespace isograd {
namespace {

constexpr int kParts = 3;
int part_of(const Slot& slot) { return slot.name[0] - 'a'; }  // 'd': in none

// The gradient of a model of odd sizes, the same on every rank.
struct Gradient {
  std::vector<NamedParameter> parameters;
  std::vector<at::Tensor> values;

  explicit Gradient(at::ScalarType type) {
    at::manual_seed(5);
    const std::vector<std::vector<std::int64_t>> shapes = {{7, 5}, {1},     {300, 300},
                                                           {129},  {33, 4}, {5, 5, 5}};
    const char* const names[] = {"a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "d.weight"};
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      parameters.push_back({names[i], at::zeros(shapes[i], type).requires_grad_(true), true});
      values.push_back(at::randn(shapes[i], type) * std::pow(10.0, static_cast<double>(i % 3)));
    }
  }

  double norm(char part, NormOrder order) const {  // 0: of all
    double squares = 0, largest = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (part != 0 && parameters[i].name[0] != part) continue;
      const at::Tensor wide = values[i].to(at::kDouble);
      squares += wide.square().sum().item<double>();
      largest = std::fmax(largest, wide.abs().max().item<double>());
    }
    return order == NormOrder::kTwo ? std::sqrt(squares) : largest;
  }
};

// The buckets of rank `rank` of replicas x shards after the reduction. `whole`: it holds everything and
// counts its slice; otherwise it holds its shard, and the first replica counts.
std::vector<Bucket> make_buckets(const Gradient& gradient, int rank, int replicas, int shards, bool whole) {
  std::vector<Bucket> buckets;
  for (BucketPlan& plan : plan_buckets(gradient.parameters, 5000)) {
    pad_for(plan, shards);
    at::Tensor flat = at::zeros({plan.numel}, gradient.values[0].scalar_type());
    for (const Slot& slot : plan.slots) slot_view(flat, slot).copy_(gradient.values[slot.index]);
    Range held{0, plan.numel}, owned = owned_slice(plan.numel, rank, replicas * shards);
    if (!whole) {
      held = owned_slice(plan.numel, rank % shards, shards);
      owned = rank / shards == 0 ? held : Range{held.begin, held.begin};
    }
    Bucket bucket;
    bucket.gradients = flat.narrow(0, held.begin, held.size()).clone();
    bucket.plan = std::move(plan), bucket.held = held, bucket.owned = owned;
    buckets.push_back(std::move(bucket));
  }
  return buckets;
}

// Sums of squares of at most 10^5 terms, by another order than the reference's.
constexpr double kRounding = 1e5 * 0x1p-53;

bool agrees(double found, double expected) { return std::abs(found - expected) <= kRounding * expected; }

// Calls `body(buckets, group, gradient)` for each way to hold the gradient on each number of ranks.
template <typename Body>
void everywhere(Body&& body) {
  for (auto type : {at::kFloat, at::kDouble})
    for (int ranks : {1, 2, 3, 4, 5, 8}) {
      const Gradient gradient(type);  // ranks that are threads share one random generator
      run_ranks(ranks, [&](World& world) {
        for (int replicas : {1, 2, 4, ranks})
          for (bool whole : {false, true}) {
            if (ranks % replicas != 0) continue;
            auto buckets = make_buckets(gradient, world.rank, replicas, ranks / replicas, whole);
            SCOPED_TRACE(::testing::Message() << replicas << " of " << ranks << " ranks, whole " << whole);
            body(buckets, world, gradient);
          }
      });
    }
}

TEST(Norms, OfPartsAndOfAllComeFromOwnership) {
  everywhere([](std::vector<Bucket>& buckets, World& world, const Gradient& gradient) {
    const GlobalNorm global = global_norm(buckets, 0, world.group);
    EXPECT_TRUE(agrees(global.norm, gradient.norm(0, NormOrder::kTwo)));
    EXPECT_EQ(infinity_norm(buckets, world.group), gradient.norm(0, NormOrder::kInfinity));
    for (NormOrder order : {NormOrder::kTwo, NormOrder::kInfinity}) {
      const auto norms = part_norms(buckets, part_of, kParts, order, world.group);
      for (int part = 0; part < kParts; ++part)
        EXPECT_TRUE(agrees(norms[part], gradient.norm(static_cast<char>('a' + part), order))) << part;
    }
  });
}

TEST(Norms, HaveTheSameBitsOnEveryRank) {
  everywhere([](std::vector<Bucket>& buckets, World& world, const Gradient&) {
    auto norms = part_norms(buckets, part_of, kParts, NormOrder::kTwo, world.group);
    norms.push_back(global_norm(buckets, 0, world.group).norm);
    norms.push_back(infinity_norm(buckets, world.group));
    const at::Tensor all = world.group.all_gather(at::tensor(norms, at::kDouble));
    for (int rank = 1; rank < world.size; ++rank) EXPECT_TRUE(at::equal(all[rank], all[0]));
  });
}

// B18a: one bucket's elements counted by every rank that holds them. That part alone is too large.
TEST(Norms, PlantedB18aIsSeen) {
  everywhere([](std::vector<Bucket>& buckets, World& world, const Gradient& gradient) {
    int copies = 0;  // of the first bucket's elements
    const at::Tensor held = at::zeros({buckets[0].plan.numel}, at::kLong);
    held.narrow(0, buckets[0].held.begin, buckets[0].held.size()).fill_(1);
    at::Tensor holders = held.clone();
    world.group.all_reduce(holders);
    copies = holders[0].item<int>();
    buckets[0].owned = buckets[0].held;
    const double found = global_norm(buckets, 0, world.group).norm;
    EXPECT_EQ(agrees(found, gradient.norm(0, NormOrder::kTwo)), copies == 1);
  });
}

// B18b: each rank's own part only.
TEST(Norms, PlantedB18bIsSeen) {
  everywhere([](std::vector<Bucket>& buckets, World& world, const Gradient& gradient) {
    Group alone = Group::solo();
    double right = agrees(global_norm(buckets, 0, alone).norm, gradient.norm(0, NormOrder::kTwo)) ? 1 : 0;
    right += infinity_norm(buckets, alone) == gradient.norm(0, NormOrder::kInfinity) ? 1 : 0;
    at::Tensor everybody = at::tensor({right}, at::kDouble);
    world.group.all_reduce(everybody, ReduceOp::kMin);
    EXPECT_EQ(everybody.item<double>() == 0, world.size > 1);
  });
}

// B18c: the ranks' norms averaged, instead of their squares summed.
TEST(Norms, PlantedB18cIsSeen) {
  everywhere([](std::vector<Bucket>& buckets, World& world, const Gradient& gradient) {
    Group alone = Group::solo();
    at::Tensor mean = at::tensor({global_norm(buckets, 0, alone).norm}, at::kDouble);
    world.group.all_reduce(mean);
    EXPECT_EQ(agrees(mean.item<double>() / world.size, gradient.norm(0, NormOrder::kTwo)), world.size == 1);
  });
}

TEST(Norms, SayWhereANanIs) {
  everywhere([](std::vector<Bucket>& buckets, World& world, const Gradient& gradient) {
    for (Bucket& bucket : buckets)
      for (const Slot& slot : bucket.plan.slots)
        if (slot.name == "b.weight" && bucket.held.begin <= slot.offset && slot.offset < bucket.held.end)
          bucket.gradients[slot.offset - bucket.held.begin] = std::nan("");
    for (NormOrder order : {NormOrder::kTwo, NormOrder::kInfinity}) {
      const auto norms = part_norms(buckets, part_of, kParts, order, world.group);
      EXPECT_TRUE(std::isnan(norms[1]));
      EXPECT_TRUE(agrees(norms[0], gradient.norm('a', order)));
      EXPECT_TRUE(agrees(norms[2], gradient.norm('c', order)));
    }
    EXPECT_TRUE(std::isnan(infinity_norm(buckets, world.group)));
  });
}

}  // namespace
}  // namespace isograd
