// Means over a micro-batch that a forward returns in place of sums, by LibTorch's real graphs.
#include "loss/term_graph.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>

#include "isograd/loss.hpp"
#include "loss/normalizer_testing.hpp"

namespace isograd::local_mean_testing {
namespace {

using at::Tensor;
constexpr auto kMeanOf = at::Reduction::Mean;
constexpr auto kSumOf = at::Reduction::Sum;
constexpr std::int64_t kClasses = 5;

// A micro-batch of `tokens` tokens of two samples, the last token without target, and its logits.
struct Given {
  Batch batch;
  Tensor logits, n;  // [T, kClasses]; valid targets as a tensor

  explicit Given(std::int64_t tokens)
      : batch(normalizer_testing::batch_of({{1, 2, 2, 1}, {2, tokens - 2, tokens - 3, 3}})) {
    batch.targets[tokens - 1] = kIgnoreIndex;
    logits = at::randn({tokens, kClasses}, at::kDouble).requires_grad_(true) * 1;
    n = at::full({}, tokens - 1, at::kDouble);
  }
  Tensor loss(at::Reduction::Reduction reduction, double smoothing = 0) const {
    return at::cross_entropy_loss(logits, batch.targets, {}, reduction, kIgnoreIndex, smoothing);
  }
  double count() const { return n.item<double>(); }
  Tensor mask() const { return batch.targets.ne(kIgnoreIndex).to(at::kDouble); }
};
using Forward = std::function<Tensor(const Given&)>;
struct Case {
  const char* name;
  Forward forward;
};

std::unique_ptr<Normalizer> step_of(Mean mean) {
  if (mean == Mean::kSamples) return std::make_unique<SampleMean>();
  if (mean == Mean::kFixed) return std::make_unique<FixedDenominator>(7);
  if (mean == Mean::kNone) return std::make_unique<NoDenominator>();
  return std::make_unique<TokenMean>();
}

std::string found(const Forward& forward, std::vector<std::int64_t> sizes, Mean mean = Mean::kTargets,
                  LossTerm like = {.name = "l"}) {
  LocalMeans means;
  for (const std::int64_t tokens : sizes) {
    const Given given(tokens);
    like.sum = forward(given);
    means.look({like}, given.batch, *step_of(mean));
  }
  const auto text = means.found();
  return text ? text->found : "";
}

const std::vector<Case> kSeenAtOnce = {
    {"cross entropy", [](const Given& g) { return g.loss(kMeanOf); }},
    {"label smoothing", [](const Given& g) { return g.loss(kMeanOf, 0.1); }},
    {"float of a mean", [](const Given& g) { return g.loss(kMeanOf).to(at::kFloat) + 1; }},
    {"pixels",
     [](const Given& g) {
       return at::cross_entropy_loss(g.logits.t().unsqueeze(0).unsqueeze(2), g.batch.targets.view({1, 1, -1}),
                                     {}, kMeanOf, kIgnoreIndex);
     }},
    {"mean", [](const Given& g) { return g.loss(at::Reduction::None).mean(); }},
    {"mean over a dimension", [](const Given& g) { return g.loss(at::Reduction::None).mean(0); }},
    {"mean of sums", [](const Given& g) { return g.logits.square().sum(1).mean(); }},
    {"mse", [](const Given& g) { return at::mse_loss(g.logits, at::zeros_like(g.logits)); }},
    {"l1", [](const Given& g) { return at::l1_loss(g.logits, at::zeros_like(g.logits)); }},
    {"smooth l1", [](const Given& g) { return at::smooth_l1_loss(g.logits, at::zeros_like(g.logits)); }},
    {"huber", [](const Given& g) { return at::huber_loss(g.logits, at::zeros_like(g.logits)); }},
    {"bce",
     [](const Given& g) { return at::binary_cross_entropy(g.logits.sigmoid(), at::ones_like(g.logits)); }},
    {"bce of logits",
     [](const Given& g) { return at::binary_cross_entropy_with_logits(g.logits, at::ones_like(g.logits)); }},
    {"kl", [](const Given& g) { return at::kl_div(g.logits.log_softmax(1), at::ones_like(g.logits) / 5); }},
    {"a sum and a mean", [](const Given& g) { return g.loss(kSumOf) + g.logits.square().mean(); }},
    {"sum / n", [](const Given& g) { return g.loss(kSumOf) / g.count(); }},
    {"sum / n, a tensor", [](const Given& g) { return g.loss(kSumOf) / g.mask().sum(); }},
    {"sum / tokens", [](const Given& g) { return g.loss(kSumOf) / g.batch.num_tokens(); }},
    {"isograd's sum / n",
     [](const Given& g) { return cross_entropy_sum(g.logits, g.batch.targets) / g.count(); }},
    {"masked",
     [](const Given& g) { return (g.loss(at::Reduction::None) * g.mask()).sum() / g.mask().sum(); }}};

// Seen once two micro-batches of different sizes agree: before that the number may be a factor of the user's.
const std::vector<Case> kSeenByTwo = {
    {"half a mean", [](const Given& g) { return 0.5 * at::mse_loss(g.logits, at::zeros_like(g.logits)); }},
    {"a mean / 4", [](const Given& g) { return g.loss(kMeanOf) / 4; }},
    {"sum * (1 / n)", [](const Given& g) { return g.loss(kSumOf) * (1 / g.count()); }},
    {"divided elements", [](const Given& g) { return (g.loss(at::Reduction::None) / g.count()).sum(); }},
    {"a mask that adds up to 1",
     [](const Given& g) { return (g.loss(at::Reduction::None) * (g.mask() / g.mask().sum())).sum(); }}};

const std::vector<Case> kRight = {
    {"sum", [](const Given& g) { return g.loss(kSumOf); }},
    {"isograd's sum", [](const Given& g) { return cross_entropy_sum(g.logits, g.batch.targets); }},
    {"label smoothing", [](const Given& g) { return g.loss(kSumOf, 0.1); }},
    {"a mean times its count", [](const Given& g) { return g.loss(kMeanOf) * g.count(); }},
    {"a count times a mean times 0.1", [](const Given& g) { return 0.1 * g.count() * g.loss(kMeanOf); }},
    {"a mean of all times its elements",
     [](const Given& g) { return g.logits.square().mean() * g.logits.numel(); }},
    {"a mean of each token", [](const Given& g) { return g.logits.square().mean(1).sum(); }},
    {"a sum of each token / 5", [](const Given& g) { return (g.logits.square().sum(1) / kClasses).sum(); }},
    {"squared_error_sum",
     [](const Given& g) { return squared_error_sum(g.logits, at::zeros_like(g.logits)); }},
    {"half a sum", [](const Given& g) { return 0.5 * g.loss(kSumOf); }},
    {"a sum / 12", [](const Given& g) { return g.loss(kSumOf) / 12; }},
    {"a learned divisor",
     [](const Given& g) {
       return g.loss(kSumOf) / at::full({}, g.count(), at::kDouble).requires_grad_(true);
     }},
    {"rewards",
     [](const Given& g) {
       Tensor advantages = at::zeros_like(g.mask());
       advantages[1] = 1;
       return (g.loss(at::Reduction::None) * advantages).sum();
     }},
    {"a constant", [](const Given&) { return at::zeros({}, at::kDouble); }}};

TEST(LocalMeans, AreSeenInTheFirstMicroBatch) {
  for (const Case& wrong : kSeenAtOnce) EXPECT_NE(found(wrong.forward, {9}), "") << wrong.name;
}

TEST(LocalMeans, WithAFactorAreSeenInTheSecond) {
  for (const Case& wrong : kSeenByTwo) {
    EXPECT_EQ(found(wrong.forward, {9}), "") << wrong.name;
    EXPECT_EQ(found(wrong.forward, {9, 9}), "") << wrong.name;
    EXPECT_NE(found(wrong.forward, {9, 14}), "") << wrong.name;
    EXPECT_NE(found(wrong.forward, {9, 9, 2, 30, 2}), "")
        << wrong.name << ", with micro-batches of one target";
  }
}

TEST(LocalMeans, SumsPass) {
  for (const Case& right : kRight) EXPECT_EQ(found(right.forward, {9, 6, 13, 14, 9}), "") << right.name;
}

// Means over each sample, added up, are a sum where samples are what is counted.
TEST(LocalMeans, OfEachSamplePass) {
  const Forward each = [](const Given& g) {
    const Tensor losses = g.loss(at::Reduction::None);
    return losses.narrow(0, 0, 2).mean() + losses.narrow(0, 2, g.batch.num_tokens() - 2).mean();
  };
  const Forward stacked = [&](const Given& g) {
    const Tensor losses = g.loss(at::Reduction::None);
    return at::stack({losses.narrow(0, 0, 2).mean(), losses.narrow(0, 2, g.batch.num_tokens() - 2).mean()})
        .sum();
  };
  for (const Mean mean : {Mean::kSamples, Mean::kFixed}) {
    EXPECT_EQ(found(each, {9, 14}, mean), "") << name_of(mean);
    EXPECT_EQ(found(stacked, {9, 14}, mean), "") << name_of(mean);
    EXPECT_NE(found([&](const Given& g) { return each(g) / 2; }, {9, 14}, mean), "x") << name_of(mean);
    EXPECT_NE(found(kSeenAtOnce[0].forward, {9}, mean), "") << name_of(mean);
  }
  EXPECT_NE(found(each, {9}), "") << "a mean over tokens";
}

// w_i / T_b is one over the number of targets where a sample is alone in its micro-batch, whole or in pieces.
TEST(LocalMeans, TheBatchsOwnWeightsPass) {
  LocalMeans means;
  for (const std::int64_t tokens : {9, 14, 6}) {
    Given given(tokens);
    given.batch.sample_ids = {4, 4};
    given.batch.weights = given.batch.sample_weights =
        at::full({tokens}, 1 / given.count(), at::kDouble) * given.mask();
    means.look({{"l", (given.loss(at::Reduction::None) * given.batch.weights).sum()}}, given.batch,
               SampleMean());
    means.look({{"t", (given.loss(at::Reduction::None) * given.batch.weights).sum()}}, given.batch,
               WeightedMean());
  }
  EXPECT_FALSE(means.found());
}

TEST(LocalMeans, PassWhereNothingIsDividedOrLearned) {
  const Forward& mean = kSeenAtOnce[0].forward;
  EXPECT_NE(found(mean, {9}), "");
  EXPECT_EQ(found(mean, {3}).substr(0, 17), "a mean over 2 ele");
  EXPECT_EQ(found(mean, {9}, Mean::kNone), "");
  EXPECT_EQ(found(mean, {9}, Mean::kTargets, {.name = "l", .mean = Mean::kNone}), "");
  EXPECT_EQ(found(mean, {9}, Mean::kTargets, {.name = "l", .mean = Mean::kMicroBatches}), "");
  EXPECT_EQ(found(mean, {9}, Mean::kTargets, {.name = "l", .replicated = true}), "");
  EXPECT_EQ(found(mean, {9}, Mean::kTargets, {.name = "l", .weight = 0}), "");
  EXPECT_NE(found(mean, {9}, Mean::kNone, {.name = "l", .mean = Mean::kTargets}), "");
  EXPECT_EQ(found([](const Given& g) { return g.loss(kMeanOf).detach(); }, {9}), "") << "only logged";
}

// However many nodes a term is made of.
TEST(LocalMeans, IsSeenUnderManyNodes) {
  const auto far = [](const Tensor& loss) {
    Tensor sum = loss;
    for (int i = 0; i < 10000; ++i) sum = sum + 1;
    return sum;
  };
  EXPECT_NE(found([&](const Given& given) { return far(given.loss(kMeanOf)); }, {9}), "");
  EXPECT_EQ(found([&](const Given& given) { return far(given.loss(kSumOf)); }, {9}), "");
}

}  // namespace
}  // namespace isograd::local_mean_testing
