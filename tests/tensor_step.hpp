// A decoder cut over tp as tests train it, and the reference: one process, a whole model, the whole batch,
// LibTorch's log_softmax. The reference shares the model's forward with what is tested, and nothing else.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "base/error_testing.hpp"
#include "isograd/context_parallel.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/loss.hpp"
#include "isograd/model.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/step.hpp"
#include "isograd/tensor_parallel.hpp"
#include "model/decoder_testing.hpp"
#include "model/hooks.hpp"
#include "parallel/data/strategies_testing.hpp"
#include "planted.hpp"
#include "train/build.hpp"

namespace isograd::tensor {

// Sizes that no tp divides: vocabulary 257, features 89, 5 or 8 heads.
inline DecoderConfig shape(std::int64_t heads, std::int64_t key_heads, bool tied) {
  DecoderConfig config = small_config("qwen3");  // norms of queries and keys
  config.vocabulary = 257, config.hidden = 12, config.layers = 2, config.heads = heads;
  config.key_value_heads = key_heads, config.head_dim = 4, config.feed_forward = 89,
  config.tied_output = tied;
  config.pad = 3;
  return config;
}

// Llama with every bias: those of q, k, v, gate, up are cut, those of o and down are added to the stream.
inline DecoderConfig biased() {
  DecoderConfig config = small_config("llama");
  config.attention_bias = config.output_bias = config.mlp_bias = true;
  config.vocabulary = 31, config.hidden = 16, config.heads = 8, config.head_dim = 4, config.feed_forward = 24;
  return config;
}

// What data rank `place` of `places` has: uneven micro-batches, some without a target, fewer on the last one.
inline MicroBatches step_of(int place, int places, std::int64_t vocabulary, int accumulation = 3) {
  MicroBatches batches;
  const int count = place + 1 == places && places > 1 ? 1 : accumulation;
  for (int i = 0; i < count; ++i) {
    const auto seed = static_cast<std::uint64_t>(100 * place + i);
    const std::vector<std::int64_t> lengths =
        i == 1 ? std::vector<std::int64_t>{1} : std::vector<std::int64_t>{7 + place, 3, 11 - i % 11};
    Batch batch = make_batch(lengths, vocabulary, seed);
    batch.targets = batch.tokens.roll(-1);
    for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f) {
      batch.targets[batch.cu_seqlens[f + 1] - 1] = kIgnoreIndex;
      batch.sample_ids[f] = 1000 * place + 10 * i + static_cast<std::int64_t>(f);
      batch.sample_targets.push_back(lengths[f] - 1);
    }
    batches.push_back(batch);
  }
  return batches;
}

// `draw` > 0: every value an ulp of bf16 or so away.
inline std::shared_ptr<DecoderLM> whole_model(const DecoderConfig& config, at::ScalarType type,
                                              std::uint64_t draw = 0) {
  DecoderLM first(config, at::kDouble, 7);
  perturb(first, 8);
  auto model = std::make_shared<DecoderLM>(config, type, 7);
  const at::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(draw);
  for (std::size_t i = 0; i < first.named().size(); ++i) {
    at::Tensor values = first.named()[i].second;
    if (draw > 0) values = values * (1 + 0x1p-7 * at::rand(values.sizes(), generator, values.options()));
    model->named()[i].second.copy_(values.to(at::kBFloat16));  // the same numbers in every precision
  }
  return model;
}

struct Gradient {
  std::map<std::string, at::Tensor> of;
  double loss = 0;
  double norm() const {
    double squares = 0;
    for (const auto& [name, tensor] : of) squares += tensor.to(at::kDouble).square().sum().item<double>();
    return std::sqrt(squares);
  }
};

struct Cell {
  std::int64_t heads = 8, key_heads = 2;
  bool tied = false;
  int tp = 2, data = 1, ring = 1, replicas = 1;
  int accumulation = 3;  // the most micro-batches of a rank
  bool sequence_parallel = true, fused = false, checkpointed = false;
  TensorOverlap overlap = TensorOverlap::kNone;
  bool view = false, view_turned = false;  // tp as tp_heads x tp_copies, or the other way round
  Mean mean = Mean::kTargets;
  std::string strategy = "bucketed";
  at::ScalarType type = at::kDouble;
  bool with_biases = false;
  std::int64_t bucket_bytes = 2000;
  // What a planted mistake changes.
  std::function<void(TensorHooks&, const Mesh&)> change_hooks = [](TensorHooks&, const Mesh&) {};
  std::function<void(TrainableParameters&)> change_placements = [](TrainableParameters&) {};
  std::function<std::unique_ptr<DataParallel>(std::unique_ptr<DataParallel>, World&)> wrap =
      [](std::unique_ptr<DataParallel> layout, World&) { return layout; };

