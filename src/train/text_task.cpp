// The decoder language model on text: its configuration keys, rules and task.
#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/files.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "data/corpus.hpp"
#include "isograd/checkpoint.hpp"
#include "isograd/data.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/group.hpp"
#include "isograd/lora.hpp"
#include "isograd/model.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "isograd/tensor_parallel.hpp"
#include "model/experts.hpp"
#include "model/hf.hpp"
#include "model/hooks.hpp"
#include "model/parameters.hpp"
#include "train/build.hpp"
#include "train/config_table.hpp"
#include "train/evaluate.hpp"
#include "train/memory.hpp"
#include "train/rank_zero.hpp"
#include "train/router_losses.hpp"
#include "train/task.hpp"

namespace isograd {
namespace key_table {
namespace {

std::vector<ConfigKey> text_keys() {
  return {
      KEY(data.text, R"(Files, directories or globs of UTF-8 text; `.jsonl` files, also `.jsonl.gz` and
          `.jsonl.zst`, give one document a line: a text, a prompt and its completion, or a conversation
          (`docs/conversations.md`). Empty together with `data.shards`: the C++ headers of the LibTorch in
          use.)",
          Ranks::kMayDiffer),
      KEY(data.shards, R"(Files, directories or globs of shards packed already: by `isograd data pack`, or
          `.bin` files of llm.c and nanoGPT as they are.)",
          Ranks::kMayDiffer),
      KEY(data.tokenizer, not_empty(), R"(`bytes` (256 bytes and two marks: a vocabulary of 258), a
          SentencePiece model file, or a Hugging Face `tokenizer.json` (by the Python package `tokenizers`; a
          document ends with the `eos_token` of the `tokenizer_config.json` in the same folder). Shards packed
          with another tokenizer are refused.)",
          Ranks::kMayDiffer),
      KEY(data.end_of_text, "token", at_least(-1, 4294967295.0), R"(Token that delimits documents in shards of
          llm.c and nanoGPT. `-1`: none; a file is then one document.)"),
      KEY(data.cache, not_empty(),
          "Folder that keeps `data.text` as shards, so that the next run starts at once.", Ranks::kMayDiffer),
      KEY(data.on_bad_line, one_of({"stop", "skip"}), R"(A line of a `.jsonl` file that is no
          document: `stop` ends the run with its place, `skip` leaves it out, counts it and lists its place in
          the cache.)"),
      KEY(data.train_on, one_of({"assistant", "all"}),
          R"(Targets of a conversation: what the assistant says (of
          a prompt and its completion: the completion), or all tokens.)"),
      KEY(data.drop_doubled_mark,
          R"(Leaves out one of two equal marks where a text begins or ends with the one
          that the tokenizer adds. Off: a warning names the document.)"),
      KEY(data.packing, one_of({"split", "best_fit"}), R"(`split`: documents are concatenated and split at
          `data.pack_length`. `best_fit`: a pack holds whole documents, and only one that is longer than a pack
          is split.)"),
      KEY(data.pack_length, "tokens", at_least(1, kManyTokens), R"(Length of a pack, with
          `data.packing = "best_fit"` the most tokens of one; attention and positions never cross from one document into
          the next.)"),
      KEY(data.shuffle_packs, R"(Takes an epoch's packs in shuffled order, so that a step mixes many
          documents. Off: packs are taken in their order, so a step may contain several fragments of a long
          document.)"),

      KEY(batch.packs_per_step, "packs", at_least(1, kManyTokens),
          "The global batch: packs of one step, over all ranks and micro-batches."),
      KEY(batch.packs_per_micro_batch, "packs", at_least(1, kManyTokens), R"(Packs that one forward and
          backward sees on one rank. A speed and memory option: the gradient does not depend on it.)"),

