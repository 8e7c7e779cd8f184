#include "train/build.hpp"

#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <map>
#include <set>

#include "base/files.hpp"
#include "base/pattern.hpp"
#include "base/refuse.hpp"
#include "data/corpus.hpp"
#include "model/hooks.hpp"
#include "train/rank_zero.hpp"
#include "train/router_losses.hpp"
#include "train/stop.hpp"

namespace isograd {
namespace fs = std::filesystem;
namespace {

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

// The tokenizer that ready-made shards name; null where it is not one of ours.
std::unique_ptr<Tokenizer> tokenizer_of_shards(const RunConfig& config, const std::string& name) {
  if (name == "bytes") return byte_tokenizer();
  const bool named = config.data.tokenizer != "bytes";
  // A Hugging Face tokenizer needs Python: shards of one train without it, though nothing can be decoded
  // then.
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
  for (const auto& pattern : patterns) key += '\n' + pattern;
  return fs::path(config.data.cache) / checksum(key.data(), key.size());
}

// Each path ends in a zero, which no path contains.
std::vector<fs::path> split_paths(const std::string& text) {
  std::vector<fs::path> paths;
  for (std::size_t begin = 0; begin < text.size(); begin += paths.back().native().size() + 1)
    paths.emplace_back(text.c_str() + begin);
  return paths;
}

std::string stripped(const std::string& text) {
  const auto first = text.find_first_not_of(" \t"), last = text.find_last_not_of(" \t");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

bool is_number(const std::string& text) {
  return !text.empty() && std::all_of(text.begin(), text.end(),
                                      [](unsigned char letter) { return std::isdigit(letter) != 0; });
}

std::string layer_of(const std::string& name) {
  for (std::size_t begin = 0; begin < name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    if (is_number(name.substr(begin, end - begin))) return name.substr(0, end);
    begin = end + 1;
  }
  const std::size_t last = name.rfind('.');
  return last == std::string::npos ? name : name.substr(0, last);
}

std::string part_of(const std::string& by, const std::string& name) {
  if (by == "layers") return layer_of(name);
  if (by == "groups") return name.find(".experts.") == std::string::npos ? "dense" : "experts";
  return name;
}

}  // namespace

Corpus open_corpus(const RunConfig& config, Group& group) {
  Corpus corpus;
  const bool packed = !config.data.shards.empty();
  corpus.sources = packed                     ? config.data.shards
                   : config.data.text.empty() ? default_corpus()
                                              : config.data.text;
  std::string files;
  on_rank_zero(group, [&] {
    std::vector<fs::path> shards;
    if (packed) {
      for (const auto& file : resolve(corpus.sources)) shards.push_back(file.path);
    } else {
      const auto tokenizer = open_tokenizer(config.data.tokenizer);
      shards = pack_corpus({.patterns = corpus.sources, .stop = StopSignals::requested}, *tokenizer,
                           cache_folder(config, corpus.sources, *tokenizer));
    }
    for (const auto& shard : shards) files += shard.string() + '\0';
  });
  const auto end_of_text =
      config.data.end_of_text < 0
          ? std::nullopt
          : std::optional<std::uint32_t>(static_cast<std::uint32_t>(config.data.end_of_text));
  corpus.tokens = TokenStore::open(split_paths(broadcast_text(group, files)), end_of_text);
  corpus.tokenizer = packed ? tokenizer_of_shards(config, corpus.tokens->tokenizer_name())
                            : open_tokenizer(config.data.tokenizer);
  corpus.split = split_documents(*corpus.tokens, config.data.validation_fraction,
                                 static_cast<std::uint64_t>(config.run.seed));
  return corpus;
}

at::ScalarType scalar_type(const std::string& dtype) {
  if (dtype == "float64") return at::kDouble;
  if (dtype == "float32") return at::kFloat;
  if (dtype == "bfloat16") return at::kBFloat16;
  refuse("train.dtype", dtype, "float64, float32 or bfloat16", "Choose one of them");
}

DecoderConfig configured_shape(const RunConfig& config) {
  if (!config.model.load.empty()) return read_hf_config(config.model.load);
  DecoderConfig shape = config.model.shape;
  shape.experts.sigmoid = shape.family == "dots1";
  for (std::int64_t layer = 0; layer < shape.layers; ++layer)
    if (layer < config.model.dense_layers || (layer + 1) % config.model.experts_every != 0)
      shape.experts.dense_layers.push_back(layer);
  return shape;
}

ModelUnits model_units(DecoderLM& model, const RunConfig& config) {
  ModelUnits units{.root = UnitHandle([&model] {
                     std::vector<at::Tensor> all;
                     for (auto& [name, tensor] : model.named()) all.push_back(tensor);
                     return all;
                   }),
                   .blocks = {},
                   .initialize = [&model, seed = static_cast<std::uint64_t>(config.run.seed)](
                                     const std::string& name, at::Tensor& values) {
                     model.initialize(name, values, seed);
                   }};
  for (std::int64_t layer = 0; layer < model.config().layers; ++layer)
    units.blocks.emplace_back([&model, layer] { return model.block_parameters(layer); });
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

ForwardLossTerms inside(const UnitHandle& unit, ForwardLossTerms forward) {
  return [unit, forward = std::move(forward)](const Batch& batch) {
    LossTerms terms;
    const auto sums = unit.run({}, [&](const std::vector<at::Tensor>&) {
      terms = forward(batch);
      std::vector<at::Tensor> results;
      for (LossTerm& term : terms) results.push_back(std::exchange(term.sum, at::Tensor()));
      return results;
    });
    for (std::size_t i = 0; i < terms.size(); ++i) terms[i].sum = sums[i];
    return terms;
  };
}

bool fuses_loss(const RunConfig& config, std::int64_t tokens, std::int64_t vocabulary,
                std::size_t element_bytes) {
  // Unfused, the loss takes twice the memory of the logits; fused, a tile and the weight's gradient. Making
  // the logits is a little faster (4,096 tokens on one core: 10 to 25 % of the loss's own time with a
  // vocabulary of 8,192, 7 to 11 % with 32,768), so they are made until that memory is some hundred MiB;
  // docs/losses.md has the table.
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
    const at::Tensor& weight = model.output_weight();
    // The whole vocabulary decides, so that ranks with unequal parts of it choose alike.
    const bool fused =
        fuses_loss(config, batch.num_tokens(), model.config().vocabulary, weight.element_size());
    terms.insert(
        terms.begin(),
        {"cross_entropy",
         connected(fused ? linear_cross_entropy_sum(outputs.hidden, weight, batch.targets,
                                                    {.weights = batch.weights, .shard = model.vocabulary()})
                         : cross_entropy_sum(model.logits_of(outputs.hidden), batch.targets,
                                             {.weights = batch.weights, .shard = model.vocabulary()}))});
    return terms;
  };
}

Mean mean_of(const RunConfig& config) {
  static const std::map<std::string, Mean> means = {{"sample_mean", Mean::kSamples},
                                                    {"weighted_mean", Mean::kWeights},
                                                    {"fixed", Mean::kFixed},
                                                    {"none", Mean::kNone}};
  const auto found = means.find(config.loss.kind);
  return found == means.end() ? Mean::kTargets : found->second;
}

std::unique_ptr<Normalizer> make_normalizer(Mean mean, double fixed, const NormalizerOptions& options) {
  if (mean == Mean::kSamples) return std::make_unique<SampleMean>(options);
  if (mean == Mean::kWeights) return std::make_unique<WeightedMean>(options);
  if (mean == Mean::kFixed) return std::make_unique<FixedDenominator>(fixed, options);
  if (mean == Mean::kNone) return std::make_unique<NoDenominator>(options);
  return std::make_unique<TokenMean>(options);
}

std::unique_ptr<Normalizer> make_normalizer(const RunConfig& config, int ranks) {
  const int replicas = normalises_by_replica(config) ? grid_of(config, ranks).size({"dp_replicate"}) : 1;
  return make_normalizer(mean_of(config), config.loss.denominator, {.replicas = replicas});
}

Schedule make_schedule(const RunConfig& config) {
  Schedule schedule = config.schedule;
  schedule.total = config.train.steps;
  return schedule;
}

std::unique_ptr<Optimizer> make_optimizer(const RunConfig& config) {
  if (config.optimizer.kind == "adamw") {
    AdamWOptions options = config.optimizer.adamw;
    options.learning_rate = config.schedule.peak;
    return adamw(options);
  }
  if (config.optimizer.kind == "sgd")
    return sgd({.learning_rate = config.schedule.peak,
                .momentum = config.optimizer.momentum,
                .weight_decay = config.optimizer.adamw.weight_decay});
  refuse("optimizer.kind", config.optimizer.kind, "adamw or sgd", "Choose one of them");
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

std::vector<ClipGroup> clip_groups_of(const RunConfig& config, const std::string& where) {
  std::vector<ClipGroup> groups;
  for (const std::string& text : config.train.clip_groups) {
    if (text.size() > kMostPattern)
      refuse(where, fmt::format("train.clip_groups with {} characters", text.size()),
             fmt::format("at most {}", kMostPattern), "Shorten the pattern");
    const auto refuse_if = [&](bool wrong, const char* what, const char* action) {
      if (wrong)
        refuse(where, fmt::format("train.clip_groups with \"{}\", {}", text, what),
               "\"PATTERN: LIMIT\", as in \"*.experts.*: 0.5\"", action);
    };
    const auto colon = text.rfind(':');
    refuse_if(colon == std::string::npos, "which names no limit", "Write the limit behind a colon");
    const std::string pattern = stripped(text.substr(0, colon)), number = stripped(text.substr(colon + 1));
    refuse_if(pattern.empty(), "which names no parameter", "Write a pattern before the colon");
    double limit = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), limit);
    refuse_if(
        error != std::errc() || end != number.data() + number.size() || !std::isfinite(limit) || limit <= 0,
        "whose limit is no number above 0", "Give a norm above 0, or leave the group out");
    refuse_if(std::ranges::find(groups, pattern, &ClipGroup::pattern) != groups.end(),
              "a pattern that is there already", "Leave one of the two out");
    groups.push_back({pattern, limit});
  }
  return groups;
}

void check_clip_groups(const RunConfig& config, const NamedTensors& named) {
  std::set<std::string> used;
  const std::vector<ClipGroup> groups = clip_groups_of(config, "train.clip_groups");
  for (const auto& [name, tensor] : named) {
    const ClipGroup* first = nullptr;
    for (const ClipGroup& group : groups) {
      if (!tensor.requires_grad() || !matches(group.pattern, name)) continue;
      if (first)
        refuse("train.clip_groups",
               fmt::format("{} in two groups, {} and {}", name, first->pattern, group.pattern),
               "each parameter in one group at most", "Make the patterns such that they exclude one another");
      first = &group;
      used.insert(group.pattern);
    }
  }
  for (const ClipGroup& group : groups)
    if (!used.contains(group.pattern))
      refuse("train.clip_groups", fmt::format("{}, which fits no trained parameter", group.pattern),
             "patterns of names such as model.layers.0.mlp.up_proj.weight",
             "Change it or leave it out; isograd layout lists the names");
}

NormParts norm_parts_of(const RunConfig& config, const NamedTensors& named) {
  const std::string& by = config.train.part_norms;
  NormParts parts;
  if (by == "off") return parts;
  std::map<std::string, int> places, of_parameter;
  for (const auto& [name, tensor] : named) {
    if (!tensor.requires_grad()) continue;
    const std::string part = part_of(by, name);
    const auto [place, fresh] = places.emplace(part, static_cast<int>(parts.names.size()));
    if (fresh) parts.names.push_back(part);
    of_parameter[name] = place->second;
  }
  parts.of = [of_parameter = std::move(of_parameter)](const std::string& name) {
    const auto found = of_parameter.find(name);
    return found == of_parameter.end() ? -1 : found->second;
  };
  return parts;
}

}  // namespace isograd
