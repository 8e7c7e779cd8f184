// verify for models that are not ours.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <mutex>
#include <set>

#include "base/refuse.hpp"
#include "train/build.hpp"
#include "verify/run.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kBucketBytes = 1 << 20;  // several buckets in models of a test's size

// A model that has no use for positions may leave them out; experiments cut batches up, positions and all.
MicroBatches with_positions(const MicroBatches& batches) {
  MicroBatches filled = batches;
  for (Batch& batch : filled) {
    if (batch.positions.defined() && batch.positions.numel() == batch.num_tokens()) continue;
    std::vector<at::Tensor> positions{at::empty({0}, at::kLong)};
    for (std::size_t f = 1; f < batch.cu_seqlens.size(); ++f)
      positions.push_back(at::arange(batch.cu_seqlens[f] - batch.cu_seqlens[f - 1], at::kLong));
    batch.positions = at::cat(positions);
  }
  return filled;
}

// Models made one at a time (ranks as threads share the global generator), with rank 0's values everywhere.
MakeVerifyModel with_values_of_rank_zero(const MakeVerifyModel& make_model, Group& group) {
  static std::mutex one_at_a_time;
  const auto make = [make_model](at::ScalarType dtype) {
    const std::lock_guard lock(one_at_a_time);
    return make_model(dtype);
  };
  const auto values = std::make_shared<std::vector<at::Tensor>>();
  return [make, values, &group](at::ScalarType dtype) {
    VerifyModel model = make(dtype);
    // A tied weight by its first name alone: modules list it under each, as trainable_parameters() expects.
    std::set<const at::TensorImpl*> seen;
    std::erase_if(model.named,
                  [&](const auto& item) { return !seen.insert(item.second.unsafeGetTensorImpl()).second; });
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> own;  // parameters, then buffers: what is drawn in the making may be either
    for (const auto& [name, tensor] : model.named) own.push_back(tensor);
    for (const auto& [name, tensor] : model.buffers)
      if (tensor.defined()) own.push_back(tensor);
    if (values->empty()) {  // the first one: every rank makes it
      for (const at::Tensor& tensor : own) {
        values->push_back(tensor.detach().clone(at::MemoryFormat::Contiguous));
        group.broadcast(values->back(), 0);
      }
    }
    for (std::size_t i = 0; i < values->size() && i < own.size(); ++i) own[i].copy_((*values)[i]);
    return model;
  };
}

}  // namespace

VerifyModel verify_model(std::vector<std::pair<std::string, at::Tensor>> named,
                         std::function<at::Tensor(const Batch&)> logits, std::optional<ModelUnits> units) {
  VerifyModel model;
  if (!units)
    units = ModelUnits{.root = UnitHandle([named] {
                         std::vector<at::Tensor> all;
                         for (const auto& [name, tensor] : named) all.push_back(tensor);
                         return all;
                       }),
                       .blocks = {}};
  model.units = std::move(units);
  model.named = std::move(named);
  model.loss_terms = inside(model.units->root, [logits](const Batch& batch) -> LossTerms {
    return {{"cross_entropy", cross_entropy_sum(logits(batch), batch.targets, {.weights = batch.weights})}};
  });
  model.logits = std::move(logits);
  return model;
}

VerifyModel verify_model(PipelineModel list, const PipelineOptions& options) {
  list.make_all();
  const auto logits = [list](const Batch& batch) { return list.outputs(batch).output; };
  VerifyModel model = verify_model(list.named(), logits);
  for (const auto& item : list.modules().named_buffers())
    model.buffers.emplace_back(item.key(), item.value());
  model.loss_terms = inside(
      model.units->root,
      list.forward_loss({"cross_entropy"}, [](const at::Tensor& output, const Batch& batch) -> LossTerms {
        return {{"cross_entropy", cross_entropy_sum(output, batch.targets, {.weights = batch.weights})}};
      }));
  model.cut = [list, options](const Mesh& mesh) mutable { return list.split(mesh, options); };
  model.through = [list](StepOptions step) { return isograd::through(list.pipeline(), std::move(step)); };
  return model;
}

LayoutUnderTest verify_layout(const std::string& strategy) {
  const LayoutChoice choice = parse_layout(strategy);
  if (choice.replicas || choice.share_parameters)
    refuse("verify_layout", strategy, "the name of a strategy alone",
           "Make such a layout yourself and give it as a LayoutUnderTest");
  const std::string& name = choice.strategy;
  return {.name = name, .make = nullptr, .make_from_model = [name](const VerifyModel& model, Group group) {
            const Mesh mesh = model.placed ? model.placed->mesh() : Mesh(group);
            return make_strategy(name, model.named, model.units ? &*model.units : nullptr, mesh,
                                 {.bucket_bytes = kBucketBytes, .first_bucket_bytes = 0}, {},
                                 model.placed ? model.placed->placements() : Layout::Named{});
          }};
}

std::vector<LayoutUnderTest> verify_layouts(const std::vector<std::string>& strategies) {
  std::vector<LayoutUnderTest> layouts;
  for (const auto& strategy : strategies) layouts.push_back(verify_layout(strategy));
  return layouts;
}

Verdict verify(const MakeVerifyModel& make_model, const MicroBatches& batches,
               const std::vector<LayoutUnderTest>& layouts, const VerifyOptions& options, World& world) {
  const MicroBatches whole = with_positions(batches);
  VerifyProblem problem;
  problem.make_model = with_values_of_rank_zero(make_model, world.group);
  const Mesh mesh = options.axes.empty() ? Mesh(world.group) : Mesh(world, Grid(options.axes, world.size));
  const auto data_ranks = static_cast<std::size_t>(mesh.size(mesh.data()));
  for (auto i = static_cast<std::size_t>(mesh.place(mesh.data())); i < whole.size(); i += data_ranks)
    problem.local.push_back(whole[i]);
  if (!options.axes.empty()) problem.mesh = mesh;
  problem.whole = [&whole] { return whole; };
  problem.dtype = options.dtype;
  problem.step = options.step;
  problem.layouts = layouts;
  problem.loss = options.loss;
  problem.make_normalizer = options.make_normalizer;
  problem.updates = options.updates;
  problem.optimizer = options.optimizer;
  problem.subgroup = [&world](const std::vector<int>& ranks) {
    return world.subgroup(ranks, "verify on fewer ranks");
  };
  return verify(problem, world.group);
}

Verdict verify(const MakeVerifyModel& make_model, const MicroBatches& batches,
               const std::vector<LayoutUnderTest>& layouts, const VerifyOptions& options) {
  Verdict verdict;
  const int ranks = options.axes.empty() ? options.ranks : Grid(options.axes).ranks();
  run_ranks(ranks, [&](World& world) {
    Verdict own = verify(make_model, batches, layouts, options, world);
    if (world.rank == 0) verdict = std::move(own);
  });
  return verdict;
}

}  // namespace isograd
