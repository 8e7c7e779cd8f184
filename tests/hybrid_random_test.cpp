// Cells drawn at random, with sizes and options that the covering arrays do not vary, and meshes of up to 24
// ranks. A few in every test run; `./dev sweep` goes on for as long as it is told, and shrinks what fails to
// the smallest mesh, model and batch.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>

#include "full_tests.hpp"
#include "hybrid_testing.hpp"
#include "isograd/random.hpp"

namespace isograd::hybrid {
namespace {

// Factors that are drawn in addition to a cell's; each begins with a value of the sweep's.
const std::vector<covering::Factor>& more_factors() {
  static const std::vector<covering::Factor> all = {{"packs_per_step", {"9", "8", "11", "16"}},
                                                    {"pack_length", {"24", "5", "13", "48"}},
                                                    {"bucket_bytes", {"4096", "1", "700", "1000000"}},
                                                    {"overlap", {"true", "false"}},
                                                    {"prefetch", {"true", "false"}},
                                                    {"key_heads", {"2", "1", "4", "8"}},
                                                    {"feed_forward", {"20", "8", "13", "31"}},
                                                    {"hidden", {"16", "8", "24"}},
                                                    {"experts", {"8", "4", "12"}},
                                                    {"per_token", {"2", "1", "3"}},
                                                    {"balance_over", {"layers", "model"}},
                                                    {"seed", {"17", "18", "19", "20"}},
                                                    {"times_data_ranks", {"1", "1", "1", "2", "3"}},
                                                    {"mean_of", {"all", "all", "replicas"}},
                                                    {"tied", {"as_is", "true"}},
                                                    {"shared_expert", {"0", "5"}},
                                                    {"gradients", {"clipped", "free"}},
                                                    {"first_bucket", {"1048576", "0"}},
                                                    {"layers", {"as_many_as_stages"}}};
  return all;
}
constexpr std::size_t kPacksPerStep = 0, kPackLength = 1, kTimesDataRanks = 12, kLayers = 18;

// Sizes of a model and a batch that a failure is tried with in place of its own, the smallest first.
const std::map<std::size_t, std::vector<std::string>>& sizes() {
  static const std::map<std::size_t, std::vector<std::string>> all = {
      {kPacksPerStep, {"1", "2", "3", "5"}},
      {kPackLength, {"2", "3", "5", "9", "13"}},
      {kLayers, {"1", "2", "3", "4"}},
      {5, {"1"}},
      {6, {"1", "2", "4", "8"}},
      {7, {"8"}},
      {8, {"1", "2", "4"}},
      {9, {"1"}}};
  return all;
}

struct Drawn {
  Cell cell;
  covering::Row more = covering::Row(more_factors().size(), 0);
  std::map<std::size_t, std::string> size{};  // in place of what `more` says

