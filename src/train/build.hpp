// Builds what a configuration describes, for the trainer, verify and others (a task makes its models and
// loaders). The axes meet in build.cpp: it chooses grid, operators, placements, schedule and strategy, and
// refuses what does not go together. A new axis adds its lines there and in config_table.cpp.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "isograd/context_parallel.hpp"
#include "isograd/data.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/loss.hpp"
#include "isograd/model.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/parameters.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "isograd/step.hpp"
#include "parallel/data/planned_bucket.hpp"
#include "train/config.hpp"

namespace isograd {

class LoraAdapter;
class RouterLosses;
struct TrainingState;

struct Corpus {
  std::shared_ptr<TokenStore> tokens;
  std::shared_ptr<Tokenizer> tokenizer;  // null: shards whose tokenizer is not known, or is not named
  Split split;
  std::vector<std::string> sources;  // patterns or shards it came from
};

// Rank 0 packs text into data.cache unless that was done for the same files; shards are opened as they are.
// Collective; ConfigError on every rank.
Corpus open_corpus(const RunConfig& config, Group& group);
// Named shards, or those that an earlier run packed; null: there are none. Packs nothing.
std::shared_ptr<TokenStore> packed_corpus(const RunConfig& config);

at::ScalarType scalar_type(const std::string& dtype);     // of train.dtype
DecoderConfig configured_shape(const RunConfig& config);  // of model.load, or of [model]

// The decoder of a checkpoint, or, without `state`, of a Hugging Face directory. Where a checkpoint has an
// adapter: its base, from where the run had it, and the adapter.
struct SavedDecoder {
  std::shared_ptr<DecoderLM> model;
  std::shared_ptr<LoraAdapter> adapter;  // null: all parameters were trained
  std::string base;                      // folder of the base; empty: fresh weights by the run's seed
};
SavedDecoder read_decoder(const std::filesystem::path& directory, const TrainingState* state);

// A unit for each block of a model, and one for all that is outside of them. Keeps a reference.
template <class Model>
ModelUnits units_by_block(Model& model) {
  ModelUnits units{.root = UnitHandle([&model] {
                     std::vector<at::Tensor> all;
                     for (auto& [name, tensor] : model.named()) all.push_back(tensor);
                     return all;
                   }),
                   .blocks = {}};
  for (std::int64_t layer = 0; layer < model.config().layers; ++layer)
    units.blocks.emplace_back([&model, layer] { return model.block_parameters(layer); });
  return units;
}
// The model as units for layouts that shard parameters; plain calls in all others. Keeps a reference.
ModelUnits model_units(DecoderLM& model, const RunConfig& config);
// `forward` computed inside `unit`.
ForwardLossTerms inside(const UnitHandle& unit, ForwardLossTerms forward);
// `forward` of batches that come on the CPU, where they were counted.
ForwardLossTerms on_device(at::Device device, ForwardLossTerms forward);

// -log p(target) summed over this rank's targets of a micro-batch: the term "cross_entropy". `routers` adds
// the terms of a model with experts; null: none.
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

// Options of optimizer.kind, at the peak of the schedule.
std::variant<SgdOptions, AdamWOptions> optimizer_options(const RunConfig& config);
std::unique_ptr<Optimizer> make_optimizer(const RunConfig& config);
Schedule make_schedule(const RunConfig& config);

// -Σ p log p over the training targets, nats per token: the loss of a model that knows only how often each
// token occurs. Of more than `limit` tokens every k-th document is counted. Collective.
double unigram_entropy(const Corpus& corpus, Group& group, std::int64_t limit = 1 << 28);

// train.clip_groups. ConfigError at `where`: no "PATTERN: LIMIT", a limit not above 0, a repeated pattern.
std::vector<ClipGroup> clip_groups_of(const RunConfig& config, const std::string& where);

// optimizer.groups. ConfigError at `where`: as clip_groups_of(), a setting that is unknown, given twice or no
// number of 0 or more.
std::vector<ParameterGroup> parameter_groups_of(const RunConfig& config, const std::string& where);

// Checks both keys. ConfigError: a group that matches no trained parameter of `named`, a parameter that two
// groups match.
void check_groups(const RunConfig& config, const NamedTensors& named);

// train.part_norms of the whole model's trained parameters `named`. "groups": "experts" (".experts." in the
// name) and "dense"; "layers": a name up to its first number ("model.layers.3"), else its module;
// "parameters": each.
NormParts norm_parts_of(const RunConfig& config, const NamedTensors& named);

// ConfigError: parallel.ep without experts, or with fewer experts than ranks.
void check_expert_parallel(const RunConfig& config);
// ConfigError: what rules.hpp says of a decoder's experts, stages, tensors and heads, and a balance loss that
// stages cannot compute.
void check_decoder_parallel(const RunConfig& config, int ranks);

// Placement of each parameter of a decoder: sharded along tp, then experts along ep, then layers along pp.
Layout::Named decoder_placements(DecoderLM& model, const RunConfig& config, const Grid& grid);

// Applies these placements, and installs the operators that exchange the rest.
struct ComposedDecoder {
  Layout layout;
  std::shared_ptr<Pipeline> pipeline{};  // null: parallel.pp is 1
};
ComposedDecoder compose_decoder(DecoderLM& model, const RunConfig& config, const Mesh& mesh);

// Attention over the ranks that share samples (cp_ring, cp_ulysses), on the heads that tp leaves to each.
void attend_over(ReferenceModel& model, const Mesh& mesh, bool causal = true);

// ---- the layout of a run ----

// Whole values of one parameter, into a tensor of its shape. ConfigError: they are not finite.
using FillValues = std::function<void(const std::string& name, at::Tensor& values)>;

// A layout depends on these properties of the ranks that it is made on.
struct RanksOfRun {
  int size = 1;
  bool host_memory = true;  // Group::has_host_memory()

