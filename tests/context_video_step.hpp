// One step of a video model over data x context ranks, and the same on one process by other code.
#pragma once

#include "context_planted.hpp"
#include "isograd/model.hpp"
#include "isograd/random.hpp"
#include "isograd/tensor_parallel.hpp"
#include "model/video_dit_testing.hpp"

namespace isograd::context {

inline constexpr std::uint64_t kNoiseSeed = 17;

struct VideoLayout {
  std::string name;
  std::vector<VideoGrid> grids;  // of patches
  CutOptions options{};
};
inline const std::vector<VideoLayout> kVideoLayouts = {
    {.name = "one long video", .grids = {{4, 3, 3}}},
    {.name = "many", .grids = {{1, 2, 2}, {1, 1, 1}, {3, 3, 1}, {1, 1, 3}, {2, 3, 2}, {1, 1, 2}}},
    {.name = "a row of many",
     .grids = {{1, 2, 2}, {1, 1, 1}, {3, 3, 1}, {2, 3, 2}},
     .options = {.level = false}},
    {.name = "one over all ranks beside short ones", .grids = {{1, 1, 3}, {4, 3, 3}, {1, 2, 2}, {1, 1, 2}}},
    {.name = "a rank with only padding", .grids = {{1, 1, 1}}, .options = {.pad_to_multiple = 2}},
    {.name = "a rank without tokens", .grids = {{1, 1, 1}}},
};

struct VideoStep {
  std::shared_ptr<const VideoStore> store;
  std::vector<MicroBatches> whole;  // by data rank, before the cut
};

// Data ranks and micro-batches have videos of their own, the first of another length each.
inline VideoStep make_video_step(const VideoLayout& layout, int data, int accumulation) {
  std::vector<VideoGrid> grids;
  for (int d = 0; d < data; ++d)
    for (int m = 0; m < accumulation; ++m)
      for (std::size_t i = 0; i < layout.grids.size(); ++i) {
        grids.push_back(layout.grids[i]);
        if (i == 0) grids.back().t += 2 * d + m;
      }
  VideoStep step{testing::small_videos(grids), std::vector<MicroBatches>(static_cast<std::size_t>(data))};
  std::int64_t video = 0;
  for (MicroBatches& batches : step.whole)
    for (int m = 0; m < accumulation; ++m) {
      std::vector<std::int64_t> videos;
      for (std::size_t i = 0; i < layout.grids.size(); ++i) videos.push_back(video++);
      batches.push_back(testing::batch_of_videos(*step.store, videos, 5));
    }
  return step;
}

// A model of fp64 with the weights that one of type `values` has.
inline std::shared_ptr<VideoDiT> exact_model(const VideoDiTConfig& config,
                                             at::ScalarType values = at::kDouble) {
  auto model = std::make_shared<VideoDiT>(config, at::kDouble, 3);
  VideoDiT rounded(config, values, 3);
  const at::NoGradGuard no_grad;
  const auto from = rounded.named(), to = model->named();
  for (std::size_t i = 0; i < to.size(); ++i) at::Tensor(to[i].second).copy_(from[i].second);
  return model;
}

// One process, the whole batch: the plain model, noise drawn number by number, means by their definition.
inline Reference reference(VideoDiT& model, const VideoStep& step, bool samples) {
  double tokens = 0, count = 0;
  for (const MicroBatches& batches : step.whole)
    for (const Batch& batch : batches)
      tokens += static_cast<double>(batch.num_tokens()), count += static_cast<double>(batch.num_fragments());
  const std::int64_t elements = step.store->patch_elements();
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (const MicroBatches& batches : step.whole)
    for (const Batch& batch : batches) {
      const at::Tensor data = step.store->patches(batch.tokens, at::kDouble);
      at::Tensor noise = at::empty_like(data), times = at::empty({batch.num_fragments()}, at::kDouble);
      at::Tensor noised = at::empty_like(data);
      for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
        RandomKey key{.seed = kNoiseSeed,
                      .step = static_cast<std::uint64_t>(batch.draw),
                      .sample = static_cast<std::uint64_t>(batch.sample_ids[f]),
                      .layer = hash_name("flow_matching.time")};
        const double t = random_uniform(key, 0);
        times[static_cast<std::int64_t>(f)] = t;
        key.layer = hash_name("flow_matching.noise");
        const auto part = [&](const at::Tensor& x) {
          return x.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]);
        };
        double* to = part(noise).mutable_data_ptr<double>();
        for (std::int64_t i = 0; i < part(noise).numel(); ++i)
          to[i] = random_normal(key, static_cast<std::uint64_t>(i));
        part(noised).copy_((1 - t) * part(data) + t * part(noise));
      }
      const at::Tensor said =
          testing::plain_velocity(model, batch, noised, step.store->coordinates(batch.tokens), times);
      const at::Tensor each = (said - (noise - data)).square().sum(1) / static_cast<double>(elements);
      for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
        const std::int64_t length = batch.cu_seqlens[f + 1] - batch.cu_seqlens[f];
        const double divisor = samples ? count * static_cast<double>(length) : tokens;
        loss = loss + each.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]).sum() / divisor;
      }
    }
  std::vector<at::Tensor> leaves;
  for (auto& [name, tensor] : model.named()) leaves.push_back(tensor);
  const auto gradients = torch::autograd::grad({loss}, leaves);
  Reference result{.loss = loss.item<double>(), .gradients = {}};
  std::size_t i = 0;
  for (auto& [name, tensor] : model.named()) result.gradients[name] = gradients[i++];
  return result;
}

