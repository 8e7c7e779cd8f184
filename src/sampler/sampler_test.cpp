// Against plain recomputation: the model's own logits of the whole text for every token, in fp64.
#include "isograd/sampler.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "isograd/random.hpp"
#include "kernels/matmul/product.hpp"
#include "model/attention/attention.hpp"
#include "model/decoder.hpp"
#include "model/decoder_testing.hpp"
#include "sampler/attention.hpp"

namespace isograd {
namespace {

using Tokens = std::vector<std::int64_t>;
using ::testing::HasSubstr;

constexpr std::uint64_t kSeed = 5;

// Random updates of every projection, of experts where there are some, and of the head.
class RandomAdapter : public Adapter {
 public:
  RandomAdapter(const DecoderConfig& config, at::ScalarType type, std::uint64_t seed) {
    const std::int64_t rank = config.hidden / 2, queries = config.heads * config.head_dim,
                       keys = config.key_value_heads * config.head_dim;
    const auto add = [&](std::int64_t layer, Projection projection, std::int64_t in, std::int64_t out) {
      const bool routed =
          config.has_experts(layer) && projection >= Projection::kGate && projection <= Projection::kDown;
      const auto draw = [&](std::int64_t rows, std::int64_t columns, std::uint64_t which) {
        const at::Tensor values = routed ? at::empty({config.experts.count, rows, columns}, at::kDouble)
                                         : at::empty({rows, columns}, at::kDouble);
        const RandomKey key{.seed = seed,
                            .step = which,
                            .sample = static_cast<std::uint64_t>(projection),
                            .layer = static_cast<std::uint64_t>(layer)};
        for (std::int64_t i = 0; i < values.numel(); ++i)
          values.mutable_data_ptr<double>()[i] = 0.3 * random_normal(key, static_cast<std::uint64_t>(i));
        return values.to(type);
      };
      updates_[{layer, projection}] = {.a = draw(rank, in, 1), .b = draw(out, rank, 2), .scale = 0.7};
    };
    for (std::int64_t layer = 0; layer < config.layers; ++layer) {
      add(layer, Projection::kQuery, config.hidden, queries);
      add(layer, Projection::kKey, config.hidden, keys);
      add(layer, Projection::kValue, config.hidden, keys);
      add(layer, Projection::kOutput, queries, config.hidden);
      add(layer, Projection::kGate, config.hidden, config.feed_forward);
      add(layer, Projection::kUp, config.hidden, config.feed_forward);
      add(layer, Projection::kDown, config.feed_forward, config.hidden);
    }
    add(0, Projection::kHead, config.hidden, config.vocabulary);
  }
  const LowRank* find(std::int64_t layer, Projection projection) const override {
    const auto found = updates_.find({layer, projection});
    return found == updates_.end() ? nullptr : &found->second;
  }

