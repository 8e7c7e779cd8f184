#include "isograd/data_parallel.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <barrier>
#include <chrono>
#include <stdexcept>
#include <thread>

#include "isograd/error.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/world.hpp"
#include "layout/flat.hpp"
#include "parallel/data/flat_parameters.hpp"
#include "parallel/data/strategies_testing.hpp"

namespace isograd {
namespace {

at::Tensor leaf(at::Tensor values) { return values.detach().clone().requires_grad_(true); }

std::vector<NamedParameter> named(const std::vector<at::Tensor>& tensors, const std::string& prefix = "p") {
  std::vector<std::pair<std::string, at::Tensor>> list;
  for (const at::Tensor& tensor : tensors) list.emplace_back(prefix + std::to_string(list.size()), tensor);
  return trainable_parameters(list);
}

using testing::error_of;
using testing::strategies;
using testing::Strategy;

std::vector<at::Tensor> odd_parameters() {
  std::vector<at::Tensor> tensors;
  for (auto shape : std::vector<std::vector<std::int64_t>>{{1}, {3, 5}, {0, 2}, {33}, {7, 1, 3}, {130}})
    tensors.push_back(leaf(at::ones(shape, at::kDouble)));
  return tensors;
}

TEST(DataParallel, ParametersLiveInFlatBuffersAndSeeUpdates) {
  for (const Strategy& strategy : strategies()) {
    auto tensors = odd_parameters();
    auto layout = strategy.make(named(tensors), Group::solo(), {.bucket_bytes = 300});
    for (Bucket& bucket : layout->buckets()) bucket.parameters.fill_(4);
    for (const at::Tensor& tensor : tensors)
      EXPECT_TRUE(at::equal(tensor, at::full_like(tensor.detach(), 4)));
  }
}

TEST(Bucketed, AloneItKeepsGradientsInTheBucket) {
  at::Tensor weight = leaf(at::randn({4, 4}));
  auto layout = bucketed(named({weight}), Group::solo(), {});
  layout->zero_gradients();
  layout->begin_backward(true);
  (weight * 3).sum().backward();
  layout->finish_reduction();
  EXPECT_EQ(weight.grad().const_data_ptr(), layout->buckets()[0].gradients.const_data_ptr());
  EXPECT_EQ(layout->buckets()[0].master.const_data_ptr(), weight.const_data_ptr());
  EXPECT_TRUE(at::equal(layout->views()[0].gradient, at::full({4, 4}, 3.f)));
}

// 1 + 256 · 2⁻⁹: in bf16 every addition would be lost.
TEST(DataParallel, AddsBf16MicroBatchesUpInFp32) {
  for (const Strategy& strategy : strategies())
    run_ranks(2, [&](World& world) {
      at::Tensor p = leaf(at::ones({3}).to(at::kBFloat16));
      auto layout = strategy.make(named({p}), world.group, {});
      layout->zero_gradients();
      for (int i = 0; i <= 256; ++i) {
        layout->begin_backward(i == 256);
        (p * (i == 0 ? 1.0 : 0x1p-9)).sum().backward();
      }
      layout->finish_reduction();
      EXPECT_EQ(layout->views()[0].gradient.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(layout->views()[0].gradient, at::full({3}, 3.f)));
    });
}

TEST(Bucketed, NoticesBrokenViews) {
  const auto broken_by = [](const std::function<void(DataParallel&, at::Tensor&, at::Tensor&)>& act,
                            int size) {
    std::vector<std::string> errors(size);
    std::barrier all_refused(size);  // a rank that left would be what the others complain about
    run_ranks(size, [&](World& world) {
      at::Tensor used = leaf(at::ones({3})), unused = leaf(at::ones({2}));
      auto layout = bucketed(named({used, unused}), world.group, {});
      errors[world.rank] = error_of([&] {
        layout->zero_gradients();
        layout->begin_backward(true);
        act(*layout, used, unused);
        layout->finish_reduction();
      });
      all_refused.arrive_and_wait();
    });
    for (auto& error : errors)
      if (error != errors[0]) return "ranks disagree: " + error + " / " + errors[0];
    return errors[0];
  };
  for (int size : {1, 2}) {
    EXPECT_EQ(broken_by([](auto&, auto& used, auto&) { used.sum().backward(); }, size), "no error");
    const std::string none = broken_by(
        [](auto&, auto& used, auto&) {
          used.sum().backward();
          used.mutable_grad() = at::Tensor();  // what Module::zero_grad() does: a gradient is lost
        },
        size);
    EXPECT_NE(none.find("parameter 'p0': found a .grad that is no longer the view"), std::string::npos)
        << none;
    const std::string between = broken_by(
        [](auto& layout, auto& used, auto&) {
          layout.zero_gradients();
          layout.begin_backward(false);
          used.sum().backward();
          used.mutable_grad() = at::Tensor();
          layout.begin_backward(true);
          used.sum().backward();
        },
        size);
    EXPECT_NE(between.find("parameter 'p0': found a .grad that is no longer the view"), std::string::npos)
        << between;
    // Before the first gradient there is nothing to lose.
    EXPECT_EQ(broken_by(
                  [](auto&, auto& used, auto& unused) {
                    used.mutable_grad() = unused.mutable_grad() = at::Tensor();
                    used.sum().backward();
                  },
                  size),
              "no error");
    const std::string graph =
        broken_by([](auto&, auto& used,
                     auto&) { used.square().sum().backward({}, /*keep_graph=*/true, /*create_graph=*/true); },
                  size);
    EXPECT_NE(graph.find("create_graph"), std::string::npos) << graph;
    const std::string moved =
        broken_by([](auto&, auto&, auto& unused) { unused.set_data(unused.detach().clone()); }, size);
    EXPECT_NE(moved.find("'p1': found values that no longer live"), std::string::npos) << moved;
  }
  const std::string twice = broken_by(
      [](auto&, auto& used, auto& unused) {
        (used.sum() + unused.sum()).backward();
        used.sum().backward();
      },
      2);
  EXPECT_NE(twice.find("a second gradient"), std::string::npos) << twice;
  const std::string announced =
      broken_by([](auto& layout, auto&, auto&) { layout.begin_backward(false); }, 2);
  EXPECT_NE(announced.find("announced as the last"), std::string::npos) << announced;
}

TEST(Bucketed, TakesItsHooksAndGradientsWithIt) {
  run_ranks(2, [](World& world) {
    at::Tensor p = leaf(at::ones({3}));
    {
      auto first = bucketed(named({p}), world.group, {});
      EXPECT_NE(error_of([&] { bucketed(named({p}), world.group, {}); }).find("already there"),
                std::string::npos);
    }
    EXPECT_FALSE(p.grad().defined());
    p.sum().backward();
    EXPECT_TRUE(at::equal(p.grad(), at::ones({3})));
    auto second = bucketed(named({p}), world.group, {});
    second->zero_gradients();
    second->begin_backward(true);
    p.sum().backward();
    second->finish_reduction();
    EXPECT_TRUE(at::equal(p.grad(), at::full({3}, 2.f)));
  });
}

TEST(CheckParameters, NamesTheFirstThatDiffersOnEveryRank) {
  const auto message = [](const std::function<std::vector<at::Tensor>(int rank)>& make, bool check,
                          const std::string& prefix_on_rank_1 = "p") {
    std::vector<std::string> errors(3);
    run_ranks(3, [&](World& world) {
      const auto parameters = named(make(world.rank), world.rank == 1 ? prefix_on_rank_1 : "p");
      errors[world.rank] = error_of([&] { bucketed(parameters, world.group, {.check_parameters = check}); });
    });
    for (auto& error : errors)
      if ((error == "no error") != (errors[0] == "no error")) return std::string("ranks disagree");
    return errors[1];
  };
  const auto same = [](int) { return std::vector{leaf(at::ones({3})), leaf(at::ones({2, 2}))}; };
  EXPECT_EQ(message(same, true), "no error");
  const auto values = [](int rank) {
    return std::vector{leaf(at::ones({3})), leaf(at::ones({2, 2}) * (rank == 2 ? 1.0000001 : 1))};
  };
  EXPECT_NE(
      message(values, true).find("rank 2 and rank 0 differ in the values of parameter 1, which is 'p1'"),
      std::string::npos)
      << message(values, true);
  EXPECT_EQ(message(values, false), "no error");
  const auto shapes = [](int rank) {
    return std::vector{leaf(rank == 1 ? at::ones({3}) : at::ones({1, 3}))};
  };
  EXPECT_NE(message(shapes, true).find("rank 1 and rank 0 differ in the name, shape or dtype of parameter 0"),
            std::string::npos);
  const std::string other_name = message(same, true, "layer.p");
  EXPECT_NE(other_name.find("rank 1 and rank 0 differ in the name, shape or dtype of parameter 0, which is "
                            "'layer.p0'"),
            std::string::npos)
      << other_name;
  const auto types = [](int rank) {
    return std::vector{leaf(at::ones({3}, rank ? at::kFloat : at::kDouble))};
  };
  EXPECT_NE(message(types, true).find("dtype of parameter 0"), std::string::npos);
  const auto counts = [](int rank) { return std::vector<at::Tensor>(rank + 1, at::Tensor()); };
  const auto numbers = [&](int rank) {
    auto tensors = counts(rank);
    for (auto& tensor : tensors) tensor = leaf(at::ones({2}));
    return tensors;
  };
  EXPECT_NE(message(numbers, true).find("2 trainable parameters on rank 1, between 1 and 3"),
            std::string::npos)
      << message(numbers, true);
}

// On a device: tests/test_device.py and tests/device_check.cpp.
TEST(DataParallel, OffloadIsRefusedInHostMemory) {
  for (int size : {1, 3})
    run_ranks(size, [&](World& world) {
      const auto tensors = odd_parameters();
      const std::string wanted = "where they already are";
      for (const Strategy& strategy : strategies()) {
        const auto refused = [&] { strategy.make(named(tensors), world.group, {.offload = true}); };
        EXPECT_NE(error_of(refused).find(wanted), std::string::npos) << strategy.name;
        EXPECT_EQ(error_of([&] { strategy.make(named(tensors), world.group); }), "no error");
      }
      const UnitHandle root([&] { return tensors; });
      const auto refused = [&] {
        fully_shard(root, {{"p", tensors[1]}}, {}, world.group, {.offload = true});
      };
      EXPECT_NE(error_of(refused).find(wanted), std::string::npos);
    });
}

TEST(WaitClock, CountsWhatIsNestedOnce) {
  using Clock = std::chrono::steady_clock;
  WaitClock clock;
  const auto pause = [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
  const auto start = Clock::now();
  clock.during([&] {
    clock.during(pause);
    clock.during(pause);
  });
  const double outside = std::chrono::duration<double>(Clock::now() - start).count();
  EXPECT_GE(clock.seconds(), 0.04);
  EXPECT_LE(clock.seconds(), outside);
  EXPECT_THROW(clock.during([] { throw std::runtime_error("lost"); }), std::runtime_error);
  const double before = clock.seconds();
  clock.during(pause);
  EXPECT_GE(clock.seconds(), before + 0.02);
}

// Without overlap all of a reduction is exposed: also what is done while it is launched, the others being
// there already.
TEST(DataParallel, ReductionsWithoutOverlapAreExposed) {
  constexpr std::int64_t kNumel = 1 << 20;
  for (const bool is_naive : {false, true})
    run_ranks(2, [&](World& world) {
      at::Tensor parameter = at::zeros({kNumel}).requires_grad_(true);
      const auto layout = is_naive ? naive({{"p", parameter, true}}, world.group)
                                   : bucketed({{"p", parameter, true}}, world.group,
                                              {.stage = 1, .bucket_bytes = 1 << 16, .overlap = false});
      layout->zero_gradients();
      layout->begin_backward(true);
      (parameter * parameter).sum().backward();
      EXPECT_EQ(layout->exposed_seconds(), 0);
      double exposed = 0;
      const auto all_of = [&](auto&& action) {
        const auto start = std::chrono::steady_clock::now();
        action();
        const double all = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        EXPECT_GT(layout->exposed_seconds() - exposed, 0.5 * all);
        EXPECT_LE(layout->exposed_seconds() - exposed, all);
        exposed = layout->exposed_seconds();
      };
      if (is_naive) layout->begin_backward(true);  // moves the gradient to its bucket
      all_of([&] { layout->finish_reduction(); });
      if (!is_naive) all_of([&] { layout->publish_parameters(); });
    });
}

// Placements that are of no parameter, or do not fit what a rank holds.
TEST(DataParallel, PlacementsOfOtherParametersOrPartsAreRefused) {
  run_ranks(2, [](World& world) {
    const Mesh mesh(world, Grid({{"dp_shard", 1}, {"tp", 2}}));
    TrainableParameters parameters = trainable_parameters({{"up", leaf(at::ones({3, 6}))}});
    for (const auto& [named, part] :
         {std::pair(Layout::Named{{"none", placed(mesh.grid(), {3})}}, "parameter 'none'"),
          std::pair(Layout::Named{{"up", placed(mesh.grid(), {6, 6})}}, "its part there, [6, 6]")}) {
      parameters.placements = named;
      const std::string text = error_of([&] { bucketed(parameters, mesh); });
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  });
}

}  // namespace
}  // namespace isograd
