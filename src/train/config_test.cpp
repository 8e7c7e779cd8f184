#include "train/config.hpp"

#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <unistd.h>

#include <cmath>

#include "base/files.hpp"
#include "train/build.hpp"
#include "train/config_table.hpp"
#include "train/other_names.hpp"
#include "train/rank_zero.hpp"
#include "train/task.hpp"
#include "train/trainer_testing.hpp"

namespace isograd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing_runs::config_error_of;

std::string refused(const std::string& toml, const std::vector<std::string>& overrides = {}) {
  const std::string error = config_error_of([&] { parse_config(toml, "run.toml", overrides); });
  return error == "no error" ? "accepted" : error;
}

// Texts of TOML, and parts of the messages that refuse them.
using Refusals = std::vector<std::pair<std::string, std::vector<std::string>>>;

void expect_refused(const Refusals& cases, const std::string& before = "") {
  for (const auto& [toml, parts] : cases)
    for (const std::string& part : parts) EXPECT_THAT(refused(before + toml), HasSubstr(part)) << toml;
}

TEST(Config, DefaultsAreAValidConfiguration) {
  const RunConfig config = parse_config("", "");
  EXPECT_EQ(to_toml(config), to_toml(RunConfig{}));
}

TEST(Config, EveryDefaultIsAllowed) {
  for (const auto& key : config_keys()) {
    EXPECT_EQ(refusal(key, key.get(RunConfig{})), std::nullopt) << key.name;
    EXPECT_FALSE(key.description.empty()) << key.name;
  }
}

TEST(Config, EveryKeyBelongsToADocumentedSectionAndIsNamedOnce) {
  std::vector<std::string> seen;
  for (const auto& key : config_keys()) {
    EXPECT_THAT(seen, ::testing::Not(::testing::Contains(key.name)));
    seen.push_back(key.name);
    const std::string section = key.name.substr(0, key.name.rfind('.'));
    EXPECT_TRUE(std::any_of(config_sections().begin(), config_sections().end(), [&](const auto& known) {
      return known.name == section;
    })) << key.name;
  }
}

// The default configuration with another value of this key.
RunConfig with_another(const ConfigKey& key) {
  RunConfig config;
  ConfigValue value = key.get(config);
  if (auto flag = std::get_if<bool>(&value)) *flag = !*flag;
  if (auto integer = std::get_if<std::int64_t>(&value)) ++*integer;
  if (auto number = std::get_if<double>(&value)) *number += 0.5;
  if (auto text = std::get_if<std::string>(&value))
    *text = key.name == "schedule.kind"          ? "constant"
            : key.name == "schedule.decay_shape" ? "cosine"
                                                 : *text + "x";
  if (auto texts = std::get_if<std::vector<std::string>>(&value)) texts->push_back("x");
  key.set(config, value);
  return config;
}

// Two keys bound to one field would pass every other test.
TEST(Config, EveryKeyHasAFieldOfItsOwn) {
  for (const auto& key : config_keys()) {
    const RunConfig config = with_another(key);
    for (const auto& other : config_keys())
      EXPECT_EQ(other.get(config) == other.get(RunConfig{}), other.name != key.name)
          << key.name << " and " << other.name;
  }
}

// The list of keys that may differ is repeated here, so that a new key cannot be left out of the comparison
// by its entry alone.
TEST(Config, RanksAreRefusedADifferenceInEveryKeyButTheFoldersOfAHost) {
  const std::vector<std::string> of_a_host = {"run.directory",  "run.json_log", "data.text", "data.shards",
                                              "data.tokenizer", "data.cache",   "data.table"};
  run_ranks(3, [&](World& world) {
    for (const auto& key : config_keys()) {
      const bool differs = std::find(of_a_host.begin(), of_a_host.end(), key.name) != of_a_host.end();
      const RunConfig usual, another = with_another(key);
      const std::string said =
          config_error_of([&] { check_same_configuration(world.rank == 1 ? another : usual, world.group); });
      if (differs)
        EXPECT_EQ(said, "no error") << key.name;
      else
        EXPECT_THAT(said,
                    AllOf(HasSubstr(key.name + ": found"),
                          HasSubstr(fmt::format("{} on rank 1, {} on rank 0", toml_text(key.get(another)),
                                                toml_text(key.get(usual))))));
    }
  });
}

TEST(Config, RanksAreRefusedOtherDataThanRankZeros) {
  const TaskFacts facts{.train_documents = 20,
                        .validation_documents = 4,
                        .num_tokens = 900,
                        .tokenizer = "bytes",
                        .order = {{"data.table (a checksum of its numbers)", "00ff"}}};
  TaskFacts training = facts, validation = facts, tokens = facts, tokenizer = facts, content = facts;
  training.train_documents = 21, validation.validation_documents = 5, tokens.num_tokens = 901;
  tokenizer.tokenizer = "other";
  content.order.begin()->second = "00fe";
  const std::vector<std::pair<TaskFacts, std::string>> cases = {
      {facts, "no error"},
      {training, "training documents: found 21 on rank 2, 20 on rank 0"},
      {validation, "validation documents: found 5 on rank 2, 4 on rank 0"},
      {tokens, "tokens of all data: found 901 on rank 2, 900 on rank 0"},
      {tokenizer, "data.tokenizer: found \"other\" on rank 2, \"bytes\" on rank 0"},
      {content, "data.table (a checksum of its numbers): found \"00fe\" on rank 2, \"00ff\" on rank 0"}};
  run_ranks(3, [&](World& world) {
    for (const auto& [other, said] : cases)
      EXPECT_THAT(config_error_of([&] { check_same_data(world.rank == 2 ? other : facts, world.group); }),
                  HasSubstr(said));
  });
}

