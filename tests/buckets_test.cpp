// Buckets sent in the order in which gradients come, where they are, and handed over as soon as they are
// reduced.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>

#include "isograd/error.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/world.hpp"
#include "parallel/data/strategies_testing.hpp"
#include "toy.hpp"

namespace isograd {
namespace {

using testing::error_of;
using testing::replicas_for;
using testing::strategies;
using testing::Strategy;

const std::vector<std::vector<std::int64_t>> kShapes = {{3, 5}, {40}, {7, 3}, {1}, {33}, {90}, {2}};
// Not the order of registration, nor its reverse; 4 is used twice and 6 never.
const std::vector<std::size_t> kUses = {2, 5, 4, 0, 4, 3, 1};
// Backward meets the last use first; a parameter is complete with its first use.
const std::vector<std::string> kObserved = {"p1", "p3", "p0", "p4", "p5", "p2", "p6"};

at::Tensor drawn(at::IntArrayRef shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kDouble)) * 0.2;
}

// A chain, so that gradients come strictly one after another.
struct Model {
  std::vector<at::Tensor> tensors;
  explicit Model(at::ScalarType type = at::kDouble) {
    for (std::size_t i = 0; i < kShapes.size(); ++i)
      tensors.push_back(drawn(kShapes[i], i).to(type).requires_grad_(true));
  }
  std::vector<NamedParameter> named() const {
    std::vector<std::pair<std::string, at::Tensor>> list;
    for (const at::Tensor& tensor : tensors) list.emplace_back("p" + std::to_string(list.size()), tensor);
    return trainable_parameters(list);
  }
  at::Tensor loss(int rank, int step, int m) const {
    at::Tensor x = at::full({}, 0.1 * (1 + rank), tensors[0].options().requires_grad(false));
    for (std::size_t use = 0; use < kUses.size(); ++use) {
      const at::Tensor& p = tensors[kUses[use]];
      const auto seed = static_cast<std::uint64_t>((((rank + 1) * 10 + step) * 10 + m) * 10) + use;
      x = at::tanh(x + (p * drawn(p.sizes(), seed).to(p.scalar_type())).sum());
    }
    return x;
  }
};

// Rank 0 has nothing in any step: another rank tells the order.
int rounds(int rank, int micro) { return rank == 0 ? 0 : micro; }

// SGD on one process, plain autograd; the gradients of each step.
std::vector<std::vector<at::Tensor>> alone(int size, int steps, int micro, double rate, double momentum = 0) {
  Model model;
  std::vector<at::Tensor> velocity(kShapes.size());
  std::vector<std::vector<at::Tensor>> all;
  for (int step = 0; step < steps; ++step) {
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (int rank = 0; rank < size; ++rank)
      for (int m = 0; m < rounds(rank, micro); ++m) sum = sum + model.loss(rank, step, m);
    auto gradients = torch::autograd::grad({sum}, model.tensors, {}, false, false, /*allow_unused=*/true);
    at::NoGradGuard no_grad;
    for (std::size_t p = 0; p < gradients.size(); ++p) {
      if (!gradients[p].defined()) gradients[p] = at::zeros_like(model.tensors[p]);
      velocity[p] = velocity[p].defined() ? momentum * velocity[p] + gradients[p] : gradients[p];
      model.tensors[p] -= rate * velocity[p];
    }
    all.push_back(std::move(gradients));
  }
  return all;
}

void accumulate(DataParallel& layout, const Model& model, int rank, int step, int micro) {
  layout.zero_gradients();
  const int most = layout.needs_even_micro_batches() ? micro : rounds(rank, micro);
  for (int m = 0; m < most; ++m) {
    layout.begin_backward(m + 1 == most);
    if (m < rounds(rank, micro)) model.loss(rank, step, m).backward();
  }
}

// The first parameter of each bucket, as they are sent. With a bucket for each parameter: its order.
std::vector<std::string> sent(DataParallel& layout) {
  std::vector<std::string> names;
  for (std::size_t bucket : layout.launch_order())
    names.push_back(layout.buckets()[bucket].plan.slots[0].name);
  return names;
}

