#include "model/fused.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <utility>

#include "isograd/error.hpp"
#include "kernels/matmul/product.hpp"
#include "kernels/versions.hpp"

namespace isograd {
namespace {

using Inputs = std::vector<at::Tensor>;
using Outputs = std::vector<at::Tensor>;
using Piece = std::function<Outputs(const Inputs&)>;

Inputs draw(const std::vector<std::vector<std::int64_t>>& shapes, at::ScalarType type, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  Inputs inputs;
  for (const auto& shape : shapes) inputs.push_back(at::randn(shape, generator, at::kDouble).to(type));
  return inputs;
}

// A loss with a different weight for every element of every output.
at::Tensor loss_of(const Outputs& outputs) {
  at::Tensor loss;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor weight = (at::arange(outputs[i].numel(), at::kDouble) * 0.7 + static_cast<double>(i))
                                  .sin()
                                  .view(outputs[i].sizes());
    const at::Tensor part = (outputs[i].to(at::kDouble) * weight).sum();
    loss = loss.defined() ? loss + part : part;
  }
  return loss;
}

// Outputs, then gradients of all inputs.
std::vector<at::Tensor> run(const Piece& piece, const Inputs& inputs) {
  Inputs leaves;
  for (const auto& x : inputs) leaves.push_back(x.detach().clone().requires_grad_());
  const auto outputs = piece(leaves);
  std::vector<at::Tensor> results;
  for (const auto& out : outputs) results.push_back(out.detach());
  for (auto& gradient : torch::autograd::grad({loss_of(outputs)}, leaves)) results.push_back(gradient);
  return results;
}

double relative_distance(const at::Tensor& a, const at::Tensor& b) {
  EXPECT_EQ(a.sizes(), b.sizes());
  EXPECT_EQ(a.scalar_type(), b.scalar_type());
  const at::Tensor x = a.to(at::kDouble), y = b.to(at::kDouble);
  return ((x - y).norm() / y.norm().clamp_min(1e-300)).item<double>();
}

struct FusedCase {
  const char* name;
  Piece fused, twin;
  std::vector<std::vector<std::int64_t>> shapes;
};

std::vector<FusedCase> cases(at::ScalarType type) {
  const auto wide = type == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor angle = (at::arange(70 * 6, at::kDouble) * 0.37).view({70, 6}).to(wide);
  const at::Tensor cos = angle.cos() * 1.25, sin = angle.sin() * 1.25;
  return {
      {"rms_norm",
       [](const Inputs& x) { return Outputs{rms_norm(x[0], x[1], 1e-5)}; },
       [](const Inputs& x) { return Outputs{naive_twin::rms_norm(x[0], x[1], 1e-5)}; },
       {{70, 3, 37}, {37}}},
      {"rms_norm_and_residual",
       [](const Inputs& x) {
         const auto [normed, kept] = rms_norm_and_residual(x[0], x[1], 1e-5);
         return Outputs{normed, kept};
       },
       [](const Inputs& x) {
         return Outputs{naive_twin::rms_norm(x[0], x[1], 1e-5), x[0]};
       },
       {{130, 64}, {64}}},
      {"rotary",
       [=](const Inputs& x) { return Outputs{rotary(x[0], cos, sin)}; },
       [=](const Inputs& x) { return Outputs{naive_twin::rotary(x[0], cos, sin)}; },
       {{70, 3, 12}}},
      {"rotary of a view",
       [=](const Inputs& x) { return Outputs{rotary(x[0].narrow(1, 1, 2), cos, sin)}; },
       [=](const Inputs& x) { return Outputs{naive_twin::rotary(x[0].narrow(1, 1, 2), cos, sin)}; },
       {{70, 3, 12}}},
      {"swiglu",
       [](const Inputs& x) { return Outputs{swiglu(x[0] * 8, x[1])}; },
       [](const Inputs& x) { return Outputs{naive_twin::swiglu(x[0] * 8, x[1])}; },
       {{33, 41}, {33, 41}}},
      {"linears",
       [](const Inputs& x) {
         return linears(x[0], {x[1], x[2]}, {x[3], at::Tensor()});
       },
       [](const Inputs& x) {
         return Outputs{naive_twin::linear(x[0], x[1], x[3]), naive_twin::linear(x[0], x[2], {})};
       },
       {{20, 24}, {16, 24}, {40, 24}, {16}}},
      {"linear_onto",
       [](const Inputs& x) { return Outputs{linear_onto(x[0], x[1], x[2], x[3])}; },
       [](const Inputs& x) { return Outputs{x[0] + naive_twin::linear(x[1], x[2], x[3])}; },
       {{20, 16}, {20, 24}, {16, 24}, {16}}},
  };
}

// Sums of at most a few hundred products: their rounding stays below the number type's unit times ~30.
TEST(Fused, AgreesWithPlainAten) {
  for (const auto& [type, tolerance] :
       {std::pair{at::kDouble, 1e-14}, {at::kFloat, 4e-6}, {at::kBFloat16, 1e-2}})
    for (const auto& [name, fused, twin, shapes] : cases(type))
      for (const std::uint64_t seed : {1, 2}) {
        const auto inputs = draw(shapes, type, seed);
        const auto ours = run(fused, inputs), theirs = run(twin, inputs);
        ASSERT_EQ(ours.size(), theirs.size());
        for (std::size_t i = 0; i < ours.size(); ++i)
          EXPECT_LT(relative_distance(ours[i], theirs[i]), tolerance)
              << name << " " << c10::toString(type) << " result " << i << " seed " << seed;
      }
}

// The passes over rows are compiled for several instruction sets. Products are one library's here at every
// level: by the rule another one multiplies at level 0, and it may round differently.
TEST(Fused, HasTheSameBitsInEveryVersion) {
  const Multiplier before = std::exchange(multiplier(), Multiplier::kBlas);
  const int best = kernels::processor_level();
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const auto& [name, fused, twin, shapes] : cases(type)) {
      const auto inputs = draw(shapes, type, 5);
      std::vector<at::Tensor> wanted;
      for (int level = 0; level <= best; ++level) {
        kernels::processor_level() = level;
        const auto results = run(fused, inputs);
        if (level == 0) wanted = results;
        for (std::size_t i = 0; i < results.size(); ++i)
          EXPECT_TRUE(results[i].equal(wanted[i])) << name << ", result " << i << ", level " << level;
      }
    }
  kernels::processor_level() = best;
  multiplier() = before;
}

