#include "layout/flat.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "isograd/error.hpp"

namespace isograd {

at::ScalarType gradient_type(at::ScalarType parameters) {
  return parameters == at::kDouble ? at::kDouble : at::kFloat;
}

Bucket make_bucket(BucketPlan plan, const std::vector<NamedParameter>& parameters, at::Tensor gradients,
                   int rank, int size) {
  ISOGRAD_INVARIANT(
      gradients.dim() == 1 && gradients.size(0) == plan.numel && gradients.is_contiguous() &&
          gradients.scalar_type() == gradient_type(plan.dtype),
      fmt::format("gradients {} of {} for {} elements of {}", c10::str(gradients.sizes()),
                  c10::toString(gradients.scalar_type()), plan.numel, c10::toString(plan.dtype)));
  at::NoGradGuard no_grad;
  Bucket bucket;
  bucket.parameters = at::zeros({plan.numel}, gradients.options().dtype(plan.dtype));
  for (const Slot& slot : plan.slots) {
    at::Tensor parameter = parameters.at(slot.index).tensor;
    at::Tensor view = slot_view(bucket.parameters, slot);
    view.copy_(parameter);
    parameter.set_data(view);
  }
  bucket.master = plan.dtype == at::kBFloat16 ? bucket.parameters.to(at::kFloat) : bucket.parameters;
  bucket.gradients = std::move(gradients);
  bucket.owned = owned_slice(plan.numel, rank, size);
  bucket.plan = std::move(plan);
  return bucket;
}

at::Tensor slot_view(const at::Tensor& flat, const Slot& slot) {
  return flat.narrow(0, slot.offset, slot.numel).view(slot.shape);
}

bool is_slot_view(const at::Tensor& tensor, const at::Tensor& flat, const Slot& slot) {
  if (!tensor.defined() || tensor.scalar_type() != flat.scalar_type() || tensor.sizes() != slot.shape)
    return false;
  if (slot.numel == 0) return true;
  const auto* place = static_cast<const char*>(flat.const_data_ptr()) + slot.offset * flat.element_size();
  return tensor.const_data_ptr() == place && tensor.is_contiguous();
}

}  // namespace isograd
