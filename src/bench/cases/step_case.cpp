#include "bench/cases/step_case.hpp"

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "base/json.hpp"
#include "isograd/error.hpp"
#include "isograd/random.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kSteps = 32;  // different batches; used again from the first after that
constexpr std::int64_t kVocabulary = 258;
constexpr std::int64_t kGpuStepsPerTurn = 8;  // tens to hundreds of milliseconds

DecoderConfig shape(std::int64_t hidden, std::int64_t layers, std::int64_t heads,
                    std::int64_t key_value_heads, std::int64_t head_dim, std::int64_t feed_forward,
                    bool tied) {
  DecoderConfig config;
  config.vocabulary = kVocabulary;
  config.hidden = hidden;
  config.layers = layers;
  config.heads = heads;
  config.key_value_heads = key_value_heads;
  config.head_dim = head_dim;
  config.feed_forward = feed_forward;
  config.tied_output = tied;
  config.initializer_range =
      1 / std::sqrt(static_cast<double>(hidden));  // scores of order 1: attention matters
  return config;
}

// The form of Mixtral, eight experts of which two compute a token.
DecoderConfig mixture(DecoderConfig config) {
  config.family = "mixtral";
  config.experts = {.count = 8, .per_token = 2, .feed_forward = config.feed_forward};
  return config;
}

// That of Qwen2-MoE: beside them one of twice their width that every token goes through.
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

// Tokens that a model can learn something from, so that equal losses after several steps say that gradient
// and optimizer are equal too: mostly an affine successor, sometimes anything.
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

const std::vector<StepCase>& step_cases() {
  static const std::vector<StepCase> cases = {
      // The model of examples/first_light.toml.
      {"small", shape(192, 4, 6, 3, 32, 512, true), 4, 256, 8},
      // Matrix products dominate.
      {"medium", shape(512, 6, 8, 8, 64, 1408, false), 1, 512, 2},
      // Many parameters, few tokens: clip, optimizer and, on several ranks, communication dominate.
      {"communication", shape(768, 6, 12, 12, 64, 2048, false), 1, 64, 5},
      // Attention and products over many tokens; few parameters.
      {"compute", shape(256, 4, 4, 4, 64, 704, false), 1, 2048, 1},
      // For a GPU: every kernel takes longer than starting it. On one core a step takes minutes.
      {"large", shape(2048, 4, 16, 16, 128, 5632, false), 1, 2048, 4, false},
      // The shapes of one layer of Llama 3 8B. 258 words instead of 128,256, so that the layer is what is
      // timed.
      {"8B-layer", shape(4096, 1, 32, 8, 128, 14336, false), 1, 8192, 1, false},
      // Shows in a few seconds that the comparison works; its ratio says nothing.
      {"tiny", shape(64, 2, 4, 2, 16, 128, true), 2, 32, 3, false},
  };
  return cases;
}

const std::vector<StepCase>& cases_held_together() {
  static const std::vector<StepCase> cases = {
      // One batch for all ranks, of tensor parallelism; untied, for PyTorch's parts what is tied in two.
      {"tensor-tiny", shape(64, 2, 4, 2, 16, 128, false), 2, 32, 3},
      {"tensor-64", shape(512, 6, 8, 8, 64, 1408, false), 1, 64, 10},
      {"tensor-512", shape(512, 6, 8, 8, 64, 1408, false), 1, 512, 2},
      {"tensor-2048", shape(512, 4, 8, 8, 64, 1408, false), 1, 2048, 1},
      {"expert-tiny", mixture(shape(64, 2, 4, 2, 16, 128, false)), 2, 32, 3},
      {"expert-even", mixture(shape(256, 4, 4, 4, 64, 512, false)), 1, 512, 4},
      {.name = "expert-uneven",
       .shape = mixture(shape(256, 4, 4, 4, 64, 512, false)),
       .length = 512,
       .steps_per_turn = 4,
       .one_quarter = true},
      {"expert-shared-tiny", with_shared_expert(shape(64, 2, 4, 2, 16, 128, false)), 2, 32, 3},
      {"expert-shared", with_shared_expert(shape(256, 4, 4, 4, 64, 512, false)), 1, 512, 4},
      // Stages of a pipeline, with eight micro-batches of one batch for all ranks.
      {.name = "pipeline-tiny",
       .shape = shape(64, 2, 4, 2, 16, 128, false),
       .length = 32,
       .steps_per_turn = 3,
       .micro_batches = 4},
      {.name = "pipeline-64",
       .shape = shape(512, 6, 8, 8, 64, 1408, false),
       .length = 64,
       .steps_per_turn = 2,
       .micro_batches = 8},
      {.name = "pipeline-512",
       .shape = shape(512, 6, 8, 8, 64, 1408, false),
       .length = 512,
       .micro_batches = 8},
      {.name = "pipeline-2048",
       .shape = shape(512, 4, 8, 8, 64, 1408, false),
       .length = 2048,
       .micro_batches = 8},
  };
  return cases;
}

