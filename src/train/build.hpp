// What a configuration describes, built: corpus, units, layout, optimizer, mean. Used by the trainer, by
// verify and by anything that wants the same run without training it. Models and loaders are the task's
// (task.hpp).
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
#include "isograd/pipeline_parallel.hpp"
#include "isograd/step.hpp"
#include "parallel/data/planned_bucket.hpp"
#include "train/config.hpp"

namespace isograd {

class RouterLosses;

// Whole values of one parameter, into a tensor of its shape. ConfigError: they are not finite.
using FillValues = std::function<void(const std::string& name, at::Tensor& values)>;

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

// -log p(target) summed over this rank's targets of a micro-batch, as one term "cross_entropy"; fused with
// the output projection where fuses_loss() says so.
// `routers`: what a model with experts adds; null: nothing.
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

// What a layout depends on of the ranks that it is made on.
struct RanksOfRun {
  int size = 1;
  bool host_memory = true;  // Group::has_host_memory()

  RanksOfRun(int size_, bool host_memory_) : size(size_), host_memory(host_memory_) {}
  RanksOfRun(const Group& group) : RanksOfRun(group.size(), group.has_host_memory()) {}  // NOLINT
};

// Those that this rank holds: all but of other stages.
NamedTensors held_parameters(const NamedTensors& parameters, const Layout::Named& placements,
                             const Grid& grid, int rank);

// A strategy by its name: the one place where a name becomes a layout. `options` are those of the strategies
// that keep whole parameters, but for their stage; `sharded` those of zero3, which needs units. `placements`:
// of parameters that are not merely copied. Collective.
std::unique_ptr<DataParallel> make_strategy(const std::string& strategy, const NamedTensors& parameters,
                                            const ModelUnits* units, const Mesh& mesh,
                                            DataParallelOptions options,
                                            const FullyShardOptions& sharded = {},
                                            const Layout::Named& placements = {});
// The buckets that it would make on `rank`. Pure.
std::vector<PlannedBucket> plan_strategy(const std::string& strategy, const NamedTensors& parameters,
                                         const ModelUnits* units, const Grid& grid, int rank,
                                         DataParallelOptions options, const FullyShardOptions& sharded = {},
                                         const Layout::Named& placements = {});

// parallel.strategy with the configured options, on a mesh of grid_of(). `placed`: of a model that ranks hold
// together (TaskModel::cut()); null: copies on every rank. `bucket_order`: of the run that this one continues
// (DataParallelOptions::order). `device`: where parameters without values come to be; others stay where they
// are. Collective.
std::unique_ptr<DataParallel> make_layout(const RunConfig& config, const NamedTensors& parameters,
                                          const ModelUnits& units, const Mesh& mesh,
                                          const Layout* placed = nullptr,
                                          const std::vector<std::string>& bucket_order = {},
                                          at::Device device = at::kCPU);
// Gives parameters that have none their values, or the rank's part of them, one at a time.
void give_values(const NamedTensors& parameters, const FillValues& fill, const Layout* placed,
                 at::Device device);
// The buckets that it will make on `rank`, without weights or other ranks: of parameters of the rank's local
// shapes. Pure.
std::vector<PlannedBucket> plan_layout(const RunConfig& config, const NamedTensors& parameters,
                                       const ModelUnits& units, const RanksOfRun& ranks, int rank,
                                       const Layout::Named& placements = {});
// For people: "ZeRO-2 over 4 ranks, one copy of the parameters, ...".
std::string describe_layout(const RunConfig& config, const RanksOfRun& ranks);
// The plan of that layout for `numel` trained elements, whose formulas tell what a rank keeps and sends.
DataParallelPlan make_plan(const RunConfig& config, std::int64_t numel, const RanksOfRun& ranks);
// The same of a layout that was made, for steps of so many `rounds` of micro-batches; 0: as many as
// configured.
DataParallelPlan plan_of(const RunConfig& config, DataParallel& layout, std::int64_t rounds,
                         const RanksOfRun& ranks);
PipelineOptions pipeline_options(const RunConfig& config);
// `look_ahead` and `tally`: TaskModel's.
StepOptions step_options(const RunConfig& config, LookAhead look_ahead, Tally tally = {});
std::unique_ptr<Optimizer> make_optimizer(const RunConfig& config);
// The same, clipping groups of parameters where the run has some: then null is none. Over all ranks, with
// what it has done to them.
struct ClippingOptimizer {
  std::unique_ptr<Optimizer> optimizer;
  const ClipsGroups* clips = nullptr;  // `optimizer` itself
};
ClippingOptimizer make_clipping_optimizer(const RunConfig& config, const Group& all);
Schedule make_schedule(const RunConfig& config);

// -Σ p log p over the training documents' targets, nats per token: the loss of a model that knows only how
// often each token occurs. Collective: ranks count a part each. Corpora above `limit` tokens are counted in
// every k-th document.
double unigram_entropy(const Corpus& corpus, Group& group, std::int64_t limit = 1 << 28);

// train.clip_groups: which parameters are clipped apart, and by which limits.
// ConfigError at `where`: a text that is not "PATTERN: LIMIT", a limit that is not above 0, a pattern twice.
std::vector<ClipGroup> clip_groups_of(const RunConfig& config, const std::string& where);

// ConfigError: a group that fits no trained parameter of `named`, a parameter that two groups fit.
void check_clip_groups(const RunConfig& config, const std::vector<std::pair<std::string, at::Tensor>>& named);

// train.part_norms: whose norms a step logs beside that of the whole gradient.
// `named`: the whole model's parameters, of which the trained ones count, in their order. "off": no parts.
// "groups": "experts" (names with ".experts." in them) and "dense", as far as there are any. "layers": a
// name's text up to its first number, that included ("model.layers.3"), else its module ("model.norm").
// "parameters": each by itself.
NormParts norm_parts_of(const RunConfig& config,
                        const std::vector<std::pair<std::string, at::Tensor>>& named);

}  // namespace isograd
