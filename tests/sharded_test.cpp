// What sharded and shared strategies keep, gather and move.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <thread>

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
  // Its gradient is known: what rank `rank` contributes in micro-batch `m` of step `step`. p4 is never used.
  at::Tensor loss(int rank, int step, int m) const {
    at::Tensor sum = at::zeros({}, tensors[0].options().requires_grad(false));
    for (std::size_t p = 0; p < tensors.size(); ++p)
      if (p != 4) sum = sum + (tensors[p] * contribution(p, rank, step, m)).sum();
    return sum;
  }
  at::Tensor contribution(std::size_t p, int rank, int step, int m) const {
    const auto key = 1000 + static_cast<std::uint64_t>(((p * 10 + rank) * 10 + step) * 10 + m);
    return integers(kShapes[p], key, tensors[p].scalar_type());
  }
  at::Tensor whole(std::size_t p, int ranks, int step, int micro_batches) const {
    at::Tensor sum = at::zeros_like(tensors[p]).detach();
    if (p == 4) return sum;
    for (int rank = 0; rank < ranks; ++rank)
      for (int m = 0; m < micro_batches; ++m) sum += contribution(p, rank, step, m);
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
          run_ranks(size, [&](World& world) {
            Model model;
            auto layout = strategy.make(model.named(),
                                        mesh_of_replicas(world, testing::replicas_for(size, most_replicas)),
                                        {.bucket_bytes = 500, .first_bucket_bytes = 200});
            train(*layout, model, world.rank, 3, micro);
            for (std::size_t p = 0; p < expected.size(); ++p)
              EXPECT_TRUE(at::equal(model.tensors[p], expected[p]))
                  << strategy.name << ", " << size << " ranks, up to " << most_replicas << " replicas, "
                  << micro << " micro-batches, p" << p << " on rank " << world.rank;
          });
        }
}