      NAMED_KEY(
          "model.family", model.shape.family,
          one_of({"llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "dots1"}),
          R"(Family of the `config.json` that is written. `mixtral`, `qwen2_moe`, `qwen3_moe` and `dots1` have
          experts (`docs/experts.md`).)"),
      NAMED_KEY("model.vocabulary", model.shape.vocabulary, "tokens", at_least(1, kManyRows),
                "Rows of the embedding; at least what the tokenizer and the corpus use."),
      NAMED_KEY("model.hidden", model.shape.hidden, at_least(1, kWide),
                "Width of the residual stream; for Llama a multiple of `model.heads`."),
      NAMED_KEY("model.layers", model.shape.layers, at_least(1, 4096), "Transformer blocks."),
      NAMED_KEY("model.heads", model.shape.heads, at_least(1, kWide), "Query heads of a block."),
      NAMED_KEY("model.key_value_heads", model.shape.key_value_heads, at_least(1, kWide),
                "Key and value heads of a block; divides `model.heads` (grouped-query attention)."),
      NAMED_KEY("model.head_dim", model.shape.head_dim, at_least(2, kWide), "Width of a head; even."),
      NAMED_KEY("model.feed_forward", model.shape.feed_forward, at_least(1, kWide), "Width inside SwiGLU."),
      NAMED_KEY("model.experts", model.shape.experts.count, at_least(0, 32767),
                "Experts of a layer that has them. 0: none, for the families without."),
      NAMED_KEY("model.experts_per_token", model.shape.experts.per_token, at_least(1, 32767),
                "Number of experts that compute a token: those that the router finds likeliest."),
      NAMED_KEY("model.expert_feed_forward", model.shape.experts.feed_forward, at_least(0, kWide),
                "Width inside the SwiGLU of an expert; for `mixtral` the same as `model.feed_forward`."),
      NAMED_KEY("model.normalise_experts", model.shape.experts.normalise, R"(Whether the weights of a token's
          experts add up to 1; otherwise they are their probabilities among all experts. Always with
          `mixtral`.)"),
      NAMED_KEY(
          "model.shared_expert_feed_forward", model.shape.experts.shared_feed_forward, at_least(0, kWide),
          R"(Width of the shared expert, which computes every token: `qwen2_moe` and `dots1`; for `dots1` a
          multiple of `model.expert_feed_forward`.)"),
      NAMED_KEY("model.expert_groups", model.shape.experts.groups, at_least(1, 32767),
                "For `dots1`: number of groups of neighbouring experts."),
      NAMED_KEY(
          "model.expert_groups_per_token", model.shape.experts.groups_per_token, at_least(1, 32767),
          R"(For `dots1`: number of groups that a token's experts come from: those whose two best scores have
          the largest sums.)"),
      NAMED_KEY("model.expert_scale", model.shape.experts.scale, above(0),
                "For `dots1`: factor of the weights of a token's experts."),
      KEY(model.experts_every, "layers", at_least(1, 100000), R"(Every n-th layer has experts; the others have
          a dense feed-forward network of `model.feed_forward`. 1 with `mixtral` and `dots1`.)"),
      KEY(model.dense_layers, "layers", at_least(0, 100000), R"(Number of leading layers with a dense
          feed-forward network of `model.feed_forward`. 0 with `mixtral`.)"),
      NAMED_KEY("model.max_positions", model.shape.max_positions, "tokens", at_least(1, kManyTokens),
                R"(Positions that the model supports; at least `data.pack_length`, except with
          `model.rope_scaling.kind = "dynamic"`, which is for longer packs.)"),
      NAMED_KEY("model.rope_theta", model.shape.rope_theta, above(0), "Base of the rotary embedding."),
      NAMED_KEY("model.norm_epsilon", model.shape.norm_epsilon, above(0),
                "Epsilon inside the root of RMSNorm."),
      NAMED_KEY("model.tied_output", model.shape.tied_output,
                "Whether the output layer is the embedding itself."),
      NAMED_KEY("model.attention_bias", model.shape.attention_bias,
                "Bias of the query, key and value projections: `true` for Qwen2, `false` for Mistral."),
      NAMED_KEY("model.output_bias", model.shape.output_bias, R"(Bias of attention's output projection: as
          `attention_bias` for Llama and Qwen3, `false` for the others.)"),
      NAMED_KEY("model.mlp_bias", model.shape.mlp_bias, "Bias of SwiGLU's projections: Llama only."),
      NAMED_KEY("model.query_key_norm", model.shape.query_key_norm,
                "RMSNorm of queries and keys, by head: `true` for Qwen3, `false` for the others."),
      NAMED_KEY("model.initializer_range", model.shape.initializer_range, at_least(0),
                "Standard deviation of fresh weights."),
      NAMED_KEY("model.bos", model.shape.bos, "token", at_least(-1, kManyRows),
                "Begins a document. `-1`: the tokenizer's, where it has one."),
      NAMED_KEY("model.eos", model.shape.eos, "token", at_least(-1, kManyRows),
                "Ends a document. `-1`: the tokenizer's, where it has one."),
      NAMED_KEY("model.pad", model.shape.pad, "token", at_least(-1, kManyRows), R"(Its row of the embedding
          gets no gradient as an input (tied, it still gets the output layer's), as `pad_token_id` in
          transformers. `-1`: no such token.)"),

      KEY(model.lora.rank, at_least(0, 512), R"(Rank of a low-rank adapter: it alone is trained, and the
          model of `model.load` stays as it is. A checkpoint is then a directory of PEFT's. 0: no adapter, all
          parameters are trained.)"),
      KEY(model.lora.alpha, above(0), "The adapter's update is scaled by alpha / rank."),
      KEY(model.lora.targets, R"(Matrices that the adapter updates: `attention` (q, k, v and o), `mlp` (gate,
          up and down, with experts those of each and of the shared one), `unembed` (the output), or PEFT's
          names of single ones, such as `q_proj`.)"),
      KEY(model.lora.dropout, fraction(), R"(Fraction of the features of an adapter's input that are dropped
          in training, by (seed, step, sample, layer, position, feature), so that all layouts drop the same. 0
          with `mlp` of layers with experts.)"),
      KEY(model.lora.b_range, at_least(0), R"(Standard deviation of fresh values of b. 0, as in PEFT: the
          adapter begins as no update, and only b has a gradient in the first step. Above 0, a proof of that
          step (`isograd verify`) says as much of a.)"),

      NAMED_KEY(
          "model.rope_scaling.kind", model.shape.rope_scaling.kind,
          one_of({"default", "linear", "dynamic", "llama3", "yarn"}),
          R"(Variant of the rotary embedding for long contexts. `default`: no scaling, and the keys below are
          refused.)"),
      NAMED_KEY("model.rope_scaling.factor", model.shape.rope_scaling.factor, at_least(1),
                "How many times longer the context becomes."),
      NAMED_KEY("model.rope_scaling.low_frequency_factor", model.shape.rope_scaling.low_frequency_factor,
                above(0), R"(For `llama3`.)"),
      NAMED_KEY("model.rope_scaling.high_frequency_factor", model.shape.rope_scaling.high_frequency_factor,
                above(0), R"(For `llama3`; above the low one.)"),
      NAMED_KEY("model.rope_scaling.original_max_positions", model.shape.rope_scaling.original_max_positions,
                "tokens", at_least(0, kManyTokens), R"(Positions before scaling (`llama3`, `yarn`).)"),
      NAMED_KEY("model.rope_scaling.beta_fast", model.shape.rope_scaling.beta_fast, above(0), "For `yarn`."),
      NAMED_KEY("model.rope_scaling.beta_slow", model.shape.rope_scaling.beta_slow, above(0), "For `yarn`."),
      NAMED_KEY("model.rope_scaling.truncate", model.shape.rope_scaling.truncate,
                "For `yarn`: whether the ramp begins and ends at whole dims."),
      NAMED_KEY("model.rope_scaling.attention_factor", model.shape.rope_scaling.attention_factor, at_least(0),
                "For `yarn`. 0: follows from the factor."),

      KEY(loss.balance, at_least(0), R"(Weight of the load balance loss of routers, which is added to the
          cross entropy (`docs/experts.md`); 0: none.)"),
      KEY(loss.balance_over, one_of({"layers", "model"}), R"(The mean of the layers' own balance losses, or
          one loss over the tokens of all layers together, as transformers computes it.)"),
      KEY(loss.balance_scope, one_of({"step", "micro_batch"}), R"(Tokens over which the load is balanced:
          `step`, the whole step, whose routing a pass of its own computes before the first forward;
          `micro_batch`, the ranks' micro-batches at a time, a loss that depends on how the step is split and
          that cannot be proven (`verify.at_end = false`).)"),
      KEY(loss.router_z, at_least(0), R"(Weight of the router z-loss, the mean over tokens and layers of the
          squared logarithm of Σ exp(logit); 0: none.)"),
      KEY(loss.label_smoothing, fraction(), R"(Part of each target that is spread evenly over the whole
          vocabulary, as `label_smoothing` of `torch.nn.functional.cross_entropy`. Validation losses are
          without it. 0: none.)"),
      KEY(loss.z_loss, at_least(0), R"(Coefficient of the squared logarithm of Σ exp(logit), which is added to
          each token's cross entropy (PaLM, Chowdhery et al. 2022, section 5). Validation losses are without
          it. 0: none.)"),
      KEY(loss.selection_bias_rate, at_least(0, 1), R"(For `dots1`: step by which the selection bias of an
          expert rises if it got less than the mean, and falls if it got more; 0: not at all.)"),

      KEY(sample.prompt, "Beginning of the text that is generated at the end. Empty: a new document."),
      KEY(sample.tokens, "tokens", at_least(0, kManyTokens), "Number of tokens to generate. 0: none."),
      KEY(sample.temperature, at_least(0),
          "Divides the logits before drawing. 0: always the likeliest token."),
  };
}

}  // namespace
}  // namespace key_table

