// Five steps of SGD with momentum in fp32 and bf16, on the decoder and on a convolution, under every
// strategy: the way of one process.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "convolution_net.hpp"
#include "full_tests.hpp"
#include "isograd/step.hpp"
#include "parallel/data/strategies_testing.hpp"
#include "planted.hpp"
#include "train/build.hpp"
#include "train/config.hpp"
#include "verify/test_problem.hpp"

namespace isograd {
namespace {

constexpr int kSteps = 5;
constexpr double kRate = 0.05, kMomentum = 0.9;

using Tensors = std::map<std::string, at::Tensor>;
using Steps = std::vector<MicroBatches>;

struct Kind {
  std::function<VerifyModel(at::ScalarType)> make;
  std::function<Steps(int rank, int size)> steps;  // of this rank; (0, 1): of one process
};

Kind decoder(int accumulation) {
  const verify_test::Small small{.packs_per_step = 8, .packs_per_micro_batch = accumulation > 1 ? 1 : 100};
  return {.make =
              [small](at::ScalarType dtype) {
                auto model = std::make_shared<DecoderLM>(small.shape(), dtype, 11);
                VerifyModel made = verify_test::model_of(small, dtype);
                made.named = model->named();
                made.units = model_units(*model, RunConfig{});
                made.loss_terms = inside(made.units->root, [model](const Batch& batch) -> LossTerms {
                  return {{"cross_entropy", cross_entropy_sum(model->logits(batch), batch.targets, {})}};
                });
                return made;
              },
          .steps =
              [small](int rank, int size) {
                Steps steps;
                const auto loader = verify_test::loader_of(small, rank, size);
                for (int i = 0; i < kSteps; ++i) steps.push_back(loader->next());
                return steps;
              }};
}

Kind convolution_of(int ranks, int accumulation) {
  return {.make = convolution::make_model, .steps = [=](int rank, int size) {
            Steps steps;
            for (int i = 0; i < kSteps; ++i) {
              const MicroBatches whole = convolution::make_batches(ranks, accumulation, i);
              MicroBatches& own = steps.emplace_back();
              for (std::size_t b = 0; b < whole.size(); ++b)
                if (static_cast<int>(b) % size == rank) own.push_back(whole[b]);
            }
            return steps;
          }};
}

// By hand in fp64, from the values that a model of `dtype` has. `rounding`: Σ over steps of what one unit of
// rounding in that step's gradient, relative to its scale s, does to the parameter in the end.
struct Reference {
  Tensors start, end, rounding;
};

Reference reference(const Kind& kind, at::ScalarType dtype) {
  const VerifyModel rounded = kind.make(dtype), model = kind.make(at::kDouble);
  Reference result;
  std::vector<at::Tensor> leaves;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < model.named.size(); ++i) {
    at::Tensor tensor = model.named[i].second;
    const at::NoGradGuard no_grad;
    tensor.copy_(rounded.named[i].second);
    if (!tensor.requires_grad()) continue;
    leaves.push_back(tensor), names.push_back(model.named[i].first);
    result.start[names.back()] = tensor.detach().clone();
    result.rounding[names.back()] = at::zeros({}, at::kDouble);
  }
  std::vector<at::Tensor> velocity;
  for (const at::Tensor& leaf : leaves) velocity.push_back(at::zeros_like(leaf));
  const Steps steps = kind.steps(0, 1);
  for (int i = 0; i < kSteps; ++i) {
    at::Tensor sum = at::zeros({}, at::kDouble);
    double targets = 0;
    for (const Batch& batch : steps[static_cast<std::size_t>(i)]) {
      sum = sum + model.loss_terms(batch)[0].sum;
      targets += batch.targets.ne(kIgnoreIndex).sum().item<double>();
    }
    auto gradients = torch::autograd::grad({sum / targets}, leaves, {}, std::nullopt, false, true);
    const at::NoGradGuard no_grad;
    double squares = 0, numel = 0;
    for (std::size_t p = 0; p < leaves.size(); ++p) {
      if (!gradients[p].defined()) gradients[p] = at::zeros_like(leaves[p]);
      squares += gradients[p].square().sum().item<double>();
      numel += static_cast<double>(gradients[p].numel());
    }
    for (std::size_t p = 0; p < leaves.size(); ++p) {
      velocity[p] = kMomentum * velocity[p] + gradients[p];
      leaves[p].sub_(velocity[p], kRate);
      const double scale =
          std::max(gradients[p].norm().item<double>(),
                   1e-3 * std::sqrt(squares / numel * static_cast<double>(gradients[p].numel())));
      double weight = 0;  // of this step's gradient in the sum of all updates
      for (int k = i; k < kSteps; ++k) weight += std::pow(kMomentum, k - i);
      result.rounding[names[p]] += kRate * weight * scale;
    }
  }
  for (std::size_t p = 0; p < leaves.size(); ++p) result.end[names[p]] = leaves[p].detach();
  return result;
}

using MakeLayout = std::function<std::unique_ptr<DataParallel>(const VerifyModel&, const World&)>;

std::vector<std::pair<std::string, MakeLayout>> every_layout(int ranks) {
  std::vector<std::pair<std::string, MakeLayout>> all;
  for (const int replicas : {1, 2}) {
    if (ranks % replicas != 0) continue;
    const std::string suffix = replicas > 1 ? ", 2 replicas" : "";
    all.emplace_back("zero3" + suffix, [replicas](const VerifyModel& model, const World& world) {
      return fully_shard(model.units->root, model.named, model.units->blocks,
                         Mesh(world, data_grid(world.size, {.dp_replicate = replicas})));
    });
    for (const testing::Strategy& strategy : testing::strategies()) {
      if (replicas > 1 && !strategy.sharded()) continue;
      all.emplace_back(strategy.name + suffix, [=](const VerifyModel& model, const World& world) {
        return strategy.make(trainable_parameters(model.named),
                             Mesh(world, data_grid(world.size, {.dp_replicate = replicas})),
                             {.bucket_bytes = 4 << 10, .first_bucket_bytes = 500});
      });
    }
  }
  return all;
}

// The values that are updated (masters in bf16) on rank 0 after all steps.
Tensors trained(int ranks, const Kind& kind, at::ScalarType dtype, const MakeLayout& make) {
  Tensors result;
  run_ranks(ranks, [&](World& world) {
    const VerifyModel model = kind.make(dtype);
    const auto layout = make(model, world);
    const auto optimizer = sgd({.learning_rate = kRate, .momentum = kMomentum});
    TokenMean mean;
    Step step(model.loss_terms, *layout, mean, *optimizer, {.max_norm = 0});
    for (const MicroBatches& batches : kind.steps(world.rank, world.size)) EXPECT_TRUE(step(batches).updated);
    for (const auto& view : layout->views()) {
      const at::Tensor values =
          (view.master.defined() ? view.master : view.parameter).detach().to(at::kDouble);
      if (world.rank == 0) result[view.name] = values.clone();
    }
  });
  return result;
}

// The largest share of what E2 allows, added up over the steps:
// ‖w − w64‖ ≤ 4‖w32 − w64‖ + u·√(W·G)·Σ rate·(weight of the step)·s, w32 one process in the same precision.
double share_of_rounding(const Tensors& found, const Tensors& alone, const Reference& wanted,
                         at::ScalarType dtype, int ranks, int accumulation) {
  const double unit =
      std::ldexp(1.0, dtype == at::kFloat ? -24 : -8) * std::sqrt(static_cast<double>(ranks) * accumulation);
  double worst = 0;
  for (const auto& [name, end] : wanted.end) {
    const auto error = [&](const at::Tensor& values) { return (values - end).norm().item<double>(); };
    const double share =
        error(found.at(name)) / (4 * error(alone.at(name)) + unit * wanted.rounding.at(name).item<double>());
    worst = std::isfinite(share) ? std::max(worst, share) : HUGE_VAL;
  }
  return worst;
}

class Momentum : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Momentum, ::testing::Values(1, 2, 3, 4, 5, 8));