  std::string text(std::size_t f) const {
    const auto smaller = size.find(f);
    return smaller != size.end() ? smaller->second
                                 : more_factors()[f].values[static_cast<std::size_t>(more[f])];
  }
  std::string name() const {
    std::string all = cell.name();
    for (std::size_t f = 0; f < more.size(); ++f)
      if (more[f] > 0 || size.count(f) > 0) all += fmt::format(" {}={}", more_factors()[f].name, text(f));
    return all;
  }
  RunConfig in(RunConfig config) const {
    const bool video = cell.is(kModel, "video");
    const auto number = [&](std::size_t f) { return std::int64_t{std::stoi(text(f))}; };
    (video ? config.batch.videos_per_step : config.batch.packs_per_step) = number(0);
    if (!video) config.data.pack_length = number(1);
    config.parallel.bucket_bytes = number(2);
    config.parallel.overlap = text(3) == "true";
    config.parallel.prefetch = text(4) == "true";
    if (!video) config.model.shape.key_value_heads = number(5);
    config.model.shape.feed_forward = number(6);
    config.model.shape.hidden = number(7);
    if (cell.has_experts()) {
      config.model.shape.experts.count = number(8);
      config.model.shape.experts.per_token = number(9);
      config.loss.balance_over = text(10);
    }
    if (!video) config.run.seed = number(11);  // noise of videos is the oracle's
    auto& packs = video ? config.batch.videos_per_step : config.batch.packs_per_step;
    packs = std::max<std::int64_t>(packs, cell.data() * number(12));
    if (text(13) == "replicas" && !video && !cell.has_experts() && cell.is(kMean, "token_mean"))
      config.loss.normalise_over = {"dp_shard", "cp_ring", "cp_ulysses"};
    if (text(14) == "true" && !video) config.model.shape.tied_output = true;
    if (number(15) > 0 && cell.is(kModel, "experts")) {
      config.model.shape.family = "qwen2_moe";
      config.model.shape.query_key_norm = false, config.model.shape.attention_bias = true;
      config.model.shape.experts.shared_feed_forward = number(15);
    }
    if (text(16) == "free") config.train.max_norm = 0;
    config.parallel.first_bucket_bytes = number(17);
    if (size.count(kLayers) > 0) config.model.shape.layers = number(kLayers);
    return config;
  }
  int ranks() const { return cell.ranks() * std::stoi(text(12)); }
};

constexpr int kLarge[] = {12, 16, 24};  // ranks of meshes beyond the covering arrays

int long_axes(const Cell& cell) {
  int axes = 0;
  for (const Which f : {kPp, kReplicate, kShard, kRing, kUlysses, kTp}) axes += cell.number(f) > 1;
  return axes;
}

// `ranks`: of a mesh of so many along three axes or more; 0: any that the covering arrays have, or a
// multiple.
Drawn drawn(std::uint64_t seed, std::uint64_t number, int ranks = 0) {
  std::uint64_t position = 0;
  const auto draw = [&](std::size_t below) {
    return static_cast<int>(random_bits({.seed = seed, .sample = number}, position++) % below);
  };
  Drawn one;
  for (bool complete = false; !complete;) {
    one.cell.row.assign(kFactors, -1);
    complete = true;
    for (const std::int64_t f :
         random_permutation(kFactors, {.seed = seed, .step = position, .sample = number})) {
      std::vector<int> values;
      for (std::size_t value = 0; value < factors()[static_cast<std::size_t>(f)].values.size(); ++value) {
        one.cell.row[static_cast<std::size_t>(f)] = static_cast<int>(value);
        if (runs(one.cell.row, std::max(ranks, kRanks))) values.push_back(static_cast<int>(value));
      }
      if (values.empty()) complete = false;
      one.cell.row[static_cast<std::size_t>(f)] =
          values.empty() ? 0 : values[static_cast<std::size_t>(draw(values.size()))];
    }
    if (ranks > 0 && (one.cell.ranks() != ranks || long_axes(one.cell) < 3)) complete = false;
  }
  for (std::size_t f = 0; f < one.more.size(); ++f) one.more[f] = draw(more_factors()[f].values.size());
  if (ranks > 0) one.more[kTimesDataRanks] = 0;
  return one;
}

// One value after another back to an earlier one, then sizes down, as long as it is still wrong.
Drawn shrunk(Drawn one, const std::function<std::string(const Drawn&)>& wrong_with) {
  for (bool again = true; again;) {
    again = false;
    const int most = std::max(kRanks, one.cell.ranks());
    const auto take = [&](const Drawn& smaller) {
      if (!runs(smaller.cell.row, most) || wrong_with(smaller).empty()) return false;
      one = smaller;
      return again = true;
    };
    for (std::size_t f = 0; f < kFactors; ++f)
      for (int value = 0; value < one.cell.row[f]; ++value) {
        Drawn smaller = one;
        smaller.cell.row[f] = value;
        take(smaller);
        if (runs(smaller.cell.row, most)) continue;
        for (std::size_t g = 0; g < kFactors; ++g) {  // with what goes with it alone: stages and a schedule
          Drawn both = smaller;
          both.cell.row[g] = 0;
          if (g != f && smaller.cell.row[g] > 0) take(both);
        }
      }
    for (std::size_t f = 0; f < one.more.size(); ++f)
      if (one.more[f] > 0) {
        Drawn smaller = one;
        smaller.more[f] = 0;
        take(smaller);
      }
    for (const auto& [f, values] : sizes())
      for (const std::string& value : values) {
        if (value == one.text(f)) break;
        Drawn smaller = one;
        smaller.size[f] = value;
        if (take(smaller)) break;
      }
  }
  return one;
}

class HybridRandom : public HybridCells {
 protected:
  // Empty: it is right, or refused where it is configured (tp that splits no heads evenly for Ulysses).
  mutable int run = 0;  // not refused
  std::string wrong_with(const Drawn& one) const {
    const RunConfig config = one.in(config_for(one.cell));
    const int ranks = one.ranks();
    if (refusal_of(config, ranks) != "no error") return {};
    ++run;
    try {
      return hybrid::wrong_with(measure(config, ranks, wanted_of(config, 0, ranks), {.look_before = false}),
                                false);
    } catch (const std::exception& error) {
      return error.what();
    }
  }
  static double given(const char* name, double usual) {
    const char* value = std::getenv(name);
    return value && *value ? std::atof(value) : usual;
  }
};

TEST_F(HybridRandom, CellsHaveOneProcesssGradientAndNorm) {
  const double seconds = given("ISOGRAD_SWEEP_SECONDS", 0);
  const auto seed = static_cast<std::uint64_t>(given("ISOGRAD_SWEEP_SEED", static_cast<double>(kSeed)));
  const auto start = std::chrono::steady_clock::now();
  const auto passed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  int cells = 0, failed = 0;
  for (std::uint64_t number = 0; number < 12 || passed() < seconds; ++number, ++cells) {
    const bool large = seconds > 0 && number % 8 == 7;
    const Drawn one = drawn(seed, number, large ? kLarge[number / 8 % std::size(kLarge)] : 0);
    const std::string wrong = wrong_with(one);
    if (wrong.empty()) continue;
    ++failed;
    std::printf("seed %llu, cell %llu: %s: %s\n", static_cast<unsigned long long>(seed),
                static_cast<unsigned long long>(number), one.name().c_str(), wrong.c_str());
    std::fflush(stdout);
    const Drawn least = shrunk(one, [&](const Drawn& smaller) { return wrong_with(smaller); });
    ADD_FAILURE() << "the smallest: " << least.name() << ": " << wrong_with(least) << "\n"
                  << least.ranks() << " ranks of\n"
                  << to_toml(least.in(config_for(least.cell)));
  }
  EXPECT_GT(run, cells / 2);
  std::printf("%d random cells from seed %llu, %d of them refused, %d failed; %.0f s\n", cells,
              static_cast<unsigned long long>(seed), std::max(0, cells - run), failed, passed());
}

// Three axes or more of them, by all that a cell has besides.
TEST_F(HybridRandom, LargeMeshesHaveOneProcesssGradientAndNorm) {
  const int each = full_tests() ? 20 : 1;
  for (const int ranks : kLarge) {
    const auto start = std::chrono::steady_clock::now();
    int ran = 0;
    for (std::uint64_t number = 0; ran < each; ++number) {
      const Drawn one = drawn(kSeed, number, ranks);
      const int before = run;
      EXPECT_EQ(wrong_with(one), "") << ranks << " ranks: " << one.name();
      ran += run - before;
    }
    std::printf("%d meshes of %d ranks; %.0f s\n", ran, ranks,
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
}

TEST(HybridShrink, LeavesWhatIsWrongAlone) {
  const auto wrong = [](const Drawn& one) {
    return one.cell.number(kTp) > 1 && one.cell.is(kStrategy, "zero1") && one.text(kPackLength) != "24"
               ? "wrong"
               : "";
  };
  int shrunken = 0;
  for (std::uint64_t number = 0; number < 2000; ++number) {
    const Drawn one = drawn(3, number);
    EXPECT_TRUE(runs(one.cell.row)) << one.name();
    if (std::string(wrong(one)).empty()) continue;
    const Drawn least = shrunk(one, wrong);
    EXPECT_EQ(least.cell.name(), "tp=2 strategy=zero1") << one.name();
    for (const auto& [f, values] : sizes())
      EXPECT_EQ(least.text(f), values.front()) << more_factors()[f].name << " of " << one.name();
    ++shrunken;
  }
  EXPECT_GT(shrunken, 10);
}

}  // namespace
}  // namespace isograd::hybrid
