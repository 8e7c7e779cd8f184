// Losses in C++ that Python code differentiates through: their autograd nodes are torch's own. The ranking
// losses are modules that keep their queue, over a process group's backend.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "isograd/loss.hpp"
#include "isograd_comm/bindings.hpp"
#include "loss/ranking/named_options.hpp"

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

// Options that are no such names or values are refused in Python.
std::shared_ptr<RankingLoss> ranking_loss(const std::string& name, const py::dict& options,
                                          const std::optional<c10::intrusive_ptr<c10d::Backend>>& backend,
                                          double timeout) {
  const auto take = [&](const char* option, auto& value) {
    if (options.contains(option)) value = options[option].cast<std::decay_t<decltype(value)>>();
  };
  const auto group = [&] {
    const py::gil_scoped_release release;  // it waits for the other ranks
    const std::chrono::milliseconds limit(std::llround(std::ceil(timeout * 1e3)));
    return backend ? Group(*backend, "ranking", limit) : Group::solo();
  };
  return ranking_loss_by_name(name, take, group());
}

// In one pass, where masks and indices of torch take a dozen.
std::optional<std::pair<std::int64_t, std::int64_t>> target_range(const at::Tensor& targets,
                                                                  std::int64_t ignore_index) {
  const py::gil_scoped_release release;
  const at::Tensor held = targets.detach().to(at::kCPU, at::kLong).contiguous();
  constexpr auto kMost = std::numeric_limits<std::int64_t>::max();
  std::int64_t low = kMost, high = -kMost - 1;
  for (const std::int64_t target : std::span(held.const_data_ptr<std::int64_t>(), held.numel())) {
    low = std::min(low, target == ignore_index ? kMost : target);
    high = std::max(high, target == ignore_index ? -kMost - 1 : target);
  }
  return low > high ? std::nullopt : std::optional(std::pair(low, high));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> evaluate(RankingLoss& loss, const at::Tensor& scores,
                                                        const at::Tensor& targets,
                                                        const std::optional<at::Tensor>& sample_weight,
                                                        const std::optional<at::Tensor>& iid_mask,
                                                        bool training) {
  const py::gil_scoped_release release;
  loss.train(training);
  RankingExtras extras;
  if (sample_weight) extras.sample_weight = *sample_weight;
  if (iid_mask) extras.iid_mask = *iid_mask;
  const RankingResult result = loss.evaluate(scores, targets, extras);
  return {result.loss, result.per_class, result.valid};
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
  module.def("target_range", &target_range, py::arg("targets"), py::arg("ignore_index"),
             "The least and the largest of integer targets that are not ignore_index; None where there are "
             "none.");
  py::class_<RankingLoss, std::shared_ptr<RankingLoss>>(module, "RankingLoss")
      .def(py::init(&ranking_loss), py::arg("name"), py::arg("options"), py::arg("backend") = py::none(),
           py::arg("timeout") = 600.0)
      .def("evaluate", &evaluate, py::arg("scores"), py::arg("targets"),
           py::arg("sample_weight") = py::none(), py::arg("iid_mask") = py::none(),
           py::arg("training") = true)
      .def("reset_queue", &RankingLoss::reset_queue)
      .def("queue_rows", &RankingLoss::queue_rows)
      .def("state", &RankingLoss::state)
      .def("load_state", &RankingLoss::load_state)
      .def_property("temperature", &RankingLoss::temperature, &RankingLoss::set_temperature);
}

}  // namespace isograd::python
