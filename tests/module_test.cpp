// A convolutional torch::nn module of odd sizes under every strategy, with synchronised batch normalisation,
// against LibTorch's own on one process and the whole batch.
#include "isograd/data_parallel.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/batchnorm.h>

#include <map>
#include <optional>

#include "isograd/error.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/world.hpp"
#include "parallel/data/strategies_testing.hpp"

namespace isograd {
namespace {

using testing::error_of;
using testing::strategies;
using testing::Strategy;

constexpr std::int64_t kChannels = 5, kClasses = 3, kSide = 7;

at::Tensor random(at::IntArrayRef shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kDouble));
}

struct Convolution : torch::nn::Module {
  at::Tensor weight;
  std::int64_t stride;
  Convolution(at::IntArrayRef shape, std::uint64_t seed, std::int64_t stride_) : stride(stride_) {
    weight = register_parameter("weight", random(shape, seed) * 0.3);
  }
  at::Tensor forward(const at::Tensor& x) { return at::conv2d(x, weight, {}, {stride, stride}); }
};
// Convolution, normalisation, convolution with a stride, mean over places, classes. The normalisation comes
// in as a function: synchronised, LibTorch's, or none. Its convolutions may be units of ZeRO-3.
struct Net : torch::nn::Module {
  at::Tensor head, unused, frozen;
  Sharded<Convolution> first, second;
  std::function<at::Tensor(const at::Tensor&)> normalise;
  explicit Net(std::uint64_t seed = 1)
      : first(std::make_shared<Convolution>(at::IntArrayRef{kChannels, 2, 3, 3}, seed, 1)),
        second(std::make_shared<Convolution>(at::IntArrayRef{kClasses, kChannels, 3, 3}, seed + 1, 2)) {
    head = register_parameter("head", random({kClasses}, seed + 2));
    unused = register_parameter("unused", random({3}, seed + 3));
    frozen = register_parameter("frozen", random({1, kClasses}, seed + 4), false);
    register_module("first", first.ptr());
    register_module("second", second.ptr());
  }
  at::Tensor forward(const at::Tensor& images) {  // [N, 2, side, side] -> [N, classes]
    at::Tensor x = first(images);
    if (normalise) x = normalise(x);
    return second(at::tanh(x)).mean({2, 3}) * head + frozen;
  }
};

// Rank r has r % 4 images in its micro-batch m, another number in the next: some ranks have none.
std::int64_t rows_of(int rank, int m) { return (2 * rank + 3 * m) % 4; }
at::Tensor images_of(int rank, int m) {
  return random({rows_of(rank, m), 2, kSide, kSide}, 100 + static_cast<std::uint64_t>(rank * 10 + m));
}
at::Tensor loss_sum(const at::Tensor& output, int m) { return (output - 0.1 * m).square().sum(); }

std::int64_t total_rows(int size, int micro) {
  std::int64_t rows = 0;
  for (int rank = 0; rank < size; ++rank)
    for (int m = 0; m < micro; ++m) rows += rows_of(rank, m);
  return rows;
}

// One process, plain convolutions: micro-batch m is all ranks' rows together.
std::map<std::string, at::Tensor> reference(int size, int micro, bool with_norm) {
  const Net net;
  const at::Tensor weight = at::ones({kChannels}, at::kDouble).requires_grad_(),
                   bias = at::zeros({kChannels}, at::kDouble).requires_grad_();
  for (int m = 0; m < micro; ++m) {
    std::vector<at::Tensor> all;
    for (int rank = 0; rank < size; ++rank) all.push_back(images_of(rank, m));
    const at::Tensor images = at::cat(all);
    if (images.size(0) == 0) continue;
    at::Tensor x = at::conv2d(images, net.first->weight);
    if (with_norm) x = at::batch_norm(x, weight, bias, {}, {}, true, 0.1, 1e-5, false);
    x = at::conv2d(at::tanh(x), net.second->weight, {}, {2, 2}).mean({2, 3}) * net.head + net.frozen;
    (loss_sum(x, m) / static_cast<double>(total_rows(size, micro))).backward();
  }
  std::map<std::string, at::Tensor> gradients = {{"first.weight", net.first->weight.grad()},
                                                 {"second.weight", net.second->weight.grad()},
                                                 {"head", net.head.grad()},
                                                 {"unused", at::zeros({3}, at::kDouble)}};
  if (with_norm) gradients["norm.weight"] = weight.grad(), gradients["norm.bias"] = bias.grad();
  return gradients;
}

