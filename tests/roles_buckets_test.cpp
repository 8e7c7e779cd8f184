// Parameters with placements of their own in the buckets of a data-parallel layout: summed and owned along
// the axes that each bucket carries.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "isograd/optimizer.hpp"
#include "parallel/data/strategies_testing.hpp"
#include "roles_toy.hpp"

namespace isograd::roles {
namespace {

using isograd::testing::error_of;
using isograd::testing::Strategy;

TrainableParameters held(const Layout& catalogue, const Layout::Named& named, Tensors& parameters) {
  std::vector<std::pair<std::string, at::Tensor>> own;
  for (auto& [name, value] : whole_model()) {
    parameters[name] = catalogue.local(name, value).requires_grad_();
    if (catalogue.parameter(name).held) own.emplace_back(name, parameters[name]);
  }
  TrainableParameters result = trainable_parameters(own);
  result.placements = named;
  return result;
}

class RolesInBuckets : public ::testing::TestWithParam<Sizes> {};
INSTANTIATE_TEST_SUITE_P(Grids, RolesInBuckets,
                         ::testing::Values(Sizes{.tp = 2}, Sizes{.tp = 3},
                                           Sizes{.dp_shard = 2, .ep = 2, .tp = 2},
                                           Sizes{.dp_shard = 4, .ep = 2}, Sizes{.tp = 5}, Sizes{.tp = 6},
                                           Sizes{.pp = 2, .tp = 2}, Sizes{.pp = 3},
                                           Sizes{.pp = 4, .dp_shard = 2}, Sizes{.pp = 3, .tp = 2},
                                           Sizes{.pp = 2, .dp_shard = 2, .ep = 2, .tp = 2},
                                           Sizes{.dp_replicate = 2, .dp_shard = 2, .ep = 2, .tp = 2}));

TEST_P(RolesInBuckets, GiveTheGradientAndTheNormOfOneProcess) {
  const Sizes sizes = GetParam();
  const Reference wanted = reference(sizes.dp_replicate * sizes.dp_shard);
  double squares = 0, numel = 0;
  for (const auto& [name, gradient] : wanted.gradients) {
    squares += gradient.square().sum().item<double>();
    numel += static_cast<double>(gradient.numel());
  }
  for (const Strategy& strategy : isograd::testing::strategies())
    run_ranks(sizes.ranks(), [&](World& world) {
      const Mesh mesh(world, grid_of(sizes));
      const Layout::Named named = placements(mesh.grid());
      const Layout catalogue(mesh, named);
      Tensors parameters, gradients;
      const auto layout = strategy.make(held(catalogue, named, parameters), mesh, {.bucket_bytes = 300});
      for (const Bucket& bucket : layout->buckets())
        for (const Slot& slot : bucket.plan.slots) {
          const Placement& placement = catalogue.parameter(slot.name).placement;
          EXPECT_EQ(bucket.plan.sync, sync_axes(placement, mesh.grid())) << slot.name;
        }
      for (int step = 0; step < 2; ++step) {  // the second in the order that the first has shown
        layout->zero_gradients();
        layout->begin_backward(true);
        backward(catalogue, parameters, tokens_of(mesh.place(mesh.data()), mesh.size(mesh.data())),
                 wanted.targets);
        layout->finish_reduction();
        std::map<std::string, at::Tensor> local;
        for (const auto& view : layout->views()) local[view.name] = view.gradient;
        for (const PlacedParameter& parameter : catalogue.parameters()) {
          const std::string& name = parameter.name;
          gradients[name] =
              catalogue.whole(name, parameter.held ? local.at(name) : at::empty({0}, at::kDouble));
        }
        for (const auto& [name, error] : errors(gradients, wanted.gradients))
          EXPECT_LT(error, 1e-10) << name << ", " << strategy.name;
        std::vector<double> none{0};
        Group all = mesh.all();
        const double norm = global_norm(layout->buckets(), none, all).norm;
        EXPECT_NEAR(norm * norm, squares, squares * (2e-10 + numel * 0x1p-53)) << strategy.name;  // twice E1
      }
    });
}

std::string refused(World& world, const Sizes& sizes, const DataParallelOptions& options,
                    const Layout::Named& changed = {}) {
  const Mesh mesh(world, grid_of(sizes));
  const Layout::Named named = placements(mesh.grid());
  const Layout catalogue(mesh, named);
  Tensors parameters;
  TrainableParameters own = held(catalogue, named, parameters);
  if (!changed.empty()) own.placements = changed;
  return error_of([&] { bucketed(own, mesh, options); });
}

TEST(RolesInBucketsRefused, WhatHasNoGroup) {
  using ::testing::AllOf;
  using ::testing::HasSubstr;
  run_ranks(2, [](World& world) {
    const Grid grid = grid_of({.tp = 2});
    EXPECT_THAT(refused(world, {.tp = 2}, {}, {{"none", placed(grid, {3})}}), HasSubstr("parameter 'none'"));
    EXPECT_THAT(refused(world, {.tp = 2}, {}, {{"up", placed(grid, {kFeatures, kHidden})}}),
                AllOf(HasSubstr("parameter 'up'"), HasSubstr("its part there, [15, 6]")));
  });
}

}  // namespace
}  // namespace isograd::roles
