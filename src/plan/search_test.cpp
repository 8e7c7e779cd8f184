// The search against every layout of the space, each timed; plans of random clusters against `train`'s rules;
// laws against their formulas; and how long large clusters take.
#include "plan/search.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>

#include "full_tests.hpp"
#include "plan/inputs.hpp"
#include "train/config.hpp"

namespace isograd::planner {
namespace {

using ::testing::HasSubstr;

struct Job {
  ModelShape model{};
  Cluster cluster{};
  Work work{};
  Calibration calibration{};
  Problem problem() const {
    return {.model = model,
            .cluster = cluster,
            .calibration = calibration,
            .work = work,
            .constants = constants_of(Program::kIsograd, cluster.device, work.precision)};
  }
  Plan planned(const Options& options = {}) const { return plan(model, cluster, calibration, work, options); }
};

Job small(std::int64_t devices, std::int64_t samples, double memory, bool experts = false) {
  Job one{.model = {.name = "small",
                    .layers = 6,
                    .hidden = 512,
                    .heads = 8,
                    .key_value_heads = 2,
                    .head_dim = 64,
                    .feed_forward = 1408,
                    .vocabulary = 4096},
          .cluster = read_cluster("h100", devices),
          .work = {.tokens = 1024.0 * static_cast<double>(samples), .sequence = 1024}};
  one.cluster.device.memory = memory, one.cluster.reserve = 1 << 26;
  if (experts)
    one.model.family = "qwen3_moe", one.model.experts = {.count = 4, .per_token = 2, .feed_forward = 512};
  return one;
}

ModelShape dense(std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t feed_forward) {
  return {.name = "dense",
          .layers = layers,
          .hidden = hidden,
          .heads = heads,
          .key_value_heads = 8,
          .head_dim = 128,
          .feed_forward = feed_forward,
          .vocabulary = 128256};
}

// ---- against all ----

struct Timed {
  Candidate candidate{};
  double seconds = 0, bytes = 0;
};
// In the order of the space, with the buckets that take the least time of those that fit.
std::vector<Timed> all_that_fit(const Job& one) {
  const Problem problem = one.problem();
  const Space space = space_of(problem, one.cluster.devices);
  Models models(problem);
  std::vector<Timed> all;
  for_each_mesh(problem, space, [&](const Candidate& mesh) {
    for_each_candidate(problem, space, mesh, [&](const Candidate& found) {
      std::optional<Timed> best;
      const bool any =
          found.strategy != Strategy::kZero3 && found.data_ranks() * found.cp_ring * found.cp_ulysses > 1;
      for (const std::int64_t bytes : any ? space.bucket_bytes : std::vector{found.bucket_bytes}) {
        Timed timed{.candidate = found};
        timed.candidate.bucket_bytes = bytes;
        timed.bytes = models.memory.of(timed.candidate).total();
        timed.seconds = models.step.of(timed.candidate).total();
        if (timed.bytes <= one.cluster.device.memory && (!best || timed.seconds < best->seconds))
          best = timed;
      }
      if (best) all.push_back(*best);
      return true;
    });
  });
  return all;
}

// One of each mesh and strategy, the fastest first.
std::vector<Candidate> fastest_of(std::vector<Timed> all, std::size_t count) {
  std::ranges::stable_sort(all, {}, &Timed::seconds);
  std::vector<Candidate> top;
  for (const auto& [candidate, seconds, bytes] : all) {
    const auto like = [&c = candidate](const Candidate& o) {
      return c.pp == o.pp && c.tp == o.tp && c.cp_ring == o.cp_ring && c.cp_ulysses == o.cp_ulysses &&
             c.ep == o.ep && c.replicas == o.replicas && c.shards == o.shards && c.strategy == o.strategy;
    };
    if (std::ranges::none_of(top, like)) top.push_back(candidate);
    if (top.size() == count) break;
  }
  return top;
}

std::vector<Candidate> front_of(std::vector<Timed> all) {
  std::ranges::stable_sort(all, [](const Timed& a, const Timed& b) {
    return a.seconds < b.seconds || (a.seconds == b.seconds && a.bytes < b.bytes);
  });
  std::vector<Candidate> front;
  double least = std::numeric_limits<double>::infinity();
  for (const Timed& one : all)
    if (one.seconds <= 1.1 * all.front().seconds && one.bytes < least)
      front.push_back(one.candidate), least = one.bytes;
  return front;
}

std::vector<Candidate> candidates_of(const std::vector<Planned>& all) {
  std::vector<Candidate> candidates;
  for (const Planned& one : all) candidates.push_back(one.candidate);
  return candidates;
}

std::string texts(const std::vector<Candidate>& all) {
  std::string text;
  for (const Candidate& one : all) text += to_text(one) + fmt::format(", buckets {}\n", one.bucket_bytes);
  return text;
}

TEST(PlanSearch, FindsWhatTimingEveryLayoutFinds) {
  constexpr double kMiB = 1 << 20;
  std::size_t with_pipelines = 0;
  for (const Job& one : {small(8, 32, 4096 * kMiB), small(8, 12, 800 * kMiB), small(16, 24, 500 * kMiB),
                         small(6, 7, 1200 * kMiB), small(8, 16, 900 * kMiB, true), small(7, 9, 4096 * kMiB),
                         small(1, 4, 4096 * kMiB)}) {
    const std::vector<Timed> all = all_that_fit(one);
    ASSERT_FALSE(all.empty());
    const Problem problem = one.problem();
    Models models(problem);
    const Searched found = search(models, one.cluster.devices, {.top = 5});
    const auto top = fastest_of(all, 5), front = front_of(all);
    EXPECT_EQ(candidates_of(found.top), top) << texts(candidates_of(found.top)) << "and not\n" << texts(top);
    EXPECT_EQ(candidates_of(found.front), front) << texts(candidates_of(found.front)) << "and not\n"
                                                 << texts(front);
    for (const Timed& timed : all) with_pipelines += timed.candidate.pp > 1;
    std::printf("%ld devices: %zu layouts fit, %ld examined, %ld timed, %zu on the front\n",
                static_cast<long>(one.cluster.devices), all.size(), static_cast<long>(found.candidates),
                static_cast<long>(found.fitting), found.front.size());
  }
  EXPECT_GT(with_pipelines, 0U);
}

// The comparison can fail: a bound that is too high leaves out layouts, and one is missing.
TEST(PlanSearch, ALayoutLessShows) {
  const Job one = small(8, 12, 800.0 * (1 << 20));
  std::vector<Timed> all = all_that_fit(one);
  const auto top = fastest_of(all, 5);
  std::erase_if(all, [&](const Timed& timed) { return timed.candidate == top[2]; });
  EXPECT_NE(fastest_of(all, 5), top);
}

TEST(PlanSearch, BoundsAreNotAboveWhatTheyBound) {
  for (const Job& one : {small(16, 24, 4e9), small(6, 12, 4e9), small(8, 9, 4e9, true)}) {
    const Problem problem = one.problem();
    Models models(problem);
    const Space space = space_of(problem, one.cluster.devices);
    for_each_mesh(problem, space, [&](const Candidate& mesh) {
      for_each_candidate(problem, space, mesh, [&](const Candidate& candidate) {
        Candidate bare = mesh;
        bare.micro_batch = candidate.micro_batch, bare.micro_batches = candidate.micro_batches;
        Candidate best = candidate;
        best.bucket_bytes = models.step.best_bucket_bytes(candidate);
        const double seconds = models.step.of(best).total();
        EXPECT_LE(models.step.least(candidate), seconds) << to_text(candidate);
        EXPECT_LE(models.step.least_length(candidate), models.step.least(candidate)) << to_text(candidate);
        EXPECT_LE(models.step.least_of_mesh(bare), seconds) << to_text(candidate);
        EXPECT_LE(models.memory.least(candidate), models.memory.of(candidate).total()) << to_text(candidate);
        return true;
      });
    });
  }
}

TEST(PlanSearch, SaysWhatIsMissingWhereNothingFits) {
  Job one = small(8, 16, 300.0 * (1 << 20));
  one.model.layers = 40;
  const Plan made = one.planned();
  ASSERT_TRUE(made.top.empty());
  ASSERT_TRUE(made.nearest);
  EXPECT_LT(made.nearest->head_room, 0);
  EXPECT_THAT(made.missing, HasSubstr("lacks"));
  EXPECT_THAT(made.missing, HasSubstr("of these devices"));
  // No layout lacks less.
  const Problem problem = one.problem();
  Models models(problem);
  const Space space = space_of(problem, 8);
  for_each_mesh(problem, space, [&](const Candidate& mesh) {
    for_each_candidate(problem, space, mesh, [&](const Candidate& candidate) {
      EXPECT_GE(models.memory.of(candidate).total(), made.nearest->bytes.value) << to_text(candidate);
      return true;
    });
  });
}

TEST(PlanSearch, IsTheSameOnEveryRunAndForAnyOrderOfTheLinks) {
  Job one = small(16, 64, 2e9, true);
  const Options options{.scaling = {8, 16, 32}};
  const std::string first = to_json(one.planned(options));
  EXPECT_EQ(to_json(one.planned(options)), first);
  std::ranges::reverse(one.cluster.links);
  EXPECT_EQ(to_json(one.planned(options)), first);
  one.work.tokens *= 2;
  EXPECT_NE(to_json(one.planned(options)), first);
}

// ---- against `train` ----

TEST(PlanSearch, ProposesNothingThatTrainRefuses) {
  std::mt19937 random(49);
  const auto one_of = [&]<class T>(std::initializer_list<T> values) {
    return *(values.begin() + std::uniform_int_distribution<std::size_t>(0, values.size() - 1)(random));
  };
  const auto names = built_in_clusters();
  std::size_t proposed = 0, without = 0;
  for (int turn = 0; turn < 200; ++turn) {
    Job one;
    const std::int64_t hosts = one_of({1, 1, 2, 3, 5, 12}), heads = one_of({4, 6, 8, 12, 16, 32});
    one.cluster =
        read_cluster(names[std::uniform_int_distribution<std::size_t>(0, names.size() - 1)(random)]);
    one.cluster.per_host = one_of({1, 2, 3, 4, 7, 8});
    one.cluster.links = {{"fast", one.cluster.per_host, 3e-6, 4e11}, {"network", 96, 2e-5, 5e10}};
    if (one.cluster.per_host == 1) one.cluster.links.erase(one.cluster.links.begin());
    one.cluster.devices = hosts * one.cluster.per_host;
    one.cluster.host_memory = one_of({false, false, true});
    const double part = one_of({0.05, 0.3, 1.0});
    one.cluster.device.memory *= part, one.cluster.reserve *= part;
    one.model = {.name = "random",
                 .layers = one_of({1, 2, 3, 7, 12, 32}),
                 .hidden = heads * 64,
                 .heads = heads,
                 .key_value_heads = one_of({std::int64_t{1}, heads / 2, heads}),
                 .head_dim = 64,
                 .feed_forward = one_of({96, 1000, 4096, 11008}),
                 .vocabulary = one_of({31, 258, 32000, 128256}),
                 .tied_output = one_of({false, true})};
    if (one_of({0, 0, 1}) == 1)
      one.model.family = "qwen3_moe",
      one.model.experts = {.count = one_of({3, 8, 64}), .per_token = 2, .feed_forward = one_of({96, 768})};
    one.work.sequence = one_of({128, 1000, 4096, 32768});
    one.work.tokens = static_cast<double>(one.work.sequence) * one_of({1, 3, 16, 60, 257});
    if (one.cluster.device.peak[2] == 0) one.work.precision = Precision::kFloat32;
    const Plan made = one.planned();
    for (const auto* list : {&made.top, &made.front})
      for (const Planned& found : *list) {
        ++proposed;
        EXPECT_GE(found.head_room, 0);
        RunConfig config;
        config.model.shape = decoder_of(one.model);
        set_layout(config, one.cluster, one.work, found.candidate);
        EXPECT_NO_THROW(check_but_devices(config, found.candidate.ranks))
            << to_text(found.candidate) << ", turn " << turn;
      }
    EXPECT_EQ(made.nearest.has_value(), made.top.empty()) << "turn " << turn;
    without += made.top.empty();
  }
  std::printf("%zu layouts proposed; %zu of 200 clusters are too small\n", proposed, without);
  EXPECT_GT(proposed, 500U);
  EXPECT_LT(without, 100U);
}

TEST(PlanSearch, LeavesDevicesIdleWhereNoLayoutUsesThem) {
  Job one = small(8, 3, 4e9);  // three sequences, two layers
  one.model.layers = 2;
  one.cluster.per_host = 1, one.cluster = on_devices(one.cluster, 10007);
  const Plan made = one.planned();
  ASSERT_FALSE(made.top.empty());
  EXPECT_LT(made.top.front().candidate.ranks, 10007);
  EXPECT_THAT(made.warnings, ::testing::Contains(HasSubstr("idle")));
}

// ---- the recipe, the laws ----

const RecipeStep* step_named(const Plan& made, const std::string& name) {
  const auto found = std::ranges::find(made.recipe, name, &RecipeStep::name);
  return found == made.recipe.end() ? nullptr : &*found;
}

TEST(PlanRecipe, HasItsStepsAndThreeWaysOutOfALargeCluster) {
  Job one = small(64, 1024, 80e9);
  const Plan made = one.planned();
  ASSERT_NE(step_named(made, "samples"), nullptr);
  EXPECT_EQ(step_named(made, "samples")->result, "1024 sequences");
  EXPECT_EQ(step_named(made, "data ranks")->result, fmt::format("{}", made.top[0].candidate.data_ranks()));
  // 32 sequences for 64 devices: no rank has even one.
  one.work.tokens = 32 * 1024;
  std::vector<WayOut> ways = one.planned().ways_out;
  ASSERT_EQ(ways.size(), 3U);
  EXPECT_THAT(ways[0].name, HasSubstr("fewer devices"));
  EXPECT_LT(ways[0].planned.candidate.ranks, 64);
  EXPECT_THAT(ways[1].name, HasSubstr("a larger batch"));
  EXPECT_GT(ways[1].tokens, one.work.tokens);
  EXPECT_EQ(ways[1].planned.candidate.ranks, 64);
  EXPECT_THAT(ways[2].name, HasSubstr("a sequence on several ranks"));
  // 256 sequences: each rank has some, fewer than fit.
  one.work.tokens = 256 * 1024;
  ways = one.planned().ways_out;
  ASSERT_EQ(ways.size(), 3U);
  EXPECT_THAT(ways[2].name, HasSubstr("smaller micro-batches: 4 in place of"));
  for (const WayOut& way : ways) EXPECT_GT(way.planned.tokens_per_second.value, 0);
  one.work.tokens = 1 << 28;
  EXPECT_TRUE(one.planned().ways_out.empty());
}

const Law* law_named(const std::vector<Law>& laws, const std::string& name) {
  const auto found = std::ranges::find(laws, name, &Law::name);
  return found == laws.end() ? nullptr : &*found;
}

// N* = the largest number of ranks with alpha_in (N - hosts) + alpha_net (hosts - 1) + bytes / beta <=
// forward, with NCCL's latencies, half of the peak and 8 x 50 GB/s x 0.9: the table of
// docs/planning_reference.md.
TEST(PlanLaws, RingsOfZeroThreeEndWhereTheTableSays) {
  struct Row {
    std::int64_t hidden, heads, feed_forward, sequence, micro_batch, most;
  };
  for (const Row& row : {Row{4096, 32, 14336, 4096, 1, 568},
                         {8192, 64, 28672, 4096, 1, 2112},
                         {16384, 128, 53248, 4096, 1, 7664},
                         {4096, 32, 14336, 2048, 1, 136},
                         {4096, 32, 14336, 8192, 1, 1504},
                         {4096, 32, 14336, 8192, 2, 3272}}) {
    Job one{.model = dense(2, row.hidden, row.heads, row.feed_forward),
            .cluster = read_cluster("h100", 64),
            .work = {.tokens = 4096.0 * 1024, .sequence = row.sequence}};
    one.cluster.device.memory = 1e14, one.cluster.device.memory_bandwidth = 1e18;
    one.cluster.links[1].latency = 14e-6;
    Problem problem = one.problem();
    problem.constants.share_of_peak = problem.constants.share_of_attention = 0.5;
    problem.constants.share_inside = problem.constants.share_across = 0.9;
    problem.constants.layer_overhead = 0;
    Models models(problem);
    const Candidate candidate{.ranks = 64,
                              .shards = 64,
                              .strategy = Strategy::kZero3,
                              .micro_batch = row.micro_batch,
                              .micro_batches = 16};
    const std::vector<Law> laws = laws_of(models, planned(models, candidate));
    const Law* law = law_named(laws, "zero3's rings");
    ASSERT_NE(law, nullptr);
    EXPECT_THAT(law->statement, HasSubstr("forward on up to")) << law->statement;
    const double number = std::stod(law->statement.substr(law->statement.find("up to") + 5));
    EXPECT_NEAR(number, static_cast<double>(row.most), 8) << row.hidden << ", " << row.sequence;  // a host
  }
}

TEST(PlanLaws, OneDeviceWithoutALinkHasNoneOfExchanges) {
  Job one = small(1, 4, 4e9);
  one.cluster.links.clear();
  const Plan made = one.planned();
  ASSERT_FALSE(made.top.empty());
  std::vector<std::string> names;
  for (const Law& law : made.laws) names.push_back(law.name);
  EXPECT_THAT(names, testing::UnorderedElementsAre("batch", "memory of activations", "a layer must fit"));
}

TEST(PlanLaws, AreRootsOfTheModels) {
  Job one{.model = dense(32, 4096, 32, 14336),
          .cluster = read_cluster("h100", 256),
          .work = {.tokens = 1024.0 * 4096, .sequence = 4096}};
  const Problem problem = one.problem();
  Models models(problem);
  const Candidate candidate{.ranks = 256,
                            .shards = 32,
                            .tp = 2,
                            .pp = 4,
                            .strategy = Strategy::kZero1,
                            .schedule = Schedule::kOneFOneB,
                            .micro_batch = 1,
                            .micro_batches = 32};
  const Planned best = planned(models, candidate);
  const std::vector<Law> laws = laws_of(models, best);
  const Law* memory = law_named(laws, "memory of activations");
  ASSERT_NE(memory, nullptr);
  const auto fits = [&](double size) {
    Candidate other = candidate;
    other.micro_batch = static_cast<std::int64_t>(size);
    other.micro_batches = std::max<std::int64_t>(1, 32 / other.micro_batch);
    return models.memory.of(other).total() <= one.cluster.device.memory;
  };
  EXPECT_TRUE(fits(memory->at.value));
  EXPECT_FALSE(fits(memory->at.value + 1));
  const Law* bubble = law_named(laws, "bubble");
  ASSERT_NE(bubble, nullptr);
  const auto share = [&](double micro_batches) {
    Candidate other = candidate;
    other.micro_batches = static_cast<std::int64_t>(micro_batches);
    const StepParts parts = models.step.of(other);
    const double busy = parts.products + parts.attention + parts.memory_bound + parts.overhead + parts.tp;
    return parts.bubble / (busy + parts.bubble);
  };
  EXPECT_LE(share(bubble->at.value), 0.1 + 1e-9);
  EXPECT_GT(share(bubble->at.value - 1), 0.1 - 1e-9);
  EXPECT_EQ(bubble->reached, share(32) >= 0.1);
  const Law* batch = law_named(laws, "batch");
  ASSERT_NE(batch, nullptr);
  EXPECT_EQ(batch->at.value, 1024);
  EXPECT_EQ(batch->at.low, batch->at.high);
  // The law whose limit is reached first is the first, and those that are reached come before the others.
  EXPECT_TRUE(std::ranges::is_partitioned(laws, &Law::reached));
  for (const Law& law : laws) {
    EXPECT_LE(law.at.low, law.at.value) << law.name;
    EXPECT_GE(law.at.high, law.at.value) << law.name;
    EXPECT_FALSE(law.moved_by.empty()) << law.name;
  }
}

// Sums of one bucket have nothing to hide, on however many ranks.
TEST(PlanLaws, OfASizeThatNoClusterHasAreLeftOut) {
  std::vector<std::string> of_large;
  for (const bool large : {false, true}) {
    Job one = small(8, 64, 80e9);
    if (large) one.model = dense(32, 4096, 32, 14336), one.work = {.tokens = 1024.0 * 4096, .sequence = 4096};
    const Problem problem = one.problem();
    Models models(problem);
    const Candidate candidate{.ranks = 8, .shards = 8, .strategy = Strategy::kZero1, .micro_batches = 8};
    const std::vector<Law> laws = laws_of(models, planned(models, candidate));
    EXPECT_EQ(law_named(laws, "all-reduce") != nullptr, large);
    for (const Law& law : laws) EXPECT_LT(law.at.value, 5e6) << law.name;
  }
}

TEST(PlanWarnings, NameUnevenDocumentsThatLengthenAStep) {
  const auto warned = [](std::vector<std::int64_t> documents) {
    Job one = small(8, 32, 80e9);
    one.work.documents = std::move(documents);
    const Plan made = one.planned();
    EXPECT_GT(made.top.at(0).step.uneven, 0);
    return std::ranges::any_of(
        made.warnings, [](const std::string& text) { return text.find("uneven") != std::string::npos; });
  };
  std::vector<std::int64_t> nearly(64, 1024), mixed;
  nearly[5] = 1022, nearly.insert(nearly.begin() + 6, 2);
  for (int i = 0; i < 64; ++i)
    if (i % 3 == 0)
      mixed.push_back(1024);
    else
      mixed.insert(mixed.end(), 64, 16);
  EXPECT_FALSE(warned(nearly));
  EXPECT_TRUE(warned(mixed));
}

TEST(PlanNeighbours, AreSlowerOrRefusedForAReason) {
  Job one{.model = dense(32, 4096, 32, 14336),
          .cluster = read_cluster("h100", 64),
          .work = {.tokens = 1024.0 * 4096, .sequence = 4096}};
  const Plan made = one.planned();
  ASSERT_FALSE(made.top.empty());
  EXPECT_GT(made.neighbours.size(), 5U);
  for (const Neighbour& neighbour : made.neighbours) {
    EXPECT_FALSE(neighbour.reason.empty()) << neighbour.change;
    if (!neighbour.reason.starts_with("lacks") && neighbour.seconds) {
      EXPECT_GE(*neighbour.seconds, made.top[0].seconds.value * (1 - 1e-9)) << neighbour.change;
    }
  }
}

TEST(PlanPacks, MakeUnevenRanksSlower) {
  Job one = small(8, 64, 4e9);
  const Plan even = one.planned();
  std::mt19937 random(3);
  for (int i = 0; i < 4096; ++i)
    one.work.documents.push_back(16 + static_cast<std::int64_t>(random() % 1500));
  const Plan uneven = one.planned();
  EXPECT_EQ(even.top[0].step.uneven, 0);
  EXPECT_GT(uneven.top[0].step.uneven, 0);
  EXPECT_LT(uneven.top[0].step.attention, even.top[0].step.attention);  // fewer pairs
  EXPECT_THAT(uneven.warnings, ::testing::Contains(HasSubstr("uneven lengths")));
}

// ---- the public functions ----

TEST(Planner, PredictsALayoutAsThePlanDoes) {
  const Job one = small(8, 64, 4e9);
  const Planned best = one.planned().top.front();
  EXPECT_EQ(memory_of(one.model, one.cluster, one.work, best.candidate).total(), best.memory.total());
  EXPECT_EQ(step_of(one.model, one.cluster, one.calibration, one.work, best.candidate).total(),
            best.step.total());
  double end = 0;
  for (const Span& span : timeline_of(one.model, one.cluster, one.calibration, one.work, best.candidate))
    end = std::max(end, span.end);
  EXPECT_NEAR(end, best.seconds.value, 1e-9 * best.seconds.value);
  // Data parallelism sends 2 (N - 1)/N gradients of 4 bytes.
  const Candidate eight{.ranks = 8, .replicas = 8, .micro_batches = 8};
  EXPECT_DOUBLE_EQ(sent_bytes_of(one.model, one.work, eight), 2 * 7 / 8.0 * 4 * one.model.parameters());
  const Candidate wrong{.ranks = 8, .replicas = 8, .tp = 3};
  EXPECT_THROW(memory_of(one.model, one.cluster, one.work, wrong), ConfigError);
  EXPECT_THROW(sent_bytes_of(one.model, one.work, wrong), ConfigError);
}

// ---- speed ----

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}
double peak_mebibytes() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return static_cast<double>(used.ru_maxrss) / 1024;
}

