#include "isograd/model.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "isograd/error.hpp"
#include "model/decoder.hpp"
#include "model/decoder_testing.hpp"

namespace isograd {
namespace {

using ::testing::HasSubstr;

double relative_error(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.to(at::kDouble), y = b.to(at::kDouble);
  return ((x - y).norm() / y.norm().clamp_min(1e-300)).item<double>();
}

TEST(DecoderLM, FragmentsDoNotSeeEachOther) {
  for (const DecoderConfig& config : small_configs()) {
    DecoderLM model(config, at::kFloat, 1);
    const std::vector<std::int64_t> lengths = {7, 12, 12, 3};
    const Batch batch = make_batch(lengths, config.vocabulary, 2);
    Batch changed = batch;
    changed.tokens = batch.tokens.clone();
    changed.tokens.narrow(0, 7, 12).fill_(3);
    const at::NoGradGuard no_grad;
    const at::Tensor before = model.logits(batch), after = model.logits(changed);
    for (std::size_t f = 0; f < lengths.size(); ++f)
      EXPECT_EQ(before.narrow(0, batch.cu_seqlens[f], lengths[f])
                    .equal(after.narrow(0, batch.cu_seqlens[f], lengths[f])),
                f != 1)
          << config.family << " fragment " << f;
  }
}

// Beyond max_positions `dynamic` turns by the fragment's own length, whatever else is in the batch.
TEST(DecoderLM, DynamicScalingIsAFragmentsOwn) {
  DecoderConfig config = small_config("llama");
  config.rope_scaling = {.kind = "dynamic", .factor = 2};
  config.max_positions = 8;
  DecoderLM model(config, at::kDouble, 1);
  const Batch both = make_batch({6, 13, 20}, config.vocabulary, 2);
  const at::Tensor together = model.logits(both);
  for (std::size_t f = 0; f < 3; ++f) {
    const std::int64_t begin = both.cu_seqlens[f], length = both.cu_seqlens[f + 1] - begin;
    Batch alone;
    alone.tokens = both.tokens.narrow(0, begin, length),
    alone.positions = both.positions.narrow(0, begin, length);
    alone.cu_seqlens = {0, length}, alone.sample_ids = {0};
    EXPECT_LT(relative_error(model.logits(alone), together.narrow(0, begin, length)), 1e-13);
  }
}

TEST(DecoderLM, ParametersCarryHuggingFaceNames) {
  DecoderConfig config = small_config("llama");
  config.layers = 1;
  DecoderLM model(config, at::kFloat, 1);
  std::vector<std::string> names = {"model.embed_tokens.weight"};
  for (const char* name :
       {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
        "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"})
    names.push_back(fmt::format("model.layers.0.{}.weight", name));
  names.insert(names.end(), {"model.norm.weight", "lm_head.weight"});
  std::vector<std::string> found;
  for (const auto& item : model.named_parameters()) {
    EXPECT_TRUE(item.value().is_same(model.named()[found.size()].second)) << item.key();
    found.push_back(item.key());
  }
  EXPECT_EQ(found, names);
  config.tied_output = true;
  EXPECT_EQ(DecoderLM(config, at::kFloat, 1).named().size(), names.size() - 1);
}

// A parameter's values follow from the seed and its name only: not from the number of layers built before it.
TEST(DecoderLM, InitialisationIsKeyedByName) {
  DecoderConfig config = small_config("llama");
  config.initializer_range = 0.5;
  DecoderLM deep(config, at::kDouble, 3), again(config, at::kDouble, 3), other(config, at::kDouble, 4);
  config.layers = 1, config.tied_output = true;
  DecoderLM shallow(config, at::kDouble, 3);
  std::map<std::string, at::Tensor> expected;
  for (auto& [name, tensor] : deep.named()) expected[name] = tensor;
  for (auto& [name, tensor] : again.named()) EXPECT_TRUE(tensor.equal(expected.at(name)));
  for (auto& [name, tensor] : shallow.named()) EXPECT_TRUE(tensor.equal(expected.at(name))) << name;
  for (auto& [name, tensor] : other.named())
    EXPECT_EQ(tensor.equal(expected.at(name)), tensor.dim() == 1) << name;
  const at::Tensor all = expected.at("model.embed_tokens.weight");
  const double n = static_cast<double>(all.numel());
  EXPECT_NEAR(all.mean().item<double>(), 0, 5 * 0.5 / std::sqrt(n));  // five standard errors
  EXPECT_NEAR(all.std().item<double>(), 0.5, 5 * 0.5 / std::sqrt(2 * n));
  EXPECT_FALSE(expected.at("model.layers.0.mlp.gate_proj.weight")
                   .equal(expected.at("model.layers.0.mlp.up_proj.weight")));
}

TEST(DecoderLM, FrozenParametersAndEmptyBatches) {
  const DecoderConfig config = small_config("qwen2");
  DecoderLM model(config, at::kFloat, 1);
  for (auto& [name, tensor] : model.named())
    if (name.find("layers.0") != std::string::npos || name.find("embed") != std::string::npos)
      tensor.requires_grad_(false);
  model.logits(make_batch({4, 5}, config.vocabulary, 2)).sum().backward();
  for (auto& [name, tensor] : model.named())
    EXPECT_EQ(tensor.grad().defined(), tensor.requires_grad()) << name;

  DecoderLM empty(config, at::kFloat, 1);
  const at::Tensor logits = empty.logits(make_batch({}, config.vocabulary, 2));
  EXPECT_EQ(logits.sizes(), (std::vector<std::int64_t>{0, config.vocabulary}));
  logits.sum().backward();
  for (auto& [name, tensor] : empty.named())
    EXPECT_TRUE(!tensor.grad().defined() || tensor.grad().eq(0).all().item<bool>()) << name;
}

TEST(DecoderLM, BadBatchesAndShapesAreRefused) {
  const DecoderConfig config = small_config("llama");
  DecoderLM model(config, at::kFloat, 1);
  const std::pair<std::function<void(Batch&)>, const char*> batches[] = {
      {[&](Batch& batch) { batch.tokens[2] = config.vocabulary; }, "vocabulary of 61"},
      {[](Batch& batch) { batch.cu_seqlens.back() = 3; }, "do not fit together"},
      {[](Batch& batch) { batch.positions[0] = -1; }, "negative position"}};
  for (const auto& [change, found] : batches) {
    Batch batch = make_batch({4}, config.vocabulary, 1);
    change(batch);
    EXPECT_THAT(message_of([&] { model.logits(batch); }), HasSubstr(found));
  }
  struct Case {
    const char* key;
    std::function<void(DecoderConfig&)> change;
  };
  for (const auto& [key, change] : std::vector<Case>{
           {"model.key_value_heads", [](auto& c) { c.key_value_heads = 3; }},
           {"model.head_dim", [](auto& c) { c.head_dim = 7; }},
           {"model.hidden", [](auto& c) { c.hidden = 33; }},
           {"model.layers", [](auto& c) { c.layers = 0; }},
           {"model.vocabulary", [](auto& c) { c.vocabulary = std::int64_t{1} << 40; }},
           {"model.family", [](auto& c) { c.family = "gpt2"; }},
           {"model.norm_epsilon", [](auto& c) { c.norm_epsilon = 0; }},
           {"model.rope_theta", [](auto& c) { c.rope_theta = -1; }},
           {"model.query_key_norm", [](auto& c) { c.query_key_norm = true; }},
           {"model.output_bias", [](auto& c) { c.output_bias = true; }},
           {"model.rope_scaling.kind", [](auto& c) { c.rope_scaling.kind = "longrope"; }},
           {"model.rope_scaling.factor", [](auto& c) { c.rope_scaling = {.kind = "linear", .factor = 0.5}; }},
           {"model.eos", [](auto& c) { c.eos = -2; }},
       }) {
    DecoderConfig broken = config;
    change(broken);
    EXPECT_THAT(message_of([&] { DecoderLM(broken, at::kFloat, 1); }), HasSubstr(key));
  }
  EXPECT_THROW(DecoderLM(config, at::kHalf, 1), ConfigError);
}

}  // namespace
}  // namespace isograd
