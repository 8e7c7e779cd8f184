// A low-rank adapter on ranks along tp, dp and ep, against one process in fp64.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "decoder_step.hpp"
#include "isograd/expert_parallel.hpp"

#include "isograd/lora.hpp"
#include "isograd/loss.hpp"
#include "isograd/tensor_parallel.hpp"
#include "isograd/world.hpp"
#include "model/decoder_testing.hpp"
#include "model/parameters.hpp"

namespace isograd::adapters {
namespace {

struct Adapted {
  DecoderLM model;
  LoraAdapter adapter;

  explicit Adapted(const DecoderConfig& config)
      : model(config, at::kDouble, 1), adapter(config, {.rank = 3, .alpha = 5}, at::kDouble, 2) {
    perturb(model, 3);
    for (const auto& [name, tensor] : model.named()) tensor.requires_grad_(false);
    for (auto [name, tensor] : adapter.named())
      if (name.ends_with("lora_B.weight")) fill_normal(tensor, 0.2, 4, name);
    model.include(adapter.named());
    model.set_adapter(&adapter);
  }
  // This rank's contribution to the gradients of the adapter's parameters.
  std::vector<at::Tensor> gradients(const Batch& batch) {
    std::vector<at::Tensor> parameters;
    for (const auto& [name, tensor] : adapter.named()) parameters.push_back(tensor);
    const at::Tensor loss =
        cross_entropy_sum(model.logits(batch), batch.targets, {.shard = model.vocabulary()});
    return torch::autograd::grad({loss}, parameters);
  }
};

Batch batch_of(const DecoderConfig& config) {
  Batch batch = make_batch({7, 12, 5}, config.vocabulary, 5);
  batch.targets = batch.tokens.roll(-1);
  return batch;
}

// The largest relative error of a parameter. `unsummed`: parameters of such names are not summed along tp.
double error_on(int ranks, const DecoderConfig& config, const TensorParallelOptions& options,
                const std::string& unsummed = "") {
  Adapted whole(config);
  const auto expected = whole.gradients(batch_of(config));
  std::vector<double> errors(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](World& world) {
    Adapted own(config);
    const Mesh mesh(world, with_key_head_view(Grid({{"tp", ranks}}), config));
    const Layout layout = cut_decoder(own.model, mesh, options);
    const auto parts = own.gradients(batch_of(config));
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::string& name = own.adapter.named()[i].first;
      const AxisSet& summed = layout.parameter(name).placement.summed;
      if ((unsummed.empty() || name.find(unsummed) == std::string::npos) && !summed.empty())
        mesh.along(summed).all_reduce(parts[i]);
      const at::Tensor found = layout.whole(name, parts[i]);
      double& error = errors[static_cast<std::size_t>(world.rank)];
      error = std::max(error, ((found - expected[i]).norm() / expected[i].norm()).item<double>());
    }
  });
  return *std::ranges::max_element(errors);
}

TEST(Adapters, GradientsAlongTpAreThoseOfOneProcess) {
  DecoderConfig config = small_config("qwen2");  // with biases
  for (const auto& [ranks, heads, keys] : {std::tuple{2, 4, 2}, {4, 4, 2}, {3, 6, 2}}) {
    config.heads = heads, config.key_value_heads = keys;
    for (const bool tied : {false, true})
      for (const TensorParallelOptions& options :
           {TensorParallelOptions{}, {.sequence_parallel = false}, {.overlap = TensorOverlap::kTokens}}) {
        config.tied_output = tied;
        EXPECT_LT(error_on(ranks, config, options), 1e-12) << ranks << " ranks, tied " << tied;
      }
  }
}

TEST(Adapters, PlantedSumsThatAreLeftOut) {
  const DecoderConfig config = small_config("qwen3");
  for (const char* name :
       {"q_proj.lora_A", "up_proj.lora_A", "lm_head.lora_A", "o_proj.lora_B", "down_proj.lora_B"})
    EXPECT_GT(error_on(2, config, {}, name), 1e-2) << name;
}

enum class Fault { kNone, kSummedOverAll, kDivided };

// Whole steps with a mean over the targets of all ranks, on uneven micro-batches, the last rank with fewer.
struct WithExperts {
  DecoderConfig config;
  int copies = 1, ep = 2, tp = 1;
  ExpertOverlap overlap = ExpertOverlap::kNone;
  bool idle = false;  // the first and the last expert get no token
  Fault fault = Fault::kNone;

