#include "verify/case.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "verify/compare.hpp"

namespace isograd {
namespace {

double limit_of(const std::string& precision) {
  if (precision == "fp64") return Bounds{}.exact;
  return bounds_for(precision == "bf16" || precision == "fp16" ? at::kBFloat16 : at::kFloat, 1, 1)
      .ratio_limit;
}

double share(const at::Tensor& difference, double scale) {
  const double norm = difference.norm().item<double>();
  return norm == 0 ? 0 : norm / scale;
}

}  // namespace

Case::Case(RunPair pair, Experiment setting, const RunAgain& again)
    : pair_(std::move(pair)), setting_(setting), again_(again) {
  limit_ = std::max(limit_of(found().precision), limit_of(expected().precision));
  std::map<std::string, at::Tensor> own;
  for (const auto& [name, tensor] : found().gradients) own[name] = tensor;
  std::vector<at::Tensor> reference;
  for (const auto& [name, tensor] : expected().gradients) reference.push_back(tensor.to(at::kDouble));
  const auto scales = error_scales(reference);
  for (std::size_t i = 0; i < reference.size(); ++i) {
    const auto match = own.find(expected().gradients[i].first);
    if (match == own.end() || match->second.sizes() != reference[i].sizes()) continue;
    Parameter parameter{.name = match->first,
                        .found = match->second.to(at::kDouble),
                        .expected = reference[i],
                        .scale = scales[i],
                        .comparison = {}};
    parameter.comparison = compare_exact(parameter.found, parameter.expected, scales[i],
                                         Bounds{.exact = limit_, .unit_roundoff = 0});
    parameters_.push_back(std::move(parameter));
  }
  const StepDump& says = expected().counts.empty() && expected().amounts.empty() ? found() : expected();
  if (says.counts.empty()) {
    counts_ = says.amounts;
    if (!says.counted.empty()) counted_ = says.counted;
  }
  for (const auto& rank : says.counts) counts_.emplace_back(rank.begin(), rank.end());
  for (std::size_t rank = 0; rank < counts_.size(); ++rank) {
    by_rank_.push_back(0);
    for (std::size_t j = 0; j < counts_[rank].size(); ++j) {
      const double targets = counts_[rank][j];
      by_rank_.back() += targets;
      if (targets > 0)
        cells_.push_back({.rank = static_cast<int>(rank),
                          .micro_batch = static_cast<int>(j),
                          .targets = targets,
                          .part = {}});
    }
    targets_ += by_rank_.back();
  }
}

std::vector<std::string> Case::off() const {
  std::vector<std::string> names;
  for (const auto& parameter : parameters_)
    if (!parameter.comparison.passed) names.push_back(parameter.name);
  return names;
}

bool Case::finite() const {
  return std::all_of(parameters_.begin(), parameters_.end(), [](const Parameter& parameter) {
    return parameter.found.isfinite().all().item<bool>();
  });
}

bool Case::finite_loss() const {
  const double loss = found().figures.loss;
  return std::isfinite(loss) || !std::isfinite(expected().figures.loss) ||
         (std::isnan(loss) && found().terms.empty());
}

int Case::holders() const {
  return static_cast<int>(std::count_if(by_rank_.begin(), by_rank_.end(), [](double n) { return n > 0; }));
}
int Case::home_of(int rank) const {
  const auto& [one, other] = setting_.swapped;
  return rank == one ? other : rank == other ? one : rank;
}
double Case::size_of(const std::string& axis) const {
  double all = 1, context = 1, own = 1;
  for (const auto& [name, size] : found().axes) {
    all *= size;
    if (name.starts_with("cp_")) context *= size;
    if (name == axis) own = size;
  }
  if (axis == kContextRanks) return context;
  if (axis == kAllRanks) return found().axes.empty() ? ranks() : all;
  return own;
}

int Case::micro_batches(int rank) const {
  return static_cast<int>(counts_.at(static_cast<std::size_t>(rank)).size());
}
int Case::micro_batches() const {
  int sum = 0;
  for (const auto& one : counts_) sum += static_cast<int>(one.size());
  return sum;
}
int Case::rounds() const {
  std::size_t most = 0;
  for (const auto& one : counts_) most = std::max(most, one.size());
  return static_cast<int>(most);
}
bool Case::silent() const {
  return static_cast<int>(cells_.size()) < micro_batches();
}

bool Case::find_parts() {
  if (parts_ != Parts::kNotAsked) return parts_ == Parts::kFound;
  parts_ = Parts::kNone;
  if (!again_ || cells_.empty()) return false;
  for (Cell& cell : cells_) {
    Experiment alone = setting_;
    alone.only_rank = cell.rank;
    alone.only_micro_batch = cell.micro_batch;
    alone.reference_only = true;
    const auto pair = again_(alone);
    if (!pair) return false;
    std::map<std::string, at::Tensor> gradients;
    for (const auto& [name, tensor] : pair->expected.gradients) gradients[name] = tensor;
    // Alone, its tokens are all there are: its mean is over its own.
    for (const auto& parameter : parameters_)
      cell.part.push_back(gradients.at(parameter.name).to(at::kDouble) * (cell.targets / targets_));
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor sum = at::zeros_like(parameters_[i].expected);
    for (const Cell& cell : cells_) sum += cell.part[i];
    if (!(share(sum - parameters_[i].expected, parameters_[i].scale) <= limit_)) return false;
  }
  parts_ = Parts::kFound;
  return true;
}

std::optional<double> misfit(Case& one, const Cause& cause, const std::vector<std::string>& names) {
  std::vector<double> weights;
  for (const auto& cell : one.cells()) weights.push_back(cause.weight(one, cell));
  if (weights.empty()) weights.push_back(cause.weight(one, {}));  // nothing known of counts: one weight
  const bool uniform = std::all_of(weights.begin(), weights.end(), [&](double weight) {
    return std::abs(weight - weights[0]) <= 1e-12 * std::abs(weights[0]);
  });
  if (!uniform && !one.find_parts()) return std::nullopt;
  double worst = 0;
  for (std::size_t i = 0; i < one.parameters().size(); ++i) {
    const auto& parameter = one.parameters()[i];
    if (std::find(names.begin(), names.end(), parameter.name) == names.end()) continue;
    at::Tensor predicted = parameter.expected * weights[0];
    if (!uniform) {
      predicted = at::zeros_like(parameter.expected);
      for (std::size_t c = 0; c < weights.size(); ++c) predicted += one.cells()[c].part[i] * weights[c];
    }
    const double scale = std::max(parameter.scale, predicted.norm().item<double>());
    const double off = share(parameter.found - predicted, scale);
    worst = std::isnan(off) ? HUGE_VAL : std::max(worst, off);
  }
  return worst;
}

std::string text_of(const Case& one, const Experiment& experiment) {
  const auto& axes = one.found().axes;
  if (experiment.only_axis < 0 || experiment.only_axis >= static_cast<int>(axes.size()))
    return experiment.text();
  Experiment rest = experiment;
  rest.only_axis = -1;
  const auto text =
      fmt::format("all ranks along {}", axes[static_cast<std::size_t>(experiment.only_axis)].first);
  return rest == Experiment{} ? text : text + ", " + rest.text();
}

std::string list_names(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(kShown, names.size()); ++i) text += (i ? ", " : "") + names[i];
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

}  // namespace isograd