// Nesting by dots, which the TOML reader does not limit, and which it frees by recursion.
TEST(Config, LongDottedKeysAreRefusedAndLongTextIsNot) {
  std::string key = "a";
  for (int i = 0; i < 100000; ++i) key += i % 2 ? ".a" : ". \"a\"";
  for (const std::string& text :
       {key + " = 1", "[" + key + "]", "x = {" + key + " = 1}", "\n[train]\n" + key + " = 1"})
    EXPECT_THAT(refused(text), AllOf(HasSubstr("run.toml:"), HasSubstr("a key of more than 100 parts")));
  EXPECT_THAT(refused(std::string(2 << 20, '\n')), HasSubstr("2097152 bytes"));
  const std::string dots(300, '.');
  for (const char* quote : {"\"", "'", "\"\"\"", "'''"}) {
    const std::string text = "[sample] # " + dots + "\nprompt = " + quote + dots + quote;
    EXPECT_EQ(parse_config(text, "run.toml").sample.prompt, dots);
  }
}

TEST(Config, ReadsEveryKindOfValue) {
  const RunConfig config = parse_config(R"(
    [run]
    seed = 7
    [data]
    text = ["a.txt", 'b/*.md']
    [schedule]
    kind = "constant"
    peak = 1   # an integer where a number is asked for
    [parallel]
    overlap = false
    [model.rope_scaling]
    kind = "yarn"
    original_max_positions = 64
    attention_factor = 1.5)",
                                        "run.toml");
  EXPECT_EQ(config.run.seed, 7);
  EXPECT_EQ(config.data.text, (std::vector<std::string>{"a.txt", "b/*.md"}));
  EXPECT_EQ(config.schedule.kind, Schedule::Kind::kConstant);
  EXPECT_EQ(config.schedule.peak, 1.0);
  EXPECT_FALSE(config.parallel.overlap);
  EXPECT_EQ(config.model.shape.rope_scaling.attention_factor, 1.5);
}

TEST(Config, UnknownKeyNamesLineAndNearestKey) {
  const std::string pack_length = "Did you mean \"data.pack_length\"?";
  expect_refused(
      {{"[data]\npack_lenght = 3\n",
        {"run.toml:2", "unknown key \"data.pack_lenght\"", pack_length, "a key of [data]: text, shards"}},
       // The right name in the wrong section, and in no section.
       {"[train]\npack_length = 3\n", {pack_length}},
       {"pack_length = 3\n", {pack_length}},
       {"[dta]\npack_length = 3\n", {"unknown section \"dta\"", "Did you mean \"data\"?"}},
       {"[model.rope_scalling]\nfactor = 3\n", {"Did you mean \"model.rope_scaling\"?"}},
       // A quoted key is no path, or it could be given twice.
       {"\"data.pack_length\" = 3\n", {"unknown key"}}});
  // Nothing is near: no guess.
  EXPECT_THAT(refused("[data]\nzzzzzzzzzzzz = 3\n"), ::testing::Not(HasSubstr("Did you mean")));
}

TEST(Config, NamesOfOtherTrainersLeadToOurs) {
  std::vector<std::string> keys, sections, values;
  for (const auto& key : config_keys()) {
    keys.push_back(key.name);
    for (const auto& value : key.allowed.choices) values.push_back(value);
  }
  for (const auto& section : config_sections()) sections.push_back(section.name);
  const auto each_leads = [](const OtherNames& names, const std::vector<std::string>& ours,
                             bool keys_of_ours) {
    for (const auto& [theirs, mine] : names) {
      EXPECT_THAT(ours, ::testing::Contains(mine)) << theirs;
      for (const auto& name : ours)
        EXPECT_NE(keys_of_ours ? name.substr(name.rfind('.') + 1) : name, theirs) << "a name of ours";
    }
  };
  each_leads(other_keys(), keys, true);
  each_leads(other_sections(), sections, false);
  each_leads(other_values(), values, false);
  expect_refused(
      {{"[schedule]\nlr = 1\n", {"run.toml:2", "\"schedule.lr\". Did you mean \"schedule.peak\"? Expected"}},
       {"[training]\nsteps = 1\n", {"run.toml:1", "Did you mean \"train\"? Expected one of"}},
       {"[parallel]\ndevice = \"gpu\"\n", {"Did you mean \"cuda\"? Expected one of"}},
       {"[parallel]\nbackend = \"gloo\"\n", {"mean \"shm\" (on one host; docs/hosts.md has several)?"}},
       // Another key's value is no suggestion.
       {"[model]\nkind = \"gpu\"\n", {"found \"gpu\"; expected one of"}}});
}

