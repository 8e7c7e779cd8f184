// Rules of layouts: their sentences, and that they accept what grids, placements and tables accept.
#include "train/rules.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>

#include "base/error_testing.hpp"
#include "isograd/context_parallel.hpp"
#include "isograd/grid.hpp"
#include "isograd/group.hpp"
#include "train/build.hpp"

namespace isograd {
namespace {

using error_testing::error_of;

struct Asked {
  RunConfig config{};
  int ranks = 1;
};

ModelNumbers numbers_of(const Asked& asked) { return model_numbers(configured_shape(asked.config)); }

// ---- words ----

// The message in full, as it was before the rules had a file of their own.
struct Sentence {
  LayoutRule rule;
  int ranks;
  std::function<void(RunConfig&)> change;
  const char* text;
};

void give_experts(RunConfig& config) {
  config.model.shape.family = "qwen3_moe";
  config.model.shape.experts = {.count = 4, .per_token = 2, .feed_forward = 32};
}

const std::vector<Sentence>& sentences() {
  using enum LayoutRule;
  static const std::vector<Sentence> all = {
      {kModelRanks, 4, [](RunConfig& c) { c.parallel.tp = 3; },
       "parallel.tp: found 3 for 4 ranks; expected a size that divides the ranks: 1, 2, 4. Take one of these, or another "
       "number of ranks"},
      {kModelRanks, 3, [](RunConfig& c) { c.parallel.pp = 2; },
       "parallel.pp: found 2 for 3 ranks; expected a size that divides the ranks: 1, 3. Take one of these, or another "
       "number of ranks"},
      {kModelRanks, 6, [](RunConfig& c) { c.parallel.tp = c.parallel.pp = 2; },
       "parallel.tp times parallel.pp: found 4 for 6 ranks; expected a size that divides the ranks: 1, 2, 3, "
       "6. Take one of these, or another number of ranks"},
      {kDataAxes, 8, [](RunConfig& c) { c.parallel.tp = 2, c.parallel.cp_ring = 3; },
       "the axes of the ranks: found dp_replicate 1 x cp_ring 3 x cp_ulysses 1 for 4 ranks; expected sizes of "
       "1 or more whose product divides the ranks: 1, 2, 4. Change parallel.replicas, parallel.cp_ring, "
       "parallel.cp_ulysses or the ranks"},
      {kExpertRanks, 3, [](RunConfig& c) { give_experts(c), c.parallel.ep = 2; },
       "parallel.ep: found 2 for 3 ranks that see different tokens; expected a size that divides them. Change "
       "parallel.ep or the ranks"},
      {kExperts, 2, [](RunConfig& c) { c.parallel.ep = 2; },
       "parallel.ep: found 2 ranks for the experts of a model that has none; expected a model.family with "
       "experts. Leave parallel.ep out, or set model.family and model.experts"},
      {kExperts, 5, [](RunConfig& c) { give_experts(c), c.parallel.ep = 5; },
       "parallel.ep: found 5 ranks for 4 experts; expected at most 4. Lower parallel.ep; more ranks fit along "
       "the other axes"},
      {kStages, 6, [](RunConfig& c) { c.parallel.pp = 6; },
       "parallel.pp: found 6 stages for 4 layers; expected a layer for each stage, or more. Lower parallel.pp "
       "or parallel.stages_per_rank"},
      {kForwards, 2001, [](RunConfig& c) { c.parallel.pp = 2001, c.model.shape.layers = 4000; },
       "the schedule 1f1b: found 2001 ranks, 1 stages on each and 2001 micro-batches: 4004001 forwards; "
       "expected at most 4000000 forwards. Ask for fewer stages or micro-batches"},
      {kStagesOfRank, 2, [](RunConfig& c) { c.parallel.pp = 2, c.parallel.schedule = "zb-v"; },
       "the schedule zb-v: found 1 stages on each rank; expected 2. Give each rank as many, or take another "
       "schedule"},
      {kStagesOfRank, 2, [](RunConfig& c) { c.parallel.pp = 2, c.parallel.schedule = "interleaved"; },
       "the schedule interleaved: found 1 stages on each rank; expected 2 or more. Give each rank as many, or "
       "take another schedule"},
      {kHalves, 2,
       [](RunConfig& c) { c.parallel.pp = 2, c.parallel.schedule = "zb-h1", c.parallel.strategy = "zero3"; },
       "parallel.schedule: found zb-h1 under zero3, whose units compute gradients of weights with the others; "
       "expected a schedule of whole backwards, or a strategy that keeps parameters whole. Set "
       "parallel.schedule = \"1f1b\" (or \"interleaved\"), or parallel.strategy = \"zero2\""},
      {kTensorRanks, 5, [](RunConfig& c) { c.parallel.tp = 5; },
       "parallel.tp: found 5 ranks for 4 query heads; expected at most 4. Lower parallel.tp; more ranks fit "
       "along the other axes"},
      {kTensorRanks, 2,
       [](RunConfig& c) { give_experts(c), c.parallel.tp = 2, c.model.shape.experts.feed_forward = 1; },
       "parallel.tp: found 2 ranks for 1 features of an expert; expected at most 1. Lower parallel.tp; more "
       "ranks fit along the other axes"},
      {kUlysses, 8, [](RunConfig& c) { c.parallel.tp = 2, c.parallel.cp_ulysses = 4; },
       "parallel.cp_ulysses: found 4 with parallel.tp = 2, for 4 query heads and 4 key heads; expected 1 or "
       "2: a rank along tp has 2 query heads and 2 key heads; cp_ulysses divides the first, and divides the "
       "second or is a multiple of it. Lower parallel.tp or parallel.cp_ulysses, or use parallel.cp_ring "
       "instead"},
      {kUlysses, 6, [](RunConfig& c) { c.parallel.tp = 3, c.parallel.cp_ulysses = 2; },
       "parallel.cp_ulysses: found 2 with parallel.tp = 3, for 4 query heads and 4 key heads; expected a "
       "parallel.tp that divides the query heads and the key heads, which cp_ulysses divides further; or "
       "cp_ulysses = 1. Lower parallel.tp or parallel.cp_ulysses, or use parallel.cp_ring instead"},
      {kForwards, 4,
       [](RunConfig& c) {
         c.parallel.pp = 4, c.parallel.schedule = "interleaved", c.parallel.stages_per_rank = 2;
         c.model.shape.layers = 8, c.batch.packs_per_step = 500001, c.batch.packs_per_micro_batch = 1;
       },
       "the schedule interleaved: found 4 ranks, 2 stages on each and 500004 micro-batches: 4000032 forwards; "
       "expected at most 4000000 forwards. Ask for fewer stages or micro-batches"},
      {kUlysses, 8,
       [](RunConfig& c) {
         c.parallel.cp_ulysses = 8, c.model.shape.heads = 12, c.model.shape.key_value_heads = 4;
       },
       "attention over context ranks: found cp_ulysses 8 for 12 query heads and 4 key heads; expected a size "
       "that divides the query heads, and the key heads or is a multiple of them: one of 1, 2, 4, 12. Use "
       "cp_ulysses 4 or 12, and cp_ring for the rest"},
      {kUlysses, 3, [](RunConfig& c) { c.model.kind = "video", c.parallel.cp_ulysses = 3; },
       "attention over context ranks: found cp_ulysses 3 for 4 query heads and 4 key heads; expected a size "
       "that divides the query heads, and the key heads or is a multiple of them: one of 1, 2, 4. Use "
       "cp_ulysses 2 or 4, and cp_ring for the rest"},
      {kTokenOverlap, 2,
       [](RunConfig& c) {
         c.parallel.tp = 2, c.parallel.sequence_parallel = false, c.parallel.tensor_overlap = "tokens";
       },
       "parallel.tensor_overlap: found tokens, and parallel.sequence_parallel off; expected tokens that are "
       "split between the products. Choose weights or none, or turn it on"},
      {kNobodyToShare, 1, [](RunConfig& c) { c.parallel.share_parameters = "on"; },
       "parallel.share_parameters: found \"on\" for one rank, of which none has another one's parameters; "
       "expected ranks along an axis that the strategy spreads parameters or their sums over. Leave it out "
       "(\"auto\" shares wherever there are ranks to share with)"},
      {kNobodyToShare, 2,
       [](RunConfig& c) {
         c.parallel.share_parameters = "on", c.parallel.strategy = "zero1", c.parallel.replicas = 2;
       },
       "parallel.share_parameters: found \"on\" for 2 ranks, of which none has another one's parameters; "
       "expected ranks along an axis that the strategy spreads parameters or their sums over. Leave it out "
       "(\"auto\" shares wherever there are ranks to share with)"},
      {kSamples, 20, [](RunConfig& c) { c.parallel.tp = 2; },
       "--ranks 20: found more ranks than packs in the batch (batch.packs_per_step = 8): some would never "
       "have anything to do; expected at most 16 ranks. Start with --ranks 16, or enlarge the batch with "
       "--set batch.packs_per_step=10"},
      {kSamples, 9, [](RunConfig& c) { c.model.kind = "video"; },
       "--ranks 9: found more ranks than videos in the batch (batch.videos_per_step = 8): some would never "
       "have anything to do; expected at most 8 ranks. Start with --ranks 8, or enlarge the batch with --set "
       "batch.videos_per_step=9"}};
  return all;
}

TEST(LayoutRules, SayWhatTheyAlwaysSaid) {
  std::set<LayoutRule> seen;
  for (const Sentence& each : sentences()) {
    Asked asked{.ranks = each.ranks};
    each.change(asked.config);
    EXPECT_EQ(error_of([&] { check_but_devices(asked.config, asked.ranks); }),
              fmt::format("ConfigError: {}.", each.text));
    const LayoutNumbers layout = layout_numbers(asked.config, asked.ranks);
    EXPECT_EQ(broken_rule(layout, numbers_of(asked)), each.rule) << each.text;
    seen.insert(each.rule);
  }
  for (auto rule = static_cast<int>(kFirstRule); rule <= static_cast<int>(kLastRule); ++rule)
    EXPECT_TRUE(seen.contains(static_cast<LayoutRule>(rule))) << rule;
}

// ---- what is accepted ----

bool has_none(const std::vector<std::int64_t>& parts) { return std::ranges::count(parts, 0) > 0; }

bool can_split(std::int64_t number, std::int64_t parts) {
  return !has_none(split_rows(number, static_cast<int>(parts)));
}

// By making what ranks have: the grid, its views, a table, stages, rows of each rank. Throws ConfigError, or
// returns false.
bool is_possible(const Asked& asked) {
  const auto& parallel = asked.config.parallel;
  const DecoderConfig& shape = asked.config.model.shape;
  const auto number = [](std::int64_t of) { return static_cast<int>(of); };
  const int pp = number(parallel.pp), tp = number(parallel.tp);
  const Grid outer({{"pp", pp}, {"rest", asked.ranks / pp / tp}, {"tp", tp}}, asked.ranks);
  const Grid data = data_grid(outer.size({"rest"}), {.dp_replicate = number(parallel.replicas),
                                                     .cp_ring = number(parallel.cp_ring),
                                                     .cp_ulysses = number(parallel.cp_ulysses)});
  const int data_ranks = data.ranks(), ep = number(parallel.ep);
  data.viewed(kDataAxes, {{"edp", data_ranks / ep}, {"ep", ep}});
  if (ep > 1 && !can_split(shape.experts.count, ep)) return false;
  const std::vector<std::int64_t> samples =
      split_rows(asked.config.batch.packs_per_step, data.size(kSampleAxes));
  if (has_none(samples)) return false;
  if (pp > 1) {
    const auto each = number(parallel.stages_per_rank);
    assign_layers(std::vector<double>(static_cast<std::size_t>(shape.layers), 1), pp * each);
    const PipelineTable table = make_pipeline(parallel.schedule, pp, each, pp);
    const std::int64_t at_a_time = asked.config.batch.packs_per_micro_batch;
    std::int64_t step = samples[0] / at_a_time + (samples[0] % at_a_time > 0);
    while (parallel.schedule == "interleaved" && step % pp != 0) ++step;
    make_pipeline(parallel.schedule, pp, each, number(step));
    if (has_halves(table) && parallel.strategy == "zero3") return false;
  }
  std::vector<std::int64_t> split{shape.heads, shape.vocabulary};
  for (std::int64_t layer = 0; layer < shape.layers; ++layer)
    split.push_back(configured_shape(asked.config).has_experts(layer) ? shape.experts.feed_forward
                                                                      : shape.feed_forward);
  if (!std::ranges::all_of(split, [&](std::int64_t of) { return can_split(of, tp); })) return false;
  const auto heads = split_rows(shape.heads, tp), keys = split_rows(shape.key_value_heads, tp);
  if (parallel.cp_ulysses > 1) {
    if (heads.front() != heads.back() || keys.front() != keys.back()) return false;
    const auto possible = possible_ulysses(heads.front(), keys.front());
    if (std::ranges::find(possible, parallel.cp_ulysses) == possible.end()) return false;
  }
  if (tp > 1 && !parallel.sequence_parallel && parallel.tensor_overlap == "tokens") return false;
  AxisSet shared = kDataAxes;
  if (parallel.strategy != "bucketed") {
    shared = {"dp_shard"};
    if (parallel.cp_fsdp_mode == "all" || parallel.cp_fsdp_mode == "ring_only") shared.insert("cp_ring");
    if (parallel.cp_fsdp_mode == "all" || parallel.cp_fsdp_mode == "ulysses_only")
      shared.insert("cp_ulysses");
  }
  return parallel.share_parameters != "on" || data.size(shared) > 1;
}

bool accepted_by_parts(const Asked& asked) {
  try {
    return is_possible(asked);
  } catch (const ConfigError&) {
    return false;
  }
}

template <class List>
auto one_of(std::mt19937_64& draw, const List& list) {
  return std::data(list)[draw() % std::size(list)];
}

// Mostly of axes that divide the ranks, so that the later rules are reached.
Asked drawn(std::mt19937_64& draw) {
  const auto pick = [&](std::initializer_list<int> list) { return one_of(draw, list); };
  Asked asked;
  auto& parallel = asked.config.parallel;
  DecoderConfig& shape = asked.config.model.shape;
  shape.heads = pick({2, 3, 4, 6, 8, 12}), shape.key_value_heads = shape.heads / pick({1, 1, 2});
  shape.layers = pick({1, 2, 4, 6, 12}), shape.feed_forward = pick({1, 24, 704});
  shape.vocabulary = pick({2, 258});
  if (pick({0, 1})) {
    give_experts(asked.config);
    shape.experts.count = pick({2, 4, 6, 64}), shape.experts.feed_forward = pick({1, 8, 24});
    asked.config.model.experts_every = pick({1, 2});
  }
  parallel.tp = pick({1, 1, 1, 2, 3, 4}), parallel.pp = pick({1, 1, 2, 3, 4});
  parallel.cp_ring = pick({1, 1, 2, 3}), parallel.cp_ulysses = pick({1, 1, 2, 3});
  parallel.strategy = one_of(draw, std::array{"bucketed", "zero1", "zero2", "zero3"});
  if (parallel.strategy != "bucketed") parallel.replicas = pick({1, 1, 2});
  const int shards = pick({1, 1, 2, 3, 5});
  const std::int64_t data = parallel.cp_ring * parallel.cp_ulysses * parallel.replicas * shards;
  parallel.ep = pick({0, 1, 1}) == 0 ? pick({2, 3, 4}) : 1;
  if (parallel.ep > 1 && pick({0, 1})) parallel.ep = data;
  asked.ranks = static_cast<int>(parallel.tp * parallel.pp * data) + (pick({0, 0, 0, 0, 0, 1}));
  if (parallel.pp > 1) {
    parallel.schedule = one_of(draw, pipeline_schedules());
    parallel.stages_per_rank = pick({1, 1, 2, 2, 3});
    if (pick({0, 1})) shape.layers = parallel.pp * parallel.stages_per_rank;
  }
  parallel.share_parameters = one_of(draw, std::array{"auto", "off", "on"});
  if (parallel.strategy != "bucketed")
    parallel.cp_fsdp_mode = one_of(draw, std::array{"all", "all", "none", "ring_only", "ulysses_only"});
  parallel.sequence_parallel = pick({0, 1, 1, 1}) == 1;
  parallel.tensor_overlap = one_of(draw, std::array{"none", "weights", "tokens"});
  asked.config.batch.packs_per_step = pick({1, 4, 8, 64, 64, 64, 64, 1 << 30});
  asked.config.batch.packs_per_micro_batch = pick({1, 2});
  return asked;
}

std::string text_of(const Asked& asked) {
  const auto& p = asked.config.parallel;
  return fmt::format("{} ranks: replicas {} ring {} ulysses {} tp {} ep {} pp {} x {} {} {}", asked.ranks,
                     p.replicas, p.cp_ring, p.cp_ulysses, p.tp, p.ep, p.pp, p.stages_per_rank, p.schedule,
                     p.strategy);
}

// Whether all rules but one accept it.
bool accepted_without(LayoutRule left_out, const LayoutNumbers& layout, const ModelNumbers& model) {
  for (auto rule = static_cast<int>(kFirstRule); rule <= static_cast<int>(kLastRule); ++rule)
    if (static_cast<LayoutRule>(rule) != left_out && breaks(static_cast<LayoutRule>(rule), layout, model))
      return false;
  return true;
}

TEST(LayoutRules, AcceptWhatRanksCanHave) {
  constexpr std::uint64_t kSeed = 49;
  constexpr int kDraws = 200;
  std::mt19937_64 draw(kSeed);
  int accepted = 0;
  std::map<LayoutRule, int> only;  // accepted if this rule were left out
  for (int i = 0; i < kDraws || only.size() < static_cast<std::size_t>(kLastRule) + 1; ++i) {
    ASSERT_LT(i, 100 * kDraws) << "rules that nothing breaks alone";
    const Asked asked = drawn(draw);
    const LayoutNumbers layout = layout_numbers(asked.config, asked.ranks);
    const ModelNumbers model = numbers_of(asked);
    const auto rule = broken_rule(layout, model);
    const std::string error = error_of([&] { check_but_devices(asked.config, asked.ranks); });
    ASSERT_EQ(rule ? ConfigError(sentence(*rule, layout, model)).what() : std::string("no error"), error)
        << text_of(asked) << " seed " << kSeed;
    ASSERT_EQ(!rule, accepted_by_parts(asked)) << text_of(asked) << " seed " << kSeed << ": " << error;
    accepted += !rule;
    if (rule && accepted_without(*rule, layout, model)) ++only[*rule];
  }
  EXPECT_GT(accepted, kDraws / 10);
  std::printf("seed %lu: %d of the layouts are accepted; left out, each rule lets others pass\n",
              static_cast<unsigned long>(kSeed), accepted);
}

// The bytes that are predicted come from the same numbers.
TEST(LayoutRules, GiveThePlanOfAGrid) {
  std::mt19937_64 draw(7);
  for (int left = 50; left > 0;) {
    const Asked asked = drawn(draw);
    if (error_of([&] { check_but_devices(asked.config, asked.ranks); }) != "no error") continue;
    --left;
    const Grid grid = grid_of(asked.config, asked.ranks);
    const AxisSet sharded = sharded_axes(asked.config);
    const DataParallelPlan plan = make_plan(asked.config, RanksOfRun(asked.ranks, true));
    EXPECT_EQ(plan.elements[0].shards, grid.size(sharded)) << text_of(asked);
    EXPECT_EQ(plan.elements[0].replicas, grid.size(without(kDataAxes, sharded))) << text_of(asked);
    if (asked.config.parallel.ep > 1) {
      EXPECT_EQ(plan.elements.at(1).shards, grid.size({"edp"})) << text_of(asked);
    }
    const std::int64_t most = split_rows(asked.config.batch.packs_per_step, grid.size(kSampleAxes))[0];
    const std::int64_t at_a_time = asked.config.batch.packs_per_micro_batch;
    EXPECT_EQ(plan.micro_batches, most / at_a_time + (most % at_a_time > 0)) << text_of(asked);
  }
}

}  // namespace
}  // namespace isograd
