// A decoder whose experts are dealt to ranks as tests train it, and the reference: one process with all
// tokens and all experts.
#pragma once

#include <array>

#include "isograd/expert_parallel.hpp"
#include "tensor_step.hpp"

namespace isograd::experts {

using tensor::Gradient;

struct Cell {
  int ranks = 2;  // that see different tokens
  int ep = 2, ring = 1, replicas = 1, tp = 1;
  std::int64_t experts = 5, each = 2;
  std::string strategy = "bucketed";
  Mean mean = Mean::kTargets;
  int accumulation = 3;
  bool checkpointed = false;
  bool ties = false;     // routers of zeros: all tokens go to the first experts
  bool shared = false;   // an expert beside them that every token goes through
  bool sigmoid = false;  // a router of dots1, which has one too: groups, a selection bias, weights to 2.5
  bool sequence_parallel = true;
  ExpertOverlap overlap = ExpertOverlap::kShared;
  std::function<void(TrainableParameters&)> change_placements = [](TrainableParameters&) {};
  std::function<void(ExpertHooks&)> change_hooks = [](ExpertHooks&) {};

  int places() const { return ranks / ring; }
  DecoderConfig config() const {
    DecoderConfig config = small_config("qwen3");
    config.family = shared ? "qwen2_moe" : "qwen3_moe";
    if (shared) config.query_key_norm = false, config.attention_bias = true;
    config.vocabulary = 31, config.hidden = 12, config.heads = 4, config.key_value_heads = 2;
    config.head_dim = 4, config.feed_forward = 20;
    config.experts = {
        .count = experts, .per_token = each, .feed_forward = 7, .shared_feed_forward = shared ? 5 : 0};
    config.experts.normalise = each > 1;  // else routers had no gradient
    if (!sigmoid) return config;
    config.family = "dots1", config.query_key_norm = true, config.attention_bias = false;
    config.experts.shared_feed_forward = 14;
    config.experts.sigmoid = true, config.experts.scale = 2.5;
    config.experts.dense_layers = {0};
    if (experts % 4 == 0)
      config.experts.groups = experts / 2 > 4 ? 4 : 2, config.experts.groups_per_token = 2;
    return config;
  }
  Grid grid() const {
    const Grid plain({{"dp_replicate", replicas},
                      {"dp_shard", ranks / ring / replicas},
                      {"cp_ring", ring},
                      {"cp_ulysses", 1},
                      {"tp", tp}});
    return plain.viewed(data_axes(plain), {{"edp", ranks / ep}, {kExpertAxis, ep}});
  }
  friend void PrintTo(const Cell& c, std::ostream* out) {
    *out << c.ranks << " data ranks, tp " << c.tp << ", sequence parallel " << c.sequence_parallel << ", ep "
         << c.ep << ", ring " << c.ring << ", replicas " << c.replicas << ", " << c.each << " of "
         << c.experts << " experts, " << c.strategy << ", sample mean " << (c.mean == Mean::kSamples) << ", "
         << c.accumulation << " micro-batches, checkpointed " << c.checkpointed << ", ties " << c.ties
         << ", shared " << c.shared << ", sigmoid " << c.sigmoid << ", overlap "
         << static_cast<int>(c.overlap);
  }
};

inline std::shared_ptr<DecoderLM> whole_model(const Cell& cell, at::ScalarType type, std::uint64_t draw = 0) {
  auto model = tensor::whole_model(cell.config(), type, draw);
  const at::NoGradGuard no_grad;
  if (cell.ties)
    for (auto [name, values] : model->named())
      if (name.find("mlp.gate.weight") != std::string::npos) values.zero_();
  for (auto [name, values] : model->named())
    if (name.ends_with("e_score_correction_bias"))
      values.copy_(at::arange(values.numel(), at::kDouble).mul(7 + static_cast<double>(draw)).sin().mul(0.2));
  return model;
}

// The experts of a token, by its sample, position and layer.
using Choices = std::map<std::array<std::int64_t, 3>, std::vector<std::int64_t>>;

template <typename F>
void for_tokens(const Batch& batch, std::int64_t layer, F&& with) {
  for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f)
    for (std::int64_t t = batch.cu_seqlens[f]; t < batch.cu_seqlens[f + 1]; ++t)
      with(t, std::array{batch.sample_ids[f], batch.positions[t].item<std::int64_t>(), layer});
}