TEST(Buckets, AreSentInTheOrderOfTheGradientsAndStayWhereTheyAre) {
  constexpr double kRate = 0.05;
  for (const Strategy& strategy : strategies())
    for (int size : {2, 3, 4, 5, 8})
      for (int replicas : {1, 2})
        for (int micro : {1, 3}) {
          if (size % replicas != 0 || (replicas > 1 && strategy.is_naive)) continue;
          const auto wanted = alone(size, 3, micro, kRate);
          run_ranks(size, [&](World& world) {
            Model model;
            auto layout =
                strategy.make(model.named(), Mesh(world, data_grid(world.size, {.dp_replicate = replicas})),
                              {.bucket_bytes = 1});
            const auto before = layout->bucket_order(), sent_before = sent(*layout);
            std::vector<const void*> places;
            for (const at::Tensor& tensor : model.tensors) places.push_back(tensor.const_data_ptr());
            for (const Bucket& bucket : layout->buckets())
              places.push_back(bucket.gradients.const_data_ptr());
            const auto optimizer = sgd({.learning_rate = kRate, .momentum = 0});
            for (int step = 0; step < 3; ++step) {
              accumulate(*layout, model, world.rank, step, micro);
              layout->finish_reduction();
              std::vector<at::Tensor> found;
              for (const auto& view : layout->views()) found.push_back(view.gradient);
              EXPECT_LE(toy::worst_error(found, wanted[static_cast<std::size_t>(step)]), 1e-10)
                  << strategy.name << ", " << size << " ranks, step " << step;
              optimizer->update(layout->buckets(), 1);
              layout->publish_parameters();
              EXPECT_EQ(sent(*layout), strategy.is_naive ? sent_before : kObserved) << strategy.name;
              EXPECT_EQ(layout->bucket_order(), before) << strategy.name;
              std::vector<const void*> now;
              for (const at::Tensor& tensor : model.tensors) now.push_back(tensor.const_data_ptr());
              for (const Bucket& bucket : layout->buckets()) now.push_back(bucket.gradients.const_data_ptr());
              EXPECT_EQ(now, places) << strategy.name;
            }
          });
        }
}

// The order of sending changes no bit, norm included: a run that goes on from a checkpoint need not know it.
TEST(Buckets, HaveTheSameBitsWhateverIsSentFirst) {
  for (const Strategy& strategy : strategies()) {
    if (strategy.is_naive) continue;
    run_ranks(3, [&](World& world) {
      Model learning, keeping, told;
      DataParallelOptions options{.bucket_bytes = 400, .first_bucket_bytes = 100};
      const auto learns = strategy.make(learning.named(), world.group, options);
      const auto before = learns->launch_order();
      options.learn_order = false;
      const auto keeps = strategy.make(keeping.named(), world.group, options);
      options.order = kObserved;
      const auto given = strategy.make(told.named(), world.group, options);
      EXPECT_EQ(given->bucket_order(), kObserved);
      for (int step = 0; step < 3; ++step) {
        std::vector<double> norms, handed;
        for (auto* layout : {&learns, &keeps, &given}) {
          const Model& model = layout == &learns ? learning : layout == &keeps ? keeping : told;
          accumulate(**layout, model, world.rank, step, 1);
          double squares = 0;
          (*layout)->finish_reduction_with([&](const Bucket& bucket, std::optional<double> taken) {
            squares += taken ? *taken : owned_squares(bucket);
          });
          handed.push_back(squares);
          norms.push_back(global_norm((*layout)->buckets(), 0, (*layout)->mesh().all()).norm);
        }
        EXPECT_EQ(norms[0], norms[1]) << strategy.name;
        EXPECT_EQ(handed[0], handed[1]) << strategy.name;
        const auto a = learns->views(), b = keeps->views(), c = given->views();
        for (std::size_t p = 0; p < a.size(); ++p) {
          EXPECT_TRUE(at::equal(a[p].gradient, b[p].gradient));
          EXPECT_TRUE(at::equal(a[p].gradient, c[p].gradient));
        }
      }
      EXPECT_NE(learns->launch_order(), before) << strategy.name;
      EXPECT_EQ(keeps->launch_order(), before) << strategy.name;
    });
  }
}