enum class Norm { kNone, kSynchronised, kOwnRows };

// A strategy on flat buckets or, with none, the convolutions as units.
struct Way {
  std::optional<Strategy> flat{};
  FullyShardOptions units{};
  int replicas = 1;
};

double worst_error(const Way& way, int size, int micro, Norm norm) {
  const auto wanted = reference(size, micro, norm != Norm::kNone);
  std::vector<double> worst(size);
  run_ranks(size, [&](World& world) {
    std::vector<int> everyone;
    for (int rank = 0; rank < size; ++rank) everyone.push_back(rank);
    Group apart = size > 1 ? world.subgroup(everyone, "normalisation") : Group::solo();
    const Sharded<Net> net(std::make_shared<Net>(world.rank == 0 ? 1 : 50));  // rank 0 has the right values
    auto normalisation = std::make_shared<SyncBatchNorm>(SyncBatchNormOptions{.channels = kChannels},
                                                         norm == Norm::kSynchronised ? apart : Group::solo());
    normalisation->to(at::kDouble);
    if (norm != Norm::kNone) {
      net->register_module("norm", normalisation);
      net->normalise = [&](const at::Tensor& x) {
        return x.size(0) > 0 || norm == Norm::kSynchronised ? normalisation->forward(x) : x;
      };
    }
    prepare_module(*net, world.group);
    std::unique_ptr<DataParallel> layout;
    if (way.flat)
      layout = way.flat->make(trainable_parameters(*net), world.group, {.bucket_bytes = 300});
    else
      layout = fully_shard(net, {net->first, net->second}, testing::mesh_of_replicas(world, way.replicas),
                           way.units);
    layout->zero_gradients();
    for (int m = 0; m < micro; ++m) {
      const at::Tensor loss =
          loss_sum(net(images_of(world.rank, m)), m) / static_cast<double>(total_rows(size, micro));
      layout->begin_backward(m + 1 == micro);
      loss.backward();
    }
    layout->finish_reduction();
    const auto views = layout->views();
    ASSERT_EQ(views.size(), wanted.size());
    for (const auto& view : views) {
      const at::Tensor& expected = wanted.at(view.name);
      const double scale = std::max(expected.norm().item<double>(), 1e-3);
      worst[world.rank] =
          std::max(worst[world.rank], (view.gradient - expected).norm().item<double>() / scale);
    }
  });
  return *std::max_element(worst.begin(), worst.end());
}

TEST(Module, ConvolutionsHaveTheGradientOfOneProcess) {
  std::vector<Way> ways;
  for (const Strategy& strategy : strategies()) ways.push_back({.flat = strategy});
  for (const FullyShardOptions& options : {FullyShardOptions{},
                                           {.reshard_after_forward = false},
                                           {.checkpoint = true},
                                           {.reduce_once = true},
                                           {.share_parameters = true}})
    for (int replicas : {1, 2}) ways.push_back({.units = options, .replicas = replicas});
  double worst = 0;
  for (std::size_t w = 0; w < ways.size(); ++w)
    for (int size : {1, 2, 3, 4, 5, 8})
      for (int micro : {1, 3}) {
        if (total_rows(size, micro) == 0 || size % ways[w].replicas != 0) continue;
        const double error = worst_error(ways[w], size, micro, Norm::kNone);
        worst = std::max(worst, error);
        EXPECT_LT(error, 1e-10) << "way " << w << ", " << size << " ranks, " << micro << " micro-batches";
      }
  std::printf("largest error of any parameter: %.2e of its norm (allowed 1e-10)\n", worst);
}

TEST(Module, SynchronisedBatchNormIsThatOfOneProcess) {
  std::vector<Way> ways{{}};
  for (const Strategy& strategy : strategies()) ways.push_back({.flat = strategy});
  for (std::size_t w = 0; w < ways.size(); ++w)
    for (int size : {1, 2, 3, 5}) {
      if (total_rows(size, 3) == 0) continue;
      EXPECT_LT(worst_error(ways[w], size, 3, Norm::kSynchronised), 1e-10) << w << " " << size;
      if (size > 1) {  // planted: each rank's own rows
        EXPECT_GT(worst_error(ways[w], size, 3, Norm::kOwnRows), 1e-4) << w << " " << size;
      }
    }
}

