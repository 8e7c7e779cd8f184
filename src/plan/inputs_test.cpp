// Inputs that are read, and every bad input of docs/planning_reference.md that is not about a layout: refused
// with what was found, what was expected and what to do.
#include "plan/inputs.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <random>

#include "base/error_testing.hpp"
#include "base/files.hpp"

namespace isograd::planner {
namespace {

namespace fs = std::filesystem;
using error_testing::error_of;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(),
                 kInfinity = std::numeric_limits<double>::infinity();

class PlannerInputs : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("isograd_inputs_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string written(const std::string& name, const std::string& text) const {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return (folder_ / name).string();
  }
  fs::path folder_;
};

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

const std::string kCluster = R"([cluster]
name = "ours"
devices = 64
per_host = 8
reserve = "1 GiB"

[device]
name = "chip"
memory = "80 GB"
memory_bandwidth = 3.35e12
peak_bfloat16 = "989 TFLOP/s"
best_found_bfloat16 = 794.5e12

[[link]]
name = "fast"
ranks = 8
latency = "3.4 us"
bandwidth = "3600 Gb/s"

[[link]]
name = "network"
latency = 14e-6
bandwidth = "50 GB/s"
origin = "assumed"
)";

const std::string kCalibration = R"(
[calibration]
format = 3
machine = "MACHINE"
memory_bandwidth = 2e10
operator_overhead = 4e-6
overlap = 0.4
not_measured = ["all_to_all: one rank"]

[[product]]
m = 512
n = 1024
k = 2048
precision = "float32"
flops = 9.1e10
spread = 0.02

[[attention]]
length = 1024
head_dim = 64
precision = "float32"
flops = 6.1e10

[[collective]]
operation = "all_reduce"
backend = "shm"
ranks = 2
latency = 3e-5
bandwidth = 4.1e9
)";

// ---- clusters ----

TEST_F(PlannerInputs, AClusterIsReadInItsUnits) {
  const auto [cluster, calibration] = parse_cluster(kCluster, "ours.toml");
  EXPECT_EQ(cluster.hosts(), 8);
  EXPECT_EQ(cluster.reserve, double{1 << 30});
  EXPECT_EQ(cluster.device.memory, 80e9);
  EXPECT_EQ(cluster.device.peak, (std::array<double, 4>{0, 0, 989e12, 0}));
  EXPECT_EQ(cluster.device.best_found[2], 794.5e12);
  ASSERT_EQ(cluster.links.size(), 2u);
  EXPECT_EQ(cluster.links[0].bandwidth, 450e9);
  EXPECT_DOUBLE_EQ(cluster.links[0].latency, 3.4e-6);
  EXPECT_EQ(cluster.links[1].ranks, 64);
  EXPECT_EQ(cluster.links[1].origin, Origin::kAssumed);
  EXPECT_TRUE(calibration.empty());
}

TEST_F(PlannerInputs, QuantitiesThatAreSmallOrWholeAndLarge) {
  const ClusterFile read = parse_cluster(
      replaced(replaced(kCluster, "\"989 TFLOP/s\"", "10000000000000000"), "\"1 GiB\"", "\"512 kB\""),
      "ours.toml");
  EXPECT_EQ(read.cluster.device.peak[std::size_t(Precision::kBFloat16)], 1e16);
  EXPECT_EQ(read.cluster.reserve, 512e3);
}

