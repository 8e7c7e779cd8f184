#include "train/resume.hpp"

#include "isograd/error.hpp"
#include "train/checkpoint_state.hpp"
#include "train/rank_zero.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

// Compares what this run says with what the checkpoint says, key by key.
struct Comparison {
  std::string checkpoint;

  template <class T>
  void operator()(const std::string& key, const T& now, const T& then) const {
    if (now == then) return;
    throw ConfigError(
        {.where = key,
         .found = fmt::format("{}", now),
         .expected = fmt::format("{}, as in checkpoint {}", then, checkpoint),
         .action = fmt::format("Set {} = {} to continue that run, or leave checkpoint.resume out to start "
                               "anew",
                               key, then)});
  }
};

void check_same_shape(const DecoderConfig& now, const DecoderConfig& then, const Comparison& same) {
  same("model.family", now.family, then.family);
  same("model.vocabulary", now.vocabulary, then.vocabulary);
  same("model.hidden", now.hidden, then.hidden);
  same("model.layers", now.layers, then.layers);
  same("model.heads", now.heads, then.heads);
  same("model.key_value_heads", now.key_value_heads, then.key_value_heads);
  same("model.head_dim", now.head_dim, then.head_dim);
  same("model.feed_forward", now.feed_forward, then.feed_forward);
  same("model.max_positions", now.max_positions, then.max_positions);
  same("model.rope_theta", now.rope_theta, then.rope_theta);
  same("model.rope_scaling.kind", now.rope_scaling.kind, then.rope_scaling.kind);
  same("model.rope_scaling.factor", now.rope_scaling.factor, then.rope_scaling.factor);
  same("model.attention_bias", now.attention_bias, then.attention_bias);
  same("model.output_bias", now.output_bias, then.output_bias);
  same("model.mlp_bias", now.mlp_bias, then.mlp_bias);
  same("model.query_key_norm", now.query_key_norm, then.query_key_norm);
  same("model.norm_epsilon", now.norm_epsilon, then.norm_epsilon);
  same("model.tied_output", now.tied_output, then.tied_output);
}

}  // namespace

TrainingState fresh_state(const RunConfig& config, const Corpus& corpus) {
  return {.position = {},
          .seed = config.run.seed,
          .pack_length = config.data.pack_length,
          .packs_per_step = config.batch.packs_per_step,
          .shuffle_packs = config.data.shuffle_packs ? 1 : 0,
          .validation_fraction = config.data.validation_fraction,
          .documents = corpus.tokens->num_documents(),
          .tokens = corpus.tokens->num_tokens(),
          .optimizer = config.optimizer.kind,
          .dtype = config.train.dtype,
          .tokenizer = corpus.tokens->tokenizer_name(),
          .config = to_toml(config)};
}

fs::path checkpoint_root(const RunConfig& config) {
  return fs::path(config.run.directory) / "checkpoints";
}

Resumed resume_run(const RunConfig& config, const Corpus& corpus, Group& group) {
  Resumed resumed;
  std::string state;
  on_rank_zero(group, [&] {
    resumed.directory = resolve_checkpoint(checkpoint_root(config), config.checkpoint.resume);
    state = to_json(open_checkpoint(resumed.directory));
  });
  resumed.directory = broadcast_text(group, resumed.directory.string());
  resumed.state = parse_state(broadcast_text(group, state), resumed.directory.string());

  const TrainingState now = fresh_state(config, corpus);
  const TrainingState& then = resumed.state;
  const Comparison same{resumed.directory.string()};
  same("run.seed", now.seed, then.seed);
  same("data.pack_length", now.pack_length, then.pack_length);
  same("batch.packs_per_step", now.packs_per_step, then.packs_per_step);
  same("data.shuffle_packs", now.shuffle_packs, then.shuffle_packs);
  same("data.validation_fraction", now.validation_fraction, then.validation_fraction);
  same("optimizer.kind", now.optimizer, then.optimizer);
  same("train.dtype", now.dtype, then.dtype);
  same("data.tokenizer", now.tokenizer, then.tokenizer);
  if (now.documents != then.documents || now.tokens != then.tokens)
    throw ConfigError(
        {.where = "data",
         .found = fmt::format("a corpus of {} documents and {} tokens", now.documents, now.tokens),
         .expected = fmt::format("{} documents and {} tokens, as in checkpoint {}", then.documents,
                                 then.tokens, resumed.directory.string()),
         .action = "Give back the text this run was started with, or train from these weights anew: "
                   "model.load = \"" +
                   resumed.directory.string() + "\""});
  check_same_shape(model_shape(config, corpus), read_hf_config(resumed.directory), same);
  return resumed;
}

std::string resume_command(const RunConfig& config, int ranks, const fs::path& checkpoint) {
  return fmt::format("isograd train {} --ranks {} --set checkpoint.resume=\"{}\"",
                     config.source.empty() ? "CONFIG.toml" : config.source.string(), ranks,
                     checkpoint.string());
}

}  // namespace isograd
