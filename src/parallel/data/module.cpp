#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/modules/rnn.h>

#include <algorithm>

#include "base/refuse.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/group.hpp"
#include "parallel/data/same_parameters.hpp"

namespace isograd {
namespace {

// Calls `action` with the module as the one of these types that it is, if any.
template <typename... Types, typename Action>
void as_one_of(const torch::nn::Module& module, const Action& action) {
  const auto look = [&](const auto* found) {
    if (found) action(*found);
  };
  (look(dynamic_cast<const Types*>(&module)), ...);
}

struct Normalisation {
  bool batch = false, instance = false, tracks = false;  // running statistics

  bool depends_on_mode() const { return batch || (instance && tracks); }
};

Normalisation normalisation_of(const torch::nn::Module& module) {
  using namespace torch::nn;
  Normalisation result;
  as_one_of<BatchNorm1dImpl, BatchNorm2dImpl, BatchNorm3dImpl>(module, [&](const auto& found) {
    result = {.batch = true, .tracks = found.options.track_running_stats()};
  });
  as_one_of<InstanceNorm1dImpl, InstanceNorm2dImpl, InstanceNorm3dImpl>(module, [&](const auto& found) {
    result = {.instance = true, .tracks = found.options.track_running_stats()};
  });
  return result;
}

// Describes what the module draws from the default generator; empty: nothing.
std::string drawn_by(const torch::nn::Module& module) {
  using namespace torch::nn;
  double p = 0;  // the probability with which it drops something
  as_one_of<DropoutImpl, Dropout2dImpl, Dropout3dImpl, AlphaDropoutImpl, FeatureAlphaDropoutImpl>(
      module, [&](const auto& found) { p = found.options.p(); });
  as_one_of<MultiheadAttentionImpl>(module, [&](const auto& found) { p = found.options.dropout(); });
  as_one_of<RNNImpl, LSTMImpl, GRUImpl>(module, [&](const auto& found) {
    if (found.options.num_layers() > 1) p = found.options.dropout();
  });
  if (p > 0) return fmt::format("dropout of {}", p);
  std::string drawn;
  as_one_of<RReLUImpl>(module, [&](const auto& found) {
    if (found.options.lower() < found.options.upper()) drawn = "random slopes (RReLU)";
  });
  as_one_of<FractionalMaxPool2dImpl, FractionalMaxPool3dImpl>(module, [&](const auto& found) {
    if (!found.options._random_samples().defined()) drawn = "random regions (FractionalMaxPool)";
  });
  return drawn;
}

[[noreturn]] void refuse_module(const std::string& name, std::string found, std::string action) {
  refuse(fmt::format("module '{}'", name), std::move(found),
         "the same function of the batch on any number of ranks", std::move(action));
}

void check_statistics(const std::string& name, const torch::nn::Module& module) {
  const std::string use_sync =
      "Use isograd::SyncBatchNorm (with one micro-batch a step it is that of the whole batch), ";
  const bool trains = module.is_training();
  const Normalisation norm = normalisation_of(module);
  // Without statistics of its own an evaluation normalises over the rows at hand as well.
  if (!trains && norm.batch && !norm.tracks)
    refuse_module(
        name,
        "batch normalisation over the rows of one rank, in eval() too: it has track_running_stats(false)",
        use_sync + "or make it with running statistics and freeze them with eval()");
  if (trains && norm.batch)
    refuse_module(name, "batch normalisation over the rows of one rank",
                  use_sync + "or freeze its statistics with eval(), after every train() of the model");
  if (trains && norm.instance && norm.tracks)
    refuse_module(name, "instance normalisation that tracks running statistics of one rank's rows",
                  "Make it with track_running_stats(false), or freeze its statistics with eval(), after "
                  "every train() of the model");
}

void check_random(const std::string& name, const torch::nn::Module& module) {
  if (const std::string drawn = drawn_by(module); !drawn.empty())
    refuse_module(name, drawn + " from the default generator, with other numbers for every number of ranks",
                  "Draw from a generator keyed by step and sample (isograd/random.hpp), set p to 0, or "
                  "accept it: prepare_module(module, group, {.accept_dropout = true})");
}

template <typename Check>
void for_each_module(const torch::nn::Module& module, Check&& check) {
  check(module.name(), module);
  for (const auto& item : module.named_modules({}, /*include_self=*/false)) check(item.key(), *item.value());
}

void add_buffers(const torch::nn::Module& module, std::vector<NamedParameter>& all) {
  for (const auto& item : module.named_buffers())
    if (item.value().defined()) all.push_back({item.key(), item.value()});
}

// Parameters and buffers, frozen ones too.
std::vector<NamedParameter> everything_of(const torch::nn::Module& module) {
  std::vector<NamedParameter> all;
  for (const auto& item : module.named_parameters()) all.push_back({item.key(), item.value()});
  add_buffers(module, all);
  return all;
}

// Names and shapes agree already, so that all ranks name the same one.
void check_can_be_written(const std::vector<NamedParameter>& all, Group& group) {
  const auto overlaps = [](const NamedParameter& one) {
    return at::has_internal_overlap(one.tensor) == at::MemOverlap::Yes;
  };
  at::Tensor first = at::full({1}, std::find_if(all.begin(), all.end(), overlaps) - all.begin(), at::kLong);
  group.all_reduce(first, ReduceOp::kMin);
  const auto place = static_cast<std::size_t>(first.item<std::int64_t>());
  if (place < all.size())
    refuse(fmt::format("'{}'", all[place].name),
           "a parameter or buffer made with expand(), several elements in one place of memory",
           "memory for each element, into which rank 0's values can be copied",
           "Register it with contiguous() after expand()");
}

}  // namespace

TrainableParameters trainable_parameters(const ModuleRef& module) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const auto& item : module->named_parameters()) named.emplace_back(item.key(), item.value());
  TrainableParameters parameters = trainable_parameters(named);
  parameters.check = module_check(*module);
  return parameters;
}

