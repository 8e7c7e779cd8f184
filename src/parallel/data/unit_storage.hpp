// Flat memory of a unit's parameters that comes and goes while the parameters stay the same tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <string>

#include "isograd/parameters.hpp"

namespace isograd {

// A storage of fixed size whose memory is put in and taken out. Whatever was made of it (parameters, views
// that autograd has saved) sees the memory that is in at the moment. Reading while none is in throws
// c10::Error with `why_not`.
class UnitStorage {
 public:
  UnitStorage(std::int64_t numel, at::ScalarType dtype, at::Device device, std::string why_not);

  // The elements of a slot in the parameter's shape, whether memory is in or not.
  at::Tensor view(const Slot& slot) const;

  void put_in(at::Tensor memory);  // [numel], contiguous
  at::Tensor take_out();           // what was put in
  bool is_in() const { return memory_.defined(); }
  const at::Tensor& memory() const { return memory_; }
  const c10::StorageImpl* impl() const { return storage_.get(); }
  std::int64_t numel() const { return numel_; }
  at::ScalarType dtype() const { return dtype_; }
  std::int64_t bytes() const;

 private:
  std::int64_t numel_;
  at::ScalarType dtype_;
  at::Device device_;
  std::string why_not_;
  c10::intrusive_ptr<c10::StorageImpl> storage_;
  at::Tensor memory_;  // undefined: none is in
};

}  // namespace isograd
