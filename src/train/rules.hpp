// Which layouts are refused: integer arithmetic on a layout and a model, for `train` and for the planner,
// which asks a million times. The sentences are made only for what is refused.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "isograd/error.hpp"
#include "isograd/model.hpp"
#include "isograd/parameters.hpp"
#include "parallel/pipeline/stages.hpp"
#include "train/config.hpp"

namespace isograd {

// The keys of [parallel] and [batch] that rules are about.
struct LayoutNumbers {
  std::int64_t ranks = 1, replicas = 1, cp_ring = 1, cp_ulysses = 1, tp = 1, ep = 1, pp = 1,
               stages_per_rank = 1;
  int stage = 0;                                               // of ZeRO
  bool shards_along_ring = true, shards_along_ulysses = true;  // parallel.cp_fsdp_mode
  bool shares_parameters = false, asked_to_share = false;      // in effect; parallel.share_parameters = "on"
  bool sequence_parallel = true, overlaps_tokens = false, reduce_once = false;
  const ScheduleFacts* schedule = nullptr;  // null: pp is 1; its rules are then not asked
  std::int64_t samples = 1;                 // of the global batch
  std::int64_t samples_at_a_time = 1;       // of a micro-batch
  const char* samples_name = "packs";       // of batch.SAMPLES_per_step

  // Ranks with other samples, with other tokens, and those that one copy is sharded over.
  std::int64_t sample_ranks() const, data_ranks() const, shard_ranks() const;
  std::int64_t most_samples() const, micro_batches() const;  // of the rank with most samples
};

// The numbers of a model that axes divide.
struct ModelNumbers {
  std::int64_t layers = 1, heads = 0, key_heads = 0, experts = 0;     // 0: it has none
  std::vector<std::pair<const char*, std::int64_t>> split_over_tp{};  // "features of an expert", 1408
};

std::vector<std::int64_t> divisors(std::int64_t number);  // ascending

// In the order in which check_but_devices() asks. A rule may presume those before it.
enum class LayoutRule : std::uint8_t {
  kModelRanks,     // tp times pp divides the ranks
  kDataAxes,       // replicas and cp divide the rest
  kExpertRanks,    // ep divides the ranks with other tokens
  kExperts,        // ep is at most the experts
  kStages,         // a layer for each stage
  kForwards,       // no more forwards in a step than make_pipeline() writes down
  kStagesOfRank,   // as many stages on a rank as the schedule has
  kHalves,         // no zero3 under a schedule that splits backwards
  kTensorRanks,    // some of everything for each rank along tp
  kUlysses,        // heads that cp_ulysses splits, with tp or without
  kTokenOverlap,   // no tensor_overlap = "tokens" without sequence parallelism
  kNobodyToShare,  // share_parameters = "on"
  kSamples         // no more ranks than samples in the batch
};
inline constexpr LayoutRule kFirstRule = LayoutRule::kModelRanks, kLastRule = LayoutRule::kSamples;

bool breaks(LayoutRule rule, const LayoutNumbers& layout, const ModelNumbers& model);
// The first rule, of `first` to `last`, that is broken. No allocation: some 30 ns.
std::optional<LayoutRule> broken_rule(const LayoutNumbers& layout, const ModelNumbers& model,
                                      LayoutRule first = kFirstRule, LayoutRule last = kLastRule);
ErrorText sentence(LayoutRule rule, const LayoutNumbers& layout, const ModelNumbers& model);
// ConfigError with it. check_but_devices() is this and what needs files.
void check(const LayoutNumbers& layout, const ModelNumbers& model, LayoutRule first = kFirstRule,
           LayoutRule last = kLastRule);
// The rules without which there is no grid.
void check_axes(const LayoutNumbers& layout);

// `shares_parameters` is not known here: it takes the memory of the ranks (make_plan() of build.hpp).
LayoutNumbers layout_numbers(const RunConfig& config, int ranks);
ModelNumbers model_numbers(const DecoderConfig& shape);

// The input of the formulas of kept and sent bytes, without the elements; with ep of two kinds.
// make_plan(config, ranks) of train/build.hpp is this one.
DataParallelPlan make_plan(const LayoutNumbers& layout, const ElementBytes& bytes);

}  // namespace isograd