TEST(Sharded, KeepsBf16MastersOfItsShardOnly) {
  for (const Strategy& strategy : strategies())
    run_ranks(3, [&](World& world) {
      Model model(at::kBFloat16);
      auto layout = strategy.make(model.named(), world.group, {.bucket_bytes = 500});
      const auto optimizer = sgd({.learning_rate = 0x1p-10});  // lost in bf16, kept by the masters
      for (int step = 0; step < 8; ++step) {
        layout->zero_gradients();
        micro_batches(*layout, model, world.rank, 0, 1);
        layout->finish_reduction();
        optimizer->update(layout->buckets(), 1);
        layout->publish_parameters();
      }
      const auto views = layout->views();
      for (std::size_t p = 0; p < views.size(); ++p) {
        const at::Tensor expected =
            Model(at::kFloat).tensors[p].detach() - 8 * 0x1p-10 * Model(at::kFloat).whole(p, 3, 0, 1);
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

// Owned elements together are all elements once, whatever the grid: the norm is that of one process.
TEST(Sharded, CountsEveryElementOnceInTheNorm) {
  for (const Strategy& strategy : strategies())
    for (int size : {2, 4, 6}) {
      std::vector<double> norms(size), held(size);
      run_ranks(size, [&](World& world) {
        Model model;
        auto layout = strategy.make(model.named(), mesh_of_replicas(world, 2), {.bucket_bytes = 500});
        layout->zero_gradients();
        micro_batches(*layout, model, world.rank, 0, 2);
        layout->finish_reduction();
        norms[world.rank] = global_norm(layout->buckets(), 0, layout->mesh().all()).norm;
        for (const Bucket& bucket : layout->buckets())
          held[world.rank] += static_cast<double>(bucket.held.size());
      });
      double squares = 0;
      for (std::size_t p = 0; p < kShapes.size(); ++p)
        squares += Model().whole(p, size, 0, 2).square().sum().item<double>();
      for (double norm : norms) EXPECT_EQ(norm, std::sqrt(squares)) << strategy.name << " " << size;
      const bool sharded = strategy.stage > 0 || strategy.share;
      if (sharded && size > 2) {
        EXPECT_LT(held[0], 0.75 * (130 + 33 + 21 + 15) * 2) << strategy.name;
      }
    }
}

// Bytes as the ring algorithms count them, on padded sizes: 2Ψ, or what stage 2 pays for reducing every
// micro-batch; once over the replicas.
TEST(Sharded, MovesWhatTheFormulasSay) {
  for (const Strategy& strategy : strategies())
    for (int size : {2, 3, 4, 8})
      for (int replicas : {1, 2})
        for (int micro : {1, 3}) {
          if (size % replicas != 0 || strategy.is_naive) continue;
          run_ranks(size, [&](World& world) {
            Model model(at::kFloat);
            const Mesh mesh = mesh_of_replicas(world, replicas);
            const Group in_world = mesh.counting(), in_shard_group = mesh.along({"dp_shard"}),
                        in_replicas = mesh.along({"dp_replicate"});
            auto layout = strategy.make(model.named(), mesh, {.bucket_bytes = 500, .learn_order = false});
            std::int64_t psi = 0;
            for (const Bucket& bucket : layout->buckets()) psi += 4 * bucket.plan.numel;
            const std::int64_t before[] = {in_world.traffic().bytes(), in_shard_group.traffic().bytes(),
                                           in_replicas.traffic().bytes()};
            const auto optimizer = sgd({.learning_rate = kRate});
            layout->zero_gradients();
            micro_batches(*layout, model, world.rank, 0, micro);
            layout->finish_reduction();
            optimizer->update(layout->buckets(), 1);
            layout->publish_parameters();
            const std::int64_t shards = size / replicas;
            const bool sharded = (strategy.stage > 0 || strategy.share) && shards > 1;
            const std::int64_t reductions = strategy.stage == 2 && !strategy.once ? micro : 1;
            const std::int64_t in_shard =
                sharded ? (reductions + (strategy.share ? 0 : 1)) * psi * (shards - 1) / shards : 0;
            const std::int64_t over_replicas =
                sharded && replicas > 1 ? 2 * (psi / shards) * (replicas - 1) / replicas : 0;
            const std::int64_t in_all = sharded ? 0 : 2 * psi * (size - 1) / size;
            const std::string where = strategy.name + ", " + std::to_string(size) + " ranks, " +
                                      std::to_string(replicas) + " replicas, " + std::to_string(micro);
            // With one replica the shard group is the whole group; with one shard that of the replicas is.
            const std::int64_t all = in_world.traffic().bytes() - before[0];
            const std::int64_t shard = in_shard_group.traffic().bytes() - before[1];
            EXPECT_EQ(all, replicas == 1 ? in_all + in_shard : in_all) << where;
            if (replicas > 1) {
              EXPECT_EQ(shard, in_shard) << where;
            }
            EXPECT_EQ(in_replicas.traffic().bytes() - before[2], shards == 1 ? in_all : over_replicas)
                << where;
          });
        }
}

// Ranks that share one copy wait for one another: with delays at every place where a rank could run ahead,
// all train as one process does. The planted layout leaves out the last wait.
struct ForgetsToPublish : DataParallel {
  std::unique_ptr<DataParallel> inner;
  explicit ForgetsToPublish(std::unique_ptr<DataParallel> inner_) : inner(std::move(inner_)) {}
  void zero_gradients() override { inner->zero_gradients(); }
  void begin_backward(bool last) override { inner->begin_backward(last); }
  void finish_reduction() override { inner->finish_reduction(); }
  std::vector<Bucket>& buckets() override { return inner->buckets(); }
  const Mesh& mesh() const override { return inner->mesh(); }
};

// The gradient of Σ p²/2 is p itself: a rank that reads early gets another gradient.
bool trains_right_under_delays(bool share, bool planted) {
  constexpr int kRanks = 3, kSteps = 6;
  Model alone;
  for (int step = 0; step < kSteps; ++step) {
    at::NoGradGuard no_grad;
    for (auto& tensor : alone.tensors) tensor -= 0x1p-6 * kRanks * tensor;
  }
  std::vector<char> right(kRanks, 1);
  run_ranks(kRanks, [&](World& world) {
    const auto pause = [&](int step, int place) {
      const RandomKey key{.seed = 9, .sample = static_cast<std::uint64_t>(world.rank)};
      const auto counter = static_cast<std::uint64_t>(step * 10 + place);
      // One rank after the other is late with its update, by more than any other pause: whoever does not wait
      // for it reads its shard too early.
      const bool late = place == 3 && world.rank == step % kRanks;
      if (late || random_bits(key, counter) % 2)
        std::this_thread::sleep_for(std::chrono::milliseconds(late ? 25 : 2));
    };
    Model model;
    std::unique_ptr<DataParallel> layout = bucketed(
        model.named(), world.group, {.stage = share ? 0 : 1, .share_parameters = share, .bucket_bytes = 500});
    if (planted) layout = std::make_unique<ForgetsToPublish>(std::move(layout));
    const auto optimizer = sgd({.learning_rate = 0x1p-6});
    for (int step = 0; step < kSteps; ++step) {
      layout->zero_gradients();
      layout->begin_backward(true);
      pause(step, 0);
      at::Tensor loss = at::zeros({}, at::kDouble);
      for (auto& tensor : model.tensors) loss = loss + (tensor * tensor.detach()).sum();
      pause(step, 1);
      loss.backward();
      pause(step, 2);
      layout->finish_reduction();
      pause(step, 3);
      optimizer->update(layout->buckets(), 1);
      layout->publish_parameters();
    }
    world.group.barrier();
    for (std::size_t p = 0; p < model.tensors.size(); ++p)
      if (!at::equal(model.tensors[p], alone.tensors[p])) right[world.rank] = 0;
  });
  return std::all_of(right.begin(), right.end(), [](char one) { return one != 0; });
}

TEST(Sharded, NobodyReadsAHalfUpdatedParameter) {
  for (bool share : {true, false}) {
    EXPECT_TRUE(trains_right_under_delays(share, false));
    EXPECT_FALSE(trains_right_under_delays(share, true)) << "the planted fault was not noticed";
  }
}

// An optimizer that fails on rank 1: the moment between reduction and update.
struct FailsOnRankOne : Optimizer {
  std::unique_ptr<Optimizer> inner = sgd({.learning_rate = kRate});
  int rank = 0, fails_at = 0, calls = 0;
  void update(std::vector<Bucket>& buckets, double scale) override {
    if (rank == 1 && calls++ == fails_at) throw std::runtime_error("the power is gone");
    inner->update(buckets, scale);
  }
  void set_learning_rate(double) override {}
  double learning_rate() const override { return kRate; }
  std::int64_t updates() const override { return inner->updates(); }
  OptimizerState state(const std::vector<Bucket>& buckets) override { return inner->state(buckets); }
  void set_updates(std::int64_t) override {}
};

TEST(Sharded, NobodyGoesOnWithAHalfUpdatedModel) {
  for (const Strategy& strategy : strategies()) {
    if (strategy.stage == 0 && !strategy.share) continue;  // every rank updates all: nothing is half done
    constexpr int kRanks = 3;
    std::vector<int> steps(kRanks);
    std::string error;
    try {
      run_ranks(kRanks, [&](World& world) {
        Model model;
        auto layout = strategy.make(model.named(), world.group, {.bucket_bytes = 500});
        FailsOnRankOne optimizer;
        optimizer.rank = world.rank;
        optimizer.fails_at = 2;
        for (int step = 0; step < 5; ++step) {
          layout->zero_gradients();
          micro_batches(*layout, model, world.rank, step, 1);
          layout->finish_reduction();
          optimizer.update(layout->buckets(), 1);
          layout->publish_parameters();
          ++steps[world.rank];
        }
      });
    } catch (const std::exception& caught) {
      error = caught.what();
    }
    EXPECT_NE(error.find("the power is gone"), std::string::npos) << strategy.name << ": " << error;
    EXPECT_EQ(steps, std::vector<int>(kRanks, 2)) << strategy.name;
  }
}

// Values and bytes are different questions (B28): a layout that reduces at every micro-batch what it need not
// has the right gradient and moves too much.
struct ReducesTooOften : ForgetsToPublish {
  using ForgetsToPublish::ForgetsToPublish;
  void begin_backward(bool last) override {
    for (Bucket& bucket : buckets()) mesh().all().all_reduce(at::zeros_like(bucket.gradients));
    inner->begin_backward(last);
  }
};

TEST(Sharded, BytesTellAReductionTooMany) {
  run_ranks(3, [](World& world) {
    std::int64_t bytes[2];
    for (bool planted : {false, true}) {
      Model model;
      std::unique_ptr<DataParallel> layout =
          bucketed(model.named(), world.group, {.bucket_bytes = 500, .learn_order = false});
      if (planted) layout = std::make_unique<ReducesTooOften>(std::move(layout));
      const std::int64_t before = world.group.traffic().bytes();
      layout->zero_gradients();
      micro_batches(*layout, model, world.rank, 0, 3);
      layout->finish_reduction();
      bytes[planted] = world.group.traffic().bytes() - before;
      for (std::size_t p = 0; p < kShapes.size(); ++p)
        EXPECT_TRUE(at::equal(layout->views()[p].gradient, Model().whole(p, 3, 0, 3)));
    }
    EXPECT_EQ(bytes[1], 4 * bytes[0]);
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
