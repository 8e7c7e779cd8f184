// Calibrations that are written and read back, parts that are not steady, and steps of layouts that were not
// measured, predicted by what was.
#include "plan/calibrate.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <numeric>

#include "base/memory.hpp"
#include "comm/environment.hpp"
#include "full_tests.hpp"
#include "kernels/matmul/product.hpp"
#include "plan/layouts_testing.hpp"
#include "plan/time.hpp"
#include "train/prepared_run.hpp"

namespace isograd::planner {
namespace {

namespace fs = std::filesystem;

ClusterFile calibrated(int ranks, const CalibrateOptions& options) {
  ClusterFile found;
  run_ranks(ranks, [&](World& world) {
    const ClusterFile own = calibrate(world, options);
    if (world.rank == 0) found = own;
  });
  return found;
}

// Ten milliseconds, so that nothing is measured often, and a nanosecond for each byte or FLOP.
double known(double size) { return 1e-2 + 1e-9 * size; }

TEST(PlanCalibrate, IsReadBackAsItWasWritten) {
  const ClusterFile found = calibrated(
      2, {.seconds = 12, .told = [](const std::string&, int, double size) { return known(size); }});
  const Calibration& calibration = found.calibration;
  EXPECT_EQ(found.cluster.devices, 2);
  EXPECT_TRUE(found.cluster.host_memory);
  const double elements = 8 << 20;
  EXPECT_NEAR(found.cluster.device.memory_bandwidth, 12 * elements / known(12 * elements), 1);
  EXPECT_NEAR(calibration.optimizer_bandwidth, 24 * elements / known(24 * elements), 1);
  // Forward 7 of 1024 rows of 512 fp32 numbers, backward twice as many.
  const double copies = 3.0 * 7 * 1024 * 512 * 4;
  EXPECT_NEAR(calibration.expert_bandwidth, copies / known(copies), 1);
  ASSERT_FALSE(calibration.products.empty());
  for (const auto& [m, n, k, precision, flops, spread] : calibration.products) {
    const double multiplied = 3 * 2 * double(m) * double(n) * double(k);
    EXPECT_NEAR(flops / (multiplied / known(multiplied)), 1, 1e-12);
  }
  ASSERT_EQ(found.cluster.links.size(), 1);
  EXPECT_NEAR(found.cluster.links[0].latency, 1e-2, 1e-12);
  for (const auto& collective : calibration.collectives) {
    EXPECT_NEAR(collective.latency, 1e-2, 1e-12) << collective.operation;
    EXPECT_NEAR(collective.bandwidth, 1e9, 1) << collective.operation;
  }
  const std::string text = to_toml(found);
  const ClusterFile read = parse_cluster(text, "here.toml");
  EXPECT_EQ(to_toml(read), text);
  EXPECT_EQ(read.calibration.machine, machine_text());
  EXPECT_EQ(read.calibration.not_measured, calibration.not_measured);
  for (const char* missing : {"networks", "GPUs and NCCL", "MPI", "float8"})
    EXPECT_THAT(calibration.not_measured, testing::Contains(testing::StartsWith(missing)));
}

TEST(PlanCalibrate, LeavesOutWhatChangesFromRoundToRound) {
  const auto told = [](const std::function<double(int)>& slower) {
    return [=](const std::string& kind, int round, double size) {
      return known(size) * (kind == "update of an optimizer" ? slower(round) : 1);
    };
  };
  const auto said = testing::Contains(testing::StartsWith("update of an optimizer: the middle half"));
  const auto found = [&](const std::function<double(int)>& slower) {
    const ClusterFile file = calibrated(2, {.seconds = 12, .told = told(slower)});
    const double rate = file.calibration.optimizer_bandwidth;
    EXPECT_THAT(file.calibration.not_measured,
                rate > 0 ? testing::Not(said) : testing::Matcher<std::vector<std::string>>(said));
    return rate * known(24 * (8 << 20)) / (24 * (8 << 20));
  };
  EXPECT_NEAR(found([](int round) { return round == 1 ? 9 : 1; }), 1, 1e-9);
  // The median of all rounds, not the fastest of them.
  EXPECT_NEAR(found([](int round) { return 1 + 0.1 * round; }), 1 / 1.2, 1e-9);
  // Rounds are made again as long as the middle half of them does not agree.
  EXPECT_NEAR(found([](int round) { return round < 2 ? 3 : 1; }), 1, 1e-9);
  EXPECT_EQ(found([](int round) { return round < 3 ? 3 : 1; }), 0);
  EXPECT_EQ(found([](int round) { return round % 2 ? 2 : 1; }), 0);
  // Nothing to plan from.
  const auto changing = [](const std::string&, int round, double size) { return known(size) * (1 + round); };
  EXPECT_THROW(calibrated(2, {.seconds = 12, .told = changing}), ConfigError);
}

// ---- steps of layouts that nothing was measured of ----

struct HeldOutModel {
  ModelShape shape;
  Work work;
};
std::vector<HeldOutModel> held_out_models() {
  const auto work = [](std::int64_t samples, std::int64_t sequence) {
    return Work{.tokens = double(samples * sequence), .sequence = sequence, .precision = Precision::kFloat32};
  };
  ModelShape small{.name = "small",
                   .layers = 4,
                   .hidden = 192,
                   .heads = 6,
                   .key_value_heads = 6,
                   .head_dim = 32,
                   .feed_forward = 512,
                   .vocabulary = 258},
      medium{.name = "medium",
             .layers = 4,
             .hidden = 512,
             .heads = 8,
             .key_value_heads = 4,
             .head_dim = 64,
             .feed_forward = 1408,
             .vocabulary = 258},
      longer{.name = "long",
             .layers = 4,
             .hidden = 256,
             .heads = 4,
             .key_value_heads = 4,
             .head_dim = 64,
             .feed_forward = 704,
             .vocabulary = 258},
      experts = longer;
  experts.name = "experts", experts.family = "mixtral", experts.feed_forward = 512;
  experts.experts = {.count = 8, .per_token = 2, .feed_forward = 512};
  return {{small, work(16, 256)}, {medium, work(8, 128)}, {longer, work(4, 1024)}, {experts, work(8, 256)}};
}

MeasuredLayouts held_out_layouts(const HeldOutModel& of) {
  MeasuredLayouts layouts(of.work.samples(), 4, of.shape.experts.count > 0);
  for (const auto& [name, candidate] : std::vector<MeasuredLayout>(layouts))
    if (candidate.data_ranks() == 2 && candidate.ep == 1 && !candidate.checkpoint) {
      Candidate shared = candidate;
      shared.share_parameters = true;
      layouts.add(name + ", shared parameters", shared, candidate.micro_batches);
    }
  layouts.add("replicas", {.replicas = 2, .strategy = Strategy::kZero1}, 2);
  return layouts;
}

double quantile(std::vector<double> values, double at) {
  std::ranges::sort(values);
  return values[static_cast<std::size_t>(double(values.size() - 1) * at)];
}

// Seconds of a product on all ranks at once. The speed of a shared machine drifts by a third within minutes:
// steps are compared in units of this product, which was timed before and after the calibration and is timed
// before each step.
class Clock {
 public:
  explicit Clock(World& world) : world_(world) {}
  double now() {
    double least = 1e9;
    for (int i = 0; i < 2; ++i) {
      world_.group.barrier();
      const auto start = std::chrono::steady_clock::now();
      product(x_, weight_);
      least = std::min(least, seconds_since(world_, start));
    }
    return least;
  }
  double usual() {
    std::vector<double> all;
    for (int i = 0; i < 50; ++i) all.push_back(now());
    return quantile(all, 0.5);
  }
  // The slowest rank's.
  static double seconds_since(World& world, std::chrono::steady_clock::time_point start) {
    const std::chrono::duration<double> own = std::chrono::steady_clock::now() - start;
    at::Tensor slowest = at::full({1}, own.count(), at::kDouble);
    world.group.all_reduce(slowest, ReduceOp::kMax);
    return slowest.item<double>();
  }

