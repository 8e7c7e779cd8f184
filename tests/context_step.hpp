// One step of a small decoder on ranks that share samples, and the same step on one process by code that
// shares nothing with it but the model's matrices.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "isograd/fully_shard.hpp"
#include "isograd/model.hpp"
#include "isograd/step.hpp"
#include "isograd/world.hpp"
#include "model/attention/attention.hpp"
#include "parallel/context/context_testing.hpp"
#include "parallel/data/strategies_testing.hpp"
#include "planted.hpp"
#include "train/build.hpp"

namespace isograd::context {

using testing::ContextSizes;

struct Axes {
  int dp_replicate = 1, dp_shard = 1, ring = 1, ulysses = 1, tp = 1;
  int data() const { return dp_replicate * dp_shard; }
  int context() const { return ring * ulysses; }
  int ranks() const { return data() * context() * tp; }
  std::string name() const {
    return fmt::format("dp {} x {}, ring {}, ulysses {}{}", dp_replicate, dp_shard, ring, ulysses,
                       tp > 1 ? fmt::format(", tp {}", tp) : "");
  }
};

// 12 heads: for every Ulysses size tested. Fewer key heads than ranks where that is possible.
inline DecoderConfig small_decoder(int ulysses) {
  DecoderConfig config;
  config.vocabulary = 31, config.hidden = 24, config.layers = 2, config.heads = 12;
  config.key_value_heads = ulysses == 3 ? 12 : 2;
  config.head_dim = 4, config.feed_forward = 20, config.max_positions = 128, config.initializer_range = 0.3;
  return config;
}

struct Layout {
  std::string name;
  std::vector<std::int64_t> lengths;
  CutOptions options{};
  bool shared_sample = false;  // one sample has a fragment in every micro-batch of every data rank
};
inline const std::vector<Layout> kLayouts = {
    {.name = "one long document", .lengths = {41}},
    {.name = "packs of many", .lengths = {5, 1, 9, 3, 12, 7, 2, 6}, .shared_sample = true},
    {.name = "a row of many", .lengths = {5, 1, 9, 3, 12, 7}, .options = {.level = false}},
    {.name = "one over all ranks beside short ones", .lengths = {3, 37, 5, 2}, .shared_sample = true},
    {.name = "a rank with only padding", .lengths = {1}, .options = {.pad_to_multiple = 2}},
    {.name = "a rank without tokens", .lengths = {1, 0}},
};

// By data rank, before the cut. Data ranks and micro-batches have documents of different lengths.
inline std::vector<MicroBatches> make_step(const Layout& layout, int data, int accumulation) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const auto integers = at::TensorOptions(at::kLong);
  constexpr std::int64_t kShared = 9000;
  std::vector<MicroBatches> step(static_cast<std::size_t>(data));
  std::int64_t sample = 10;
  for (int d = 0; d < data; ++d)
    for (int m = 0; m < accumulation; ++m) {
      Batch batch;
      std::vector<at::Tensor> tokens, targets, positions;
      const auto add = [&](std::int64_t id, std::int64_t length, bool goes_on) {
        const at::Tensor text = at::randint(0, 31, {length + 1}, generator, integers);
        at::Tensor next = text.narrow(0, 1, length).clone();
        if (length > 1 && !goes_on) next[length - 1] = kIgnoreIndex;
        if (length > 4) next[2] = kIgnoreIndex;
        tokens.push_back(text.narrow(0, 0, length)), targets.push_back(next);
        positions.push_back(at::arange(length));
        batch.cu_seqlens.push_back(batch.cu_seqlens.back() + length);
        batch.sample_ids.push_back(id);
      };
      for (std::size_t i = 0; i < layout.lengths.size(); ++i)
        add(sample++, layout.lengths[i] + (i == 0 ? 4 * d + 2 * m : 0), false);
      if (layout.shared_sample) add(kShared, 6 + m, true);
      batch.tokens = at::cat(tokens), batch.targets = at::cat(targets), batch.positions = at::cat(positions);
      step[static_cast<std::size_t>(d)].push_back(std::move(batch));
    }
  std::map<std::int64_t, std::int64_t> valid;
  const auto for_each = [&](auto&& f) {
    for (MicroBatches& batches : step)
      for (Batch& batch : batches)
        for (std::size_t i = 0; i < batch.sample_ids.size(); ++i) f(batch, i);
  };
  for_each([&](Batch& batch, std::size_t i) {
    valid[batch.sample_ids[i]] += batch.targets.slice(0, batch.cu_seqlens[i], batch.cu_seqlens[i + 1])
                                      .ne(kIgnoreIndex)
                                      .sum()
                                      .item<std::int64_t>();
  });
  for_each([&](Batch& batch, std::size_t i) { batch.sample_targets.push_back(valid[batch.sample_ids[i]]); });
  return step;
}

