#include "bench/cases/step_case.hpp"

#include <cmath>
#include <map>

#include "base/files.hpp"
#include "bench/runner.hpp"
#include "isograd/error.hpp"
#include "isograd/random.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kSteps = 32;  // different batches; used again from the first after that
constexpr std::int64_t kVocabulary = 258;
constexpr std::int64_t kGpuStepsPerTurn = 8;  // tens to hundreds of milliseconds

DecoderConfig shape(std::int64_t hidden, std::int64_t layers, std::int64_t heads,
                    std::int64_t key_value_heads, std::int64_t head_dim, std::int64_t feed_forward,
                    bool tied = false) {
  DecoderConfig config;
  config.vocabulary = kVocabulary;
  config.hidden = hidden, config.layers = layers, config.feed_forward = feed_forward;
  config.heads = heads, config.key_value_heads = key_value_heads, config.head_dim = head_dim;
  config.tied_output = tied;
  // Scores of order 1: attention matters.
  config.initializer_range = 1 / std::sqrt(static_cast<double>(hidden));
  return config;
}

// The form of Mixtral: each of two out of eight experts computes a token.
DecoderConfig mixture(DecoderConfig config) {
  config.family = "mixtral";
  config.experts = {.count = 8, .per_token = 2, .feed_forward = config.feed_forward};
  return config;
}

// The form of Qwen2-MoE: every token also goes through an expert of twice their width.
DecoderConfig with_shared_expert(DecoderConfig config) {
  config = mixture(config);
  config.family = "qwen2_moe";
  config.attention_bias = true;
  config.experts.shared_feed_forward = 2 * config.experts.feed_forward;
  return config;
}

// One component of the embedding is large for every token and stays so through the norms: routers that read
// it choose the same experts for all.
void route_to_one_quarter(DecoderLM& model) {
  const at::NoGradGuard no_grad;
  const std::int64_t chosen = model.config().experts.count / 4;
  for (auto& [name, tensor] : model.named()) {
    if (name.ends_with("embed_tokens.weight")) tensor.select(1, 0).fill_(1);
    if (name.ends_with("mlp.gate.weight")) tensor.narrow(0, 0, chosen).select(1, 0).fill_(1);
  }
}

// Tokens that a model can learn something from, so that equal losses after several steps mean equal gradients
// and optimizers: mostly an affine successor, sometimes anything.
std::vector<std::int64_t> make_sequence(std::int64_t length, std::uint64_t index) {
  const RandomKey key{.seed = 1, .sample = index, .layer = hash_name("bench step")};
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(length));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const bool jump = i == 0 || random_uniform(key, 2 * i) < 0.2;
    tokens[i] = jump ? static_cast<std::int64_t>(random_bits(key, 2 * i + 1) % kVocabulary)
                     : (3 * tokens[i - 1] + 1) % kVocabulary;
  }
  return tokens;
}

}  // namespace