namespace {

constexpr const char* kAdapterConfig = "adapter_config.json";

// ---- the corpus ----

// Folder include/ next to the lib/ folder of the shared object that contains c10.
fs::path libtorch_headers() {
  Dl_info info{};
  fs::path library;
  if (dladdr(reinterpret_cast<const void*>(&c10::GetCPUAllocator), &info) != 0 && info.dli_fname)
    library = fs::weakly_canonical(info.dli_fname);
  const fs::path headers = library.parent_path().parent_path() / "include";
  if (!fs::exists(headers / "c10"))
    refuse("data.text (empty: the default corpus)", "no LibTorch headers next to  " + library.string(),
           headers.string(), "Name text of your own in data.text");
  return headers;
}

// These headers are written by hand. ATen/*.h itself is mostly one declaration repeated thousands of times.
std::vector<std::string> default_corpus() {
  const fs::path headers = libtorch_headers();
  return {(headers / "ATen/core/*.h").string(), (headers / "c10").string(),
          (headers / "torch/csrc/api/include/torch").string()};
}

std::vector<std::string> sources_of(const RunConfig& config) {
  return !config.data.shards.empty() ? config.data.shards
         : config.data.text.empty()  ? default_corpus()
                                     : config.data.text;
}

// The tokenizer that ready-made shards name; null where it is not one of ours.
std::unique_ptr<Tokenizer> tokenizer_of_shards(const RunConfig& config, const std::string& name) {
  if (name == "bytes") return byte_tokenizer();
  const bool named = config.data.tokenizer != "bytes";
  // A Hugging Face tokenizer needs Python: shards of one train without it, though nothing is decoded then.
  if (!name.starts_with("sentencepiece:") && !(named && name.starts_with("tokenizer.json:"))) return nullptr;
  std::unique_ptr<Tokenizer> tokenizer;
  if (named) tokenizer = open_tokenizer(config.data.tokenizer);
  if (!tokenizer || tokenizer->name() != name)
    refuse("data.tokenizer", config.data.tokenizer + (tokenizer ? " (" + tokenizer->name() + ")" : ""),
           name + ", which these shards were packed with", "Name that tokenizer's file in data.tokenizer");
  return tokenizer;
}

// One folder per corpus and tokenizer, so that two configurations do not pack over each other.
fs::path cache_folder(const RunConfig& config, const std::vector<std::string>& patterns,
                      const Tokenizer& tokenizer) {
  std::string key = tokenizer.name();
  if (config.data.on_bad_line != "stop") key += "\non_bad_line";
  if (config.data.train_on != "assistant") key += "\ntrain_on";
  if (config.data.drop_doubled_mark) key += "\ndrop_doubled_mark";
  for (const auto& pattern : patterns) key += '\n' + pattern;
  return fs::path(config.data.cache) / checksum(key.data(), key.size());
}

std::optional<std::uint32_t> end_of_text(const RunConfig& config) {
  if (config.data.end_of_text < 0) return std::nullopt;
  return static_cast<std::uint32_t>(config.data.end_of_text);
}

// Each path ends in a zero, which no path contains.
std::vector<fs::path> split_paths(const std::string& text) {
  std::vector<fs::path> paths;
  for (std::size_t begin = 0; begin < text.size(); begin += paths.back().native().size() + 1)
    paths.emplace_back(text.c_str() + begin);
  return paths;
}

}  // namespace

SavedDecoder read_decoder(const fs::path& directory, const TrainingState* state) {
  const at::ScalarType dtype = state ? scalar_type(state->dtype) : at::kFloat;
  if (!fs::exists(directory / kAdapterConfig))
    return {.model = read_hf(directory, dtype), .adapter = nullptr, .base = {}};
  if (!state)
    refuse(directory.string(), "an adapter without state.json, which says where its base is",
           "a checkpoint of a run, or a whole model", "Name the checkpoint");
  const RunConfig run = parse_config(state->config, (directory / "state.json").string());
  // A relative model.load is of the folder that the run was started in, which the adapter's own file names.
  SavedDecoder saved{.model = nullptr, .adapter = nullptr, .base = run.model.load};
  if (!saved.base.empty() && fs::path(saved.base).is_relative())
    saved.base = read_peft_config(directory).base;
  saved.model = saved.base.empty() ? std::make_shared<DecoderLM>(read_hf_config(directory), dtype,
                                                                 static_cast<std::uint64_t>(run.run.seed))
                                   : read_hf(saved.base, dtype);
  saved.adapter = read_peft(directory, saved.model->config(), dtype);
  return saved;
}

Corpus open_corpus(const RunConfig& config, Group& group) {
  Corpus corpus;
  const bool packed = !config.data.shards.empty();
  corpus.sources = sources_of(config);
  std::string files;
  on_rank_zero(group, [&] {
    std::vector<fs::path> shards;
    if (packed) {
      for (const auto& file : resolve(corpus.sources)) shards.push_back(file.path);
    } else {
      const auto tokenizer = open_tokenizer(config.data.tokenizer);
      shards =
          pack_corpus({.patterns = corpus.sources,
                       .on_bad_line = config.data.on_bad_line == "skip" ? CorpusOptions::OnBadLine::kSkip
                                                                        : CorpusOptions::OnBadLine::kStop,
                       .train_on_all = config.data.train_on == "all",
                       .drop_doubled_mark = config.data.drop_doubled_mark,
                       .stop = StopSignals::requested},
                      *tokenizer, cache_folder(config, corpus.sources, *tokenizer));
    }
    for (const auto& shard : shards) files += shard.string() + '\0';
  });
  corpus.tokens = TokenStore::open(split_paths(broadcast_text(group, files)), end_of_text(config));
  corpus.tokenizer = packed ? tokenizer_of_shards(config, corpus.tokens->tokenizer_name())
                            : open_tokenizer(config.data.tokenizer);
  corpus.split = split_documents(*corpus.tokens, config.data.validation_fraction,
                                 static_cast<std::uint64_t>(config.run.seed));
  if (corpus.tokens->weights() == TokenStore::Weights::kNumbers && config.loss.kind == "token_mean")
    refuse("loss.kind", "\"token_mean\", and data with weights other than 0 and 1",
           "a mean that divides by the sum of the weights",
           "Set loss.kind = \"weighted_mean\", or remove the weights from the data");
  return corpus;
}

std::shared_ptr<TokenStore> packed_corpus(const RunConfig& config) {
  std::vector<fs::path> shards;
  if (!config.data.shards.empty()) {
    for (const auto& file : resolve(config.data.shards)) shards.push_back(file.path);
  } else {
    shards = packed_shards(cache_folder(config, sources_of(config), *open_tokenizer(config.data.tokenizer)));
  }
  return shards.empty() ? nullptr : TokenStore::open(shards, end_of_text(config));
}

double unigram_entropy(const Corpus& corpus, Group& group, std::int64_t limit) {
  const auto& documents = corpus.split.train;
  std::int64_t total = 0;
  for (auto document : documents) total += corpus.tokens->document_length(document);
  const std::int64_t every = total / std::max<std::int64_t>(limit, 1) + 1;
  at::Tensor counts = at::zeros({static_cast<std::int64_t>(corpus.tokens->max_token()) + 1}, at::kLong);
  auto* count = counts.data_ptr<std::int64_t>();
  std::vector<std::int64_t> piece;
  for (std::size_t i = 0; i < documents.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    if (index % every != 0 || index / every % group.size() != group.rank()) continue;
    const std::int64_t length = corpus.tokens->document_length(documents[i]);
    // The loop starts at 1: the first token of a document is no target.
    for (std::int64_t begin = 1; begin < length; begin += static_cast<std::int64_t>(piece.size())) {
      piece.resize(static_cast<std::size_t>(std::min<std::int64_t>(1 << 16, length - begin)));
      corpus.tokens->read(documents[i], begin, piece);
      for (auto token : piece) ++count[token];
    }
  }
  group.all_reduce(counts);
  const std::int64_t targets = counts.sum().item<std::int64_t>();
  double entropy = 0;
  for (std::int64_t token = 0; token < counts.numel(); ++token) {
    if (count[token] == 0) continue;
    const double p = static_cast<double>(count[token]) / static_cast<double>(targets);
    entropy -= p * std::log(p);
  }
  return entropy;
}

