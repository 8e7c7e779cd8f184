#include "optim/by_libtorch.hpp"

#include <ATen/ATen.h>

namespace isograd::by_libtorch {
namespace {

at::Tensor part(const at::Tensor& flat, Range range) {
  return flat.narrow(0, range.begin, range.size());
}

std::vector<at::Tensor> parts(const at::Tensor& flat, const std::vector<Range>& ranges) {
  std::vector<at::Tensor> result;
  for (const Range& range : ranges) result.push_back(part(flat, range));
  return result;
}

at::Tensor gradient_of(const Bucket& bucket, Range range, double scale) {
  return part(bucket.gradients, range).to(bucket.master.scalar_type()).mul(scale);
}

void write_back(Bucket& bucket, Range range) {
  if (!bucket.master.is_same(bucket.parameters) && bucket.plan.dtype == at::kBFloat16)
    part(bucket.parameters, range).copy_(part(bucket.master, range));
}

}  // namespace

void adamw(const kernels::AdamW& scalars, Bucket& bucket, at::Tensor& first, at::Tensor& second,
           const LongRun& run) {
  const at::NoGradGuard no_grad;
  const Range range = run.range;
  const at::Tensor g = gradient_of(bucket, range, scalars.gradient_scale);
  const at::Tensor p = part(bucket.master, range), m = part(first, range), v = part(second, range);
  if (scalars.keep != 1 && !run.decaying.empty())
    at::_foreach_mul_(parts(bucket.master, run.decaying), scalars.keep);
  m.lerp_(g, 1 - scalars.beta1);
  v.mul_(scalars.beta2).addcmul_(g, g, 1 - scalars.beta2);
  p.addcdiv_(m, v.sqrt().mul_(scalars.inverse_root_correction).add_(scalars.epsilon), -scalars.step_size);
  write_back(bucket, range);
}

void sgd(const kernels::Sgd& scalars, Bucket& bucket, at::Tensor* velocity, const LongRun& run) {
  const at::NoGradGuard no_grad;
  const Range range = run.range;
  at::Tensor g = gradient_of(bucket, range, scalars.gradient_scale);
  const at::Tensor p = part(bucket.master, range);
  if (scalars.weight_decay != 0 && !run.decaying.empty()) {
    std::vector<Range> in_run;
    for (const Range& own : run.decaying) in_run.push_back({own.begin - range.begin, own.end - range.begin});
    at::_foreach_add_(parts(g, in_run), parts(bucket.master, run.decaying), scalars.weight_decay);
  }
  if (velocity) {
    const at::Tensor b = part(*velocity, range);
    g = b.mul_(scalars.momentum).add_(g);
  }
  p.sub_(g, scalars.learning_rate);
  write_back(bucket, range);
}

}  // namespace isograd::by_libtorch