const std::vector<StepCase>& step_cases(const std::string& verb) {
  static const std::map<std::string, std::vector<StepCase>> all = [] {
    const DecoderConfig tiny = shape(64, 2, 4, 2, 16, 128), model = shape(512, 6, 8, 8, 64, 1408),
                        shallow = shape(512, 4, 8, 8, 64, 1408), experts = shape(256, 4, 4, 4, 64, 512);
    const std::string works = "to see that the comparison works", one = "one batch for all ranks";
    return std::map<std::string, std::vector<StepCase>>{
        {"step",
         {// The model of examples/first_light.toml.
          {"small", shape(192, 4, 6, 3, 32, 512, true), 4, 256, 8},
          // Matrix products dominate.
          {"medium", model, 1, 512, 2},
          // Many parameters, few tokens: clip, optimizer and, on several ranks, communication dominate.
          {"communication", shape(768, 6, 12, 12, 64, 2048), 1, 64, 5},
          // Attention and products over many tokens; few parameters.
          {"compute", shape(256, 4, 4, 4, 64, 704), 1, 2048, 1},
          // For a GPU: every kernel takes longer than starting it. On one core a step takes minutes.
          {"large", shape(2048, 4, 16, 16, 128, 5632), 1, 2048, 4, false},
          // The shapes of one layer of Llama 3 8B. 258 words instead of 128,256, so that the layer is what is
          // timed.
          {"8B-layer", shape(4096, 1, 32, 8, 128, 14336), 1, 8192, 1, false},
          // Shows in a few seconds that the comparison works; its ratio means nothing.
          {"tiny", shape(64, 2, 4, 2, 16, 128, true), 2, 32, 3, false}}},
        // Untied, because PyTorch's peer shards a tied matrix twice. overlap-: compares what is computed
        // while
        // tokens travel.
        {"tensor",
         {{"communication", model, 1, 64, 10, true, one},
          {"middle", model, 1, 512, 2, true, one},
          {"compute", shallow, 1, 2048, 1, true, one},
          {"tiny", tiny, 2, 32, 3, false, works},
          {"overlap-communication", model, 1, 64, 10, true, one},
          {"overlap-middle", model, 1, 512, 2, true, one},
          {"overlap-compute", shallow, 1, 2048, 1, true, one}}},
        {"expert",
         {{"even", mixture(experts), 1, 512, 4, true,
           "each rank's; they go where an untrained router sends them"},
          {"uneven", mixture(experts), 1, 512, 4, true, "each rank's; a quarter of the experts computes all",
           1, true},
          {"tiny", mixture(tiny), 2, 32, 3, false, works},
          {"shared", with_shared_expert(experts), 1, 512, 4, true,
           "each rank's; in addition to the others an expert computes all"},
          {"shared-tiny", with_shared_expert(tiny), 2, 32, 3, false, works}}},
        {"pipeline",
         {{"communication", model, 1, 64, 2, true, one, 8},
          {"middle", model, 1, 512, 1, true, one, 8},
          {"compute", shallow, 1, 2048, 1, true, one, 8},
          {"tiny", tiny, 1, 32, 3, false, works, 4}}}};
  }();
  return all.at(verb);
}

StepCase find_step_case(const std::string& verb, const std::string& name) {
  return chosen(step_cases(verb), {name}).at(0);
}

const std::vector<Strategy>& strategies() {
  using enum Strategy::Parallel;
  static const std::vector<Strategy> all = {
      {"bucketed", "bucketed", kData, "bucketed"},
      {"zero1", "ZeRO-1", kData, "zero1"},
      {"zero2", "ZeRO-2", kData, "zero2"},
      {"zero3", "ZeRO-3", kData, "zero3"},
      {"shared", "shared parameters", kData, "bucketed", true},
      {"zero3-shared", "ZeRO-3, shared parameters", kData, "zero3", true},
      {"bucketed-late", "bucketed, no overlap", kData, "bucketed", false, false},
      {"zero1-late", "ZeRO-1, no overlap", kData, "zero1", false, false, false},
      {"zero2-late", "ZeRO-2, no overlap", kData, "zero2", false, false, false},
      {"zero3-late", "ZeRO-3, no prefetch", kData, "zero3", false, false, false},
      {"shared-late", "shared, no overlap", kData, "bucketed", true, false, false},
      {"tensor", "tensor, sequence parallel", kSequence, "none"},
      {"tensor-whole", "tensor, whole tokens", kWholeTokens, "none"},
      {"tensor-weights", "sequence parallel, weights meanwhile", kSequence, "weights"},
      {"tensor-tokens", "sequence parallel, tokens meanwhile", kSequence, "tokens"},
      {"tensor-whole-weights", "whole tokens, weights meanwhile", kWholeTokens, "weights"},
      {"expert", "experts sharded over ranks", kExperts, "none"},
      {"expert-shared", "experts sharded, the shared one meanwhile", kExperts, "shared"},
      {"expert-halves", "experts sharded over ranks, in halves", kExperts, "halves"},
      {"pipeline-1f1b", "stages, 1f1b", kStages, "1f1b"},
      {"pipeline-zb-h1", "stages, zb-h1", kStages, "zb-h1"},
  };
  return all;
}

const Strategy& find_strategy(const std::string& name) {
  const auto found = std::ranges::find(strategies(), name, &Strategy::name);
  ISOGRAD_INVARIANT(found != strategies().end(), name);
  return *found;
}

