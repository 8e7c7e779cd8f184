// A trained model on several ranks, composed from the same pieces as a run of `isograd train`
// (PreparedRun).

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/grad_mode.h>

#include "base/refuse.hpp"
#include "isograd/context_parallel.hpp"
#include "serve/models/trained_model.hpp"
#include "train/rank_zero.hpp"

namespace isograd::serve {
namespace {

RunConfig checked(RunConfig config, World& world) {
  if (config.parallel.stages_per_rank > 1)
    refuse("parallel.stages_per_rank", std::to_string(config.parallel.stages_per_rank),
           "1: calls without gradients go through one stage of each rank", "Leave it out");
  config.batch.packs_per_step = world.size;  // check() asks for work for every rank
  check(config, world.size);
  return config;
}

}  // namespace

Ranks::Ranks(World& of, RunConfig run)
    : world(of), config(checked(std::move(run), of)), mesh(of, grid_of(config, of.size)) {}

void TrainedModel::make_on_ranks(const FillValues& fill) {
  model_ = DecoderLM::without_values(base_->shape(), dtype_);
  const RunConfig& config = ranks_->config;
  const Mesh& mesh = ranks_->mesh;
  if (adapter_) {
    for (const auto& [name, tensor] : model_->named()) at::Tensor(tensor).requires_grad_(false);
    model_->include(adapter_->named());
    model_->set_adapter(adapter_.get());
  }
  if (model_parallel(config)) {
    ComposedDecoder made = compose_decoder(*model_, config, mesh);
    pipeline_ = made.pipeline;
    placed_.emplace(std::move(made.layout));
  }
  Group everyone = mesh.all();
  if (stage_of(config.parallel.strategy) < 3)
    on_every_rank(everyone, [&] { give_values(model_->named(), fill, placed(), at::kCPU); });
  units_ = model_units(*model_, config);
  units_->initialize = fill;
  layout_ = make_layout(config, model_->named(), *units_, mesh, placed());
  for (Bucket& bucket : layout_->buckets()) {
    for (Slot& slot : bucket.plan.slots) slot.decays = true;  // as torch.optim.AdamW
    sums_.push_back(at::zeros_like(bucket.gradients));
  }
  attend_over(*model_, mesh);
  forward_ = inside(units_->root, [this](const Batch& batch) { return terms(batch); });
}

// The datums of this rank's place among those with different samples, cut over the context ranks.
MicroBatches TrainedModel::own_part(const ForwardBackward& request, const CheckedCall& call) const {
  const Mesh& mesh = ranks_->mesh;
  const std::vector<std::size_t> begins = split_datums(request, mesh.size(kSampleAxes));
  const auto place = static_cast<std::size_t>(mesh.place(kSampleAxes));
  MicroBatches own = pack(request, call, micro_batch_tokens_, begins[place], begins[place + 1]);
  if (mesh.size(kContextAxes) == 1) return own;
  const auto& parallel = ranks_->config.parallel;
  const CutOptions options{.ring = static_cast<int>(parallel.cp_ring),
                           .ulysses = static_cast<int>(parallel.cp_ulysses),
                           .token_cost = 6 * model_->config().hidden};
  return cut_micro_batches(own, options, mesh.place(kContextAxes));
}

LossTerms TrainedModel::terms(const Batch& batch) {
  const DecoderOutputs outputs = model_->outputs(batch);
  if (outputs.passed_on.defined()) return {{.name = "loss", .sum = outputs.passed_on}};  // not the last stage
  const RowLossResult result = losses_of(*model_, outputs.hidden, *request_, *call_, batch);
  loss_ += result.value.item<double>();
  for (std::size_t f = 0; f < batch.sample_ids.size(); ++f) {
    const std::int64_t begin = batch.cu_seqlens[f], length = batch.cu_seqlens[f + 1] - begin;
    if (batch.sample_ids[f] == kPaddingSample || length == 0) continue;
    found_.push_back({.datum = batch.sample_ids[f],
                      .begin = batch.positions[begin].item<std::int64_t>(),
                      .log_probabilities = result.log_probabilities.narrow(0, begin, length)});
  }
  return {{.name = "loss", .sum = result.sum}};
}

ForwardBackwardResult TrainedModel::compute_on_ranks(const ForwardBackward& request,
                                                     const CheckedCall& call) {
  const Mesh& mesh = ranks_->mesh;
  Group everyone = mesh.all();
  request_ = &request, call_ = &call, loss_ = 0, found_.clear();
  MicroBatches own = own_part(request, call);
  if (request.forward_only) {
    // Layouts that gather parameters, and experts on several ranks, compute equally many everywhere.
    at::Tensor most = at::full({1}, static_cast<std::int64_t>(own.size()), at::kLong);
    everyone.all_reduce(most, ReduceOp::kMax);
    own.resize(static_cast<std::size_t>(most.item<std::int64_t>()), empty_batch());
    const at::NoGradGuard no_grad;
    for (const Batch& batch : own) forward_(batch);
  } else {
    StepOptions options{.max_norm = 0};
    if (pipeline_) options = through(*pipeline_, std::move(options));
    // A sum alone: what divides it is counted from the requests, which every rank has.
    Deferred sum(std::make_unique<NoDenominator>());
    Step(forward_, *layout_, sum, *optimizer_, std::move(options)).accumulate(own);
    layout_->finish_reduction();
    const std::vector<Bucket>& buckets = layout_->buckets();
    for (std::size_t i = 0; i < buckets.size(); ++i) sums_[i] += buckets[i].gradients;
  }

  // Each row is one rank's, and 0 on the others: their sum is exact.
  std::vector<std::int64_t> begins = {0};
  for (const Datum& datum : request.data)
    begins.push_back(begins.back() +
                     static_cast<std::int64_t>(datum.inputs.at("target_tokens").integers.size()));
  at::Tensor flat = at::zeros({begins.back() + 1}, at::kDouble);
  if (mesh.contributes()) {  // else another rank has the same rows
    for (const Found& found : found_) {
      const auto datum = static_cast<std::size_t>(found.datum);
      const at::Tensor rows = found.log_probabilities.to(at::kDouble).reshape({-1});
      const std::int64_t columns =
          (begins[datum + 1] - begins[datum]) / static_cast<std::int64_t>(request.data[datum].tokens.size());
      flat.narrow(0, begins[datum] + found.begin * columns, rows.numel()).copy_(rows);
    }
    flat[begins.back()] = loss_;
  }
  everyone.all_reduce(flat);
  found_.clear(), request_ = nullptr, call_ = nullptr;
  ForwardBackwardResult result{.metrics = {{"loss:sum", flat[begins.back()].item<double>()}}};
  for (std::size_t i = 0; i < request.data.size(); ++i)
    result.log_probabilities.push_back(array_of(flat.narrow(0, begins[i], begins[i + 1] - begins[i])
                                                    .view(request.data[i].inputs.at("target_tokens").shape)));
  return result;
}

}  // namespace isograd::serve