  std::unique_ptr<Adapted> model() const {
    auto made = std::make_unique<Adapted>(config);
    if (idle)
      made->model.set_choice_of_experts([last = config.experts.count - 1](const Batch& batch, std::int64_t,
                                                                          const ExpertScores&,
                                                                          const at::Tensor&) {
        // Two different ones of 1 to last - 1.
        const at::Tensor first = batch.positions.remainder(last - 1);
        return at::stack({first, (first + 1).remainder(last - 1)}, 1) + 1;
      });
    return made;
  }
  Grid grid() const {
    const Grid plain(
        {{"dp_replicate", 1}, {"dp_shard", copies * ep}, {"cp_ring", 1}, {"cp_ulysses", 1}, {"tp", tp}});
    return plain.viewed(data_axes(plain), {{"edp", copies}, {kExpertAxis, ep}});
  }
};

bool is_of_expert(const std::string& name) { return name.find(".experts.") != std::string::npos; }

double error_of(const WithExperts& how) {
  const auto whole = how.model();
  const tensor::Gradient expected = tensor::one_process(whole->model, how.copies * how.ep, 3, Mean::kTargets);
  std::vector<double> errors(static_cast<std::size_t>(how.copies * how.ep * how.tp));
  run_ranks(static_cast<int>(errors.size()), [&](World& world) {
    const Mesh mesh(world, how.grid());
    const auto own = how.model();
    Layout placed = cut_decoder(own->model, mesh, {});
    placed = shard_experts(own->model, mesh, placed.placements(), {.overlap = how.overlap});
    TrainableParameters parameters = trainable_parameters(own->model.named());
    parameters.placements = placed.placements();
    const auto layout = bucketed(parameters, mesh, {.bucket_bytes = 3000});
    TokenMean mean;
    const auto optimizer = sgd({.learning_rate = 0});
    const ForwardLossTerms forward = [&](const Batch& batch) -> LossTerms {
      const at::Tensor logits = own->model.logits(batch);
      at::Tensor sum = cross_entropy_sum(logits, batch.targets, {.shard = own->model.vocabulary()});
      if (!sum.requires_grad()) sum = sum + logits.narrow(0, 0, 0).sum();  // every rank makes every backward
      return {{"cross_entropy", sum}};
    };
    Step step(forward, *layout, mean, *optimizer, {});
    step(tensor::step_of(mesh.place(kSampleAxes), mesh.size(kSampleAxes), how.config.vocabulary));
    tensor::Gradient found;
    for (const auto& view : layout->views()) {
      at::Tensor gradient = view.gradient.clone();
      if (how.fault == Fault::kDivided && is_of_expert(view.name)) gradient.div_(how.ep);
      if (how.fault == Fault::kSummedOverAll && is_of_expert(view.name))
        mesh.all().all_reduce(gradient, ReduceOp::kSum);
      found.of[view.name] = placed.whole(view.name, gradient);
    }
    errors[static_cast<std::size_t>(world.rank)] = tensor::largest_error(found, expected);
  });
  return *std::ranges::max_element(errors);
}

TEST(Adapters, GradientsOfExpertsOverRanksAreThoseOfOneProcess) {
  const DecoderConfig routed = tensor::shape_with_experts(5), shared = tensor::shape_with_experts(4, 10);
  for (const WithExperts& how :
       {WithExperts{.config = routed}, WithExperts{.config = routed, .idle = true},
        WithExperts{.config = shared, .overlap = ExpertOverlap::kHalves},
        WithExperts{.config = shared, .copies = 2, .idle = true}, WithExperts{.config = shared, .tp = 2},
        WithExperts{.config = routed, .ep = 3, .overlap = ExpertOverlap::kShared}})
    EXPECT_LT(error_of(how), 1e-12) << how.config.family << ", " << how.copies << " copies, ep " << how.ep
                                    << ", tp " << how.tp << ", idle experts " << how.idle;
}

TEST(Adapters, PlantedSumsOfExpertsAreSeen) {
  const DecoderConfig config = tensor::shape_with_experts(4);
  EXPECT_GT(error_of({.config = config, .fault = Fault::kSummedOverAll}), 1e-2);
  EXPECT_GT(error_of({.config = config, .fault = Fault::kDivided}), 1e-2);
}

}  // namespace
}  // namespace isograd::adapters