 private:
  std::map<std::pair<std::int64_t, Projection>, LowRank> updates_;
};

Tokens some_tokens(std::int64_t count, std::uint64_t seed, std::int64_t vocabulary = 61) {
  Tokens tokens;
  for (std::int64_t i = 0; i < count; ++i)
    tokens.push_back(static_cast<std::int64_t>(random_bits({.seed = seed}, static_cast<std::uint64_t>(i)) %
                                               static_cast<std::uint64_t>(vocabulary)));
  return tokens;
}

// [T, vocabulary] log-probabilities of logits / temperature. `shift` moves the last position.
at::Tensor plain_log_probabilities(DecoderLM& model, const Tokens& text, const Adapter* adapter,
                                   double temperature, std::int64_t shift = 0) {
  const at::NoGradGuard no_grad;
  Batch batch = make_batch({std::ssize(text)}, 2, 1);
  batch.tokens = at::tensor(text, at::kLong);
  batch.positions[-1] += shift;
  model.set_adapter(adapter);
  const at::Tensor logits = model.logits(batch).to(at::kDouble);
  model.set_adapter(nullptr);
  return at::log_softmax(logits / (temperature > 0 ? temperature : 1), -1);
}

// How an answer could be wrong, to see that the comparison notices.
enum class Fault { kNone, kNoSampleIndex, kOtherAdapter, kPositionOffByOne };

Sampled::Sequence plain_sequence(DecoderLM& model, const SampleRequest& ask, std::int64_t sample,
                                 Fault fault = Fault::kNone) {
  Sampled::Sequence result;
  Tokens text = ask.prompt;
  while (std::ssize(result.tokens) < ask.max_tokens && !result.stopped) {
    const at::Tensor row =
        plain_log_probabilities(model, text, fault == Fault::kOtherAdapter ? nullptr : ask.adapter.get(),
                                ask.temperature, fault == Fault::kPositionOffByOne ? 1 : 0)[-1]
            .contiguous();
    std::int64_t token = row.argmax().item<std::int64_t>();
    if (ask.temperature > 0) {
      at::Tensor order = std::get<1>(row.sort(/*stable=*/true, 0, /*descending=*/true));
      if (ask.top_k > 0) order = order.narrow(0, 0, std::min(ask.top_k, order.size(0)));
      at::Tensor probabilities = row.exp().index_select(0, order);
      probabilities = probabilities / probabilities.sum();
      const at::Tensor before = probabilities.cumsum(0) - probabilities;
      const at::Tensor kept = std::get<0>(order.masked_select(before < ask.top_p).sort());
      const at::Tensor parts = row.exp().index_select(0, kept);
      const auto index = fault == Fault::kNoSampleIndex ? 0 : static_cast<std::uint64_t>(sample);
      const double uniform =
          random_uniform({.seed = ask.seed, .sample = index, .layer = hash_name("sampler")},
                         static_cast<std::uint64_t>(text.size()));
      const auto place = (parts.cumsum(0) / parts.sum() <= uniform).sum().item<std::int64_t>();
      token = kept[place].item<std::int64_t>();
    }
    result.tokens.push_back(token), text.push_back(token);
    result.log_probabilities.push_back(row[token].item<double>());
    result.stopped = std::ranges::find(ask.stop_tokens, token) != ask.stop_tokens.end();
  }
  return result;
}

std::vector<Sampled> run(TextSampler& sampler, const std::vector<SampleRequest>& asks) {
  for (std::size_t i = 0; i < asks.size(); ++i) sampler.submit(std::to_string(i), asks[i]);
  std::vector<Sampled> results(asks.size());
  std::size_t count = 0;
  for (int passes = 0; sampler.busy() && passes < 100000; ++passes)
    for (auto& [id, result] : sampler.pass()) results[std::stoul(id)] = std::move(result), ++count;
  EXPECT_EQ(count, asks.size());
  return results;
}

Sampled run(DecoderLM& model, const SampleRequest& ask, const TextSamplerOptions& options = {}) {
  TextSampler sampler(model, options);
  return run(sampler, std::vector{ask})[0];
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double most = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

void expect_plain(DecoderLM& model, const SampleRequest& ask, const Sampled& found, const std::string& what) {
  ASSERT_EQ(std::ssize(found.sequences), ask.samples) << what;
  for (std::int64_t i = 0; i < ask.samples; ++i) {
    const auto& own = found.sequences[static_cast<std::size_t>(i)];
    const auto plain = plain_sequence(model, ask, i);
    EXPECT_EQ(own.tokens, plain.tokens) << what << " sample " << i << " seed " << kSeed;
    EXPECT_EQ(own.stopped, plain.stopped) << what;
    EXPECT_LT(distance(own.log_probabilities, plain.log_probabilities), 1e-12) << what;
  }
}

std::vector<DecoderConfig> configs() {
  std::vector<DecoderConfig> all = small_configs();
  for (DecoderConfig& config : all)
    if (config.rope_scaling.kind == "dynamic") config.max_positions = 12;  // its angles change on the way
  all.push_back(small_config("mixtral"));
  all.back().experts = {.count = 4, .per_token = 2, .feed_forward = 48};
  all.push_back(small_config("llama"));
  all.back().head_dim = 32;
  return all;
}

TEST(Sampler, EqualsPlainRecomputation) {
  for (const DecoderConfig& config : configs()) {
    DecoderLM model(config, at::kDouble, kSeed);
    perturb(model, 6);
    for (const double temperature : {0.0, 0.9})
      for (const std::int64_t samples : {1, 3}) {
        const SampleRequest ask{.prompt = {1, 2, 3, 4, 5},
                                .samples = samples,
                                .max_tokens = 16,
                                .temperature = temperature,
                                .seed = 7,
                                .prompt_log_probabilities = true};
        const Sampled found = run(model, ask, {.most_rows = 7, .page = 4});
        const std::string what =
            fmt::format("{} {} temperature {}", config.family, config.rope_scaling.kind, temperature);
        expect_plain(model, ask, found, what);
        const at::Tensor plain = plain_log_probabilities(model, ask.prompt, nullptr, 0);
        for (std::int64_t i = 1; i < 5; ++i)
          EXPECT_NEAR(found.prompt_log_probabilities[i].item<double>(), plain[i - 1][i + 1].item<double>(),
                      1e-12)
              << what;
      }
  }
}

TEST(Sampler, TopKTopPAndStops) {
  DecoderLM model(small_config("llama"), at::kDouble, kSeed);
  SampleRequest ask{.prompt = {3, 1},
                    .samples = 2,
                    .max_tokens = 30,
                    .temperature = 1.3,
                    .top_k = 9,
                    .top_p = 0.7,
                    .seed = 1};
  const Sampled whole = run(model, ask);
  expect_plain(model, ask, whole, "top_k and top_p");
  EXPECT_FALSE(whole.sequences[0].stopped);
  ask.stop_tokens = {whole.sequences[0].tokens[4]};
  const Sampled stopped = run(model, ask);
  expect_plain(model, ask, stopped, "a stop token");
  EXPECT_TRUE(stopped.sequences[0].stopped);
  EXPECT_EQ(stopped.sequences[0].tokens.back(), ask.stop_tokens[0]);
  ask.stop_tokens.clear();
  ask.stops = [](const Tokens& tokens) { return tokens.size() == 6; };
  for (const auto& sequence : run(model, ask).sequences) {
    EXPECT_TRUE(sequence.stopped);
    EXPECT_EQ(sequence.tokens.size(), 6u);
  }
}

TEST(Sampler, ATextInTwoHalvesIsTheTextAtOnce) {
  DecoderLM model(small_config("qwen3"), at::kDouble, kSeed);
  SampleRequest ask{.prompt = {3, 1, 9}, .max_tokens = 24, .seed = 3};
  const Tokens whole = run(model, ask).sequences[0].tokens;
  ask.prompt.insert(ask.prompt.end(), whole.begin(), whole.begin() + 10);
  ask.max_tokens = 14;
  EXPECT_EQ(run(model, ask).sequences[0].tokens, Tokens(whole.begin() + 10, whole.end()));
}

// Log-probabilities of prompts, of targets and of the likeliest tokens.
TEST(Sampler, AnswersAboutPromptsAreTheModelsOwn) {
  for (const auto type : {at::kDouble, at::kFloat}) {
    const double allowed = type == at::kDouble ? 1e-12 : 1e-5;
    const DecoderConfig config = small_config("llama");
    DecoderLM model(config, type, kSeed);
    const auto adapter = std::make_shared<RandomAdapter>(config, type, 2);
    const Tokens prompt = some_tokens(20, 4);
    at::Tensor targets = at::full({19, 2}, -1, at::kLong);
    targets[7][0] = 11, targets[7][1] = 4, targets[15][1] = 60;
    for (const std::int64_t last : {-1, 0, 3, 20, 50})
      for (const bool adapted : {false, true}) {
        SampleRequest ask{.prompt = prompt,
                          .max_tokens = last == 3 ? 0 : 4,
                          .temperature = 0,
                          .prompt_log_probabilities = true,
                          .prompt_last = last,
                          .top_prompt = 3,
                          .top_samples = 2,
                          .prompt_targets = targets};
        if (adapted) ask.adapter = adapter;
        TextSampler sampler(model, {.most_rows = 6, .page = 4});
        run(sampler, {{.prompt = prompt, .max_tokens = 1, .adapter = ask.adapter}});  // leaves a prefix
        const Sampled found = run(sampler, std::vector{ask})[0];
        const at::Tensor plain = plain_log_probabilities(model, prompt, ask.adapter.get(), 0);
        const std::int64_t first = last < 0 ? 1 : std::max<std::int64_t>(20 - last, 1);
        for (std::int64_t i = 0; i < 20; ++i) {
          const double one = found.prompt_log_probabilities[i].item<double>();
          if (i < first) {
            EXPECT_TRUE(std::isnan(one)) << i;
            EXPECT_EQ(found.prompt_top_tokens[i][0].item<std::int64_t>(), 0);
            EXPECT_EQ(found.prompt_top_log_probabilities[i][2].item<double>(), -99999);
            continue;
          }
          EXPECT_NEAR(one, plain[i - 1][prompt[static_cast<std::size_t>(i)]].item<double>(), allowed) << i;
          const auto [values, tokens] = plain[i - 1].topk(3);
          EXPECT_TRUE(found.prompt_top_tokens[i].equal(tokens)) << i;
          EXPECT_TRUE(found.prompt_top_log_probabilities[i].allclose(values, 0, allowed)) << i;
        }
        const at::Tensor expected =
            at::where(targets >= 0, plain.narrow(0, 0, 19).gather(1, targets.clamp_min(0)), 0.0);
        EXPECT_TRUE(found.prompt_target_log_probabilities.allclose(expected, 0, allowed));
        EXPECT_EQ(found.cached_prompt_tokens,
                  last == -1 || last >= 20 ? 0 : 4);  // the first target is asked in row 7
        const auto& sequence = found.sequences[0];
        ASSERT_EQ(std::ssize(sequence.tokens), ask.max_tokens);
        for (std::int64_t i = 0; i < ask.max_tokens; ++i) {
          EXPECT_EQ(sequence.top_tokens[i][0].item<std::int64_t>(),
                    sequence.tokens[static_cast<std::size_t>(i)]);
          EXPECT_EQ(sequence.top_log_probabilities[i][0].item<double>(),
                    sequence.log_probabilities[static_cast<std::size_t>(i)]);
        }
      }
  }
}

// Twenty requests of several lengths, with shared prefixes and adapters.
std::vector<SampleRequest> mixed(const std::vector<std::shared_ptr<const Adapter>>& adapters) {
  const Tokens shared = some_tokens(17, 40);
  std::vector<SampleRequest> asks;
  for (std::int64_t i = 0; i < 20; ++i) {
    SampleRequest ask{.prompt = some_tokens(1 + i * 7 % 23, static_cast<std::uint64_t>(50 + i)),
                      .samples = 1 + i % 3,
                      .max_tokens = 1 + i * 5 % 17,
                      .temperature = i % 4 == 0 ? 0.0 : 0.8,
                      .top_k = i % 5 == 1 ? 6 : 0,
                      .top_p = i % 5 == 2 ? 0.8 : 1.0,
                      .seed = static_cast<std::uint64_t>(i / 2)};
    if (i % 2 == 1) ask.prompt.insert(ask.prompt.begin(), shared.begin(), shared.end());
    ask.weights = static_cast<std::uint64_t>(i / 3 % 3);
    if (ask.weights > 0) ask.adapter = adapters[ask.weights - 1];
    asks.push_back(std::move(ask));
  }
  return asks;
}

class Samplers : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Families, Samplers, ::testing::Values("qwen2", "mixtral"));
TEST_P(Samplers, CompanyAndCachedPrefixesChangeNothing) {
  DecoderConfig config = small_config(GetParam());
  if (config.family == "mixtral")
    config.experts = {.count = 4, .per_token = 2, .feed_forward = config.feed_forward};
  DecoderLM model(config, at::kDouble, kSeed);
  const auto asks = mixed({std::make_shared<RandomAdapter>(config, at::kDouble, 1),
                           std::make_shared<RandomAdapter>(config, at::kDouble, 2)});
  TextSampler sampler(model, {.most_rows = 16, .page = 4});
  for (const char* time : {"first", "from cached prefixes"}) {
    const auto found = run(sampler, asks);
    std::int64_t cached = 0;
    for (std::size_t i = 0; i < asks.size(); ++i) {
      expect_plain(model, asks[i], found[i], fmt::format("{}, request {}", time, i));
      cached += found[i].cached_prompt_tokens;
    }
    EXPECT_GT(cached, 0) << time;
  }
}

// Where products go by brgemm, an answer in fp32 has the same bits alone, in company and behind a cached
// prefix.
TEST(Sampler, InFloatAnAnswerHasTheBitsOfTheRequestAlone) {
  DecoderConfig config = small_config("llama");
  config.hidden = config.feed_forward = config.vocabulary = 64, config.key_value_heads = 4,
  config.head_dim = 16;
  DecoderLM model(config, at::kFloat, kSeed);
  const auto asks = mixed({std::make_shared<RandomAdapter>(config, at::kFloat, 1),
                           std::make_shared<RandomAdapter>(config, at::kFloat, 2)});
  TextSampler sampler(model, {.most_rows = 200, .page = 8});
  run(sampler, asks);
  const auto found = run(sampler, asks);
  for (std::size_t i = 0; i < asks.size(); ++i) {
    const Sampled alone = run(model, asks[i]);
    for (std::size_t s = 0; s < alone.sequences.size(); ++s) {
      EXPECT_EQ(found[i].sequences[s].tokens, alone.sequences[s].tokens) << i;
      EXPECT_LE(distance(found[i].sequences[s].log_probabilities, alone.sequences[s].log_probabilities),
                products_by_brgemm() ? 0 : 1e-4);
    }
  }
}

// A trainer's adapter neither acts on requests nor is lost.
TEST(Sampler, TheModelKeepsItsOwnAdapter) {
  const DecoderConfig config = small_config("llama");
  DecoderLM model(config, at::kDouble, kSeed);
  const RandomAdapter own(config, at::kDouble, 1);
  const SampleRequest ask{.prompt = some_tokens(9, 3), .max_tokens = 6, .seed = 2};
  const auto plain = plain_sequence(model, ask, 0);
  model.set_adapter(&own);
  EXPECT_EQ(run(model, ask).sequences[0].tokens, plain.tokens);
  EXPECT_EQ(model.adapter(), &own);
}

TEST(Sampler, ComparisonsSeePlantedFaults) {
  const DecoderConfig config = small_config("llama");
  DecoderLM model(config, at::kDouble, kSeed);
  const auto one = std::make_shared<RandomAdapter>(config, at::kDouble, 1);
  SampleRequest ask{
      .prompt = some_tokens(9, 3), .samples = 2, .max_tokens = 12, .seed = 2, .adapter = one, .weights = 1};
  const auto differs = [](const Sampled::Sequence& a, const Sampled::Sequence& b) {
    return a.tokens != b.tokens || distance(a.log_probabilities, b.log_probabilities) > 1e-9;
  };
  TextSampler sampler(model, {.page = 4});
  const auto found = run(sampler, std::vector{ask})[0].sequences[1];
  EXPECT_FALSE(differs(found, plain_sequence(model, ask, 1)));
  for (const Fault fault : {Fault::kNoSampleIndex, Fault::kOtherAdapter, Fault::kPositionOffByOne})
    EXPECT_TRUE(differs(found, plain_sequence(model, ask, 1, fault))) << static_cast<int>(fault);
  // Pages of other weights, and of weights that were forgotten in time.
  ask.adapter = std::make_shared<RandomAdapter>(config, at::kDouble, 2);
  const auto right = plain_sequence(model, ask, 1);
  EXPECT_TRUE(differs(run(sampler, std::vector{ask})[0].sequences[1], right));
  sampler.forget(1);
  EXPECT_FALSE(differs(run(sampler, std::vector{ask})[0].sequences[1], right));
}

std::int64_t bytes_of_pages(const DecoderConfig& config, std::int64_t pages, std::int64_t page) {
  return pages * page * 2 * config.layers * config.key_value_heads * config.head_dim * 8;
}

TEST(Sampler, WithLittleMemoryRequestsWaitAndNoneIsLost) {
  const DecoderConfig config = small_config("llama");
  DecoderLM model(config, at::kDouble, kSeed);
  const auto asks = mixed({std::make_shared<RandomAdapter>(config, at::kDouble, 1),
                           std::make_shared<RandomAdapter>(config, at::kDouble, 2)});
  for (const std::int64_t pages : {15, 20}) {
    TextSampler sampler(model, {.most_rows = 16, .page = 4, .cache_bytes = bytes_of_pages(config, pages, 4)});
    for (int time = 0; time < 2; ++time) {
      const auto found = run(sampler, asks);
      for (std::size_t i = 0; i < asks.size(); ++i)
        expect_plain(model, asks[i], found[i], fmt::format("{} pages, request {}", pages, i));
    }
  }
}

TEST(Sampler, SamplesReadOnePrompt) {
  const DecoderConfig config = small_config("llama");
  DecoderLM model(config, at::kDouble, kSeed);
  // 10 positions of the prompt are 2 whole pages; each of 4 samples has 1 of its own for positions 8 to 11.
  const SampleRequest ask{.prompt = some_tokens(10, 8), .samples = 4, .max_tokens = 3, .seed = 9};
  TextSampler sampler(model, {.page = 4, .cache_bytes = bytes_of_pages(config, 6, 4)});
  sampler.submit("a", ask);
  int passes = 0;
  std::vector<std::pair<std::string, Sampled>> found;
  for (; sampler.busy(); ++passes) found = sampler.pass();
  EXPECT_EQ(passes, 3);
  expect_plain(model, ask, found.at(0).second, "shared");
}

TEST(Sampler, EqualPrefixesAreComputedOnce) {
  DecoderLM model(small_config("llama"), at::kDouble, kSeed);
  std::vector<SampleRequest> asks(5, {.prompt = some_tokens(30, 8), .max_tokens = 2});
  for (std::size_t i = 0; i < asks.size(); ++i) asks[i].prompt.back() = static_cast<std::int64_t>(i);
  TextSampler sampler(model, {.page = 4});
  const auto found = run(sampler, asks);
  EXPECT_EQ(found[0].cached_prompt_tokens, 0);
  for (std::size_t i = 1; i < asks.size(); ++i) EXPECT_EQ(found[i].cached_prompt_tokens, 28);
}

TEST(Sampler, BadRequestsAreRefused) {
  DecoderConfig config = small_config("mistral");
  config.sliding_window = 16;
  DecoderLM model(config, at::kDouble, kSeed);
  TextSampler sampler(model, {.page = 4, .cache_bytes = bytes_of_pages(config, 3, 4)});
  const auto refused = [&](SampleRequest ask) {
    return message_of([&] { sampler.submit("x", std::move(ask)); });
  };
  EXPECT_THAT(refused({.prompt = {}}), HasSubstr("at least one"));
  EXPECT_THAT(refused({.prompt = {61}}), HasSubstr("a vocabulary of 61"));
  EXPECT_THAT(refused({.prompt = {-1}}), HasSubstr("token -1"));
  EXPECT_THAT(refused({.prompt = {1}, .samples = 0}), HasSubstr("samples"));
  EXPECT_THAT(refused({.prompt = {1}, .samples = 1 << 20}), HasSubstr("samples"));
  EXPECT_THAT(refused({.prompt = {1}, .max_tokens = -1}), HasSubstr("max_tokens"));
  EXPECT_THAT(refused({.prompt = {1}, .temperature = -1}), HasSubstr("temperature"));
  EXPECT_THAT(refused({.prompt = {1}, .temperature = std::nan("")}), HasSubstr("temperature"));
  EXPECT_THAT(refused({.prompt = {1}, .top_k = -1}), HasSubstr("top_k"));
  EXPECT_THAT(refused({.prompt = {1}, .top_p = 0}), HasSubstr("top_p"));
  EXPECT_THAT(refused({.prompt = {1}, .max_tokens = 1, .top_prompt = 62}), HasSubstr("top_prompt"));
  EXPECT_THAT(refused({.prompt = {1}, .max_tokens = 1, .top_samples = -1}), HasSubstr("top_samples"));
  EXPECT_THAT(refused({.prompt = {1}, .max_tokens = 1, .prompt_last = -2}), HasSubstr("prompt_last"));
  EXPECT_THAT(refused({.prompt = {1, 2}, .max_tokens = 1, .prompt_targets = at::zeros({2, 1}, at::kLong)}),
              HasSubstr("prompt_targets"));
  EXPECT_THAT(refused({.prompt = {1, 2}, .max_tokens = 1, .prompt_targets = at::full({1, 1}, 61, at::kLong)}),
              HasSubstr("prompt_targets"));
  EXPECT_THAT(refused({.prompt = {1, 2}, .max_tokens = 16}), HasSubstr("sliding window"));
  EXPECT_THAT(refused({.prompt = {1, 2}, .max_tokens = 12}), HasSubstr("cache"));
  EXPECT_THAT(refused({.prompt = some_tokens(13, 1), .max_tokens = 0}), HasSubstr("cache"));
  EXPECT_FALSE(sampler.busy());
  EXPECT_EQ(run(sampler, {{.prompt = {1, 2}, .max_tokens = 11}})[0].sequences[0].tokens.size(), 11u);
  DecoderLM short_model(small_config("llama"), at::kDouble, kSeed);
  TextSampler other(short_model);
  EXPECT_THAT(message_of([&] { other.submit("x", {.prompt = {1}, .max_tokens = 65}); }),
              HasSubstr("of the model"));
  EXPECT_THAT(message_of([&] { TextSampler(short_model, {.page = 0}); }), HasSubstr("at least 1"));
}

// An adapter that has diverged ends its own requests.
TEST(Sampler, LogitsThatAreNotFiniteEndOneRequest) {
  const DecoderConfig config = small_config("llama");
  DecoderLM model(config, at::kDouble, kSeed);
  const auto broken = std::make_shared<RandomAdapter>(config, at::kDouble, 1);
  broken->find(1, Projection::kDown)->a.fill_(std::nan(""));
  const SampleRequest good{.prompt = some_tokens(9, 3), .samples = 2, .max_tokens = 6, .seed = 2};
  SampleRequest bad = good;
  bad.adapter = broken, bad.weights = 1;
  TextSampler sampler(model, {.page = 4});
  const auto found = run(sampler, {good, bad, good, bad});
  for (const std::size_t i : {0u, 2u}) expect_plain(model, good, found[i], "good");
  for (const std::size_t i : {1u, 3u}) {
    EXPECT_THAT(found[i].error, HasSubstr("not finite"));
    EXPECT_TRUE(found[i].sequences.empty());
  }
}

// Pages against one dense tensor, for sizes that do and do not fill the kernel's blocks.
TEST(PagedAttention, EqualsAttentionToDenseKeys) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const std::int64_t dim : {6, 16, 40})
      for (const std::int64_t page : {3, 16, 32})
        for (const bool by_products : {false, true}) {
          at::manual_seed(kSeed);
          DecoderConfig config;
          config.layers = 1;
          const ModelHooks hooks;
          const PagedAttention attention(page, config, hooks);
          const at::Tensor q = at::randn({50, 6, dim}, at::kDouble).to(type),
                           k = at::randn({50, 2, dim}, at::kDouble).to(type),
                           v = at::randn({50, 2, dim}, at::kDouble).to(type);
          std::deque<Page> memory(20);
          std::vector<Page*> pages;
          for (Page& one : memory) pages.push_back(&one);
          at::Tensor found = at::empty_like(q);
          for (const auto& [begin, end] :
               {std::pair<std::int64_t, std::int64_t>{0, 1}, {1, 24}, {24, 25}, {25, 50}}) {
            const auto rows = [&, b = begin, e = end](const at::Tensor& x) { return x.narrow(0, b, e - b); };
            rows(found).copy_(attention.attend({{0, begin, end - begin, &pages}}, 0, rows(q), rows(k),
                                               rows(v), by_products));
          }
          const at::Tensor expected = naive_variable_length_attention(q.to(at::kDouble), k.to(at::kDouble),
                                                                      v.to(at::kDouble), {0, 50});
          const double worst = (found.to(at::kDouble) - expected).abs().max().item<double>();
          EXPECT_LT(worst, type == at::kDouble  ? 1e-13
                           : type == at::kFloat ? 2e-6
                                                : 3e-2)
              << type << " dim " << dim << " page " << page << " by products " << by_products;
        }
}

}  // namespace
}  // namespace isograd