TEST(Config, WrongTypesNameWhatWasFoundAndWhatIsAllowed) {
  expect_refused({{"[data]\n\npack_length = \"long\"\n",
                   {"run.toml:3", "found the text \"long\"", "expected an integer, at least 1 (tokens)",
                    "Change data.pack_length"}},
                  {"[data]\npack_length = 2.0\n", {"found the number 2.0"}},
                  {"[data]\npack_length = [3]\n", {"found a list that holds the integer 3"}},
                  {"[data]\ntext = \"a.txt\"\n", {"expected a list of texts"}},
                  {"[data]\ntext = [\"a\", 1]\n", {"found a list that holds the integer 1"}},
                  {"[parallel]\noverlap = 1\n", {"expected true or false"}},
                  {"[train]\nsteps = 1979-05-27\n", {"found a date or time"}},
                  {"[train.steps]\nx = 1\n", {"found a table"}},
                  {"train = 3\n", {"Write [train] on a line of its own"}},
                  {"[[train]]\nsteps = 3\n", {"expected a section"}},
                  {"[run]\ndirectory = \"runs/a\\u0000b\"\n", {"run.toml:2", "found a text with a NUL"}},
                  {"[data]\ntext = [\"x\", \"a\\u0000\"]\n", {"run.toml:2", "found a text with a NUL"}}});
}

TEST(Config, ImpossibleValuesAreRefused) {
  for (const char* line :
       {"[schedule]\npeak = 0", "[schedule]\npeak = nan", "[schedule]\npeak = inf",
        "[schedule]\nfloor = 1.01", "[train]\nmax_norm = -0.1", "[data]\nvalidation_fraction = 1.0",
        "[optimizer]\nbeta2 = 1.0", "[parallel]\ntimeout_seconds = 0", "[run]\ndirectory = \"\"",
        "[checkpoint]\nkeep = 0", "[data]\nend_of_text = -2", "[run]\nseed = -1", "[train]\nsteps = 0",
        "[parallel]\nbackend = \"pigeon\""})
    EXPECT_THAT(refused(line), HasSubstr("run.toml:2: ")) << line;
  expect_refused(
      {{"[data]\npack_length = 0\n", {"run.toml:2: data.pack_length", "found 0", "at least 1 (tokens)"}},
       {"[optimizer]\nkind = \"adamW\"\n",
        {"found \"adamW\"", "one of \"adamw\", \"sgd\"", "Did you mean \"adamw\"?"}},
       // These would overflow.
       {"[data]\npack_length = 2000000000\n", {"found 2000000000, more than 1000000000"}},
       {"[train]\nsteps = 9223372036854775807\n", {"more than 1000000000000000"}},
       // TOML that is broken, by line and column.
       {"[run]\nseed = \n", {"run.toml:2"}},
       {"[run]\nseed = 1\nseed = 2\n", {"run.toml:3"}},
       {"[run]\ndirectory = \"\xff\"\n", {"run.toml:2"}},
       {std::string("[run]\nseed = 1\0", 15), {"ConfigError"}},
       {"a = " + std::string(100000, '['), {"ConfigError"}},
       // A model that cannot be.
       {"[model]\nheads = 6\nkey_value_heads = 4\n", {"run.toml: model.key_value_heads"}}});
}

TEST(Config, KeysWithoutEffectAreRefused) {
  expect_refused(
      {{"[optimizer]\nmomentum = 0.9\n", {"optimizer.momentum = 0.9, which has no effect", "not \"sgd\""}},
       {"[optimizer]\nkind = \"sgd\"\nbeta1 = 0.8\n", {"optimizer.beta1"}},
       {"[model]\nload = \"weights\"\nhidden = 64\n", {"model.hidden = 64"}},
       {"[model]\nload = \"weights\"\nhidden = 64\nlayers = 3\n",
        {"model.hidden = 64, model.layers = 3, which have no effect", "Leave these 2 out"}},
       {"[model]\nload = \"weights\"\n", {"accepted"}},
       {"[model.rope_scaling]\nfactor = 2\n", {"model.rope_scaling.factor"}},
       {"[data]\nend_of_text = 3\n", {"data.end_of_text"}},
       {"[data]\ntext = [\"a\"]\nshards = [\"b\"]\n", {"both data.text and data.shards"}}});
}