TEST_F(PlannerInputs, BadClustersAreRefused) {
  struct Case {
    std::string from, to;
    std::vector<std::string> said;
  };
  const std::vector<Case> cases = {
      // 0, negative, not a number, infinite, absurd
      {"memory = \"80 GB\"", "memory = 0", {"ours.toml: device.memory", "0 bytes", "above 0"}},
      {"memory = \"80 GB\"", "memory = -80e9", {"device.memory", "-8", "above 0"}},
      {"memory = \"80 GB\"", "memory = nan", {"device.memory", "nan"}},
      {"memory = \"80 GB\"", "memory = inf", {"device.memory", "inf"}},
      {"memory = \"80 GB\"", "memory = 1e30", {"device.memory", "1e+30", "at most 1e+15"}},
      {"memory_bandwidth = 3.35e12", "memory_bandwidth = 0", {"device.memory_bandwidth", "0 bytes/s"}},
      {"latency = 14e-6", "latency = -1", {"link network: latency", "-1"}},
      {"latency = 14e-6", "latency = nan", {"link network: latency", "nan"}},
      {"latency = 14e-6", "latency = 14", {"link network: latency", "of seconds", "14 us"}},
      {"bandwidth = \"50 GB/s\"", "bandwidth = 0", {"link network: bandwidth", "0 bytes/s"}},
      {"peak_bfloat16 = \"989 TFLOP/s\"", "peak_bfloat16 = inf", {"device.peak_bfloat16", "inf"}},
      {"reserve = \"1 GiB\"", "reserve = \"100 GiB\"", {"cluster.reserve", "below the device's"}},
      {"reserve = \"1 GiB\"", "reserve = -1", {"cluster.reserve", "-1"}},
      {"memory = \"80 GB\"", "memory = 20000000000000000", {"device.memory", "2e+16", "at most 1e+15"}},
      // units
      {"3600 Gb/s", "3600 GB/s", {"link fast: bandwidth", "is that Gb/s?", "450 GB/s"}},
      {"50 GB/s", "400 GB/s", {"link network: bandwidth", "is that Gb/s?", "50 GB/s"}},
      {"\"50 GB/s\"", "50", {"link network: bandwidth", "50 bytes/s", "450 GB/s"}},
      {"\"989 TFLOP/s\"", "989", {"device.peak_bfloat16", "989 FLOP/s", "989 TFLOP/s"}},
      {"\"80 GB\"", "80", {"device.memory", "80 bytes", "80 GiB"}},
      {"\"80 GB\"", "\"80 GB/s\"", {"ours.toml:9: [device].memory", "80 GB/s", "a text with its unit"}},
      {"\"80 GB\"", "\"much\"", {"[device].memory", "much"}},
      {"\"80 GB\"", "true", {"[device].memory", "true"}},
      // devices that hosts do not divide
      {"devices = 64", "devices = 60", {"60 devices in hosts of 8", "56 or 64"}},
      {"devices = 64", "devices = 0", {"cluster.devices", "0", "1 to 10000000"}},
      {"devices = 64", "devices = -8", {"cluster.devices", "-8"}},
      {"devices = 64", "devices = 9000000000000000000", {"ours.toml: cluster.devices"}},
      {"devices = 64", "devices = 64.5", {"[cluster].devices", "64.5", "a whole number"}},
      {"per_host = 8", "per_host = 0", {"cluster.per_host"}},
      // links
      {"ranks = 8", "ranks = 64", {"link", "ranks", "64 over a link of 64"}},
      {"origin = \"assumed\"", "ranks = 32", {"[[link]]", "at most 32", "joins all 64"}},
      {"origin = \"assumed\"", "origin = \"guessed\"", {"[[link]].origin", "guessed", "assumed"}},
      // unknown and missing keys
      {"per_host", "perhost", {"ours.toml:4", "unknown key \"perhost\"", "Did you mean \"per_host\"?"}},
      {"[device]", "[devices]", {"ours.toml:7", "unknown section", "Did you mean \"device\"?"}},
      {"latency = 14e-6", "", {"[[link]] without latency"}},
      {"memory = \"80 GB\"\n", "", {"[device] without memory"}},
      {"[[link]]\nname = \"fast\"", "[link]\nname = \"fast\"", {"ours.toml", "link"}},
      {"[cluster]\n", "", {"ours.toml:2", "unknown section \"devices\""}},
      {"[cluster]", "[cluster", {"ours.toml:1:"}},
  };
  for (const auto& [from, to, said] : cases) {
    const std::string message =
        error_of([&, f = from, t = to] { parse_cluster(replaced(kCluster, f, t), "ours.toml"); });
    for (const std::string& part : said) EXPECT_THAT(message, HasSubstr(part)) << from << " -> " << to;
  }
  EXPECT_THAT(error_of([] { parse_cluster("", "ours.toml"); }), HasSubstr("no [cluster]"));
  EXPECT_THAT(error_of([] { parse_cluster("cluster = 3\n[device]", "ours.toml"); }), HasSubstr("a section"));
  EXPECT_THAT(error_of([] { parse_cluster("a\xff = 1", "ours.toml"); }), HasSubstr("ours.toml:1"));
  EXPECT_THAT(error_of([] { parse_cluster(std::string(2 << 20, '#'), "ours.toml"); }), HasSubstr("at most"));
}