// Central differences in fp64 along random directions: their own error is h²·f‴ + u·f/h.
TEST(Fused, GradientsAreDerivatives) {
  for (const auto& [name, fused, twin, shapes] : cases(at::kDouble)) {
    const auto inputs = draw(shapes, at::kDouble, 3), directions = draw(shapes, at::kDouble, 4);
    const auto results = run(fused, inputs);
    const std::size_t outputs = results.size() - inputs.size();
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const double h = 1e-5;
      const auto at_step = [&](double step) {
        auto moved = inputs;
        moved[i] = inputs[i] + step * directions[i];
        return loss_of(fused(moved)).item<double>();
      };
      const double difference = (at_step(h) - at_step(-h)) / (2 * h);
      const double derivative = (results[outputs + i] * directions[i]).sum().item<double>();
      EXPECT_NEAR(derivative, difference, 1e-6 * (1 + std::abs(difference))) << name << " input " << i;
    }
  }
}

// Values at which exp overflows or a gradient could become 0 · ∞.
TEST(Fused, SwiGluIsFiniteEverywhere) {
  const at::Tensor gate = at::tensor({-1e30, -800., -100., -0., 0., 100., 800., 1e30}, at::kDouble);
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const Inputs inputs{gate.to(type), at::ones({8}, type)};
    const auto results = run([](const Inputs& x) { return Outputs{swiglu(x[0], x[1])}; }, inputs);
    for (const auto& result : results) EXPECT_TRUE(at::isfinite(result).all().item<bool>()) << result;
    const auto nan =
        swiglu(at::full({3}, std::numeric_limits<double>::quiet_NaN(), type), at::ones({3}, type));
    EXPECT_TRUE(at::isnan(nan).all().item<bool>());
  }
}

TEST(Fused, UnusedAndFrozenInputs) {
  const auto x = draw({{20, 24}, {16, 24}, {40, 24}}, at::kFloat, 5);
  const at::Tensor input = x[0].clone().requires_grad_(), first = x[1].clone().requires_grad_(),
                   second = x[2];
  const auto both = linears(input, {first, second}, {at::Tensor(), at::Tensor()});
  both[1].sum().backward();  // the first output is not used, the second weight is frozen
  EXPECT_LT(relative_distance(input.grad(), second.sum(0).expand({20, 24})), 1e-6);
  EXPECT_FALSE(second.grad().defined());
  EXPECT_TRUE(!first.grad().defined());

  const at::Tensor weight = at::ones({24}, at::kFloat);  // frozen
  const at::Tensor again = x[0].clone().requires_grad_();
  const auto [normed, kept] = rms_norm_and_residual(again, weight, 1e-5);
  kept.sum().backward();  // only the residual is used
  EXPECT_TRUE(again.grad().equal(at::ones_like(again)));
  EXPECT_FALSE(rms_norm(x[0], weight, 1e-5).requires_grad());
}

TEST(Fused, ASecondDerivativeIsRefused) {
  for (const auto& [name, fused, twin, shapes] : cases(at::kDouble)) {
    Inputs leaves;
    for (const auto& x : draw(shapes, at::kDouble, 6)) leaves.push_back(x.clone().requires_grad_());
    EXPECT_THROW(
        torch::autograd::grad({loss_of(fused(leaves))}, leaves, {}, std::nullopt, /*create_graph=*/true),
        BrokenInvariant)
        << name;
  }
}

}  // namespace
}  // namespace isograd
