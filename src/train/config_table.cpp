#include "train/config_table.hpp"

#include <fmt/format.h>

#include <type_traits>

namespace isograd {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNoLimit = 1e6;     // limits from here on only keep arithmetic from overflowing: left unsaid
constexpr double kManySteps = 1e15;  // far below where 64-bit counts could overflow
constexpr double kManyTokens = 1e9;  // of a pack or a batch
constexpr double kWide = 1 << 24;    // of a tensor's dim
constexpr double kManyRows = 1 << 30;  // of the embedding

const std::vector<std::string> kScheduleKinds = {"constant", "cosine"};

ConfigValue to_value(bool value) {
  return value;
}
ConfigValue to_value(std::int64_t value) {
  return value;
}
ConfigValue to_value(double value) {
  return value;
}
ConfigValue to_value(const std::string& value) {
  return value;
}
ConfigValue to_value(const std::vector<std::string>& value) {
  return value;
}
ConfigValue to_value(Schedule::Kind kind) {
  return kScheduleKinds[kind == Schedule::Kind::kConstant ? 0 : 1];
}
ConfigValue to_value(const std::optional<double>& value) {
  return value.value_or(0);
}

template <typename Field>
void from_value(Field& field, const ConfigValue& value) {
  field = std::get<Field>(value);
}
void from_value(Schedule::Kind& field, const ConfigValue& value) {
  field = std::get<std::string>(value) == "constant" ? Schedule::Kind::kConstant : Schedule::Kind::kCosine;
}
void from_value(std::optional<double>& field, const ConfigValue& value) {
  const double number = std::get<double>(value);
  field = number == 0 ? std::nullopt : std::optional(number);
}

template <auto kField>
ConfigKey make_key(std::string name, std::string unit, Allowed allowed, std::string description) {
  return {.name = std::move(name),
          .unit = std::move(unit),
          .allowed = std::move(allowed),
          .description = std::move(description),
          .get = [](const RunConfig& config) { return to_value(kField(config)); },
          .set = [](RunConfig& config, const ConfigValue& value) { from_value(kField(config), value); }};
}

// A key named as its field is written below; `path` is where RunConfig keeps it.
#define KEY(name, path, ...)        \
  make_key < [](auto& c) -> auto& { \
    return c.path;                  \
  }                                 \
  > (name, __VA_ARGS__)

Allowed any() {
  return {};
}
Allowed at_least(double least, double most = kInfinity) {
  return {.least = least, .most = most};
}
Allowed above(double least) {
  return {.least = least, .above_least = true};
}
Allowed fraction() {
  return {.least = 0, .most = 1, .below_most = true};
}
Allowed one_of(std::vector<std::string> choices) {
  return {.choices = std::move(choices)};
}
Allowed not_empty() {
  return {.not_empty = true};
}

std::vector<ConfigKey> make_keys() {
  return {
      KEY("run.directory", run.directory, "", not_empty(),
          "Folder of this run: report, metrics, TensorBoard events and checkpoints. Relative paths start at "
          "the "
          "working directory."),
      KEY("run.json_log", run.json_log, "", any(),
          "File for the metrics as JSON lines. Empty: `metrics.jsonl` in `run.directory`."),
      KEY("run.seed", run.seed, "", at_least(0),
          "Initial weights, the order of the data, the choice of validation documents and generated text "
          "follow "
          "from it, whatever the number of ranks."),
      KEY("run.memory", run.memory, "", any(),
          "Measure what each rank keeps and sends, and print it beside the formulas (docs/memory.md)."),
      KEY("run.peak_tflops", run.peak_tflops, "TFLOP/s", at_least(0),
          "What a rank's device can do in `train.dtype`, by its data sheet: the model FLOPs utilisation "
          "(MFU) is "
          "relative to it. 0: to what matrix products reach on all ranks at once, measured when the run "
          "starts."),

      KEY("data.text", data.text, "", any(),
          "Files, directories or globs of UTF-8 text; `.jsonl` files give one document a line, from the "
          "field "
          "`text`. Empty together with `data.shards`: the C++ headers of the LibTorch in use."),
      KEY("data.shards", data.shards, "", any(),
          "Files, directories or globs of shards packed already: by `isograd data pack`, or `.bin` files of "
          "llm.c and nanoGPT as they are."),
      KEY("data.tokenizer", data.tokenizer, "", not_empty(),
          "`bytes` (256 bytes and two marks: a vocabulary of 258), a SentencePiece model file, or a Hugging "
          "Face "
          "`tokenizer.json` (by the Python package `tokenizers`; a document ends with the `eos_token` of a "
          "`tokenizer_config.json` beside it). Shards packed with another tokenizer are refused."),
      KEY("data.end_of_text", data.end_of_text, "token", at_least(-1, 4294967295.0),
          "Token that delimits documents in shards of llm.c and nanoGPT. `-1`: none; a file is then one "
          "document."),
      KEY("data.cache", data.cache, "", not_empty(),
          "Folder that keeps `data.text` as shards, so that the next run starts at once."),
      KEY("data.pack_length", data.pack_length, "tokens", at_least(1, kManyTokens),
          "Length of a pack. Documents are laid end to end and cut at this length; attention and positions "
          "never "
          "cross from one document into the next."),
      KEY("data.shuffle_packs", data.shuffle_packs, "", any(),
          "Takes an epoch's packs in shuffled order, so that a step mixes many documents. Off: packs are "
          "taken as "
          "they lie, and the fragments of a long document meet in one step."),
      KEY("data.validation_fraction", data.validation_fraction, "", fraction(),
          "Part of the documents that is held out for the validation loss. 0: none."),

      KEY("data.table", data.table, "", any(),
          "Of a `scorer`: a CSV file (names of columns, then numbers), or an NPZ file with `x` [rows, "
          "features] and "
          "`y` [rows]."),
      KEY("data.target", data.target, "", any(),
          "The table's column, or array, of targets 0 and 1. Empty: the last column, or `y`."),

      KEY("batch.packs_per_step", batch.packs_per_step, "packs", at_least(1, kManyTokens),
          "The global batch: packs of one step, over all ranks and micro-batches."),
      KEY("batch.packs_per_micro_batch", batch.packs_per_micro_batch, "packs", at_least(1, kManyTokens),
          "Packs that one forward and backward sees on one rank. A speed and memory option: the gradient "
          "does not "
          "depend on it."),

      KEY("batch.rows_per_step", batch.rows_per_step, "rows", at_least(1, kManyTokens),
          "The global batch of a `scorer`, over all ranks; its last step of an epoch may be shorter."),
      KEY("batch.videos_per_step", batch.videos_per_step, "videos", at_least(1, kManyTokens),
          "The global batch of a `video` run: whole videos, over all ranks and micro-batches; the last step "
          "of "
          "an epoch may be shorter. Each rank gets about the same Σ length²."),
      KEY("batch.tokens_per_micro_batch", batch.tokens_per_micro_batch, "patches", at_least(1, kManyTokens),
          "Of videos: how many patches one forward and backward sees on one rank, at most; a longer video is "
          "a "
          "micro-batch by itself. A speed and memory option: the gradient does not depend on it."),
      KEY("batch.max_tokens_per_rank", batch.max_tokens_per_rank, "tokens", at_least(0, kManyTokens),
          "Tokens of one micro-batch (of videos: patches) that a rank has memory for, after the cut over "
          "context ranks. A step with more on any rank is an error on all of them before it is made. 0: no "
          "limit."),

      KEY("model.load", model.load, "", any(),
          "Hugging Face directory to start from (`config.json`, `model.safetensors` or its sharded index); a "
          "checkpoint is one too. Its `config.json` then describes the model, and the other keys of this "
          "section "
          "are refused. Empty: fresh weights by `run.seed`."),
      KEY("model.family", model.shape.family, "", one_of({"llama", "qwen2", "qwen3", "mistral"}),
          "Whose `config.json` the model is written with."),
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
      KEY("model.max_positions", model.shape.max_positions, "tokens", at_least(1, kManyTokens),
          "Positions the model knows; at least `data.pack_length`, but for `model.rope_scaling.kind = "
          "\"dynamic\"`, which is for packs beyond."),
      KEY("model.rope_theta", model.shape.rope_theta, "", above(0), "Base of the rotary embedding."),
      KEY("model.norm_epsilon", model.shape.norm_epsilon, "", above(0), "Inside the root of RMSNorm."),
      KEY("model.tied_output", model.shape.tied_output, "", any(),
          "Whether the output layer is the embedding itself."),
      KEY("model.attention_bias", model.shape.attention_bias, "", any(),
          "Bias of the query, key and value projections: `true` for Qwen2, `false` for Mistral."),
      KEY("model.output_bias", model.shape.output_bias, "", any(),
          "Bias of attention's output projection: as `attention_bias` for Llama and Qwen3, `false` for the "
          "others."),
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
          "Its row of the embedding gets no gradient as an input (tied, it still gets the output layer's), "
          "as "
          "`pad_token_id` in transformers. `-1`: no such token."),

      KEY("model.kind", model.kind, "", one_of({"decoder", "scorer", "video"}),
          "`decoder`: a language model on text. `scorer`: a multilayer perceptron that ranks the rows of "
          "`data.table` (`docs/ranking.md`); of the keys above it reads none but "
          "`data.validation_fraction`. `video`: a diffusion transformer on `video.files` (`docs/video.md`), "
          "described by `hidden`, `layers`, `heads`, `head_dim`, `feed_forward` and `initializer_range`."),
      KEY("model.scorer_units", model.scorer_units, "", at_least(1, kWide),
          "Of each hidden layer of a `scorer`."),
      KEY("model.scorer_layers", model.scorer_layers, "", at_least(0, 1000),
          "Hidden layers of a `scorer`. 0: a linear one."),

      KEY("model.rope_scaling.kind", model.shape.rope_scaling.kind, "",
          one_of({"default", "linear", "dynamic", "llama3", "yarn"}),
          "Variant of the rotary embedding for long contexts. `default`: no scaling, and the keys below are "
          "refused."),
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

      KEY("video.files", video.files, "", any(),
          "Files, directories or globs of videos in any format that FFmpeg decodes."),
      KEY("video.height", video.height, "pixels", at_least(1, 8192),
          "Rows of pixels of a frame, at most: larger frames are scaled down, to whole patches."),
      KEY("video.frames_per_second", video.frames_per_second, "", at_least(0, 1000),
          "How many frames of a second are taken, at most. 0: every frame."),
      KEY("video.max_frames", video.max_frames, "frames", at_least(0, kManyTokens),
          "How many of a video's frames are taken, at most: its first. 0: all."),
      KEY("video.patch_frames", video.patch_frames, "frames", at_least(1, 256),
          "Of a patch, which is a token."),
      KEY("video.patch_height", video.patch_height, "pixels", at_least(1, 1024), "Rows of a patch."),
      KEY("video.patch_width", video.patch_width, "pixels", at_least(1, 1024), "Columns of a patch."),
      KEY("video.timestep_features", video.timestep_features, "", at_least(2, kWide),
          "Sines and cosines that tell the model the timestep; even."),
      KEY("video.gate_init", video.gate_init, "", at_least(-1, 1),
          "Where the gates of the blocks begin. 0: each block begins as the identity (adaLN-Zero), and has "
          "no "
          "gradient in the first step. Otherwise the projections that modulate begin like all others."),

      KEY("loss.kind", loss.kind, "", one_of({"token_mean", "sample_mean", "weighted_mean", "fixed", "none"}),
          "What the sum over tokens is divided by: the targets of the whole step, each sample's own tokens "
          "and "
          "then the samples, the weights, `loss.denominator`, or nothing. Counted over all ranks and "
          "micro-batches before any backward, so that the loss does not depend on how the batch is cut "
          "(`docs/losses.md`)."),
      KEY("loss.denominator", loss.denominator, "", at_least(0), "What `fixed` divides by. 0: not given."),
      KEY("loss.fused", loss.fused, "", one_of({"auto", "on", "off"}),
          "Whether the output projection and the loss are computed in one, tile by tile, so that the logits "
          "of a micro-batch never exist as a whole. `auto`: where they would take more than 256 MiB. A speed "
          "and memory option."),
      KEY("loss.normalise_over", loss.normalise_over, "", any(),
          "Data axes inside which the mean is taken. Without `dp_replicate` the loss is the mean of "
          "per-replica "
          "means: another loss, which depends on how samples are dealt to the replicas. In `bucketed` and "
          "`naive` every rank is a replica."),
      KEY("loss.dp_replicate_reduction", loss.dp_replicate_reduction, "", one_of({"derived", "sum", "mean"}),
          "What other trainers call the reduction over replicas. `derived`: follows from `normalise_over`. "
          "Said "
          "otherwise it must agree: `sum` with one mean over all replicas, `mean` with a mean of per-replica "
          "means."),

      KEY("ranking.loss", ranking.loss, "",
          one_of(
              {"cross_entropy", "smooth_ap", "recall_at_quantile", "pauc", "pauc_pairwise", "sigmoid_focal"}),
          "What a `scorer` is trained by, over the rows of all ranks (`docs/ranking.md`)."),
      KEY("ranking.temperature", ranking.temperature, "", at_least(0),
          "Of the loss's sigmoids. 0: the loss's own default."),
      KEY("ranking.queue_size", ranking.queue_size, "rows", at_least(0, kManyTokens),
          "Rows of earlier steps that take part in the ranking, with the scores that they had."),
      KEY("ranking.quantile", ranking.quantile, "",
          {.least = 0, .most = 1, .above_least = true, .below_most = true},
          "Share of all rows above the threshold of the recall, trained or measured."),
      KEY("ranking.alpha", ranking.alpha, "", fraction(),
          "Where the partial AUC's band of false-positive rates begins."),
      KEY("ranking.budget", ranking.budget, "", {.least = 0, .most = 1, .above_least = true},
          "Where it ends; the measured partial AUC begins at 0."),
      KEY("ranking.compare", ranking.compare, "", any(),
          "Whether a second scorer is trained by cross entropy, from the same weights on the same rows, for "
          "the "
          "report."),

      KEY("train.steps", train.steps, "steps", at_least(1, kManySteps), "Optimizer steps of the whole run."),
      KEY("train.dtype", train.dtype, "", one_of({"float32", "bfloat16", "float64"}),
          "Number type of parameters and gradients. With `bfloat16` the optimizer keeps `float32` masters."),
      KEY("train.fp32_gradients", train.fp32_gradients, "", any(),
          "Whether gradients of `bfloat16` parameters are kept, added up and reduced in `float32`. Off: half "
          "the "
          "memory and traffic, more rounding."),
      KEY("train.max_norm", train.max_norm, "", at_least(0),
          "The gradient is scaled down to this norm where it is larger. 0: no clipping."),
      KEY("train.evaluate_every", train.evaluate_every, "steps", at_least(0, kManySteps),
          "How often the validation loss is measured. 0: only at the end."),
      KEY("train.evaluate_packs", train.evaluate_packs, "packs", at_least(1, kManyTokens),
          "How many packs of the validation documents are measured, at most; of videos, how many videos."),
      KEY("train.on_non_finite", train.on_non_finite, "", one_of({"stop", "skip"}),
          "When a loss or gradient is not finite, nothing is updated on any rank; then the run stops (exit "
          "status "
          "1) or skips that step."),

      KEY("optimizer.kind", optimizer.kind, "", one_of({"adamw", "sgd"}),
          "AdamW (Loshchilov and Hutter 2019) or stochastic gradient descent."),
      KEY("optimizer.beta1", optimizer.adamw.beta1, "", fraction(), "Decay of AdamW's first moment."),
      KEY("optimizer.beta2", optimizer.adamw.beta2, "", fraction(), "Decay of AdamW's second moment."),
      KEY("optimizer.epsilon", optimizer.adamw.epsilon, "", above(0), "Of AdamW's denominator."),
      KEY("optimizer.weight_decay", optimizer.adamw.weight_decay, "", at_least(0),
          "Of matrices; norms and biases do not decay. Decoupled with AdamW."),
      KEY("optimizer.momentum", optimizer.momentum, "", fraction(), "Of `sgd`."),

      KEY("schedule.kind", schedule.kind, "", one_of(kScheduleKinds),
          "Learning rate after the warm-up: constant, or down a cosine to `schedule.floor` at the last "
          "step."),
      KEY("schedule.peak", schedule.peak, "", above(0), "The highest learning rate."),
      KEY("schedule.warmup", schedule.warmup, "steps", at_least(0, kManySteps),
          "Steps over which the learning rate rises linearly from 0 to its peak."),
      KEY("schedule.floor", schedule.floor, "", at_least(0, 1),
          "Where the cosine ends, as a fraction of the peak."),

      KEY("parallel.strategy", parallel.strategy, "", one_of(strategy_names()),
          "What each rank keeps, and how gradients are summed: `naive`, one by one after backward, for "
          "comparison; `overlapped`, one by one while it runs; `bucketed`, in buckets while it runs; "
          "`zero1`, "
          "each rank keeps a shard of the optimizer's state; `zero2`, of the gradients too; `zero3`, of the "
          "parameters too, "
          "each block gathered while it is used."),
      KEY("parallel.replicas", parallel.replicas, "", at_least(1, 1e6),
          "Copies of the model among the ranks of a sharded strategy (`zero1`, `zero2`, `zero3`); each is "
          "sharded "
          "over "
          "ranks / replicas of them. Must divide the ranks."),
      KEY("parallel.cp_ring", parallel.cp_ring, "", at_least(1, 1e6),
          "Ranks that share each micro-batch and pass keys and values round a ring: documents are cut over "
          "them by cost. Times `parallel.cp_ulysses` and `parallel.replicas` it must divide the ranks; the "
          "rest are the ranks that packs are dealt to."),
      KEY("parallel.cp_ulysses", parallel.cp_ulysses, "", at_least(1, 1e6),
          "Ranks that share each micro-batch and exchange tokens for heads. Must divide `model.heads`, and "
          "`model.key_value_heads` or be a multiple of it."),
      KEY("parallel.cp_fsdp_mode", parallel.cp_fsdp_mode, "",
          one_of({"all", "ulysses_only", "ring_only", "none"}),
          "Over which of these ranks a sharded strategy spreads its shards, besides those with other packs; "
          "over the rest it keeps copies. The gradient is the same."),
      KEY("parallel.share_parameters", parallel.share_parameters, "", one_of({"auto", "on", "off"}),
          "Whether ranks of one host keep one copy of the parameters between them, each updating its shard "
          "in place. `auto`: where the backend has memory that all ranks reach (`shm`), but for `naive` and "
          "`overlapped`, and not on GPUs."),
      KEY("parallel.reduce_once", parallel.reduce_once, "", any(),
          "With `zero2` and `zero3`: keep whole gradients until the last micro-batch instead of reducing "
          "each one's."),
      KEY("parallel.bucket_bytes", parallel.bucket_bytes, "bytes", at_least(1, 1e12),
          "Gradients that are communicated together. A speed option."),
      KEY("parallel.first_bucket_bytes", parallel.first_bucket_bytes, "bytes", at_least(0, 1e12),
          "The same for the first bucket of a backward, small so that communication begins early. 0: like "
          "the "
          "others. A speed option."),
      KEY("parallel.overlap", parallel.overlap, "", any(),
          "Whether buckets are reduced inside backward. A speed option."),
      KEY("parallel.prefetch", parallel.prefetch, "", any(),
          "With `zero3`: gather the next block while this one computes. A speed option."),
      KEY("parallel.reshard_after_forward", parallel.reshard_after_forward, "", any(),
          "With `zero3`: free blocks after forward and gather them again for backward. `false` trades memory "
          "for communication."),
      KEY("parallel.checkpoint_activations", parallel.checkpoint_activations, "", any(),
          "With `zero3`: keep only the blocks' inputs and compute their forward again in backward."),
      KEY("parallel.gather_limit_bytes", parallel.gather_limit_bytes, "bytes", at_least(0, 1e15),
          "With `zero3`: parameters that may be whole at a time; a block that does not fit is named before "
          "training. 0: no limit."),
      KEY("parallel.timeout_seconds", parallel.timeout_seconds, "seconds",
          {.least = 0, .most = 1e6, .above_least = true},
          "The longest wait for another rank, after which it counts as lost (exit status 3)."),
      KEY("parallel.device", parallel.device, "", one_of({"cpu", "cuda", "auto"}),
          "Where models, gradients and the optimizer's state lie and are computed with (`docs/gpu.md`): "
          "`cpu`; `cuda`, a GPU for each rank of a host; `auto`, `cuda` where LibTorch finds a GPU."),
      KEY("parallel.backend", parallel.backend, "", one_of({"auto", "shm", "mpi", "nccl"}),
          "What carries data between ranks: `shm`, the shared memory of one host; `mpi`, over several hosts "
          "as well, in a build that found an MPI; `nccl`, between the GPUs of one host. `auto`: `nccl` where "
          "ranks are on GPUs, else `shm`."),
      KEY("parallel.offload", parallel.offload, "", any(),
          "On a GPU: what a rank holds of summed gradients, masters and the optimizer's state lies in host "
          "memory, and the CPU takes norms and updates (`docs/gpu.md`). Refused on the CPU."),

      KEY("checkpoint.every", checkpoint.every, "steps", at_least(0, kManySteps),
          "How often a checkpoint is saved. 0: only at the end."),
      KEY("checkpoint.keep", checkpoint.keep, "", at_least(1, 1e9),
          "How many of the newest checkpoints stay."),
      KEY("checkpoint.resume", checkpoint.resume, "", any(),
          "Checkpoint to continue from, bit for bit: its folder, or `latest` in `run.directory`. Empty: a "
          "new "
          "run."),

      KEY("verify.at_end", verify.at_end, "", any(),
          "Whether a finished run proves that its gradient is the one that a single process has on the whole "
          "batch; it then ends with the parity line and, where parity is broken, exit status 1."),
      KEY("verify.every", verify.every, "steps", at_least(0, kManySteps),
          "How often a micro-sized step with the weights of that moment is proven the same way while "
          "training "
          "(`train --verify-every`). Parity broken stops the run, exit status 1. 0: never."),
      KEY("verify.checksums_every", verify.checksums_every, "steps", at_least(0, kManySteps),
          "How often ranks that keep the same weights compare checksums of them. A difference names the "
          "first "
          "parameter and the ranks and stops the run, exit status 1. 0: never."),

      KEY("sample.prompt", sample.prompt, "", any(),
          "What the text generated at the end begins with. Empty: a new document."),
      KEY("sample.tokens", sample.tokens, "tokens", at_least(0, kManyTokens),
          "How many are generated. 0: none."),
      KEY("sample.temperature", sample.temperature, "", at_least(0),
          "Divides the logits before drawing. 0: always the likeliest token."),
  };
}
#undef KEY

}  // namespace