  RanksOfRun(int size_, bool host_memory_) : size(size_), host_memory(host_memory_) {}
  RanksOfRun(const Group& group) : RanksOfRun(group.size(), group.has_host_memory()) {}  // NOLINT
};

// Parameters that this rank holds: all except those of other pipeline stages.
NamedTensors held_parameters(const NamedTensors& parameters, const Layout::Named& placements,
                             const Grid& grid, int rank);

// Makes a layout from a strategy's name. `options`: of strategies that keep whole parameters (its stage is
// ignored); `sharded`: of zero3, which needs units. Collective.
std::unique_ptr<DataParallel> make_strategy(const std::string& strategy, const NamedTensors& parameters,
                                            const ModelUnits* units, const Mesh& mesh,
                                            DataParallelOptions options,
                                            const FullyShardOptions& sharded = {},
                                            const Layout::Named& placements = {});

// The configured strategy, on a mesh of grid_of(). `placed`: TaskModel::cut(); null: every rank has a whole
// model. `bucket_order`: of the run that this one continues. `device`: where parameters without values are
// created. Collective.
std::unique_ptr<DataParallel> make_layout(const RunConfig& config, const NamedTensors& parameters,
                                          const ModelUnits& units, const Mesh& mesh,
                                          const Layout* placed = nullptr,
                                          const std::vector<std::string>& bucket_order = {},
                                          at::Device device = at::kCPU);
// Gives values, one parameter at a time, to parameters that have none. A rank gets its part of them.
void give_values(const NamedTensors& parameters, const FillValues& fill, const Layout* placed,
                 at::Device device);
// The buckets of make_layout() on `rank`, by local shapes alone. Pure.
std::vector<PlannedBucket> plan_layout(const RunConfig& config, const NamedTensors& parameters,
                                       const ModelUnits& units, const RanksOfRun& ranks, int rank,
                                       const Layout::Named& placements = {});
// Human-readable: "zero2, summed during backward, one copy of the parameters".
std::string describe_layout(const RunConfig& config, const RanksOfRun& ranks);

// Bytes of a parameter of this type with that many fp32 (fp64: fp64) states.
ElementBytes element_bytes(at::ScalarType parameters, int states);

using SharedElements = DataParallelPlan::Elements;

// A plan's entry for elements with these axes: parameters differ in those along which they are summed and
// sharded. `asked`: sharded_axes().
SharedElements shared_elements(const SyncAxes& sync, const Grid& grid, const AxisSet& asked,
                               std::int64_t numel, std::int64_t whole = 0);

// An entry for each bucket, `padded` or not; for stage 3 with the elements that stay whole.
std::vector<SharedElements> shared_elements(DataParallel& layout, const AxisSet& asked, bool padded);

// Plan of that layout, by which a rank's bytes are computed; with parallel.ep of two kinds of elements.
DataParallelPlan make_plan(const RunConfig& config, const RanksOfRun& ranks);
// As make_plan(), for an existing layout. `rounds`: micro-batches per step (0: configured).
DataParallelPlan plan_of(const RunConfig& config, DataParallel& layout, std::int64_t rounds,
                         const RanksOfRun& ranks);

}  // namespace isograd
