// The rules of layouts, and what is said where one is broken.
#include "train/rules.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "isograd/context_parallel.hpp"
#include "isograd/grid.hpp"
#include "isograd/group.hpp"
#include "parallel/context/heads.hpp"
#include "parallel/tensor/hooks.hpp"
#include "train/config_table.hpp"

namespace isograd {
namespace {

bool divides(std::int64_t parts, std::int64_t whole) { return parts >= 1 && whole % parts == 0; }

std::int64_t rounded_up(std::int64_t number, std::int64_t parts) { return (number + parts - 1) / parts; }

// Each Ulysses rank has some query heads, and some key heads or one that others have too. As
// possible_ulysses(), which lists sizes.
bool splits_heads(std::int64_t heads, std::int64_t key_heads, std::int64_t ulysses) {
  return divides(ulysses, heads) && (divides(ulysses, key_heads) || divides(key_heads, ulysses));
}

// The first table that is made has as many micro-batches as ranks, the next ones as many as a step.
std::int64_t table_micro_batches(const LayoutNumbers& layout) {
  const std::int64_t step = layout.micro_batches();
  return std::max(layout.pp, layout.schedule->whole_rounds ? rounded_up(step, layout.pp) * layout.pp : step);
}
double forwards_of(const LayoutNumbers& layout) {
  return static_cast<double>(layout.pp * layout.stages_per_rank) *
         static_cast<double>(table_micro_batches(layout));
}

// The words of the function that refuses the same where it is reached without a layout.
template <class Call>
ErrorText words_of(Call call) {
  try {
    call();
  } catch (const ConfigError& error) {
    return error.text();
  }
  ISOGRAD_INVARIANT(false, "a rule of layouts that is broken, and a function that does not refuse it");
  return {};
}

ErrorText words_of_pipeline(const LayoutNumbers& layout) {
  return words_of([&] {
    make_pipeline(layout.schedule->name, static_cast<int>(layout.pp),
                  static_cast<int>(layout.stages_per_rank), static_cast<int>(table_micro_batches(layout)));
  });
}

ErrorText words_of_axes(const LayoutNumbers& layout) {
  return words_of([&] {
    data_grid(static_cast<int>(layout.data_ranks()), {.dp_replicate = static_cast<int>(layout.replicas),
                                                      .cp_ring = static_cast<int>(layout.cp_ring),
                                                      .cp_ulysses = static_cast<int>(layout.cp_ulysses)});
  });
}

ErrorText words_of_experts(std::int64_t ep, std::int64_t experts) {
  if (experts == 0)
    return {"parallel.ep", fmt::format("{} ranks for the experts of a model that has none", ep),
            "a model.family with experts", "Leave parallel.ep out, or set model.family and model.experts"};
  return {"parallel.ep", fmt::format("{} ranks for {} experts", ep, experts),
          fmt::format("at most {}", experts), "Lower parallel.ep; more ranks fit along the other axes"};
}

ErrorText words_of_tensors(std::int64_t tp, const ModelNumbers& model) {
  auto all = model.split_over_tp;
  if (model.heads > 0) all.insert(all.begin(), {"query heads", model.heads});
  const auto few = std::ranges::find_if(all, [&](const auto& each) { return tp > each.second; });
  return {"parallel.tp", fmt::format("{} ranks for {} {}", tp, few->second, few->first),
          fmt::format("at most {}", few->second), "Lower parallel.tp; more ranks fit along the other axes"};
}

ErrorText words_of_ulysses(const LayoutNumbers& layout, const ModelNumbers& model) {
  const std::int64_t tp = layout.tp, heads = model.heads / tp, keys = model.key_heads / tp;
  const bool even = divides(tp, model.heads) && divides(tp, model.key_heads);
  const std::string rule =
      even ? fmt::format(
                 "{}: a rank along tp has {} query heads and {} key heads; cp_ulysses divides the first, "
                 "and divides the second or is a multiple of it",
                 fmt::join(possible_ulysses(heads, keys), " or "), heads, keys)
           : "a parallel.tp that divides the query heads and the key heads, which cp_ulysses divides "
             "further; or cp_ulysses = 1";
  return {"parallel.cp_ulysses",
          fmt::format("{} with parallel.tp = {}, for {} query heads and {} key heads", layout.cp_ulysses, tp,
                      model.heads, model.key_heads),
          rule, "Lower parallel.tp or parallel.cp_ulysses, or use parallel.cp_ring instead"};
}

ErrorText words_of_samples(const LayoutNumbers& layout) {
  const std::int64_t distinct = layout.sample_ranks(), most = layout.samples * (layout.ranks / distinct);
  const std::string key = fmt::format("batch.{}_per_step", layout.samples_name);
  return {fmt::format("--ranks {}", layout.ranks),
          fmt::format("more ranks than {} in the batch ({} = {}): some would never have anything to do",
                      layout.samples_name, key, layout.samples),
          fmt::format("at most {} ranks", most),
          fmt::format("Start with --ranks {}, or enlarge the batch with --set {}={}", most, key, distinct)};
}

}  // namespace

std::int64_t LayoutNumbers::data_ranks() const { return ranks / (tp * pp); }
std::int64_t LayoutNumbers::sample_ranks() const { return data_ranks() / (cp_ring * cp_ulysses); }
std::int64_t LayoutNumbers::shard_ranks() const {
  if (stage == 0) return data_ranks();  // gradients are summed over all at once
  const std::int64_t copies =
      replicas * (shards_along_ring ? 1 : cp_ring) * (shards_along_ulysses ? 1 : cp_ulysses);
  return data_ranks() / copies;
}
std::int64_t LayoutNumbers::most_samples() const { return rounded_up(samples, sample_ranks()); }
std::int64_t LayoutNumbers::micro_batches() const { return rounded_up(most_samples(), samples_at_a_time); }

bool breaks(LayoutRule rule, const LayoutNumbers& layout, const ModelNumbers& model) {
  const std::int64_t tp = layout.tp, ep = layout.ep, pp = layout.pp, ulysses = layout.cp_ulysses;
  const ScheduleFacts* schedule = layout.schedule;
  switch (rule) {
    case LayoutRule::kModelRanks: return !divides(tp * pp, layout.ranks);
    case LayoutRule::kDataAxes:
      return !divides(layout.replicas * layout.cp_ring * ulysses, layout.data_ranks());
    case LayoutRule::kExpertRanks: return !divides(ep, layout.data_ranks());
    case LayoutRule::kExperts: return ep > 1 && ep > model.experts;
    case LayoutRule::kStages: return pp > 1 && pp * layout.stages_per_rank > model.layers;
    case LayoutRule::kForwards: return schedule && forwards_of(layout) > kMostForwards;
    case LayoutRule::kStagesOfRank:
      return schedule && (layout.stages_per_rank < schedule->least_stages ||
                          (schedule->most_stages > 0 && layout.stages_per_rank > schedule->most_stages));
    case LayoutRule::kHalves: return schedule && schedule->halves && layout.stage == 3;
    case LayoutRule::kTensorRanks:
      return tp > 1 &&
             ((model.heads > 0 && tp > model.heads) ||
              std::ranges::any_of(model.split_over_tp, [&](const auto& of) { return tp > of.second; }));
    case LayoutRule::kUlysses:
      return ulysses > 1 && !(divides(tp, model.heads) && divides(tp, model.key_heads) &&
                              splits_heads(model.heads / tp, model.key_heads / tp, ulysses));
    case LayoutRule::kTokenOverlap: return tp > 1 && layout.overlaps_tokens && !layout.sequence_parallel;
    case LayoutRule::kNobodyToShare: return layout.asked_to_share && layout.shard_ranks() == 1;
    case LayoutRule::kSamples: return layout.sample_ranks() > layout.samples;
  }
  return false;
}

std::vector<std::int64_t> divisors(std::int64_t number) {
  std::vector<std::int64_t> small, large;
  for (std::int64_t n = 1; n * n <= number; ++n) {
    if (number % n != 0) continue;
    small.push_back(n);
    if (n * n != number) large.push_back(number / n);
  }
  small.insert(small.end(), large.rbegin(), large.rend());
  return small;
}

std::optional<LayoutRule> broken_rule(const LayoutNumbers& layout, const ModelNumbers& model,
                                      LayoutRule first, LayoutRule last) {
  for (auto rule = static_cast<int>(first); rule <= static_cast<int>(last); ++rule)
    if (breaks(static_cast<LayoutRule>(rule), layout, model)) return static_cast<LayoutRule>(rule);
  return std::nullopt;
}

ErrorText sentence(LayoutRule rule, const LayoutNumbers& layout, const ModelNumbers& model) {
  const std::int64_t tp = layout.tp, pp = layout.pp;
  switch (rule) {
    case LayoutRule::kModelRanks:
      return {pp == 1   ? "parallel.tp"
              : tp == 1 ? "parallel.pp"
                        : "parallel.tp times parallel.pp",
              fmt::format("{} for {} ranks", tp * pp, layout.ranks),
              fmt::format("a size that divides the ranks: {}", fmt::join(divisors(layout.ranks), ", ")),
              "Take one of these, or another number of ranks"};
    case LayoutRule::kDataAxes: return words_of_axes(layout);
    case LayoutRule::kExpertRanks:
      return {"parallel.ep",
              fmt::format("{} for {} ranks that see different tokens", layout.ep, layout.data_ranks()),
              "a size that divides them", "Change parallel.ep or the ranks"};
    case LayoutRule::kExperts: return words_of_experts(layout.ep, model.experts);
    case LayoutRule::kStages:
      return {"parallel.pp",
              fmt::format("{} stages for {} layers", pp * layout.stages_per_rank, model.layers),
              "a layer for each stage, or more", "Lower parallel.pp or parallel.stages_per_rank"};
    case LayoutRule::kForwards:
    case LayoutRule::kStagesOfRank: return words_of_pipeline(layout);
    case LayoutRule::kHalves:
      return {"parallel.schedule",
              fmt::format("{} under zero3, whose units compute gradients of weights with the others",
                          layout.schedule->name),
              "a schedule of whole backwards, or a strategy that keeps parameters whole",
              "Set parallel.schedule = \"1f1b\" (or \"interleaved\"), or parallel.strategy = \"zero2\""};
    case LayoutRule::kTensorRanks: return words_of_tensors(tp, model);
    case LayoutRule::kUlysses:
      if (tp > 1) return words_of_ulysses(layout, model);
      return words_of([&] { check_ulysses(layout.cp_ulysses, model.heads, model.key_heads); });
    case LayoutRule::kTokenOverlap:
      return words_of([] { check({.sequence_parallel = false, .overlap = TensorOverlap::kTokens}); });
    case LayoutRule::kNobodyToShare:
      return {"parallel.share_parameters",
              fmt::format("\"on\" for {}, of which none has another one's parameters",
                          layout.ranks == 1 ? "one rank" : fmt::format("{} ranks", layout.ranks)),
              "ranks along an axis that the strategy spreads parameters or their sums over",
              "Leave it out (\"auto\" shares wherever there are ranks to share with)"};
    case LayoutRule::kSamples: return words_of_samples(layout);
  }
  return {};
}

void check(const LayoutNumbers& layout, const ModelNumbers& model, LayoutRule first, LayoutRule last) {
  if (const auto rule = broken_rule(layout, model, first, last))
    throw ConfigError(sentence(*rule, layout, model));
}

void check_axes(const LayoutNumbers& layout) {
  check(layout, {}, LayoutRule::kModelRanks, LayoutRule::kExpertRanks);
}

LayoutNumbers layout_numbers(const RunConfig& config, int ranks) {
  const auto& parallel = config.parallel;
  const TaskKind& kind = kind_of(config);
  const AxisSet sharded = sharded_axes(config);
  return {.ranks = ranks,
          .replicas = parallel.replicas,
          .cp_ring = parallel.cp_ring,
          .cp_ulysses = parallel.cp_ulysses,
          .tp = parallel.tp,
          .ep = parallel.ep,
          .pp = parallel.pp,
          .stages_per_rank = parallel.stages_per_rank,
          .stage = stage_of(parallel.strategy),
          .shards_along_ring = sharded.contains("cp_ring"),
          .shards_along_ulysses = sharded.contains("cp_ulysses"),
          .asked_to_share = parallel.share_parameters == "on",
          .sequence_parallel = parallel.sequence_parallel,
          .overlaps_tokens = kind.cuts_tokens && parallel.tensor_overlap == "tokens",
          .reduce_once = parallel.reduce_once,
          .schedule = parallel.pp > 1 ? &schedule_named(parallel.schedule) : nullptr,
          .samples = kind.samples_per_step(config),
          .samples_at_a_time = config.batch.packs_per_micro_batch,
          .samples_name = kind.samples};
}

ModelNumbers model_numbers(const DecoderConfig& shape) {
  ModelNumbers model{.layers = shape.layers,
                     .heads = shape.heads,
                     .key_heads = shape.key_value_heads,
                     .experts = shape.experts.count,
                     .split_over_tp = {{"tokens of the vocabulary", shape.vocabulary}}};
  bool dense = false, experts = false;  // in some layer
  for (std::int64_t layer = 0; layer < shape.layers; ++layer)
    (shape.has_experts(layer) ? experts : dense) = true;
  if (dense) model.split_over_tp.emplace_back("features of the feed-forward network", shape.feed_forward);
  if (experts) model.split_over_tp.emplace_back("features of an expert", shape.experts.feed_forward);
  if (experts && shape.experts.shared_feed_forward > 0)
    model.split_over_tp.emplace_back("features of the shared expert", shape.experts.shared_feed_forward);
  return model;
}

DataParallelPlan make_plan(const LayoutNumbers& layout, const ElementBytes& bytes) {
  const std::int64_t shards = layout.shard_ranks(), data = layout.data_ranks();
  DataParallelPlan plan{
      .elements = {{.shards = static_cast<int>(shards), .replicas = static_cast<int>(data / shards)}},
      .bytes = bytes,
      .stage = layout.stage,
      .share_parameters = data > 1 && layout.shares_parameters,
      .reduce_once = layout.reduce_once,
      .micro_batches = layout.micro_batches()};
  if (layout.ep > 1) plan.elements.push_back({.shards = static_cast<int>(data / layout.ep)});
  return plan;
}

}  // namespace isograd
