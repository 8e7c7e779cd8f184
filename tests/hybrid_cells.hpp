// The cells of the sweep over combined axes: factors, which of their values go together, and the
// configuration of a cell, as `isograd train` reads it.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "covering.hpp"
#include "train/config.hpp"

namespace isograd::hybrid {

// Axes first: they restrict the others.
enum Which : std::size_t {
  kPp,
  kReplicate,
  kShard,
  kRing,
  kUlysses,
  kTp,
  kEp,
  kModel,
  kStrategy,
  kSchedule,
  kShare,
  kSpread,
  kMean,
  kPacks,
  kTokens,
  kLoss,
  kFactors
};

inline const std::vector<covering::Factor>& factors() {
  static const std::vector<covering::Factor> all = {
      {"pp", {"1", "2", "3", "4"}},
      {"dp_replicate", {"1", "2", "3", "4"}},
      {"dp_shard", {"1", "2", "3", "4"}},
      {"cp_ring", {"1", "2", "3", "4"}},
      {"cp_ulysses", {"1", "2", "4"}},
      {"tp", {"1", "2", "3", "4"}},
      {"ep", {"1", "2", "3", "4"}},
      {"model", {"dense", "biased", "tied", "experts", "sigmoid", "video"}},
      {"strategy",
       {"bucketed", "naive", "overlapped", "zero1", "zero2", "zero2-once", "zero3", "zero3-once",
        "zero3-checkpointed", "zero3-kept"}},
      {"schedule", {"none", "1f1b", "gpipe", "one-after-another", "interleaved", "zb-h1", "zb-v"}},
      {"share", {"off", "on"}},
      {"cp_fsdp_mode", {"all", "none", "ring_only", "ulysses_only"}},
      {"mean", {"token_mean", "sample_mean", "fixed"}},
      {"packs", {"2", "1", "9"}},    // of a micro-batch
      {"tokens", {"cut", "whole"}},  // along tp, between the products
      {"loss", {"apart", "fused"}}};
  return all;
}

inline constexpr int kRanks = 8;  // of the largest mesh of the covering arrays
inline constexpr int kHeads = 8, kKeyHeads = 2, kExperts = 8;

struct Cell {
  covering::Row row = covering::Row(kFactors, 0);
  std::string dtype = "float64";

