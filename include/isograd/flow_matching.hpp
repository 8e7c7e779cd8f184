// Flow matching of a VideoDiT on the videos of a store: a velocity from data (time 0) to noise (time 1) along
// straight lines. Noise and times are keyed by what they are for, so that any cut of the batch sees the same.
#pragma once

#include "isograd/cxx20.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "isograd/batch.hpp"
#include "isograd/normalizer.hpp"
#include "isograd/video_data.hpp"
#include "isograd/video_dit.hpp"

namespace isograd {

// The randomness of one forward, in fp64. Time of a sample: uniform in [0, 1), by (seed, batch.draw, sample
// id); noise: standard normal, by (seed, batch.draw, sample id, position in the video, element).
struct FlowNoise {
  at::Tensor times;  // [F], the same for all fragments of a sample
  at::Tensor noise;  // [T_local, E]
};
FlowNoise flow_noise(const Batch& batch, std::int64_t elements, std::uint64_t seed);

// One term "flow_matching": Σ over tokens with a target of w · mean over a patch's elements of
// (velocity − (ε − x0))², where the model sees x_t = (1 − t) x0 + t ε (Lipman et al. 2023, arXiv 2210.02747;
// rectified flow, Liu et al. 2022, arXiv 2209.03003). Computed in fp32 (fp64 for fp64), summed in fp64.
// `model` must outlive the result.
ForwardLossTerms flow_matching_loss(VideoDiT& model, std::shared_ptr<const VideoStore> store,
                                    std::uint64_t seed);

// What the term sums, token by token [T_local] in fp64, without weights and without gradient; 0 where a token
// has no target. Like the loss a call of every context rank.
at::Tensor flow_matching_token_losses(VideoDiT& model, const VideoStore& store, const Batch& batch,
                                      std::uint64_t seed);

// The one-step estimate of the data, x_t − t · velocity [T_local, E], and what the model saw; no gradient.
struct FlowEstimate {
  at::Tensor times;     // [F]
  at::Tensor noised;    // [T_local, E], x_t
  at::Tensor estimate;  // [T_local, E]
};
// `time`: of all fragments, instead of the drawn ones.
FlowEstimate flow_estimate(VideoDiT& model, const VideoStore& store, const Batch& batch, std::uint64_t seed,
                           std::optional<double> time = {});

// A new video, [T, E] on the CPU, in the order of a store's tokens: the flow from noise (time 1) to data
// (time 0) along the model's velocity, by Euler's method (Lipman et al. 2023, arXiv 2210.02747, section 4): x
// becomes x − velocity(x, t) / steps at t = 1, 1 − 1 / steps, ... `number` tells videos of one seed apart;
// their noise is none that training draws and the same for any number of steps. No gradient. ConfigError
// without a step, and for a grid that is larger than the model's.
struct FlowSampleOptions {
  std::int64_t steps = 50;
  std::uint64_t seed = 0;
  std::int64_t number = 0;
};
at::Tensor sample_flow(VideoDiT& model, VideoGrid grid, const FlowSampleOptions& options);

// One whole video as the batch that a loader makes of it.
Batch video_batch(const VideoStore& store, std::int64_t video, std::int64_t draw = 0);

// For people: frames uint8 [F, H, W, 3] of a video, of what the model saw and of its estimate, on one device.
struct PredictedVideo {
  double time = 0;
  at::Tensor original, noised, predicted;
};
PredictedVideo predict_frames(VideoDiT& model, const VideoStore& store, std::int64_t video, double time,
                              std::uint64_t seed);

}  // namespace isograd
