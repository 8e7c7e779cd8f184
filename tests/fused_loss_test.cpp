// The reference model with its loss fused into the output projection: one loss and one gradient of every
// parameter, whether the projection is tied or not.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "isograd/model.hpp"
#include "train/build.hpp"
#include "verify/test_problem.hpp"

namespace isograd {
namespace {

Batch make_batch(std::int64_t length, std::int64_t vocabulary) {
  Batch batch;
  batch.tokens = at::randint(vocabulary, {length}, at::kLong);
  batch.targets = at::randint(vocabulary, {length}, at::kLong);
  batch.targets[length - 1] = kIgnoreIndex;
  batch.positions = at::arange(length);
  batch.cu_seqlens = {0, length}, batch.sample_ids = {0}, batch.sample_targets = {length - 1};
  return batch;
}

std::vector<at::Tensor> gradients(DecoderLM& model, const at::Tensor& loss) {
  std::vector<at::Tensor> parameters;
  for (const auto& [name, tensor] : model.named()) parameters.push_back(tensor);
  return torch::autograd::grad({loss}, parameters);
}

double relative(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).norm() / b.norm().clamp_min(1e-300)).item<double>();
}

RunConfig configured(const std::string& fused) {
  RunConfig config;
  config.loss.fused = fused;
  return config;
}

// The loss that a run takes, of every setting of loss.fused, with and without weights.
TEST(FusedLoss, OfARunIsTheSameUnderEverySetting) {
  for (const bool tied : {false, true}) {
    at::manual_seed(6);
    const verify_test::Small small{.tied = tied};
    DecoderLM model(small.shape(), at::kDouble, 3);
    Batch batch = make_batch(40, model.config().vocabulary);
    for (const bool weighted : {false, true}) {
      if (weighted) batch.weights = at::rand({40}, at::kDouble);
      const auto loss_of = [&](const char* fused) {
        const LossTerms terms = forward_loss(model, configured(fused))(batch);
        EXPECT_EQ(terms.size(), 1u);
        EXPECT_EQ(terms[0].name, "cross_entropy");
        return terms[0].sum;
      };
      const at::Tensor wanted_loss = loss_of("off");
      const auto wanted = gradients(model, wanted_loss * 0.1);
      for (const char* fused : {"on", "auto"}) {
        const at::Tensor loss = loss_of(fused);
        EXPECT_NEAR(loss.item<double>(), wanted_loss.item<double>(), 1e-12 * wanted_loss.item<double>());
        const auto found = gradients(model, loss * 0.1);
        for (std::size_t i = 0; i < wanted.size(); ++i)
          EXPECT_LT(relative(found[i], wanted[i]), 1e-12) << fused << ", " << model.named()[i].first;
      }
    }
    // Nothing to learn from, and no tokens at all.
    Batch silent = make_batch(8, model.config().vocabulary);
    silent.targets.fill_(kIgnoreIndex);
    for (const Batch& nothing : {silent, empty_batch()})
      EXPECT_EQ(forward_loss(model, configured("on"))(nothing)[0].sum.item<double>(), 0);
  }
}

// PyTorch's own cross entropy with smoothed labels, and PaLM's term by its definition.
TEST(FusedLoss, SmoothsLabelsAndAddsTheSquaredPartitionAsDefined) {
  for (const bool tied : {false, true})
    for (const bool weighted : {false, true}) {
      at::manual_seed(8);
      const verify_test::Small small{.tied = tied};
      DecoderLM model(small.shape(), at::kDouble, 3);
      Batch batch = make_batch(40, model.config().vocabulary);
      if (weighted) batch.weights = at::rand({40}, at::kDouble);
      const at::Tensor weights = weighted ? batch.weights : at::ones({40}, at::kDouble);
      const auto wanted_of = [&](double smoothing, double z) {
        const at::Tensor logits = model.logits(batch), valid = batch.targets.ne(kIgnoreIndex);
        const at::Tensor each =
            at::cross_entropy_loss(logits, batch.targets, {}, at::Reduction::None, kIgnoreIndex, smoothing);
        return (weights * valid * (each + z * logits.logsumexp(1).square())).sum();
      };
      for (const char* fused : {"off", "on"})
        for (const auto& [smoothing, z] : {std::pair(0.1, 0.0), {0.0, 0.01}, {0.3, 0.02}}) {
          RunConfig config = configured(fused);
          config.loss.label_smoothing = smoothing, config.loss.z_loss = z;
          const at::Tensor loss = forward_loss(model, config)(batch)[0].sum, wanted = wanted_of(smoothing, z);
          EXPECT_NEAR(loss.item<double>(), wanted.item<double>(), 1e-12 * wanted.item<double>());
          const auto found = gradients(model, loss), expected = gradients(model, wanted);
          const auto plain = gradients(model, wanted_of(0, 0));
          for (std::size_t i = 0; i < expected.size(); ++i) {
            EXPECT_LT(relative(found[i], expected[i]), 1e-12) << fused << ", " << model.named()[i].first;
            EXPECT_GT(relative(found[i], plain[i]), 1e-3) << "the terms change nothing";
          }
          const at::NoGradGuard evaluation;
          EXPECT_NEAR(forward_loss(model, config)(batch)[0].sum.item<double>(),
                      wanted_of(0, 0).item<double>(), 1e-12 * wanted.item<double>())
              << "an evaluation is of the plain cross entropy";
        }
    }
}

TEST(FusedLoss, IsChosenByTheMemoryOfTheLogits) {
  EXPECT_FALSE(fuses_loss(configured("auto"), 4096, 8192, 4));
  EXPECT_FALSE(fuses_loss(configured("auto"), 4096, 16384, 4));  // 256 MiB
  EXPECT_TRUE(fuses_loss(configured("auto"), 4097, 16384, 4));
  EXPECT_TRUE(fuses_loss(configured("auto"), 4096, 32768, 4));
  EXPECT_FALSE(fuses_loss(configured("auto"), 4096, 32768, 2));
  EXPECT_TRUE(fuses_loss(configured("auto"), 1 << 20, 1 << 20, 8));
  EXPECT_TRUE(fuses_loss(configured("on"), 1, 2, 4));
  EXPECT_FALSE(fuses_loss(configured("off"), 1 << 20, 1 << 20, 8));
}

}  // namespace
}  // namespace isograd