AdamWOptions bench_adamw() {
  return {.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};
}

nlohmann::ordered_json update_description() {
  const AdamWOptions adamw = bench_adamw();
  return {{"max_norm", kBenchMaxNorm}, {"learning_rate", adamw.learning_rate},
          {"beta1", adamw.beta1},      {"beta2", adamw.beta2},
          {"epsilon", adamw.epsilon},  {"weight_decay", adamw.weight_decay}};
}

nlohmann::ordered_json model_description(const DecoderConfig& config) {
  return {{"vocabulary", config.vocabulary},
          {"hidden", config.hidden},
          {"layers", config.layers},
          {"heads", config.heads},
          {"key_value_heads", config.key_value_heads},
          {"head_dim", config.head_dim},
          {"feed_forward", config.feed_forward},
          {"rope_theta", config.rope_theta},
          {"norm_epsilon", config.norm_epsilon},
          {"tied_output", config.tied_output},
          {"experts", config.experts.count},
          {"experts_per_token", config.experts.per_token}};
}

void write_step(const fs::path& exchange, const std::string& verb, const StepCase& step_case, int ranks,
                const StepSetting& setting) {
  const DecoderConfig& config = step_case.shape;
  nlohmann::ordered_json description = {
      {"verb", verb},
      {"name", step_case.name},
      {"ranks", ranks},
      {"device", setting.device},
      {"dtype", setting.dtype},
      {"threads", setting.threads},
      {"sequences", step_case.sequences},
      {"micro_batches", step_case.micro_batches},
      {"length", step_case.length},
      {"steps_per_turn", setting.device == "cuda" ? kGpuStepsPerTurn : step_case.steps_per_turn}};
  description.update(model_description(config));
  description.update(update_description());
  write_case(exchange, description);
  DecoderLM model(config, at::kFloat, 1);
  if (step_case.one_quarter) route_to_one_quarter(model);
  write_hf(exchange / "model", model);
  AtomicFile tokens(exchange / "tokens.bin");
  const std::int64_t sequences = kSteps * ranks * step_case.micro_batches * step_case.sequences;
  for (std::int64_t sequence = 0; sequence < sequences; ++sequence) {
    const auto values = make_sequence(step_case.length + 1, static_cast<std::uint64_t>(sequence));
    tokens.write(values.data(), values.size() * sizeof(std::int64_t));
  }
  tokens.commit();
}

std::vector<MicroBatches> read_steps(const fs::path& exchange, const StepCase& step_case, int rank,
                                     int ranks) {
  const MappedFile file(exchange / "tokens.bin");
  const std::int64_t micro_batches = step_case.micro_batches, sequences = step_case.sequences,
                     length = step_case.length;
  ISOGRAD_INVARIANT(
      file.size() == static_cast<std::size_t>(kSteps * ranks * micro_batches * sequences * (length + 1)) * 8,
      std::to_string(file.size()) + " bytes of tokens");
  const at::Tensor all = at::from_blob(const_cast<std::uint8_t*>(file.data()),
                                       {kSteps, ranks, micro_batches, sequences, length + 1}, at::kLong);
  std::vector<MicroBatches> steps(static_cast<std::size_t>(kSteps));
  for (std::int64_t step = 0; step < kSteps; ++step)
    for (std::int64_t i = 0; i < micro_batches; ++i) {
      const at::Tensor own = all[step][rank][i];  // [sequences, length + 1]
      Batch batch;
      batch.tokens = own.narrow(1, 0, length).flatten().clone();
      batch.targets = own.narrow(1, 1, length).flatten().clone();
      batch.positions = at::arange(length, at::kLong).repeat({sequences});
      for (std::int64_t sequence = 0; sequence < sequences; ++sequence) {
        batch.cu_seqlens.push_back((sequence + 1) * length);
        batch.sample_ids.push_back(((step * ranks + rank) * micro_batches + i) * sequences + sequence);
        batch.sample_targets.push_back(length);
      }
      steps[static_cast<std::size_t>(step)].push_back(std::move(batch));
    }
  return steps;
}

}  // namespace isograd