std::function<void()> module_check(const ModuleRef& module) {
  std::vector<std::pair<std::string, std::shared_ptr<const torch::nn::Module>>> watched;
  for (const auto& item : module->named_modules({}, /*include_self=*/false))
    if (normalisation_of(*item.value()).depends_on_mode()) watched.emplace_back(item.key(), item.value());
  if (watched.empty()) return [] {};
  return [watched] {
    for (const auto& [name, child] : watched) check_statistics(name, *child);
  };
}

void prepare_module(const ModuleRef& module, Group group, InitialValues initial) {
  prepare_module(module, std::move(group), PrepareOptions{.initial = initial});
}

void prepare_module(const ModuleRef& module, Group group, const PrepareOptions& options) {
  for_each_module(*module, check_statistics);
  if (!options.accept_dropout) for_each_module(*module, check_random);
  const std::vector<NamedParameter> all = everything_of(*module);
  check_same_parameters(all, group, options.initial == InitialValues::kMustAgree);
  if (options.initial != InitialValues::kFromRankZero) return;
  if (group.size() > 1) check_can_be_written(all, group);
  at::NoGradGuard no_grad;
  for (const NamedParameter& one : all) group.broadcast(one.tensor.detach(), 0);
}

void check_buffers(const ModuleRef& module, Group group) {
  std::vector<NamedParameter> all;
  add_buffers(*module, all);
  check_same_parameters(all, group);
}

SyncBatchNorm::SyncBatchNorm(const SyncBatchNormOptions& options, Group group)
    : options_(options), group_(std::move(group)) {
  if (options.channels < 1 || !(options.epsilon >= 0) || !(options.momentum >= 0 && options.momentum <= 1))
    refuse("SyncBatchNorm",
           fmt::format("channels {}, epsilon {}, momentum {}", options.channels, options.epsilon,
                       options.momentum),
           "channels >= 1, epsilon >= 0, 0 <= momentum <= 1", "Change the one outside its range");
  weight = register_parameter("weight", at::ones({options.channels}));
  bias = register_parameter("bias", at::zeros({options.channels}));
  running_mean = register_buffer("running_mean", at::zeros({options.channels}));
  running_var = register_buffer("running_var", at::ones({options.channels}));
  num_batches_tracked = register_buffer("num_batches_tracked", at::zeros({}, at::kLong));
}

at::Tensor SyncBatchNorm::forward(const at::Tensor& input) {
  if (input.dim() < 2 || input.size(1) != options_.channels)
    refuse("SyncBatchNorm", fmt::format("an input of {}", c10::str(input.sizes())),
           fmt::format("[N, {}, ...]", options_.channels), "Check the layer before it");
  const at::ScalarType wide = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor x = input.to(wide);
  std::vector<std::int64_t> others = {0}, broadcastable(x.dim(), 1);  // all dims but the channels'
  for (std::int64_t dim = 2; dim < x.dim(); ++dim) others.push_back(dim);
  broadcastable[1] = options_.channels;
  const auto spread = [&](const at::Tensor& by_channel) { return by_channel.to(wide).view(broadcastable); };
  if (!is_training()) {
    const at::Tensor scale = spread(weight) * (spread(running_var) + options_.epsilon).rsqrt();
    return ((x - spread(running_mean)) * scale + spread(bias)).to(input.scalar_type());
  }

  // Two sums over all ranks, each differentiated through its dual: first the mean, then squares about it,
  // which lose nothing to cancellation.
  const std::int64_t rows = x.numel() / options_.channels;
  const at::Tensor count = at::full({1}, static_cast<double>(rows), x.options().dtype(at::kDouble));
  group_.all_reduce(count);
  const double n = count.item<double>();
  const at::Tensor mean = differentiable::all_reduce(group_, x.sum(others)) / std::max(n, 1.0);
  const at::Tensor centred = x - spread(mean);
  const at::Tensor variance =
      differentiable::all_reduce(group_, centred.square().sum(others)) / std::max(n, 1.0);
  if (n > 0 && !recomputing()) {  // these rows were counted by the forward that is computed again
    at::NoGradGuard no_grad;
    const double m = options_.momentum;
    running_mean.mul_(1 - m).add_(mean.to(running_mean.scalar_type()), m);
    running_var.mul_(1 - m).add_(variance.to(running_var.scalar_type()), m * n / std::max(n - 1, 1.0));
    num_batches_tracked.add_(1);
  }
  const at::Tensor scale = spread(weight) * (spread(variance) + options_.epsilon).rsqrt();
  return (centred * scale + spread(bias)).to(input.scalar_type());
}

}  // namespace isograd