TEST_F(PlannerInputs, NamesOfTheTableAreKnownAndNearOnesOffered) {
  EXPECT_THAT(error_of([] { read_cluster("h10"); }),
              AllOf(HasSubstr("h10"), HasSubstr("Did you mean h100?")));
  EXPECT_THAT(error_of([] { read_cluster("quantum"); }), AllOf(HasSubstr("quantum"), HasSubstr("gb200")));
  EXPECT_THAT(error_of([] { read_cluster("/nowhere/ours.toml"); }), HasSubstr("/nowhere/ours.toml"));
  const std::string short_form =
      "[cluster]\nname = \"x\"\ndevices = 1\nper_host = 1\n[device]\nname = \"NAME\"\n";
  EXPECT_EQ(parse_cluster(replaced(short_form, "NAME", "h200"), "x").cluster.device.memory,
            141.0 * (1 << 30));
  EXPECT_THAT(error_of([&] { parse_cluster(replaced(short_form, "NAME", "h201"), "x"); }),
              AllOf(HasSubstr("x:5: [device].name"), HasSubstr("Did you mean h200?")));
}

TEST_F(PlannerInputs, TheTableIsWhole) {
  EXPECT_GE(built_in_clusters().size(), 20u);
  for (const std::string& name : built_in_clusters()) {
    const Cluster* cluster = built_in(name);
    ASSERT_NE(cluster, nullptr);
    EXPECT_NO_THROW(check(*cluster)) << name;
    EXPECT_FALSE(cluster->device.source.empty()) << name;
    EXPECT_GT(cluster->device.peak[2], cluster->device.best_found[2]) << name;
    for (const std::int64_t devices : {8, 64, 1024, 16384, 131072})
      EXPECT_EQ(read_cluster(name, devices).links.back().ranks, devices) << name;
    const std::string text = to_toml(ClusterFile{*cluster, {}});
    EXPECT_EQ(to_toml(parse_cluster(text, name)), text);
  }
  EXPECT_EQ(built_in("abacus"), nullptr);
  // Inside a rack no network is left, beyond it there is one.
  EXPECT_EQ(read_cluster("gb200", 72).links.size(), 1u);
  EXPECT_EQ(read_cluster("gb200", 144).links.size(), 2u);
  EXPECT_EQ(read_cluster("h100", 4).hosts(), 1);
}

TEST_F(PlannerInputs, MoreDevicesOfTheTableHaveTheLinksThatFewerDoNotNeed) {
  for (const char* name : {"gb200", "h100"}) {
    const Cluster whole = read_cluster(name, 144);
    for (const std::int64_t devices : {1, 4, 8, 64, 72}) {
      const Cluster more = on_devices(read_cluster(name, devices), 144);
      ASSERT_EQ(more.links.size(), 2u) << name << " " << devices;
      EXPECT_EQ(more.links[0].ranks, whole.links[0].ranks);
      EXPECT_EQ(more.links[1].ranks, 144);
      EXPECT_EQ(to_toml({more, {}}), to_toml({whole, {}}));
    }
    EXPECT_EQ(to_toml({on_devices(whole, 8), {}}), to_toml({read_cluster(name, 8), {}}));
  }
  // Links of another cluster are its own: the last joins all.
  Cluster ours = parse_cluster(kCluster, "x").cluster;
  EXPECT_EQ(on_devices(ours, 512).links.back().ranks, 512);
  ours.name = "gb200";
  EXPECT_EQ(on_devices(ours, 512).links.front().ranks, 8);
}