// ---- the loss ----

ModelUnits model_units(DecoderLM& model, const RunConfig& config) {
  ModelUnits units = units_by_block(model);
  units.initialize = [&model, seed = static_cast<std::uint64_t>(config.run.seed)](const std::string& name,
                                                                                  at::Tensor& values) {
    model.initialize(name, values, seed);
  };
  units.blocks_of_pass = [&model, blocks = units.blocks] {
    if (!model.hooks().pipeline.stages) return blocks;
    std::vector<UnitHandle> own;
    for (const StageHooks::Stage& stage : model.hooks().pipeline.stages())
      own.insert(own.end(), blocks.begin() + stage.begin, blocks.begin() + stage.begin + stage.count);
    return own;
  };
  model.set_around_block([blocks = units.blocks](std::int64_t layer, const at::Tensor& stream,
                                                 const DecoderLM::BlockForward& block) {
    return blocks[static_cast<std::size_t>(layer)].run(
        {stream}, [block](const std::vector<at::Tensor>& in) { return block(in[0]); });
  });
  return units;
}

bool fuses_loss(const RunConfig& config, std::int64_t tokens, std::int64_t vocabulary,
                std::size_t element_bytes) {
  // Unfused, the loss takes twice the memory of the logits; making them is 7 to 25 % faster
  // (docs/losses_reference.md), so they are made until that memory is some hundred MiB.
  constexpr std::size_t kLargeLogits = std::size_t{256} << 20;
  if (config.loss.fused != "auto") return config.loss.fused == "on";
  return static_cast<std::size_t>(tokens) * static_cast<std::size_t>(vocabulary) * element_bytes >
         kLargeLogits;
}

ForwardLossTerms forward_loss(DecoderLM& model, const RunConfig& config,
                              std::shared_ptr<RouterLosses> routers) {
  return [&model, config, routers = std::move(routers)](const Batch& batch) -> LossTerms {
    const DecoderOutputs outputs = model.outputs(batch);
    LossTerms terms;
    // Every rank along ep makes the backward of every round, with targets or without.
    const auto connected = [&](const at::Tensor& sum) {
      const bool apart = config.parallel.ep > 1 && at::GradMode::is_enabled() && !sum.requires_grad();
      return apart ? sum + outputs.hidden.narrow(0, 0, 0).sum() : sum;
    };
    // An evaluation is of the cross entropy alone.
    if (routers && (at::GradMode::is_enabled() || routers->collecting())) routers->add_terms(outputs, terms);
    if (routers && routers->collecting())
      return {{"cross_entropy", at::zeros({}, at::TensorOptions(at::kDouble))}};
    if (outputs.passed_on.defined()) {  // of a stage before the last
      terms.insert(terms.begin(), {"cross_entropy", outputs.passed_on});
      return terms;
    }
    at::Tensor weight = model.output_weight(), hidden = outputs.hidden;
    // The whole vocabulary decides, so that ranks with unequal parts of it choose alike.
    const bool fused =
        fuses_loss(config, batch.num_tokens(), model.config().vocabulary, weight.element_size());
    // An evaluation is of the plain cross entropy.
    const bool training = at::GradMode::is_enabled();
    const double smoothing = training ? config.loss.label_smoothing : 0,
                 z = training ? config.loss.z_loss : 0;
    const LowRank* update = model.adapter() ? model.adapter()->find(0, Projection::kHead) : nullptr;
    if (fused && update) {  // further columns of one product: [x, scale x aᵀ] [W, b]ᵀ
      const at::Tensor& in = outputs.dropped.defined() ? outputs.dropped : hidden;
      hidden = at::cat({hidden, linear(in, Linear{.weight = update->a, .bias = {}}) * update->scale}, 1);
      weight = at::cat({weight, update->b}, 1);
    }
    terms.insert(
        terms.begin(),
        {"cross_entropy",
         connected(fused ? linear_cross_entropy_sum(hidden, weight, batch.targets,
                                                    {.weights = batch.weights,
                                                     .label_smoothing = smoothing,
                                                     .z_loss = z,
                                                     .shard = model.vocabulary()})
                         : cross_entropy_sum(model.logits_of(outputs.hidden, outputs.dropped), batch.targets,
                                             {.weights = batch.weights,
                                              .label_smoothing = smoothing,
                                              .z_loss = z,
                                              .shard = model.vocabulary()}))});
    return terms;
  };
}

namespace {

// ---- adapters ----

// The adapter of model.lora; nothing without one.
std::optional<LoraConfig> adapter_of(const RunConfig& config) {
  const auto& lora = config.model.lora;
  if (lora.rank == 0) return std::nullopt;
  LoraConfig result{.rank = lora.rank,
                    .alpha = lora.alpha,
                    .attention = false,
                    .mlp = false,
                    .unembed = false,
                    .dropout = lora.dropout};
  const std::map<std::string, std::vector<std::string>> groups = {
      {"attention", {"q_proj", "k_proj", "v_proj", "o_proj"}},
      {"mlp", {"gate_proj", "up_proj", "down_proj"}},
      {"unembed", {"lm_head"}}};
  for (const std::string& target : lora.targets) {
    const auto group = groups.find(target);
    const std::vector<std::string> names = group == groups.end() ? std::vector{target} : group->second;
    for (const std::string& name : names)
      if (std::ranges::find(result.modules, name) == result.modules.end()) result.modules.push_back(name);
  }
  return result;
}

// The tensors of an adapter among all of a model.
TensorStream adapter_values(const TensorStream& all) {
  TensorStream part;
  std::vector<bool> taken;
  for (const TensorStream::Entry& entry : all.entries) {
    taken.push_back(!adapted_matrix(entry.name).empty());
    if (taken.back()) part.entries.push_back(entry);
  }
  part.each = [each = all.each, taken](const TensorStream::Take& take) {
    std::size_t next = 0;
    each([&](const at::Tensor& tensor) {
      if (taken.at(next++)) take(tensor);
    });
  };
  return part;
}

// Values of an adapter in a checkpoint of this run.
FillValues saved_adapter(const fs::path& directory, const LoraConfig& own, const DecoderConfig& shape,
                         at::ScalarType dtype) {
  const auto adapter = read_peft(directory, shape, dtype);
  const LoraConfig& saved = adapter->config();
  const auto same = [&](Projection projection) { return saved.adapts(projection) == own.adapts(projection); };
  bool fits = saved.rank == own.rank && saved.alpha == own.alpha;
  for (int i = 0; i <= static_cast<int>(Projection::kHead); ++i) fits &= same(static_cast<Projection>(i));
  if (!fits)
    refuse((directory / kAdapterConfig).string(),
           fmt::format("an adapter of rank {}, alpha {:g}", saved.rank, saved.alpha),
           fmt::format("model.lora of this run: rank {}, alpha {:g} and its targets", own.rank, own.alpha),
           "Go on with the adapter's own model.lora");
  return [adapter](const std::string& name, at::Tensor& values) {
    const auto& all = adapter->named();
    values.copy_(std::ranges::find(all, name, &NamedTensors::value_type::first)->second);
  };
}

// ---- the model and the task ----

class TextModel : public TaskModel {
 public:
  TextModel(std::shared_ptr<DecoderLM> model, const RunConfig& config,
            std::shared_ptr<const Tokenizer> tokenizer)
      : model_(std::move(model)), config_(config), tokenizer_(std::move(tokenizer)) {
    if (model_->config().experts.count > 0)
      routers_ = std::make_shared<RouterLosses>(config_, model_->config());
    const auto lora = adapter_of(config_);
    if (!lora) return;
    for (const auto& [name, tensor] : model_->named()) tensor.requires_grad_(false);
    adapter_ = LoraAdapter::without_values(model_->config(), *lora, model_->output_weight().scalar_type());
    model_->include(adapter_->named());
    model_->set_adapter(adapter_.get());
    for (int i = 0; i <= static_cast<int>(Projection::kHead); ++i)
      if (const LowRank* update = adapter_->find(0, static_cast<Projection>(i)))
        dropouts_[static_cast<Projection>(i)] = {.fraction = lora->dropout,
                                                 .seed = static_cast<std::uint64_t>(config_.run.seed),
                                                 .width = update->a.size(1)};
    drop_inputs_by([](const std::string&) { return 0; });
  }

