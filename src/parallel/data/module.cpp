#include "isograd/module.hpp"

#include <fmt/format.h>
#include <torch/nn/modules/batchnorm.h>

#include "isograd/error.hpp"
#include "parallel/data/same_parameters.hpp"

namespace isograd {
namespace {

bool is_batch_norm(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module) ||
         dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module) ||
         dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module);
}

void check_batch_norm(const std::string& name, const torch::nn::Module& module) {
  if (!is_batch_norm(module) || !module.is_training()) return;
  throw ConfigError({.where = fmt::format("module '{}'", name),
                     .found = "batch normalisation over the rows of one rank",
                     .expected = "the same function of the batch on any number of ranks",
                     .action = "Use isograd::SyncBatchNorm, or freeze its statistics with eval()"});
}

// Parameters and buffers, frozen ones too.
std::vector<NamedParameter> everything_of(const torch::nn::Module& module) {
  std::vector<NamedParameter> all;
  for (const auto& item : module.named_parameters()) all.push_back({item.key(), item.value()});
  for (const auto& item : module.named_buffers())
    if (item.value().defined()) all.push_back({item.key(), item.value()});
  return all;
}

}  // namespace

std::vector<NamedParameter> trainable_parameters(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const auto& item : module.named_parameters()) named.emplace_back(item.key(), item.value());
  return trainable_parameters(named);
}

void prepare_module(torch::nn::Module& module, Group group, InitialValues initial) {
  check_batch_norm(module.name(), module);
  for (const auto& item : module.named_modules({}, /*include_self=*/false))
    check_batch_norm(item.key(), *item.value());
  const std::vector<NamedParameter> all = everything_of(module);
  check_same_parameters(all, group, initial == InitialValues::kMustAgree);
  if (initial != InitialValues::kFromRankZero) return;
  at::NoGradGuard no_grad;
  for (const NamedParameter& one : all) group.broadcast(one.tensor.detach(), 0);
}

}  // namespace isograd
