// The autograd node of a unit: one call of a block, whose parameters are whole only while they are used.
//
//   forward   gather -> body(detached inputs), recording its own inner graph -> free
//   backward  gather -> gradients of the inner graph (or of its recomputation) -> hand them over -> free
//
// Outside, the outputs' history is this one node, so that the engine runs it like any operation, and an
// exception in the body passes through one place that frees what was gathered.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/autograd.hpp"
#include "isograd/fully_shard.hpp"

namespace isograd {

// The unit that holds what belongs to no block. Its call is the pass: all other calls happen inside it.
inline constexpr std::size_t kRootUnit = 0;

// The layout's side of a call.
class UnitHost {
 public:
  virtual ~UnitHost() = default;
  virtual const std::string& unit_name(std::size_t unit) const = 0;

  // The unit's parameters are whole from here until leave(), for its next use in this pass; returns the place
  // of that use in the order of uses. Collective.
  virtual std::size_t enter_forward(std::size_t unit) = 0;
  virtual void leave_forward(std::size_t use) = 0;
  virtual void enter_backward(std::size_t use) = 0;
  // For a parameter for which is_trained() holds, before leave_backward().
  virtual void take_gradient(const at::Tensor& parameter, at::Tensor gradient) = 0;
  virtual void leave_backward(std::size_t use) = 0;
  // Memory in which the backward may compute a gradient of `type` that it gives to take_gradient().
  virtual differentiable::GradientPlace::Taken place_of_gradient(const at::Tensor& /*parameter*/,
                                                                 at::ScalarType /*type*/) {
    return {};
  }
  // The unit's forward has exchanged something with other ranks, or holds units: its backward will.
  virtual void exchanges(std::size_t /*unit*/) {}
  // Somebody holds all parameters whole: calls without gradients are plain ones, on any rank alone.
  virtual bool everything_is_held() const { return false; }
  // An exception is on its way: frees whatever is whole.
  virtual void abandon() noexcept = 0;

  virtual bool is_frozen(const c10::TensorImpl* /*leaf*/) const { return false; }  // a parameter not trained
  virtual bool is_trained(const c10::TensorImpl* leaf) const = 0;
  // Whether this memory goes away when a unit is freed.
  virtual bool is_freed_memory(const c10::StorageImpl* storage) const = 0;
};

using UnitBody = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

struct UnitCall {
  std::shared_ptr<UnitHost> host;
  std::size_t unit = kRootUnit;
  bool checkpoint = false;  // the inner graph is not kept but made again in backward
};

// Runs `body` on `inputs` (undefined ones included) with the unit's parameters whole. Every tensor that needs
// a gradient and that `body` uses is an input or a parameter of the layout, ConfigError otherwise.
std::vector<at::Tensor> call_unit(const UnitCall& call, const std::vector<at::Tensor>& inputs,
                                  const UnitBody& body);

// A UnitHandle's state; `call.host` is set once a layout has taken it.
struct UnitHandle::Binding {
  std::function<std::vector<at::Tensor>()> parameters;
  std::optional<bool> checkpoint{}, reshard{}, fp32_gradients{};
  std::optional<at::ScalarType> output_dtype{};
  UnitCall call{};  // call.host is null: not taken
};

}  // namespace isograd
