// A torch::nn module is refused by name on all ranks before a step for what it may not have; what a
// synchronised batch normalisation counts inside a unit.
#include "isograd/data_parallel.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/modules/rnn.h>

#include "isograd/error.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/world.hpp"
#include "parallel/data/strategies_testing.hpp"

namespace isograd {
namespace {

using testing::error_of;
using testing::strategies;
using testing::Strategy;

at::Tensor normal(at::IntArrayRef shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kDouble));
}

struct Plain : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", at::ones({2}));
};
struct Normalising : torch::nn::Module {
  torch::nn::BatchNorm2d norm = register_module("norm", torch::nn::BatchNorm2d(5));
};
struct Dropping : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", at::ones({2}));
  torch::nn::Dropout drop = register_module("drop", torch::nn::Dropout(0.5));
};
struct Tracking : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", at::ones({2}));
  torch::nn::InstanceNorm1d norm = register_module(
      "norm", torch::nn::InstanceNorm1d(torch::nn::InstanceNorm1dOptions(2).track_running_stats(true)));
};

TEST(ModuleRules, DropoutAndTrackedStatisticsAreRefused) {
  run_ranks(2, [](World& world) {
    Dropping dropping;
    for (bool training : {true, false}) {  // what is off for an evaluation comes on again
      dropping.train(training);
      const std::string said = error_of([&] { prepare_module(dropping, world.group); });
      EXPECT_NE(said.find("module 'drop': found dropout of 0.5 from the default generator"),
                std::string::npos)
          << said;
      EXPECT_NE(said.find("accept_dropout"), std::string::npos);
    }
    EXPECT_EQ(error_of([&] { prepare_module(dropping, world.group, {.accept_dropout = true}); }), "no error");
    dropping.drop->options.p(0);
    EXPECT_EQ(error_of([&] { prepare_module(dropping, world.group); }), "no error");
    torch::nn::LSTM lstm(torch::nn::LSTMOptions(2, 3).num_layers(2).dropout(0.1));
    EXPECT_NE(error_of([&] { prepare_module(*lstm, world.group); }).find("dropout of 0.1"),
              std::string::npos);
    lstm->options.num_layers(1);  // drops nothing between layers
    EXPECT_EQ(error_of([&] { prepare_module(*lstm, world.group); }), "no error");

    // Whatever else draws from the default generator.
    torch::nn::RReLU leaky;
    EXPECT_NE(error_of([&] { prepare_module(*leaky, world.group); }).find("random slopes"),
              std::string::npos);
    torch::nn::FractionalMaxPool2d pool(torch::nn::FractionalMaxPool2dOptions(2).output_size(3));
    EXPECT_NE(error_of([&] { prepare_module(*pool, world.group); }).find("random regions"),
              std::string::npos);
    EXPECT_EQ(error_of([&] { prepare_module(*pool, world.group, {.accept_dropout = true}); }), "no error");
    // A batch norm without running statistics has nothing that eval() could freeze.
    torch::nn::BatchNorm1d untracked(torch::nn::BatchNormOptions(3).track_running_stats(false));
    for (bool training : {true, false}) {
      untracked->train(training);
      const std::string refused = error_of([&] { prepare_module(*untracked, world.group); });
      EXPECT_NE(refused.find("batch normalisation over the rows of one rank"), std::string::npos) << refused;
      EXPECT_EQ(refused.find("in eval() too") != std::string::npos, !training) << refused;
    }
    torch::nn::BatchNorm1d tracked(torch::nn::BatchNormOptions(3));
    tracked->eval();
    EXPECT_EQ(error_of([&] { prepare_module(*tracked, world.group); }), "no error");

    Tracking tracking;
    const std::string said = error_of([&] { prepare_module(tracking, world.group); });
    EXPECT_NE(said.find("module 'norm': found instance normalisation that tracks"), std::string::npos)
        << said;
    tracking.eval();
    EXPECT_EQ(error_of([&] { prepare_module(tracking, world.group); }), "no error");
  });
}

// train() after an evaluation switches normalisations on that were frozen when the module was prepared.
TEST(ModuleRules, StatisticsSwitchedToTrainingLaterAreRefusedBeforeTheStep) {
  run_ranks(2, [](World& world) {
    for (const Strategy& strategy : strategies()) {
      Normalising module;
      module.eval();
      prepare_module(module, world.group);
      const TrainableParameters parameters = trainable_parameters(module);
      const auto layout =
          strategy.is_naive ? naive(parameters, world.group) : bucketed(parameters, world.group);
      layout->zero_gradients();
      module.train();
      const auto refused = [&] { layout->zero_gradients(); };
      EXPECT_NE(error_of(refused).find("module 'norm': found batch normalisation"), std::string::npos);
      module.norm->eval();
      EXPECT_EQ(error_of(refused), "no error");
    }
    const Sharded<Tracking> model(std::make_shared<Tracking>());
    EXPECT_NE(error_of([&] { bucketed(trainable_parameters(*model), world.group); }).find("module 'norm'"),
              std::string::npos);
    model->eval();
    const auto layout = fully_shard(model, {}, world.group);
    model->train();
    EXPECT_NE(error_of([&] { layout->zero_gradients(); }).find("module 'norm'"), std::string::npos);
  });
}

