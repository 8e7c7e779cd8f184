#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <functional>
#include <set>

#include "base/error_testing.hpp"
#include "isograd/error.hpp"
#include "isograd/parameters.hpp"
#include "isograd/world.hpp"
#include "layout/flat.hpp"

namespace isograd {
namespace {

using error_testing::error_of;

at::Tensor leaf(at::IntArrayRef shape, at::ScalarType type = at::kFloat) {
  return at::randn(shape, at::kFloat).to(type).requires_grad_(true);
}

TEST(TrainableParameters, LeavesFrozenOutAndNamesTiedOnce) {
  at::Tensor weight = leaf({3, 2}), bias = leaf({3}), frozen = at::randn({4});
  auto parameters = trainable_parameters(
      {{"a", weight}, {"b", bias}, {"f", frozen}, {"tied", weight}, {"none", at::Tensor()}});
  ASSERT_EQ(parameters.size(), 2u);
  EXPECT_EQ(parameters[0].name, "a");
  EXPECT_TRUE(parameters[0].decays);
  EXPECT_EQ(parameters[1].name, "b");
  EXPECT_FALSE(parameters[1].decays);
  EXPECT_TRUE(parameters[0].tensor.is_same(weight));
}

TEST(TrainableParameters, RefusesWhatItCannotTrain) {
  at::Tensor whole = at::randn({8});
  at::Tensor left = whole.narrow(0, 0, 5).detach().requires_grad_(true);
  at::Tensor right = whole.narrow(0, 4, 4).detach().requires_grad_(true);
  at::Tensor apart = whole.narrow(0, 5, 3).detach().requires_grad_(true);
  EXPECT_EQ(trainable_parameters({{"l", left}, {"r", apart}}).size(), 2u);
  using Named = std::vector<std::pair<std::string, at::Tensor>>;
  for (const auto& [named, part] : {std::pair(Named{{"l", left}, {"r", right}}, "memory shared with 'l'"),
                                    std::pair(Named{{"r", right}, {"l", left}}, "memory shared with 'r'"),
                                    std::pair(Named{{"x", leaf({2}) * 2}}, "leaf"),
                                    std::pair(Named{{"h", leaf({2}, at::kHalf)}}, "float32"),
                                    std::pair(Named{{"x", leaf({2})}, {"x", leaf({3})}}, "two different")})
    EXPECT_NE(error_of([&, &all = named] { trainable_parameters(all); }).find(part), std::string::npos)
        << part;
}

RC_GTEST_PROP(OwnedSlice, IsDisjointCompleteAndAligned, ()) {
  const auto numel = *rc::gen::inRange<std::int64_t>(0, 5000);
  const int size = *rc::gen::inRange(1, 12);
  const auto alignment = *rc::gen::element<std::int64_t>(1, 16, 64);
  std::int64_t at = 0, largest = 0, smallest = numel;
  for (int rank = 0; rank < size; ++rank) {
    const Range range = owned_slice(numel, rank, size, alignment);
    RC_ASSERT(range.begin == at);
    RC_ASSERT(range.size() >= 0);
    RC_ASSERT(range.end == numel || range.end % alignment == 0);
    largest = std::max(largest, range.size());
    smallest = std::min(smallest, range.size());
    at = range.end;
  }
  RC_ASSERT(at == numel);
  RC_ASSERT(largest - smallest < 2 * alignment);
}

RC_GTEST_PROP(PlanBuckets, HoldsEveryParameterOnceInReverseOrder, ()) {
  const auto sizes = *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, 200));
  const auto bucket_bytes = *rc::gen::element<std::int64_t>(1, 100, 1000, 4096, 1 << 20);
  const at::ScalarType types[] = {at::kFloat, at::kBFloat16, at::kDouble};
  std::vector<NamedParameter> parameters;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    auto tensor = at::empty({sizes[i]}, types[*rc::gen::inRange(0, 3)]).requires_grad_(true);
    parameters.push_back({"p" + std::to_string(i), tensor, i % 2 == 0});
  }
  std::set<std::size_t> seen;
  std::size_t earlier_last = parameters.size();
  for (const BucketPlan& plan : plan_buckets(parameters, bucket_bytes)) {
    std::int64_t at = 0;
    std::size_t before = parameters.size();
    for (const Slot& slot : plan.slots) {
      RC_ASSERT(seen.insert(slot.index).second);
      RC_ASSERT(slot.index < before);  // reverse order
      before = slot.index;
      RC_ASSERT(slot.offset >= at);
      RC_ASSERT(slot.offset % kSlotAlignment == 0);
      at = slot.offset + slot.numel;
      RC_ASSERT(slot.numel == sizes[slot.index]);
      RC_ASSERT(slot.name == parameters[slot.index].name);
      RC_ASSERT(slot.decays == parameters[slot.index].decays);
      RC_ASSERT(plan.dtype == parameters[slot.index].tensor.scalar_type());
    }
    RC_ASSERT(at <= plan.numel);
    const std::int64_t bytes = plan.numel * c10::elementSize(gradient_type(plan.dtype));
    RC_ASSERT(bytes <= bucket_bytes || plan.slots.size() == 1u);
    RC_ASSERT(plan.slots.back().index < earlier_last);  // buckets in the order in which they complete
    earlier_last = plan.slots.back().index;
  }
  RC_ASSERT(seen.size() == parameters.size());
}

