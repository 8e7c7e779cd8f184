// Groups of parameters with rates and decays of their own, under every strategy, against one process with
// LibTorch's optimizers.
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "isograd/optimizer.hpp"
#include "layout_life.hpp"

namespace isograd::layout_life {
namespace {

// `wanted`: of table, out, block.mid and block.shift, {factor of the rate, weight decay}.
const std::vector<ParameterGroup> kGroups = {{.pattern = "*.shift", .rate = 0.25, .weight_decay = 0.3},
                                             {.pattern = "table", .rate = 2},
                                             {.pattern = "o*", .weight_decay = 0}};
const std::vector<std::pair<double, double>> kWanted = {{2, 0.1}, {1, 0}, {1, 0.1}, {0.25, 0.3}};

template <typename Options>
std::vector<torch::optim::OptimizerParamGroup> groups_of(const Net& net, const Options& base) {
  const at::Tensor parameters[] = {net.table, net.out, net.block->mid, net.block->shift};
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (std::size_t i = 0; i < kWanted.size(); ++i) {
    Options own = base;
    own.lr(base.lr() * kWanted[i].first).weight_decay(kWanted[i].second);
    groups.emplace_back(std::vector<at::Tensor>{parameters[i]}, std::make_unique<Options>(own));
  }
  return groups;
}

std::unique_ptr<torch::optim::Optimizer> theirs_of(const Net& net, bool adam) {
  if (adam) {
    const auto base = torch::optim::AdamWOptions(0.02).betas({0.9, 0.95});
    return std::make_unique<torch::optim::AdamW>(groups_of(net, base), base);
  }
  const auto base = torch::optim::SGDOptions(0.05).momentum(0.9);
  return std::make_unique<torch::optim::SGD>(groups_of(net, base), base);
}

std::unique_ptr<Optimizer> ours_of(bool adam, const std::vector<ParameterGroup>& groups) {
  if (adam)
    return adamw({.learning_rate = 0.02,
                  .beta1 = 0.9,
                  .beta2 = 0.95,
                  .epsilon = 1e-8,
                  .weight_decay = 0.1,
                  .groups = groups});
  return sgd({.learning_rate = 0.05, .momentum = 0.9, .weight_decay = 0.1, .groups = groups});
}

// block.mid is frozen in two steps of six.
double groups_error(const Way& way, int size, bool adam, const std::vector<ParameterGroup>& groups) {
  std::vector<double> errors(static_cast<std::size_t>(size));
  run_ranks(size, [&](World& world) {
    const Sharded<Net> net(std::make_shared<Net>());
    Net wanted;
    const auto layout = way.make(net, world.group);
    const auto ours = ours_of(adam, groups);
    const auto theirs = theirs_of(wanted, adam);
    double& error = errors[static_cast<std::size_t>(world.rank)];
    for (int step = 0; step < 6; ++step) {
      for (const at::Tensor& mid : {net->block->mid, wanted.block->mid})
        at::Tensor(mid).set_requires_grad(step % 3 != 1);
      backward(*layout, net, world.rank, step);
      theirs->zero_grad();
      reference_backward(wanted, size, step);
      update(*layout, *ours);
      theirs->step();
      error = std::max(error, worst(*layout, wanted, &DataParallel::View::parameter));
    }
  });
  return *std::max_element(errors.begin(), errors.end());
}

TEST(ParameterGroups, AreThoseOfOneProcess) {
  for (const Way& way : ways())
    for (const int size : {1, 2, 3})  // the third rank has no tokens
      for (const bool adam : {true, false})
        EXPECT_LE(groups_error(way, size, adam, kGroups), kExact) << way.name << " " << size << " " << adam;
}

// Planted: a group left out, a rate or a decay of another.
TEST(ParameterGroups, OfOtherNumbersAreSeen) {
  for (const Way& way : {ways().front(), ways().back()})
    for (const bool adam : {true, false})
      for (std::size_t i = 0; i < kGroups.size(); ++i) {
        auto wrong = kGroups;
        wrong[i] = {
            .pattern = wrong[i].pattern, .rate = 1.01 * wrong[i].rate, .weight_decay = wrong[i].weight_decay};
        EXPECT_GT(groups_error(way, 2, adam, wrong), 1e-6) << way.name << " " << i;
        wrong.erase(wrong.begin() + static_cast<std::ptrdiff_t>(i));
        EXPECT_GT(groups_error(way, 2, adam, wrong), 1e-5) << way.name << " " << i;
      }
}

}  // namespace
}  // namespace isograd::layout_life