TEST(Config, ALossThatContradictsItselfIsExplainedByBothReadings) {
  const std::string without = "normalise_over = [\"dp_shard\", \"cp_ring\", \"cp_ulysses\"]\n";
  for (const std::string& keys :
       {std::string("kind = \"sample_mean\""), without, std::string("kind = \"fixed\"\ndenominator = 1024"),
        without + "dp_replicate_reduction = \"mean\"", std::string("dp_replicate_reduction = \"sum\"")})
    EXPECT_EQ(refused("[loss]\n" + keys), "accepted") << keys;
  expect_refused({{"kind = \"token_means\"", {"run.toml:2", "Did you mean \"token_mean\"?"}},
                  {"kind = \"fixed\"", {"Set loss.denominator"}},
                  {"kind = \"sample_mean\"\ndenominator = 8",
                   {"one of two readings", "set loss.kind = \"fixed\" for the second"}},
                  {"dp_replicate_reduction = \"mean\"",
                   {"one mean over every token of the batch", "the mean of per-replica means"}},
                  {without + "dp_replicate_reduction = \"sum\"", {"one of two readings"}},
                  {"kind = \"none\"\n" + without, {"one of two readings"}},
                  {"normalise_over = [\"dp_replicate\", \"dp_shard\", \"cp_ring\"]", {"Add cp_ulysses"}},
                  {"normalise_over = [\"tp\"]", {"which would be counted twice"}},
                  {"normalise_over = [\"dp\"]", {"loss.normalise_over with \"dp\""}},
                  {"normalise_over = [\"cp_ring\", \"cp_ring\"]", {"cp_ring twice"}}},
                 "[loss]\n");
}