  DecoderLM& decoder() { return *model_; }
  NamedTensors named() override { return model_->named(); }
  void initialize(const std::string& name, at::Tensor& values) const override {
    const auto seed = static_cast<std::uint64_t>(config_.run.seed);
    if (adapted_matrix(name).empty()) return model_->initialize(name, values, seed);
    initialize_lora(name, values, seed);
    if (name.ends_with("lora_B.weight") && config_.model.lora.b_range > 0)
      fill_normal(values, config_.model.lora.b_range, seed, name);
  }
  ModelUnits make_units() override {
    ModelUnits units = model_units(*model_, config_);
    units.initialize = [this](const std::string& name, at::Tensor& values) { initialize(name, values); };
    return units;
  }
  ForwardLossTerms loss() override { return forward_loss(*model_, config_, routers_); }
  std::vector<PlainTerm> plain_terms() override { return plain_router_terms(config_, *model_); }
  LookAhead look_ahead(const ForwardLossTerms& forward) override {
    if (!routers_ || !routers_->looks_ahead()) return {};
    return [routers = routers_, forward](const MicroBatches& micro_batches, const Group& data) {
      routers->look_ahead(micro_batches, data, forward);
    };
  }
  ShardedExperts sharded_experts() const override {
    const DecoderConfig& shape = model_->config();
    ShardedExperts sharded{.experts = shape.experts.count, .hidden = shape.hidden};
    const auto& of = model_->hooks().pipeline.stages;
    for (const auto& stage : of ? of() : std::vector<StageHooks::Stage>{{.count = shape.layers}})
      for (std::int64_t layer = stage.begin; layer < stage.begin + stage.count; ++layer)
        sharded.layers += shape.has_experts(layer);
    return sharded;
  }
  Counters counters() override {
    if (!routers_) return {};
    routers_->count_choices();
    return [routers = routers_] { return routers->take_choices(); };
  }
  // Balances experts without a loss (Wang et al. 2024, arXiv 2408.15664, algorithm 1): a bias, which only the
  // choice of experts sees, rises if its expert got less than its layer's mean. The same bits on every rank.
  void after_update(const std::vector<double>& choices, DataParallel& layout) override {
    const double rate = config_.loss.selection_bias_rate;
    if (!model_->config().experts.sigmoid || rate == 0 || adapter_) return;
    if (biases_.empty()) {
      const auto whole = layout.whole_parameters();
      for (const auto& [name, tensor] : named())
        if (name.ends_with(kSelectionBias)) biases_.emplace_back(name, tensor.detach().cpu().clone());
    }
    const auto layers = static_cast<std::int64_t>(biases_.size());
    ISOGRAD_INVARIANT(layers > 0 && choices.size() % biases_.size() == 0, "counts of other layers");
    const auto counts = at::tensor(choices, at::kDouble).view({layers, -1});
    NamedTensors own;
    for (std::int64_t i = 0; i < layers; ++i) {
      auto& [name, bias] = biases_[static_cast<std::size_t>(i)];
      if (bias.numel() == 0) continue;  // in another pipeline stage
      const at::Tensor of_layer = counts[i];
      bias += at::sign(of_layer.mean() - of_layer) * rate;
      own.emplace_back(name, bias);
    }
    layout.write(own);
  }
  std::vector<ExpertLoad> expert_loads(const std::vector<double>& counters) const override {
    return routers_ ? routers_->loads_of(counters) : std::vector<ExpertLoad>();
  }
  std::string take_not_finite() override { return routers_ ? routers_->take_not_finite() : std::string(); }
  bool choose_experts(const DecoderLM::ChooseExperts& choose) override {
    if (!routers_) return false;
    model_->set_choice_of_experts(choose);
    return true;
  }
  void to(at::Device device) override {
    if (model_->output_weight().is_meta()) return;
    model_->to(device);
    if (adapter_)
      for (auto [name, tensor] : adapter_->named()) tensor.set_data(tensor.to(device));
  }
  at::Tensor outputs(const Batch& batch) override { return model_->logits(batch); }
  void attend_over(const Mesh& mesh) override {
    if (routers_ && !over_stages()) routers_->sum_over(mesh.counting());
    isograd::attend_over(*model_, mesh);
  }
  Layout::Named placements(const Grid& grid) override { return decoder_placements(*model_, config_, grid); }
  Layout cut(const Mesh& mesh) override {
    ComposedDecoder made = compose_decoder(*model_, config_, mesh);
    pipeline_ = made.pipeline;
    if (over_stages()) {
      AxisSet axes = data_axes(mesh.grid());
      axes.insert(kStageAxis);
      routers_->sum_over_stages(mesh.along(axes, "routers"));
    }
    drop_inputs_by([&](const std::string& name) { return first_column(made.layout, name); });
    return std::move(made.layout);
  }
  const Pipeline* pipeline() const override { return pipeline_.get(); }
  void write(const fs::path& directory, const TensorStream& weights) override {
    if (adapter_) {
      const std::string& base = config_.model.load;
      write_peft(directory, adapter_->config(), model_->config(), adapter_values(weights),
                 base.empty() ? "" : fs::absolute(base).string());
      write_file(directory / "config.json",
                 hf_config_text(model_->config(), scalar_type(config_.train.dtype)));
    } else {
      write_hf(directory, model_->config(), weights);
    }
    if (tokenizer_) tokenizer_->write(directory);
  }

 private:
  // Not for one micro-batch: its stages compute it one after another.
  bool over_stages() const { return routers_ && pipeline_ && routers_->looks_ahead(); }

