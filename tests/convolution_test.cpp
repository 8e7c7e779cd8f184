// A user's own convolutional model of odd sizes, in fp64, fp32 and bf16 under every strategy: the gradient of
// one process, the same bits twice, and five updates.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "full_tests.hpp"
#include "isograd/verify.hpp"
#include "parallel/data/strategies_testing.hpp"
#include "planted.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kChannels = 5, kClasses = 3, kSide = 7;

at::Tensor drawn(at::IntArrayRef shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kDouble));
}

// Classes of images.
struct Net : torch::nn::Module {
  at::Tensor first, second, head, unused, frozen;
  Net() {
    first = register_parameter("first", drawn({kChannels, 2, 3, 3}, 1) * 0.3);
    second = register_parameter("second", drawn({kClasses, kChannels, 3, 3}, 2) * 0.3);
    head = register_parameter("head", drawn({kClasses}, 3));
    unused = register_parameter("unused", drawn({3}, 4));
    frozen = register_parameter("frozen", drawn({1, kClasses}, 5), false);
  }
  at::Tensor logits(const Batch& batch) {  // [F, classes]
    const at::Tensor images =
        batch.inputs.empty() ? at::zeros({0, 2, kSide, kSide}, at::kDouble) : batch.inputs[0];
    const at::Tensor x = at::tanh(at::conv2d(images.to(first.scalar_type()), first));
    return at::conv2d(x, second, {}, {2, 2}).mean({2, 3}) * head + frozen;
  }
};

VerifyModel make_model(at::ScalarType dtype) {
  auto net = std::make_shared<Net>();
  net->to(dtype);
  return verify_model(net, [](Net& self, const Batch& batch) { return self.logits(batch); });
}

// Micro-batches of 1 to 5 images, the last of them missing: at one per rank, the last rank has nothing.
MicroBatches make_batches(int ranks, int accumulation, std::int64_t step = 0) {
  MicroBatches batches;
  const int count = ranks * accumulation - (ranks > 1 ? 1 : 0);
  for (std::int64_t i = 0; i < count; ++i) {
    std::vector<at::Tensor> images;
    std::vector<std::int64_t> numbers, classes;
    for (std::int64_t j = 0; j < 1 + (3 * i) % 5; ++j) {
      numbers.push_back(j + 10 * i + 1000 * step);
      classes.push_back((numbers.back() * 7 + i) % kClasses);
      images.push_back(drawn({2, kSide, kSide}, 100 + static_cast<std::uint64_t>(numbers.back())));
    }
    batches.push_back(batch_of_samples({at::stack(images)}, at::tensor(classes, at::kLong), numbers));
  }
  return batches;
}

// Every strategy, with and without replicas.
std::vector<LayoutUnderTest> every_layout(const World& world) {
  std::vector<LayoutUnderTest> layouts = verify_layouts({"overlapped", "zero3"});
  for (const testing::Strategy& strategy : testing::strategies())
    for (const int replicas : {1, 2}) {
      if (world.size % replicas != 0 || (replicas > 1 && !strategy.sharded())) continue;
      layouts.push_back({strategy.name + (replicas > 1 ? ", 2 replicas" : ""),
                         [&world, strategy, replicas](std::vector<NamedParameter> parameters, const Group&) {
                           return strategy.make(
                               std::move(parameters),
                               Mesh(world, data_grid(world.size, {.dp_replicate = replicas})),
                               {.bucket_bytes = 500, .first_bucket_bytes = 100});
                         }});
    }
  return layouts;
}

Verdict verify_every_layout(int ranks, const MicroBatches& batches, const VerifyOptions& options) {
  Verdict verdict;
  run_ranks(ranks, [&](World& world) {
    Verdict own = verify(make_model, batches, every_layout(world), options, world);
    if (world.rank == 0) verdict = std::move(own);
  });
  EXPECT_GE(verdict.layouts.size(), ranks % 2 == 0 ? 14U : 9U);
  return verdict;
}

// Accumulated or not by turns, with precisions and optimizers; ISOGRAD_FULL_TESTS=1: each with each.
class Convolutions : public ::testing::TestWithParam<int> {
 protected:
  static bool left_out(int accumulation, bool first) {
    return !full_tests() && (accumulation == 1) == (first == (GetParam() % 2 == 0));
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Convolutions, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(Convolutions, HaveTheGradientOfOneProcess) {
  for (const int accumulation : {1, 3})
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      if (left_out(accumulation, dtype == at::kFloat)) continue;
      const auto batches = make_batches(GetParam(), accumulation);
      const Verdict verdict = verify_every_layout(GetParam(), batches, {.dtype = dtype});
      EXPECT_TRUE(verdict.passed) << to_text(verdict, 20);
      for (const LayoutVerdict& layout : verdict.layouts) {
        EXPECT_EQ(layout.e1.state, Grade::State::kPassed) << layout.name;
        EXPECT_EQ(layout.e2.state, Grade::State::kPassed) << layout.name;
        EXPECT_EQ(layout.e3.state, Grade::State::kPassed) << layout.name;
      }
    }
}

TEST_P(Convolutions, GoTheWayOfOneProcess) {
  for (const int accumulation : {1, 3})
    for (const OptimizerOptions& optimizer :
         {OptimizerOptions(SgdOptions{.learning_rate = 0.05, .momentum = 0.9}),
          OptimizerOptions(AdamWOptions{.learning_rate = 1e-2})}) {
      if (left_out(accumulation, std::holds_alternative<SgdOptions>(optimizer))) continue;
      const Verdict verdict = verify_every_layout(GetParam(), make_batches(GetParam(), accumulation),
                                                  {.updates = 5, .optimizer = optimizer});
      EXPECT_TRUE(verdict.passed) << to_text(verdict, 20);
      for (const LayoutVerdict& layout : verdict.layouts) {
        ASSERT_EQ(layout.trajectories.size(), 2U) << layout.name;
        EXPECT_EQ(layout.trajectories[1].updates, 5) << layout.name;
      }
    }
}

TEST(ConvolutionsPlanted, AnAverageOverRanksIsSeen) {
  const std::vector<LayoutUnderTest> averaged = {
      {"averaged", [](std::vector<NamedParameter> parameters, Group group) {
         return std::make_unique<planted::Averages>(bucketed(std::move(parameters), group, {}));
       }}};
  for (const int ranks : {2, 3, 4, 5, 8})
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      if (!full_tests() && (ranks % 2 == 0) == (dtype == at::kFloat)) continue;
      const Verdict verdict =
          verify(make_model, make_batches(ranks, 1), averaged, {.ranks = ranks, .dtype = dtype});
      EXPECT_FALSE(verdict.passed) << ranks;
      EXPECT_EQ(verdict.layouts.at(0).e1.state, Grade::State::kFailed) << ranks;
      EXPECT_EQ(verdict.layouts.at(0).e2.state, Grade::State::kFailed) << ranks;
    }
}

}  // namespace
}  // namespace isograd
