// Adapters against a decoder written in plain ATen, fp64; files and merging. tests/test_lora.py compares with
// peft.
#include "isograd/lora.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "lora/plain_testing.hpp"
#include "model/decoder.hpp"
#include "model/decoder_testing.hpp"
#include "model/safetensors.hpp"

namespace isograd {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;

constexpr double kScale = 0.75;  // alpha 3, rank 4

LoraConfig small_lora() { return {.rank = 4, .alpha = 3}; }

// Adapters whose b is not zero.
std::shared_ptr<LoraAdapter> trained(const DecoderConfig& model, std::uint64_t seed,
                                     const LoraConfig& config = small_lora(),
                                     at::ScalarType type = at::kDouble) {
  auto adapter = std::make_shared<LoraAdapter>(model, config, type, seed);
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : adapter->named())
    for (std::int64_t i = 0; i < tensor.numel(); ++i)
      tensor.view(-1)[i] +=
          0.1 * random_normal({.seed = seed + 1, .layer = hash_name(name)}, static_cast<std::uint64_t>(i));
  return adapter;
}

// Rows of one adapter.
at::Tensor plain_logits(DecoderLM& model, const NamedTensors& adapter, const Batch& batch) {
  Tensors weights;
  for (const NamedTensors& all : {model.named(), adapter})
    for (const auto& [name, tensor] : all) weights[name] = tensor;
  std::vector<at::Tensor> rows;
  for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f)
    rows.push_back(plain_logits(model.config(), weights, kScale,
                                batch.tokens.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1])));
  return at::cat(rows);
}

at::Tensor weighted(const at::Tensor& logits) {
  return (logits * (at::arange(logits.numel(), at::kDouble) * 0.31).sin().view(logits.sizes())).sum();
}

// Experts in all layers, or in the second alone, which has a shared one too.
std::vector<DecoderConfig> configs_with_experts() {
  std::vector<DecoderConfig> configs{small_config("qwen3"), small_config("qwen2")};
  configs[0].family = "qwen3_moe", configs[1].family = "qwen2_moe";
  configs[0].experts = {.count = 5, .per_token = 2, .feed_forward = 24};
  configs[1].experts = {
      .count = 3, .per_token = 2, .feed_forward = 16, .shared_feed_forward = 40, .dense_layers = {0}};
  return configs;
}

double relative_error(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).norm() / b.norm().clamp_min(1e-300)).item<double>();
}

void freeze(DecoderLM& model) {
  for (auto& [name, tensor] : model.named()) tensor.requires_grad_(false);
}

// An adapter with a mistake.
struct Faulty : Adapter {
  explicit Faulty(const LoraAdapter& of, const std::function<void(LowRank&)>& mistake) {
    for (std::int64_t place = 0; place < 2 * kProjections; ++place)
      if (const LowRank* right =
              of.find(place / kProjections, static_cast<Projection>(place % kProjections))) {
        wrong[place] = *right;
        mistake(wrong[place]);
      }
  }
  const LowRank* find(std::int64_t layer, Projection projection) const override {
    const auto found = wrong.find(layer * kProjections + static_cast<std::int64_t>(projection));
    return found == wrong.end() ? nullptr : &found->second;
  }
  static constexpr std::int64_t kProjections = static_cast<std::int64_t>(Projection::kSharedDown) + 1;
  std::map<std::int64_t, LowRank> wrong;
};