  // `first`: of this rank's columns of a parameter.
  void drop_inputs_by(const std::function<std::int64_t(const std::string& name)>& first) {
    if (!adapter_ || config_.model.lora.dropout == 0) return;
    for (const auto& [name, tensor] : adapter_->named())
      for (int i = 0; i <= static_cast<int>(Projection::kHead); ++i) {
        const auto projection = static_cast<Projection>(i);
        if (const LowRank* update = adapter_->find(0, projection); update && update->a.is_same(tensor))
          dropouts_[projection].first = first(name);
      }
    model_->set_dropout_of_adapter(
        [by = dropouts_](const Batch& batch, std::int64_t layer, Projection projection, const at::Tensor& x) {
          return drop_inputs(x, batch, layer, projection, by.at(projection));
        });
  }
  static std::int64_t first_column(const Layout& layout, const std::string& name) {
    std::int64_t first = 0;
    for (const Cut& cut : layout.parameter(name).placement.cuts)
      for (int place = 0; cut.dim == 1 && place < layout.mesh().place({cut.axis}); ++place)
        first += cut.rows[0][static_cast<std::size_t>(place)];
    return first;
  }

  std::shared_ptr<DecoderLM> model_;
  std::shared_ptr<LoraAdapter> adapter_{};        // null: all parameters are trained
  std::map<Projection, LoraDropout> dropouts_{};  // of all layers
  RunConfig config_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::shared_ptr<RouterLosses> routers_{};  // null: a model without experts
  std::shared_ptr<Pipeline> pipeline_{};     // null: one stage
  NamedTensors biases_{};                    // [E] each, whole; once something has been trained
};

ShapeKeys shape_keys(const DecoderConfig& shape) {
  RunConfig config;
  config.model.shape = shape;
  auto& experts = config.model.shape.experts;
  if (experts.count == 0) experts.per_token = 0, experts.normalise = true;
  ShapeKeys keys =
      values_of(config,
                "model.family model.vocabulary model.hidden model.layers model.heads model.key_value_heads "
                "model.head_dim model.feed_forward model.experts model.experts_per_token "
                "model.expert_feed_forward model.normalise_experts model.expert_groups "
                "model.expert_groups_per_token model.expert_scale model.shared_expert_feed_forward "
                "model.max_positions model.rope_theta model.rope_scaling.kind model.rope_scaling.factor "
                "model.attention_bias model.output_bias model.mlp_bias model.query_key_norm "
                "model.norm_epsilon model.tied_output model.pad");
  keys.emplace_back("model.experts_every (layers without experts)",
                    fmt::format("{}", fmt::join(experts.dense_layers, " ")));
  return keys;
}

// A model without bos and eos gets those of the tokenizer that it is trained with.
DecoderConfig with_marks(DecoderConfig shape, const Tokenizer* tokenizer) {
  if (tokenizer && shape.bos < 0) shape.bos = tokenizer->bos();
  if (tokenizer && shape.eos < 0) shape.eos = tokenizer->eos();
  return shape;
}

// With the corpus's bos and eos. ConfigError: tokens without a row, packs longer than the positions.
DecoderConfig model_shape(const RunConfig& config, const Corpus& corpus) {
  const bool loaded = !config.model.load.empty();
  const DecoderConfig shape = with_marks(configured_shape(config), corpus.tokenizer.get());
  const std::int64_t needed =
      std::max<std::int64_t>(static_cast<std::int64_t>(corpus.tokens->max_token()) + 1,
                             corpus.tokenizer ? corpus.tokenizer->vocabulary() : 0);
  const std::string where = loaded ? config.model.load + " (model.load)" : "model.vocabulary";
  if (needed > shape.vocabulary)
    refuse(where, fmt::format("a vocabulary of {}", shape.vocabulary),
           fmt::format("at least {}, the tokens that the corpus and its tokenizer use", needed),
           loaded ? "Use the tokenizer that these weights were trained with (data.tokenizer)"
                  : fmt::format("Set model.vocabulary = {}", needed));
  // Dynamic scaling exists for documents beyond max_positions; a window may not slide.
  const bool beyond = shape.rope_scaling.kind == "dynamic";
  if (config.data.pack_length > shape.max_positions && !beyond)
    refuse("data.pack_length", std::to_string(config.data.pack_length),
           fmt::format("at most {}, the model's positions", shape.max_positions),
           fmt::format("Set data.pack_length = {}{}", shape.max_positions,
                       loaded ? "; the model of model.load has no more positions"
                              : fmt::format(", or model.max_positions = {}", config.data.pack_length)));
  if (shape.sliding_window > 0 && config.data.pack_length > shape.sliding_window)
    refuse("data.pack_length", std::to_string(config.data.pack_length),
           fmt::format("at most {}, the sliding window of {}: attention within a window is not supported",
                       shape.sliding_window, config.model.load),
           "Shorten the packs");
  check(shape);
  return shape;
}

class TextTask : public Task {
 public:
  TextTask(const RunConfig& config, Corpus corpus)
      : Task(config), corpus_(std::move(corpus)), shape_(model_shape(config, corpus_)) {
    const auto lora = adapter_of(config);
    if (!lora) return;
    const auto adapter = LoraAdapter::without_values(shape_, *lora, at::kFloat);
    for (const auto& [name, tensor] : adapter->named())  // with those of the experts that compute a token
      adapter_elements_ += static_cast<double>(is_stacked(name) ? tensor[0].numel() * shape_.experts.per_token
                                                                : tensor.numel());
  }

  std::unique_ptr<Task> under(const RunConfig& config) const override {
    return std::make_unique<TextTask>(config, corpus_);
  }

  CutOptions cut_options() const override { return {.token_cost = 6 * shape_.hidden}; }

  std::pair<std::int64_t, std::int64_t> heads() const override {
    return {shape_.heads, shape_.key_value_heads};
  }

  TaskFacts facts() const override {
    const RunConfig& c = config();
    return {.perplexity = plain_loss_is_trained() && c.loss.kind == "token_mean" && !normalises_by_replica(c),
            .batch = fmt::format("{} packs of {} tokens", c.batch.packs_per_step, c.data.pack_length),
            .micro_batch = fmt::format("{} packs", c.batch.packs_per_micro_batch),
            .train_documents = static_cast<std::int64_t>(corpus_.split.train.size()),
            .validation_documents = static_cast<std::int64_t>(corpus_.split.validation.size()),
            .num_tokens = corpus_.tokens->num_tokens(),
            .tokenizer = corpus_.tokens->tokenizer_name(),
            .order = {{"data.packing", c.data.packing}, {"data.train_on", c.data.train_on}}};
  }

  double step_flops(const BatchLoader& loader, LoaderPosition position) const override {
    double tokens = 0, pairs = 0;
    for (const PackContents& pack : static_cast<const TextLoader&>(loader).packs(position))
      for (const auto& part : pack.parts) {
        const auto length = static_cast<double>(part.end - part.begin);
        tokens += length;
        pairs += length * (length + 1) / 2;  // a token attends to those before it and to itself
      }
    const double all = decoder_flops(shape_, tokens, pairs);
    if (adapter_elements_ == 0) return all;
    // The base's weights have no gradient, a third of their products; the adapter's have all three.
    return all - decoder_flops(shape_, tokens, 0) / 3 + 6 * adapter_elements_ * tokens;
  }

