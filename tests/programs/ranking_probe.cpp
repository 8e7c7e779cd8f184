// The C++ side of tests/test_ranking.py: cases in, values and gradients out, as JSON.
// [{"loss", "dtype", "options", "steps": [{"scores", "targets", "iid"?, "weight"?}]}] ->
// [[{"loss", "gradient", "valid"?, "diagnostics"?}]]
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "loss/ranking/named_options.hpp"

namespace isograd {
namespace {

using Json = nlohmann::json;

void flatten(const Json& list, std::vector<double>& values, std::vector<std::int64_t>& sizes,
             std::size_t depth) {
  if (!list.is_array()) {
    values.push_back(list.get<double>());
    return;
  }
  if (sizes.size() == depth) sizes.push_back(static_cast<std::int64_t>(list.size()));
  for (const auto& entry : list) flatten(entry, values, sizes, depth + 1);
}

at::Tensor tensor_of(const Json& list, at::ScalarType type) {
  std::vector<double> values;
  std::vector<std::int64_t> sizes;
  flatten(list, values, sizes, 0);
  return at::tensor(values, at::kDouble).view(sizes).to(type);
}

Json json_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().to(at::kDouble).contiguous().flatten();
  return std::vector<double>(flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel());
}

template <typename Value>
void take(const Json& options, const char* key, Value& value) {
  if (options.contains(key)) options[key].get_to(value);
}

void take_reduction(const Json& options, LossReduction& reduction) {
  const auto taken = [&](const char* option, std::string& value) { take(options, option, value); };
  take_named(taken, "reduction", {"mean", "sum", "none", "mean_positive"}, reduction);
}

std::shared_ptr<RankingLoss> ranking_loss(const std::string& name, const Json& options) {
  const auto taken = [&](const std::string& option, auto& value) {
    take(options, option == "interpolation" ? "quantile_interpolation" : option.c_str(), value);
  };
  return ranking_loss_by_name(name, taken, Group::solo());
}

using Forward = std::function<at::Tensor(const at::Tensor&, const Json&, Json&)>;

Forward focal_loss(const std::string& name, const Json& options, at::ScalarType type) {
  const auto weight = [type](const Json& step) {
    return step.contains("weight") ? tensor_of(step["weight"], type) : at::Tensor();
  };
  if (name == "SigmoidFocalLoss") {
    SigmoidFocalOptions made;
    take(options, "alpha", made.alpha);
    take(options, "gamma", made.gamma);
    take_reduction(options, made.reduction);
    const auto loss = std::make_shared<SigmoidFocalLoss>(made);
    return [=](const at::Tensor& scores, const Json& step, Json&) {
      return loss->forward(scores, tensor_of(step["targets"], type), weight(step));
    };
  }
  SoftmaxFocalOptions made;
  take(options, "alpha", made.alpha);
  take(options, "gamma", made.gamma);
  take(options, "label_smoothing", made.label_smoothing);
  take(options, "background_class", made.background_class);
  take_reduction(options, made.reduction);
  const auto loss = std::make_shared<SoftmaxFocalLoss>(made);
  return [=](const at::Tensor& scores, const Json& step, Json&) {
    return loss->forward(scores, tensor_of(step["targets"], at::kLong), weight(step));
  };
}

Forward make_forward(const std::string& name, const Json& options, at::ScalarType type) {
  if (name == "SigmoidFocalLoss" || name == "SoftmaxFocalLoss") return focal_loss(name, options, type);
  const auto loss = ranking_loss(name, options);
  return [loss](const at::Tensor& scores, const Json& step, Json& out) {
    RankingExtras extras;
    if (step.contains("iid")) extras.iid_mask = tensor_of(step["iid"], at::kBool);
    if (step.contains("weight")) extras.sample_weight = tensor_of(step["weight"], at::kDouble);
    const RankingResult result = loss->evaluate(scores, tensor_of(step["targets"], at::kLong), extras);
    out["valid"] = json_of(result.valid);
    const RankingDiagnostics& d = result.diagnostics;
    out["diagnostics"] = {{"t_alpha", json_of(d.t_alpha)},
                          {"t_beta", json_of(d.t_beta)},
                          {"tau_eff", json_of(d.tau_eff)},
                          {"pauc_var", json_of(d.pauc_var)},
                          {"band_neg_count", json_of(d.band_neg_count)},
                          {"grad_pos_count", json_of(d.grad_pos_count)}};
    return result.loss;
  };
}

Json run_case(const Json& of) {
  const at::ScalarType type = of["dtype"] == "float64" ? at::kDouble : at::kFloat;
  const Forward forward = make_forward(of["loss"], of.value("options", Json::object()), type);
  Json results = Json::array();
  for (const auto& step : of["steps"]) {
    const at::Tensor scores = tensor_of(step["scores"], type).requires_grad_(true);
    Json out;
    const at::Tensor loss = forward(scores, step, out);
    const at::Tensor total = at::where(at::isnan(loss), at::zeros_like(loss), loss).sum();
    out["loss"] = json_of(loss);
    out["gradient"] = json_of(torch::autograd::grad({total}, {scores})[0]);
    results.push_back(std::move(out));
  }
  return results;
}

}  // namespace
}  // namespace isograd

int main(int count, char** arguments) {
  try {
    if (count != 3) throw std::runtime_error("ranking_probe CASES.json RESULTS.json");
    std::ifstream in(arguments[1]);
    nlohmann::json results = nlohmann::json::array();
    for (const auto& of : nlohmann::json::parse(in)) results.push_back(isograd::run_case(of));
    std::ofstream(arguments[2]) << results.dump();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
  return 0;
}
