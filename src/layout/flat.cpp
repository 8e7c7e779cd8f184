#include "layout/flat.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "layout/storage.hpp"

namespace isograd {

at::ScalarType gradient_type(at::ScalarType parameters, bool fp32_gradients) {
  return parameters == at::kBFloat16 && fp32_gradients ? at::kFloat : parameters;
}

void check_can_be_shared(const BucketPlan& plan) {
  if (plan.device.is_cpu()) return;
  refuse("one copy of the parameters", "parameters on " + plan.device.str(),
         "parameters in host memory, which the ranks of a host can share", "Set share_parameters to off");
}

void pad_for(BucketPlan& plan, int parts) {
  const std::int64_t unit = parts * kShardAlignment;
  plan.numel = (plan.numel + unit - 1) / unit * unit;
}

void write_parameters(const BucketPlan& plan, const std::vector<NamedParameter>& parameters,
                      const at::Tensor& flat) {
  at::NoGradGuard no_grad;
  for (const Slot& slot : plan.slots) slot_view(flat, slot).copy_(parameters.at(slot.index).tensor);
}

void move_parameters(const BucketPlan& plan, const std::vector<NamedParameter>& parameters,
                     const at::Tensor& flat) {
  at::NoGradGuard no_grad;
  for (const Slot& slot : plan.slots) {
    at::Tensor parameter = parameters.at(slot.index).tensor;
    if (parameter.is_alias_of(flat)) continue;  // made there
    const at::Tensor view = slot_view(flat, slot);
    if (slot.numel > 0 && fills_its_storage(parameter))
      give_memory(*parameter.storage().unsafeGetStorageImpl(), view);
    else
      parameter.set_data(view);
  }
}

Bucket make_bucket(BucketPlan plan, const at::Tensor& parameters, at::Tensor gradients, Range owned,
                   Range held) {
  ISOGRAD_INVARIANT(
      gradients.dim() == 1 && gradients.size(0) == held.size() && gradients.is_contiguous() &&
          (gradients.scalar_type() == gradient_type(plan.dtype) || gradients.scalar_type() == plan.dtype) &&
          parameters.numel() == plan.numel,
      fmt::format("gradients {} of {} for {} of {} elements of {}", c10::str(gradients.sizes()),
                  c10::toString(gradients.scalar_type()), held.size(), plan.numel,
                  c10::toString(plan.dtype)));
  ISOGRAD_INVARIANT(owned.begin >= held.begin && owned.end <= held.end && held.end <= plan.numel,
                    fmt::format("owned {} to {}, held {} to {}, of {}", owned.begin, owned.end, held.begin,
                                held.end, plan.numel));
  at::NoGradGuard no_grad;
  Bucket bucket;
  bucket.parameters = held.size() == plan.numel ? parameters : parameters.narrow(0, held.begin, held.size());
  bucket.master = plan.dtype == at::kBFloat16 ? bucket.parameters.to(at::kFloat) : bucket.parameters;
  bucket.gradients = std::move(gradients);
  bucket.owned = owned;
  bucket.held = held;
  bucket.plan = std::move(plan);
  return bucket;
}

Bucket make_bucket(BucketPlan plan, const std::vector<NamedParameter>& parameters, at::Tensor gradients,
                   int rank, int size) {
  const at::Tensor flat = at::zeros({plan.numel}, gradients.options().dtype(plan.dtype));
  write_parameters(plan, parameters, flat);
  move_parameters(plan, parameters, flat);
  const Range owned = owned_slice(plan.numel, rank, size), all{0, plan.numel};
  return make_bucket(std::move(plan), flat, std::move(gradients), owned, all);
}

at::Tensor slot_view(const at::Tensor& flat, const Slot& slot) {
  return flat.narrow(0, slot.offset, slot.numel).view(slot.shape);
}

bool is_slot_view(const at::Tensor& tensor, const at::Tensor& flat, const Slot& slot) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.scalar_type() != flat.scalar_type() ||
      tensor.sizes() != slot.shape)
    return false;
  if (slot.numel == 0) return true;
  const auto* place = static_cast<const char*>(flat.const_data_ptr()) + slot.offset * flat.element_size();
  return tensor.const_data_ptr() == place && tensor.is_contiguous();
}

void write_slot(const at::Tensor& shard, Range held, const Slot& slot, const at::Tensor& values) {
  const std::int64_t begin = std::max(held.begin, slot.offset);
  const std::int64_t end = std::min(held.end, slot.offset + slot.numel);
  if (begin >= end) return;
  at::NoGradGuard no_grad;
  shard.narrow(0, begin - held.begin, end - begin)
      .copy_(values.reshape({-1}).narrow(0, begin - slot.offset, end - begin));
}

}  // namespace isograd
