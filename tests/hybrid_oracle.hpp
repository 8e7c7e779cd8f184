// The step of one process: the whole batch in fp64, LibTorch's log_softmax, dense
// attention, means and the losses of routers by their definition. It shares the model's matrices with what is
// tested, and the loader, and nothing else.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "isograd/data.hpp"
#include "isograd/error.hpp"
#include "isograd/model.hpp"
#include "isograd/random.hpp"
#include "model/attention/attention.hpp"
#include "model/video_dit_testing.hpp"
#include "train/build.hpp"

namespace isograd::hybrid {

inline constexpr std::uint64_t kNoiseSeed = 17;  // of videos

struct Wanted {
  double loss = 0;
  std::map<std::string, at::Tensor> gradients{};  // by name
};
using Values = std::vector<std::pair<std::string, at::Tensor>>;

// Root of the mean square over the elements of all gradients.
inline double rms_of(const Wanted& wanted) {
  double squares = 0, numel = 0;
  for (const auto& [name, each] : wanted.gradients) {
    squares += each.square().sum().item<double>();
    numel += static_cast<double>(each.numel());
  }
  return std::sqrt(squares / numel);
}

// s = max(‖g64‖, 1e-3 · RMS · √numel) of a parameter with gradient g.
inline double scale_of(double rms, const at::Tensor& g) {
  return std::max(g.norm().item<double>(), 1e-3 * rms * std::sqrt(static_cast<double>(g.numel())));
}

inline void copy_values(const Values& from, const std::vector<std::pair<std::string, at::Tensor>>& to) {
  const at::NoGradGuard no_grad;
  ISOGRAD_INVARIANT(from.size() == to.size(), "the oracle has other parameters");
  for (std::size_t i = 0; i < to.size(); ++i) {
    ISOGRAD_INVARIANT(from[i].first == to[i].first, to[i].first);
    at::Tensor(to[i].second).copy_(from[i].second);
  }
}

struct Counts {
  double targets = 0, tokens = 0, samples = 0;
  std::map<std::int64_t, double> of_sample{};
};
inline Counts counts_of(const MicroBatches& whole) {
  Counts counts;
  for (const Batch& batch : whole) {
    counts.tokens += static_cast<double>(batch.num_tokens());
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f)
      for (std::int64_t t = batch.cu_seqlens[f]; t < batch.cu_seqlens[f + 1]; ++t)
        if (batch.targets[t].item<std::int64_t>() != kIgnoreIndex)
          ++counts.targets, ++counts.of_sample[batch.sample_ids[f]];
  }
  counts.samples = static_cast<double>(counts.of_sample.size());
  return counts;
}

// The routers' losses of a step (docs/experts.md), of every micro-batch's logits [T, E] and choices [T, k] by
// layer.
inline at::Tensor router_losses(const std::vector<DecoderOutputs>& outputs, const RunConfig& config,
                                double tokens) {
  const std::size_t layers = outputs.front().router_logits.size();
  const std::int64_t experts = config.model.shape.experts.count, each = config.model.shape.experts.per_token;
  std::vector<at::Tensor> chosen(layers), probability(layers);
  at::Tensor squares = at::zeros({}, at::kDouble);
  for (std::size_t layer = 0; layer < layers; ++layer) {
    chosen[layer] = at::zeros({experts}, at::kDouble), probability[layer] = at::zeros({experts}, at::kDouble);
    for (const DecoderOutputs& of : outputs) {
      const at::Tensor logits = of.router_logits[layer].to(at::kDouble);
      for (std::int64_t e = 0; e < experts; ++e)
        chosen[layer][e] += of.chosen[layer].eq(e).sum().to(at::kDouble);
      const at::Tensor scores =
          config.model.shape.family == "dots1" ? 1 / (1 + (-logits).exp()) : logits.exp();
      probability[layer] = probability[layer] + (scores / scores.sum(1, true)).sum(0);
      squares = squares + logits.exp().sum(1).log().square().sum();
    }
  }
  const auto over = static_cast<double>(layers), choices = tokens * static_cast<double>(each);
  at::Tensor balance = at::zeros({}, at::kDouble);
  if (config.loss.balance_over == "model")  // of the tokens of all layers together
    balance =
        (at::stack(chosen).sum(0) / (choices * over) * (at::stack(probability).sum(0) / (tokens * over)))
            .sum();
  else
    for (std::size_t layer = 0; layer < layers; ++layer)
      balance = balance + (chosen[layer] / choices * (probability[layer] / tokens)).sum() / over;
  return config.loss.balance * static_cast<double>(experts) * balance +
         config.loss.router_z * squares / (tokens * over);
}

// The loss and gradients of these parameters.
inline Wanted differentiated(const at::Tensor& loss, const Values& named) {
  std::vector<at::Tensor> leaves;
  std::vector<std::string> names;
  for (const auto& [name, tensor] : named)
    if (tensor.requires_grad()) names.push_back(name), leaves.push_back(tensor);
  const auto gradients = torch::autograd::grad({loss}, leaves);
  Wanted wanted{.loss = loss.item<double>()};
  for (std::size_t i = 0; i < names.size(); ++i) wanted.gradients[names[i]] = gradients[i];
  return wanted;
}

