// Flat memory of a unit's parameters that comes and goes while the parameters stay the same tensors.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/StorageImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/torch_versions.hpp"
#include "isograd/error.hpp"
#include "isograd/parameters.hpp"
#include "layout/storage.hpp"

namespace isograd {

// Memory of fixed size that is put in and taken out under the storages of its slots. Whatever was made of
// them (parameters, what shares their memory, views that autograd has saved) sees the memory that is in at
// the moment. Reading while none is in throws c10::Error with `why_not`.
class UnitStorage {
 public:
  UnitStorage(std::int64_t numel, at::ScalarType dtype, at::Device device, std::string why_not)
      : numel_(numel), dtype_(dtype), device_(device), why_not_(std::move(why_not)) {}

  // The elements of a slot in the parameter's shape, whether memory is in or not, in a storage of their own.
  at::Tensor view(const Slot& slot) {
    ISOGRAD_INVARIANT(slot.offset + slot.numel <= numel_,
                      fmt::format("slot '{}' ends at {} of {}", slot.name, slot.offset + slot.numel, numel_));
    const auto bytes = static_cast<std::size_t>(slot.numel) * c10::elementSize(dtype_);
    auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                         c10::DataPtr(nullptr, device_),
                                                         /*allocator=*/nullptr, /*resizable=*/false);
    std::vector<std::int64_t> strides(slot.shape.size());
    std::int64_t stride = 1;
    for (std::size_t dim = slot.shape.size(); dim-- > 0; stride *= std::max<std::int64_t>(1, slot.shape[dim]))
      strides[dim] = stride;
    // set_() would look at the memory, and there may be none.
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::computeDispatchKey(dtype_, c10::kStrided, device_)),
        c10::scalarTypeToTypeMeta(dtype_));
    made.unsafeGetTensorImpl()->set_sizes_and_strides(slot.shape, strides, 0);
    add({std::move(storage), slot.offset});
    return made;
  }
  // `parameter` gets this memory: the same tensor and, where it fills it, the same storage.
  void adopt(at::Tensor parameter, const Slot& slot) {
    const at::NoGradGuard no_grad;
    if (parameter.is_meta())  // stays the same tensor, of the same name and autograd state
      parameter.unsafeGetTensorImpl()->shallow_copy_from(view(slot).getIntrusivePtr());
    else if (fills_its_storage(parameter))
      add({c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(parameter.storage().unsafeGetStorageImpl()),
           slot.offset});
    else
      parameter.set_data(view(slot));
  }

  void put_in(at::Tensor memory) {  // [numel], contiguous
    ISOGRAD_INVARIANT(!is_in(), why_not_ + ": there is memory in already");
    ISOGRAD_INVARIANT(memory.numel() == numel_ && memory.scalar_type() == dtype_ && memory.is_contiguous() &&
                          memory.device() == device_,
                      fmt::format("{} {} for {} of {}", c10::str(memory.sizes()),
                                  c10::toString(memory.scalar_type()), numel_, c10::toString(dtype_)));
    memory_ = std::move(memory);
    for (const Part& part : parts_) fill(part);
  }
  at::Tensor take_out() {  // what was put in
    for (const Part& part : parts_) empty(part);
    return std::exchange(memory_, at::Tensor());
  }
  bool is_in() const { return memory_.defined(); }
  std::vector<const c10::StorageImpl*> storages() const {
    std::vector<const c10::StorageImpl*> all;
    for (const Part& part : parts_) all.push_back(part.storage.get());
    return all;
  }
  std::int64_t bytes() const { return numel_ * static_cast<std::int64_t>(c10::elementSize(dtype_)); }

 private:
  struct Part {
    c10::intrusive_ptr<c10::StorageImpl> storage;
    std::int64_t offset;  // in elements
  };
  void add(Part part) {
    parts_.push_back(std::move(part));
    is_in() ? fill(parts_.back()) : empty(parts_.back());
  }
  void fill(const Part& part) const {
    auto* begin = static_cast<char*>(memory_.mutable_data_ptr()) +
                  part.offset * static_cast<std::int64_t>(c10::elementSize(dtype_));
    torch_versions::allow_reading(*part.storage);
    part.storage->set_data_ptr_noswap(c10::DataPtr(begin, device_));
  }
  void empty(const Part& part) const {
    part.storage->set_data_ptr_noswap(c10::DataPtr(nullptr, device_));
    part.storage->release_data_and_set_meta_custom_data_ptr_error_msg_(why_not_);
  }

  std::int64_t numel_;
  at::ScalarType dtype_;
  at::Device device_;
  std::string why_not_;
  std::vector<Part> parts_{};
  at::Tensor memory_;  // undefined: none is in
};

}  // namespace isograd