TEST(Config, OverridesGoThroughTheSameTable) {
  const RunConfig config =
      parse_config("[train]\nsteps = 3\n", "run.toml",
                   {"train.steps=5", "train.dtype=bfloat16", "sample.prompt= a = \"b\"", "data.text=x y.txt",
                    "schedule.peak=1e-2", "parallel.overlap=false", "data.tokenizer=\"quoted\\t\""});
  EXPECT_EQ(config.train.steps, 5);
  EXPECT_EQ(config.train.dtype, "bfloat16");
  EXPECT_EQ(config.sample.prompt, " a = \"b\"");
  EXPECT_EQ(config.data.text, std::vector<std::string>{"x y.txt"});
  EXPECT_EQ(config.schedule.peak, 0.01);
  EXPECT_FALSE(config.parallel.overlap);
  EXPECT_EQ(config.data.tokenizer, "quoted\t");
  EXPECT_EQ(parse_config("", "", {"data.text=[\"a\", 'b']"}).data.text, (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(parse_config("[data]\ntext = [\"a\"]", "", {"data.text="}).data.text.empty());
  EXPECT_TRUE(parse_config("", "", {"data.text=[]"}).data.text.empty());
}

TEST(Config, BadOverridesNameTheFlag) {
  const std::pair<const char*, std::vector<const char*>> cases[] = {
      {"train.stepz=5", {"--set train.stepz=5", "Did you mean \"train.steps\"?"}},
      {"train.steps", {"expected section.key=value"}},
      {"train.steps=many", {"--set train.steps=many", "found \"many\"", "integer"}},
      {"train.steps=", {"expected an integer"}},
      {"train.steps=0", {"expected an integer, at least 1 (steps)"}},
      {"train.steps=1\nother = 2", {"expected an integer"}},
      {"data.text=[\"a\"", {"expected a list of texts"}},
      {"sample.prompt=\xff", {"not UTF-8"}}};
  for (const auto& [text, parts] : cases)
    for (const char* part : parts) EXPECT_THAT(refused("", {text}), HasSubstr(part)) << text;
}

TEST(Config, FilesAreReadAndMissingOnesNamed) {
  const auto file =
      std::filesystem::path(::testing::TempDir()) / ("config-" + std::to_string(getpid()) + ".toml");
  write_file(file, "[run]\nseed = 9\n");
  const RunConfig config = load_config(file);
  EXPECT_EQ(config.run.seed, 9);
  EXPECT_EQ(config.source, file);
  std::filesystem::remove(file);
  EXPECT_THROW(load_config(file), ConfigError);
  EXPECT_THROW(load_config(::testing::TempDir()), ConfigError);
}

// A value that the key allows, away from the extremes that other keys depend on.
ConfigValue any_value(const ConfigKey& key) {
  const Allowed& allowed = key.allowed;
  const ConfigValue usual = key.get(RunConfig{});
  if (std::holds_alternative<bool>(usual)) return *rc::gen::arbitrary<bool>();
  if (std::holds_alternative<std::int64_t>(usual)) {
    const auto least = static_cast<std::int64_t>(std::max(allowed.least, -1e15));
    const auto most = static_cast<std::int64_t>(std::min(allowed.most, 1e15));
    return *rc::gen::inRange<std::int64_t>(least, most + 1);
  }
  if (std::holds_alternative<double>(usual)) {
    const double part =
        *rc::gen::inRange<std::int64_t>(1, 1 << 30) / static_cast<double>(1 << 30) * (1 - 1e-9);
    return allowed.least + part * (std::min(allowed.most, allowed.least + 1e9) - allowed.least);
  }
  const auto text = [&] {
    // Characters, so that the text is UTF-8; quotes, backslashes, controls and line breaks among them.
    const auto pieces = *rc::gen::container<std::vector<std::string>>(rc::gen::element<std::string>(
        "a", "\"", "\\", "\n", "\t", "'", "#", "=", "é", "🙂", "\x01", "\x7f", "[", " ", "\r", "\"\"\""));
    std::string all = allowed.not_empty ? "x" : "";
    for (const auto& piece : pieces) all += piece;
    return all;
  };
  if (!allowed.choices.empty()) return *rc::gen::elementOf(allowed.choices);
  if (std::holds_alternative<std::string>(usual)) return text();
  std::vector<std::string> texts;
  for (auto count = *rc::gen::inRange(0, 3); count > 0; --count) texts.push_back(text());
  return texts;
}

RC_GTEST_PROP(Config, RoundTripsThroughToml, ()) {
  RunConfig config;
  for (const auto& key : config_keys())
    if (key.name.rfind("model.", 0) != 0) key.set(config, any_value(key));
  for (std::size_t i = 0; i < config.train.clip_groups.size(); ++i) {  // other patterns, each with its limit
    std::string& group = config.train.clip_groups[i];
    group = fmt::format("w{}{}: 0.5", i, group);
  }
  for (std::size_t i = 0; i < config.optimizer.groups.size(); ++i) {
    std::string& group = config.optimizer.groups[i];
    group = fmt::format("w{}{}: rate=0.5", i, group);
  }
  config.schedule.decay %= std::max<std::int64_t>(1, config.train.steps - config.schedule.warmup);
  if (config.schedule.kind == Schedule::Kind::kCosine || config.schedule.kind == Schedule::Kind::kLinear)
    config.schedule.decay = 0, config.schedule.shape = RunConfig().schedule.shape;
  if (config.schedule.decay == 0) {
    config.schedule.shape = RunConfig().schedule.shape;
    if (config.schedule.kind == Schedule::Kind::kWsd) config.schedule.kind = Schedule::Kind::kConstant;
  }
  config.model.shape.initializer_range = *rc::gen::inRange<std::int64_t>(0, 1 << 20) / 3.0;
  if (!config.data.text.empty()) config.data.shards.clear();
  if (config.data.shards.empty()) config.data.end_of_text = -1;
  // Keys without effect are as usual: of another kind of model, of experts, which the model has none of, ...
  const RunConfig usual;
  config.video = usual.video;
  config.batch.videos_per_step = usual.batch.videos_per_step;
  config.batch.tokens_per_micro_batch = usual.batch.tokens_per_micro_batch;
  config.loss.normalise_over = usual.loss.normalise_over;
  config.loss.balance = config.loss.router_z = 0;
  config.loss.selection_bias_rate = usual.loss.selection_bias_rate;
  config.loss.balance_over = usual.loss.balance_over;
  config.loss.balance_scope = usual.loss.balance_scope;
  config.parallel.ep = 1;
  config.parallel.expert_overlap = usual.parallel.expert_overlap;
  if (config.loss.kind != "fixed") config.loss.denominator = 0;
  if (config.loss.kind == "fixed" && config.loss.denominator == 0) config.loss.denominator = 1;
  if (config.loss.dp_replicate_reduction == "mean") config.loss.dp_replicate_reduction = "sum";
  if (config.optimizer.kind == "adamw") config.optimizer.momentum = 0;
  if (config.optimizer.kind == "sgd")
    config.optimizer.adamw = {.weight_decay = config.optimizer.adamw.weight_decay};
  auto& parallel = config.parallel;
  if (parallel.strategy == "naive" || parallel.strategy == "overlapped")
    parallel.share_parameters = "auto";  // these keep no copy that ranks could share
  if (parallel.tp == 1)
    parallel.sequence_parallel = true, parallel.tensor_overlap = usual.parallel.tensor_overlap;
  if (stage_of(parallel.strategy) == 0)
    parallel.replicas = 1, parallel.cp_fsdp_mode = usual.parallel.cp_fsdp_mode;
  if (parallel.pp == 1)
    parallel.schedule = usual.parallel.schedule, parallel.stages_per_rank = usual.parallel.stages_per_rank;
  if (parallel.device == "cpu" && parallel.backend == "nccl") parallel.device = "cuda";
  const std::string text = to_toml(config);
  const RunConfig again = parse_config(text, "written.toml");
  for (const auto& key : config_keys()) RC_ASSERT(key.get(again) == key.get(config));
  RC_ASSERT(to_toml(again) == text);
}

TEST(Config, NearestPrefersTheSameLastName) {
  const std::vector<std::string> names = {"train.steps", "train.stop", "data.text"};
  EXPECT_EQ(nearest("train.setps", names), "train.steps");  // neighbours swapped: one edit
  EXPECT_EQ(nearest("sample.text", names), "data.text");
  EXPECT_EQ(nearest("completely.different", names), std::nullopt);
}

TEST(Config, MarkdownNamesEveryKey) {
  const std::string text = configuration_markdown();
  for (const auto& key : config_keys()) {
    EXPECT_THAT(text, HasSubstr("| `" + key.name.substr(key.name.rfind('.') + 1) + "` |"));
    EXPECT_THAT(text, HasSubstr(key.description));
    EXPECT_THAT(key.description, ::testing::Not(HasSubstr("|"))) << "breaks the table";
  }
}

// ---- for a number of ranks ----

std::string refused_of(int ranks, const std::string& toml) {
  const std::string error = config_error_of([&] { check(parse_config(toml, "run.toml"), ranks); });
  return error == "no error" ? "accepted" : error;
}

TEST(ConfigOfRanks, KeysOfShardsAreRefusedWithoutShards) {
  for (const char* strategy : {"naive", "overlapped", "bucketed"})
    for (const char* key : {"replicas = 2", "cp_fsdp_mode = \"none\""}) {
      const std::string said =
          refused_of(4, fmt::format("[parallel]\nstrategy = \"{}\"\n{}\n", strategy, key));
      EXPECT_THAT(said,
                  HasSubstr(fmt::format("parallel.{}, which has no effect: parallel.strategy is \"{}\", "
                                        "which does not shard",
                                        key, strategy)));
    }
  for (const char* strategy : {"zero1", "zero2", "zero3"})
    EXPECT_EQ(
        refused_of(4, fmt::format("[parallel]\nstrategy = \"{}\"\nreplicas = 2\ncp_fsdp_mode = \"none\"\n",
                                  strategy)),
        "accepted");
}

TEST(ConfigOfRanks, AnUnknownStrategyIsNoPlainOne) {
  for (const auto& name : strategy_names()) EXPECT_EQ(config_error_of([&] { stage_of(name); }), "no error");
  for (const char* name : {"zero4", "ddp", ""})
    EXPECT_THAT(config_error_of([&] { stage_of(name); }), HasSubstr("naive, overlapped, bucketed, zero1"));
}

TEST(ConfigOfRanks, OneCopyOfTheParametersNeedsRanksThatShareIt) {
  const auto on = [](const std::string& keys, int ranks) {
    return refused_of(ranks, "[parallel]\nshare_parameters = \"on\"\n" + keys);
  };
  const auto of_nobody = [](const std::string& ranks) {
    return AllOf(HasSubstr("parallel.share_parameters"),
                 HasSubstr("\"on\" for " + ranks + ", of which none has another one's parameters"),
                 HasSubstr("Leave it out"));
  };
  EXPECT_EQ(on("", 2), "accepted");
  EXPECT_THAT(on("", 1), of_nobody("one rank"));
  EXPECT_EQ(on("strategy = \"zero2\"\nreplicas = 2\n", 4), "accepted");
  EXPECT_THAT(on("strategy = \"zero2\"\nreplicas = 4\n", 4), of_nobody("4 ranks"));
  EXPECT_EQ(on("strategy = \"zero3\"\ncp_ring = 2\n", 2), "accepted");
  EXPECT_THAT(on("strategy = \"zero3\"\ncp_ring = 2\ncp_fsdp_mode = \"none\"\n", 2), of_nobody("2 ranks"));
  EXPECT_THAT(on("tp = 2\n", 2), of_nobody("2 ranks"));
}

TEST(ConfigOfRanks, MoreRanksThanPacksIsRefused) {
  const std::string packs = "[batch]\npacks_per_step = 4\n";
  EXPECT_EQ(refused_of(4, packs), "accepted");
  EXPECT_THAT(refused_of(5, packs), AllOf(HasSubstr("--ranks 5"), HasSubstr("more ranks than packs"),
                                          HasSubstr("--set batch.packs_per_step=5")));
}

// ---- train.clip_groups and train.part_norms ----

RunConfig with_groups(std::vector<std::string> groups) {
  RunConfig config;
  config.train.clip_groups = std::move(groups);
  return config;
}

TEST(ClipConfig, PatternsAndLimitsAreRead) {
  const auto groups = clip_groups_of(with_groups({"*.experts.*: 0.5", " a:b :2e-3"}), "here");
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].pattern, "*.experts.*");
  EXPECT_EQ(groups[0].max_norm, 0.5);
  EXPECT_EQ(groups[1].pattern, "a:b");  // up to the last colon
  EXPECT_EQ(groups[1].max_norm, 2e-3);
}

