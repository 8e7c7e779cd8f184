#include "optim/by_libtorch.hpp"

#include <ATen/ATen.h>

#include "kernels/gpu/kernels.hpp"

namespace isograd::by_libtorch {
namespace {

at::Tensor part(const at::Tensor& flat, Range range) { return flat.narrow(0, range.begin, range.size()); }

std::vector<at::Tensor> parts(const at::Tensor& flat, const std::vector<Range>& ranges) {
  std::vector<at::Tensor> result;
  for (const Range& range : ranges) result.push_back(part(flat, range));
  return result;
}

std::vector<Range> from_begin_of(Range range, std::vector<Range> parts) {
  for (Range& each : parts) each = {each.begin - range.begin, each.end - range.begin};
  return parts;
}

// Perhaps the bucket's own memory: to be read alone.
at::Tensor gradient_of(const Bucket& bucket, Range range, double scale) {
  const at::Tensor gradient = part(bucket.gradients, range).to(bucket.master.scalar_type());
  return scale == 1 ? gradient : gradient.mul(scale);
}

void write_back(Bucket& bucket, Range range) {
  if (!bucket.master.is_same(bucket.parameters) && bucket.plan.dtype == at::kBFloat16)
    part(bucket.parameters, range).copy_(part(bucket.master, range));
}

// LibTorch's fused pass takes a count of updates and corrects by it. Ours is in the scalars: at this count
// its own corrections are 1 for every β below 1.
constexpr double kManyUpdates = 1e30;

// The parts of `range` between `parts`, which are in order.
std::vector<Range> between(Range range, const std::vector<Range>& parts) {
  std::vector<Range> result;
  std::int64_t at = range.begin;
  for (const Range& each : parts) {
    if (each.begin > at) result.push_back({at, each.begin});
    at = each.end;
  }
  if (range.end > at) result.push_back({at, range.end});
  return result;
}

// One kernel for the whole bucket, in the order of operations of kernels::adamw.
bool update_by_kernel(const kernels::AdamW& scalars, Bucket& bucket, at::Tensor& first, at::Tensor& second,
                      const LongRun& run, const OnDevice& on_device) {
  const bool rounds = !bucket.master.is_same(bucket.parameters) && bucket.plan.dtype == at::kBFloat16;
  if (bucket.master.scalar_type() != at::kFloat || !gpu::has_kernels(bucket.master) ||
      !gpu::has_kernels(bucket.gradients) || (rounds && !gpu::has_kernels(bucket.parameters)))
    return false;
  std::vector<gpu::RunEnd> ends;
  std::int64_t at = run.range.begin;
  for (const Range& decaying : run.decaying) {
    if (decaying.begin > at) ends.push_back({decaying.begin, false});
    ends.push_back({at = decaying.end, true});
  }
  if (run.range.end > at) ends.push_back({run.range.end, false});
  gpu::adamw({.scale = static_cast<float>(scalars.gradient_scale),
              .keep = static_cast<float>(scalars.keep),
              .beta2 = static_cast<float>(scalars.beta2),
              .new1 = static_cast<float>(1 - scalars.beta1),
              .new2 = static_cast<float>(1 - scalars.beta2),
              .step = static_cast<float>(scalars.step_size),
              .correction = static_cast<float>(scalars.inverse_root_correction),
              .epsilon = static_cast<float>(scalars.epsilon)},
             run.range.begin, ends, bucket.gradients, bucket.master, first, second,
             rounds ? bucket.parameters : at::Tensor(), on_device.scale, on_device.stop);
  return true;
}

}  // namespace

void adamw(const kernels::AdamW& scalars, Bucket& bucket, at::Tensor& first, at::Tensor& second,
           const LongRun& run, const OnDevice& on_device) {
  const at::NoGradGuard no_grad;
  if (update_by_kernel(scalars, bucket, first, second, run, on_device)) return;
  at::Tensor g = gradient_of(bucket, run.range, scalars.gradient_scale);
  std::optional<at::Tensor> stop;
  if (on_device.stop.defined()) g = g.mul(on_device.scale), stop = on_device.stop;
  // s m / (r √v + ε) = (s / r) m / (√v + ε / r)
  const double rate = scalars.step_size / scalars.inverse_root_correction,
               epsilon = scalars.epsilon / scalars.inverse_root_correction;
  const at::Tensor updates = at::full({}, kManyUpdates, g.options().dtype(at::kFloat));
  const auto update = [&](const std::vector<Range>& ranges, double weight_decay) {
    if (ranges.empty()) return;
    at::_fused_adamw_(parts(bucket.master, ranges), parts(g, from_begin_of(run.range, ranges)),
                      parts(first, ranges), parts(second, ranges), {},
                      std::vector<at::Tensor>(ranges.size(), updates), rate, scalars.beta1, scalars.beta2,
                      weight_decay, epsilon, /*amsgrad=*/false,
                      /*maximize=*/false, /*grad_scale=*/std::nullopt, stop);
  };
  update(run.decaying, rate > 0 ? (1 - scalars.keep) / rate : 0);
  update(between(run.range, run.decaying), 0);
  write_back(bucket, run.range);
}

void sgd(const kernels::Sgd& scalars, Bucket& bucket, at::Tensor* velocity, const LongRun& run) {
  const at::NoGradGuard no_grad;
  const Range range = run.range;
  at::Tensor g = gradient_of(bucket, range, scalars.gradient_scale);
  const at::Tensor p = part(bucket.master, range);
  if (scalars.weight_decay != 0 && !run.decaying.empty()) {
    g = g.is_alias_of(bucket.gradients) ? g.clone() : g;
    at::_foreach_add_(parts(g, from_begin_of(range, run.decaying)), parts(bucket.master, run.decaying),
                      scalars.weight_decay);
  }
  if (velocity) {
    const at::Tensor b = part(*velocity, range);
    g = b.mul_(scalars.momentum).add_(g);
  }
  p.sub_(g, scalars.learning_rate);
  write_back(bucket, range);
}

}  // namespace isograd::by_libtorch
