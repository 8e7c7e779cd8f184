// Arguments and results of a sharded module: what goes through the autograd node and what is kept as it is.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "parallel/data/unit_testing.hpp"

namespace isograd {
namespace {

using isograd::testing::FakeHost;

constexpr std::int64_t kHidden = 5;

// Several inputs and outputs of several kinds, some of which need no gradient.
struct Wide : torch::nn::Module {
  at::Tensor weight;
  Wide() { weight = register_parameter("weight", at::full({kHidden}, 0.3, at::kDouble)); }
  std::tuple<at::Tensor, std::vector<at::Tensor>, at::Tensor> forward(const at::Tensor& x,
                                                                      std::optional<at::Tensor> y,
                                                                      const std::vector<at::Tensor>& more,
                                                                      int times, const std::string& word) {
    at::Tensor first = x * weight * times;
    if (y) first = first + *y * *y;
    return {first, {more.at(0) * weight, weight, x}, at::ge(x, static_cast<double>(word.size()) - 3)};
  }
};

TEST(ShardedCall, TakesAndReturnsSeveralTensors) {
  for (bool with_optional : {false, true}) {
    const auto run = [&](const Sharded<Wide>& wide) {
      const auto leaf = [](double value) {
        return at::full({2, kHidden}, value, at::kDouble).requires_grad_();
      };
      const std::vector<at::Tensor> leaves{leaf(0.5), leaf(2), leaf(3)};
      const at::Tensor constant = at::ones({2, kHidden}, at::kDouble);
      const auto [first, more, mask] =
          wide(leaves[0] * 2, with_optional ? std::optional(leaves[1]) : std::nullopt,
               std::vector{leaves[2] * constant}, 7, std::string("word"));
      EXPECT_FALSE(mask.requires_grad());
      EXPECT_EQ(mask.scalar_type(), at::kBool);
      const at::Tensor loss =
          (first * mask + more[0] * more[2]).sum() + more[1].pow(3).sum();  // more[1]: the parameter itself
      auto gradients = torch::autograd::grad({loss}, leaves, {}, true, false, /*allow_unused=*/true);
      loss.backward();
      return gradients;
    };
    Sharded<Wide> reference(std::make_shared<Wide>()), wide(std::make_shared<Wide>());
    const auto wanted = run(reference);
    auto host = std::make_shared<FakeHost>();
    host->add(kRootUnit, "root", wide, false, host);
    const auto found = run(wide);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      ASSERT_EQ(found[i].defined(), wanted[i].defined());
      if (wanted[i].defined()) {
        EXPECT_TRUE(at::equal(found[i], wanted[i])) << i;
      }
    }
    EXPECT_TRUE(at::allclose(host->gradients.at(wide->weight.unsafeGetTensorImpl()), reference->weight.grad(),
                             1e-14, 0));
    EXPECT_EQ(host->whole(), 0u);
  }
}

TEST(ShardedCall, TheSameTensorTwiceAndAnInputHandedOn) {
  struct Pass : torch::nn::Module {
    at::Tensor gain = register_parameter("gain", at::full({1}, 2.0, at::kDouble));
    std::pair<at::Tensor, at::Tensor> forward(at::Tensor a, at::Tensor b) { return {a, a * b * gain}; }
  };
  Sharded<Pass> pass(std::make_shared<Pass>());
  auto host = std::make_shared<FakeHost>();
  host->add(kRootUnit, "root", pass, false, host);
  at::Tensor x = at::full({3}, 5.0, at::kDouble).requires_grad_();
  const auto [same, product] = pass(x, x);
  (same.sum() + product.sum()).backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({3}, 1 + 2 * 2 * 5.0, at::kDouble)));
  EXPECT_EQ(host->gradients.at(pass->gain.unsafeGetTensorImpl()).item<double>(), 75);
}

}  // namespace
}  // namespace isograd