  Baseline baseline(Group& group) const override {
    // Comparable with the plain cross entropy alone, which is then never measured.
    if (!plain_loss_is_trained() && corpus_.split.validation.empty()) return {};
    return {.name = "unigram entropy",
            .of = "of the training text",
            .value = unigram_entropy(corpus_, group),
            .of_training = plain_loss_is_trained()};
  }

  std::shared_ptr<TaskModel> shape_model(const fs::path& directory, at::ScalarType dtype) const override {
    const DecoderConfig shape =
        directory.empty() ? shape_ : with_marks(read_hf_config(directory), corpus_.tokenizer.get());
    return std::make_shared<TextModel>(DecoderLM::without_values(shape, dtype), config(), corpus_.tokenizer);
  }
  ShapeKeys shape(const fs::path& directory) const override {
    return shape_keys(directory.empty() ? shape_ : read_hf_config(directory));
  }

  bool shows_model() const override { return corpus_.tokenizer && config().sample.tokens > 0; }
  Showing show(TaskModel& model, const Outcome&, const Outcome*) const override {
    if (!shows_model()) return {};
    return {.text = sample_text(static_cast<TextModel&>(model).decoder(), *corpus_.tokenizer,
                                config().sample.prompt,
                                {.prompt = {},
                                 .max_tokens = config().sample.tokens,
                                 .temperature = config().sample.temperature,
                                 .seed = seed()})};
  }

  PlainLoss plain_loss() const override { return {.name = "cross_entropy"}; }

 private:
  bool plain_loss_is_trained() const {
    return config().loss.label_smoothing == 0 && config().loss.z_loss == 0;
  }
  std::unique_ptr<BatchLoader> loader_of(bool training, int rank, int size) const override {
    const auto& documents = training ? corpus_.split.train : corpus_.split.validation;
    if (!training && documents.empty()) return nullptr;
    const auto& batch = config().batch;
    return std::make_unique<TextLoader>(
        corpus_.tokens, documents,
        LoaderOptions{.pack_length = config().data.pack_length,
                      .packs_per_step = training ? batch.packs_per_step : config().train.evaluate_packs,
                      .packs_per_micro_batch = batch.packs_per_micro_batch,
                      .seed = seed(),
                      .shuffle = training,
                      .packing = config().data.packing == "best_fit" ? LoaderOptions::Packing::kBestFit
                                                                     : LoaderOptions::Packing::kSplit,
                      .shuffle_packs = training && config().data.shuffle_packs,
                      .rank = rank,
                      .size = size,
                      .read_ahead = training});
  }
  std::string describe(const BatchLoader& loader, LoaderPosition at, int) const override {
    return describe_packs(static_cast<const TextLoader&>(loader).packs(at), *corpus_.tokens,
                          corpus_.tokenizer.get());
  }
  FillValues open_weights(const fs::path& directory, at::ScalarType dtype) const override {
    if (const auto lora = adapter_of(config())) {
      // A checkpoint has the adapter alone. The base is model.load's, or the one of the seed.
      const bool saved = fs::exists(directory / kAdapterConfig);
      const fs::path base = saved ? fs::path(config().model.load) : directory;
      const FillValues fresh = [model = shape_model({}, dtype)](const std::string& name, at::Tensor& values) {
        model->initialize(name, values);
      };
      const FillValues of_base = base.empty() ? fresh : hf_weights(base, dtype);
      const FillValues of_adapter = saved ? saved_adapter(directory, *lora, shape_, dtype) : fresh;
      return [of_base, of_adapter](const std::string& name, at::Tensor& values) {
        (adapted_matrix(name).empty() ? of_base : of_adapter)(name, values);
      };
    }
    return hf_weights(directory, dtype);
  }
  static FillValues hf_weights(const fs::path& directory, at::ScalarType dtype) {
    const auto weights = std::make_shared<const HfWeights>(directory, dtype);
    return [weights](const std::string& name, at::Tensor& values) { weights->fill(name, values); };
  }

  Corpus corpus_;
  DecoderConfig shape_;
  double adapter_elements_ = 0;  // 0: all parameters are trained
};

std::shared_ptr<TaskModel> text_model_without_values(const RunConfig& config) {
  const DecoderConfig shape = configured_shape(config);
  check(shape);
  return std::make_shared<TextModel>(DecoderLM::without_values(shape, scalar_type(config.train.dtype)),
                                     config, nullptr);
}

std::unique_ptr<Task> make_text_task(const RunConfig& config, Group& group) {
  Corpus corpus = open_corpus(config, group);
  const std::string& prompt = config.sample.prompt;
  std::unique_ptr<Task> task;
  on_every_rank(group, [&] {
    if (!prompt.empty() && !corpus.tokenizer)
      refuse("sample.prompt", "a prompt, and data.shards of a tokenizer that is not known here",
             "no prompt: nothing can be encoded or generated as text", "Leave sample.prompt out");
    if (!prompt.empty())
      check_prompt(*corpus.tokenizer, prompt, model_shape(config, corpus), "sample.prompt");
    task = std::make_unique<TextTask>(config, std::move(corpus));
  });
  return task;
}

// ---- rules ----

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
constexpr const char* kOnlyOfTokens = "the cross entropy over a vocabulary is a decoder's (model.kind)";

void check_router_losses(const RunConfig& config) {
  const auto& loss = config.loss;
  const bool any = loss.balance != 0 || loss.router_z != 0;
  const bool moves_bias = loss.selection_bias_rate != kSelectionBiasRate;
  if (!any && !moves_bias) return;  // before a model's folder is opened
  const DecoderConfig shape = configured_shape(config);
  if (!shape.experts.sigmoid && moves_bias)
    refuse("loss.selection_bias_rate",
           fmt::format("{}, and routers without a selection bias", loss.selection_bias_rate),
           "a model that has it (model.family = \"dots1\")", "Leave it out");
  if (shape.experts.sigmoid && loss.router_z != 0)
    refuse("loss.router_z", fmt::format("{}, and routers that score by sigmoids", loss.router_z),
           "routers with a softmax, whose logits it keeps small",
           "Leave it out; loss.balance and loss.selection_bias_rate balance loads");
  bool routes = false;
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) routes |= shape.has_experts(layer);
  if (any && !routes)
    refuse(loss.balance != 0 ? "loss.balance" : "loss.router_z",
           fmt::format("a loss of routers, and {} layers of which none has experts", shape.layers),
           "a layer that has them",
           "Leave it out, or set model.experts, a model.family that has them and model.experts_every of at "
           "most model.layers");
  if (any && normalises_by_replica(config))
    refuse("loss.normalise_over",
           "a mean of per-replica means with losses of routers, which are over the whole step",
           "one mean over all replicas", "Leave loss.normalise_over out");
  if (loss.balance != 0 && loss.balance_scope == "micro_batch" &&
      (config.verify.at_end || config.verify.every > 0))
    refuse("loss.balance_scope",
           "micro_batch, which is another loss for each way to split the step, and a proof "
           "(verify.at_end, verify.every)",
           "a loss that one process has too",
           "Set loss.balance_scope = \"step\", or verify.at_end = false and verify.every = 0");
}

