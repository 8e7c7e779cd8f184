// A low-rank adapter on ranks along tp and dp, against one process in fp64.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "isograd/lora.hpp"
#include "isograd/loss.hpp"
#include "isograd/tensor_parallel.hpp"
#include "isograd/world.hpp"
#include "model/decoder_testing.hpp"
#include "model/parameters.hpp"

namespace isograd::adapters {
namespace {

struct Adapted {
  DecoderLM model;
  LoraAdapter adapter;

  explicit Adapted(const DecoderConfig& config)
      : model(config, at::kDouble, 1), adapter(config, {.rank = 3, .alpha = 5}, at::kDouble, 2) {
    perturb(model, 3);
    for (const auto& [name, tensor] : model.named()) tensor.requires_grad_(false);
    for (auto [name, tensor] : adapter.named())
      if (name.ends_with("lora_B.weight")) fill_normal(tensor, 0.2, 4, name);
    model.include(adapter.named());
    model.set_adapter(&adapter);
  }
  // This rank's contribution to the gradients of the adapter's parameters.
  std::vector<at::Tensor> gradients(const Batch& batch) {
    std::vector<at::Tensor> parameters;
    for (const auto& [name, tensor] : adapter.named()) parameters.push_back(tensor);
    const at::Tensor loss =
        cross_entropy_sum(model.logits(batch), batch.targets, {.shard = model.vocabulary()});
    return torch::autograd::grad({loss}, parameters);
  }
};

Batch batch_of(const DecoderConfig& config) {
  Batch batch = make_batch({7, 12, 5}, config.vocabulary, 5);
  batch.targets = batch.tokens.roll(-1);
  return batch;
}

// The largest relative error of a parameter. `unsummed`: parameters of such names are not summed along tp.
double error_on(int ranks, const DecoderConfig& config, const TensorParallelOptions& options,
                const std::string& unsummed = "") {
  Adapted whole(config);
  const auto expected = whole.gradients(batch_of(config));
  std::vector<double> errors(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](World& world) {
    Adapted own(config);
    const Mesh mesh(world, with_key_head_view(Grid({{"tp", ranks}}), config));
    const Layout layout = cut_decoder(own.model, mesh, options);
    const auto parts = own.gradients(batch_of(config));
    std::vector<at::Tensor> all;
    for (const auto& [name, tensor] : own.model.named()) all.push_back(at::zeros_like(tensor));
    const std::size_t first = all.size() - parts.size();
    for (std::size_t i = 0; i < parts.size(); ++i) all[first + i].copy_(parts[i]);
    layout.sum_gradients(all);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::string& name = own.adapter.named()[i].first;
      const bool left_out = !unsummed.empty() && name.find(unsummed) != std::string::npos;
      const at::Tensor found = layout.whole(name, left_out ? parts[i] : all[first + i]);
      double& error = errors[static_cast<std::size_t>(world.rank)];
      error = std::max(error, ((found - expected[i]).norm() / expected[i].norm()).item<double>());
    }
  });
  return *std::ranges::max_element(errors);
}

TEST(Adapters, GradientsAlongTpAreThoseOfOneProcess) {
  DecoderConfig config = small_config("qwen2");  // with biases
  for (const auto& [ranks, heads, keys] : {std::tuple{2, 4, 2}, {4, 4, 2}, {3, 6, 2}}) {
    config.heads = heads, config.key_value_heads = keys;
    for (const bool tied : {false, true})
      for (const TensorParallelOptions& options :
           {TensorParallelOptions{}, {.sequence_parallel = false}, {.overlap = TensorOverlap::kTokens}}) {
        config.tied_output = tied;
        EXPECT_LT(error_on(ranks, config, options), 1e-12) << ranks << " ranks, tied " << tied;
      }
  }
}

TEST(Adapters, PlantedSumsThatAreLeftOut) {
  const DecoderConfig config = small_config("qwen3");
  for (const char* name :
       {"q_proj.lora_A", "up_proj.lora_A", "lm_head.lora_A", "o_proj.lora_B", "down_proj.lora_B"})
    EXPECT_GT(error_on(2, config, {}, name), 1e-2) << name;
}

}  // namespace
}  // namespace isograd::adapters