  DecoderConfig config() const { return with_biases ? biased() : shape(heads, key_heads, tied); }
  Grid grid() const {
    const Grid plain(
        {{"dp_replicate", replicas}, {"dp_shard", data}, {"cp_ring", ring}, {"cp_ulysses", 1}, {"tp", tp}});
    const Axis outer{"tp_heads", int(key_heads)}, inner{"tp_copies", tp / int(key_heads)};
    if (view) return plain.viewed({"tp"}, {outer, inner});
    return view_turned ? plain.viewed({"tp"}, {inner, outer}) : plain;
  }
  friend void PrintTo(const Cell& c, std::ostream* out) {
    *out << c.heads << "/" << c.key_heads << " heads, tied " << c.tied << ", tp " << c.tp << ", data "
         << c.data << ", ring " << c.ring << ", " << c.accumulation << " micro-batches"
         << ", sequence parallel " << c.sequence_parallel << ", overlap " << static_cast<int>(c.overlap)
         << ", fused " << c.fused << ", " << c.strategy << ", " << c10::toString(c.type) << ", sample mean "
         << (c.mean == Mean::kSamples) << ", view " << c.view << c.view_turned << ", biases "
         << c.with_biases;
  }
};

// Σ over tokens / their number, or the mean over samples of each one's mean: of what all of `places` have.
inline Gradient one_process(DecoderLM& model, int places, int accumulation, Mean mean) {
  const std::int64_t vocabulary = model.config().vocabulary;
  double targets = 0, samples = 0;
  for (int place = 0; place < places; ++place)
    for (const Batch& batch : step_of(place, places, vocabulary, accumulation))
      for (const std::int64_t count : batch.sample_targets) targets += double(count), samples += count > 0;
  Gradient result;
  for (int place = 0; place < places; ++place)
    for (const Batch& batch : step_of(place, places, vocabulary, accumulation)) {
      const at::Tensor log_p = at::log_softmax(model.logits(batch).to(at::kDouble), 1);
      at::Tensor weights = at::zeros({batch.num_tokens()}, at::kDouble);
      for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f) {
        const double own = mean == Mean::kTargets ? 1 / targets
                           : batch.sample_targets[f] > 0
                               ? 1 / (samples * static_cast<double>(batch.sample_targets[f]))
                               : 0;
        weights.slice(0, batch.cu_seqlens[f], batch.cu_seqlens[f + 1]).fill_(own);
      }
      weights.masked_fill_(batch.targets.eq(kIgnoreIndex), 0);
      const at::Tensor loss =
          -(log_p.gather(1, batch.targets.clamp_min(0).unsqueeze(1)).squeeze(1) * weights).sum();
      result.loss += loss.item<double>();
      if (loss.requires_grad()) loss.backward();
    }
  for (auto& [name, tensor] : model.named())
    if (tensor.requires_grad()) {
      if (!tensor.grad().defined())
        ADD_FAILURE() << "no gradient of " << name;
      else
        result.of[name] = tensor.grad().clone();
    }
  return result;
}

inline Gradient one_process(const Cell& cell, at::ScalarType type, std::uint64_t draw = 0) {
  return one_process(*whole_model(cell.config(), type, draw), cell.data * cell.replicas, cell.accumulation,
                     cell.mean);
}

inline std::unique_ptr<Normalizer> normalizer_of(Mean mean) {
  if (mean == Mean::kSamples) return std::make_unique<SampleMean>();
  return std::make_unique<TokenMean>();
}

// By name, whole, of what a layout's ranks have. Collective.
inline std::map<std::string, at::Tensor> whole_gradients(DataParallel& layout, const Layout& placed) {
  std::map<std::string, at::Tensor> local, whole;
  for (const auto& view : layout.views()) local[view.name] = view.gradient;
  for (const PlacedParameter& each : placed.parameters())
    if (!each.name.ends_with("e_score_correction_bias"))  // which has none
      whole[each.name] =
          placed.whole(each.name, each.held ? local.at(each.name) : at::empty({0}, at::kDouble));
  return whole;
}

