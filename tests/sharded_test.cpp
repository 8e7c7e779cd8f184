// Memory and traffic of sharded and shared strategies.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "isograd/error.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/random.hpp"
#include "isograd/world.hpp"
#include "layout/flat.hpp"
#include "parallel/data/strategies_testing.hpp"

namespace isograd {
namespace {

using testing::error_of;
using testing::mesh_of_replicas;
using testing::strategies;
using testing::Strategy;

constexpr double kRate = 0.125;  // a power of two: the plain reference rounds nothing away

// Integers, small enough that fp32 sums of them are exact: results can be compared bit for bit.
at::Tensor integers(at::IntArrayRef shape, std::uint64_t key, at::ScalarType type) {
  std::int64_t numel = 1;
  for (auto size : shape) numel *= size;
  at::Tensor values = at::empty({numel}, at::kDouble);
  for (std::int64_t i = 0; i < numel; ++i)
    values[i] =
        static_cast<double>(random_bits({.seed = 3, .sample = key}, static_cast<std::uint64_t>(i)) % 17) - 8;
  return values.view(shape).to(type);
}

const std::vector<std::vector<std::int64_t>> kShapes = {{1}, {3, 5}, {0, 2}, {33}, {7, 1, 3}, {130}, {2}};

struct Model {
  std::vector<at::Tensor> tensors;
  explicit Model(at::ScalarType type = at::kDouble) {
    for (std::size_t i = 0; i < kShapes.size(); ++i)
      tensors.push_back(integers(kShapes[i], i, type).requires_grad_(true));
  }
  std::vector<NamedParameter> named() const {
    std::vector<std::pair<std::string, at::Tensor>> list;
    for (const at::Tensor& tensor : tensors) list.emplace_back("p" + std::to_string(list.size()), tensor);
    return trainable_parameters(list);
  }
  // p4 is never used, p1 on rank 0 alone.
  static bool used(std::size_t p, int rank) { return p != 4 && (p != 1 || rank == 0); }
  // Its gradient is known: what rank `rank` contributes in micro-batch `m` of step `step`. Every second rank
  // uses the parameters in the opposite order.
  at::Tensor loss(int rank, int step, int m) const {
    at::Tensor sum = at::zeros({}, tensors[0].options().requires_grad(false));
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::size_t p = rank % 2 ? tensors.size() - 1 - i : i;
      if (used(p, rank)) sum = sum + (tensors[p] * contribution(p, rank, step, m)).sum();
    }
    return sum;
  }
  at::Tensor contribution(std::size_t p, int rank, int step, int m) const {
    const auto key = 1000 + static_cast<std::uint64_t>(((p * 10 + rank) * 10 + step) * 10 + m);
    return integers(kShapes[p], key, tensors[p].scalar_type());
  }
  at::Tensor whole(std::size_t p, int ranks, int step, int micro_batches) const {
    at::Tensor sum = at::zeros_like(tensors[p]).detach();
    for (int rank = 0; rank < ranks; ++rank)
      for (int m = 0; m < micro_batches && used(p, rank); ++m) sum += contribution(p, rank, step, m);
    return sum;
  }
};

void micro_batches(DataParallel& layout, const Model& model, int rank, int step, int count) {
  for (int m = 0; m < count; ++m) {
    layout.begin_backward(m + 1 == count);
    model.loss(rank, step, m).backward();
  }
}

// SGD by hand on one process, from the known gradients.
std::vector<at::Tensor> trained_alone(int ranks, int steps, int micro, at::ScalarType type) {
  Model model(type);
  at::NoGradGuard no_grad;
  for (int step = 0; step < steps; ++step)
    for (std::size_t p = 0; p < model.tensors.size(); ++p)
      model.tensors[p] -= kRate * model.whole(p, ranks, step, micro);
  return model.tensors;
}

void train(DataParallel& layout, const Model& model, int rank, int steps, int micro) {
  const auto optimizer = sgd({.learning_rate = kRate});
  for (int step = 0; step < steps; ++step) {
    layout.zero_gradients();
    micro_batches(layout, model, rank, step, micro);
    layout.finish_reduction();
    optimizer->update(layout.buckets(), 1);
    layout.publish_parameters();
  }
}

TEST(Sharded, TrainsLikeOneProcessOverReplicasAndShards) {
  for (const Strategy& strategy : strategies())
    for (int size : {1, 2, 3, 4, 5, 8})
      for (int most_replicas : {1, 2, 4})
        for (int micro : {1, 3}) {
          if (most_replicas > 1 && testing::replicas_for(size, most_replicas) == 1) continue;
          const auto expected = trained_alone(size, 3, micro, at::kDouble);
          const std::int64_t bucket_bytes =
              std::vector{1, 500, 1 << 20}[static_cast<std::size_t>(size + micro) % 3];
          run_ranks(size, [&](World& world) {
            Model model;
            auto layout = strategy.make(
                model.named(), mesh_of_replicas(world, testing::replicas_for(size, most_replicas)),
                {.bucket_bytes = bucket_bytes, .first_bucket_bytes = 200, .overlap = (size + micro) % 4 < 2});
            train(*layout, model, world.rank, 3, micro);
            for (std::size_t p = 0; p < expected.size(); ++p)
              EXPECT_TRUE(at::equal(model.tensors[p], expected[p]))
                  << strategy.name << ", " << size << " ranks, up to " << most_replicas << " replicas, "
                  << micro << " micro-batches, p" << p << " on rank " << world.rank;
          });
        }
}

// Under momentum of one half, whose sums round nothing away in fp32.
TEST(Sharded, KeepsBf16MastersOfItsShardOnly) {
  for (const Strategy& strategy : strategies())
    for (int size : {2, 3, 4})
      run_ranks(size, [&](World& world) {
        Model model(at::kBFloat16);
        auto layout = strategy.make(model.named(), world.group, {.bucket_bytes = 500});
        const auto optimizer = sgd({.learning_rate = 0x1p-10, .momentum = 0.5});  // lost in bf16
        double moved = 0, velocity = 0;                                           // in gradients
        for (int step = 0; step < 8; ++step) {
          layout->zero_gradients();
          micro_batches(*layout, model, world.rank, 0, 1);
          layout->finish_reduction();
          optimizer->update(layout->buckets(), 1);
          layout->publish_parameters();
          velocity = 0.5 * velocity + 1, moved += velocity;
        }
        const auto views = layout->views();
        for (std::size_t p = 0; p < views.size(); ++p) {
          const at::Tensor expected = Model(at::kFloat).tensors[p].detach() -
                                      moved * 0x1p-10 * Model(at::kFloat).whole(p, size, 0, 1);
          EXPECT_TRUE(at::equal(views[p].master, expected)) << strategy.name << " p" << p;
          EXPECT_TRUE(at::equal(model.tensors[p], expected.to(at::kBFloat16))) << strategy.name << " p" << p;
          EXPECT_TRUE(at::equal(views[p].parameter, expected.to(at::kBFloat16)));
        }
      });
}

// Half the memory: integers as large as bf16 can tell apart add up exactly over micro-batches and ranks.
TEST(Sharded, KeepsBf16GradientsIfAsked) {
  for (const Strategy& strategy : strategies())
    for (int size : {1, 3, 4})
      run_ranks(size, [&](World& world) {
        Model model(at::kBFloat16);
        auto layout =
            strategy.make(model.named(), world.group, {.fp32_gradients = false, .bucket_bytes = 500});
        layout->zero_gradients();
        micro_batches(*layout, model, world.rank, 0, 2);
        layout->finish_reduction();
        const auto views = layout->views();
        double squares = 0;
        for (std::size_t p = 0; p < views.size(); ++p) {
          EXPECT_EQ(views[p].gradient.scalar_type(), at::kBFloat16);
          const at::Tensor expected = Model(at::kFloat).whole(p, size, 0, 2);
          EXPECT_TRUE(at::equal(views[p].gradient.to(at::kFloat), expected)) << strategy.name << " p" << p;
          squares += expected.square().sum().item<double>();
        }
        EXPECT_EQ(global_norm(layout->buckets(), 0, layout->mesh().all()).norm, std::sqrt(squares));
        const at::Tensor before = views[3].master.clone();
        sgd({.learning_rate = kRate})->update(layout->buckets(), 1);
        layout->publish_parameters();
        EXPECT_TRUE(
            at::equal(layout->views()[3].master, before - kRate * Model(at::kFloat).whole(3, size, 0, 2)));
      });
}

TEST(Sharded, RefusesWhatCannotBe) {
  run_ranks(3, [](World& world) {
    Model model;
    EXPECT_NE(error_of([&] { mesh_of_replicas(world, 2); }).find("divides the ranks"), std::string::npos);
    EXPECT_NE(error_of([&] { bucketed(model.named(), world.group, {.stage = 3}); }).find("fully_shard"),
              std::string::npos);
    EXPECT_NE(error_of([&] { naive(model.named(), world.group, {.stage = 1}); }).find("stage 0"),
              std::string::npos);
    EXPECT_NE(error_of([&] { bucketed(model.named(), world.group, {.bucket_bytes = 0}); }).find("1 or more"),
              std::string::npos);
    EXPECT_NE(error_of([&] { bucketed(model.named(), world.group, {.sharded = {"tp"}}); }).find("data axes"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace isograd
