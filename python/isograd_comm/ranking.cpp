// The ranking losses of docs/ranking.md for Python: modules that keep their queue, over a process group's
// backend.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cmath>

#include "isograd/error.hpp"
#include "isograd/ranking.hpp"
#include "isograd_comm/bindings.hpp"

namespace isograd::python {
namespace {

// A name as the place in its list; refused names are checked in Python.
template <typename Enum>
void choose(const py::dict& options, const char* key, const std::vector<std::string>& names, Enum& value) {
  if (!options.contains(key)) return;
  const auto found = std::find(names.begin(), names.end(), options[key].cast<std::string>());
  ISOGRAD_INVARIANT(found != names.end(), "an option of ranking that Python has not checked");
  value = static_cast<Enum>(found - names.begin());
}

template <typename Value>
void take(const py::dict& options, const char* key, Value& value) {
  if (options.contains(key)) value = options[key].cast<Value>();
}

template <typename Options>
Options options_from(const py::dict& options) {
  Options made;
  take(options, "num_classes", made.num_classes);
  take(options, "queue_size", made.queue_size);
  take(options, "temperature", made.temperature);
  choose(options, "reduction", {"mean", "sum", "none"}, made.reduction);
  take(options, "ignore_index", made.ignore_index);
  take(options, "update_queue_in_eval", made.update_queue_in_eval);
  take(options, "max_pool_size", made.max_pool_size);
  choose(options, "grad_reduction", {"sum", "mean"}, made.grad_reduction);
  take(options, "seed", made.seed);
  take(options, "check_queue", made.check_queue);
  choose(options, "thresholds", {"auto", "gather", "select"}, made.thresholds);
  return made;
}

std::shared_ptr<RankingLoss> ranking_loss(const std::string& name, const py::dict& options,
                                          const std::optional<c10::intrusive_ptr<c10d::Backend>>& backend,
                                          double timeout) {
  const std::vector<std::string> modes = {"linear", "lower", "higher", "nearest", "midpoint"};
  const auto group = [&] {
    const py::gil_scoped_release release;  // it waits for the other ranks
    const std::chrono::milliseconds limit(std::llround(std::ceil(timeout * 1e3)));
    return backend ? Group(*backend, "ranking", limit) : Group::solo();
  };
  if (name == "SmoothAPLoss")
    return std::make_shared<SmoothAPLoss>(options_from<RankingOptions>(options), group());
  if (name == "RecallAtQuantileLoss") {
    auto made = options_from<RecallOptions>(options);
    take(options, "quantile", made.quantile);
    choose(options, "interpolation", modes, made.interpolation);
    return std::make_shared<RecallAtQuantileLoss>(made, group());
  }
  auto made = options_from<PAUCOptions>(options);
  take(options, "alpha", made.alpha);
  take(options, "beta", made.beta);
  take(options, "n_knots", made.n_knots);
  choose(options, "surrogate", {"trapezoid", "pairwise"}, made.surrogate);
  choose(options, "tau_scale", {"iqr", "band"}, made.tau_scale);
  choose(options, "pos_numerator", {"pool", "live"}, made.pos_numerator);
  choose(options, "budget_basis", {"fpr", "population"}, made.budget_basis);
  choose(options, "interpolation", modes, made.interpolation);
  return std::make_shared<PAUCAtBudgetLoss>(made, group());
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