TEST(Lora, LogitsAndGradientsAreThoseOfPlainAten) {
  auto configs = small_configs();
  for (const DecoderConfig& config : configs_with_experts()) configs.push_back(config);
  for (const DecoderConfig& config : configs) {
    if (config.rope_scaling.kind != "default") continue;
    for (const LoraConfig& lora :
         {small_lora(), LoraConfig{.rank = 4, .alpha = 3, .mlp = false, .unembed = false},
          config.experts.count > 0 ? LoraConfig{.rank = 4, .alpha = 3, .attention = false}
                                   : LoraConfig{.rank = 4, .alpha = 3, .modules = {"v_proj", "down_proj"}}}) {
      DecoderLM model(config, at::kDouble, 21);
      perturb(model, 22);
      freeze(model);
      const auto adapter = trained(config, 23, lora);
      const Batch batch = make_batch({5, 9, 1, 14}, config.vocabulary, 24);
      std::vector<at::Tensor> parameters;
      for (const auto& [name, tensor] : adapter->named()) parameters.push_back(tensor);
      model.set_adapter(adapter.get());
      const at::Tensor ours = model.logits(batch), plain = plain_logits(model, adapter->named(), batch);
      EXPECT_LT(relative_error(ours, plain), 1e-13) << config.family;
      const auto of_ours = torch::autograd::grad({weighted(ours)}, parameters),
                 of_plain = torch::autograd::grad({weighted(plain)}, parameters);
      for (std::size_t i = 0; i < parameters.size(); ++i)
        EXPECT_LT(relative_error(of_ours[i], of_plain[i]), 1e-12)
            << config.family << " " << adapter->named()[i].first;
      for (const auto& mistake : std::vector<std::function<void(LowRank&)>>{
               [](LowRank& update) { update.scale = 1; },
               [](LowRank& update) { update.a = update.a.flip(-2); }}) {
        const Faulty wrong(*adapter, mistake);
        model.set_adapter(&wrong);
        EXPECT_GT(relative_error(model.logits(batch), plain), 1e-3);
      }
      model.set_adapter(nullptr);
      EXPECT_LT(relative_error(model.logits(batch), plain_logits(model, {}, batch)), 1e-13);
    }
  }
}

TEST(Lora, FrozenWeightsGetNoGradient) {
  const DecoderConfig config = small_config("qwen3");
  DecoderLM model(config, at::kDouble, 1);
  freeze(model);
  const auto adapter = trained(config, 2);
  model.set_adapter(adapter.get());
  weighted(model.logits(make_batch({9, 4}, config.vocabulary, 3))).backward();
  for (const auto& [name, tensor] : model.named()) EXPECT_FALSE(tensor.grad().defined()) << name;
  for (const auto& [name, tensor] : adapter->named()) EXPECT_TRUE(tensor.grad().defined()) << name;
}

class LoraRuns : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Models, LoraRuns, ::testing::Values(0, 1, 2));
TEST_P(LoraRuns, SeveralAdaptersInOnePass) {
  const DecoderConfig config =
      GetParam() == 0 ? small_config("qwen2") : configs_with_experts()[GetParam() - 1];
  DecoderLM model(config, at::kDouble, 31);
  const auto one = trained(config, 32), two = trained(config, 33, {.rank = 4, .alpha = 3, .mlp = false});
  const std::vector<std::int64_t> lengths = {6, 3, 8};
  const Batch batch = make_batch(lengths, config.vocabulary, 34);
  const at::NoGradGuard no_grad;
  const at::Tensor plain = at::cat({plain_logits(model, one->named(), batch).narrow(0, 0, 6),
                                    plain_logits(model, {}, batch).narrow(0, 6, 3),
                                    plain_logits(model, two->named(), batch).narrow(0, 9, 8)});
  model.set_adapters({{0, 6, one.get()}, {6, 9, nullptr}, {9, 17, two.get()}});
  EXPECT_LT(relative_error(model.logits(batch), plain), 1e-13);
  EXPECT_EQ(model.adapter(), nullptr);
  model.set_adapters({{0, 5, one.get()}, {5, 9, nullptr}, {9, 17, two.get()}});
  EXPECT_GT(relative_error(model.logits(batch), plain), 1e-3);  // a row by the wrong adapter
  model.set_adapters({{0, 6, one.get()}, {6, 9, nullptr}});
  EXPECT_THAT(message_of([&] { model.logits(batch); }), HasSubstr("rows to 9, and a forward of 17"));
  EXPECT_THAT(message_of([&] {
                model.set_adapters({{0, 6, one.get()}, {7, 9, nullptr}});
              }),
              HasSubstr("without gaps"));
}

