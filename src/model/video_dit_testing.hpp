// Small video models and batches, and the model once more in plain code, for tests.
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "isograd/model.hpp"

namespace isograd::testing {

// 12 heads: for every Ulysses size tested. Gates begin away from zero: at zero every block is the identity
// and all its gradients vanish, so that whatever attention did would pass as parity.
inline VideoDiTConfig small_video_dit(double gate = 0.5) {
  VideoDiTConfig config;
  config.patch_elements = 12, config.hidden = 24, config.layers = 2, config.heads = 12, config.head_dim = 4;
  config.feed_forward = 20, config.max_frames = 9, config.max_height = 4, config.max_width = 5;
  config.timestep_features = 8, config.initializer_range = 0.3, config.gate_init = gate;
  return config;
}

// Videos with these grids of patches of 1 x 2 x 2 pixels.
inline std::shared_ptr<const VideoStore> small_videos(const std::vector<VideoGrid>& grids) {
  std::vector<at::Tensor> videos;
  std::int64_t seed = 0;
  for (const VideoGrid& grid : grids) {
    const at::Tensor index = at::arange(grid.count() * 12, at::kLong);
    videos.push_back(
        ((index * 7919 + ++seed * 104729) % 251).to(at::kByte).reshape({grid.t, 2 * grid.h, 2 * grid.w, 3}));
  }
  return VideoStore::from_frames(videos, {1, 2, 2});
}

inline Batch batch_of_videos(const VideoStore& store, const std::vector<std::int64_t>& videos,
                             std::int64_t draw = 0) {
  Batch batch;
  std::vector<at::Tensor> tokens{at::empty({0}, at::kLong)}, positions{tokens};
  for (const std::int64_t video : videos) {
    const Batch one = video_batch(store, video);
    tokens.push_back(one.tokens), positions.push_back(one.positions);
    batch.cu_seqlens.push_back(batch.cu_seqlens.back() + one.num_tokens());
    batch.sample_ids.push_back(video);
    batch.sample_targets.push_back(one.num_tokens());
  }
  batch.tokens = batch.targets = at::cat(tokens);
  batch.positions = at::cat(positions);
  batch.draw = draw;
  return batch;
}

// The model from its parameters' names alone: each fragment by itself, every formula written out.
inline at::Tensor plain_velocity(VideoDiT& model, const Batch& batch, const at::Tensor& noised,
                                 const at::Tensor& coordinates, const at::Tensor& times) {
  const VideoDiTConfig& c = model.config();
  std::map<std::string, at::Tensor> w;
  for (auto& [name, tensor] : model.named()) w[name] = tensor;
  const auto linear = [&](const at::Tensor& x, const std::string& name) {
    return at::matmul(x, w.at(name + ".weight").t()) + w.at(name + ".bias");
  };
  const auto silu = [](const at::Tensor& x) { return x / (1 + at::exp(-x)); };
  const auto norm = [&](const at::Tensor& x) {
    const at::Tensor centred = x - x.mean(1, true);
    return centred / at::sqrt(centred.square().mean(1, true) + c.norm_epsilon);
  };
  const auto gelu = [](const at::Tensor& x) {
    return 0.5 * x * (1 + at::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  };
  std::vector<at::Tensor> results;
  for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f) {
    const auto part = [&](const at::Tensor& x) {
      return x.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]);
    };
    std::vector<double> features;
    const auto half = c.timestep_features / 2;
    for (const bool sine : {false, true})
      for (std::int64_t i = 0; i < half; ++i) {
        const double angle = 1000 * times[static_cast<std::int64_t>(f)].item<double>() /
                             std::pow(10000.0, static_cast<double>(i) / static_cast<double>(half));
        features.push_back(sine ? std::sin(angle) : std::cos(angle));
      }
    const at::Tensor condition =
        silu(linear(silu(linear(at::tensor(features, at::kDouble), "timestep.in")), "timestep.out"));
    const at::Tensor place = part(coordinates);
    at::Tensor x = linear(part(noised), "patch_embedding");
    x = x + w.at("frame_embedding.weight").index({place.select(1, 0)}) +
        w.at("row_embedding.weight").index({place.select(1, 1)}) +
        w.at("column_embedding.weight").index({place.select(1, 2)});
    for (std::int64_t layer = 0; layer < c.layers; ++layer) {
      const std::string at = fmt::format("blocks.{}.", layer);
      const auto m = linear(condition, at + "modulation").view({6, c.hidden});
      const at::Tensor in = norm(x) * (1 + m[1]) + m[0];
      const auto heads = [&](const std::string& name, bool normed) {
        at::Tensor y = linear(in, at + "attention." + name).view({-1, c.heads, c.head_dim});
        if (normed)
          y = y / at::sqrt(y.square().mean(2, true) + c.norm_epsilon) *
              w.at(at + "attention." + name + "_norm.weight");
        return y.transpose(0, 1);  // [H, T, D]
      };
      const at::Tensor scores = at::matmul(heads("q", true), heads("k", true).transpose(1, 2)) /
                                std::sqrt(static_cast<double>(c.head_dim));
      const at::Tensor mixed = at::matmul(at::softmax(scores, 2), heads("v", false)).transpose(0, 1);
      x = x + m[2] * linear(mixed.reshape({x.size(0), -1}), at + "attention.o");
      const at::Tensor inner = linear(norm(x) * (1 + m[4]) + m[3], at + "feed_forward.in");
      x = x + m[5] * linear(gelu(inner), at + "feed_forward.out");
    }
    const auto m = linear(condition, "final.modulation").view({2, c.hidden});
    results.push_back(linear(norm(x) * (1 + m[1]) + m[0], "final.linear"));
  }
  return at::cat(results);
}

// ‖a − b‖ / ‖b‖.
inline double relative(const at::Tensor& a, const at::Tensor& b) {
  const double error = (a.to(at::kDouble) - b.to(at::kDouble)).norm().item<double>(),
               size = b.to(at::kDouble).norm().item<double>();
  return std::isnan(error) ? HUGE_VAL : size > 0 ? error / size : error;
}

}  // namespace isograd::testing