const std::vector<ConfigKey>& config_keys() {
  static const std::vector<ConfigKey> keys = make_keys();
  return keys;
}

const std::vector<ConfigSection>& config_sections() {
  static const std::vector<ConfigSection> sections = {
      {"run", "The run as a whole."},
      {"data", "What the model learns from."},
      {"batch", "What one step sees."},
      {"model", "The decoder language model: Llama to the letter, and its near relatives."},
      {"model.rope_scaling", "Rotary embedding for long contexts, as Hugging Face's `rope_scaling`."},
      {"video",
       "Videos and the diffusion transformer that learns from them (`model.kind = \"video\"`, "
       "`docs/video.md`)."},
      {"loss", "Who divides what (`docs/losses.md`)."},
      {"ranking", "The loss of a `scorer`, and what is measured of it."},
      {"train", "The loop around the step."},
      {"optimizer", "How a gradient becomes an update. The learning rate is `schedule`'s."},
      {"schedule", "The learning rate over the steps."},
      {"parallel", "How and where ranks work together. No key of this section changes the gradient."},
      {"checkpoint", "Saving and continuing."},
      {"verify", "The proof while training and at the end."},
      {"sample", "Text generated at the end."},
  };
  return sections;
}

std::string type_name(const ConfigValue& value) {
  static const char* const names[] = {"true or false", "integer", "number", "text", "list of texts"};
  return names[value.index()];
}