TEST(Lora, InitialValuesAreKeyedByName) {
  const DecoderConfig config = small_config("llama");
  const LoraAdapter first(config, small_lora(), at::kDouble, 5), again(config, small_lora(), at::kDouble, 5),
      other(config, small_lora(), at::kDouble, 6);
  for (std::size_t i = 0; i < first.named().size(); ++i) {
    const auto& [name, tensor] = first.named()[i];
    EXPECT_TRUE(tensor.equal(again.named()[i].second)) << name;
    if (i % 2 == 1) {
      EXPECT_EQ(tensor.abs().max().item<double>(), 0) << name;
      continue;
    }
    EXPECT_FALSE(tensor.equal(other.named()[i].second)) << name;
    // Uniform: bound and standard deviation, of 128 to 192 values.
    const double bound = 1 / std::sqrt(static_cast<double>(tensor.size(1)));
    EXPECT_LE(tensor.abs().max().item<double>(), bound) << name;
    EXPECT_NEAR(tensor.std().item<double>(), bound / std::sqrt(3.0), 0.15 * bound) << name;
  }
  EXPECT_EQ(first.named()[0].first, "model.layers.0.self_attn.q_proj.lora_A.weight");
  EXPECT_EQ(adapted_matrix(first.named()[0].first), "model.layers.0.self_attn.q_proj.weight");
  EXPECT_EQ(adapted_matrix("model.norm.weight"), "");
  const LoraAdapter experts(configs_with_experts()[0], {.rank = 4, .attention = false}, at::kDouble, 5);
  const auto& [name, tensor] = experts.named()[0];
  EXPECT_EQ(name, "model.layers.0.mlp.experts.gate_proj.lora_A.weight");
  EXPECT_EQ(adapted_matrix(name), "model.layers.0.mlp.experts.gate_proj");
  EXPECT_EQ(tensor.sizes(), at::IntArrayRef({5, 4, 32}));
  EXPECT_NEAR(tensor.abs().max().item<double>(), 1 / std::sqrt(32.0), 0.01);
}

TEST(Lora, DropoutIsKeyedByWhatAFeatureIs) {
  Batch batch = make_batch({6, 3, 8}, 61, 34);
  batch.draw = 4;
  const at::Tensor x = at::ones({17, 90}, at::kDouble);
  const LoraDropout all{.fraction = 0.25, .seed = 5, .first = 0, .width = 90};
  const at::Tensor whole = drop_inputs(x, batch, 1, Projection::kUp, all);
  EXPECT_NEAR(whole.eq(0).to(at::kDouble).mean().item<double>(), 0.25, 0.04);  // 3.6 standard deviations
  EXPECT_NEAR(whole.max().item<double>(), 4 / 3.0, 1e-6);
  // Some features, as a rank along tp has them, and one of the samples alone.
  LoraDropout part = all;
  part.first = 31;
  EXPECT_TRUE(
      drop_inputs(x.narrow(1, 31, 50), batch, 1, Projection::kUp, part).equal(whole.narrow(1, 31, 50)));
  Batch one = make_batch({8}, 61, 1);
  one.draw = 4, one.sample_ids = {2};
  EXPECT_TRUE(drop_inputs(x.narrow(0, 0, 8), one, 1, Projection::kUp, all).equal(whole.narrow(0, 9, 8)));
  // Another step, layer, matrix, seed or sample.
  const auto differs = [&](const Batch& of, std::int64_t layer, Projection projection,
                           const LoraDropout& by) {
    return !drop_inputs(x, of, layer, projection, by).equal(whole);
  };
  Batch later = batch;
  later.draw = 5;
  LoraDropout other = all;
  other.seed = 6;
  EXPECT_TRUE(differs(later, 1, Projection::kUp, all) && differs(batch, 0, Projection::kUp, all) &&
              differs(batch, 1, Projection::kGate, all) && differs(batch, 1, Projection::kUp, other));
}