TEST(ClipConfig, WhatIsNoGroupIsRefused) {
  for (const auto& [text, said] : {std::pair("*.mlp.*", "has no colon"),
                                   {": 1", "names no parameter"},
                                   {"a: 0", "no number above 0"},
                                   {"a: -1", "no number above 0"},
                                   {"a: nan", "no number above 0"},
                                   {"a: inf", "no number above 0"},
                                   {"a: 1x", "no number above 0"},
                                   {"a:", "no number above 0"}})
    EXPECT_THAT(
        config_error_of([&, one = std::string(text)] { clip_groups_of(with_groups({one}), "run.toml"); }),
        AllOf(HasSubstr("run.toml"), HasSubstr(said)))
        << text;
  EXPECT_THAT(
      config_error_of([] { clip_groups_of(with_groups({std::string(1'000'000, '*') + ": 1"}), "run.toml"); }),
      HasSubstr("1000003 characters; expected at most 1000"));
  EXPECT_THAT(config_error_of([] {
                clip_groups_of(with_groups({"a: 1", "a: 2"}), "run.toml");
              }),
              HasSubstr("there already"));
}

TEST(ClipConfig, EachParameterIsInOneGroupAtMostAndEachGroupHasOne) {
  const auto parameter = [](const char* name, bool trained = true) {
    return std::pair(std::string(name), at::zeros({1}).set_requires_grad(trained));
  };
  const std::vector named = {parameter("a.mlp.weight"), parameter("a.norm.weight"),
                             parameter("frozen.bias", false)};
  check_groups(with_groups({}), named);
  check_groups(with_groups({"*.mlp.*: 1", "*norm.weight: 2"}), named);
  EXPECT_THAT(config_error_of([&] {
                check_groups(with_groups({"*.mlp.*: 1", "a.*: 2"}), named);
              }),
              HasSubstr("a.mlp.weight in two groups, *.mlp.* and a.*"));
  EXPECT_THAT(config_error_of([&] { check_groups(with_groups({"*.mlp: 1"}), named); }),
              HasSubstr("*.mlp, which fits no trained parameter"));
  EXPECT_THAT(config_error_of([&] { check_groups(with_groups({"frozen.*: 1"}), named); }),
              HasSubstr("fits no trained"));
}