TEST_F(PlannerInputs, AnotherNumberOfDevicesIsChecked) {
  const std::string file = written("ours.toml", kCluster);
  EXPECT_EQ(read_cluster(file, 16).links.back().ranks, 16);
  EXPECT_EQ(read_cluster(file, 8).links.size(), 1u);
  EXPECT_EQ(read_cluster(file, 16384).hosts(), 2048);
  EXPECT_THAT(error_of([&] { read_cluster(file, 17); }), HasSubstr("16 or 24"));
  EXPECT_THAT(error_of([&] { read_cluster(file, 0); }), HasSubstr("cluster.devices"));
  EXPECT_THAT(error_of([&] { read_cluster("h100", std::int64_t{1} << 62); }), HasSubstr("cluster.devices"));
  // Primes and odd numbers are no error as long as hosts are equal.
  const std::string singles = replaced(kCluster, "per_host = 8", "per_host = 1");
  EXPECT_EQ(read_cluster(written("singles.toml", singles), 24001).hosts(), 24001);
  const auto cut = singles.find("[[link]]\nname = \"network\"");
  EXPECT_THAT(error_of([&] { parse_cluster(singles.substr(0, cut), "x"); }),
              HasSubstr("a link that joins all 64"));
}

// ---- calibrations ----

TEST_F(PlannerInputs, CalibrationsAreReadBackNumberForNumber) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> exponent(7, 14);
  const auto any = [&] { return std::pow(10, exponent(random)); };
  for (int round = 0; round < 50; ++round) {
    ClusterFile file = parse_cluster(kCluster + kCalibration, "x");
    file.calibration.machine = "m \"1\"\\\n\t\xc3\xa4";
    file.cluster.device.memory = any(), file.cluster.device.memory_bandwidth = any();
    file.cluster.reserve = file.cluster.device.memory / 3;
    file.cluster.links[0].latency = 1 / any(), file.cluster.links[1].bandwidth = any() / 1e4 + 1e6;
    file.calibration.products[0].flops = any(), file.calibration.products[0].precision = Precision::kFloat64;
    file.calibration.attention[0].flops = any();
    file.calibration.collectives[0].latency = 0, file.calibration.collectives[0].bandwidth = any();
    file.calibration.overlap = round % 2 == 0 ? std::nullopt : std::optional(1 / any());
    const ClusterFile back = parse_cluster(to_toml(file), "back");
    EXPECT_EQ(back.cluster.device.memory, file.cluster.device.memory);
    EXPECT_EQ(back.cluster.device.memory_bandwidth, file.cluster.device.memory_bandwidth);
    EXPECT_EQ(back.cluster.reserve, file.cluster.reserve);
    EXPECT_EQ(back.cluster.links[0].latency, file.cluster.links[0].latency);
    EXPECT_EQ(back.cluster.links[1].bandwidth, file.cluster.links[1].bandwidth);
    EXPECT_EQ(back.cluster.links[1].origin, Origin::kAssumed);
    EXPECT_EQ(back.calibration.machine, file.calibration.machine);
    EXPECT_EQ(back.calibration.products[0].flops, file.calibration.products[0].flops);
    EXPECT_EQ(back.calibration.products[0].k, 2048);
    EXPECT_EQ(back.calibration.products[0].precision, Precision::kFloat64);
    EXPECT_EQ(back.calibration.attention[0].flops, file.calibration.attention[0].flops);
    EXPECT_EQ(back.calibration.attention[0].length, 1024);
    EXPECT_EQ(back.calibration.collectives[0].bandwidth, file.calibration.collectives[0].bandwidth);
    EXPECT_EQ(back.calibration.overlap, file.calibration.overlap);
    EXPECT_EQ(back.calibration.not_measured, file.calibration.not_measured);
  }
}