 private:
  World& world_;
  at::Tensor x_ = at::randn({512, 1024}), weight_ = at::randn({1024, 1024});
};

// On each of two ranks; rank 0 compares.
void measure_held_out(World& world, const fs::path& folder) {
  keep_freed_memory();
  Clock clock(world);
  const double before = clock.usual();
  const ClusterFile here = calibrate(world, {});
  const double calibrated = (before + clock.usual()) / 2;
  std::vector<double> errors;
  if (world.rank == 0) std::printf("%s\n", to_toml(here).c_str());
  for (const HeldOutModel& of : held_out_models()) {
    const MeasuredLayouts layouts = held_out_layouts(of);
    std::vector<RunConfig> configs;
    for (const auto& [name, candidate] : layouts) {
      DecoderConfig shape = decoder_of(of.shape);
      // Embeddings then outweigh the mean that attention adds, and routers see tokens. With the usual range
      // all tokens of a model that is not trained go to the same two experts, which no plan can know.
      shape.initializer_range = 0.002;
      configs.push_back(measured_config(shape, here.cluster, of.work, candidate, folder));
      configs.back().schedule.peak = 1e-4;
    }
    std::vector<std::unique_ptr<PreparedRun>> runs;
    for (const RunConfig& config : configs) runs.push_back(std::make_unique<PreparedRun>(config, world));
    std::vector<std::vector<double>> seconds(runs.size());
    constexpr int kTurns = 6, kSteps = 3;
    for (int turn = 0; turn < kTurns; ++turn)  // the first warms up
      for (std::size_t i = 0; i < runs.size(); ++i)
        for (int step = 0; step < kSteps; ++step) {
          const double slower = clock.now() / calibrated;
          world.group.barrier();
          const auto start = std::chrono::steady_clock::now();
          runs[i]->step();
          const double took = Clock::seconds_since(world, start) / slower;
          if (turn > 0 && step > 0) seconds[i].push_back(took);
        }
    if (world.rank > 0) continue;
    const Problem problem{
        .model = of.shape,
        .cluster = here.cluster,
        .calibration = here.calibration,
        .work = of.work,
        .constants = constants_of(Program::kIsograd, here.cluster.device, of.work.precision)};
    Pipelines pipelines;
    MemoryModel memory(problem, pipelines);
    StepModel model(problem, pipelines, memory);
    std::vector<std::pair<double, double>> found;  // measured, predicted
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      const StepParts parts = model.of(layouts[i].candidate);
      const double measured = quantile(seconds[i], 0.5), predicted = parts.total();
      const auto [least, most] = std::ranges::minmax(seconds[i]);
      found.emplace_back(measured, predicted), errors.push_back(std::abs(predicted / measured - 1));
      std::printf("%-8s %-26s %8.1f ms (%.1f to %.1f), predicted %8.1f: %+5.1f %%", of.shape.name.c_str(),
                  layouts[i].name.c_str(), measured * 1e3, least * 1e3, most * 1e3, predicted * 1e3,
                  100 * (predicted / measured - 1));
      for (const Planned::Part& part : model.explain(layouts[i].candidate, parts))
        std::printf("  %s %.1f", part.name.c_str(), part.number.value * 1e3);
      std::printf("\n");
    }
    const auto fastest = std::ranges::min_element(found),  // the pair's first, measured
        predicted_fastest = std::ranges::min_element(found, {}, &std::pair<double, double>::second);
    std::printf("%s: predicted as the fastest is %s, %.1f %% from the fastest, %s\n", of.shape.name.c_str(),
                layouts[std::size_t(predicted_fastest - found.begin())].name.c_str(),
                100 * (predicted_fastest->first / fastest->first - 1),
                layouts[std::size_t(fastest - found.begin())].name.c_str());
    std::fflush(stdout);
    EXPECT_LE(predicted_fastest->first, 1.05 * fastest->first) << of.shape.name;
    for (const auto& [measured, predicted] : found)
      for (const auto& [other, other_predicted] : found)
        if (measured > 1.15 * other)
          EXPECT_GT(predicted, other_predicted) << of.shape.name << ": " << measured << " and " << other;
  }
  if (world.rank > 0) return;
  std::ranges::sort(errors);
  std::printf("%zu layouts: median error %.1f %%, worst %.1f %%\n", errors.size(),
              100 * errors[errors.size() / 2], 100 * errors.back());
  EXPECT_LE(errors[errors.size() / 2], 0.08);
  EXPECT_LE(errors.back(), 0.15);
}

// The whole matrix takes some five minutes and a machine on which nothing else runs: `./dev full`.
TEST(PlanHeldOut, StepsTakeWhatWasPredicted) {
  for (const HeldOutModel& of : held_out_models())
    for (const auto& [name, candidate] : held_out_layouts(of)) {
      const auto refused = refusal(of.shape, {}, of.work, candidate);
      EXPECT_FALSE(refused) << of.shape.name << ", " << name << ": " << (refused ? refused->found : "");
    }
  if (!full_tests()) return;
  constexpr const char* kFolder = "ISOGRAD_HELD_OUT_FOLDER";
  if (read_rank_environment()) {
    World world = join();
    return measure_held_out(world, std::getenv(kFolder));
  }
  const fs::path folder = folder_with_text("held-out", 1 << 18);
  ::setenv(kFolder, folder.c_str(), 1);
  EXPECT_EQ(launch_ranks({fs::read_symlink("/proc/self/exe").string(),
                          "--gtest_filter=PlanHeldOut.StepsTakeWhatWasPredicted"},
                         {.ranks = 2}),
            0);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace isograd::planner