struct VideoSetting : Setting {
  VideoDiTConfig config = testing::small_video_dit();
  // What the forward sees of its part: a seam for what is planted.
  std::function<Batch(const Batch&)> seen = [](const Batch& batch) { return batch; };
  double learning_rate = 0;
  bool sequence_parallel = true;  // of axes with tp
  TensorOverlap overlap = TensorOverlap::kNone;
  std::function<void(isograd::Layout::Named&)> change_placements = [](isograd::Layout::Named&) {};
};

struct VideoOutcome : Outcome {
  std::vector<std::map<std::string, at::Tensor>> weights;  // by rank, after the last step
};

// Steps one after another; gradients are the last one's.
inline VideoOutcome run_video_steps(const Axes& axes, const std::vector<VideoStep>& steps, CutOptions options,
                                    const VideoSetting& setting) {
  VideoOutcome outcome;
  outcome.gradients.resize(static_cast<std::size_t>(axes.ranks()));
  outcome.weights.resize(outcome.gradients.size()), outcome.reports.resize(outcome.gradients.size());
  options.ring = axes.ring, options.ulysses = axes.ulysses, options.causal = false;
  run_ranks(axes.ranks(), [&](World& world) {
    std::vector<Axis> sizes =
        data_grid(world.size / axes.tp,
                  {.dp_replicate = axes.dp_replicate, .cp_ring = axes.ring, .cp_ulysses = axes.ulysses})
            .axes();
    sizes.push_back({"tp", axes.tp});
    const Mesh mesh(world, Grid(sizes));
    VideoDiT model(setting.config, setting.dtype, 3);
    const isograd::Layout placed =
        cut_video(model, mesh, {.sequence_parallel = setting.sequence_parallel, .overlap = setting.overlap});
    TrainableParameters parameters = trainable_parameters(model.named());
    parameters.placements = placed.placements();
    setting.change_placements(parameters.placements);
    model.set_attention(setting.attention(ContextAttention(mesh, /*causal=*/false)));
    const Mesh layout_mesh = setting.layout_mesh(world, mesh);
    ForwardLossTerms forward = [&, right = flow_matching_loss(model, steps[0].store, kNoiseSeed)](
                                   const Batch& batch) { return right(setting.seen(batch)); };
    std::unique_ptr<DataParallel> layout;
    if (setting.strategy.zero3) {
      const UnitHandle root([&model] {
        std::vector<at::Tensor> all;
        for (auto& [name, tensor] : model.named()) all.push_back(tensor);
        return all;
      });
      std::vector<UnitHandle> blocks;
      for (std::int64_t layer = 0; layer < setting.config.layers; ++layer)
        blocks.emplace_back([&model, layer] { return model.block_parameters(layer); });
      model.set_around_block([blocks](std::int64_t layer, const at::Tensor& stream,
                                      const at::Tensor& condition, const VideoDiT::BlockForward& block) {
        return blocks[static_cast<std::size_t>(layer)].run(
            {stream, condition}, [block](const std::vector<at::Tensor>& in) {
              return std::vector<at::Tensor>{block(in[0], in[1])};
            })[0];
      });
      layout = fully_shard(root, model.named(), blocks, layout_mesh,
                           {.checkpoint = setting.strategy.checkpoint,
                            .sharded = setting.sharded,
                            .placements = parameters.placements});
      forward = inside(root, forward);
    } else {
      layout = setting.strategy.flat.make(
          parameters, layout_mesh,
          {.sharded = setting.sharded, .bucket_bytes = 1024, .overlap = setting.reduce});
    }
    layout = setting.wrap(std::move(layout), mesh);
    const auto mean = setting.mean(setting.samples, mesh);
    const auto optimizer = sgd({.learning_rate = setting.learning_rate});
    Step step(forward, *layout, *mean, *optimizer, {.max_norm = 0});
    const auto rank = static_cast<std::size_t>(world.rank);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const bool last = i + 1 == steps.size();
      const auto keep = [&] {
        std::map<std::string, at::Tensor>& kept = outcome.gradients[rank];
        for (auto& view : layout->views()) kept[view.name] = view.gradient.clone();
        if (axes.tp == 1) return;
        for (const PlacedParameter& each : placed.parameters())
          kept[each.name] = placed.whole(each.name, kept.at(each.name));
      };
      step.accumulate(cut_micro_batches(steps[i].whole[static_cast<std::size_t>(mesh.place(kSampleAxes))],
                                        options, mesh.place(kContextAxes)));
      if (last && !setting.reduce) keep();
      outcome.reports[rank] = step.finish();
      if (last && setting.reduce) keep();
    }
    if (!setting.strategy.zero3)
      for (auto& [name, tensor] : model.named()) outcome.weights[rank][name] = tensor.detach().clone();
  });
  return outcome;
}

inline VideoOutcome run_video_step(const Axes& axes, const VideoStep& step, CutOptions options,
                                   const VideoSetting& setting) {
  return run_video_steps(axes, {step}, options, setting);
}

}  // namespace isograd::context
