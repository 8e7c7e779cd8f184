// Flat memory of a unit's parameters that comes and goes while the parameters stay the same tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <string>
#include <vector>

#include "isograd/parameters.hpp"

namespace isograd {

// Memory of fixed size that is put in and taken out under the storages of its slots. Whatever was made of
// them (parameters, what shares their memory, views that autograd has saved) sees the memory that is in at
// the moment. Reading while none is in throws c10::Error with `why_not`.
class UnitStorage {
 public:
  UnitStorage(std::int64_t numel, at::ScalarType dtype, at::Device device, std::string why_not);

  // The elements of a slot in the parameter's shape, whether memory is in or not, in a storage of their own.
  at::Tensor view(const Slot& slot);
  // `parameter` gets this memory: the same tensor and, where it fills it, the same storage.
  void adopt(at::Tensor parameter, const Slot& slot);

  void put_in(at::Tensor memory);  // [numel], contiguous
  at::Tensor take_out();           // what was put in
  bool is_in() const { return memory_.defined(); }
  const at::Tensor& memory() const { return memory_; }
  std::vector<const c10::StorageImpl*> storages() const;
  std::int64_t numel() const { return numel_; }
  at::ScalarType dtype() const { return dtype_; }
  std::int64_t bytes() const;

 private:
  struct Part {
    c10::intrusive_ptr<c10::StorageImpl> storage;
    std::int64_t offset;  // in elements
  };
  void add(Part part);
  void fill(const Part& part) const;
  void empty(const Part& part) const;

  std::int64_t numel_;
  at::ScalarType dtype_;
  at::Device device_;
  std::string why_not_;
  std::vector<Part> parts_;
  at::Tensor memory_;  // undefined: none is in
};

}  // namespace isograd
