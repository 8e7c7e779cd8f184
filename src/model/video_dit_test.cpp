#include "isograd/model.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error_testing.hpp"
#include "isograd/error.hpp"
#include "isograd/random.hpp"
#include "model/video_dit_testing.hpp"

namespace isograd {
namespace {

using error_testing::error_of;
using namespace testing;
using ::testing::HasSubstr;

struct VideoInputs {
  std::shared_ptr<const VideoStore> store;
  Batch batch;
  at::Tensor noised, coordinates, times;
};

VideoInputs inputs_of(const std::vector<VideoGrid>& grids) {
  VideoInputs in;
  in.store = small_videos(grids.empty() ? std::vector<VideoGrid>{{1, 1, 1}} : grids);
  std::vector<std::int64_t> videos;
  for (std::size_t i = 0; i < grids.size(); ++i) videos.push_back(static_cast<std::int64_t>(i));
  in.batch = batch_of_videos(*in.store, videos);
  const FlowNoise drawn = flow_noise(in.batch, 12, 5);
  in.noised = drawn.noise, in.times = drawn.times;
  in.coordinates = in.store->coordinates(in.batch.tokens);
  return in;
}

// Norms and biases away from one and zero, so that leaving one out cannot pass.
void perturb(VideoDiT& model) {
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : model.named()) {
    if (tensor.dim() != 1) continue;
    const RandomKey key{.seed = 9, .layer = hash_name(name)};
    for (std::int64_t i = 0; i < tensor.numel(); ++i)
      tensor[i] += 0.3 * random_normal(key, static_cast<std::uint64_t>(i));
  }
}

// The output, then the gradient of every parameter.
std::vector<at::Tensor> run(VideoDiT& model, const at::Tensor& out) {
  std::vector<at::Tensor> parameters, results{out.detach()};
  for (auto& [name, tensor] : model.named()) parameters.push_back(tensor);
  const at::Tensor weight = (at::arange(out.numel(), at::kDouble) * 0.31).sin().view(out.sizes());
  for (auto& gradient : torch::autograd::grad({(out.to(at::kDouble) * weight).sum()}, parameters))
    results.push_back(gradient);
  return results;
}

const std::vector<std::vector<VideoGrid>> kPacks = {
    {{2, 3, 4}}, {{1, 1, 1}}, {{2, 2, 2}, {1, 4, 5}, {8, 1, 1}, {3, 3, 3}}};

TEST(VideoDiT, IsThePlainModel) {
  VideoDiT model(small_video_dit(), at::kDouble, 3);
  perturb(model);
  for (const auto& grids : kPacks) {
    const VideoInputs in = inputs_of(grids);
    const auto ours = run(model, model.velocity(in.batch, in.noised, in.coordinates, in.times));
    const auto plain = run(model, plain_velocity(model, in.batch, in.noised, in.coordinates, in.times));
    const auto named = model.named();
    for (std::size_t i = 0; i < ours.size(); ++i) {
      // Nothing is truly zero, but for what attention to itself alone gives queries and keys.
      if (in.batch.num_tokens() > 1) {
        EXPECT_GT(plain[i].norm().item<double>(), 1e-6) << (i == 0 ? "velocity" : named[i - 1].first);
      }
      EXPECT_LT(relative(ours[i], plain[i]), 1e-10) << (i == 0 ? "velocity" : named[i - 1].first);
    }
    // The comparison sees a frame, a row or a column that is taken for another, and another's time.
    at::Tensor moved = in.coordinates.roll(1, 1).remainder(4);
    EXPECT_TRUE(at::equal(moved, in.coordinates) ||
                relative(model.velocity(in.batch, in.noised, moved, in.times), plain[0]) > 1e-4);
    EXPECT_GT(relative(model.velocity(in.batch, in.noised, in.coordinates, 1 - in.times), plain[0]), 1e-4);
  }
}

TEST(VideoDiT, LowerPrecisionIsCloseByItsRatio) {
  const VideoInputs in = inputs_of(kPacks[2]);
  VideoDiT exact(small_video_dit(), at::kDouble, 3);
  for (const auto& [type, allowed] : {std::pair{at::kFloat, 1e-4}, {at::kBFloat16, 1e-2}}) {
    VideoDiT model(small_video_dit(), type, 3);
    {
      const at::NoGradGuard no_grad;  // the same weights
      const auto from = model.named(), to = exact.named();
      for (std::size_t i = 0; i < to.size(); ++i) at::Tensor(to[i].second).copy_(from[i].second);
    }
    const at::Tensor wanted = exact.velocity(in.batch, in.noised, in.coordinates, in.times).detach();
    const at::Tensor found = model.velocity(in.batch, in.noised, in.coordinates, in.times).detach();
    EXPECT_EQ(found.scalar_type(), type);
    const double ratio = ((found.to(at::kDouble) * wanted).sum() / wanted.square().sum()).item<double>();
    EXPECT_NEAR(ratio, 1, allowed);  // grade E2's limits of the ratio
  }
}

// Why parity must start elsewhere.
TEST(VideoDiT, ZeroGatesMakeBlocksTheIdentity) {
  const VideoInputs in = inputs_of(kPacks[2]);
  VideoDiT model(small_video_dit(0), at::kDouble, 3);
  const auto results = run(model, model.velocity(in.batch, in.noised, in.coordinates, in.times));
  EXPECT_EQ(results[0].abs().max().item<double>(), 0);
  const auto named = model.named();
  for (std::size_t i = 0; i < named.size(); ++i) {
    const bool moves = named[i].first.starts_with("final.linear");
    EXPECT_EQ(results[i + 1].norm().item<double>() > 0, moves) << named[i].first;
  }
}

TEST(VideoDiT, AnEmptyBatchHangsOnAllParameters) {
  VideoDiT model(small_video_dit(), at::kFloat, 3);
  VideoInputs in = inputs_of({});
  for (const bool fragment : {false, true}) {
    if (fragment)
      in.batch.cu_seqlens = {0, 0}, in.batch.sample_ids = {0}, in.times = at::full({1}, 0.5, at::kDouble);
    const auto results = run(model, model.velocity(in.batch, in.noised, in.coordinates, in.times));
    EXPECT_EQ(results[0].sizes(), (std::vector<std::int64_t>{0, 12}));
    for (std::size_t i = 1; i < results.size(); ++i) {
      ASSERT_TRUE(results[i].defined()) << model.named()[i - 1].first;
      EXPECT_EQ(results[i].abs().max().item<double>(), 0) << model.named()[i - 1].first;
    }
  }
}

TEST(VideoDiT, InitialValuesFollowFromNames) {
  for (const double gate : {0.0, 0.5}) {
    const VideoDiTConfig config = small_video_dit(gate);
    VideoDiT model(config, at::kFloat, 3);
    const auto shapes = VideoDiT::without_values(config, at::kFloat);
    const auto named = model.named(), metas = shapes->named();
    ASSERT_EQ(named.size(), metas.size());
    EXPECT_EQ(named.size(), model.named_parameters().size());
    for (std::size_t i = named.size(); i-- > 0;) {  // in another order
      EXPECT_TRUE(metas[i].second.is_meta());
      at::Tensor values = at::zeros(metas[i].second.sizes(), at::kFloat);
      shapes->initialize(metas[i].first, values, 3);
      EXPECT_TRUE(at::equal(values, named[i].second)) << named[i].first;
    }
    std::size_t of_blocks = 0;
    for (std::int64_t layer = 0; layer < config.layers; ++layer)
      of_blocks += model.block_parameters(layer).size();
    EXPECT_EQ(of_blocks, 32u);
  }
}

TEST(VideoDiT, WhatStandsAroundBlocksSeesThemAll) {
  VideoDiT model(small_video_dit(), at::kDouble, 3);
  const VideoInputs in = inputs_of(kPacks[2]);
  const auto velocity = [&] { return model.velocity(in.batch, in.noised, in.coordinates, in.times); };
  const auto wanted = run(model, velocity());
  std::vector<std::int64_t> layers;
  model.set_around_block([&](std::int64_t layer, const at::Tensor& stream, const at::Tensor& condition,
                             const VideoDiT::BlockForward& block) {
    layers.push_back(layer);
    EXPECT_TRUE(condition.requires_grad());
    block(stream.detach(), condition.detach());  // may be called again
    return block(stream, condition);
  });
  const auto found = run(model, velocity());
  EXPECT_EQ(layers, (std::vector<std::int64_t>{0, 1}));
  for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::equal(found[i], wanted[i]));
}

