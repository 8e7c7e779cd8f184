#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "base/error_testing.hpp"
#include "isograd/tensor_parallel.hpp"
#include "isograd/world.hpp"

namespace isograd {
namespace {

using error_testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kHead = 3;

struct AttentionAndTied : torch::nn::Module {
  AttentionAndTied() {
    const auto values = [](at::IntArrayRef shape) {
      return at::arange(c10::multiply_integers(shape), at::kDouble).view(shape).clone();
    };
    // 6 heads of queries, 2 of keys, 2 of values in one tensor
    fused = register_parameter("layer.qkv.weight_", values({10 * kHead, 4}));
    out = register_parameter("out_weight", values({4, 6 * kHead}));
    norm = register_parameter("q_norm_weight", values({kHead}));
    tied = register_parameter("embedding", values({7, 4}));
    register_parameter("head", tied);
  }
  at::Tensor register_parameter(std::string name, at::Tensor tensor) {
    std::replace(name.begin(), name.end(), '.', '_');
    return torch::nn::Module::register_parameter(name, std::move(tensor));
  }
  at::Tensor fused, out, norm, tied;
};

std::vector<CutRule> rules() {
  return {cut_along("*qkv*", 0, kHead, {6 * kHead, 2 * kHead, 2 * kHead}), cut_along("out*", 1, kHead),
          summed_along("*_norm_*"), cut_along("embedding", 0)};
}

TEST(Cut, GivesEachRankItsRowsAndTheWholeBack) {
  run_ranks(2, [](World& world) {
    const Mesh mesh(world, Grid({{"tp", 2}}));
    AttentionAndTied model, whole;
    const Layout layout = cut(model, mesh, rules());
    EXPECT_EQ(layout.parameters().size(), 4u) << "tied ones once";
    EXPECT_EQ(model.fused.sizes(), (std::vector<std::int64_t>{5 * kHead, 4}));
    EXPECT_EQ(model.out.sizes(), (std::vector<std::int64_t>{4, 3 * kHead}));
    EXPECT_EQ(model.tied.size(0), world.rank == 0 ? 4 : 3);
    const std::int64_t r = world.rank;
    const at::Tensor own = at::cat({whole.fused.narrow(0, r * 9, 9), whole.fused.narrow(0, 18 + r * 3, 3),
                                    whole.fused.narrow(0, 24 + r * 3, 3)});
    EXPECT_TRUE(model.fused.equal(own));
    for (const auto& item : whole.named_parameters()) {
      if (item.key() == "head") continue;
      EXPECT_TRUE(layout.whole(item.key(), model.named_parameters()[item.key()]).equal(item.value()))
          << item.key();
    }
    EXPECT_TRUE(model.named_parameters()["head"].is_same(model.tied));
    EXPECT_EQ(layout.parameter("q_norm_weight").placement.summed, AxisSet{"tp"});
    EXPECT_TRUE(layout.parameter("out_weight").placement.summed.empty());
  });
}

TEST(Cut, RefusesWhatCannotBeMeant) {
  run_ranks(2, [](World& world) {
    const Mesh mesh(world, Grid({{"tp", 2}}));
    AttentionAndTied model;
    const auto refused = [&](std::vector<CutRule> with) {
      const std::string text = error_of([&] { cut(model, mesh, with); });
      EXPECT_EQ(model.fused.size(0), 10 * kHead) << "before anything is changed";
      EXPECT_EQ(model.tied.size(0), 7);
      return text;
    };
    EXPECT_THAT(refused({cut_along("embeding", 0)}),
                AllOf(HasSubstr("no parameter whose name matches"), HasSubstr("'embedding' is near")));
    EXPECT_THAT(refused({cut_along("out*", 0), cut_along("*_weight", 1)}),
                AllOf(HasSubstr("'out_weight'"), HasSubstr("which the rule for 'out*' matches too")));
    EXPECT_THAT(refused({cut_along("out*", 2)}), HasSubstr("dimension 2"));
    EXPECT_THAT(refused({cut_along("out*", 0, 4)}),
                AllOf(HasSubstr("1 piece of 4 rows"), HasSubstr("2 ranks along tp"), HasSubstr("at most 1")));
    EXPECT_THAT(refused({cut_along("*qkv*", 0, 4)}), HasSubstr("30 rows"));
    EXPECT_THAT(refused({cut_along("*qkv*", 0, kHead, {18, 6})}), HasSubstr("24"));
    EXPECT_THAT(refused({cut_along("out*", 0, 0)}), HasSubstr("pieces of 0 rows"));
    EXPECT_THAT(refused({{.name = "out*", .axis = "ep", .dim = 0}}), HasSubstr("ep"));
    EXPECT_THAT(refused({summed_along("out*", {"cp"})}), HasSubstr("cp"));
  });
}

// Names and shapes come from the model, so that ranks may disagree: all say so.
TEST(Cut, RefusesRulesThatDifferBetweenRanks) {
  run_ranks(2, [](World& world) {
    AttentionAndTied model;
    const auto own = world.rank == 0 ? cut_along("out*", 0) : cut_along("out*", 1);
    EXPECT_THAT(error_of([&] {
                  cut(model, Mesh(world, Grid({{"tp", 2}})), {own});
                }),
                AllOf(HasSubstr("'out_weight'"), HasSubstr("rank 0"), HasSubstr("rank 1")));
  });
}

}  // namespace
}  // namespace isograd
