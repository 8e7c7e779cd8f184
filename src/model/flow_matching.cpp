#include "isograd/model.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "data/move.hpp"
#include "isograd/random.hpp"
#include "kernels/threads/parallel_for.hpp"
#include "loss/checks.hpp"

namespace isograd {
namespace {

// One forward of the model, on its device: what it saw, what it said and what it should have said, [T, E].
struct Pass {
  at::Tensor data, noise, times_of_tokens, noised, velocity;
};

// [F] to [T].
at::Tensor spread(const at::Tensor& of_fragments, const Batch& batch) {
  std::vector<std::int64_t> lengths;
  for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f)
    lengths.push_back(batch.cu_seqlens[f + 1] - batch.cu_seqlens[f]);
  return of_fragments.repeat_interleave(at::tensor(lengths, at::kLong));
}

Pass run(VideoDiT& model, const VideoStore& store, const Batch& batch, const FlowNoise& drawn) {
  const auto type = computing_type(model.dtype());
  const at::Device device = model.device();
  const at::Tensor tokens = batch.tokens.cpu();  // the store is in host memory
  Pass pass;
  pass.data = moved(store.patches(tokens, type), device);
  pass.noise = moved(drawn.noise.to(type), device);
  pass.times_of_tokens = moved(spread(drawn.times, batch).to(type), device);
  // flow_matching_input() runs from its x0 to its x1.
  pass.noised = flow_matching_input(pass.data, pass.noise, pass.times_of_tokens);
  pass.velocity = model.velocity(batch, pass.noised, store.coordinates(tokens), drawn.times);
  return pass;
}

// A token without target weighs nothing. Not weighted: each other one weighs 1.
at::Tensor weights_of(const Batch& batch, at::Device device, bool weighted = true) {
  const at::Tensor valid = moved(batch.targets, device).ne(kIgnoreIndex);
  if (!weighted || !batch.weights.defined()) return valid;
  return moved(batch.weights, device).masked_fill(valid.logical_not(), 0);
}

}  // namespace

FlowNoise flow_noise(const Batch& batch, std::int64_t elements, std::uint64_t seed) {
  const std::int64_t fragments = batch.num_fragments(), tokens = batch.num_tokens();
  ISOGRAD_INVARIANT(
      static_cast<std::size_t>(fragments) + 1 == batch.cu_seqlens.size() && batch.positions.numel() == tokens,
      "a batch whose sample ids or positions do not fit its fragments");
  FlowNoise drawn{at::empty({fragments}, at::kDouble), at::empty({tokens, elements}, at::kDouble)};
  const at::Tensor places = batch.positions.cpu().contiguous();
  const auto* position = places.const_data_ptr<std::int64_t>();
  auto* time = drawn.times.mutable_data_ptr<double>();
  auto* noise = drawn.noise.mutable_data_ptr<double>();
  const auto key = [&](std::int64_t fragment, std::uint64_t purpose) {
    return RandomKey{.seed = seed,
                     .step = static_cast<std::uint64_t>(batch.draw),
                     .sample = static_cast<std::uint64_t>(batch.sample_ids[fragment]),
                     .layer = purpose};
  };
  const std::uint64_t of_time = hash_name("flow_matching.time"), of_noise = hash_name("flow_matching.noise");
  constexpr std::int64_t kGrain = 16;
  for (std::int64_t f = 0; f < fragments; ++f) {
    time[f] = random_uniform(key(f, of_time), 0);
    const RandomKey own = key(f, of_noise);
    parallel_for(batch.cu_seqlens[f], batch.cu_seqlens[static_cast<std::size_t>(f) + 1], kGrain,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t t = begin; t < end; ++t)
                     for (std::int64_t e = 0; e < elements; ++e)
                       noise[t * elements + e] =
                           random_normal(own, static_cast<std::uint64_t>(position[t] * elements + e));
                 });
  }
  return drawn;
}