TEST_F(PlannerInputs, BadCalibrationsAreRefused) {
  const auto of = [&](const std::string& from, const std::string& to) {
    return error_of([&] { parse_cluster(replaced(kCluster + kCalibration, from, to), "here.toml"); });
  };
  EXPECT_THAT(of("format = 3", "format = 1"),
              AllOf(HasSubstr("calibration.format"), HasSubstr("calibrate again")));
  EXPECT_THAT(of("format = 3", ""), HasSubstr("without format"));
  EXPECT_THAT(of("flops = 9.1e10", "flops = nan"), HasSubstr("product.flops"));
  EXPECT_THAT(of("k = 2048", "k = 0"), HasSubstr("product.k"));
  EXPECT_THAT(of("precision = \"float32\"", "precision = \"half\""), HasSubstr("bfloat16"));
  EXPECT_THAT(of("flops = 6.1e10", "flops = 0"), HasSubstr("attention.flops"));
  EXPECT_THAT(of("length = 1024", "length = 0"), HasSubstr("attention.length"));
  EXPECT_THAT(of("bandwidth = 4.1e9", "bandwidth = 0"), HasSubstr("collective.bandwidth"));
  EXPECT_THAT(of("ranks = 2", "ranks = -2"), HasSubstr("collective.ranks"));
  EXPECT_THAT(of("overlap = 0.4", "overlap = 1.4"), HasSubstr("calibration.overlap"));
  EXPECT_THAT(of("overlap = 0.4", "overlap = nan"), HasSubstr("calibration.overlap"));
  EXPECT_THAT(of("operator_overhead = 4e-6", "operator_overhead = -1"), HasSubstr("operator_overhead"));
  EXPECT_THAT(of("[\"all_to_all: one rank\"]", "[3]"), HasSubstr("the integer 3"));
  const auto cut = kCalibration.find("[[product]]");
  EXPECT_THAT(error_of([&] { parse_cluster(kCluster + kCalibration.substr(cut), "here.toml"); }),
              HasSubstr("no [calibration]"));
}

TEST_F(PlannerInputs, ACalibrationIsOfThisMachine) {
  const std::string machine = machine_text();
  EXPECT_THAT(machine, AllOf(HasSubstr("cores"), HasSubstr("LibTorch")));
  ClusterFile file = parse_cluster(kCluster + kCalibration, "x");
  file.calibration.machine = machine;
  const std::string ours = written("ours.toml", to_toml(file));
  EXPECT_EQ(read_calibration(ours).products.size(), 1u);
  file.calibration.machine = "Zuse Z3, 1 core, LibTorch 0.1";
  const std::string theirs = written("theirs.toml", to_toml(file));
  EXPECT_THAT(
      error_of([&] { read_calibration(theirs); }),
      AllOf(HasSubstr("theirs.toml"), HasSubstr("Zuse Z3"), HasSubstr(machine), HasSubstr("calibrate")));
  EXPECT_TRUE(read_calibration("h100").empty());
  EXPECT_TRUE(read_calibration(written("sheet.toml", kCluster)).empty());

  const fs::path before = fs::current_path();
  fs::current_path(folder_);
  EXPECT_THAT(error_of([] { read_cluster("here"); }), HasSubstr("Run isograd calibrate"));
  fs::create_directories(here_file().parent_path());
  fs::copy_file(ours, here_file());
  EXPECT_EQ(read_cluster("here").name, "ours");
  EXPECT_EQ(read_cluster("here", 64).devices, 64);
  EXPECT_THAT(error_of([] { read_cluster("here", 128); }),
              AllOf(HasSubstr("128 ranks, of which 64 were measured"), HasSubstr("calibrate --ranks 128")));
  EXPECT_FALSE(read_calibration("here").empty());
  fs::current_path(before);
}

TEST_F(PlannerInputs, APeakIsOfTheTypeOfTheRun) {
  const Cluster cluster = parse_cluster(kCluster, "x").cluster;
  EXPECT_NO_THROW(check_peak(cluster.device, {}, Precision::kBFloat16));
  EXPECT_THAT(error_of([&] { check_peak(cluster.device, {}, Precision::kFloat32); }),
              AllOf(HasSubstr("train.dtype"), HasSubstr("float32"), HasSubstr("bfloat16"),
                    HasSubstr("peak_float32")));
  const Calibration measured = parse_cluster(kCluster + kCalibration, "x").calibration;
  EXPECT_NO_THROW(check_peak(cluster.device, measured, Precision::kFloat32));
}

// ---- work ----

