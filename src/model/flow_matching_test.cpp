#include "isograd/model.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "isograd/error.hpp"
#include "isograd/random.hpp"
#include "model/video_dit_testing.hpp"

namespace isograd {
namespace {

using namespace testing;

const std::vector<VideoGrid> kGrids = {{2, 3, 4}, {1, 1, 2}, {3, 2, 2}, {1, 4, 5}};

// Tokens [begin, end) of one video as a fragment of its own.
Batch piece(const VideoStore& store, std::int64_t video, std::int64_t begin, std::int64_t end,
            std::int64_t draw) {
  Batch whole = video_batch(store, video, draw);
  whole.tokens = whole.targets = whole.tokens.slice(0, begin, end);
  whole.positions = whole.positions.slice(0, begin, end);
  whole.cu_seqlens = {0, end - begin};
  return whole;
}

TEST(FlowNoise, IsTheSameBitsUnderAnyCut) {
  const auto store = small_videos(kGrids);
  constexpr std::uint64_t kSeed = 11;
  constexpr std::int64_t kDraw = 4;
  std::vector<FlowNoise> alone;
  for (std::int64_t v = 0; v < 4; ++v) alone.push_back(flow_noise(video_batch(*store, v, kDraw), 12, kSeed));
  for (const auto& order : {std::vector<std::int64_t>{0, 1, 2, 3}, {3, 1, 0}, {2}}) {
    const Batch batch = batch_of_videos(*store, order, kDraw);
    const FlowNoise together = flow_noise(batch, 12, kSeed);
    for (std::size_t f = 0; f < order.size(); ++f) {
      const FlowNoise& own = alone[static_cast<std::size_t>(order[f])];
      EXPECT_TRUE(
          at::equal(together.noise.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]), own.noise));
      EXPECT_TRUE(
          at::equal(together.times.slice(0, static_cast<std::int64_t>(f), static_cast<std::int64_t>(f) + 1),
                    own.times));
    }
  }
  for (const std::int64_t cut : {1, 7, 23}) {
    const FlowNoise tail = flow_noise(piece(*store, 0, cut, 24, kDraw), 12, kSeed);
    EXPECT_TRUE(at::equal(tail.noise, alone[0].noise.slice(0, cut)));
    EXPECT_TRUE(at::equal(tail.times, alone[0].times));
    // A key that forgets where the fragment begins is seen (museum B26b).
    Batch forgetful = piece(*store, 0, cut, 24, kDraw);
    forgetful.positions = at::arange(24 - cut);
    EXPECT_FALSE(at::equal(flow_noise(forgetful, 12, kSeed).noise, tail.noise));
  }
}

TEST(FlowNoise, DependsOnWhatItIsKeyedBy) {
  const auto store = small_videos({{8, 4, 5}, {8, 4, 5}});
  const FlowNoise one = flow_noise(video_batch(*store, 0, 1), 12, 1);
  for (const auto& [video, draw, seed] : {std::array<std::int64_t, 3>{1, 1, 1}, {0, 2, 1}, {0, 1, 2}}) {
    const FlowNoise other =
        flow_noise(video_batch(*store, video, draw), 12, static_cast<std::uint64_t>(seed));
    EXPECT_FALSE(at::equal(one.times, other.times));
    EXPECT_FALSE(one.noise.eq(other.noise).any().item<bool>());
  }
  // Standard normal: mean and variance of n draws within five standard deviations of theirs.
  const double n = static_cast<double>(one.noise.numel());
  EXPECT_LT(std::abs(one.noise.mean().item<double>()), 5 / std::sqrt(n));
  EXPECT_LT(std::abs(one.noise.square().mean().item<double>() - 1), 5 * std::sqrt(2 / n));
  double sum = 0;
  for (std::int64_t draw = 0; draw < 1000; ++draw) {
    const double t = flow_noise(piece(*store, 0, 0, 0, draw), 12, 1).times.item<double>();
    ASSERT_TRUE(t >= 0 && t < 1);
    sum += t;
  }
  EXPECT_NEAR(sum / 1000, 0.5, 5 * std::sqrt(1.0 / 12 / 1000));
}

