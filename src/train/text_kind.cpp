// Keys and rules of runs on text.
#include <fmt/ranges.h>

#include <algorithm>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "isograd/group.hpp"
#include "isograd/tensor_parallel.hpp"
#include "train/build.hpp"
#include "train/compose.hpp"
#include "train/config_keys.hpp"
#include "train/task.hpp"
#include "train/task_kind.hpp"

namespace isograd {
namespace key_table {
namespace {

std::vector<ConfigKey> text_keys() {
  return {
      KEY("data.text", data.text, "", any(),
          "Files, directories or globs of UTF-8 text; `.jsonl` files give one document a line, "
          "from the field `text`. Empty together with `data.shards`: the C++ headers of the "
          "LibTorch in use.",
          Ranks::kMayDiffer),
      KEY("data.shards", data.shards, "", any(),
          "Files, directories or globs of shards packed already: by `isograd data pack`, or `.bin` "
          "files of llm.c and nanoGPT as they are.",
          Ranks::kMayDiffer),
      KEY("data.tokenizer", data.tokenizer, "", not_empty(),
          "`bytes` (256 bytes and two marks: a vocabulary of 258), a SentencePiece model file, or "
          "a Hugging Face `tokenizer.json` (by the Python package `tokenizers`; a document ends "
          "with the `eos_token` of a `tokenizer_config.json` beside it). Shards packed with "
          "another tokenizer are refused.",
          Ranks::kMayDiffer),
      KEY("data.end_of_text", data.end_of_text, "token", at_least(-1, 4294967295.0),
          "Token that delimits documents in shards of llm.c and nanoGPT. `-1`: none; a file is "
          "then one document."),
      KEY("data.cache", data.cache, "", not_empty(),
          "Folder that keeps `data.text` as shards, so that the next run starts at once.", Ranks::kMayDiffer),
      KEY("data.pack_length", data.pack_length, "tokens", at_least(1, kManyTokens),
          "Length of a pack. Documents are laid end to end and cut at this length; attention and "
          "positions never cross from one document into the next."),
      KEY("data.shuffle_packs", data.shuffle_packs, "", any(),
          "Takes an epoch's packs in shuffled order, so that a step mixes many documents. Off: "
          "packs are taken as they lie, and the fragments of a long document meet in one step."),

      KEY("batch.packs_per_step", batch.packs_per_step, "packs", at_least(1, kManyTokens),
          "The global batch: packs of one step, over all ranks and micro-batches."),
      KEY("batch.packs_per_micro_batch", batch.packs_per_micro_batch, "packs", at_least(1, kManyTokens),
          "Packs that one forward and backward sees on one rank. A speed and memory option: the "
          "gradient does not depend on it."),

      KEY("model.family", model.shape.family, "",
          one_of({"llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "dots1"}),
          "Whose `config.json` the model is written with. `mixtral`, `qwen2_moe`, `qwen3_moe` and "
          "`dots1` have experts (`docs/experts.md`)."),
      KEY("model.vocabulary", model.shape.vocabulary, "tokens", at_least(1, kManyRows),
          "Rows of the embedding; at least what the tokenizer and the corpus use."),
      KEY("model.hidden", model.shape.hidden, "", at_least(1, kWide),
          "Width of the residual stream; for Llama a multiple of `model.heads`."),
      KEY("model.layers", model.shape.layers, "", at_least(1, 100000), "Transformer blocks."),
      KEY("model.heads", model.shape.heads, "", at_least(1, kWide), "Query heads of a block."),
      KEY("model.key_value_heads", model.shape.key_value_heads, "", at_least(1, kWide),
          "Key and value heads of a block; divides `model.heads` (grouped-query attention)."),
      KEY("model.head_dim", model.shape.head_dim, "", at_least(2, kWide), "Width of a head; even."),
      KEY("model.feed_forward", model.shape.feed_forward, "", at_least(1, kWide), "Width inside SwiGLU."),
      KEY("model.experts", model.shape.experts.count, "", at_least(0, 32767),
          "Experts of a layer that has them. 0: none, for the families without."),
      KEY("model.experts_per_token", model.shape.experts.per_token, "", at_least(1, 32767),
          "How many of them compute a token: those that the router finds likeliest."),
      KEY("model.expert_feed_forward", model.shape.experts.feed_forward, "", at_least(0, kWide),
          "Width inside the SwiGLU of an expert; of `mixtral` the same as `model.feed_forward`."),
      KEY("model.normalise_experts", model.shape.experts.normalise, "", any(),
          "Whether the weights of a token's experts add up to 1; else they are their probabilities "
          "among all. Always with `mixtral`."),
      KEY("model.shared_expert_feed_forward", model.shape.experts.shared_feed_forward, "", at_least(0, kWide),
          "Width of the expert that every token goes through: `qwen2_moe` and `dots1`, there a "
          "multiple of `model.expert_feed_forward`."),
      KEY("model.expert_groups", model.shape.experts.groups, "", at_least(1, 32767),
          "Of `dots1`: groups of neighbouring experts, of which a token's experts come from few."),
      KEY("model.expert_groups_per_token", model.shape.experts.groups_per_token, "", at_least(1, 32767),
          "Of `dots1`: from how many of them; those whose two best scores add up to most."),
      KEY("model.expert_scale", model.shape.experts.scale, "", above(0),
          "Of `dots1`: by which the weights of a token's experts are multiplied."),
      KEY("model.experts_every", model.experts_every, "layers", at_least(1, 100000),
          "Every so many layers, from the n-th on, have experts; the others an ordinary network of "
          "`model.feed_forward`. 1 with `mixtral` and `dots1`."),
      KEY("model.dense_layers", model.dense_layers, "layers", at_least(0, 100000),
          "So many first layers have an ordinary network of `model.feed_forward`. 0 with `mixtral`."),
      KEY("model.max_positions", model.shape.max_positions, "tokens", at_least(1, kManyTokens),
          "Positions the model knows; at least `data.pack_length`, but for "
          "`model.rope_scaling.kind = \"dynamic\"`, which is for packs beyond."),
      KEY("model.rope_theta", model.shape.rope_theta, "", above(0), "Base of the rotary embedding."),
      KEY("model.norm_epsilon", model.shape.norm_epsilon, "", above(0), "Inside the root of RMSNorm."),
      KEY("model.tied_output", model.shape.tied_output, "", any(),
          "Whether the output layer is the embedding itself."),
      KEY("model.attention_bias", model.shape.attention_bias, "", any(),
          "Bias of the query, key and value projections: `true` for Qwen2, `false` for Mistral."),
      KEY("model.output_bias", model.shape.output_bias, "", any(),
          "Bias of attention's output projection: as `attention_bias` for Llama and Qwen3, `false` "
          "for the others."),
      KEY("model.mlp_bias", model.shape.mlp_bias, "", any(), "Bias of SwiGLU's projections: Llama only."),
      KEY("model.query_key_norm", model.shape.query_key_norm, "", any(),
          "RMSNorm of queries and keys, by head: `true` for Qwen3, `false` for the others."),
      KEY("model.initializer_range", model.shape.initializer_range, "", at_least(0),
          "Standard deviation of fresh weights."),
      KEY("model.bos", model.shape.bos, "token", at_least(-1, kManyRows),
          "Begins a document. `-1`: the tokenizer's, where it has one."),
      KEY("model.eos", model.shape.eos, "token", at_least(-1, kManyRows),
          "Ends a document. `-1`: the tokenizer's, where it has one."),
      KEY("model.pad", model.shape.pad, "token", at_least(-1, kManyRows),
          "Its row of the embedding gets no gradient as an input (tied, it still gets the output "
          "layer's), as `pad_token_id` in transformers. `-1`: no such token."),

      KEY("model.rope_scaling.kind", model.shape.rope_scaling.kind, "",
          one_of({"default", "linear", "dynamic", "llama3", "yarn"}),
          "Variant of the rotary embedding for long contexts. `default`: no scaling, and the keys "
          "below are refused."),
      KEY("model.rope_scaling.factor", model.shape.rope_scaling.factor, "", at_least(1),
          "How many times longer the context becomes."),
      KEY("model.rope_scaling.low_frequency_factor", model.shape.rope_scaling.low_frequency_factor, "",
          above(0), "Of `llama3`."),
      KEY("model.rope_scaling.high_frequency_factor", model.shape.rope_scaling.high_frequency_factor, "",
          above(0), "Of `llama3`; above the low one."),
      KEY("model.rope_scaling.original_max_positions", model.shape.rope_scaling.original_max_positions,
          "tokens", at_least(0, kManyTokens), "Positions before scaling (`llama3`, `yarn`)."),
      KEY("model.rope_scaling.beta_fast", model.shape.rope_scaling.beta_fast, "", above(0), "Of `yarn`."),
      KEY("model.rope_scaling.beta_slow", model.shape.rope_scaling.beta_slow, "", above(0), "Of `yarn`."),
      KEY("model.rope_scaling.truncate", model.shape.rope_scaling.truncate, "", any(),
          "Of `yarn`: whether the ramp begins and ends at whole dims."),
      KEY("model.rope_scaling.attention_factor", model.shape.rope_scaling.attention_factor, "", at_least(0),
          "Of `yarn`. 0: follows from the factor."),

      KEY("loss.balance", loss.balance, "", at_least(0),
          "Weight of the load balance loss of routers beside the cross entropy "
          "(`docs/experts.md`); 0: none."),
      KEY("loss.balance_over", loss.balance_over, "", one_of({"layers", "model"}),
          "The mean of the layers' own balance losses, or one loss over the tokens of all layers "
          "together, as transformers computes it."),
      KEY("loss.balance_scope", loss.balance_scope, "", one_of({"step", "micro_batch"}),
          "Whose tokens are to be balanced: those of the whole step, known by a pass of its own "
          "before the first forward; or those of the ranks' micro-batches at a time, another loss "
          "for each way to cut the step, which nothing can prove (`verify.at_end = false`)."),
      KEY("loss.router_z", loss.router_z, "", at_least(0),
          "Weight of the router z-loss, the mean over tokens and layers of the squared logarithm "
          "of Σ exp(logit); 0: none."),
      KEY("loss.selection_bias_rate", loss.selection_bias_rate, "", at_least(0, 1),
          "Of `dots1`: by how much each step raises the selection bias of experts that got less "
          "than the mean, and lowers that of those that got more; 0: not at all."),

      KEY("sample.prompt", sample.prompt, "", any(),
          "What the text generated at the end begins with. Empty: a new document."),
      KEY("sample.tokens", sample.tokens, "tokens", at_least(0, kManyTokens),
          "How many are generated. 0: none."),
      KEY("sample.temperature", sample.temperature, "", at_least(0),
          "Divides the logits before drawing. 0: always the likeliest token."),
  };
}

}  // namespace
}  // namespace key_table

namespace {

std::vector<RunConfig> text_accumulations(const RunConfig& config, int ranks) {
  std::vector<RunConfig> all{config};
  const std::int64_t most =
      split_rows(config.batch.packs_per_step, grid_of(config, ranks).size(kSampleAxes))[0];
  if (most < 2) return all;
  RunConfig other = config;
  other.batch.packs_per_micro_batch = config.batch.packs_per_micro_batch < most ? most : 1;
  all.push_back(std::move(other));
  return all;
}

constexpr const char* kOnlyOfRouters = "routers are a decoder's (model.kind)";

void check_router_losses(const RunConfig& config) {
  const auto& loss = config.loss;
  const bool any = loss.balance != 0 || loss.router_z != 0;
  if (!any && loss.selection_bias_rate == kSelectionBiasRate) return;  // before a model's folder is opened
  const bool sigmoid = configured_shape(config).experts.sigmoid;
  if (!sigmoid && loss.selection_bias_rate != kSelectionBiasRate)
    refuse("loss.selection_bias_rate",
           fmt::format("{}, and routers without a selection bias", loss.selection_bias_rate),
           "a model that has it (model.family = \"dots1\")", "Leave it out");
  if (sigmoid && loss.router_z != 0)
    refuse("loss.router_z", fmt::format("{}, and routers that score by sigmoids", loss.router_z),
           "routers with a softmax, whose logits it keeps small",
           "Leave it out; loss.balance and loss.selection_bias_rate balance loads");
  if (any) {
    const DecoderConfig shape = configured_shape(config);
    bool routes = false;
    for (std::int64_t layer = 0; layer < shape.layers; ++layer) routes |= shape.has_experts(layer);
    if (!routes)
      refuse(loss.balance != 0 ? "loss.balance" : "loss.router_z",
             fmt::format("a loss of routers, and {} layers of which none has experts", shape.layers),
             "a layer that has them",
             "Leave it out, or set model.experts, a model.family that has them and "
             "model.experts_every of at most model.layers");
  }
  if (any && normalises_by_replica(config))
    refuse("loss.normalise_over",
           "a mean of per-replica means with losses of routers, which are over the whole step",
           "one mean over all replicas", "Leave loss.normalise_over out");
  if (loss.balance != 0 && loss.balance_scope == "micro_batch" &&
      (config.verify.at_end || config.verify.every > 0))
    refuse("loss.balance_scope",
           "micro_batch, which is another loss for each way to cut the step, and a proof "
           "(verify.at_end, verify.every)",
           "a loss that one process has too",
           "Set loss.balance_scope = \"step\", or verify.at_end = false and verify.every = 0");
}

}  // namespace

const TaskKind& text_kind() {
  static const TaskKind kind{
      .name = "decoder",
      .samples = "packs",
      .tokens = "tokens",
      .smaller = "batch.packs_per_micro_batch or data.pack_length",
      .samples_per_step = [](const RunConfig& config) { return config.batch.packs_per_step; },
      .keys = key_table::text_keys,
      .of_no_other = {{"loss.balance", kOnlyOfRouters},
                      {"loss.router_z", kOnlyOfRouters},
                      {"parallel.ep", kOnlyOfRouters},
                      {"parallel.pp", "stages are a decoder's (model.kind)"}},
      .check =
          [](const RunConfig& config) {
            if (config.model.load.empty()) check(configured_shape(config));
            check_router_losses(config);
            check_experts_dealt(config);
          },
      .check_ranks = [](const RunConfig& config, int) { check_decoder_cut(config); },
      .accumulations = text_accumulations,
      .accumulation_text =
          [](const RunConfig& config) {
            return fmt::format("{} to a micro-batch", config.batch.packs_per_micro_batch);
          },
      .view = [](const RunConfig& config,
                 const Grid& grid) { return with_key_head_view(grid, configured_shape(config)); },
      .make = make_text_task,
      .model_without_values = text_model_without_values};
  return kind;
}

}  // namespace isograd