// A first step without any gradient tells nothing; the second one does. AdamW's state follows.
TEST(Buckets, WaitForAStepThatTellsTheOrder) {
  run_ranks(2, [](World& world) {
    Model model, plain;
    const auto layout = bucketed(model.named(), world.group, {.bucket_bytes = 1});
    const auto reference = naive(plain.named(), world.group);
    const auto before = sent(*layout);
    const auto ours = adamw({.learning_rate = 0.01}), theirs = adamw({.learning_rate = 0.01});
    layout->zero_gradients();
    layout->finish_reduction();
    EXPECT_EQ(sent(*layout), before);
    for (int step = 1; step < 4; ++step) {
      for (auto* each : {&layout, &reference}) {
        accumulate(**each, each == &layout ? model : plain, world.rank, step, 2);
        (*each)->finish_reduction();
        (each == &layout ? ours : theirs)->update((*each)->buckets(), 1);
        (*each)->publish_parameters();
      }
      EXPECT_EQ(sent(*layout), kObserved);
    }
    for (std::size_t p = 0; p < model.tensors.size(); ++p)
      EXPECT_TRUE(at::allclose(model.tensors[p], plain.tensors[p], 1e-10, 1e-12)) << p;
  });
}

// An update's state belongs to the buckets, so that they stay as they are from the first one on, also where
// the last backward before it tells no order: none was announced as the last, or the last loss was a constant
// on every rank. In one bucket the sizes would be right whatever the order.
TEST(Buckets, StayAsTheyAreOnceAnUpdateHasAState) {
  constexpr double kRate = 0.05, kMomentum = 0.9;
  enum Scenario { kNotAnnounced, kConstant };
  for (const Scenario scenario : {kNotAnnounced, kConstant})
    for (const Strategy& strategy : strategies())
      for (int size : {2, 3}) {
        const auto wanted = alone(size, 3, 2, kRate, kMomentum);
        run_ranks(size, [&](World& world) {
          Model model;
          auto layout = strategy.make(model.named(), world.group);
          const auto before = layout->bucket_order();
          const auto optimizer = sgd({.learning_rate = kRate, .momentum = kMomentum});
          for (int step = 0; step < 3; ++step) {
            layout->zero_gradients();
            for (int m = 0; m < 2; ++m) {
              layout->begin_backward(step > 0 && m == 1);
              if (m < rounds(world.rank, 2)) model.loss(world.rank, step, m).backward();
            }
            if (step == 0 && scenario == kConstant) layout->begin_backward(true);
            layout->finish_reduction();
            std::vector<at::Tensor> found;
            for (const auto& view : layout->views()) found.push_back(view.gradient);
            EXPECT_LE(toy::worst_error(found, wanted[static_cast<std::size_t>(step)]), 1e-10)
                << strategy.name << ", " << size << " ranks, scenario " << scenario << ", step " << step;
            optimizer->update(layout->buckets(), 1);
            layout->publish_parameters();
            EXPECT_EQ(layout->bucket_order(), before)
                << strategy.name << ", scenario " << scenario << ", step " << step;
          }
        });
      }
}

// bf16 masters are such a state: an update without any gradient decays them by less than bf16 can tell.
TEST(Buckets, StayAsTheyAreAfterAnUpdateWithoutGradients) {
  for (const Strategy& strategy : strategies())
    run_ranks(2, [&](World& world) {
      Model model(at::kBFloat16);
      auto layout = strategy.make(model.named(), world.group);
      const auto before = layout->bucket_order();
      const auto masters = [&] {
        std::vector<at::Tensor> all;
        for (const auto& view : layout->views()) all.push_back(view.master.clone());
        return all;
      };
      const auto started = masters();
      layout->zero_gradients();
      layout->finish_reduction();
      sgd({.learning_rate = 0x1p-12, .weight_decay = 1})->update(layout->buckets(), 1);
      layout->publish_parameters();
      const auto updated = masters();
      EXPECT_FALSE(at::equal(updated[0], started[0]));
      accumulate(*layout, model, world.rank, 1, 1);
      layout->finish_reduction();
      EXPECT_EQ(layout->bucket_order(), before) << strategy.name;
      const auto now = masters();
      for (std::size_t p = 0; p < now.size(); ++p)
        EXPECT_TRUE(at::equal(now[p], updated[p])) << strategy.name;
    });
}