struct Found {
  Gradient gradient;
  std::vector<StepReport> reports;
  std::string torn;  // what Layout::check_copies() said after some updates
};

inline Found train(const Cell& cell, int steps = 1) {
  Found found;
  const int ranks = cell.tp * cell.data * cell.ring * cell.replicas;
  found.reports.resize(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](World& world) {
    const Mesh mesh(world, cell.grid());
    auto model = whole_model(cell.config(), cell.type);
    const Layout placed =
        cut_decoder(*model, mesh, {.sequence_parallel = cell.sequence_parallel, .overlap = cell.overlap});
    cell.change_hooks(model->hooks().tensor, mesh);
    if (cell.ring > 1) model->set_attention(ContextAttention(mesh));
    TrainableParameters parameters = trainable_parameters(model->named());
    parameters.placements = placed.placements();
    cell.change_placements(parameters);
    std::optional<ModelUnits> units;
    std::unique_ptr<DataParallel> made;
    if (cell.strategy == "zero3") {
      units = model_units(*model, RunConfig{});
      made = fully_shard(units->root, model->named(), units->blocks, mesh,
                         {.checkpoint = cell.checkpointed, .placements = parameters.placements});
    } else {
      made =
          testing::strategy_named(cell.strategy).make(parameters, mesh, {.bucket_bytes = cell.bucket_bytes});
    }
    auto layout = cell.wrap(std::move(made), world);
    const auto mean = normalizer_of(cell.mean);
    const auto optimizer = steps > 1 ? adamw({.learning_rate = 1e-2}) : sgd({.learning_rate = 0});
    const ForwardLossTerms forward = [&](const Batch& batch) -> LossTerms {
      if (cell.fused)
        return {{"cross_entropy",
                 linear_cross_entropy_sum(
                     model->hidden(batch), model->output_weight(), batch.targets,
                     {.weights = batch.weights, .shard = model->vocabulary(), .tile_tokens = 4})}};
      return {{"cross_entropy", cross_entropy_sum(model->logits(batch), batch.targets,
                                                  {.weights = batch.weights, .shard = model->vocabulary()})}};
    };
    Step step(units ? inside(units->root, forward) : forward, *layout, *mean, *optimizer,
              {.even_micro_batches = cell.ring > 1});
    MicroBatches batches =
        step_of(mesh.place(kSampleAxes), mesh.size(kSampleAxes), cell.config().vocabulary, cell.accumulation);
    if (cell.ring > 1) batches = cut_micro_batches(batches, {.ring = cell.ring}, mesh.place(kContextAxes));
    StepReport report;
    for (int i = 0; i < steps; ++i) report = step(batches);
    found.reports[static_cast<std::size_t>(world.rank)] = report;
    const auto gradients = whole_gradients(*layout, placed);
    std::map<std::string, at::Tensor> values;
    for (const auto& view : layout->views()) values[view.name] = view.parameter;
    std::vector<at::Tensor> in_order;
    for (const PlacedParameter& each : placed.parameters()) in_order.push_back(values.at(each.name));
    if (world.rank == 0) found.gradient.of = gradients;
    const std::string torn =
        error_testing::error_of<PeerError>([&] { placed.check_copies(in_order, "value"); });
    if (world.rank == 0) found.torn = torn, found.gradient.loss = report.loss;
  });
  return found;
}

using Errors = std::map<std::string, double>;

// ‖g − g64‖ / ‖g64‖ by parameter.
inline Errors errors(const Gradient& found, const Gradient& wanted) {
  Errors result;
  for (const auto& [name, gradient] : wanted.of) {
    const at::Tensor exact = gradient.to(at::kDouble);
    const double error = (found.of.at(name).to(at::kDouble) - exact).norm().item<double>();
    result[name] = std::isnan(error) ? HUGE_VAL : error / exact.norm().item<double>();
  }
  return result;
}

inline double largest_error(const Gradient& found, const Gradient& wanted) {
  double largest = 0;
  for (const auto& [name, error] : errors(found, wanted)) largest = std::max(largest, error);
  return largest;
}

}  // namespace isograd::tensor
