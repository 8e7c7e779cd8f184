// Work of a layer against a model's parameters, rates by calibration, packs by counting, and steps of isograd
// against the overlap law and closed pipelines.
#include "plan/time.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace isograd::planner {
namespace {

const ModelShape kSmall{.name = "test",
                        .layers = 8,
                        .hidden = 1024,
                        .heads = 16,
                        .key_value_heads = 8,
                        .head_dim = 64,
                        .feed_forward = 2816,
                        .vocabulary = 32000};

Cluster small_hosts(std::int64_t devices) {
  Cluster cluster{.name = "test",
                  .devices = devices,
                  .per_host = 8,
                  .links = {{"NVLink", 8, 3.4e-6, 450e9}, {"network", 1 << 20, 19.6e-6, 50e9}}};
  cluster.device.name = "h100";
  cluster.device.memory = 80e9, cluster.device.memory_bandwidth = 3.35e12;
  cluster.device.peak = {67e12, 67e12, 989e12, 1979e12};
  return cluster;
}

double flops(const std::vector<Product>& products) {
  double sum = 0;
  for (const Product& one : products) sum += 2 * one.count * double(one.m) * double(one.n) * double(one.k);
  return sum;
}

struct AskedStep {
  ModelShape model = kSmall;
  Cluster cluster = small_hosts(8);
  Calibration calibration{};
  Work work{.tokens = 64 * 2048, .sequence = 2048};
  Problem problem() const {
    return {.model = model,
            .cluster = cluster,
            .calibration = calibration,
            .work = work,
            .constants = constants_of(Program::kIsograd, cluster.device, work.precision)};
  }
};

TEST(PlanWork, MultipliesEachParameterOnceForEachToken) {
  AskedStep asked;
  const Problem problem = asked.problem();
  for (const int tp : {1, 2, 4}) {
    const Candidate candidate{.ranks = tp, .tp = tp, .micro_batch = 2};
    const double tokens = 2 * 2048;
    double all = flops(output_work(problem, candidate).products);
    for (std::int64_t layer = 0; layer < kSmall.layers; ++layer) {
      const LayerWork work = layer_work(problem, candidate, layer);
      all += flops(work.products);
    }
    // All but the embedding's table and the norms' scales is multiplied.
    const double multiplied =
        kSmall.parameters() - double(kSmall.vocabulary * kSmall.hidden) - (2 * 8 + 1) * double(kSmall.hidden);
    EXPECT_EQ(all * tp, 2 * tokens * multiplied);
    EXPECT_EQ(layer_work(problem, candidate, 0).pairs * tp, 2 * 4.0 * 1024 * 2048 * 2049 / 2);
  }
}

TEST(PlanWork, CountsTheExpertsOfAToken) {
  AskedStep asked;
  asked.model.experts = {.count = 8, .per_token = 2, .feed_forward = 512};
  Candidate candidate{.ranks = 4, .shards = 4};
  const LayerWork alone = layer_work(asked.problem(), candidate, 0);
  candidate.ep = 4;
  const LayerWork work = layer_work(asked.problem(), candidate, 0);
  const double attention = 2 * 1024.0 * (1024 + 512), router = 1024 * 8, experts = 2 * 3 * 1024.0 * 512;
  EXPECT_EQ(flops(alone.products), 2.0 * 2048 * (attention + router + experts));
  // 4,096 rows of a rank: 92.3 more on the one that gets most, in its two experts.
  EXPECT_EQ(flops(work.products) - flops(alone.products), 2.0 * 92 * 3 * 1024 * 512);
  EXPECT_EQ(work.expert_bytes, 2048 * 2 * 1024 * 2.0);
  // With 2,048 words each stands in four places: twice as many.
  asked.model.vocabulary = 2048;
  EXPECT_EQ(flops(layer_work(asked.problem(), candidate, 0).products) - flops(alone.products),
            2.0 * 184 * 3 * 1024 * 512);
}

TEST(PlanRates, GoByTheNearestCalibratedShapes) {
  AskedStep asked;
  const Product product{1024, 1024, 1024, 3};
  EXPECT_NEAR(Rates(asked.problem()).seconds(product), 3 * 2 * std::pow(1024.0, 3) / (989e12 * 0.573), 1e-12);
  asked.calibration.products = {{1024, 1024, 1024, Precision::kBFloat16, 1e12, 0},
                                {256, 256, 256, Precision::kBFloat16, 2e11, 0}};
  const Rates rates(asked.problem());
  EXPECT_NEAR(rates.seconds(product), 3 * 2 * std::pow(1024.0, 3) / 1e12, 1e-12);
  // In 1/size a third of the way from the larger one, in each of three directions.
  EXPECT_NEAR(rates.seconds({512, 512, 512}), 2 * std::pow(512.0, 3) * (8 / 1e12 + 1 / 2e11) / 9, 1e-12);
  // A cube of measured sizes, whose times have a part that does not depend on each of them: it is found
  // exactly.
  asked.calibration.products.clear();
  const auto seconds = [](double m, double n, double k) {
    return 2 * m * n * k * (1e-12 + 1e-10 / m + 2e-10 / n) * (1 + 8 / k);
  };
  for (const std::int64_t m : {256, 1024})
    for (const std::int64_t n : {256, 1024})
      for (const std::int64_t k : {256, 1024})
        asked.calibration.products.push_back(
            {m, n, k, Precision::kBFloat16,
             2.0 * double(m * n * k) / seconds(double(m), double(n), double(k)), 0});
  EXPECT_NEAR(Rates(asked.problem()).seconds({300, 704, 512}), seconds(300, 704, 512), 1e-12);
  // Beyond all sizes at the border's rate, with the largest corner measured and without.
  const double border = 1 / Rates(asked.problem()).seconds({1024, 1024, 1024}) * std::pow(1024.0, 3);
  EXPECT_NEAR(Rates(asked.problem()).seconds({1 << 20, 4096, 4096}), std::pow(2.0, 44) / border, 1e-9);
  asked.calibration.products.pop_back();
  const Rates without(asked.problem());
  const auto rate = [&](std::int64_t m, std::int64_t n, std::int64_t k) {
    return double(m * n * k) / without.seconds({m, n, k});
  };
  const double nearest =
      3 / (1 / rate(256, 1024, 1024) + 1 / rate(1024, 256, 1024) + 1 / rate(1024, 1024, 256));
  EXPECT_NEAR(rate(1 << 20, 4096, 4096) / nearest, 1, 1e-9);
  EXPECT_NEAR(rate(1024, 1024, 1024) / nearest, 1, 1e-9);
  EXPECT_EQ(rates.origin(), Origin::kCalibrated);
}

TEST(PlanPacks, CountPairsAndTheSlowestRank) {
  const Packs even = packs_of(pairs_by_sequence({.tokens = 0, .sequence = 8}), 4, 2);
  EXPECT_EQ(even.pairs, 36);
  EXPECT_EQ(even.slowest, 1);
  // Sequences of 8 tokens: (8), (4 4), (8: the first part of 12), (4 and 4). Pairs 36, 20, 36, 20.
  Work work{.tokens = 0, .sequence = 8, .documents = {8, 4, 4, 12, 4}};
  EXPECT_EQ(packs_of(pairs_by_sequence(work), 2, 1).pairs, 28);
  EXPECT_NEAR(packs_of(pairs_by_sequence(work), 2, 1).slowest, 36 / 28.0, 1e-12);
  EXPECT_NEAR(packs_of(pairs_by_sequence(work), 2, 2).slowest, 1, 1e-12);  // two of them, one of each kind
}

struct Stepped {
  explicit Stepped(const Problem& of)
      : problem(of), memory(problem, pipelines), step(problem, pipelines, memory) {}
  Problem problem;
  Pipelines pipelines{};
  MemoryModel memory;
  StepModel step;
};

TEST(PlanStep, HidesTheReductionBehindTheLastBackward) {
  AskedStep asked;
  Stepped models(asked.problem());
  Candidate one{.ranks = 1, .micro_batch = 2, .micro_batches = 4}, eight = one;
  eight.ranks = eight.shards = 8;
  const StepParts alone = models.step.of(one), among = models.step.of(eight);
  EXPECT_EQ(alone.reduce + alone.gather + alone.publish, 0);
  EXPECT_DOUBLE_EQ(alone.products, among.products);
  // step = forward + max(backward, reduce) + the last bucket: computed as the law says it.
  const double gradients = kSmall.parameters() * 4, bucket = double(eight.bucket_bytes);
  const double buckets = std::ceil(gradients / bucket);
  const Reach reach{8, 1, 1};
  const double reduce =
                   buckets * models.step.network().seconds(Operation::kAllReduce, gradients / buckets, reach),
               tail = models.step.network().seconds(Operation::kAllReduce, bucket, reach);
  const double busy = alone.products + alone.attention + alone.memory_bound + alone.overhead;
  const Problem& p = models.problem;
  double backward = 0;
  for (std::int64_t layer = -1; layer < kSmall.layers; ++layer) {
    const LayerWork work = layer < 0 ? output_work(p, one) : layer_work(p, one, layer);
    const Rates& rates = models.step.rates();
    for (const Product& product : work.products) backward += 2 * rates.seconds(product);
    backward += rates.attention(2.5 * work.pairs, 2048, 64) + rates.memory(2 * work.bytes) +
                rates.operators(work.operators) + rates.operators(work.operators / 2);
  }
  const double law = busy - backward + std::max(backward, reduce - tail) + tail;
  EXPECT_NEAR(busy + among.reduce, law, 1e-12);
  EXPECT_GT(among.hidden.reduce, 0);
}

// Forward 7 times the rows of a token's experts, and over ep 8 more in both directions together.
TEST(PlanStep, CopiesToExpertsTakeTheTimeThatCalibrationFound) {
  ModelShape mixture = kSmall;
  mixture.experts = {.count = 8, .per_token = 2, .feed_forward = 256};
  AskedStep asked;
  const Problem same = asked.problem();
  Calibration slow;
  slow.expert_bandwidth = 1e6;
  Calibration slower = slow;
  slower.expert_bandwidth /= 2;
  const auto found = [&](const Calibration& calibration, int ep) {
    const Problem problem{.model = mixture,
                          .cluster = same.cluster,
                          .calibration = calibration,
                          .work = same.work,
                          .constants = same.constants};
    Stepped models(problem);
    return models.step.of({.ranks = ep, .replicas = ep, .ep = ep, .micro_batch = 1, .micro_batches = 1})
        .memory_bound;
  };
  const double rows =
      2 * double(same.work.sequence) * double(mixture.hidden) * 2 * double(mixture.layers);  // bytes
  for (const int ep : {1, 2})
    EXPECT_NEAR((found(slower, ep) - found(slow, ep)) / (rows * (3 * 7 + (ep > 1 ? 8 : 0)) / 1e6), 1, 1e-9);
}

TEST(PlanStep, IsAtLeastWhatLeastSays) {
  AskedStep asked;
  asked.cluster = small_hosts(64);
  Stepped models(asked.problem());
  for (const Strategy strategy : {Strategy::kBucketed, Strategy::kZero1, Strategy::kZero2, Strategy::kZero3})
    for (const int tp : {1, 2})
      for (const auto& [pp, schedule] :
           {std::pair{1, Schedule::kNone}, {4, Schedule::kOneFOneB}, {4, Schedule::kGPipe}}) {
        const Candidate c{.ranks = 8 * tp * pp,
                          .shards = 8,
                          .tp = tp,
                          .pp = pp,
                          .strategy = strategy,
                          .schedule = schedule,
                          .micro_batch = 1,
                          .micro_batches = 8};
        const StepParts parts = models.step.of(c);
        EXPECT_LE(models.step.least(c), parts.total() * (1 + 1e-12));
        EXPECT_EQ(parts.total(), models.step.of(c).total());
        EXPECT_EQ(pp > 1, parts.bubble > 0);
        double explained = 0;
        for (const Planned::Part& part : models.step.explain(c, parts)) explained += part.number.value;
        EXPECT_NEAR(explained, parts.total(), 1e-12 * parts.total());
        const auto spans = models.step.timeline(c);
        EXPECT_TRUE(std::ranges::all_of(spans, [](const Span& span) { return span.end >= span.begin; }));
        EXPECT_EQ(models.step.best_bucket_bytes(c), models.step.best_bucket_bytes(c));
      }
}

}  // namespace
}  // namespace isograd::planner
