// The reference model with its loss fused into the output projection: one loss and one gradient of every
// parameter, whether the projection is tied or not.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "isograd/decoder_lm.hpp"
#include "isograd/loss.hpp"

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

TEST(FusedLoss, OfTheReferenceModelIsThatOfItsLogits) {
  for (const bool tied : {false, true}) {
    at::manual_seed(5);
    DecoderConfig config;
    config.vocabulary = 101, config.hidden = 24, config.layers = 2, config.feed_forward = 40;
    config.heads = 2, config.key_value_heads = 1, config.head_dim = 12;
    config.initializer_range = 0.3, config.tied_output = tied;
    DecoderLM model(config, at::kDouble, 3);
    const Batch batch = make_batch(40, config.vocabulary);
    const at::Tensor plain = cross_entropy_sum(model.logits(batch), batch.targets) * 0.1;
    const at::Tensor fused = linear_cross_entropy_sum(model.hidden(batch), model.output_weight(),
                                                      batch.targets, {.tile_tokens = 16}) *
                             0.1;
    EXPECT_NEAR(fused.item<double>(), plain.item<double>(), 1e-12 * plain.item<double>());
    const auto found = gradients(model, fused), wanted = gradients(model, plain);
    for (std::size_t i = 0; i < wanted.size(); ++i)
      EXPECT_LT(relative(found[i], wanted[i]), 1e-12) << model.named()[i].first;
    // Planted: a tied weight whose part as projection is forgotten.
    const auto forgotten = gradients(
        model,
        linear_cross_entropy_sum(model.hidden(batch), model.output_weight().detach(), batch.targets) * 0.1 +
            0 * model.output_weight().sum());
    double worst = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i)
      worst = std::max(worst, relative(forgotten[i], wanted[i]));
    EXPECT_GT(worst, 1e-2);
  }
}

}  // namespace
}  // namespace isograd
