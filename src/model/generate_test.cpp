#include "model/decoder.hpp"

#include <gtest/gtest.h>

#include "isograd/error.hpp"
#include "model/decoder_testing.hpp"

namespace isograd {
namespace {

// The same without a cache: the whole text through the model for every token.
std::vector<std::uint32_t> generate_slowly(DecoderLM& model, std::vector<std::uint32_t> text,
                                           const SampleOptions& options) {
  const at::NoGradGuard no_grad;
  std::vector<std::uint32_t> answer;
  for (std::int64_t i = 0; i < options.max_tokens; ++i) {
    const auto length = static_cast<std::int64_t>(text.size());
    Batch batch = make_batch({length}, 2, 1);
    batch.tokens = at::tensor(std::vector<std::int64_t>(text.begin(), text.end()), at::kLong);
    const at::Tensor last = model.logits(batch)[length - 1].to(at::kDouble).contiguous();
    const double* logits = last.const_data_ptr<double>();
    const auto token = draw_token({logits, logits + last.numel()}, options, static_cast<std::uint64_t>(i));
    answer.push_back(token), text.push_back(token);
  }
  return answer;
}

TEST(Generate, TheCacheChangesNothing) {
  for (DecoderConfig config : small_configs()) {
    config.max_positions = 12;  // `dynamic` then changes its angles on the way
    DecoderLM model(config, at::kDouble, 5);
    perturb(model, 6);
    for (const double temperature : {0.0, 1.0}) {
      const SampleOptions options{.max_tokens = 20, .temperature = temperature, .seed = 7};
      EXPECT_EQ(generate(model, {1, 2, 3}, options), generate_slowly(model, {1, 2, 3}, options))
          << config.family << " " << config.rope_scaling.kind << " temperature " << temperature;
    }
  }
}

TEST(Generate, RepeatsItselfAndFollowsItsSeed) {
  DecoderLM model(small_config("llama"), at::kFloat, 5);
  std::vector<std::uint32_t> seen;
  SampleOptions options{.max_tokens = 16, .temperature = 1.5, .seed = 1};
  const auto first = generate(model, {1}, options, [&](std::uint32_t token) { seen.push_back(token); });
  EXPECT_EQ(seen, first);
  EXPECT_EQ(first.size(), 16u);
  EXPECT_EQ(generate(model, {1}, options), first);
  options.seed = 2;
  EXPECT_NE(generate(model, {1}, options), first);
}

TEST(Generate, EndsAtAnyEndOfText) {
  DecoderConfig config = small_config("llama");
  const SampleOptions options{.max_tokens = 16, .temperature = 0};
  DecoderLM model(config, at::kFloat, 5);
  const auto whole = generate(model, {1}, options);
  const auto at = static_cast<std::size_t>(std::find(whole.begin(), whole.end(), whole[5]) -
                                           whole.begin());  // it may come earlier
  for (const bool second : {false, true}) {
    config.eos = second ? -1 : whole[5];
    if (second) config.more_eos = {whole[5]};
    DecoderLM ending(config, at::kFloat, 5);
    EXPECT_EQ(generate(ending, {1}, options), std::vector<std::uint32_t>(whole.begin(), whole.begin() + at));
  }
}

// Frequencies of 40000 draws within five standard errors of what the options promise.
TEST(Generate, DrawsWithTheProbabilitiesAskedFor) {
  const std::vector<double> logits = {std::log(0.1), std::log(0.4), std::log(0.3), std::log(0.2)};
  const auto frequencies = [&](SampleOptions options) {
    std::vector<double> counts(4);
    for (std::uint64_t i = 0; i < 40000; ++i) counts[draw_token(logits, options, i)] += 1 / 40000.0;
    return counts;
  };
  const auto expect = [&](const SampleOptions& options, const std::vector<double>& expected) {
    const auto found = frequencies(options);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(found[i], expected[i], 5 * 0.5 / 200) << i;
    for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(expected[i] != 0 || found[i] == 0) << i;
  };
  expect({.temperature = 1}, {0.1, 0.4, 0.3, 0.2});
  expect({.temperature = 0.5}, {0.01 / 0.3, 0.16 / 0.3, 0.09 / 0.3, 0.04 / 0.3});
  expect({.temperature = 1, .top_k = 2}, {0, 4 / 7.0, 3 / 7.0, 0});
  expect({.temperature = 1, .top_p = 0.75}, {0, 4 / 9.0, 3 / 9.0, 2 / 9.0});
  expect({.temperature = 1, .top_p = 0.3}, {0, 1, 0, 0});
  expect({.temperature = 0}, {0, 1, 0, 0});
}

TEST(Generate, BadRequestsAreRefused) {
  DecoderLM model(small_config("llama"), at::kFloat, 5);
  EXPECT_THROW(generate(model, {}, {}), ConfigError);
  EXPECT_THROW(generate(model, {61}, {}), ConfigError);
  EXPECT_THROW(generate(model, {1}, {.temperature = -1}), ConfigError);
  EXPECT_THROW(generate(model, {1}, {.top_p = 0}), ConfigError);
  EXPECT_THROW(generate(model, {1}, {.top_k = -1}), ConfigError);
  {
    const at::NoGradGuard no_grad;
    model.named()[0].second.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  EXPECT_THROW(generate(model, {1}, {}), ConfigError);
}

}  // namespace
}  // namespace isograd
