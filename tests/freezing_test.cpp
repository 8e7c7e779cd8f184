// Parameters frozen and unfrozen in mid-run, under every strategy, against one process with LibTorch's AdamW.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "base/error_testing.hpp"
#include "isograd/optimizer.hpp"
#include "layout_life.hpp"

namespace isograd::layout_life {
namespace {

using isograd::testing::error_of;
using ::testing::HasSubstr;

// A parameter that is frozen in mid-run, one that was and is unfrozen, one that comes and goes.
void freeze(Net& net, int step) {
  net.block->mid.set_requires_grad(step < 2 || step > 4);
  net.block->shift.set_requires_grad(step >= 3);
  net.out.set_requires_grad(step % 2 == 0);
}

double freezing_error(const Way& way, int size, int replicas, bool planted) {
  constexpr int kSteps = 8;
  std::vector<double> errors(size);
  run_ranks(size, [&](World& world) {
    const Sharded<Net> net(std::make_shared<Net>());
    Net wanted;
    freeze(*net, 0);
    freeze(wanted, 0);
    const auto layout = way.make(net, Mesh(world, data_grid(world.size, {.dp_replicate = replicas})));
    const auto ours =
        adamw({.learning_rate = 0.02, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1});
    torch::optim::AdamWOptions decaying(0.02), plain(0.02);
    decaying.betas({0.9, 0.95}).weight_decay(0.1);
    plain.betas({0.9, 0.95}).weight_decay(0);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{wanted.table, wanted.out, wanted.block->mid},
                        std::make_unique<torch::optim::AdamWOptions>(decaying));
    groups.emplace_back(std::vector<at::Tensor>{wanted.block->shift},
                        std::make_unique<torch::optim::AdamWOptions>(plain));
    torch::optim::AdamW theirs(groups, decaying);
    for (int step = 0; step < kSteps; ++step) {
      freeze(*net, planted && step == 4 ? 1 : step);  // planted: trained where it should not be
      freeze(wanted, step);
      backward(*layout, net, world.rank, step);
      theirs.zero_grad();
      reference_backward(wanted, size, step);
      errors[world.rank] =
          std::max(errors[world.rank], planted ? 0 : worst(*layout, wanted, &DataParallel::View::gradient));
      update(*layout, *ours);
      theirs.step();
      errors[world.rank] =
          std::max(errors[world.rank], worst(*layout, wanted, &DataParallel::View::parameter));
      {
        const auto whole = layout->whole_parameters();
        errors[world.rank] = std::max(errors[world.rank],
                                      (net->block->shift - wanted.block->shift).abs().max().item<double>());
      }
    }
    EXPECT_EQ(ours->missed_updates().at("block.mid"), planted ? 2 : 3);
  });
  return *std::max_element(errors.begin(), errors.end());
}

TEST(Freezing, IsThatOfOneProcess) {
  for (const Way& way : ways())
    for (int size : {1, 2, 3, 4})
      for (int replicas : {1, 2}) {
        if (size % replicas != 0 || (replicas > 1 && way.name == "naive")) continue;
        EXPECT_LE(freezing_error(way, size, replicas, false), kExact) << way.name << " " << size;
      }
  EXPECT_GT(freezing_error(ways()[1], 2, 1, true), 1e-4);
}

TEST(Freezing, IsTheSameOnAllRanks) {
  using Change = std::function<void(Net & net, int rank)>;
  const auto told = [](const Way& way, const Change& change) {
    std::vector<std::string> said(3);
    try {
      run_ranks(3,
                [&](World& world) {
                  const Sharded<Net> net(std::make_shared<Net>());
                  const auto layout = way.make(net, world.group);
                  change(*net, world.rank);
                  said[world.rank] = error_testing::error_of<Error>([&] {
                    backward(*layout, net, world.rank, 0);
                    global_norm(layout->buckets(), 0.0, world.group);
                  });
                },
                {.timeout = std::chrono::seconds(5)});
    } catch (const std::exception&) {
    }
    return said;
  };
  for (const Way& way : ways()) {
    EXPECT_THAT(
        told(way, [](Net& net, int rank) { (rank == 1 ? net.out : net.table).set_requires_grad(false); })[0],
        HasSubstr("parameter 'table': found requires_grad true on rank 1 and false on rank 0"))
        << way.name;
    // The ranks on which nothing has changed ask nobody: whoever has changed something says so.
    EXPECT_THAT(told(way, [](Net& net, int rank) { net.out.set_requires_grad(rank != 1); })[1],
                HasSubstr("parameter 'out': found requires_grad changed on this rank"))
        << way.name;
  }
}

// Micro-batches add up in the bucket's type from the first step on, as of a parameter that was never frozen.
TEST(Freezing, TheFirstGradientOfWhatIsUnfrozenAddsUpInFp32) {
  for (const Way& way : ways())
    for (int size : {1, 2, 3})
      run_ranks(size, [&](World& world) {
        std::vector<at::Tensor> gradients;
        for (bool frozen : {false, true}) {
          const Sharded<Net> net(std::make_shared<Net>(at::kBFloat16));
          net->out.set_requires_grad(!frozen);
          const auto layout = way.make(net, world.group);
          net->out.set_requires_grad(true);
          layout->zero_gradients();
          for (int micro = 0; micro < 16; ++micro) {
            const at::Tensor loss = loss_of(net, world.rank, micro);
            layout->begin_backward(micro == 15);
            loss.backward();
          }
          layout->finish_reduction();
          for (const auto& view : layout->views())
            if (view.name == "out") gradients.push_back(view.gradient.clone());
          world.group.barrier();
        }
        EXPECT_EQ(gradients.at(1).scalar_type(), at::kFloat);
        EXPECT_TRUE(at::equal(gradients.at(0), gradients.at(1))) << way.name << " " << size;
      });
}

// The parameters that are trained at first need no sum: each rank has its own part of them.
TEST(Freezing, AParameterThatAloneIsSummedIsSummedOnceItIsUnfrozen) {
  for (const testing::Strategy& strategy : testing::strategies()) {
    if (strategy.sharded()) continue;
    for (int size : {2, 3})
      for (bool frozen : {false, true})
        run_ranks(size, [&](World& world) {
          const Grid grid({{"dp_shard", 1}, {"tp", size}});
          const at::Tensor cut = at::ones({4}, at::kDouble).requires_grad_();
          const at::Tensor shared = at::ones({4}, at::kDouble).requires_grad_(!frozen);
          TrainableParameters parameters = trainable_parameters({{"cut", cut}, {"shared", shared}});
          parameters.placements = {{"cut", placed(grid, {4 * size}, {even_cut(grid, "tp", 0, {4 * size})})},
                                   {"shared", placed(grid, {4}, {}, {}, {"tp"})}};
          const auto layout = strategy.make(parameters, Mesh(world, grid));
          for (int step = 0; step < 3; ++step) {
            shared.set_requires_grad(!frozen || step > 0);
            layout->zero_gradients();
            layout->begin_backward(true);
            ((cut * shared).sum() * (world.rank + 1)).backward();
            layout->finish_reduction();
            for (const auto& view : layout->views()) {
              const double wanted = view.name == "cut" ? world.rank + 1 : size * (size + 1) / 2.0;
              EXPECT_TRUE(at::equal(view.gradient, at::full({4}, wanted, at::kDouble)))
                  << strategy.name << " " << view.name << " " << step << " "
                  << view.gradient[0].item<double>();
            }
            layout->publish_parameters();
          }
        });
  }
}

TEST(Freezing, WhatIsUnfrozenInMidStepIsNamedUnderZero3) {
  for (const Way& way : ways()) {
    if (!way.units) continue;
    for (int size : {1, 2})
      run_ranks(size, [&](World& world) {
        const Sharded<Net> net(std::make_shared<Net>());
        net->block->shift.set_requires_grad(false);
        const auto layout = way.make(net, world.group);
        layout->zero_gradients();
        net->block->shift.set_requires_grad(true);
        EXPECT_THAT(error_of([&] { loss_of(net, world.rank, 0); }),
                    HasSubstr("a frozen parameter [6] that needs a gradient in mid-step"))
            << way.name << size;
        EXPECT_EQ(error_of([&] { backward(*layout, net, world.rank, 0); }), "no error") << way.name << size;
      });
  }
}

}  // namespace
}  // namespace isograd::layout_life
