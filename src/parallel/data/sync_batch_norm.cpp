#include <ATen/ATen.h>
#include <fmt/format.h>

#include "base/refuse.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/error.hpp"
#include "isograd/fully_shard.hpp"
#include "isograd/group.hpp"

namespace isograd {

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
