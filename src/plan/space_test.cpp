// The space against the product of its values, each of which check_but_devices() is asked.
#include "plan/search.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>

#include "isograd/grid.hpp"
#include "tests/hybrid_cells.hpp"
#include "train/config.hpp"

namespace isograd::planner {
namespace {

struct Case {
  ModelShape model{};
  Cluster cluster{};
  Work work{};
  Calibration calibration{};
  Problem problem() const {
    return {.model = model, .cluster = cluster, .calibration = calibration, .work = work};
  }
};

Case small(std::int64_t devices, std::int64_t samples, bool experts = false) {
  Case one{.model = {.layers = 6,
                     .hidden = 64,
                     .heads = 6,
                     .key_value_heads = 2,
                     .head_dim = 8,
                     .feed_forward = 96,
                     .vocabulary = 258},
           .cluster = {.devices = devices, .per_host = devices, .host_memory = true},
           .work = {.tokens = static_cast<double>(512 * samples), .sequence = 512}};
  if (experts)
    one.model.family = "qwen3_moe", one.model.experts = {.count = 3, .per_token = 2, .feed_forward = 32};
  return one;
}

RunConfig config_of(const Candidate& candidate, const Case& one) {
  RunConfig config;
  config.model.shape = decoder_of(one.model);
  set_layout(config, one.cluster, one.work, candidate);
  return config;
}

bool is_accepted(const Candidate& candidate, const Case& one) {
  try {
    check_but_devices(config_of(candidate, one), candidate.ranks);
    return true;
  } catch (const ConfigError&) {
    return false;
  }
}

// The product; of what is the same for `train`, and of keys without an effect, one is taken.
std::vector<Candidate> by_brute_force(const Case& one, const Space& space) {
  std::vector<Candidate> all;
  Candidate c{.ranks = static_cast<std::int32_t>(space.devices)};
  const auto ints = [](std::int64_t n) { return static_cast<std::int32_t>(n); };
  const auto flags = [&] {
    const std::int64_t ranks = c.data_ranks(), samples = one.work.samples(),
                       most = samples / ranks + (samples % ranks > 0);
    const bool zero3 = c.strategy == Strategy::kZero3, zero2 = c.strategy == Strategy::kZero2;
    for (const bool share : {false, true})
      for (const bool checkpoint : {false, true})
        for (const bool kept : {false, true})
          for (const bool once : {false, true})
            for (std::int64_t size = 1; size <= most; ++size) {
              const bool power = (size & (size - 1)) == 0;
              if ((checkpoint || kept) && !zero3) continue;
              if (once && (!(zero2 || zero3) || size == most)) continue;
              if (share && !space.share_parameters) continue;
              if (!power && most % size != 0) continue;
              Candidate full = c;
              full.checkpoint = checkpoint, full.reshard = !kept, full.reduce_once = once;
              full.share_parameters = share, full.micro_batch = size;
              full.micro_batches = most / size + (most % size > 0);
              if (is_accepted(full, one)) all.push_back(full);
            }
  };
  const auto strategies = [&] {
    for (const Strategy strategy : space.strategies)
      for (const Schedule schedule :
           {Schedule::kNone, Schedule::kOneFOneB, Schedule::kGPipe, Schedule::kInterleaved,
            Schedule::kZeroBubbleH1, Schedule::kZeroBubbleV}) {
        if ((c.pp == 1) != (schedule == Schedule::kNone)) continue;
        c.strategy = strategy, c.schedule = schedule, c.shards = 1;
        if (!is_accepted(c, one)) continue;
        const Grid grid = grid_of(config_of(c, one), c.ranks);
        if (strategy == Strategy::kBucketed && c.replicas != grid.size({"dp_replicate"})) continue;
        c.shards = grid.size({"dp_shard"});
        flags();
      }
  };
  for (const std::int64_t pp : space.sizes)
    for (const std::int64_t each : space.stages_per_rank)
      for (const std::int64_t tp : space.sizes)
        for (const std::int64_t ring : space.sizes)
          for (const std::int64_t ulysses : space.sizes)
            for (const std::int64_t ep : space.sizes)
              for (const std::int64_t replicas : space.sizes) {
                if (pp == 1 && each > 1) continue;                                  // no effect
                if (pp * tp * ring * ulysses * replicas > space.devices) continue;  // more than all ranks
                c.pp = ints(pp), c.stages_per_rank = ints(each), c.tp = ints(tp);
                c.cp_ring = ints(ring), c.cp_ulysses = ints(ulysses), c.ep = ints(ep);
                c.replicas = ints(replicas);
                strategies();
              }
  return all;
}

std::vector<Candidate> enumerated(const Case& one, const Space& space) {
  std::vector<Candidate> all;
  const Problem problem = one.problem();
  for_each_mesh(problem, space, [&](const Candidate& mesh) {
    for_each_candidate(problem, space, mesh, [&](const Candidate& candidate) {
      all.push_back(candidate);
      return true;
    });
  });
  return all;
}

TEST(PlanSpace, IsTheProductOfItsValuesThatTrainAccepts) {
  for (const Case& one :
       {small(6, 12), small(4, 3, true), small(9, 7, true), small(7, 5), small(1, 6), small(13, 13)}) {
    const Space space = space_of(one.problem(), one.cluster.devices);
    const std::vector<Candidate> found = enumerated(one, space), all = by_brute_force(one, space);
    std::printf("%ld devices: %zu candidates\n", static_cast<long>(space.devices), all.size());
    EXPECT_GT(all.size(), 0U);
    EXPECT_EQ(found.size(), all.size());
    EXPECT_TRUE(found == all) << one.cluster.devices << " devices, in the order of the space";
  }
}

TEST(PlanSpace, ARefusalIsThatOfTrain) {
  const Case one = small(6, 12);
  const Candidate wrong{.ranks = 6, .shards = 3, .cp_ulysses = 2, .pp = 4};
  const auto text = refusal(one.model, one.cluster, one.work, wrong);
  ASSERT_TRUE(text);
  EXPECT_EQ(text->where, "parallel.pp");
  EXPECT_EQ(text->found, "4 for 6 ranks");
  EXPECT_FALSE(refusal(one.model, one.cluster, one.work, {.ranks = 6, .replicas = 6}));
}

// A value or a rule that the enumeration forgets shows above.
TEST(PlanSpace, WhatIsLeftOutShows) {
  const Case one = small(4, 5);
  const Space space = space_of(one.problem(), 4);
  const std::vector<Candidate> all = by_brute_force(one, space);
  EXPECT_EQ(enumerated(one, space), all);
  Space without = space;
  without.sizes = {1, 2};
  EXPECT_NE(enumerated(one, without), all);
  without = space, without.schedules.pop_back();
  EXPECT_NE(enumerated(one, without), all);
  without = space, without.share_parameters = false;
  EXPECT_NE(enumerated(one, without), all);
}

TEST(PlanSpace, LargerMicroBatchesAreLeftOutWhereAsked) {
  const Case one = small(6, 12);
  const Space space = space_of(one.problem(), 6);
  std::vector<Candidate> first;
  for_each_mesh(one.problem(), space, [&](const Candidate& mesh) {
    for_each_candidate(one.problem(), space, mesh, [&](const Candidate& candidate) {
      first.push_back(candidate);
      return false;
    });
  });
  EXPECT_FALSE(first.empty());
  for (const Candidate& candidate : first) EXPECT_EQ(candidate.micro_batch, 1);
  EXPECT_EQ(micro_batches_of(12), (std::vector<std::int64_t>{1, 2, 3, 4, 6, 8, 12}));
  EXPECT_EQ(micro_batches_of(7), (std::vector<std::int64_t>{1, 2, 4, 7}));
}

TEST(PlanSpace, UsesTheMostWholeHosts) {
  Case one = small(24001, 1024);  // prime, and more than a sequence has tokens
  one.cluster.per_host = 8;
  EXPECT_EQ(usable_devices(one.problem(), 24000), 24000);
  EXPECT_EQ(usable_devices(one.problem(), 24001), 24000);
  EXPECT_EQ(usable_devices(one.problem(), 7), 7);
  EXPECT_EQ(usable_devices(one.problem(), 1), 1);
  one.work = {.tokens = 3, .sequence = 1};  // three samples of a token
  one.model.heads = one.model.key_value_heads = 1, one.model.layers = 1, one.cluster.per_host = 2;
  EXPECT_EQ(usable_devices(one.problem(), 7), 2);
  one.cluster.per_host = 16;
  EXPECT_EQ(usable_devices(one.problem(), 7), 3);
}

// ---- what is proved ----

hybrid::Cell cell_of(const Candidate& candidate) {
  hybrid::Cell cell;
  for (const auto& [which, size] : {std::pair{hybrid::kPp, candidate.pp},
                                    {hybrid::kReplicate, candidate.replicas},
                                    {hybrid::kShard, candidate.shards},
                                    {hybrid::kRing, candidate.cp_ring},
                                    {hybrid::kUlysses, candidate.cp_ulysses},
                                    {hybrid::kTp, candidate.tp},
                                    {hybrid::kEp, candidate.ep}})
    cell = cell.with(which, size > 1 ? "2" : "1");
  if (candidate.ep > 1) cell = cell.with(hybrid::kModel, "experts");
  std::string strategy(name_of(candidate.strategy));
  if (candidate.reduce_once) strategy += "-once";
  if (candidate.checkpoint) strategy += "-checkpointed";
  if (!candidate.reshard) strategy += "-kept";
  const auto& known = hybrid::factors()[hybrid::kStrategy].values;
  if (std::ranges::find(known, strategy) == known.end()) return {};  // no cell has it
  cell = cell.with(hybrid::kStrategy, strategy)
             .with(hybrid::kSchedule, std::string(name_of(candidate.schedule)));
  return cell.with(hybrid::kShare, candidate.share_parameters ? "on" : "off");
}

TEST(PlanSpace, IsProvedWhereTheCellsAre) {
  std::size_t proved = 0, others = 0;
  for (const Case& one : {small(8, 16, true), small(16, 16)})
    for (const Candidate& candidate : enumerated(one, space_of(one.problem(), one.cluster.devices))) {
      const hybrid::Cell cell = cell_of(candidate);
      const bool in_cells = cell.row != hybrid::Cell{}.row ? hybrid::runs(cell.row) : candidate.ranks == 1;
      ASSERT_EQ(is_proved(candidate), in_cells) << cell.name();
      ++(in_cells ? proved : others);
    }
  EXPECT_GT(proved, 100U);
  EXPECT_GT(others, 100U);
}

// ---- size ----

TEST(PlanSpace, OfSixteenThousandDevices) {
  Case one{.model = {.name = "405B",
                     .layers = 126,
                     .hidden = 16384,
                     .heads = 128,
                     .key_value_heads = 8,
                     .head_dim = 128,
                     .feed_forward = 53248,
                     .vocabulary = 128256},
           .cluster = {.devices = 16384, .per_host = 8},
           .work = {.tokens = 2048.0 * 8192, .sequence = 8192}};
  const Problem problem = one.problem();
  const Space space = space_of(problem, 16384);
  std::int64_t meshes = 0, candidates = 0, first = 0;
  const auto seconds = [](auto call) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  const auto count = [&](std::int64_t& into, bool more) {
    for_each_mesh(problem, space, [&](const Candidate& mesh) {
      for_each_candidate(problem, space, mesh, [&](const Candidate&) { return ++into, more; });
    });
  };
  const double of_meshes =
                   seconds([&] { for_each_mesh(problem, space, [&](const Candidate&) { ++meshes; }); }),
               of_all = seconds([&] { count(candidates, true); }),
               of_first = seconds([&] { count(first, false); });
  std::printf("16,384 devices, 405B: %ld meshes in %.3f s, %ld candidates in %.3f s, %ld kinds in %.3f s\n",
              static_cast<long>(meshes), of_meshes, static_cast<long>(candidates), of_all,
              static_cast<long>(first), of_first);
  EXPECT_GT(meshes, 1000);
  EXPECT_GT(candidates, 100000);
}

}  // namespace
}  // namespace isograd::planner
