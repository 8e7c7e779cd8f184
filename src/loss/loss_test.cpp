#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "isograd/loss.hpp"
#include "loss/loss_testing.hpp"

namespace isograd {
namespace {

// The naive twin: LibTorch's own, in the computing type.
at::Tensor naive(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits.to(logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat),
                                targets, {}, at::Reduction::Sum, kIgnoreIndex);
}

struct Case {
  at::ScalarType type;
  double value_bound, gradient_bound;
};
// fp32: some 50 roundings of logits of size 10 (see kernels/softmax_test.cpp); bf16 rounds its gradient once.
const Case kCases[] = {{at::kDouble, 1e-13, 1e-13}, {at::kFloat, 2e-6, 4e-6}, {at::kBFloat16, 2e-6, 0x1p-8}};

TEST(CrossEntropySum, EqualsItsTwin) {
  at::manual_seed(1);
  for (const Case& c : kCases)
    for (auto [rows, vocabulary] :
         {std::pair<std::int64_t, std::int64_t>{1, 1}, {5, 3}, {64, 258}, {7, 5000}}) {
      at::Tensor logits = leaf((at::randn({rows, vocabulary}, at::kDouble) * 3).to(c.type));
      at::Tensor twin_logits = leaf(logits.to(at::kDouble));
      at::Tensor targets = some_targets(rows, vocabulary);
      at::Tensor loss = cross_entropy_sum(logits, targets), twin = naive(twin_logits, targets);
      EXPECT_EQ(loss.dim(), 0);
      EXPECT_EQ(loss.scalar_type(), c.type == at::kDouble ? at::kDouble : at::kFloat);
      EXPECT_NEAR(loss.item<double>(), twin.item<double>(), c.value_bound * (1 + twin.item<double>()));
      (loss * 0.3).backward();
      (twin * 0.3).backward();
      EXPECT_EQ(logits.grad().scalar_type(), c.type);
      EXPECT_LT(relative(logits.grad(), twin_logits.grad()), c.gradient_bound) << rows << " x " << vocabulary;
      EXPECT_EQ(relative(logits.grad() * 1.01, twin_logits.grad()) > c.gradient_bound, vocabulary > 1);
      if (rows > 1) {
        EXPECT_EQ(logits.grad()[1].abs().max().item<double>(), 0) << "ignored";
      }
    }
}

TEST(CrossEntropySum, TakesLogitsInAnyLayout) {
  at::manual_seed(2);
  at::Tensor base = leaf(at::randn({30, 6}, at::kDouble)), twin = leaf(base);
  at::Tensor targets = some_targets(6, 30);
  cross_entropy_sum(base.t(), targets).backward();
  naive(twin.t(), targets).backward();
  EXPECT_LT(relative(base.grad(), twin.grad()), 1e-13);
}

// The gradient may be written over the logits only if nobody can see it.
TEST(CrossEntropySum, WritesOverLogitsOnlyWhenNobodyElseSeesThem) {
  at::manual_seed(3);
  at::Tensor weight = leaf(at::randn({50, 8}, at::kDouble)), input = at::randn({9, 8}, at::kDouble);
  at::Tensor targets = some_targets(9, 50);
  const auto gradient = [&](const std::function<void()>& run) {
    weight.mutable_grad() = at::Tensor();
    run();
    return weight.grad().clone();
  };
  const at::Tensor plain = gradient([&] { naive(at::linear(input, weight), targets).backward(); });

  const void* address = nullptr;
  bool overwritten = false;
  const at::Tensor in_place = gradient([&] {
    at::Tensor logits = at::linear(input, weight);
    address = logits.const_data_ptr();
    logits.register_hook([&](const at::Tensor& g) { overwritten = g.const_data_ptr() == address; });
    at::Tensor loss = cross_entropy_sum(logits, targets);
    logits = at::Tensor();
    loss.backward();
  });
  EXPECT_TRUE(overwritten);
  EXPECT_LT(relative(in_place, plain), 1e-13);

  at::Tensor held, before;
  const at::Tensor while_held = gradient([&] {
    held = at::linear(input, weight);
    before = held.detach().clone();
    cross_entropy_sum(held, targets).backward();
  });
  EXPECT_TRUE(at::equal(held, before));
  EXPECT_TRUE(at::equal(while_held, in_place));

  const at::Tensor twice = gradient([&] {  // a graph kept for a second backward keeps the logits
    at::Tensor loss = cross_entropy_sum(at::linear(input, weight), targets);
    loss.backward({}, /*keep_graph=*/true);
    loss.backward();
  });
  EXPECT_LT(relative(twice, 2 * plain), 1e-13);

  const auto soft_cap = [&](auto&& loss_of) {  // tanh's own backward reads its output, the logits
    return gradient([&] { loss_of(at::tanh(at::linear(input, weight)), targets).backward(); });
  };
  const auto ours = [](const at::Tensor& x, const at::Tensor& y) { return cross_entropy_sum(x, y); };
  EXPECT_LT(relative(soft_cap(ours), soft_cap(naive)), 1e-13);

  at::Tensor detached;
  gradient([&] {  // a detached alias shares the memory
    at::Tensor logits = at::linear(input, weight);
    detached = logits.detach();
    at::Tensor loss = cross_entropy_sum(logits, targets);
    logits = at::Tensor();
    loss.backward();
  });
  EXPECT_TRUE(at::equal(detached, before));
}

TEST(CrossEntropySum, OfNothingIsExactlyZero) {
  for (auto type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    at::Tensor empty = leaf(at::randn({0, 7}).to(type));
    at::Tensor loss = cross_entropy_sum(empty, at::empty({0}, at::kLong));
    EXPECT_EQ(loss.item<double>(), 0);
    loss.backward();
    EXPECT_EQ(empty.grad().sizes(), at::IntArrayRef({0, 7}));
    // NaN logits without a target do not leak.
    at::Tensor nan = leaf(at::full({2, 7}, std::nan("")).to(type));
    loss = cross_entropy_sum(nan, at::full({2}, kIgnoreIndex, at::kLong));
    EXPECT_EQ(loss.item<double>(), 0);
    loss.backward();
    EXPECT_EQ(nan.grad().to(at::kDouble).abs().sum().item<double>(), 0);
  }
}

TEST(CrossEntropySum, ShowsWhatIsNotFinite) {
  at::Tensor logits = at::zeros({2, 40});
  logits[1][3] = std::nan("");
  EXPECT_TRUE(std::isnan(cross_entropy_sum(logits, at::tensor({1, 2}, at::kLong)).item<double>()));
  EXPECT_FALSE(std::isnan(cross_entropy_sum(logits, at::tensor({1, -100}, at::kLong)).item<double>()));
}

TEST(CrossEntropySum, SumsManyTokensAccurately) {
  const std::int64_t rows = 1 << 18;  // fp32 addition one by one would be off in the third digit
  at::Tensor logits = at::zeros({rows, 3});
  EXPECT_NEAR(cross_entropy_sum(logits, at::zeros({rows}, at::kLong)).item<double>() / (rows * std::log(3.0)),
              1, 2 * 0x1p-24);
}

TEST(CrossEntropySum, RefusesBadArguments) {
  const at::Tensor logits = at::zeros({3, 5});
  const auto with_target = [&](std::int64_t bad) {
    return error_of([&] { cross_entropy_sum(logits, at::tensor(std::vector<std::int64_t>{1, 2, bad})); });
  };
  EXPECT_NE(with_target(5).find("targets[2] = 5; expected 0 to 4"), std::string::npos) << with_target(5);
  EXPECT_NE(with_target(-1).find("targets[2] = -1"), std::string::npos);
  EXPECT_EQ(with_target(-100), "no error");
  EXPECT_NE(error_of([&] { cross_entropy_sum(logits, at::zeros({4}, at::kLong)); }).find("[3, 5]"),
            std::string::npos);
  EXPECT_NE(error_of([&] { cross_entropy_sum(logits, at::zeros({3})); }).find("int64"), std::string::npos);
  EXPECT_NE(
      error_of([&] { cross_entropy_sum(logits.to(at::kHalf), at::zeros({3}, at::kLong)); }).find("float32"),
      std::string::npos);
  at::Tensor wanted = leaf(logits);
  at::Tensor loss = cross_entropy_sum(wanted, at::zeros({3}, at::kLong));
  EXPECT_NE(error_of([&] { torch::autograd::grad({loss}, {wanted}, {}, true, true); }).find("create_graph"),
            std::string::npos);
}

// ---- the token mean ----

Batch batch_of_targets(std::vector<std::int64_t> targets) {
  Batch batch;
  const auto length = static_cast<std::int64_t>(targets.size());
  batch.targets = at::tensor(targets, at::kLong);
  batch.tokens = at::zeros({length}, at::kLong);
  batch.positions = at::arange(length);
  if (length > 0) {
    batch.cu_seqlens = {0, length};
    batch.sample_ids = {0};
    batch.sample_targets = {batch.num_targets()};
  }
  return batch;
}

TEST(TokenMean, CountsTargetsTokensAndMicroBatches) {
  TokenMean mean;
  Group alone = Group::solo();
  const MicroBatches batches = {batch_of_targets({1, -100, 2}), batch_of_targets({}),
                                batch_of_targets({-100})};
  const StepCounts step_counts = mean.count(batches, alone, true);
  EXPECT_EQ(step_counts.targets, 2);
  EXPECT_EQ(step_counts.tokens, 4);
  EXPECT_EQ(step_counts.micro_batches, 3);
  EXPECT_TRUE(step_counts.stop_requested);
  EXPECT_EQ(step_counts.targets_by_rank, std::vector<std::int64_t>{2});
  const Denominator denominator = mean.denominator(step_counts);
  EXPECT_EQ(denominator.value, 2);
  EXPECT_EQ(denominator.of, "targets");
  EXPECT_EQ(denominator.over, "data");
}

// 900 targets with loss 1 and 100 with loss 11: the token mean is 2, the mean of the two means 6.
TEST(TokenMean, IsNotTheMeanOfMeans) {
  TokenMean mean;
  Group alone = Group::solo();
  const MicroBatches batches = {batch_of_targets(std::vector<std::int64_t>(900, 1)),
                                batch_of_targets(std::vector<std::int64_t>(100, 1))};
  const Denominator denominator = mean.denominator(mean.count(batches, alone, false));
  const at::Tensor sums[] = {at::ones({900}, at::kDouble).sum(), at::full({100}, 11.0, at::kDouble).sum()};
  double loss = 0, mean_of_means = 0;
  for (int i = 0; i < 2; ++i) {
    loss += mean.scale({{"loss", sums[i]}}, denominator).item<double>();
    mean_of_means += mean.scale({{"loss", sums[i]}}, {.value = static_cast<double>(batches[i].num_targets())})
                         .item<double>() /
                     2;
  }
  EXPECT_DOUBLE_EQ(loss, 2.0);
  EXPECT_DOUBLE_EQ(mean_of_means, 6.0);
}

TEST(TokenMean, SumsItsTermsAndPassesOneOverNBack) {
  TokenMean mean;
  at::Tensor a = leaf(at::full({}, 3.0, at::kFloat)), b = leaf(at::full({1}, 4.0, at::kDouble));
  at::Tensor loss = mean.scale({{"a", a}, {"b", b}}, {.value = 28});
  EXPECT_DOUBLE_EQ(loss.item<double>(), 0.25);
  loss.backward();
  EXPECT_EQ(a.grad().item<float>(), 1.f / 28);
  EXPECT_EQ(b.grad().item<double>(), 1.0 / 28);
}

TEST(TokenMean, OfNothingIsZeroAndLeaksNoNaN) {
  TokenMean mean;
  at::Tensor nan = leaf(at::full({}, std::nan("")));
  at::Tensor loss = mean.scale({{"loss", nan * 2}}, {.value = 0});
  EXPECT_EQ(loss.item<double>(), 0);
  loss.backward();
  EXPECT_TRUE(!nan.grad().defined() || nan.grad().item<double>() == 0);
}

TEST(TokenMean, CountsBeyondFp32) {
  // 2^24 + 1 is not an fp32 number.
  StepCounts step_counts;
  step_counts.targets = (1 << 24) + 1;
  EXPECT_EQ(TokenMean().denominator(step_counts).value, 16777217.0);
}

TEST(TokenMean, RefusesTermsThatAreNotSums) {
  TokenMean mean;
  EXPECT_NE(error_of([&] { mean.scale({}, {.value = 1}); }).find("no loss term"), std::string::npos);
  EXPECT_NE(error_of([&] {
              mean.scale({{"ce", at::zeros({3})}}, {.value = 1});
            }).find("'ce': found shape [3]"),
            std::string::npos);
  EXPECT_NE(error_of([&] {
              mean.scale({{"ce", at::Tensor()}}, {.value = 1});
            }).find("undefined"),
            std::string::npos);
}

}  // namespace
}  // namespace isograd
