#include "train/config.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <unistd.h>

#include <cmath>

#include "base/files.hpp"
#include "isograd/error.hpp"
#include "train/config_table.hpp"
#include "train/peers.hpp"
#include "train/trainer_testing.hpp"

namespace isograd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string refused(const std::string& toml, const std::vector<std::string>& overrides = {}) {
  try {
    parse_config(toml, "run.toml", overrides);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
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
    *text = key.name == "schedule.kind" ? "constant" : *text + "x";
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
      const std::string said = testing_runs::config_error_of(
          [&] { check_same_configuration(world.rank == 1 ? another : usual, world.group); });
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
      EXPECT_THAT(testing_runs::config_error_of(
                      [&] { check_same_data(world.rank == 2 ? other : facts, world.group); }),
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
  EXPECT_THAT(
      refused("[data]\npack_lenght = 3\n"),
      AllOf(HasSubstr("run.toml:2"), HasSubstr("unknown key \"data.pack_lenght\""),
            HasSubstr("Did you mean \"data.pack_length\"?"), HasSubstr("a key of [data]: text, shards")));
  // The right name in the wrong section, and in no section.
  EXPECT_THAT(refused("[train]\npack_length = 3\n"), HasSubstr("Did you mean \"data.pack_length\"?"));
  EXPECT_THAT(refused("pack_length = 3\n"), HasSubstr("Did you mean \"data.pack_length\"?"));
  EXPECT_THAT(refused("[dta]\npack_length = 3\n"),
              AllOf(HasSubstr("unknown section \"dta\""), HasSubstr("Did you mean \"data\"?")));
  EXPECT_THAT(refused("[model.rope_scalling]\nfactor = 3\n"),
              HasSubstr("Did you mean \"model.rope_scaling\"?"));
  // Nothing is near: no guess.
  EXPECT_THAT(refused("[data]\nzzzzzzzzzzzz = 3\n"), ::testing::Not(HasSubstr("Did you mean")));
  // A quoted key is no path, or it could be given twice.
  EXPECT_THAT(refused("\"data.pack_length\" = 3\n"), HasSubstr("unknown key"));
}

TEST(Config, WrongTypesNameWhatWasFoundAndWhatIsAllowed) {
  EXPECT_THAT(
      refused("[data]\n\npack_length = \"long\"\n"),
      AllOf(HasSubstr("run.toml:3"), HasSubstr("found the text \"long\""),
            HasSubstr("expected integer, at least 1 (tokens)"), HasSubstr("Change data.pack_length")));
  EXPECT_THAT(refused("[data]\npack_length = 2.0\n"), HasSubstr("found the number 2.0"));
  EXPECT_THAT(refused("[data]\npack_length = [3]\n"), HasSubstr("found a list that holds the integer 3"));
  EXPECT_THAT(refused("[data]\ntext = \"a.txt\"\n"), HasSubstr("expected list of texts"));
  EXPECT_THAT(refused("[data]\ntext = [\"a\", 1]\n"), HasSubstr("found a list that holds the integer 1"));
  EXPECT_THAT(refused("[parallel]\noverlap = 1\n"), HasSubstr("expected true or false"));
  EXPECT_THAT(refused("[train]\nsteps = 1979-05-27\n"), HasSubstr("found a date or time"));
  EXPECT_THAT(refused("[train.steps]\nx = 1\n"), HasSubstr("found a table"));
  EXPECT_THAT(refused("train = 3\n"), HasSubstr("Write [train] on a line of its own"));
  EXPECT_THAT(refused("[[train]]\nsteps = 3\n"), HasSubstr("expected a section"));
}

TEST(Config, ANulInATextIsRefused) {
  for (const char* text :
       {"[run]\ndirectory = \"runs/a\\u0000b\"\n", "[data]\ntext = [\"x\", \"a\\u0000\"]\n"})
    EXPECT_THAT(refused(text), AllOf(HasSubstr("run.toml:2"), HasSubstr("found a text with a NUL")));
}

TEST(Config, ImpossibleValuesAreRefused) {
  EXPECT_THAT(refused("[data]\npack_length = 0\n"),
              AllOf(HasSubstr("run.toml:2: data.pack_length"), HasSubstr("found 0"),
                    HasSubstr("at least 1 (tokens)")));
  for (const char* line :
       {"[schedule]\npeak = 0", "[schedule]\npeak = nan", "[schedule]\npeak = inf",
        "[schedule]\nfloor = 1.01", "[train]\nmax_norm = -0.1", "[data]\nvalidation_fraction = 1.0",
        "[optimizer]\nbeta2 = 1.0", "[parallel]\ntimeout_seconds = 0", "[run]\ndirectory = \"\"",
        "[checkpoint]\nkeep = 0", "[data]\nend_of_text = -2", "[run]\nseed = -1", "[train]\nsteps = 0",
        "[parallel]\nbackend = \"pigeon\""})
    EXPECT_THAT(refused(line), HasSubstr("run.toml:2: ")) << line;
  EXPECT_THAT(refused("[optimizer]\nkind = \"adamW\"\n"),
              AllOf(HasSubstr("found \"adamW\""), HasSubstr("one of \"adamw\", \"sgd\""),
                    HasSubstr("Did you mean \"adamw\"?")));
}

TEST(Config, ValuesThatWouldOverflowAreRefused) {
  EXPECT_THAT(refused("[data]\npack_length = 2000000000\n"),
              HasSubstr("found 2000000000, more than 1000000000"));
  EXPECT_THAT(refused("[train]\nsteps = 9223372036854775807\n"), HasSubstr("more than 1000000000000000"));
}

TEST(Config, BrokenTomlNamesLineAndColumn) {
  EXPECT_THAT(refused("[run]\nseed = \n"), HasSubstr("run.toml:2"));
  EXPECT_THAT(refused("[run]\nseed = 1\nseed = 2\n"), HasSubstr("run.toml:3"));
  EXPECT_THAT(refused("[run]\ndirectory = \"\xff\"\n"), HasSubstr("run.toml:2"));
  EXPECT_THAT(refused(std::string("[run]\nseed = 1\0", 15)), HasSubstr("ConfigError"));
  EXPECT_THAT(refused("a = " + std::string(100000, '[')), HasSubstr("ConfigError"));
}

TEST(Config, ModelThatCannotBeIsRefusedWithItsFile) {
  EXPECT_THAT(refused("[model]\nheads = 6\nkey_value_heads = 4\n"),
              HasSubstr("run.toml: model.key_value_heads"));
}

TEST(Config, KeysWithoutEffectAreRefused) {
  EXPECT_THAT(refused("[optimizer]\nmomentum = 0.9\n"),
              AllOf(HasSubstr("optimizer.momentum = 0.9, which has no effect"), HasSubstr("not \"sgd\"")));
  EXPECT_THAT(refused("[optimizer]\nkind = \"sgd\"\nbeta1 = 0.8\n"), HasSubstr("optimizer.beta1"));
  EXPECT_THAT(refused("[model]\nload = \"weights\"\nhidden = 64\n"), HasSubstr("model.hidden = 64"));
  EXPECT_THAT(refused("[model]\nload = \"weights\"\n"), "accepted");
  EXPECT_THAT(refused("[model.rope_scaling]\nfactor = 2\n"), HasSubstr("model.rope_scaling.factor"));
  EXPECT_THAT(refused("[data]\nend_of_text = 3\n"), HasSubstr("data.end_of_text"));
  EXPECT_THAT(refused("[data]\ntext = [\"a\"]\nshards = [\"b\"]\n"),
              HasSubstr("both data.text and data.shards"));
}

TEST(Config, ALossThatContradictsItselfIsExplainedByBothReadings) {
  const auto loss = [](const std::string& keys) { return refused("[loss]\n" + keys); };
  const std::string without = "normalise_over = [\"dp_shard\", \"cp_ring\", \"cp_ulysses\"]\n";
  EXPECT_EQ(loss("kind = \"sample_mean\""), "accepted");
  EXPECT_EQ(loss("kind = \"fixed\"\ndenominator = 1024"), "accepted");
  EXPECT_EQ(loss(without), "accepted");
  EXPECT_EQ(loss(without + "dp_replicate_reduction = \"mean\""), "accepted");
  EXPECT_EQ(loss("dp_replicate_reduction = \"sum\""), "accepted");
  EXPECT_THAT(loss("kind = \"token_means\""),
              AllOf(HasSubstr("run.toml:2"), HasSubstr("Did you mean \"token_mean\"?")));
  EXPECT_THAT(loss("kind = \"fixed\""), HasSubstr("Set loss.denominator"));
  EXPECT_THAT(loss("kind = \"sample_mean\"\ndenominator = 8"),
              AllOf(HasSubstr("one of two readings"), HasSubstr("set loss.kind = \"fixed\" for the second")));
  EXPECT_THAT(
      loss("dp_replicate_reduction = \"mean\""),
      AllOf(HasSubstr("one mean over every token of the batch"), HasSubstr("the mean of per-replica means")));
  EXPECT_THAT(loss(without + "dp_replicate_reduction = \"sum\""), HasSubstr("one of two readings"));
  EXPECT_THAT(loss("kind = \"none\"\n" + without), HasSubstr("one of two readings"));
  EXPECT_THAT(loss("normalise_over = [\"dp_replicate\", \"dp_shard\", \"cp_ring\"]"),
              HasSubstr("Add cp_ulysses"));
  EXPECT_THAT(loss("normalise_over = [\"tp\"]"), HasSubstr("which would be counted twice"));
  EXPECT_THAT(loss("normalise_over = [\"dp\"]"), HasSubstr("loss.normalise_over with \"dp\""));
  EXPECT_THAT(loss("normalise_over = [\"cp_ring\", \"cp_ring\"]"), HasSubstr("cp_ring twice"));
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
  EXPECT_THAT(refused("", {"train.stepz=5"}),
              AllOf(HasSubstr("--set train.stepz=5"), HasSubstr("Did you mean \"train.steps\"?")));
  EXPECT_THAT(refused("", {"train.steps"}), HasSubstr("expected section.key=value"));
  EXPECT_THAT(refused("", {"train.steps=many"}),
              AllOf(HasSubstr("--set train.steps=many"), HasSubstr("found \"many\""), HasSubstr("integer")));
  EXPECT_THAT(refused("", {"train.steps="}), HasSubstr("expected integer"));
  EXPECT_THAT(refused("", {"train.steps=0"}), HasSubstr("expected integer, at least 1 (steps)"));
  EXPECT_THAT(refused("", {"train.steps=1\nother = 2"}), HasSubstr("expected integer"));
  EXPECT_THAT(refused("", {"data.text=[\"a\""}), HasSubstr("expected list of texts"));
  EXPECT_THAT(refused("", {"sample.prompt=\xff"}), HasSubstr("not UTF-8"));
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
  config.model.shape.initializer_range = *rc::gen::inRange<std::int64_t>(0, 1 << 20) / 3.0;
  if (!config.data.text.empty()) config.data.shards.clear();
  if (config.data.shards.empty()) config.data.end_of_text = -1;
  config.video = RunConfig{}.video;  // of another kind of model
  config.batch.videos_per_step = RunConfig{}.batch.videos_per_step;
  config.batch.tokens_per_micro_batch = RunConfig{}.batch.tokens_per_micro_batch;
  config.loss.normalise_over = RunConfig{}.loss.normalise_over;
  // Losses of experts, which the model has none of.
  config.loss.balance = config.loss.router_z = 0;
  config.loss.selection_bias_rate = RunConfig{}.loss.selection_bias_rate;
  config.parallel.ep = 1;
  config.parallel.expert_overlap = RunConfig{}.parallel.expert_overlap;
  config.loss.balance_over = RunConfig{}.loss.balance_over;
  config.loss.balance_scope = RunConfig{}.loss.balance_scope;
  if (config.loss.kind != "fixed") config.loss.denominator = 0;
  if (config.loss.kind == "fixed" && config.loss.denominator == 0) config.loss.denominator = 1;
  if (config.loss.dp_replicate_reduction == "mean") config.loss.dp_replicate_reduction = "sum";
  if (config.optimizer.kind == "adamw") config.optimizer.momentum = 0;
  if (config.optimizer.kind == "sgd") {
    const double decay = config.optimizer.adamw.weight_decay;
    config.optimizer.adamw = {};
    config.optimizer.adamw.weight_decay = decay;
  }
  if (config.parallel.strategy == "naive" || config.parallel.strategy == "overlapped")
    config.parallel.share_parameters = "auto";  // these keep no copy that ranks could share
  if (config.parallel.tp == 1) {                // without effect
    config.parallel.sequence_parallel = true;
    config.parallel.tensor_overlap = RunConfig{}.parallel.tensor_overlap;
  }
  if (stage_of(config.parallel.strategy) == 0) {
    config.parallel.replicas = 1;
    config.parallel.cp_fsdp_mode = RunConfig{}.parallel.cp_fsdp_mode;
  }
  if (config.parallel.pp == 1) {
    config.parallel.schedule = RunConfig{}.parallel.schedule;
    config.parallel.stages_per_rank = RunConfig{}.parallel.stages_per_rank;
  }
  if (config.parallel.device == "cpu" && config.parallel.backend == "nccl") config.parallel.device = "cuda";
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

}  // namespace
}  // namespace isograd