TEST_F(PlannerInputs, TokensAreReadAsTheyAreSaid) {
  EXPECT_EQ(parse_tokens("4M", "--tokens"), 4194304);
  EXPECT_EQ(parse_tokens("4194304", "--tokens"), 4194304);
  EXPECT_EQ(parse_tokens("4 Mi", "--tokens"), 4194304);
  EXPECT_EQ(parse_tokens("1.5e12", "--tokens"), 1.5e12);
  EXPECT_EQ(parse_tokens("0.5k", "--tokens"), 512);
  for (const char* text :
       {"", "M", "many", "4X", "4MM", "4M8", "-4M", "0", "nan", "inf", "1e30", "0x10", "4.5"})
    EXPECT_THAT(error_of([&] { parse_tokens(text, "--tokens"); }), HasSubstr("--tokens")) << text;
}

TEST_F(PlannerInputs, BadWorkIsRefused) {
  EXPECT_NO_THROW(check(Work{.tokens = 4194304, .sequence = 4096}));
  const auto of = [](Work work) { return error_of([&] { check(work); }); };
  EXPECT_THAT(of({.tokens = 0}), HasSubstr("tokens"));  // a batch of 0
  EXPECT_THAT(of({.tokens = -1}), HasSubstr("above 0"));
  EXPECT_THAT(of({.tokens = kNaN}), HasSubstr("nan"));
  EXPECT_THAT(of({.tokens = kInfinity}), HasSubstr("inf"));
  EXPECT_THAT(of({.tokens = 1e30}), HasSubstr("at most 1e+15"));
  EXPECT_THAT(of({.tokens = 1024, .sequence = 4096}), HasSubstr("at least the 4096 of a sequence"));
  EXPECT_THAT(of({.tokens = 4e6, .sequence = 4096}), HasSubstr("3997696 or 4001792"));
  EXPECT_THAT(of({.tokens = 4096.5, .sequence = 4096}), HasSubstr("4096 or 8192"));
  EXPECT_THAT(of({.tokens = 4096, .sequence = 0}), HasSubstr("sequence"));
  EXPECT_THAT(of({.tokens = 4096, .sequence = -4096}), HasSubstr("sequence"));
  EXPECT_THAT(of({.tokens = 4096, .states = -1}), HasSubstr("states"));
  EXPECT_THAT(of({.tokens = 4096, .documents = {512, 0}}), HasSubstr("documents"));
}

TEST_F(PlannerInputs, NothingOverflowsAtTheLargestSizes) {
  ModelShape model = parse_model("layers=100,hidden=1000000,heads=1000,vocabulary=256000", "--model");
  EXPECT_GT(model.parameters(), 1e15);
  EXPECT_LT(model.parameters(), 1.3e15);
  const Cluster cluster = read_cluster("h100", 1'000'000);
  EXPECT_EQ(cluster.hosts(), 125'000);
  EXPECT_EQ((Work{.tokens = 4096e9, .sequence = 4096}).samples(), 1'000'000'000);
  EXPECT_THAT(error_of([] { parse_model("layers=100000,hidden=1000000,heads=1000", "--model"); }),
              AllOf(HasSubstr("parameters"), HasSubstr("1e+16")));
  for (const char* size : {"layers", "hidden", "heads"})
    EXPECT_THAT(error_of([&] {
                  parse_model(replaced("layers=2,hidden=8,heads=2", size,
                                       std::string(size) + "=9223372036854775807,x"),
                              "--model");
                }),
                HasSubstr(size));
}

// ---- models ----

TEST_F(PlannerInputs, AModelIsReadFromNumbers) {
  const ModelShape llama = parse_model(
      "layers=32, hidden=4096, heads=32, key_value_heads=8, feed_forward=14336, vocabulary=128256", "x");
  EXPECT_EQ(llama.parameters(), 8030261248.0);
  const ModelShape derived = parse_model("layers=32,hidden=4096,heads=32", "x");  // Llama 1 and 2
  EXPECT_EQ(derived.feed_forward, 11008);
  EXPECT_EQ(derived.parameters(), 6738415616.0);
  const ModelShape mixtral = parse_model(
      "family=mixtral,layers=32,hidden=4096,heads=32,key_value_heads=8,feed_forward=14336,vocabulary=32000,experts=8,"
      "experts_per_token=2,dense_layers=1",
      "x");
  EXPECT_EQ(mixtral.experts.feed_forward, 14336);
  EXPECT_FALSE(mixtral.has_experts(0));
  EXPECT_TRUE(mixtral.has_experts(1));
}

TEST_F(PlannerInputs, BadNumbersOfAModelAreRefused) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"", "nothing"},
      {"layers", "key=number"},
      {"layers=2,hidden=8", "model without heads"},
      {"layers=0,hidden=8,heads=2", "layers"},
      {"layers=-2,hidden=8,heads=2", "layers"},
      {"layers=2,hidden=-9223372036854775808,heads=2", "hidden"},
      {"layers=two,hidden=8,heads=2", "a whole number"},
      {"layers=2.5,hidden=8,heads=2", "2.5"},
      {"layers=nan,hidden=8,heads=2", "nan"},
      {"layers=99999999999999999999,hidden=8,heads=2", "a whole number"},
      {"layers=2,layers=3,hidden=8,heads=2", "the key twice"},
      {"layrs=2,hidden=8,heads=2", "Did you mean \"layers\"?"},
      {"layers=2,hidden=8,heads=3", "a multiple of heads"},
      {"layers=2,hidden=8,heads=2,key_value_heads=3", "a divisor of heads"},
      {"layers=2,hidden=8,heads=2,gated=maybe", "true or false"},
      {"layers=2,hidden=8,heads=2,experts=4", "experts_per_token"},
      {"layers=2,hidden=8,heads=2,experts=4,experts_per_token=5", "experts_per_token"},
      {"layers=2,hidden=8,heads=2,experts=4,experts_per_token=1,dense_layers=3", "dense_layers"},
  };
  for (const auto& [text, said] : cases)
    EXPECT_THAT(error_of([&, t = text] { parse_model(t, "--model"); }),
                AllOf(HasSubstr("--model"), HasSubstr(said)))
        << text;
}

