// Changes the memory of parameters so that tensors that share it follow, and detects writes by others.
#pragma once

#include <c10/core/StorageImpl.h>

#include <vector>

#include "isograd/parameters.hpp"

namespace isograd {

// Whether the parameter fills its storage in row-major order. Such a storage can get other memory: tensors
// that share it (detach(), views, ties through them) then see that memory too.
bool fills_its_storage(const at::Tensor& parameter);

// The storages whose memory a layout changes. While it exists, no other layout may claim them.
class Claim {
 public:
  // Changes nothing. ConfigError that names the first parameter that cannot be moved without leaving a
  // tensor behind (others share its storage, and it does not fill it), or whose storage another layout has
  // claimed: of this model, or of a rank that is a thread and has its values from the same tensor.
  explicit Claim(const std::vector<NamedParameter>& parameters);
  ~Claim();
  Claim(Claim&& other) noexcept = default;
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;
  Claim& operator=(Claim&&) = delete;

 private:
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages_;
};

// Gives `storage` the memory of `memory`, which it keeps alive.
void give_memory(c10::StorageImpl& storage, const at::Tensor& memory);

// Detects values that code outside the layout has written into the parameters of a plan, by autograd's
// version counters. In-place operations raise them; writes through flat buffers and through data() do not.
class Writes {
 public:
  Writes() = default;
  Writes(const BucketPlan& plan, const std::vector<NamedParameter>& parameters) {
    for (const Slot& slot : plan.slots) add(parameters.at(slot.index));
  }
  explicit Writes(const std::vector<NamedParameter>& parameters) {  // places are those in this list
    for (const NamedParameter& parameter : parameters) add(parameter);
  }
  // Places in plan.slots of the parameters written to since they were last settled.
  std::vector<std::size_t> written() const;
  void settle(std::size_t place);
  const at::Tensor& parameter(std::size_t place) const { return places_.at(place).parameter; }
  // ConfigError if a parameter has other memory now (set_data, a load or a move of the model), which the
  // layout does not know.
  void check_in_place() const;

 private:
  void add(const NamedParameter& parameter);

  struct Place {
    std::string name;
    at::Tensor parameter;
    c10::Storage storage;  // that it had
    std::int64_t version;
  };
  std::vector<Place> places_;
};

}  // namespace isograd