TEST(Lora, InputsOfTheHeadAreDroppedInTrainingAlone) {
  const DecoderConfig config = small_config("llama");
  DecoderLM model(config, at::kDouble, 1);
  const auto adapter = trained(config, 2, {.rank = 4, .alpha = 3, .attention = false, .mlp = false});
  const LowRank& head = *adapter->find(0, Projection::kHead);
  const Batch batch = make_batch({9, 4}, config.vocabulary, 3);
  const auto drop = [](const Batch& of, std::int64_t layer, Projection projection, const at::Tensor& x) {
    return drop_inputs(x, of, layer, projection, {.fraction = 0.5, .seed = 5, .width = x.size(1)});
  };
  model.set_adapter(adapter.get());
  model.set_dropout_of_adapter(drop);
  const auto expected = [&](const at::Tensor& hidden, const at::Tensor& in) {
    return hidden.matmul(model.output_weight().t()) + kScale * in.matmul(head.a.t()).matmul(head.b.t());
  };
  const DecoderOutputs found = model.outputs(batch);
  const at::Tensor trained = expected(found.hidden, drop(batch, 0, Projection::kHead, found.hidden)),
                   whole = expected(found.hidden, found.hidden);
  EXPECT_LT(relative_error(model.logits(batch), trained), 1e-13);
  EXPECT_LT(relative_error(model.logits_of(found.hidden, found.dropped), trained), 1e-13);
  EXPECT_GT(relative_error(whole, trained), 1e-3);
  const at::NoGradGuard no_grad;
  EXPECT_LT(relative_error(model.logits(batch), whole), 1e-13);
}

TEST(Lora, ACopyIsApart) {
  const DecoderConfig config = small_config("llama");
  const auto adapter = trained(config, 7);
  const auto copy = adapter->copy();
  for (std::size_t i = 0; i < copy->named().size(); ++i) {
    EXPECT_TRUE(copy->named()[i].second.equal(adapter->named()[i].second));
    EXPECT_FALSE(copy->named()[i].second.requires_grad());
  }
  {
    const at::NoGradGuard no_grad;
    for (const auto& [name, tensor] : adapter->named()) tensor.zero_();
  }
  EXPECT_TRUE(copy->find(1, Projection::kDown)->a.is_same(copy->named()[26].second));
  EXPECT_GT(copy->find(0, Projection::kHead)->b.abs().max().item<double>(), 0);
}

TEST(Lora, AMergedModelComputesTheSame) {
  const at::NoGradGuard no_grad;
  auto configs = configs_with_experts();
  configs.push_back(small_config("qwen3"));
  for (const DecoderConfig& config : configs) {
    DecoderLM model(config, at::kDouble, 41);
    const auto adapter = trained(config, 42);
    const Batch batch = make_batch({5, 9}, config.vocabulary, 43);
    model.set_adapter(adapter.get());
    const at::Tensor apart = model.logits(batch);
    model.set_adapter(nullptr);
    merge(model, *adapter);
    EXPECT_LT(relative_error(model.logits(batch), apart), 1e-13);
  }
  DecoderConfig config = configs.back();
  const auto adapter = trained(config, 42);
  config.tied_output = true;
  DecoderLM tied(config, at::kDouble, 41);
  EXPECT_THAT(message_of([&] { merge(tied, *adapter); }), HasSubstr("a tied head is the embedding"));
}

class PeftDirectory : public ::testing::Test {
 protected:
  ~PeftDirectory() override { fs::remove_all(folder_); }
  // The error with a key of adapter_config.json set.
  std::string error_with(const std::string& key, const json& value) {
    json object = json::parse(read_file(folder_ / "adapter_config.json"));
    const json before = object;
    object[key] = value;
    write_file(folder_ / "adapter_config.json", object.dump());
    const std::string error = message_of([&] { read_peft(folder_, config_, at::kDouble); });
    write_file(folder_ / "adapter_config.json", before.dump());
    return error;
  }