void check_adapter(const RunConfig& config) {
  const auto lora = adapter_of(config);
  if (!lora) return;
  if (config.model.lora.targets.empty())
    refuse("model.lora.targets", "none", "attention, mlp, unembed or names such as q_proj", "Name some");
  const auto model = LoraAdapter::without_values(configured_shape(config), *lora, at::kFloat);
  if (lora->dropout == 0) return;
  if (config.loss.balance != 0)
    refuse("model.lora.dropout", "dropout with loss.balance, whose first pass over the step drops nothing",
           "the same routing in both passes", "Leave one of them out");
}

}  // namespace

const TaskKind& text_kind() {
  static const TaskKind kind{
      .name = "decoder",
      .samples = "packs",
      .tokens = "tokens",
      .smaller = "batch.packs_per_micro_batch or data.pack_length",
      .per_step = &decltype(RunConfig::batch)::packs_per_step,
      .per_micro_batch = &decltype(RunConfig::batch)::packs_per_micro_batch,
      .keys = key_table::text_keys,
      .of_no_other = {{"loss.label_smoothing", kOnlyOfTokens},
                      {"loss.z_loss", kOnlyOfTokens},
                      {"loss.balance", kOnlyOfRouters},
                      {"loss.router_z", kOnlyOfRouters},
                      {"parallel.ep", kOnlyOfRouters},
                      {"model.lora.", "adapters are a decoder's (model.kind)"},
                      {"parallel.pp", "stages are a decoder's (model.kind)"}},
      .check =
          [](const RunConfig& config) {
            if (config.model.load.empty()) check(configured_shape(config));
            check_router_losses(config);
            check_adapter(config);
            check_expert_parallel(config);
          },
      .check_ranks = check_decoder_parallel,
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

// ---- generated text ----

namespace {

// The tokens given to the model. Nothing follows an end token; an empty prompt starts a document.
std::vector<std::uint32_t> prompt_tokens(const Tokenizer& tokenizer, const std::string& prompt) {
  std::vector<std::uint32_t> tokens = tokenizer.encode(prompt);
  const auto eos = tokenizer.eos();
  if (eos >= 0 && !tokens.empty() && tokens.back() == static_cast<std::uint32_t>(eos)) tokens.pop_back();
  if (tokens.empty() && eos >= 0) tokens.push_back(static_cast<std::uint32_t>(eos));
  if (tokens.empty()) tokens = tokenizer.encode("\n");
  return tokens;
}

// The maximum number of tokens of a generated text, and the reason.
struct TextLimit {
  std::int64_t tokens;
  const char* name;
};

TextLimit text_limit(const DecoderConfig& model) {
  if (model.sliding_window > 0 && model.sliding_window < model.max_positions)
    return {model.sliding_window, "the model's sliding window"};
  return {model.max_positions, "the model's positions"};
}

// Length of the common prefix of two decodings, in whole characters, without a U+FFFD at the end, which
// stands for a character whose tokens are incomplete.
std::size_t settled(std::string_view before, std::string_view now) {
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
  auto size = static_cast<std::size_t>(std::ranges::mismatch(before, now).in1 - before.begin());
  const auto inside = [&](std::size_t at) {
    return at < now.size() && (static_cast<unsigned char>(now[at]) & 0xC0) == 0x80;
  };
  while (size > 0 && inside(size)) --size;
  while (now.substr(0, size).ends_with(kReplacement)) size -= kReplacement.size();
  return size;
}

}  // namespace

void check_prompt(const Tokenizer& tokenizer, const std::string& prompt, const DecoderConfig& model,
                  const std::string& where) {
  if (prompt.empty()) return;
  if (tokenizer.encode(prompt).size() <= tokenizer.encode("").size())
    refuse(where, "a text of which the tokenizer makes no token", "a prompt that the model can see",
           "Give another, or none for a new document");
  const TextLimit limit = text_limit(model);
  const auto taken = static_cast<std::int64_t>(prompt_tokens(tokenizer, prompt).size());
  if (taken >= limit.tokens)
    refuse(where, fmt::format("{} tokens", taken),
           fmt::format("fewer than {}, {}, so that some are left to generate", limit.tokens, limit.name),
           "Shorten the prompt");
}

std::vector<std::string> prompt_notices(const Tokenizer& tokenizer, const std::string& prompt,
                                        const DecoderConfig& model, std::int64_t max_tokens) {
  constexpr std::size_t kShown = 80;  // characters of a prompt
  std::vector<std::string> notices;
  const std::vector<std::uint32_t> tokens = prompt_tokens(tokenizer, prompt);
  if (const std::string seen = tokenizer.decode(tokens); !prompt.empty() && seen != prompt)
    notices.push_back(fmt::format("the tokenizer does not keep all of the prompt: the model is given \"{}\"",
                                  printable(seen, kShown)));
  const TextLimit limit = text_limit(model);
  const auto taken = static_cast<std::int64_t>(tokens.size());
  if (const std::int64_t room = limit.tokens - taken; room < max_tokens)
    notices.push_back(fmt::format("at most {} of {} tokens are generated: {} are {}, and the prompt takes {}",
                                  std::max<std::int64_t>(room, 0), max_tokens, limit.tokens, limit.name,
                                  taken));
  return notices;
}

std::string sample_text(DecoderLM& model, const Tokenizer& tokenizer, const std::string& prompt,
                        SampleRequest ask, const std::function<void(std::string_view)>& on_text) {
  std::vector<std::uint32_t> tokens = prompt_tokens(tokenizer, prompt);
  const std::int64_t room = text_limit(model.config()).tokens - static_cast<std::int64_t>(tokens.size());
  ask.max_tokens = std::clamp<std::int64_t>(room, 0, ask.max_tokens);
  ask.prompt.assign(tokens.begin(), tokens.end());
  ask.adapter = {std::shared_ptr<void>(), model.adapter()};  // the model's own, which outlives the call
  // A decoding takes as long as all of its tokens, so that not every token has one.
  constexpr std::chrono::milliseconds kPause(50);
  std::string before = on_text ? tokenizer.decode(tokens) : std::string();
  std::size_t given = 0;
  const auto give = [&](std::string_view text, std::size_t until) {
    if (until <= given) return;
    on_text(text.substr(given, until - given));
    given = until;
  };
  if (on_text) give(before, settled(before, before));
  auto last = std::chrono::steady_clock::now() - kPause;
  const std::vector<std::int64_t> ends = model.config().ends();
  ask.stops = [&, asked = std::move(ask.stops)](const std::vector<std::int64_t>& drawn) {
    if (std::ranges::find(ends, drawn.back()) != ends.end() || (asked && asked(drawn))) return true;
    tokens.push_back(static_cast<std::uint32_t>(drawn.back()));
    if (!on_text || std::chrono::steady_clock::now() - last < kPause) return false;
    std::string now = tokenizer.decode(tokens);
    give(now, settled(before, now));
    before = std::move(now);
    last = std::chrono::steady_clock::now();
    return false;
  };
  TextSampler sampler(model, {.cache_bytes = std::numeric_limits<std::int64_t>::max()});
  sampler.submit({}, std::move(ask));
  while (sampler.busy())
    for (const auto& [id, sampled] : sampler.pass())
      if (!sampled.error.empty())
        refuse("the model", sampled.error, "a model whose weights are finite", "Load another checkpoint");
  std::string text = tokenizer.decode(tokens);
  if (on_text) give(text, text.size());
  return text;
}

}  // namespace isograd