TEST(Buckets, RefuseAnOrderOfAnotherModel) {
  run_ranks(2, [](World& world) {
    Model model;
    const auto refusal = [&](std::vector<std::string> order) {
      return error_of([&] { bucketed(model.named(), world.group, {.order = std::move(order)}); });
    };
    auto names = kObserved;
    EXPECT_EQ(refusal(names), "no error");
    names[2] = "other";
    EXPECT_NE(refusal(names).find("'other', unknown or for the second time"), std::string::npos);
    names[2] = "p1";
    EXPECT_NE(refusal(names).find("'p1', unknown or for the second time"), std::string::npos);
    names.erase(names.begin() + 2);
    EXPECT_NE(refusal(names).find("nothing about 'p0'"), std::string::npos);
  });
}

// Each bucket is handed over once, in the order of buckets(), when its gradients are final: the squares taken
// then are those of the norm, to the last bit.
TEST(Sharded, HandsOverEachBucketOnceItIsReduced) {
  for (const Strategy& strategy : strategies())
    for (int size : {1, 2, 3, 4})
      run_ranks(size, [&](World& world) {
        Model model;
        auto layout = strategy.make(
            model.named(), Mesh(world, data_grid(world.size, {.dp_replicate = replicas_for(size, 2)})),
            {.bucket_bytes = 500});
        layout->zero_gradients();
        accumulate(*layout, model, world.rank, 0, 2);
        std::vector<const Bucket*> handed;
        std::vector<at::Tensor> gradients;
        double squares = 0;
        layout->finish_reduction_with([&](const Bucket& bucket, std::optional<double> on_the_way) {
          handed.push_back(&bucket);
          gradients.push_back(bucket.gradients.clone());
          squares += owned_squares(bucket);
          EXPECT_EQ(on_the_way.value_or(owned_squares(bucket)), owned_squares(bucket))
              << strategy.name << " " << size;
        });
        ASSERT_EQ(handed.size(), layout->buckets().size()) << strategy.name << " " << size;
        for (std::size_t b = 0; b < handed.size(); ++b) {
          EXPECT_EQ(handed[b], &layout->buckets()[b]);
          EXPECT_TRUE(at::equal(gradients[b], layout->buckets()[b].gradients))
              << strategy.name << " " << size;
        }
        std::vector<double> nothing = {0};
        EXPECT_EQ(global_norm(squares, nothing, layout->mesh().all()).norm,
                  global_norm(layout->buckets(), 0, layout->mesh().all()).norm);
      });
}

// Buckets whose elements are written once, by the reduce-scatter, need no pass for the norm. Hybrids add
// replicas up afterwards, stage 2 adds round to round: what was squared on the way would be stale.
TEST(Sharded, TakesSquaresOnTheWayWhereTheReductionIsTheLastToWrite) {
  const std::vector<std::string> once = {"zero1", "zero2 once", "shared"};
  for (const Strategy& strategy : strategies())
    for (int size : {2, 3, 4, 5, 8})
      for (int replicas : {1, 2})
        for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16}) {
          if (size % replicas != 0 || (replicas > 1 && strategy.is_naive)) continue;
          run_ranks(size, [&](World& world) {
            Model model(type);
            auto layout =
                strategy.make(model.named(), Mesh(world, data_grid(world.size, {.dp_replicate = replicas})),
                              {.fp32_gradients = size % 2 == 0, .bucket_bytes = 400});
            const bool expects =
                replicas == 1 && std::find(once.begin(), once.end(), strategy.name) != once.end();
            for (int step = 0; step < 3; ++step) {
              accumulate(*layout, model, world.rank, step, 2);
              std::size_t taken = 0;
              layout->finish_reduction_with([&](const Bucket& bucket, std::optional<double> squares) {
                if (!squares) return;
                EXPECT_EQ(*squares, owned_squares(bucket)) << strategy.name << " " << size;
                ++taken;
              });
              EXPECT_EQ(taken, expects ? layout->buckets().size() : 0) << strategy.name << " " << size;
            }
          });
        }
}

}  // namespace
}  // namespace isograd
