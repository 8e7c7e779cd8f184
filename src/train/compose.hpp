// The one place where axes meet. For a configuration it chooses the grid, the operators of a decoder, the
// placement of its parameters, its schedule and the strategy of its layout, and refuses combinations that do
// not work. The folders of the axes do not include one another; a new axis adds its lines here and to
// config_table.cpp, and nowhere else.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/model.hpp"
#include "isograd/parameters.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "parallel/data/planned_bucket.hpp"
#include "train/config.hpp"

namespace isograd {

// ConfigError: experts sharded over ranks of a model that has none, or fewer experts than ranks. The
// message names the nearest valid configuration.
void check_expert_parallel(const RunConfig& config);
// ConfigError: more stages than layers, or more tensor-parallel ranks than heads or features.
void check_decoder_parallel(const RunConfig& config);

// Placement of each parameter of a decoder: sharded along tp, then experts along ep, then layers along pp.
Layout::Named decoder_placements(DecoderLM& model, const RunConfig& config, const Grid& grid);

// Applies these placements: the model keeps this rank's shards, and operators that exchange the rest are
// installed.
struct ComposedDecoder {
  Layout layout;
  std::shared_ptr<Pipeline> pipeline{};  // null: parallel.pp is 1
};
ComposedDecoder compose_decoder(DecoderLM& model, const RunConfig& config, const Mesh& mesh);

// Installs attention over the ranks that share samples (cp_ring, cp_ulysses), if there are any. Each rank
// computes it on the heads that tp leaves to it.
void attend_over(DecoderLM& model, const Mesh& mesh);

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

// Makes a layout from a strategy's name; nothing else interprets these names. `options` applies to
// strategies that keep whole parameters (its stage is ignored); `sharded` applies to zero3, which needs
// units. `placements` lists the parameters that are sharded over model-parallel ranks. Collective.
std::unique_ptr<DataParallel> make_strategy(const std::string& strategy, const NamedTensors& parameters,
                                            const ModelUnits* units, const Mesh& mesh,
                                            DataParallelOptions options,
                                            const FullyShardOptions& sharded = {},
                                            const Layout::Named& placements = {});
// The buckets that make_strategy() would make on `rank`. Pure.
std::vector<PlannedBucket> plan_strategy(const std::string& strategy, const NamedTensors& parameters,
                                         const ModelUnits* units, const Grid& grid, int rank,
                                         DataParallelOptions options, const FullyShardOptions& sharded = {},
                                         const Layout::Named& placements = {});

// Makes parallel.strategy with the configured options, on a mesh of grid_of(). `placed`: placements of a
// model-parallel model (TaskModel::cut()); null: every rank has a copy. `bucket_order`: the order of the
// run that this one continues (DataParallelOptions::order). `device`: parameters without values are created
// there; others are not moved. Collective.
std::unique_ptr<DataParallel> make_layout(const RunConfig& config, const NamedTensors& parameters,
                                          const ModelUnits& units, const Mesh& mesh,
                                          const Layout* placed = nullptr,
                                          const std::vector<std::string>& bucket_order = {},
                                          at::Device device = at::kCPU);
// Gives values, one parameter at a time, to parameters that have none. A rank gets its part of them.
void give_values(const NamedTensors& parameters, const FillValues& fill, const Layout* placed,
                 at::Device device);
// The buckets that make_layout() will make on `rank`, computed without weights and without other ranks.
// `parameters` have the rank's local shapes. Pure.
std::vector<PlannedBucket> plan_layout(const RunConfig& config, const NamedTensors& parameters,
                                       const ModelUnits& units, const RanksOfRun& ranks, int rank,
                                       const Layout::Named& placements = {});
// Human-readable: "ZeRO-2 over 4 ranks, one copy of the parameters, ...".
std::string describe_layout(const RunConfig& config, const RanksOfRun& ranks);
// The plan of that layout, with parallel.ep two kinds of elements, as yet without any. Its formulas give the
// bytes that a rank keeps and sends.
DataParallelPlan make_plan(const RunConfig& config, const RanksOfRun& ranks);
// As make_plan(), for an existing layout. `rounds`: micro-batches per step (0: configured).
DataParallelPlan plan_of(const RunConfig& config, DataParallel& layout, std::int64_t rounds,
                         const RanksOfRun& ranks);
}  // namespace isograd
