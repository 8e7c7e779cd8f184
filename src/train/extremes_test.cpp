// Numbers at the ends of what a configuration can say. Each is refused as bad input or laid out, within
// seconds and little memory: none ends as a defect of isograd.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <chrono>
#include <cmath>
#include <set>

#include "full_tests.hpp"
#include "train/config_table.hpp"
#include "train/rank_layout.hpp"
#include "train/video_testing.hpp"

namespace isograd {
namespace {

using testing_runs::TinyVideos;

constexpr double kMostSeconds = 20, kMostMegabytes = 2048;

double megabytes_at_most() {  // resident, so far
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return static_cast<double>(used.ru_maxrss) / 1024;
}

// As they are written: extremes of the type, and the ends of what the key's entry in the table allows.
std::vector<std::string> extremes_of(const ConfigKey& key) {
  const bool integer = std::holds_alternative<std::int64_t>(key.get(RunConfig{}));
  std::vector<std::string> values;
  for (const char* value : {"-9223372036854775808", "-1", "0", "1", "2", "3", "2147483647", "2147483648",
                            "4294967296", "9007199254740993", "4611686018427387904", "9223372036854775807",
                            "9223372036854775808", "1e308", "nan", "-inf", "inf"})
    values.push_back(value);
  if (!integer)
    for (const char* value : {"-1e308", "5e-324", "-5e-324", "1e-300", "1e-45", "1e38", "1e39",
                              "0.9999999999999999", "1.7976931348623157e308", "1e309"})
      values.push_back(value);
  for (const double end : {key.allowed.least, key.allowed.most})
    if (std::isfinite(end)) {
      values.push_back(integer ? fmt::format("{:.0f}", end) : fmt::format("{:#.17g}", end));
    }
  return values;
}

class Extremes : public TinyVideos {
 protected:
  // A run of each kind, each with what only some of them have.
  std::vector<std::pair<std::string, RunConfig>> runs() {
    std::string csv = "a,b,y\n";
    for (int row = 0; row < 40; ++row) csv += fmt::format("{},{},{}\n", row % 7, row % 5, row % 2);
    write_file(root_ / "table.csv", csv);
    std::vector<std::pair<std::string, RunConfig>> runs;
    const auto add = [&](const char* name, RunConfig config, const std::function<void(RunConfig&)>& change) {
      change(config);
      runs.emplace_back(name, std::move(config));
    };
    add("text", tiny("run"), [](RunConfig&) {});
    add("text under zero3", tiny("run"), [](RunConfig& config) {
      config.parallel.strategy = "zero3";
      config.loss.kind = "fixed", config.loss.denominator = 100;
      config.model.shape.rope_scaling = {.kind = "yarn", .factor = 2, .original_max_positions = 32};
    });
    add("llama3's positions", tiny("run"), [](RunConfig& config) {
      config.model.shape.rope_scaling = {.kind = "llama3",
                                         .factor = 2,
                                         .low_frequency_factor = 1,
                                         .high_frequency_factor = 4,
                                         .original_max_positions = 32};
    });
    add("an adapter", tiny("run"), [](RunConfig& config) { config.model.lora.rank = 4; });
    add("experts of dots1", tiny("run"), [](RunConfig& config) {
      auto& shape = config.model.shape;
      shape.family = "dots1", shape.query_key_norm = true;
      shape.experts = {.count = 4, .per_token = 2, .feed_forward = 8, .shared_feed_forward = 8};
      shape.experts.groups = 2, shape.experts.groups_per_token = 1;
    });
    add("experts of qwen2_moe", tiny("run"), [](RunConfig& config) {
      auto& shape = config.model.shape;
      shape.family = "qwen2_moe", shape.attention_bias = true;
      shape.experts = {.count = 4, .per_token = 2, .feed_forward = 8, .shared_feed_forward = 8};
      config.loss.balance = 0.1, config.loss.router_z = 0.1;
    });
    // Products of the sizes are near the end of 64 bits.
    add("a model as wide as can be", tiny("run"), [](RunConfig& config) {
      auto& shape = config.model.shape;
      shape.hidden = shape.heads * (shape.head_dim = 1 << 23);
      shape.feed_forward = 1 << 24, shape.vocabulary = 1 << 30;
    });
    add("experts as wide as can be", tiny("run"), [](RunConfig& config) {
      auto& shape = config.model.shape;
      shape.family = "qwen3_moe", shape.query_key_norm = true;
      shape.hidden = shape.heads * (shape.head_dim = 1 << 23);
      shape.experts = {.count = 4, .per_token = 2, .feed_forward = 1 << 24};
    });
    add("a scorer", tiny("run"), [&](RunConfig& config) {
      config.model = RunConfig{}.model, config.data = RunConfig{}.data, config.batch = RunConfig{}.batch;
      config.model.kind = "scorer", config.model.scorer_units = 5;
      config.data.table = (root_ / "table.csv").string();
      config.batch.rows_per_step = 12;
      config.ranking.loss = "smooth_ap";
    });
    add("videos", videos("run"), [](RunConfig& config) {  // only keys that a run on videos has
      const DecoderConfig given = config.model.shape;
      config.model.shape = RunConfig{}.model.shape, config.sample = RunConfig{}.sample;
      config.model.shape.heads = given.heads, config.model.shape.head_dim = given.head_dim;
      config.model.shape.hidden = given.hidden, config.model.shape.layers = given.layers;
    });
    return runs;
  }
};

// Until a key has had a value with which a run is laid out, all its values; then each in a fifth of the runs,
// on 1 rank or 6, by turns. ISOGRAD_FULL_TESTS=1: all.
TEST_F(Extremes, OfEveryNumberAreRefusedOrLaidOut) {
  const double before = megabytes_at_most();
  std::set<std::string> laid_out;
  int cases = 0;
  std::size_t place = 0;
  for (const auto& [name, run] : runs()) {
    const std::size_t turn = place++;  // of the run
    std::size_t of_value = 0;
    const std::string toml = to_toml(run);
    for (const ConfigKey& key : config_keys()) {
      const ConfigValue like = key.get(run);
      if (!std::holds_alternative<std::int64_t>(like) && !std::holds_alternative<double>(like)) continue;
      for (const std::string& value : extremes_of(key)) {
        const std::string where = fmt::format("{}, {} = {}", name, key.name, value);
        const auto begun = std::chrono::steady_clock::now();
        const auto lay_it_out = [&](int ranks) {
          ++cases;
          try {
            const RunConfig config = parse_config(toml, "run.toml", {key.name + "=" + value});
            const RunLayout laid = lay_out(config, ranks, ranks - 1, 1);
            EXPECT_GT(laid.layout.total.total(), 0) << where;
            EXPECT_FALSE(to_text(laid).empty() || to_json(laid).empty());
            laid_out.insert(key.name);
            return true;
          } catch (const ConfigError&) {
            return false;
          } catch (const std::exception& error) {
            ADD_FAILURE() << where << " on " << ranks << " ranks: " << error.what();
            return false;
          }
        };
        const std::size_t turns = turn + of_value++;
        const bool whole = full_tests() || !laid_out.count(key.name);
        if (!whole && turns % 5 != 0) continue;
        for (const int ranks : {1, 6})
          if (whole || takes_first(turns / 5) == (ranks == 1)) lay_it_out(ranks);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
        EXPECT_LT(took.count(), kMostSeconds) << where;
        ASSERT_LT(megabytes_at_most() - before, kMostMegabytes) << where;
      }
    }
  }
  // Each numeric key has a value with which a run is laid out: else the sweep would not enter it.
  for (const ConfigKey& key : config_keys()) {
    const ConfigValue like = key.get(RunConfig{});
    if (std::holds_alternative<std::int64_t>(like) || std::holds_alternative<double>(like))
      EXPECT_TRUE(laid_out.count(key.name)) << key.name;
  }
  EXPECT_GT(cases, full_tests() ? 10'000 : 2'000);
}

}  // namespace
}  // namespace isograd