inline DecoderLM::ChooseExperts recorded(Choices& choices) {
  return [&choices](const Batch& batch, std::int64_t layer, const ExpertScores&,
                    const at::Tensor& likeliest) {
    for_tokens(batch, layer, [&](std::int64_t t, const auto& token) {
      const at::Tensor row = likeliest[t].contiguous();
      choices[token] = {row.const_data_ptr<std::int64_t>(), row.const_data_ptr<std::int64_t>() + row.numel()};
    });
    return likeliest;
  };
}

// Routing is discontinuous: in lower precision the comparison is of the same choices.
inline DecoderLM::ChooseExperts replayed(const Choices& choices) {
  return
      [&choices](const Batch& batch, std::int64_t layer, const ExpertScores&, const at::Tensor& likeliest) {
        at::Tensor chosen = likeliest.clone();
        for_tokens(batch, layer, [&](std::int64_t t, const auto& token) {
          chosen[t] = at::tensor(choices.at(token), at::kLong);
        });
        return chosen;
      };
}

inline Gradient one_process(const Cell& cell, at::ScalarType type, const DecoderLM::ChooseExperts& choose,
                            std::uint64_t draw = 0) {
  const auto model = whole_model(cell, type, draw);
  model->set_choice_of_experts(choose);
  return tensor::one_process(*model, cell.places(), cell.accumulation, cell.mean);
}

struct Found {
  Gradient gradient;
  std::vector<StepReport> reports;
};

inline Found train(const Cell& cell, at::ScalarType type, const DecoderLM::ChooseExperts& choose = {}) {
  Found found;
  found.reports.resize(static_cast<std::size_t>(cell.ranks * cell.tp));
  run_ranks(cell.ranks * cell.tp, [&](World& world) {
    const Mesh mesh(world, cell.grid());
    const auto model = whole_model(cell, type);
    const Layout along_tp = cut_decoder(*model, mesh, {.sequence_parallel = cell.sequence_parallel});
    const Layout placed = deal_experts(*model, mesh, along_tp.placements(), {.overlap = cell.overlap});
    cell.change_hooks(model->hooks().experts);
    if (choose) model->set_choice_of_experts(choose);
    if (cell.ring > 1) model->set_attention(ContextAttention(mesh));
    TrainableParameters parameters = trainable_parameters(model->named());
    parameters.placements = placed.placements();
    cell.change_placements(parameters);
    std::optional<ModelUnits> units;
    std::unique_ptr<DataParallel> layout;
    if (cell.strategy.starts_with("zero3")) {
      units = model_units(*model, RunConfig{});
      layout = fully_shard(units->root, model->named(), units->blocks, mesh,
                           {.checkpoint = cell.checkpointed,
                            .reduce_once = cell.strategy == "zero3 once",
                            .placements = parameters.placements,
                            .share_parameters = cell.strategy == "zero3 shared"});
    } else {
      layout = testing::strategy_named(cell.strategy).make(parameters, mesh, {.bucket_bytes = 3000});
    }
    const auto mean = tensor::normalizer_of(cell.mean);
    const auto optimizer = sgd({.learning_rate = 0});
    const ForwardLossTerms forward = [&](const Batch& batch) -> LossTerms {
      const at::Tensor hidden = model->hidden(batch);
      at::Tensor sum = cross_entropy_sum(model->logits_of(hidden), batch.targets,
                                         {.weights = batch.weights, .shard = model->vocabulary()});
      // Every rank makes the backward of every round, with targets or without.
      if (!sum.requires_grad()) sum = sum + hidden.narrow(0, 0, 0).sum();
      return {{"cross_entropy", sum}};
    };
    Step step(units ? inside(units->root, forward) : forward, *layout, *mean, *optimizer,
              {.even_micro_batches = cell.ring > 1});
    MicroBatches batches = tensor::step_of(mesh.place(kSampleAxes), mesh.size(kSampleAxes),
                                           cell.config().vocabulary, cell.accumulation);
    if (cell.ring > 1) batches = cut_micro_batches(batches, {.ring = cell.ring}, mesh.place(kContextAxes));
    const StepReport report = step(batches);
    found.reports[static_cast<std::size_t>(world.rank)] = report;
    const auto gradients = tensor::whole_gradients(*layout, placed);
    if (world.rank == 0) found.gradient.of = gradients;
    if (world.rank == 0) found.gradient.loss = report.loss;
  });
  return found;
}

}  // namespace isograd::experts