const StepCase& find_step_case(const std::string& name) {
  std::string names;
  for (const auto* list : {&step_cases(), &cases_held_together()})
    for (const auto& step_case : *list) {
      if (step_case.name == name) return step_case;
      names += (names.empty() ? "" : ", ") + step_case.name;
    }
  throw ConfigError(
      {.where = "bench step --case", .found = name, .expected = names, .action = "Choose one of them"});
}

AdamWOptions bench_adamw() {
  return {.learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};
}

void write_exchange(const std::filesystem::path& directory, const StepCase& step_case, int ranks,
                    const StepSetting& setting) {
  const bool on_gpu = setting.device == "cuda";
  const DecoderConfig& config = step_case.shape;
  const AdamWOptions adamw = bench_adamw();
  const nlohmann::ordered_json description = {
      {"name", step_case.name},
      {"ranks", ranks},
      {"device", setting.device},
      {"dtype", setting.dtype},
      {"threads", setting.threads},
      {"vocabulary", config.vocabulary},
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
      {"experts_per_token", config.experts.per_token},
      {"sequences", step_case.sequences},
      {"micro_batches", step_case.micro_batches},
      {"length", step_case.length},
      {"steps_per_turn", on_gpu ? kGpuStepsPerTurn : step_case.steps_per_turn},
      {"max_norm", kBenchMaxNorm},
      {"learning_rate", adamw.learning_rate},
      {"beta1", adamw.beta1},
      {"beta2", adamw.beta2},
      {"epsilon", adamw.epsilon},
      {"weight_decay", adamw.weight_decay}};
  write_file(directory / "case.json", description.dump(2) + "\n");
  DecoderLM model(config, at::kFloat, 1);
  if (step_case.one_quarter) route_to_one_quarter(model);
  write_hf(directory / "model", model);
  AtomicFile tokens(directory / "tokens.bin");
  for (std::int64_t sequence = 0; sequence < kSteps * ranks * step_case.micro_batches * step_case.sequences;
       ++sequence) {
    const auto values = make_sequence(step_case.length + 1, static_cast<std::uint64_t>(sequence));
    tokens.write(values.data(), values.size() * sizeof(std::int64_t));
  }
  tokens.commit();
}

std::vector<MicroBatches> read_steps(const std::filesystem::path& directory, const StepCase& step_case,
                                     int rank, int ranks) {
  const MappedFile file(directory / "tokens.bin");
  const std::int64_t micro_batches = step_case.micro_batches, sequences = step_case.sequences,
                     length = step_case.length;
  ISOGRAD_INVARIANT(
      file.size() == static_cast<std::size_t>(kSteps * ranks * micro_batches * sequences * (length + 1)) * 8,
      std::to_string(file.size()) + " bytes of tokens");
  const at::Tensor all = at::from_blob(const_cast<std::uint8_t*>(file.data()),
                                       {kSteps, ranks, micro_batches, sequences, length + 1}, at::kLong);
  std::vector<MicroBatches> steps;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    steps.emplace_back();
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
      steps.back().push_back(std::move(batch));
    }
  }
  return steps;
}

namespace {

nlohmann::json read_description(const std::filesystem::path& directory) {
  return parse_json(read_file(directory / "case.json")).value;
}

}  // namespace

std::string read_case_name(const std::filesystem::path& directory) {
  return read_description(directory).at("name").get<std::string>();
}

StepSetting read_setting(const std::filesystem::path& directory) {
  const auto description = read_description(directory);
  return {.device = description.at("device").get<std::string>(),
          .dtype = description.at("dtype").get<std::string>(),
          .threads = description.at("threads").get<int>()};
}

std::int64_t read_steps_per_turn(const std::filesystem::path& directory) {
  return read_description(directory).at("steps_per_turn").get<std::int64_t>();
}

}  // namespace isograd