TEST(ModuleRules, ABufferThatNoRankCouldWriteToIsRefusedByAll) {
  for (int size : {2, 3})
    run_ranks(size, [](World& world) {
      for (const at::Tensor& buffer :
           {at::ones({1}).expand({5}), at::arange(4).view({1, 4}).expand({3, 4})}) {
        Plain net;
        net.register_buffer("spread", buffer);
        const std::string said = error_of([&] { prepare_module(net, world.group); });
        EXPECT_NE(said.find("'spread': found a parameter or buffer made with expand()"), std::string::npos)
            << said;
        EXPECT_EQ(error_of([&] { prepare_module(net, world.group, InitialValues::kMustAgree); }), "no error");
      }
      Plain net;  // not contiguous, one element a place
      net.register_buffer("turned", (at::arange(6) + world.rank).view({2, 3}).t());
      net.register_buffer("one", at::ones({1, 4}).expand({1, 4}));
      prepare_module(net, world.group);
      EXPECT_TRUE(at::equal(net.named_buffers()["turned"], at::arange(6).view({2, 3}).t()));
    });
}

TEST(ModuleRules, BuffersThatRanksChangedApartAreNamed) {
  run_ranks(3, [](World& world) {
    Plain net;
    at::Tensor seen = net.register_buffer("seen", at::zeros({2}));
    prepare_module(net, world.group);
    EXPECT_EQ(error_of([&] { check_buffers(net, world.group); }), "no error");
    seen.add_(world.rank == 2 ? 1 : 0);
    EXPECT_NE(error_of([&] {
                check_buffers(net, world.group);
              }).find("rank 2 and rank 0 differ in the values of parameter 0, which is 'seen'"),
              std::string::npos);
  });
}

// A unit whose first operation is a collective, on inputs that need no gradient.
struct NormalisedBlock : torch::nn::Module {
  std::shared_ptr<SyncBatchNorm> norm;
  at::Tensor weight;
  explicit NormalisedBlock(const Group& group) {
    norm =
        register_module("norm", std::make_shared<SyncBatchNorm>(SyncBatchNormOptions{.channels = 3}, group));
    norm->to(at::kDouble);
    weight = register_parameter("weight", normal({2, 3}, 5));
  }
  at::Tensor forward(at::Tensor x) { return at::linear(norm->forward(x), weight); }
};
struct NormalisedNet : torch::nn::Module {
  Sharded<NormalisedBlock> block;
  explicit NormalisedNet(const Group& group) : block(std::make_shared<NormalisedBlock>(group)) {
    register_module("block", block.ptr());
  }
  at::Tensor forward(at::Tensor x) { return block(x); }
};

TEST(ModuleRules, SynchronisedBatchNormInAUnitCountsItsRowsOnce) {
  for (int size : {1, 2, 3, 4})
    for (bool checkpoint : {false, true})
      for (bool input_needs_gradient : {false, true}) {
        const auto rows = [&](int rank) { return normal({2 + rank % 3, 3}, 60 + rank) * 2 + 1; };
        std::vector<at::Tensor> all;
        for (int rank = 0; rank < size; ++rank) all.push_back(rows(rank));
        at::Tensor mean = at::zeros({3}, at::kDouble), variance = at::ones({3}, at::kDouble);
        const at::Tensor scale = at::ones({3}, at::kDouble).requires_grad_(),
                         bias = at::zeros({3}, at::kDouble).requires_grad_(),
                         weight = normal({2, 3}, 5).requires_grad_();
        const at::Tensor out = at::linear(
            at::batch_norm(at::cat(all), scale, bias, mean, variance, true, 0.1, 1e-5, false), weight);
        out.square().sum().backward();
        run_ranks(size, [&](World& world) {
          std::vector<int> everyone;
          for (int rank = 0; rank < size; ++rank) everyone.push_back(rank);
          const Group apart = size > 1 ? world.subgroup(everyone, "normalisation") : Group::solo();
          const Sharded<NormalisedNet> net(std::make_shared<NormalisedNet>(apart));
          const auto layout = fully_shard(net, {net->block}, world.group, {.checkpoint = checkpoint});
          layout->zero_gradients();
          const at::Tensor loss = net(rows(world.rank).requires_grad_(input_needs_gradient)).square().sum();
          layout->begin_backward(true);
          loss.backward();
          layout->finish_reduction();
          const SyncBatchNorm& norm = *net->block->norm;
          EXPECT_EQ(norm.num_batches_tracked.item<std::int64_t>(), 1) << size << checkpoint;
          EXPECT_TRUE(at::allclose(norm.running_mean, mean, 1e-12, 1e-13)) << size << checkpoint;
          EXPECT_TRUE(at::allclose(norm.running_var, variance, 1e-12, 1e-13)) << size << checkpoint;
          for (const auto& view : layout->views()) {
            const at::Tensor& wanted = view.name == "block.weight"        ? weight
                                       : view.name == "block.norm.weight" ? scale
                                                                          : bias;
            const double error = (view.gradient - wanted.grad()).norm().item<double>();
            EXPECT_LE(error, 1e-10 * std::max(wanted.grad().norm().item<double>(), 1e-3)) << view.name;
          }
        });
      }
}

}  // namespace
}  // namespace isograd