void expect_within(const char* name, const Job& one, double seconds) {
  const double before = peak_mebibytes(), begin = cpu_seconds();
  const Plan made = one.planned();
  const double took = cpu_seconds() - begin, grown = peak_mebibytes() - before;
  std::printf("%s: %.3f s, %.0f MiB more, %ld candidates examined, %ld timed, %zu on the front; %s\n", name,
              took, grown, static_cast<long>(made.candidates), static_cast<long>(made.fitting),
              made.front.size(),
              made.top.empty() ? made.missing.c_str() : to_text(made.top[0].candidate).c_str());
  EXPECT_FALSE(made.top.empty());
#if !defined(ISOGRAD_SANITIZE_ADDRESS) && !defined(ISOGRAD_SANITIZE_THREAD)  // they keep what is freed
  EXPECT_LT(grown, 200);
#endif
  if (full_tests()) EXPECT_LT(took, seconds);  // a busy machine takes longer: `./dev full` has it for itself
}

TEST(PlanSearch, IsFast) {
  expect_within("2 ranks", small(2, 64, 4e9), 0.05);
  Job one{.model = dense(126, 16384, 128, 53248),
          .cluster = read_cluster("h100", 16384),
          .work = {.tokens = 2048.0 * 8192, .sequence = 8192}};
  expect_within("405B on 16,384 devices", one, 1);
  if (!full_tests()) return;
  one.cluster = on_devices(one.cluster, 131072), one.work.tokens *= 8;
  expect_within("405B on 131,072 devices", one, 5);
  one.cluster = on_devices(one.cluster, 16384), one.work = {.tokens = 4096.0 * 4096, .sequence = 4096};
  one.model = dense(61, 7168, 128, 18432);
  one.model.family = "qwen3_moe", one.model.key_value_heads = 128;
  one.model.experts = {.count = 256, .per_token = 8, .feed_forward = 2048, .dense_layers = {0, 1, 2}};
  expect_within("256 experts on 16,384 devices", one, 10);
}

}  // namespace
}  // namespace isograd::planner