struct Reference {
  double loss = 0;
  std::map<std::string, at::Tensor> gradients;
};

// One process, the whole batch: dense attention, log-softmax, means by their definition.
// `values`: of the weights, as a model of that type has them.
inline Reference reference(const DecoderConfig& config, const std::vector<MicroBatches>& step, bool samples,
                           at::ScalarType values = at::kDouble) {
  DecoderLM model(config, at::kDouble, 3), rounded(config, values, 3);
  {
    const at::NoGradGuard no_grad;
    const auto from = rounded.named(), to = model.named();
    for (std::size_t i = 0; i < to.size(); ++i) at::Tensor(to[i].second).copy_(from[i].second);
  }
  model.set_attention([](const Batch& batch, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return naive_variable_length_attention(q, k, v, batch.cu_seqlens);
  });
  std::map<std::int64_t, double> sizes;
  double targets = 0;
  for (const MicroBatches& batches : step)
    for (const Batch& batch : batches)
      for (std::size_t i = 0; i < batch.sample_ids.size(); ++i)
        for (std::int64_t t = batch.cu_seqlens[i]; t < batch.cu_seqlens[i + 1]; ++t)
          if (batch.targets[t].item<std::int64_t>() != kIgnoreIndex) ++sizes[batch.sample_ids[i]], ++targets;
  const double count = static_cast<double>(sizes.size());
  std::vector<at::Tensor> leaves;
  for (auto& [name, tensor] : model.named()) leaves.push_back(tensor);
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (const MicroBatches& batches : step)
    for (const Batch& batch : batches) {
      const at::Tensor ignored = batch.targets.eq(kIgnoreIndex).unsqueeze(1);
      const at::Tensor nll = -at::log_softmax(model.logits(batch), 1)
                                  .gather(1, batch.targets.unsqueeze(1).masked_fill(ignored, 0))
                                  .masked_fill(ignored, 0)
                                  .squeeze(1);
      for (std::size_t i = 0; i < batch.sample_ids.size(); ++i) {
        if (!sizes.contains(batch.sample_ids[i])) continue;
        const double divisor = samples ? count * sizes[batch.sample_ids[i]] : targets;
        loss = loss + nll.slice(0, batch.cu_seqlens[i], batch.cu_seqlens[i + 1]).sum() / divisor;
      }
    }
  const auto gradients = torch::autograd::grad({loss}, leaves);
  Reference result{.loss = loss.item<double>(), .gradients = {}};
  std::size_t i = 0;
  for (auto& [name, tensor] : model.named()) result.gradients[name] = gradients[i++];
  return result;
}