// ---- schedule, loss.label_smoothing, loss.z_loss, optimizer.groups ----

TEST(Config, SchedulesAreReadAndWrongOnesRefused) {
  const RunConfig config = parse_config(
      "[schedule]\nkind = \"wsd\"\ndecay = 60\nwarmup = 40\ndecay_shape = \"sqrt\"\n[train]\nsteps = 100\n",
      "");
  EXPECT_EQ(config.schedule.kind, Schedule::Kind::kWsd);
  EXPECT_EQ(config.schedule.shape, Schedule::Shape::kOneMinusSqrt);
  EXPECT_THAT(to_toml(config), HasSubstr("decay_shape = \"1-sqrt\""));
  expect_refused(
      {{"[schedule]\nkind = \"polynomial\"\n",
        {"schedule.kind", "\"constant\", \"cosine\", \"linear\", \"wsd\""}},
       {"[schedule]\nkind = \"warmup_stable_decay\"\n", {"Did you mean \"wsd\"?"}},
       {"[schedule]\nkind = \"wsd\"\n", {"\"wsd\" without schedule.decay"}},
       {"[schedule]\nkind = \"wsd\"\ndecay = 201\n", {"schedule.decay = 201; expected at most 200"}},
       {"[schedule]\nkind = \"constant\"\nwarmup = 150\ndecay = 51\n",
        {"schedule.decay = 51; expected at most 50: train.steps = 200 without schedule.warmup = 150"}},
       {"[schedule]\nkind = \"wsd\"\nwarmup = 300\ndecay = 1\n", {"expected at most 0"}},
       {"[schedule]\nkind = \"wsd\"\ndecay = -1\n", {"schedule.decay", "-1"}},
       {"[schedule]\ndecay = 5\n", {"schedule.decay = 5, which has no effect: schedule.kind is \"cosine\""}},
       {"[schedule]\nkind = \"linear\"\ndecay_shape = \"1-sqrt\"\n", {"which has no effect"}},
       {"[schedule]\nkind = \"constant\"\ndecay_shape = \"cosine\"\n", {"schedule.decay is 0: no decay"}},
       {"[schedule]\nkind = \"wsd\"\ndecay = 5\ndecay_shape = \"square\"\n", {"schedule.decay_shape"}},
       {"[lr_scheduler]\ndecay_ratio = 0.1\n", {"Did you mean \"schedule\"?"}},
       {"[schedule]\ndecay_ratio = 0.1\n", {"Did you mean \"schedule.decay\"?"}}});
}

TEST(Config, TermsOfTheCrossEntropyAreInTheirRange) {
  expect_refused({{"[loss]\nlabel_smoothing = 1.0\n", {"loss.label_smoothing", "from 0 to below 1"}},
                  {"[loss]\nlabel_smoothing = -0.1\n", {"loss.label_smoothing", "from 0 to below 1"}},
                  {"[loss]\nlabel_smoothing = nan\n", {"loss.label_smoothing"}},
                  {"[loss]\nz_loss = -1e-4\n", {"loss.z_loss", "at least 0"}},
                  {"[loss]\nz_loss = inf\n", {"loss.z_loss", "at least 0"}},
                  {"[model]\nkind = \"scorer\"\n[loss]\nz_loss = 1e-4\n", {"loss.z_loss", "has no effect"}},
                  {"[model]\nkind = \"video\"\n[loss]\nlabel_smoothing = 0.1\n",
                   {"loss.label_smoothing", "has no effect", "decoder's"}}});
}

RunConfig with_parameter_groups(std::vector<std::string> groups) {
  RunConfig config;
  config.optimizer.groups = std::move(groups);
  return config;
}

TEST(ParameterGroupConfig, RatesAndDecaysAreRead) {
  const auto groups =
      parameter_groups_of(with_parameter_groups({"*norm.weight: weight_decay=0",
                                                 " a:b :rate=2e-1,  weight_decay=0.5", "c:rate=0"}),
                          "");
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups[0].pattern, "*norm.weight");
  EXPECT_EQ(groups[0].rate, 1);
  EXPECT_EQ(groups[0].weight_decay, 0.0);
  EXPECT_EQ(groups[1].pattern, "a:b");  // up to the last colon
  EXPECT_EQ(groups[1].rate, 0.2);
  EXPECT_EQ(groups[1].weight_decay, 0.5);
  EXPECT_EQ(groups[2].rate, 0);
  EXPECT_EQ(groups[2].weight_decay, std::nullopt);
  for (const char* kind : {"adamw", "sgd"}) {
    RunConfig config = with_parameter_groups({"a: rate=2"});
    config.optimizer.kind = kind;
    std::visit([](const auto& options) { EXPECT_EQ(options.groups.size(), 1u); }, optimizer_options(config));
  }
}

