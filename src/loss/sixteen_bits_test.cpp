// Losses that begin in 16 bits: LibTorch's functions by their real nodes, and the ways out that the refusals
// name.
#include <torch/csrc/autograd/autograd.h>

#include <unordered_set>

#include "isograd/loss.hpp"
#include "loss/normalizer_testing.hpp"
#include "loss/sixteen_bits_testing.hpp"
#include "loss/term_graph.hpp"

namespace isograd {
namespace {

using namespace normalizer_testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace sixteen_bits_testing;

at::Tensor learned(at::IntArrayRef shape) { return at::ones(shape).requires_grad_(true) * 1; }

std::set<std::string> nodes_of(const at::Tensor& value) {
  std::set<std::string> names;
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> nodes = {value.grad_fn().get()};
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const std::string name = nodes[i]->name();
    names.insert(name.substr(0, name.find("Backward")));
    for (const auto& edge : nodes[i]->next_edges())
      if (edge.function && seen.insert(edge.function.get()).second) nodes.push_back(edge.function.get());
  }
  return names;
}

void expect_each(const Functions& functions, In16Bits wanted) {
  for (const auto& [name, function] : functions) {
    at::Tensor sum;
    ASSERT_EQ(error_of([&] { sum = function(converted()).sum(); }), "no error") << name;
    const std::set<std::string> names = nodes_of(sum);
    EXPECT_TRUE(names.count(name)) << name << " is none of " << ::testing::PrintToString(names);
    EXPECT_EQ(static_cast<int>(in_16_bits(sum)), static_cast<int>(wanted)) << name;
  }
}
void expect_all_tested(std::set<std::string> names, const Functions& functions,
                       const std::set<std::string>& elsewhere) {
  for (const auto& [name, function] : functions) names.erase(name);
  for (const std::string& name : elsewhere) EXPECT_EQ(names.erase(name), 1u) << name;
  EXPECT_TRUE(names.empty()) << ::testing::PrintToString(names);
}

TEST(In16Bits, FunctionsOfTheirOwnSlopeBegin) {
  expect_each(kOwnSlope, In16Bits::kNothing);
  expect_all_tested(functions_of_own_slope(), kOwnSlope,
                    {"CudnnAttention", "CudnnBatchNorm", "CudnnCtcLoss", "CudnnRnn", "EfficientAttention",
                     "FlashAttention", "FusedRmsNorm", "MiopenBatchNorm", "MiopenCtcLoss", "MiopenRnn",
                     "ScaledDotProductCudnnAttention", "ScaledDotProductEfficientAttention",
                     "ScaledDotProductFlashAttention", "ScaledDotProductFusedAttentionOverrideable",
                     "ThnnFusedGruCell", "ThnnFusedLstmCell"});  // no GPU here
}

TEST(In16Bits, AllOthersHandAConstantOn) {
  expect_each(kMultiplying, In16Bits::kMultiples);
  expect_each(kCopying, In16Bits::kCopies);
  expect_all_tested(copying_functions(), kCopying, {});
  std::set<std::string> names;
  for (const auto& [name, factors] : products()) names.insert(name);
  Functions of_products;
  for (const auto& function : kMultiplying)
    if (names.count(function.first)) of_products.push_back(function);
  expect_all_tested(
      names, of_products,
      {"ConvDepthwise2D", "CudnnConvolution", "Linear", "Matmul", "MiopenConvolution", "MkldnnConvolution",
       "MkldnnLinear", "SlowConv2D", "SlowConv3D"});  // other devices and libraries
  // Sums of a constant over what is broadcast are no copies; nor is a multiple.
  for (const Function& function : {Function([](const Tensor& x) {
                                     return x + at::ones({7, 4, 4});
                                   }),
                                   Function([](const Tensor& x) { return at::add(likewise(1), x, 3); }),
                                   Function([](const Tensor& x) { return at::sub(likewise(1), x, 3); }),
                                   Function([](const Tensor& x) { return x.pow(1) * 1; })})
    EXPECT_EQ(in_16_bits(function(converted()).sum()), In16Bits::kMultiples);
}

// A factor that is learned differs between elements; one that is a single number does not.
TEST(In16Bits, LearnedFactorsDiffer) {
  const Tensor square = learned({4, 4}), row = learned({4}), batch = learned({1, 4, 4});
  expect_each({{"Addbmm", [&](const Tensor& x) { return at::addbmm(likewise(1), x.unsqueeze(0), batch); }},
               {"Addcdiv", [&](const Tensor& x) { return at::addcdiv(likewise(1), x, square); }},
               {"Addcmul", [&](const Tensor& x) { return at::addcmul(likewise(1), x, square); }},
               {"Addmm", [&](const Tensor& x) { return at::addmm(row, x, square); }},
               {"Addmv", [&](const Tensor& x) { return at::addmv(row, x, row); }},
               {"Addr", [&](const Tensor& x) { return at::addr(square, x[0], row); }},
               {"Baddbmm", [&](const Tensor& x) { return at::baddbmm(batch, x.unsqueeze(0), batch); }},
               {"Bmm", [&](const Tensor& x) { return at::bmm(x.unsqueeze(0), batch); }},
               {"Convolution",
                [&](const Tensor& x) {
                  return at::conv1d(x.unsqueeze(0), learned({1, 4, 1}));
                }},
               {"Div", [&](const Tensor& x) { return x / square + 1 / x; }},
               {"Dot", [&](const Tensor& x) { return at::dot(x[0], row); }},
               {"LinalgCross",
                [&](const Tensor& x) {
                  return at::linalg_cross(x.narrow(1, 0, 3), learned({4, 3}));
                }},
               {"Mm", [&](const Tensor& x) { return at::mm(x, square); }},
               {"Mul", [&](const Tensor& x) { return x * square + x * x; }},
               {"Mv", [&](const Tensor& x) { return at::mv(x, row); }},
               {"Vdot", [&](const Tensor& x) { return at::vdot(x[0], row); }}},
              In16Bits::kNothing);
  expect_each({{"Mul", [](const Tensor& x) { return x * learned({}); }},
               {"Div", [](const Tensor& x) { return x / learned({}); }},
               {"Addmm", [&](const Tensor& x) { return at::addmm(x, square, square); }}},
              In16Bits::kMultiples);
}

// ---- what the refusals advise ----

struct Net {  // x W, in bf16
  Tensor x, weight;
  Net() {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(1);
    x = at::randn({200, 16}, generator).to(at::kBFloat16);
    weight = at::randn({16, 32}, generator).to(at::kBFloat16).requires_grad_(true);
  }
  Tensor logits() const { return at::mm(x, weight); }
};
// The factor that is left between a gradient and the right one, 1 if there is none.
double scale_of(const Tensor& gradient, const Tensor& right) {
  const Tensor g = gradient.to(at::kDouble), r = right.to(at::kDouble);
  return ((g * r).sum() / r.square().sum()).item<double>();
}

TEST(In16Bits, AbsoluteErrorsAreDividedAtTheEndOrMadeInFloat32) {
  const Tensor wanted = at::full({200, 32}, 0.3);
  const auto absolute = [&](const Tensor& logits) { return at::l1_loss(logits, wanted, kSum); };
  Group alone = Group::solo();
  for (const std::int64_t n : {1021, 1015}) {
    const Denominator denominator{.value = double(n), .targets = double(n)};
    Net refused, deferred, wide, right;
    EXPECT_THAT(error_of([&] {
                  TokenMean().scale({{"l1", absolute(refused.logits().to(at::kFloat))}}, denominator);
                }),
                AllOf(HasSubstr("begins in 16 bits"), HasSubstr("the layer before the loss in float32"),
                      HasSubstr("Deferred")));
    EXPECT_THAT(error_of<Error>([&] {
                  gradient_accumulate_loss(at::l1_loss(refused.logits().to(at::kFloat), wanted), 3, n, alone);
                }),
                AllOf(HasSubstr("begins in 16 bits"), HasSubstr("DeferredAccumulator")));

    // Undivided, and a division that nothing rounds.
    absolute(right.logits().to(at::kFloat)).backward();
    const Tensor exact = right.weight.grad().to(at::kDouble) / static_cast<double>(n);

    DeferredAccumulator accumulator(std::make_unique<TokenMean>(), alone);
    accumulator.begin_call({batch_of({{1, n, n}})});
    accumulator.raw_loss({{"l1", absolute(deferred.logits().to(at::kFloat))}}).backward();
    const double scale = accumulator.finish().gradient_scale;
    EXPECT_TRUE(at::equal(deferred.weight.grad(), right.weight.grad()));
    EXPECT_NEAR(scale_of(deferred.weight.grad().to(at::kDouble) * scale, exact), 1, 1e-12);

    // The gradient of the weight is rounded once, each element by itself: u = 2^-9, 512 elements.
    TokenMean()
        .scale({{"l1", absolute(at::mm(wide.x.to(at::kFloat), wide.weight.to(at::kFloat)))}}, denominator)
        .backward();
    Net plain;
    plain.weight = plain.weight.detach().to(at::kDouble).requires_grad_(true);
    (absolute(at::mm(plain.x.to(at::kDouble), plain.weight).to(at::kFloat)) / static_cast<double>(n))
        .backward();
    EXPECT_NEAR(scale_of(wide.weight.grad(), plain.weight.grad()), 1, 0x1p-9 / std::sqrt(512) * 4);
  }
}

// Hinges likewise; and the functions that a raw sum may still not begin with.
TEST(In16Bits, DeferredTakesPlainSumsAlone) {
  Group alone = Group::solo();
  Deferred mean(std::make_unique<TokenMean>());
  const Denominator denominator = mean.denominator(mean.count({batch_of({{1, 1021, 1021}})}, alone, false));
  const Tensor x = converted(), narrow = x.to(at::kBFloat16);
  const auto refusal = [&](const Tensor& sum, double weight = 1) {
    return error_of([&] { mean.scale({{"l", sum, Mean::kStep, weight}}, denominator); });
  };
  EXPECT_EQ(refusal((x - likewise(0.4)).relu().sum()), "no error");
  EXPECT_EQ(refusal((x - likewise(0.4)).relu().sum(), 0.5), "no error");
  EXPECT_THAT(refusal((x - likewise(0.4)).relu().sum(), 0.3), HasSubstr("a weight that 16 bits hold"));
  EXPECT_THAT(refusal((x * likewise(0.3)).sum()), HasSubstr("is multiplied by"));
  EXPECT_THAT(refusal(x.mean()), HasSubstr("is multiplied by"));
  EXPECT_THAT(refusal(narrow.sum()), HasSubstr("a raw sum that begins in 16 bits"));
  EXPECT_THAT(refusal(narrow.sum().to(at::kFloat)), HasSubstr("a raw sum that begins in 16 bits"));
  EXPECT_EQ(refusal(x.square().sum(), 0.3), "no error");
}

// The sums that were let through, with 1/1021 off by 0.3 % in all of the gradient.
TEST(In16Bits, OfLogProbabilitiesIsRefusedHoweverTheyAreAddedUp) {
  const Tensor targets = at::zeros({200}, at::kLong), mask = at::ones({200});
  const Denominator denominator{.value = 1021, .targets = 1021};
  const auto sums = [&](const Tensor& log_probabilities) {
    const Tensor each = -log_probabilities.gather(1, targets.unsqueeze(1)).squeeze(1).to(at::kFloat);
    return std::vector<Tensor>{
        at::nll_loss(log_probabilities.to(at::kFloat), targets, {}, kSum),
        at::nll_loss(log_probabilities.to(at::kFloat), targets, {}, at::Reduction::None).sum(),
        at::dot(each, mask), each.cumsum(0).select(0, 199), at::relu(each).sum()};
  };
  Net net;
  for (const Tensor& sum : sums(at::log_softmax(net.logits(), 1)))
    EXPECT_THAT(error_of([&] {
                  TokenMean().scale({{"l", sum}}, denominator);
                }),
                HasSubstr("begins in 16 bits"));
  for (const Tensor& sum : sums(at::log_softmax(net.logits().to(at::kFloat), 1)))
    EXPECT_EQ(error_of([&] { TokenMean().scale({{"l", sum}}, denominator); }), "no error");
}

// However many nodes a sum is made of.
TEST(In16Bits, AreSeenUnderManyNodes) {
  const auto far = [](const at::Tensor& losses) {
    at::Tensor sum = losses.sum();
    for (int i = 0; i < 10000; ++i) sum = sum + 1;
    return in_16_bits(sum);
  };
  const at::Tensor x = at::ones({4}, at::kBFloat16).requires_grad_(true) * 1;
  EXPECT_EQ(far(x.to(at::kFloat)), In16Bits::kCopies);
  EXPECT_EQ(far(x.to(at::kFloat).square()), In16Bits::kNothing);
}

}  // namespace
}  // namespace isograd
