// Losses in C++ that Python code differentiates through: their autograd nodes are torch's own.
#include <torch/csrc/utils/pybind.h>

#include "isograd/loss.hpp"
#include "isograd_comm/bindings.hpp"

namespace isograd::python {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> fused(const at::Tensor& hidden,
                                                                 const at::Tensor& weight,
                                                                 const at::Tensor& targets,
                                                                 const std::optional<at::Tensor>& weights,
                                                                 const std::optional<at::Tensor>& bias,
                                                                 double label_smoothing, double z_loss) {
  const py::gil_scoped_release release;
  LinearCrossEntropyOptions options;
  if (weights) options.weights = *weights;
  if (bias) options.bias = *bias;
  options.label_smoothing = label_smoothing;
  options.z_loss = z_loss;
  const LinearCrossEntropy made = linear_cross_entropy(hidden, weight, targets, options);
  return {made.sum, made.cross_entropy, made.z_loss, made.log_probabilities};
}

}  // namespace

void bind_losses(py::module_& module) {
  module.def(
      "linear_cross_entropy", &fused, py::arg("hidden"), py::arg("weight"), py::arg("targets"),
      py::arg("weights") = py::none(), py::arg("bias") = py::none(), py::arg("label_smoothing") = 0.0,
      py::arg("z_loss") = 0.0,
      "A head's matrix product and its cross entropy, without the logits: (sum, cross entropy, z-loss, "
      "log-probabilities), of which the sum is differentiable. isograd.linear_cross_entropy is the face of "
      "it.");
}

}  // namespace isograd::python