// Accumulated or not by turns, and both with ISOGRAD_FULL_TESTS=1.
TEST_P(Momentum, GoesTheWayOfOneProcessInLowPrecision) {
  const int ranks = GetParam();
  const MakeLayout one = [](const VerifyModel& model, const World& world) {
    return naive(trainable_parameters(model.named), world.group);
  };
  const MakeLayout averages = [](const VerifyModel& model, const World& world) {
    return std::make_unique<planted::Averages>(bucketed(trainable_parameters(model.named), world.group, {}));
  };
  int cases = 0;
  double worst = 0;
  for (const int accumulation : {1, 3})
    for (const bool is_decoder : {false, true})
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        const bool in_turn =
            takes_first(static_cast<std::size_t>(4 * ranks + 2 * is_decoder + (dtype == at::kFloat)));
        if (!full_tests() && in_turn != (accumulation == 1)) continue;
        const Kind kind = is_decoder ? decoder(accumulation) : convolution_of(ranks, accumulation);
        const Reference wanted = reference(kind, dtype);
        const Tensors alone = trained(1, kind, dtype, one);
        const std::string where =
            fmt::format("{}, {}, accumulation {}", is_decoder ? "decoder" : "convolution",
                        c10::toString(dtype), accumulation);
        const auto share = [&](const MakeLayout& make) {
          return share_of_rounding(trained(ranks, kind, dtype, make), alone, wanted, dtype, ranks,
                                   accumulation);
        };
        for (const auto& [name, make] : every_layout(ranks)) {
          const double found = share(make);
          EXPECT_LE(found, 1) << where << ", " << name;
          worst = std::max(worst, found);
          ++cases;
        }
        if (ranks > 1) {
          EXPECT_GT(share(averages), 1) << where << ": an average over ranks passed";
        }
      }
  std::printf("%d ranks: %d cases, at most %.2f of the error allowed\n", ranks, cases, worst);
}

}  // namespace
}  // namespace isograd