TEST(FlowMatching, IsItsFormula) {
  const auto store = small_videos(kGrids);
  VideoDiT model(small_video_dit(), at::kDouble, 3);
  constexpr std::uint64_t kSeed = 6;
  Batch batch = batch_of_videos(*store, {2, 0, 3}, 9);
  batch.targets = batch.targets.clone();
  for (const std::int64_t ignored : {0, 5, 30}) batch.targets[ignored] = kIgnoreIndex;
  for (const bool weighted : {false, true}) {
    if (weighted) batch.weights = at::arange(batch.num_tokens(), at::kDouble) * 0.1;
    double wanted = 0;
    at::Tensor noised = at::empty({batch.num_tokens(), 12}, at::kDouble), target = at::empty_like(noised);
    const at::Tensor data = store->patches(batch.tokens, at::kDouble);
    std::vector<double> times;
    for (std::size_t f = 0; f < 3; ++f) {
      const auto video = static_cast<std::uint64_t>(batch.sample_ids[f]);
      const auto key = [&](const char* of) {
        return RandomKey{.seed = kSeed, .step = 9, .sample = video, .layer = hash_name(of)};
      };
      times.push_back(random_uniform(key("flow_matching.time"), 0));
      for (std::int64_t i = batch.cu_seqlens[f]; i < batch.cu_seqlens[f + 1]; ++i)
        for (std::int64_t e = 0; e < 12; ++e) {
          const double x0 = data[i][e].item<double>();
          const double noise = random_normal(key("flow_matching.noise"),
                                             static_cast<std::uint64_t>((i - batch.cu_seqlens[f]) * 12 + e));
          noised[i][e] = (1 - times[f]) * x0 + times[f] * noise;
          target[i][e] = noise - x0;
        }
    }
    const at::Tensor said =
        plain_velocity(model, batch, noised, store->coordinates(batch.tokens), at::tensor(times, at::kDouble))
            .detach();
    const at::Tensor each = flow_matching_token_losses(model, *store, batch, kSeed);
    for (std::int64_t i = 0; i < batch.num_tokens(); ++i) {
      const bool valid = batch.targets[i].item<std::int64_t>() != kIgnoreIndex;
      const double loss = valid ? (said[i] - target[i]).square().sum().item<double>() / 12 : 0;
      EXPECT_NEAR(each[i].item<double>(), loss, 1e-10 * (1 + loss));
      wanted += loss * (weighted ? 0.1 * static_cast<double>(i) : 1);
    }
    const LossTerms terms = flow_matching_loss(model, store, kSeed)(batch);
    ASSERT_EQ(terms.size(), 1u);
    EXPECT_EQ(terms[0].name, "flow_matching");
    EXPECT_NEAR(terms[0].sum.item<double>(), wanted, 1e-10 * wanted);
    EXPECT_TRUE(terms[0].sum.requires_grad());
  }
  EXPECT_FALSE(flow_matching_token_losses(model, *store, batch, kSeed).requires_grad());
  const LossTerms none = flow_matching_loss(model, store, kSeed)(empty_batch());
  EXPECT_EQ(none[0].sum.item<double>(), 0);
  EXPECT_TRUE(none[0].sum.requires_grad());
}

TEST(FlowMatching, EstimatesAreMadeOfWhatWasSeen) {
  const auto store = small_videos(kGrids);
  // Velocity 0: the estimate is what the model saw; at time 0 that is the video itself.
  VideoDiT silent(small_video_dit(0), at::kFloat, 3);
  const PredictedVideo clear = predict_frames(silent, *store, 2, 0, 5);
  EXPECT_EQ(clear.original.sizes(), (std::vector<std::int64_t>{3, 4, 4, 3}));
  EXPECT_TRUE(at::equal(clear.original, clear.predicted));
  EXPECT_TRUE(at::equal(clear.original, clear.noised));
  const PredictedVideo noisy = predict_frames(silent, *store, 2, 0.7, 5);
  EXPECT_TRUE(at::equal(noisy.noised, noisy.predicted));
  EXPECT_FALSE(at::equal(noisy.noised, noisy.original));

  VideoDiT model(small_video_dit(), at::kDouble, 3);
  const Batch batch = batch_of_videos(*store, {1, 3}, 2);
  const FlowEstimate of = flow_estimate(model, *store, batch, 5);
  const at::Tensor said =
      model.velocity(batch, of.noised, store->coordinates(batch.tokens), of.times).detach();
  const at::Tensor t = at::cat({of.times[0].expand({2, 1}), of.times[1].expand({20, 1})});
  EXPECT_LT(relative(of.estimate, of.noised - t * said), 1e-12);
}

