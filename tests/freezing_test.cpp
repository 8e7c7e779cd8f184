// Parameters frozen and unfrozen in mid-run, under every strategy, against one process with LibTorch's AdamW.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include "base/error_testing.hpp"
#include "isograd/norm.hpp"
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
  for (const Way& way : ways()) {
    std::vector<std::string> said(3);
    try {
      run_ranks(3, [&](World& world) {
        const Sharded<Net> net(std::make_shared<Net>());
        const auto layout = way.make(net, world.group);
        (world.rank == 1 ? net->out : net->table).set_requires_grad(false);
        said[world.rank] = error_of([&] { backward(*layout, net, world.rank, 0); });
      });
    } catch (const std::exception&) {
    }
    EXPECT_THAT(said[0],
                HasSubstr("parameter 'table': found requires_grad true on rank 1 and false on rank 0"))
        << way.name;
  }
}

// The ranks on which nothing has changed ask nobody: whoever has changed something says so.
TEST(Freezing, OnOneRankAloneIsNamedThere) {
  for (const Way& way : ways()) {
    std::vector<std::string> said(3);
    try {
      run_ranks(3,
                [&](World& world) {
                  const Sharded<Net> net(std::make_shared<Net>());
                  const auto layout = way.make(net, world.group);
                  const auto optimizer = sgd({.learning_rate = 0.1});
                  if (world.rank == 1) net->out.set_requires_grad(false);
                  said[world.rank] = error_testing::error_of<Error>([&] {
                    backward(*layout, net, world.rank, 0);
                    global_norm(layout->buckets(), 0.0, world.group);
                  });
                },
                {.timeout = std::chrono::seconds(5)});
    } catch (const std::exception&) {
    }
    EXPECT_THAT(said[1], HasSubstr("parameter 'out': found requires_grad changed on this rank")) << way.name;
  }
}

}  // namespace
}  // namespace isograd::layout_life