ForwardLossTerms flow_matching_loss(VideoDiT& model, std::shared_ptr<const VideoStore> store,
                                    std::uint64_t seed) {
  return [&model, store = std::move(store), seed](const Batch& batch) -> LossTerms {
    const Pass pass = run(model, *store, batch, flow_noise(batch, store->patch_elements(), seed));
    return {{"flow_matching", flow_matching_sum(pass.velocity, pass.data, pass.noise,
                                                weights_of(batch, pass.velocity.device()))}};
  };
}

at::Tensor flow_matching_token_losses(VideoDiT& model, const VideoStore& store, const Batch& batch,
                                      std::uint64_t seed) {
  const at::NoGradGuard no_grad;
  const Pass pass = run(model, store, batch, flow_noise(batch, store.patch_elements(), seed));
  return flow_matching_losses(pass.velocity, pass.data, pass.noise,
                              weights_of(batch, pass.velocity.device(), /*weighted=*/false));
}

FlowEstimate flow_estimate(VideoDiT& model, const VideoStore& store, const Batch& batch, std::uint64_t seed,
                           std::optional<double> time) {
  const at::NoGradGuard no_grad;
  FlowNoise drawn = flow_noise(batch, store.patch_elements(), seed);
  if (time) drawn.times.fill_(*time);
  const Pass pass = run(model, store, batch, drawn);
  const at::Tensor t = pass.times_of_tokens.unsqueeze(1);
  return {drawn.times, pass.noised, pass.noised - t * pass.velocity.to(pass.noised.scalar_type())};
}

at::Tensor sample_flow(VideoDiT& model, VideoGrid grid, const FlowSampleOptions& options) {
  if (options.steps < 1)
    refuse("sample_flow", fmt::format("{} steps", options.steps), "1 or more", "Ask for some");
  constexpr std::int64_t kNoStep = -1;  // of training
  const std::int64_t length = grid.count();
  Batch batch;
  batch.tokens = batch.targets = batch.positions = at::arange(length, at::kLong);
  batch.cu_seqlens = {0, length};
  batch.sample_ids = {options.number};
  batch.draw = kNoStep;
  at::Tensor coordinates = at::empty({length, 3}, at::kLong);
  auto* place = coordinates.mutable_data_ptr<std::int64_t>();
  for (std::int64_t token = 0; token < length; ++token, place += 3)
    std::ranges::copy(grid.place_of(token), place);
  const at::NoGradGuard no_grad;
  const auto type = computing_type(model.dtype());
  const std::int64_t elements = model.config().patch_elements;
  at::Tensor x = moved(flow_noise(batch, elements, options.seed).noise.to(type), model.device());
  const double step = 1.0 / static_cast<double>(options.steps);
  for (std::int64_t i = 0; i < options.steps; ++i) {
    if (options.begins) options.begins(i);
    const at::Tensor time = at::full({1}, 1 - static_cast<double>(i) * step, at::kDouble);
    x = x - step * model.velocity(batch, x, coordinates, time).to(type);
  }
  return x.cpu();
}

Batch video_batch(const VideoStore& store, std::int64_t video, std::int64_t draw) {
  const std::int64_t length = store.num_tokens(video), first = store.first_token(video);
  Batch batch;
  batch.tokens = batch.targets = at::arange(first, first + length, at::kLong);
  batch.positions = at::arange(length, at::kLong);
  batch.cu_seqlens = {0, length};
  batch.sample_ids = {video};
  batch.sample_targets = {length};
  batch.draw = draw;
  return batch;
}

PredictedVideo predict_frames(VideoDiT& model, const VideoStore& store, std::int64_t video, double time,
                              std::uint64_t seed) {
  const Batch batch = video_batch(store, video);
  const FlowEstimate of = flow_estimate(model, store, batch, seed, time);
  const auto frames = [&](const at::Tensor& patches) {
    return unpatchify(to_bytes(patches.cpu()), store.grid(video), store.patch());
  };
  return {time, frames(store.patches(batch.tokens, at::kDouble)), frames(of.noised), frames(of.estimate)};
}

}  // namespace isograd
