// The ranking losses of docs/ranking.md for Python: modules that keep their queue, over a process group's
// backend.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cmath>

#include "isograd_comm/bindings.hpp"
#include "loss/ranking/named_options.hpp"

namespace isograd::python {
namespace {

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

void bind_ranking(py::module_& module) {
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