TEST(PlanBuckets, RefusesABucketOfNothing) {
  EXPECT_NE(error_of([] { plan_buckets({}, 0); }).find("1 or more"), std::string::npos);
}

TEST(MakeBucket, MovesParametersWithoutChangingThem) {
  for (auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    std::vector<NamedParameter> parameters =
        trainable_parameters({{"w", leaf({5, 7}, type)},
                              {"t", at::randn({4, 6}).to(type).t().requires_grad_(true)},
                              {"b", leaf({3}, type)},
                              {"empty", leaf({0, 4}, type)}});
    std::vector<at::Tensor> values;
    for (auto& parameter : parameters) values.push_back(parameter.tensor.detach().clone());
    auto plans = plan_buckets(parameters, 1 << 20);
    ASSERT_EQ(plans.size(), 1u);
    auto gradients = at::zeros({plans[0].numel}, gradient_type(type));
    Bucket bucket = make_bucket(plans[0], parameters, gradients, 0, 1);
    EXPECT_EQ(bucket.owned.size(), bucket.plan.numel);
    EXPECT_EQ(bucket.master.is_same(bucket.parameters), type != at::kBFloat16);
    EXPECT_TRUE(at::equal(bucket.master.to(type), bucket.parameters));
    for (const Slot& slot : bucket.plan.slots) {
      const at::Tensor& parameter = parameters[slot.index].tensor;
      EXPECT_TRUE(at::equal(parameter, values[slot.index])) << slot.name;
      EXPECT_TRUE(parameter.requires_grad() && parameter.is_leaf());
      EXPECT_TRUE(is_slot_view(parameter, bucket.parameters, slot));
      EXPECT_EQ(is_slot_view(values[slot.index], bucket.parameters, slot), slot.numel == 0);
    }
    bucket.parameters.fill_(2);  // the model sees what happens to the buffer
    EXPECT_TRUE(at::equal(parameters[0].tensor, at::full_like(values[0], 2)));
    at::NoGradGuard no_grad;
    EXPECT_FALSE(
        is_slot_view(parameters[0].tensor.view({7, 5}), bucket.parameters, bucket.plan.slots.back()));
    EXPECT_FALSE(is_slot_view(at::Tensor(), bucket.parameters, bucket.plan.slots.back()));
  }
}

const Grid kTwoByTwo({{"pp", 2}, {"tp", 2}});

Layout::Named placements() {
  return {{"up", placed(kTwoByTwo, {6, 4}, {even_cut(kTwoByTwo, "tp", 0, {6})}, {0})},
          {"norm", placed(kTwoByTwo, {3}, {}, {0}, {"tp"})},
          {"last", placed(kTwoByTwo, {4, 4}, {}, {1})}};
}

TEST(Layout, PlacementsThatDifferBetweenRanksAreRefused) {
  using Change = std::function<void(Layout::Named&)>;
  const std::pair<Change, std::vector<const char*>> cases[] = {
      {[](auto& named) { named[1].second.summed.erase("tp"); },
       {"parameter 'norm'", "tp on rank 0", "on rank 2"}},
      {[](auto& named) { named[0].second.cuts[0].dim = 1; },
       {"parameter 'up'", "dimension 0 along axis 'tp'"}},
      {[](auto& named) { named[2].second.stages.clear(); }, {"parameter 'last'", "every stage on rank 2"}},
      {[](auto& named) { named.pop_back(); }, {"parameter 'last'", "no such parameter on rank 2"}},
      {[](auto& named) { named[0].first = "other"; }, {"'other' on rank 2"}},
      {[](auto&) {}, {"no error"}}};
  run_ranks(4, [&](World& world) {
    for (const auto& [change, parts] : cases) {
      Layout::Named named = placements();
      if (world.rank == 2) change(named);
      const std::string text = error_of([&] { Layout(Mesh(world, kTwoByTwo), named); });
      for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  });
}

TEST(Layout, NamesTwiceAndTensorsThatDoNotFitAreRefused) {
  run_ranks(4, [](World& world) {
    Layout::Named named = placements();
    const Layout layout(Mesh(world, kTwoByTwo), named);
    named.push_back(named.front());
    EXPECT_NE(error_of([&] { Layout(Mesh(world, kTwoByTwo), named); }).find("'up'"), std::string::npos);
    EXPECT_THROW(layout.parameter("none"), ConfigError);
    EXPECT_THROW(layout.local("up", at::zeros({2})), ConfigError);
    EXPECT_THROW(layout.whole("up", at::zeros({6, 4})), ConfigError);
  });
}

}  // namespace
}  // namespace isograd