  DecoderConfig config_ = small_config("llama");
  fs::path folder_ = fs::temp_directory_path() / ("isograd-peft-" + std::to_string(getpid()));
};

TEST_F(PeftDirectory, WhatIsWrittenComesBack) {
  for (const LoraConfig& lora :
       {small_lora(),
        LoraConfig{.rank = 1, .alpha = 0.5, .attention = false, .unembed = false, .dropout = 0.25},
        LoraConfig{.rank = 3, .modules = {"q_proj", "lm_head"}}}) {
    const auto adapter = trained(config_, 9, lora);
    write_peft(folder_, *adapter, config_, "base");
    const auto back = read_peft(folder_, config_, at::kDouble);
    ASSERT_EQ(back->named().size(), adapter->named().size());
    for (std::size_t i = 0; i < back->named().size(); ++i) {
      EXPECT_EQ(back->named()[i].first, adapter->named()[i].first);
      EXPECT_TRUE(back->named()[i].second.equal(adapter->named()[i].second));
      EXPECT_TRUE(back->named()[i].second.requires_grad());
    }
    const LoraConfig& read = back->config();
    EXPECT_EQ(std::tuple(read.rank, read.alpha, read.dropout),
              std::tuple(lora.rank, lora.alpha, lora.dropout));
    EXPECT_EQ(back->find(0, Projection::kQuery) ? back->find(0, Projection::kQuery)->scale : 0,
              lora.attention ? lora.alpha / static_cast<double>(lora.rank) : 0);
  }
}

TEST_F(PeftDirectory, ExpertsComeBackFromTensorsOfEach) {
  for (DecoderConfig config : configs_with_experts()) {
    config_ = config;
    for (const LoraConfig& lora : {small_lora(), LoraConfig{.rank = 2, .alpha = 0.5, .attention = false}}) {
      fs::remove_all(folder_);
      const auto adapter = trained(config, 9, lora);
      write_peft(folder_, *adapter, config, "base");
      const auto stored = read_safetensors(folder_ / "adapter_model.safetensors");
      EXPECT_TRUE(stored.at("base_model.model.model.layers.1.mlp.experts.2.up_proj.lora_B.weight")
                      .equal(adapter->find(1, Projection::kUp)->b[2]));
      const auto back = read_peft(folder_, config, at::kDouble);
      ASSERT_EQ(back->named().size(), adapter->named().size());
      for (std::size_t i = 0; i < back->named().size(); ++i)
        EXPECT_TRUE(back->named()[i].second.equal(adapter->named()[i].second)) << back->named()[i].first;
      for (const auto& [key, value] : std::vector<std::pair<std::string, json>>{
               {"rank_pattern", nullptr},
               {"rank_pattern", {{R"(.*\.gate_up_proj)", lora.rank}}},
               {"alpha_pattern", {{R"(.*\.down_proj)", 2 * lora.alpha}}},
               {"target_parameters", {"experts.down_proj"}}})
        EXPECT_THAT(error_with(key, value), HasSubstr(key));
      EXPECT_THAT(error_with("target_parameters", nullptr), HasSubstr("rank_pattern"));
    }
  }
}