std::string allowed_text(const ConfigKey& key) {
  const Allowed& allowed = key.allowed;
  std::string text = type_name(key.get(RunConfig{}));
  if (!allowed.choices.empty()) {
    std::string choices;
    for (const auto& choice : allowed.choices) choices += (choices.empty() ? "" : ", ") + toml_text(choice);
    return allowed.choices.size() == 1 ? choices : "one of " + choices;
  }
  if (allowed.not_empty) text += ", not empty";
  const bool below = allowed.most < kNoLimit;
  const std::string unit = key.unit.empty() ? "" : " (" + key.unit + ")";
  if (allowed.least != -kInfinity)
    text += fmt::format(", {} {}",
                        allowed.above_least ? "above"
                        : below             ? "from"
                                            : "at least",
                        allowed.least);
  if (below)
    text += fmt::format("{} {:.15g}",
                        allowed.below_most    ? " to below"
                        : allowed.above_least ? " and at most"
                                              : " to",
                        allowed.most);
  return text + unit;
}

std::optional<std::string> refusal(const ConfigKey& key, const ConfigValue& value) {
  const Allowed& allowed = key.allowed;
  if (auto text = std::get_if<std::string>(&value)) {
    if (allowed.not_empty && text->empty()) return "an empty text";
    const auto& choices = allowed.choices;
    if (!choices.empty() && std::find(choices.begin(), choices.end(), *text) == choices.end())
      return toml_text(value);
    return std::nullopt;
  }
  double number = 0;
  if (auto integer = std::get_if<std::int64_t>(&value)) {
    number = static_cast<double>(*integer);
  } else if (auto real = std::get_if<double>(&value)) {
    if (!std::isfinite(*real)) return toml_text(value);
    number = *real;
  } else {
    return std::nullopt;
  }
  const bool low = allowed.above_least ? number <= allowed.least : number < allowed.least;
  const bool high = allowed.below_most ? number >= allowed.most : number > allowed.most;
  if (high && allowed.most >= kNoLimit)
    return fmt::format("{}, more than {:.16g}", toml_text(value), allowed.most);
  return low || high ? std::optional(toml_text(value)) : std::nullopt;
}

}  // namespace isograd
