// The validation loss: the declared mean over what the loader gives, whatever the step under way divides by.
#include "train/evaluate.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <string>

#include "isograd/optimizer.hpp"
#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "toy.hpp"

namespace isograd {
namespace {

// Letters of three bytes with one token per byte, so that a decoding of some tokens ends inside a letter.
class Letters final : public Tokenizer {
 public:
  std::string name() const override { return "letters"; }
  std::int64_t vocabulary() const override { return 10; }
  std::int64_t bos() const override { return -1; }
  std::int64_t eos() const override { return -1; }
  std::vector<std::uint32_t> encode(std::string_view text) const override {
    return std::vector<std::uint32_t>(text.size(), 1);
  }
  std::string decode(std::span<const std::uint32_t> tokens) const override {
    std::string text;
    for (std::size_t i = 0; i + 2 < tokens.size(); i += 3) text += "\xE6\x95\xB0";
    return tokens.size() % 3 == 0 ? text : text + "\xEF\xBF\xBD";
  }
};

TEST(SampleText, GivesItsPartsAsTheyAreSettled) {
  DecoderConfig shape;
  shape.vocabulary = 10, shape.hidden = shape.feed_forward = 16, shape.layers = 1, shape.max_positions = 4096;
  shape.heads = shape.key_value_heads = 1, shape.head_dim = 16;
  DecoderLM model(shape, at::kFloat, 1);
  for (const std::int64_t tokens : {1, 2, 3, 700}) {
    std::vector<std::string> parts;
    const std::string text = sample_text(model, Letters(), "ab", {.prompt = {}, .max_tokens = tokens},
                                         [&](std::string_view part) { parts.emplace_back(part); });
    EXPECT_EQ(std::accumulate(parts.begin(), parts.end(), std::string()), text);
    for (const std::string& part : parts)
      EXPECT_TRUE(part.find("\xEF\xBF\xBD") == std::string::npos || &part == &parts.back()) << part;
    EXPECT_EQ(text, sample_text(model, Letters(), "ab", {.prompt = {}, .max_tokens = tokens}));
  }
}

// Before a deferred step, in its middle and after it: the same number, and the step does not notice.
TEST(Evaluate, UnderADeferredMeanIsTheMeanOfItsOwnBatches) {
  const auto trained = toy::make_step(3, 2), held_out = toy::make_step(3, 3, /*seed=*/5);
  const double expected = toy::reference(toy::Model(), held_out).loss;
  const auto wanted_step = toy::reference(toy::Model(), trained);
  run_ranks(3, [&](World& world) {
    const auto rank = static_cast<std::size_t>(world.rank);
    toy::Model model;
    auto layout = bucketed(trainable_parameters(model.named()), world.group);
    auto optimizer = sgd({.learning_rate = 0});
    Deferred mean(std::make_unique<TokenMean>());
    const ForwardLossTerms forward = [&](const Batch& batch) -> LossTerms {
      return {{"cross_entropy", cross_entropy_sum(model.logits(batch), batch.targets)}};
    };
    const auto loss = [&] { return evaluate(forward, mean, *layout, held_out[rank]).loss; };
    Step step(forward, *layout, mean, *optimizer, {.max_norm = 0});
    EXPECT_NEAR(loss(), expected, 1e-12);
    const MicroBatches& own = trained[rank];
    const auto middle = own.begin() + static_cast<std::ptrdiff_t>(own.size() / 2);
    step.accumulate({own.begin(), middle});
    EXPECT_NEAR(loss(), expected, 1e-12);
    step.accumulate({middle, own.end()});
    const StepReport report = step.finish();
    EXPECT_NEAR(report.loss, wanted_step.loss, 1e-12);
    EXPECT_EQ(report.step_counts.targets, toy::concatenate(trained).num_targets());
    EXPECT_NEAR(loss(), expected, 1e-12);
  });
}

// A value that is whole on every rank counts once; a share counts on each rank.
TEST(Evaluate, CountsAReplicatedTermOnce) {
  run_ranks(3, [](World& world) {
    toy::Model model;
    auto layout = bucketed(trainable_parameters(model.named()), world.group);
    NoDenominator mean;
    const ForwardLossTerms forward = [&](const Batch&) -> LossTerms {
      return {{"whole", at::full({}, 5.0), Mean::kNone, 2.0, 1, /*replicated=*/true},
              {"share", at::full({}, 1.0 + world.rank), Mean::kNone}};
    };
    EXPECT_EQ(evaluate(forward, mean, *layout, {toy::make_batch({4}, world.rank)}).loss, 2 * 5 + 1 + 2 + 3);
  });
}

}  // namespace
}  // namespace isograd