// Root of the mean square over the elements of all gradients.
inline double rms_of(const Reference& wanted) {
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

// Largest ‖g − g64‖ / s over the parameters.
inline double worst_error(const std::map<std::string, at::Tensor>& gradients, const Reference& wanted) {
  double worst = 0;
  const double rms = rms_of(wanted);
  for (const auto& [name, g] : wanted.gradients) {
    const double error = (gradients.at(name).to(at::kDouble) - g).norm().item<double>() / scale_of(rms, g);
    worst = std::isfinite(error) ? std::max(worst, error) : HUGE_VAL;
  }
  return worst;
}

struct Strategy {
  testing::Strategy flat{};
  bool zero3 = false, checkpoint = false;
  std::string name() const { return zero3 ? (checkpoint ? "zero3 checkpointed" : "zero3") : flat.name; }
};
inline std::vector<Strategy> all_strategies() {
  std::vector<Strategy> all;
  for (const testing::Strategy& flat : testing::strategies()) all.push_back({.flat = flat});
  all.push_back({.zero3 = true});
  all.push_back({.zero3 = true, .checkpoint = true});
  return all;
}

struct Setting {
  Strategy strategy{.flat = {.name = "bucketed"}};
  AxisSet sharded = {"dp_shard", "cp_ring", "cp_ulysses"};
  at::ScalarType dtype = at::kDouble;
  bool samples = false;  // the sample mean, else the token mean
  bool reduce = true;    // false: the gradients before the reduction
  // Seams for what is planted.
  std::function<std::unique_ptr<DataParallel>(std::unique_ptr<DataParallel>, const Mesh&)> wrap =
      [](std::unique_ptr<DataParallel> layout, const Mesh&) { return layout; };
  std::function<std::unique_ptr<Normalizer>(bool, const Mesh&)> mean =
      [](bool of_samples, const Mesh&) -> std::unique_ptr<Normalizer> {
    if (of_samples) return std::make_unique<SampleMean>();
    return std::make_unique<TokenMean>();
  };
  std::function<DecoderLM::Attention(ContextAttention)> attention = [](ContextAttention right) {
    return DecoderLM::Attention(right);
  };
  std::function<Mesh(const World&, const Mesh&)> layout_mesh = [](const World&, const Mesh& right) {
    return right;
  };
};

struct Outcome {
  std::vector<std::map<std::string, at::Tensor>> gradients;  // by rank
  std::vector<StepReport> reports;

  double worst_error(const Reference& wanted) const {
    double worst = 0;
    for (const auto& of_rank : gradients) worst = std::max(worst, context::worst_error(of_rank, wanted));
    return worst;
  }
};

// `whole`: by data rank, before the cut.
inline Outcome run_step(const Axes& axes, const DecoderConfig& config, const std::vector<MicroBatches>& whole,
                        CutOptions options, const Setting& setting) {
  Outcome outcome;
  outcome.gradients.resize(static_cast<std::size_t>(axes.ranks()));
  outcome.reports.resize(outcome.gradients.size());
  options.ring = axes.ring, options.ulysses = axes.ulysses;
  run_ranks(axes.ranks(), [&](World& world) {
    const Mesh mesh(world, data_grid(world.size, {.dp_replicate = axes.dp_replicate,
                                                  .cp_ring = axes.ring,
                                                  .cp_ulysses = axes.ulysses}));
    DecoderLM model(config, setting.dtype, 3);
    model.set_attention(setting.attention(ContextAttention(mesh)));
    const Mesh layout_mesh = setting.layout_mesh(world, mesh);
    ForwardLossTerms forward = [&](const Batch& batch) -> LossTerms {
      return {{"cross_entropy",
               cross_entropy_sum(model.logits(batch), batch.targets, {.weights = batch.weights})}};
    };
    std::unique_ptr<DataParallel> layout;
    if (setting.strategy.zero3) {
      const ModelUnits units = model_units(model, RunConfig{});
      layout = fully_shard(units.root, model.named(), units.blocks, layout_mesh,
                           {.checkpoint = setting.strategy.checkpoint, .sharded = setting.sharded});
      forward = inside(units.root, forward);
    } else {
      layout = setting.strategy.flat.make(
          trainable_parameters(model.named()), layout_mesh,
          {.sharded = setting.sharded, .bucket_bytes = 1024, .overlap = setting.reduce});
    }
    layout = setting.wrap(std::move(layout), mesh);
    const auto mean = setting.mean(setting.samples, mesh);
    const auto optimizer = sgd({.learning_rate = 0});
    Step step(forward, *layout, *mean, *optimizer, {});
    const auto rank = static_cast<std::size_t>(world.rank);
    step.accumulate(cut_micro_batches(whole[static_cast<std::size_t>(mesh.place(kSampleAxes))], options,
                                      mesh.place(kContextAxes)));
    const auto keep = [&] {
      for (auto& view : layout->views()) outcome.gradients[rank][view.name] = view.gradient.clone();
    };
    if (!setting.reduce) keep();
    outcome.reports[rank] = step.finish();
    if (setting.reduce) keep();
  });
  return outcome;
}

}  // namespace isograd::context