TEST_F(PeftDirectory, WhatChangesTheMathematicsIsRefusedByName) {
  write_peft(folder_, *trained(config_, 9), config_, "base");
  const std::vector<std::pair<std::string, json>> all = {{"use_rslora", true},
                                                         {"use_dora", true},
                                                         {"bias", "all"},
                                                         {"fan_in_fan_out", true},
                                                         {"rank_pattern", {{"q_proj", 2}}},
                                                         {"alpha_pattern", {{"q_proj", 2}}},
                                                         {"modules_to_save", {"embed_tokens"}},
                                                         {"layers_to_transform", 1},
                                                         {"init_lora_weights", "pissa"},
                                                         {"lora_bias", true},
                                                         {"a_later_variant", "on"},
                                                         {"target_modules", "all-linear"},
                                                         {"target_modules", {"q_proj", "experts"}},
                                                         {"peft_type", "IA3"},
                                                         {"r", 2.5},
                                                         {"lora_alpha", "high"}};
  for (const auto& [key, value] : all)
    EXPECT_THAT(error_with(key, value), HasSubstr(value == json({"q_proj", "experts"}) ? "experts" : key));
  for (const auto& [key, value] : std::vector<std::pair<std::string, json>>{
           {"r", 0}, {"r", 513}, {"lora_alpha", 0}, {"lora_dropout", 1}})
    EXPECT_THAT(error_with(key, value), HasSubstr("of a low-rank adapter")) << key;
  EXPECT_EQ(error_with("rank_pattern", json::object()), "no error");
  EXPECT_EQ(error_with("corda_config", nullptr), "no error");
  EXPECT_THAT(error_with("r", 5), HasSubstr("shape"));
  EXPECT_THAT(error_with("target_modules", {"q_proj"}), HasSubstr("no place for"));
}

TEST_F(PeftDirectory, DamagedFilesAreRefused) {
  const auto adapter = trained(config_, 9);
  NamedTensors tensors;
  for (const auto& [name, tensor] : adapter->named())
    tensors.emplace_back("base_model.model." + name, tensor);
  const auto error = [&](const NamedTensors& of) {
    write_peft(folder_, *adapter, config_, "base");
    write_safetensors(folder_ / "adapter_model.safetensors", of);
    return message_of([&] { read_peft(folder_, config_, at::kDouble); });
  };
  EXPECT_THAT(error({tensors.begin() + 1, tensors.end()}), HasSubstr("no such tensor"));
  NamedTensors changed = tensors;
  changed[2].second = at::full_like(tensors[2].second, NAN);
  EXPECT_THAT(error(changed), HasSubstr("not finite"));
  changed[2].second = at::zeros(tensors[2].second.sizes(), at::kLong);
  EXPECT_THAT(error(changed), HasSubstr("floating-point"));
  EXPECT_EQ(error(tensors), "no error");
  fs::remove(folder_ / "adapter_config.json");
  EXPECT_THAT(message_of([&] { read_peft(folder_, config_, at::kDouble); }),
              HasSubstr("adapter_config.json"));
}

TEST(Lora, WhatCannotBeAdaptedIsRefused) {
  EXPECT_THAT(message_of([] { check(LoraConfig{.rank = 0}); }), HasSubstr("1 to 512"));
  EXPECT_THAT(message_of([] { check(LoraConfig{.alpha = 0}); }), HasSubstr("above 0"));
  EXPECT_THAT(message_of([] { check(LoraConfig{.dropout = 1}); }), HasSubstr("below 1"));
  EXPECT_THAT(message_of([] { check(LoraConfig{.modules = {"router"}}); }), HasSubstr("q_proj, k_proj"));
  EXPECT_THAT(message_of([] { check(LoraConfig{.attention = false, .mlp = false, .unembed = false}); }),
              HasSubstr("attention, mlp or unembed"));
  const auto adapt = [](const LoraConfig& config) {
    return message_of([&] { LoraAdapter(configs_with_experts()[1], config, at::kFloat, 1); });
  };
  EXPECT_THAT(adapt({.dropout = 0.1}), HasSubstr("drops inputs of experts"));
  EXPECT_THAT(adapt({.modules = {"up_proj", "down_proj"}}), HasSubstr("all three or none"));
  EXPECT_EQ(adapt({.mlp = false, .dropout = 0.1}), "no error");
}

}  // namespace
}  // namespace isograd