const std::string kConfig =
    R"({"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
 "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128})";

TEST_F(PlannerInputs, AHuggingFaceModelIsReadByFolderAndByFile) {
  const std::string file = written("small/config.json", kConfig);
  for (const fs::path& path : {fs::path(file), fs::path(file).parent_path()}) {
    const ModelShape model = read_model(path);
    EXPECT_EQ(model.name, "small");
    EXPECT_EQ(model.key_value_heads, 2);
    EXPECT_EQ(model.head_dim, 8);
  }
  // RoPE scaling changes no size.
  const std::string scaled =
      replaced(kConfig, "{", R"({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, )");
  EXPECT_EQ(read_model(written("scaled/config.json", scaled)).parameters(), read_model(file).parameters());
}

TEST_F(PlannerInputs, BadHuggingFaceModelsAreRefused) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"[1, 2]", "config.json"},
      {"", "config.json"},
      {"{", "config.json"},
      {"null", "config.json"},
      {"\xff\xfe{}", "config.json"},
      {replaced(kConfig, "\"llama\"", "\"lla\xffma\""), "config.json"},
      {replaced(kConfig, "\"vocab_size\": 64, ", ""), "vocab_size"},
      {replaced(kConfig, "\"model_type\": \"llama\", ", ""), "model_type"},
      {replaced(kConfig, "llama", "gpt2"), "model_type"},
      {replaced(kConfig, "{", R"({"quantization_config": {"quant_method": "gptq"}, )"),
       "quantization_config"},
      {replaced(kConfig, "{", R"({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}, )"), "longrope"},
      {replaced(kConfig, "{", R"({"rope_scaling": {"rope_type": "linear"}, )"), "factor"},
      {replaced(kConfig, "{", R"({"head_dim": 0, )"), "head_dim"},
      {replaced(kConfig, "{", R"({"head_dim": -8, )"), "head_dim"},
      {replaced(kConfig, "{", R"({"head_dim": 7, )"), "head_dim"},
      {replaced(kConfig, "{", R"({"head_dim": "8", )"), "head_dim"},
      {replaced(kConfig, "\"hidden_size\": 32", "\"hidden_size\": 34"), "hidden_size"},  // 4 heads
      {replaced(kConfig, "\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3"), "num_key_value_heads"},
      {replaced(kConfig, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 9007199254740992"),
       "num_hidden_layers"},
      {replaced(kConfig, "\"num_hidden_layers\": 2", "\"num_hidden_layers\": 2, \"num_hidden_layers\": 3"),
       "twice"},
      {std::string(1000, '['), "config.json"},
  };
  for (const auto& [text, said] : cases) {
    const std::string file = written("bad/config.json", text);
    EXPECT_THAT(error_of([&] { read_model(file); }),
                AllOf(HasSubstr(said), HasSubstr("config.json"), HasSubstr("layers=32,hidden=4096")))
        << text;
  }
  // 2 GB are refused unread. The file is sparse.
  const std::string huge = written("huge/config.json", "{");
  fs::resize_file(huge, std::uintmax_t{2} << 30);
  EXPECT_THAT(error_of([&] { read_model(huge); }), HasSubstr("config.json"));
  EXPECT_THAT(error_of([&] { read_model(folder_); }), HasSubstr("config.json"));
  EXPECT_THAT(error_of([&] { read_model("meta-llama/Llama-3.1-8B"); }), HasSubstr("meta-llama/Llama-3.1-8B"));
}

