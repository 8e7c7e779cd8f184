#include "parallel/data/held_part.hpp"

#include <ATen/ATen.h>

#include "isograd/error.hpp"

namespace isograd {
namespace {

at::Tensor in_host_memory(const at::Tensor& flat) {
  const at::Tensor copy = flat.to(at::kCPU);
  return flat.is_cuda() ? copy.pin_memory() : copy;
}

}  // namespace

void check_can_be_offloaded(at::Device parameters) {
  if (!parameters.is_cpu()) return;
  throw ConfigError({.where = "offload",
                     .found = "parameters on the CPU",
                     .expected = "parameters on another device: offload moves states and gradients to host "
                                 "memory, where they already are",
                     .action = "Leave offload out, or move the model to a GPU first"});
}

HeldPart::HeldPart(Bucket& bucket, bool offload, bool gradients_on_device)
    : parameters_(bucket.parameters), gradients_(bucket.gradients) {
  if (!offload) return;
  const at::NoGradGuard no_grad;
  const bool own_master = bucket.master.scalar_type() != bucket.parameters.scalar_type();
  bucket.parameters = host_parameters_ = in_host_memory(parameters_);
  bucket.master = own_master ? bucket.master.to(at::kCPU) : bucket.parameters;
  bucket.gradients = host_gradients_ = in_host_memory(gradients_);
  if (!gradients_on_device) gradients_ = at::Tensor();
}

void HeldPart::gradients_to_host() const {
  const at::NoGradGuard no_grad;
  if (host_gradients_.defined() && gradients_.defined()) host_gradients_.copy_(gradients_);
}

void HeldPart::parameters_to_device() const {
  const at::NoGradGuard no_grad;
  if (host_parameters_.defined()) parameters_.copy_(host_parameters_);
}

}  // namespace isograd