TEST(VideoDiT, NothingLeaksBetweenVideos) {
  VideoDiT model(small_video_dit(), at::kFloat, 3);
  const VideoInputs in = inputs_of(kPacks[2]);
  const at::Tensor before = model.velocity(in.batch, in.noised, in.coordinates, in.times).detach();
  const auto& ends = in.batch.cu_seqlens;
  for (std::size_t victim = 0; victim + 1 < ends.size(); ++victim) {
    at::Tensor noised = in.noised.clone(), times = in.times.clone();
    noised.slice(0, ends[victim], ends[victim + 1]).add_(1);
    times[static_cast<std::int64_t>(victim)] = 0.123;
    const at::Tensor after = model.velocity(in.batch, noised, in.coordinates, times).detach();
    for (std::size_t f = 0; f + 1 < ends.size(); ++f)
      EXPECT_EQ(at::equal(before.slice(0, ends[f], ends[f + 1]), after.slice(0, ends[f], ends[f + 1])),
                f != victim);
  }
}

TEST(VideoDiT, BadInputIsNamed) {
  const auto with = [](auto&& change) {
    VideoDiTConfig config = small_video_dit();
    change(config);
    return error_of([&] { VideoDiT(config, at::kFloat, 1); });
  };
  EXPECT_THAT(with([](auto& c) { c.hidden = 0; }), HasSubstr("model.hidden"));
  EXPECT_THAT(with([](auto& c) { c.head_dim = 0, c.hidden = 25; }), HasSubstr("a multiple of heads, 12"));
  EXPECT_THAT(with([](auto& c) { c.timestep_features = 7; }), HasSubstr("an even number"));
  EXPECT_THAT(with([](auto& c) { c.gate_init = std::nan(""); }), HasSubstr("model.gate_init"));
  EXPECT_THAT(error_of([] { VideoDiT(small_video_dit(), at::kHalf, 1); }), HasSubstr("BFloat16"));
  VideoDiT model(small_video_dit(), at::kFloat, 3);
  VideoInputs in = inputs_of({{10, 1, 1}});
  const auto velocity = [&] {
    return error_of([&] { model.velocity(in.batch, in.noised, in.coordinates, in.times); });
  };
  EXPECT_THAT(velocity(), HasSubstr("at most 9 x 4 x 5 patches"));
  in = inputs_of({{2, 1, 1}});
  EXPECT_EQ(velocity(), "no error");
  in.batch.cut = std::make_shared<ContextCut>(ContextCut{.pieces = {{}, {}}});
  EXPECT_THAT(velocity(), HasSubstr("cut over 2 context ranks"));
  in.batch.cut = nullptr;
  in.times = at::zeros({2}, at::kDouble);
  EXPECT_THAT(velocity(), HasSubstr("times [2]"));
}

}  // namespace
}  // namespace isograd
