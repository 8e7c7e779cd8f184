#include "parallel/data/unit_storage.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "isograd/error.hpp"

namespace isograd {

UnitStorage::UnitStorage(std::int64_t numel, at::ScalarType dtype, at::Device device, std::string why_not)
    : numel_(numel), dtype_(dtype), device_(device), why_not_(std::move(why_not)) {
  storage_ = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes(),
                                                   c10::DataPtr(nullptr, device_),
                                                   /*allocator=*/nullptr, /*resizable=*/false);
  take_out();
}

std::int64_t UnitStorage::bytes() const {
  return numel_ * static_cast<std::int64_t>(c10::elementSize(dtype_));
}

at::Tensor UnitStorage::view(const Slot& slot) const {
  ISOGRAD_INVARIANT(slot.offset + slot.numel <= numel_,
                    fmt::format("slot '{}' ends at {} of {}", slot.name, slot.offset + slot.numel, numel_));
  std::vector<std::int64_t> strides(slot.shape.size());
  std::int64_t stride = 1;
  for (std::size_t dim = slot.shape.size(); dim-- > 0; stride *= std::max<std::int64_t>(1, slot.shape[dim]))
    strides[dim] = stride;
  // set_() would look at the memory, and there may be none.
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage_), c10::DispatchKeySet(c10::computeDispatchKey(dtype_, c10::kStrided, device_)),
      c10::scalarTypeToTypeMeta(dtype_));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(slot.shape, strides, slot.offset);
  return made;
}

void UnitStorage::put_in(at::Tensor memory) {
  ISOGRAD_INVARIANT(!is_in(), why_not_ + ": there is memory in already");
  ISOGRAD_INVARIANT(memory.numel() == numel_ && memory.scalar_type() == dtype_ && memory.is_contiguous() &&
                        memory.device() == device_,
                    fmt::format("{} {} for {} of {}", c10::str(memory.sizes()),
                                c10::toString(memory.scalar_type()), numel_, c10::toString(dtype_)));
  memory_ = std::move(memory);
  storage_->clear_data_ptr_access_error_msg_();
  storage_->set_data_ptr_noswap(c10::DataPtr(memory_.mutable_data_ptr(), memory_.device()));
}

at::Tensor UnitStorage::take_out() {
  storage_->set_data_ptr_noswap(c10::DataPtr(nullptr, device_));
  storage_->release_data_and_set_meta_custom_data_ptr_error_msg_(why_not_);
  return std::exchange(memory_, at::Tensor());
}

}  // namespace isograd