  const std::string& text(Which f) const { return factors()[f].values[static_cast<std::size_t>(row[f])]; }
  bool is(Which f, const std::string& value) const { return text(f) == value; }
  int number(Which f) const { return std::stoi(text(f)); }
  int data() const { return number(kReplicate) * number(kShard) * number(kRing) * number(kUlysses); }
  int ranks() const { return number(kPp) * data() * number(kTp); }
  int stages() const { return number(kPp) * (is(kSchedule, "interleaved") || is(kSchedule, "zb-v") ? 2 : 1); }
  std::string strategy() const { return text(kStrategy).substr(0, text(kStrategy).find('-')); }
  bool shards() const { return strategy().starts_with("zero"); }
  bool has_experts() const { return is(kModel, "experts") || is(kModel, "sigmoid"); }
  // With this value in place of its own: "tp", "2".
  Cell with(Which f, const std::string& value) const {
    Cell other = *this;
    const auto& values = factors()[f].values;
    const auto place = std::find(values.begin(), values.end(), value);
    if (place == values.end()) throw std::logic_error(fmt::format("no {} {}", factors()[f].name, value));
    other.row[f] = static_cast<int>(place - values.begin());
    return other;
  }
  // Factors that have another value than their first.
  std::string name() const {
    std::string all = dtype == "float64" ? "" : dtype + " ";
    for (std::size_t f = 0; f < kFactors; ++f)
      if (row[f] > 0) all += fmt::format("{}={} ", factors()[f].name, text(static_cast<Which>(f)));
    return all.empty() ? "one process" : all.substr(0, all.size() - 1);
  }
};

// The known values of a row that is not complete.
struct Known {
  const covering::Row& row;
  bool said(Which f) const { return row[f] >= 0; }
  bool is(Which f, std::initializer_list<const char*> values) const {
    if (!said(f)) return false;
    const std::string& own = factors()[f].values[static_cast<std::size_t>(row[f])];
    return std::find(values.begin(), values.end(), own) != values.end();
  }
  int number(Which f) const {  // 1 where it is not said
    return said(f) ? std::stoi(factors()[f].values[static_cast<std::size_t>(row[f])]) : 1;
  }
  bool above_one(Which f) const { return said(f) && number(f) > 1; }
  bool one(Which f) const { return said(f) && number(f) == 1; }
  int data() const { return number(kReplicate) * number(kShard) * number(kRing) * number(kUlysses); }
  bool shards() const { return said(kStrategy) && !is(kStrategy, {"bucketed", "naive", "overlapped"}); }
};

// Why values do not go together. With `refused`: what a refusal of it says, and the nearest that is possible.
// Without: nothing is wrong, but the cell is too large, or with `same` the same as another.
struct Rule {
  const char* what;
  std::function<bool(const Known&)> broken;  // whatever else is said
  std::vector<const char*> refused{};
  bool same = false;
};

inline bool ulysses_fits(int heads, int key_heads, int tp, int ulysses) {
  if (tp == 1 || ulysses == 1) return true;
  if (heads % tp != 0 || key_heads % tp != 0) return false;
  const int own = heads / tp, keys = key_heads / tp;
  return own % ulysses == 0 && (keys % ulysses == 0 || ulysses % keys == 0);
}

inline bool too_large(const Known& k, int ranks) {
  return std::lcm(k.data(), k.number(kEp)) * k.number(kPp) * k.number(kTp) > ranks;
}

inline const std::vector<Rule>& rules() {
  static const std::vector<Rule> all = {
      {"more ranks than the sweep has", [](const Known& k) { return too_large(k, kRanks); }},
      {"ep that does not divide the data ranks",
       [](const Known& k) {
         return k.said(kReplicate) && k.said(kShard) && k.said(kRing) && k.said(kUlysses) &&
                k.data() % k.number(kEp) != 0;
       },
       {"parallel.ep", "ranks that see different tokens", "a size that divides them"}},
      {"ep without experts",
       [](const Known& k) {
         return k.above_one(kEp) && k.is(kModel, {"dense", "biased", "tied"});
       },
       {"parallel.ep", "a model that has none", "a model.family with experts"}},
      {"ep of videos",
       [](const Known& k) { return k.above_one(kEp) && k.is(kModel, {"video"}); },
       {"parallel.ep", "has no effect", "Leave parallel.ep out"}},
      {"stages of videos",
       [](const Known& k) { return k.above_one(kPp) && k.is(kModel, {"video"}); },
       {"parallel.pp", "stages are a decoder's", "Leave parallel.pp out"}},
      {"stages without a schedule",
       [](const Known& k) { return k.above_one(kPp) && k.is(kSchedule, {"none"}); }},
      {"a schedule without stages",
       [](const Known& k) {
         return k.one(kPp) && k.said(kSchedule) && !k.is(kSchedule, {"none", "1f1b"});
       },
       {"has no effect: parallel.pp is 1", "Leave parallel."}},
      {"the usual schedule without stages",
       [](const Known& k) { return k.one(kPp) && k.is(kSchedule, {"1f1b"}); },
       {},
       true},
      {"halves of backwards under zero3",
       [](const Known& k) {
         return k.is(kSchedule, {"zb-h1", "zb-v"}) &&
                k.is(kStrategy, {"zero3", "zero3-once", "zero3-checkpointed", "zero3-kept"});
       },
       {"parallel.schedule", "under zero3", "1f1b", "zero2"}},
      {"shards of what is not sharded",  // all ranks are replicas
       [](const Known& k) { return k.said(kStrategy) && !k.shards() && k.above_one(kShard); },
       {},
       true},
      {"one copy under naive",
       [](const Known& k) { return k.is(kShare, {"on"}) && k.is(kStrategy, {"naive"}); },
       {"parallel.share_parameters", "naive", "bucketed"}},
      {"one copy of nobody else's",
       [](const Known& k) {
         if (!k.is(kShare, {"on"})) return false;
         const bool data =
             k.above_one(kReplicate) || k.above_one(kShard) || k.above_one(kRing) || k.above_one(kUlysses);
         const bool open = !k.said(kReplicate) || !k.said(kShard) || !k.said(kRing) || !k.said(kUlysses) ||
                           !k.said(kStrategy) || !k.said(kSpread);
         if (open) return false;
         if (!k.shards()) return !data;
         const bool ring = k.above_one(kRing) && k.is(kSpread, {"all", "ring_only"});
         const bool ulysses = k.above_one(kUlysses) && k.is(kSpread, {"all", "ulysses_only"});
         return !k.above_one(kShard) && !ring && !ulysses;
       },
       {"parallel.share_parameters", "none has another one's", "\"auto\" shares wherever"}},
      {"axes of shards without shards",
       [](const Known& k) {
         return k.said(kStrategy) && !k.shards() && k.said(kSpread) && !k.is(kSpread, {"all"});
       },
       {"parallel.cp_fsdp_mode", "has no effect", "does not shard", "Leave parallel.cp_fsdp_mode out"}},
      {"axes of shards that are not there",
       [](const Known& k) {
         if (k.said(kStrategy) && !k.shards()) return false;
         if (k.is(kSpread, {"ring_only", "ulysses_only"})) return k.one(kRing) || k.one(kUlysses);
         return k.is(kSpread, {"none"}) && k.one(kRing) && k.one(kUlysses);
       },
       {},
       true},
      {"heads that tp does not split evenly before Ulysses",
       [](const Known& k) {
         if (!k.said(kModel)) return !ulysses_fits(kHeads, kHeads, k.number(kTp), k.number(kUlysses));
         const int keys = k.is(kModel, {"video"}) ? kHeads : kKeyHeads;
         return !ulysses_fits(kHeads, keys, k.number(kTp), k.number(kUlysses));
       },
       {"parallel.cp_ulysses", "with parallel.tp", "parallel.cp_ring"}},
      {"whole tokens without tp",
       [](const Known& k) { return k.one(kTp) && k.is(kTokens, {"whole"}); },
       {"parallel.sequence_parallel", "has no effect: parallel.tp is 1"}},
      {"a fused loss of videos",
       [](const Known& k) { return k.is(kLoss, {"fused"}) && k.is(kModel, {"video"}); },
       {"loss.fused", "has no effect", "Leave loss.fused out"}}};
  return all;
}

inline const Rule* broken_rule(const covering::Row& row) {
  for (const Rule& rule : rules())
    if (rule.broken({row})) return &rule;
  return nullptr;
}
inline bool possible(const covering::Row& row) { return broken_rule(row) == nullptr; }
// Whether it runs on so many ranks at most, though it may be the same as another.
inline bool runs(const covering::Row& row, int ranks = kRanks) {
  const Rule* const size = &rules().front();
  for (const Rule& rule : rules())
    if (&rule != size && !rule.same && rule.broken({row})) return false;
  return !too_large({row}, ranks);
}

// `base` with what the cell says. `base` is of text, or for a cell of videos of videos.
inline RunConfig config_of(const Cell& cell, RunConfig base) {
  auto& shape = base.model.shape;
  shape.hidden = 16, shape.heads = kHeads, shape.feed_forward = 20;
  if (cell.is(kModel, "video")) {
    shape.head_dim = 4, shape.layers = 2;
    shape.key_value_heads = DecoderConfig{}.key_value_heads;  // it has none
    shape.max_positions = DecoderConfig{}.max_positions;
  } else {
    shape.head_dim = 4, shape.key_value_heads = kKeyHeads;
    shape.layers = std::max(cell.is(kModel, "experts") ? 4 : 3, cell.stages());  // two that have experts
    shape.initializer_range = 0.3;
    base.loss.fused = "off";
  }
  if (cell.is(kLoss, "fused")) base.loss.fused = "on";
  if (cell.is(kModel, "dense")) shape.family = "qwen3", shape.query_key_norm = true;
  if (cell.is(kModel, "biased"))
    shape.attention_bias = shape.output_bias = shape.mlp_bias = true;  // Llama with every bias
  if (cell.is(kModel, "tied")) shape.tied_output = true, shape.pad = 99;
  if (cell.has_experts()) {
    shape.query_key_norm = true;
    shape.family = "qwen3_moe";
    shape.experts = {.count = kExperts, .per_token = 2, .feed_forward = 7, .normalise = false};
    base.model.experts_every = 2;
    base.loss.balance = 0.1, base.loss.router_z = 0.01;
  }
  if (cell.is(kModel, "sigmoid")) {
    shape.family = "dots1";
    shape.experts.normalise = true, shape.experts.shared_feed_forward = 14, shape.experts.scale = 2.5;
    shape.experts.groups = 4, shape.experts.groups_per_token = 2;
    base.model.experts_every = 1, base.model.dense_layers = 1;
    base.loss.router_z = 0;
  }
  base.loss.kind = cell.text(kMean);
  base.loss.denominator = cell.is(kMean, "fixed") ? 50 : 0;
  if (cell.is(kModel, "video"))  // alone, some together, all
    base.batch.tokens_per_micro_batch = cell.is(kPacks, "1") ? 1 : cell.is(kPacks, "2") ? 40 : 1000;
  else
    base.batch.packs_per_micro_batch = cell.number(kPacks);
  auto& parallel = base.parallel;
  parallel.strategy = cell.strategy();
  parallel.replicas = cell.shards() ? cell.number(kReplicate) : 1;
  parallel.reduce_once = cell.text(kStrategy).ends_with("-once");
  parallel.checkpoint_activations = cell.is(kStrategy, "zero3-checkpointed");
  parallel.reshard_after_forward = !cell.is(kStrategy, "zero3-kept");
  parallel.cp_ring = cell.number(kRing), parallel.cp_ulysses = cell.number(kUlysses);
  parallel.tp = cell.number(kTp), parallel.ep = cell.number(kEp), parallel.pp = cell.number(kPp);
  parallel.sequence_parallel = cell.is(kTokens, "cut");
  if (parallel.tp > 1 && cell.is(kLoss, "fused"))
    parallel.tensor_overlap = parallel.sequence_parallel ? "tokens" : "weights";
  if (!cell.is(kSchedule, "none")) {
    parallel.schedule = cell.text(kSchedule);
    parallel.stages_per_rank = cell.stages() / cell.number(kPp);
  }
  parallel.share_parameters = cell.text(kShare);
  parallel.cp_fsdp_mode = cell.text(kSpread);
  base.train.dtype = cell.dtype;
  return base;
}

}  // namespace isograd::hybrid