TEST(Module, RunningStatisticsAreLibTorchs) {
  run_ranks(3, [](World& world) {
    SyncBatchNorm ours({.channels = kChannels}, world.group);
    ours.to(at::kDouble);
    at::Tensor mean = at::zeros({kChannels}, at::kDouble), variance = at::ones({kChannels}, at::kDouble);
    for (int m = 0; m < 3; ++m) {
      std::vector<at::Tensor> all;
      for (int rank = 0; rank < 3; ++rank) all.push_back(images_of(rank, m));
      const at::Tensor images = at::conv2d(at::cat(all), random({kChannels, 2, 1, 1}, 3));
      at::batch_norm(images, {}, {}, mean, variance, true, 0.1, 1e-5, false);
      ours.forward(at::conv2d(images_of(world.rank, m), random({kChannels, 2, 1, 1}, 3)));
    }
    EXPECT_TRUE(at::allclose(ours.running_mean, mean, 1e-12, 1e-13));
    EXPECT_TRUE(at::allclose(ours.running_var, variance, 1e-12, 1e-13));
    ours.eval();
    const at::Tensor x = random({2, kChannels, 3}, 5);
    EXPECT_TRUE(at::allclose(
        ours.forward(x), at::batch_norm(x, ours.weight, ours.bias, mean, variance, false, 0.1, 1e-5, false),
        1e-12, 1e-13));
  });
}

struct WithBatchNorm : torch::nn::Module {
  torch::nn::BatchNorm2d norm{kChannels};
  WithBatchNorm() { register_module("norm", norm); }
};

TEST(Module, IsMadeTheSameOnAllRanksOrRefused) {
  run_ranks(3, [](World& world) {
    Net same, other(world.rank == 1 ? 9 : 1);
    EXPECT_EQ(error_of([&] { prepare_module(same, world.group, InitialValues::kMustAgree); }), "no error");
    const std::string values =
        error_of([&] { prepare_module(other, world.group, InitialValues::kMustAgree); });
    EXPECT_NE(values.find("rank 1 and rank 0 differ in the values of parameter 0, which is 'head'"),
              std::string::npos)
        << values;
    prepare_module(other, world.group);
    EXPECT_TRUE(at::equal(other.second->weight, Net().second->weight));
    EXPECT_TRUE(at::equal(other.frozen, Net().frozen));

    // Buffers count, with their own types.
    Net buffered;
    buffered.register_buffer("seen", at::full({}, world.rank, at::kLong));
    EXPECT_NE(
        error_of([&] { prepare_module(buffered, world.group, InitialValues::kMustAgree); }).find("'seen'"),
        std::string::npos);
    prepare_module(buffered, world.group);
    EXPECT_EQ(buffered.named_buffers()["seen"].item<std::int64_t>(), 0);
    Net wide;
    wide.register_buffer("seen", at::zeros({world.rank == 2 ? 3 : 2}));
    EXPECT_NE(error_of([&] { prepare_module(wide, world.group); }).find("name, shape or dtype"),
              std::string::npos);

    WithBatchNorm normalised;
    const std::string refused = error_of([&] { prepare_module(normalised, world.group); });
    EXPECT_NE(refused.find("module 'norm': found batch normalisation"), std::string::npos) << refused;
    EXPECT_NE(refused.find("SyncBatchNorm"), std::string::npos);
    normalised.eval();
    EXPECT_EQ(error_of([&] { prepare_module(normalised, world.group); }), "no error");
    EXPECT_NE(error_of([&] { SyncBatchNorm({.channels = 0}, world.group); }).find("channels"),
              std::string::npos);
    SyncBatchNorm three({.channels = 3}, Group::solo());
    EXPECT_NE(error_of([&] { three.forward(at::zeros({2, 4, 5})); }).find("[N, 3, ...]"), std::string::npos);
  });
}

}  // namespace
}  // namespace isograd