// Every parameter zero but the last bias: the velocity is that bias everywhere.
void make_constant(VideoDiT& model, const at::Tensor& velocity) {
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : model.named()) {
    if (name == "final.linear.bias")
      tensor.copy_(velocity);
    else
      tensor.zero_();
  }
}

// Along a constant velocity Euler's method is exact: noise minus that velocity, in any number of steps.
TEST(SampleFlow, OfAConstantFieldIsTheNoiseMovedByIt) {
  const VideoGrid grid{3, 2, 4};
  for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
    VideoDiT model(small_video_dit(), type, 3);
    const at::Tensor field = at::linspace(-1, 1, 12, at::kDouble).to(type);
    make_constant(model, at::zeros({12}, type));
    const at::Tensor noise = sample_flow(model, grid, {.steps = 3, .seed = 5});
    EXPECT_EQ(noise.sizes(), (std::vector<std::int64_t>{24, 12}));
    EXPECT_NEAR(noise.mean().item<double>(), 0, 4 / std::sqrt(288.0));
    EXPECT_NEAR(noise.std().item<double>(), 1, 4 / std::sqrt(2 * 288.0));
    make_constant(model, field);
    for (const std::int64_t steps : {1, 2, 7, 50}) {
      const at::Tensor made = sample_flow(model, grid, {.steps = steps, .seed = 5});
      // A subtraction rounds once a step, of numbers below 6.
      const double rounding = 6 * static_cast<double>(2 * steps) * (type == at::kDouble ? 0x1p-53 : 0x1p-24);
      EXPECT_LT((made - (noise - field)).abs().max().item<double>(), rounding) << steps;
    }
  }
}

// In a field that depends on place and time: each step is x - velocity(x, t) / steps at its own time, from 1
// on.
TEST(SampleFlow, TakesEulersSteps) {
  VideoDiT model(small_video_dit(), at::kDouble, 3);
  const auto store = small_videos({{2, 3, 4}});
  const Batch batch = video_batch(*store, 0);
  const at::Tensor coordinates = store->coordinates(batch.tokens);
  VideoDiT still(small_video_dit(), at::kDouble, 3);
  make_constant(still, at::zeros({12}, at::kDouble));
  for (const double first : {1.0, 0.75}) {  // planted: times that begin a step late
    at::Tensor x = sample_flow(still, {2, 3, 4}, {.steps = 1, .seed = 9, .number = 2});
    for (int i = 0; i < 4; ++i)
      x = x -
          model.velocity(batch, x, coordinates, at::full({1}, first - 0.25 * i, at::kDouble)).detach() / 4;
    const double off = relative(sample_flow(model, {2, 3, 4}, {.steps = 4, .seed = 9, .number = 2}), x);
    if (first == 1)
      EXPECT_LT(off, 1e-12);
    else
      EXPECT_GT(off, 1e-4);
  }
}

TEST(SampleFlow, FollowsFromSeedAndNumberAlone) {
  VideoDiT model(small_video_dit(), at::kFloat, 3);
  const auto sample = [&](std::uint64_t seed, std::int64_t number) {
    return sample_flow(model, {2, 3, 4}, {.steps = 5, .seed = seed, .number = number});
  };
  EXPECT_TRUE(at::equal(sample(1, 0), sample(1, 0)));
  EXPECT_FALSE(at::equal(sample(1, 0), sample(2, 0)));
  EXPECT_FALSE(at::equal(sample(1, 0), sample(1, 1)));
  EXPECT_THROW(sample_flow(model, {2, 3, 4}, {.steps = 0}), ConfigError);
  EXPECT_THROW(sample_flow(model, {10, 1, 1}, {}), ConfigError);  // of at most 9 frames
}

}  // namespace
}  // namespace isograd
