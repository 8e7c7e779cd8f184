// Builds what a configuration describes: corpus, units, layout, optimizer, mean. The trainer and verify use
// it, and anything else that wants the same run without training it. A task makes its own models and
// loaders (task.hpp).
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "isograd/context_parallel.hpp"
#include "isograd/data.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/loss.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/parameters.hpp"
#include "isograd/step.hpp"
#include "train/compose.hpp"
#include "train/config.hpp"

namespace isograd {

class RouterLosses;

struct Corpus {
  std::shared_ptr<TokenStore> tokens;
  std::shared_ptr<Tokenizer> tokenizer;  // null: shards whose tokenizer is not known, or is not named
  Split split;
  std::vector<std::string> sources;  // patterns or shards it came from
};

// Collective. Text is packed into data.cache by rank 0 unless that was done before for the same files; shards
// are opened as they are. ConfigError on every rank when rank 0 finds the corpus unusable.
Corpus open_corpus(const RunConfig& config, Group& group);

at::ScalarType scalar_type(const std::string& dtype);     // of train.dtype
DecoderConfig configured_shape(const RunConfig& config);  // of model.load, or of [model]

// The model as units for layouts that shard parameters; plain calls in all others. Keeps a reference.
ModelUnits model_units(DecoderLM& model, const RunConfig& config);
// `forward` computed inside `unit`.
ForwardLossTerms inside(const UnitHandle& unit, ForwardLossTerms forward);

// Computes -log p(target) summed over this rank's targets of a micro-batch, as one term "cross_entropy". It
// is fused with the output projection where fuses_loss() says so. `routers` adds the terms of a model with
// experts; null: none.
ForwardLossTerms forward_loss(DecoderLM& model, const RunConfig& config,
                              std::shared_ptr<RouterLosses> routers = nullptr);

// loss.fused: "auto" decides by the bytes of the logits [tokens, vocabulary].
bool fuses_loss(const RunConfig& config, std::int64_t tokens, std::int64_t vocabulary,
                std::size_t element_bytes);

Mean mean_of(const RunConfig& config);  // what loss.kind divides by
// `fixed`: the number that Mean::kFixed divides by.
std::unique_ptr<Normalizer> make_normalizer(Mean mean, double fixed, const NormalizerOptions& options);
// The configured mean.
std::unique_ptr<Normalizer> make_normalizer(const RunConfig& config, int ranks);

std::unique_ptr<Optimizer> make_optimizer(const RunConfig& config);
Schedule make_schedule(const RunConfig& config);

// -Σ p log p over the training documents' targets, nats per token: the loss of a model that knows only how
// often each token occurs. Collective: ranks count a part each. Corpora above `limit` tokens are counted in
// every k-th document.
double unigram_entropy(const Corpus& corpus, Group& group, std::int64_t limit = 1 << 28);

// train.clip_groups: parameters that have a limit of their own. ConfigError at `where`: a text that is not
// "PATTERN: LIMIT", a limit that is not above 0, a repeated pattern.
std::vector<ClipGroup> clip_groups_of(const RunConfig& config, const std::string& where);

// ConfigError: a group that matches no trained parameter of `named`, a parameter that two groups match.
void check_clip_groups(const RunConfig& config, const NamedTensors& named);

// train.part_norms: norms that a step logs in addition to the norm of the whole gradient. `named`: the whole
// model's parameters, in order; frozen ones are ignored. "off": no parts. "groups": "experts" (names that
// contain ".experts.") and "dense", where there are any. "layers": a name up to and including its first
// number ("model.layers.3"), otherwise its module ("model.norm"). "parameters": one part per parameter.
NormParts norm_parts_of(const RunConfig& config, const NamedTensors& named);

}  // namespace isograd