TEST_F(PlannerInputs, AConfigurationDescribesItsModel) {
  const std::string text =
      "[model]\nhidden = 64\nlayers = 3\nheads = 4\nkey_value_heads = 2\nhead_dim = 16\nfeed_forward = 96\n";
  const ModelShape model = read_model(written("first.toml", text));
  EXPECT_EQ(model.name, "first");
  EXPECT_EQ(model.layers, 3);
  EXPECT_EQ(model.feed_forward, 96);
  EXPECT_THAT(error_of([&] { read_model(written("x.toml", replaced(text, "layers", "layrs"))); }),
              HasSubstr("Did you mean \"model.layers\"?"));
  EXPECT_THAT(error_of([&] { read_model(written("x.toml", "[model]\nkind = \"scorer\"\n")); }),
              HasSubstr("language models"));
  EXPECT_THAT(error_of([&] { read_model(folder_ / "none.toml"); }), HasSubstr("none.toml"));
}

TEST_F(PlannerInputs, DocumentsAreThoseOfThePackedCorpus) {
  // nanoGPT's format: tokens of 16 bits, documents end in `end_of_text`.
  const std::vector<std::uint16_t> tokens = {1, 2, 3, 0, 5, 0, 7, 8, 0};
  const std::string shard =
      written("corpus.bin", std::string(reinterpret_cast<const char*>(tokens.data()), 2 * tokens.size()));
  const std::string config = written(
      "run.toml", "[data]\nshards = [\"" + shard + "\"]\nend_of_text = 0\nvalidation_fraction = 0.0\n");
  EXPECT_EQ(documents_of(config), (std::vector<std::int64_t>{4, 2, 3}));
  EXPECT_EQ(documents_of(config, 2), (std::vector<std::int64_t>{4, 2}));
  const std::string cache = (folder_ / "cache").string();
  const std::string text = written("some.txt", "hello");
  const std::string fresh =
      written("fresh.toml", "[data]\ntext = [\"" + text + "\"]\ncache = \"" + cache + "\"\n");
  EXPECT_TRUE(documents_of(fresh).empty());
  EXPECT_FALSE(fs::exists(cache)) << "planning packs nothing";
}

// ---- whatever comes ----

TEST_F(PlannerInputs, DamagedFilesAreReadOrRefused) {
  std::mt19937 random(11);
  const std::string whole = kCluster + kCalibration;
  for (int round = 0; round < 3000; ++round) {
    std::string text = whole;
    for (int edits = 1 + static_cast<int>(random() % 3); edits > 0; --edits) {
      const std::size_t at = random() % text.size();
      if (random() % 3 == 0)
        text.erase(at, random() % 20);
      else if (random() % 2 == 0)
        text[at] = static_cast<char>(random() % 256);
      else
        text.insert(at, text.substr(random() % text.size(), random() % 30));
    }
    try {
      const ClusterFile read = parse_cluster(text, "x");
      EXPECT_EQ(to_toml(parse_cluster(to_toml(read), "y")), to_toml(read)) << text;
    } catch (const ConfigError& error) {
      EXPECT_FALSE(error.text().action.empty());
    }
  }
}

}  // namespace
}  // namespace isograd::planner
