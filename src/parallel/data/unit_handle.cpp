#include "parallel/data/unit_handle.hpp"

namespace isograd {

UnitHandle::UnitHandle(std::function<std::vector<at::Tensor>()> parameters)
    : binding_(std::make_shared<Binding>()) {
  binding_->parameters = std::move(parameters);
}

std::vector<at::Tensor> UnitHandle::run(const std::vector<at::Tensor>& inputs, const Body& body) const {
  const auto compute = binding_->output_dtype ? Body([body, dtype = *binding_->output_dtype](const auto& in) {
    auto outputs = body(in);
    for (at::Tensor& output : outputs)
      if (output.defined() && output.is_floating_point()) output = output.to(dtype);
    return outputs;
  })
                                              : body;
  if (!bound()) return compute(inputs);
  return call_unit(binding_->call, inputs, compute);
}

void UnitHandle::set_checkpoint(bool checkpoint) const {
  binding_->checkpoint = checkpoint;
}

void UnitHandle::set_reshard_after_forward(bool reshard) const {
  binding_->reshard = reshard;
}

void UnitHandle::set_fp32_gradients(bool fp32) const {
  binding_->fp32_gradients = fp32;
}

void UnitHandle::set_output_dtype(std::optional<at::ScalarType> dtype) const {
  binding_->output_dtype = dtype;
}

bool UnitHandle::plain() const {
  return !bound() && !binding_->output_dtype;
}

bool UnitHandle::bound() const {
  return binding_->call.host != nullptr;
}

}  // namespace isograd
