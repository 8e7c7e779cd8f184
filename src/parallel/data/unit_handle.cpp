#include "parallel/data/unit_handle.hpp"

namespace isograd {

UnitHandle::UnitHandle(std::function<std::vector<at::Tensor>()> parameters)
    : binding_(std::make_shared<Binding>()) {
  binding_->parameters = std::move(parameters);
}

std::vector<at::Tensor> UnitHandle::run(const std::vector<at::Tensor>& inputs, const Body& body) const {
  if (!bound()) return body(inputs);
  return call_unit(binding_->call, inputs, body);
}

void UnitHandle::set_checkpoint(bool checkpoint) const {
  binding_->checkpoint = checkpoint;
}

void UnitHandle::set_reshard_after_forward(bool reshard) const {
  binding_->reshard = reshard;
}

bool UnitHandle::bound() const {
  return binding_->call.host != nullptr;
}

}  // namespace isograd