TEST(ParameterGroupConfig, WhatIsNoGroupIsRefused) {
  for (const auto& [text, said] : {std::pair("*.mlp.*", "has no colon"),
                                   {": rate=1", "names no parameter"},
                                   {"a:", "sets nothing"},
                                   {"a: ,", "sets nothing"},
                                   {"a: 0.5", "with \"0.5\""},
                                   {"a: lr=0.5", "with \"lr=0.5\""},
                                   {"a: rate", "whose rate is no number of 0 or more"},
                                   {"a: rate=", "whose rate is no number of 0 or more"},
                                   {"a: rate=-1", "whose rate is no number of 0 or more"},
                                   {"a: rate=nan", "whose rate is no number of 0 or more"},
                                   {"a: rate=1x", "whose rate is no number of 0 or more"},
                                   {"a: weight_decay=-0.1", "whose weight_decay is no number of 0 or more"},
                                   {"a: weight_decay=inf", "whose weight_decay is no number of 0 or more"},
                                   {"a: rate=1 rate=2", "with two of rate"}}) {
    const std::string toml = fmt::format("[optimizer]\ngroups = [\"{}\"]\n", text);
    EXPECT_THAT(config_error_of([&] { parse_config(toml, "run.toml"); }),
                AllOf(HasSubstr("run.toml"), HasSubstr("optimizer.groups"), HasSubstr(said)))
        << text;
  }
  EXPECT_THAT(config_error_of([] {
                parameter_groups_of(with_parameter_groups({std::string(1'000'000, '*') + ": rate=1"}), "");
              }),
              HasSubstr("1000008 characters; expected at most 1000"));
  EXPECT_THAT(config_error_of([] {
                parameter_groups_of(with_parameter_groups({"a: rate=1", "a: rate=2"}), "");
              }),
              HasSubstr("there already"));
  const std::vector named = {std::pair(std::string("a.mlp.weight"), at::zeros({1}).requires_grad_()),
                             std::pair(std::string("frozen.bias"), at::zeros({1}))};
  check_groups(with_parameter_groups({"*.mlp.*: rate=1"}), named);
  EXPECT_THAT(config_error_of([&] {
                check_groups(with_parameter_groups({"*.mlp.*: rate=1", "a.*: rate=2"}), named);
              }),
              AllOf(HasSubstr("optimizer.groups"), HasSubstr("a.mlp.weight in two groups, *.mlp.* and a.*")));
  for (const char* nothing : {"*.mlp: rate=1", "frozen.*: rate=1"})
    EXPECT_THAT(config_error_of([&] { check_groups(with_parameter_groups({nothing}), named); }),
                AllOf(HasSubstr("optimizer.groups"), HasSubstr("which fits no trained parameter")));
}

NormParts parts_by(const char* by, const std::vector<std::string>& names) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const std::string& name : names)
    named.emplace_back(name, at::zeros({1}).requires_grad_(name.find("frozen") == std::string::npos));
  RunConfig config;
  config.train.part_norms = by;
  return norm_parts_of(config, named);
}

TEST(NormParts, AreGroupsLayersOrParameters) {
  const std::vector<std::string> names = {"model.embed_tokens.weight",
                                          "model.layers.0.mlp.up_proj.weight",
                                          "model.layers.0.mlp.experts.3.up_proj.weight",
                                          "model.layers.10.mlp.gate.weight",
                                          "model.layers.10.frozen.weight",
                                          "model.norm.weight",
                                          "scale"};
  EXPECT_THAT(parts_by("off", names).names, IsEmpty());
  EXPECT_THAT(parts_by("groups", names).names, ElementsAre("dense", "experts"));
  EXPECT_THAT(parts_by("groups", {names[0], names[1]}).names, ElementsAre("dense"));
  const NormParts layers = parts_by("layers", names);
  EXPECT_THAT(layers.names,
              ElementsAre("model.embed_tokens", "model.layers.0", "model.layers.10", "model.norm", "scale"));
  EXPECT_EQ(layers.of(names[2]), 1);
  EXPECT_EQ(layers.of(names[3]), 2);
  EXPECT_EQ(layers.of("model.layers.10.frozen.weight"), -1);
  EXPECT_EQ(layers.of("unknown"), -1);
  const NormParts each = parts_by("parameters", names);
  EXPECT_EQ(each.names.size(), names.size() - 1);
  EXPECT_EQ(each.names[static_cast<std::size_t>(each.of("scale"))], "scale");
}

TEST(NormParts, AModelThatIsAListHasItsPlacesAsLayers) {
  EXPECT_THAT(parts_by("layers", {"0.weight", "0.fc.1.bias", "2.weight"}).names, ElementsAre("0", "2"));
}

}  // namespace
}  // namespace isograd