// `parts`: the whole step; or, where the loss is the mean of replicas' own means, each replica's.
inline Wanted text_oracle(const RunConfig& config, const std::vector<MicroBatches>& parts,
                          const Values& values) {
  DecoderLM model(configured_shape(config), at::kDouble, 0);
  copy_values(values, model.named());
  model.set_attention([](const Batch& batch, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return naive_variable_length_attention(q, k, v, batch.cu_seqlens);
  });
  std::vector<DecoderOutputs> outputs;
  at::Tensor loss = at::zeros({}, at::kDouble);
  double counting = 0, tokens = 0;  // parts that have a target
  for (const MicroBatches& part : parts) counting += counts_of(part).targets > 0;
  for (const MicroBatches& part : parts) {
    const Counts counts = counts_of(part);
    tokens += counts.tokens;
    for (const Batch& batch : part) {
      outputs.push_back(model.outputs(batch));
      const at::Tensor ignored = batch.targets.eq(kIgnoreIndex).unsqueeze(1);
      const at::Tensor nll = -at::log_softmax(model.logits_of(outputs.back().hidden), 1)
                                  .gather(1, batch.targets.unsqueeze(1).masked_fill(ignored, 0))
                                  .masked_fill(ignored, 0)
                                  .squeeze(1);
      for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
        const auto own = counts.of_sample.find(batch.sample_ids[f]);
        if (own == counts.of_sample.end()) continue;
        const double divisor = config.loss.kind == "token_mean"    ? counts.targets
                               : config.loss.kind == "sample_mean" ? counts.samples * own->second
                                                                   : config.loss.denominator;
        loss = loss + nll.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]).sum() / (divisor * counting);
      }
    }
  }
  if (!outputs.front().router_logits.empty()) loss = loss + router_losses(outputs, config, tokens);
  return differentiated(loss, model.named());
}

// The plain model, and noise drawn number by number.
inline Wanted video_oracle(const RunConfig& config, const MicroBatches& whole, const Values& values) {
  const auto& of = config.video;
  const auto store = VideoStore::open({.patterns = of.files,
                                       .height = of.height,
                                       .frames_per_second = of.frames_per_second,
                                       .max_frames = of.max_frames,
                                       .patch = {of.patch_frames, of.patch_height, of.patch_width}});
  const auto& shape = config.model.shape;
  VideoDiT model({.patch_elements = store->patch_elements(),
                  .hidden = shape.hidden,
                  .layers = shape.layers,
                  .heads = shape.heads,
                  .head_dim = shape.head_dim,
                  .feed_forward = shape.feed_forward,
                  .max_frames = store->largest().t,
                  .max_height = store->largest().h,
                  .max_width = store->largest().w,
                  .timestep_features = of.timestep_features},
                 at::kDouble, 0);
  copy_values(values, model.named());
  const Counts counts = counts_of(whole);
  double samples = 0;
  for (const Batch& batch : whole) samples += static_cast<double>(batch.num_fragments());
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (const Batch& batch : whole) {
    const at::Tensor data = store->patches(batch.tokens, at::kDouble);
    at::Tensor noise = at::empty_like(data), times = at::empty({batch.num_fragments()}, at::kDouble);
    at::Tensor noised = at::empty_like(data);
    const auto part = [&](const at::Tensor& x, std::size_t f) {
      return x.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]);
    };
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
      RandomKey key{.seed = kNoiseSeed,
                    .step = static_cast<std::uint64_t>(batch.draw),
                    .sample = static_cast<std::uint64_t>(batch.sample_ids[f]),
                    .layer = hash_name("flow_matching.time")};
      const double t = random_uniform(key, 0);
      times[static_cast<std::int64_t>(f)] = t;
      key.layer = hash_name("flow_matching.noise");
      double* to = part(noise, f).mutable_data_ptr<double>();
      for (std::int64_t i = 0; i < part(noise, f).numel(); ++i)
        to[i] = random_normal(key, static_cast<std::uint64_t>(i));
      part(noised, f).copy_((1 - t) * part(data, f) + t * part(noise, f));
    }
    const at::Tensor velocity =
        testing::plain_velocity(model, batch, noised, store->coordinates(batch.tokens), times);
    const at::Tensor each =
        (velocity - (noise - data)).square().sum(1) / static_cast<double>(store->patch_elements());
    for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
      const double divisor = config.loss.kind == "sample_mean"
                                 ? samples * static_cast<double>(part(each, f).size(0))
                             : config.loss.kind == "fixed" ? config.loss.denominator
                                                           : counts.tokens;
      loss = loss + part(each, f).sum() / divisor;
    }
  }
  return differentiated(loss, model.named());
}

inline Wanted oracle(const RunConfig& config, const std::vector<MicroBatches>& parts, const Values& values) {
  if (config.model.kind == "video") return video_oracle(config, parts.at(0), values);
  return text_oracle(config, parts, values);
}

}  // namespace isograd::hybrid
