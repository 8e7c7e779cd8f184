#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "verify/diagnosis.hpp"

namespace isograd {
namespace {

at::ScalarType type_of(const std::string& precision) {
  if (precision == "bf16") return at::kBFloat16;
  if (precision == "fp16") return at::kHalf;
  return precision == "fp64" ? at::kDouble : at::kFloat;
}

// The sums have one part for each rank and micro-batch that holds something.
Bounds bounds_of(const StepDump& found, at::ScalarType type) {
  int ranks = 1, holders = 0;
  for (const auto& [axis, size] : found.axes) ranks *= size;
  std::int64_t rounds = 1;
  for (const auto& own : found.counts) {
    const auto held = std::ranges::count_if(own, [](auto count) { return count > 0; });
    rounds = std::max<std::int64_t>(rounds, held);
    holders += held > 0;
  }
  return bounds_for(type, std::max(ranks, holders), rounds);
}

// Without a run of one process: units that a parameter and all of them may be off by, and the floor of s.
constexpr double kUnitsOfParameter = 256, kUnitsOfWhole = 32, kUnmeasuredFloor = 1.0 / 32;
// Units of bf16 by which the scale of a matrix may be off, in addition to what its own pieces say: nearly
// three times the most, 12, that right steps of nine models were seen to be off altogether, in 12,000 pairs
// of matrices. Its gradient is a product, which is added up in fp32 and rounded once. That of a vector is a
// sum over tokens, which PyTorch makes in bf16 for a LayerNorm: it was seen to be 58 % too small in steps
// that are right, and turned by 7 %, so that no such bound holds there.
constexpr double kUnitsOfMatrix = 32;

}  // namespace

const std::string& ComparedStep::precision() const {
  const auto place = [](const std::string& precision) {
    return precision == "bf16" ? 3 : precision == "fp16" ? 2 : precision == "fp64" ? 0 : 1;
  };
  return place(expected().precision) > place(found().precision) ? expected().precision : found().precision;
}

ComparedStep::ComparedStep(RunPair pair, Experiment setting, const RunAgain& again)
    : pair_(std::move(pair)), grid_(pair_.found.axes), setting_(setting), again_(again) {
  const std::map<std::string, at::Tensor> own(found().gradients.begin(), found().gradients.end()),
      by_one(pair_.alone.begin(), pair_.alone.end());
  const at::ScalarType type = type_of(precision());
  allowance_.exact = type == at::kDouble;
  allowance_.bounds = bounds_of(found(), type);
  const bool measured = !allowance_.exact && !by_one.empty();
  Tensors reference;
  std::vector<double> norms;
  for (const auto& [name, tensor] : expected().gradients) {
    reference.push_back(tensor.to(at::kDouble));
    norms.push_back(norm_of(reference.back()));
  }
  const auto unmeasured = error_scales(reference, norms, kUnmeasuredFloor);
  const auto scales = allowance_.exact || measured ? error_scales(reference, norms, kFloor) : unmeasured;
  double most_alone = 0;  // over few elements one run measures rounding badly: the worst of all counts
  for (std::size_t i = 0; i < reference.size(); ++i) {
    const auto match = own.find(expected().gradients[i].first);
    if (match == own.end() || match->second.sizes() != reference[i].sizes()) continue;
    Parameter parameter{.name = match->first,
                        .found = match->second.to(at::kDouble),
                        .expected = reference[i],
                        .norm = norms[i],
                        .scale = scales[i],
                        .unmeasured_scale = unmeasured[i],
                        .by_floor = held_to_floor(norms[i], scales[i]),
                        .comparison = {}};
    if (measured) {
      alone_.push_back(by_one.at(parameter.name).to(at::kDouble));
      alone_apart_.push_back(distance(alone_.back(), parameter.expected));
      if (i < pair_.alone_rounding.size())  // the worst of several runs
        alone_apart_.back() = std::fmax(alone_apart_.back(), pair_.alone_rounding[i]);
      parameter.alone_error = in_scales(alone_apart_.back(), parameter.scale);
      most_alone = std::max(most_alone, parameter.alone_error);
    }
    moves_.push_back(i < expected().moves.size() ? expected().moves[i] : 0);
    parameters_.push_back(std::move(parameter));
  }
  allow(most_alone);
  const bool theirs = expected().counts.empty() && expected().amounts.empty();
  const StepDump& says = theirs || pair_.assigned_otherwise ? found() : expected();
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
      if (targets > 0) cells_.push_back({static_cast<int>(rank), static_cast<int>(j), targets, {}});
    }
    targets_ += by_rank_.back();
  }
}

// Sets the bounds of each parameter and of the whole, and compares.
void ComparedStep::allow(double most_alone) {
  const Bounds& bounds = allowance_.bounds;
  // Other trainers add gradients up in the precision of the run.
  const double sums = bounds.unit * std::sqrt(bounds.sum_length);
  // A sum of n parts in one type is off by at most n u of itself where none cancel.
  if (type_of(precision()) == at::kBFloat16)
    allowance_.matrix = (kUnitsOfMatrix + bounds.sum_length) * bounds.unit;
  Tensors own, reference;
  std::vector<double> norms;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    own.push_back(parameter.found);
    reference.push_back(parameter.expected);
    norms.push_back(parameter.norm);
    double allowed = Bounds{}.exact;
    if (!allowance_.exact) {
      const bool measured = !alone_.empty();
      // The error of one process, or of the run by itself, makes the bound sharper and never wider.
      double widest = kUnitsOfParameter * bounds.unit;
      if (measured) widest = in_scales(widest * parameter.unmeasured_scale, parameter.scale);
      const double moved = parameter.scale > 0 ? in_scales(kRoundingFactor * moves_[i], parameter.scale) : 0;
      if (moved > widest) {
        allowance_.moved = true;
        widest = moved;
      }
      const bool few = parameter.expected.numel() < kMeasurable;
      allowed = measured ? std::min(4 * (few ? most_alone : parameter.alone_error) + sums, widest) : widest;
    }
    parameter.comparison = compare(parameter.found, parameter.expected, parameter.scale, allowed);
    apart_.push_back(parameter.scale > 0 && std::isfinite(parameter.scale)
                         ? parameter.comparison.error * parameter.scale
                         : distance(parameter.found, parameter.expected));
    allowance_.parameter.push_back(allowed * parameter.scale);
    if (scale_told(parameter)) {
      const WholeScale matrix =
          test_scale_of_one(parameter.found, parameter.expected, bounds.unit, allowance_.matrix);
      Comparison& comparison = parameter.comparison;
      comparison.passed = comparison.passed && matrix.passed;
      comparison.scale_found = matrix.passed ? std::min(comparison.scale_found, matrix.found_from) : 0;
    }
  }
  norm_ = norm_of(norms);
  if (allowance_.exact) return;
  whole_error_ = norm_of(apart_);
  allowance_.whole =
      std::max(kUnitsOfWhole * bounds.unit * norm_, allowance_.moved ? kRoundingFactor * norm_of(moves_) : 0);
  if (!alone_.empty())
    allowance_.whole = std::min(4 * norm_of(alone_apart_) + sums * norm_, allowance_.whole);
  scale_ = test_scale(own, reference, bounds.unit);
}

bool ComparedStep::scale_told(const Parameter& parameter) const {
  return allowance_.matrix > 0 && parameter.expected.dim() > 1 &&
         !held_to_floor(parameter.norm, parameter.unmeasured_scale);
}

std::vector<std::string> ComparedStep::off() const {
  std::vector<std::string> names;
  for (const auto& parameter : parameters_)
    if (!parameter.comparison.passed) names.push_back(parameter.name);
  if (names.empty() && !allowance_.exact && (!scale_.passed || !(whole_error_ <= allowance_.whole)))
    for (const auto& parameter : parameters_)
      if (parameter.norm != 0) names.push_back(parameter.name);
  return names;
}

bool ComparedStep::is_one(std::size_t i, const Prediction& prediction, double& off, double& grown) const {
  const Parameter& parameter = parameters_[i];
  const at::Tensor& predicted = prediction.gradient[i];
  const double error = distance(parameter.found, predicted);
  const double limit = allowance_.exact ? Bounds{}.exact * std::max(parameter.scale, norm_of(predicted))
                                        : allowance_.parameter[i] * prediction.growth[i];
  if (!(error <= limit)) return false;
  off += error * error;
  const double more = prediction.growth[i] * parameter.norm;
  grown += more * more;
  if (!scale_told(parameter)) return true;
  const double own = norm_of(predicted);
  return own <= 0 || scale_of_one_agrees(parameter.found, predicted, allowance_.bounds.unit,
                                         allowance_.matrix * more / own);
}

bool ComparedStep::is_whole(const Prediction& prediction, double off, double grown) const {
  if (allowance_.exact) return true;
  Tensors gradient;
  for (const Parameter& parameter : parameters_) gradient.push_back(parameter.found);
  const double unit = allowance_.whole / norm_;  // 0 / 0: nothing to be near to
  return std::sqrt(off) <= unit * std::sqrt(grown) &&
         scale_agrees(gradient, prediction.gradient, allowance_.bounds.unit);
}

bool ComparedStep::is(const Prediction& prediction) const {
  double off = 0, grown = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (!is_one(i, prediction, off, grown)) return false;
  return is_whole(prediction, off, grown);
}

std::optional<bool> ComparedStep::is(const std::vector<double>& weights,
                                     const std::vector<std::string>& names, Prediction* made) {
  if (!can_weight(weights)) return std::nullopt;
  Prediction prediction = right();
  double off = 0, grown = 0;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (contains(names, parameters_[i].name)) weight_one(i, weights, prediction);
    if (!is_one(i, prediction, off, grown)) return false;
  }
  if (!is_whole(prediction, off, grown)) return false;
  if (made) *made = std::move(prediction);
  return true;
}

Prediction ComparedStep::right() const {
  Prediction prediction;
  for (const Parameter& parameter : parameters_) prediction.gradient.push_back(parameter.expected);
  prediction.growth.assign(parameters_.size(), 1);
  return prediction;
}

Along ComparedStep::between(const Prediction& from, const Prediction& to) const {
  Tensors errors, direction, against_alone;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    errors.push_back(parameters_[i].found - from.gradient[i]);
    direction.push_back(to.gradient[i] - from.gradient[i]);
    // The rounding that one process and the run have in common cancels.
    if (!alone_.empty()) against_alone.push_back(errors.back() - (alone_[i] - parameters_[i].expected));
  }
  const double unit = allowance_.bounds.unit;
  const Along plain = along(errors, direction, from.gradient, unit);
  if (alone_.empty()) return plain;
  const Along relative = along(against_alone, direction, from.gradient, unit);
  return relative.scatter < plain.scatter ? relative : plain;
}

static bool uniform(const std::vector<double>& weights) {
  return std::ranges::all_of(
      weights, [&](double weight) { return std::abs(weight - weights[0]) <= 1e-12 * std::abs(weights[0]); });
}

bool ComparedStep::can_weight(const std::vector<double>& weights) { return uniform(weights) || find_parts(); }

void ComparedStep::weight_one(std::size_t i, const std::vector<double>& weights,
                              Prediction& prediction) const {
  if (uniform(weights)) {
    prediction.growth[i] = std::abs(weights[0]);
    prediction.gradient[i] = parameters_[i].expected * weights[0];
    return;
  }
  at::Tensor sum = at::zeros_like(parameters_[i].expected);
  double squares = 0, grown = 0;
  for (std::size_t c = 0; c < weights.size(); ++c) {
    sum.add_(cells_[c].part[i], weights[c]);
    const double part = cells_[c].norm[i];
    squares += part * part;
    grown += part * part * weights[c] * weights[c];
  }
  prediction.gradient[i] = sum;
  prediction.growth[i] = squares > 0 ? std::sqrt(grown / squares) : 1;
}

std::optional<Prediction> ComparedStep::weighted(const std::vector<double>& weights,
                                                 const std::vector<std::string>& names) {
  if (!can_weight(weights)) return std::nullopt;
  Prediction prediction = right();
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (contains(names, parameters_[i].name)) weight_one(i, weights, prediction);
  return prediction;
}

bool ComparedStep::finite() const { return std::ranges::all_of(parameters_, all_finite, &Parameter::found); }
bool ComparedStep::finite_loss() const {
  return !std::isinf(found().figures.loss) && !contains(found().not_numbers, "loss");
}

int ComparedStep::holders() const {
  return static_cast<int>(std::ranges::count_if(by_rank_, [](double targets) { return targets > 0; }));
}
int ComparedStep::home_of(int rank) const {
  const auto& [one, other] = setting_.swapped;
  return rank == one ? other : rank == other ? one : rank;
}
AxisSet ComparedStep::axis_set(const std::string& axis) const {
  if (axis == kAllRanks) return grid_.names();
  if (axis == kContextRanks) return present(grid_, kContextAxes);
  return present(grid_, {axis});
}
double ComparedStep::size_of(const std::string& axis) const {
  if (axis == kAllRanks && found().axes.empty()) return ranks();
  return grid_.size(axis_set(axis));
}
int ComparedStep::micro_batches(int rank) const {
  return static_cast<int>(counts_.at(static_cast<std::size_t>(rank)).size());
}
int ComparedStep::micro_batches() const {
  int sum = 0;
  for (const auto& one : counts_) sum += static_cast<int>(one.size());
  return sum;
}
int ComparedStep::most_micro_batches() const {
  std::size_t most = 0;
  for (const auto& one : counts_) most = std::max(most, one.size());
  return static_cast<int>(most);
}
bool ComparedStep::shows(std::size_t parameter) const {
  const Parameter& one = parameters_.at(parameter);
  return !one.comparison.passed || one.norm > allowance_.parameter.at(parameter);
}
bool ComparedStep::silent() const { return static_cast<int>(cells_.size()) < micro_batches(); }

bool ComparedStep::find_parts() {
  if (parts_ != Parts::kNotAsked) return parts_ == Parts::kFound;
  parts_ = Parts::kNone;
  if (!again_ || cells_.empty() || pair_.assigned_otherwise) return false;
  for (Cell& cell : cells_) {
    Experiment alone = setting_;
    alone.only_rank = cell.rank;
    alone.only_micro_batch = cell.micro_batch;
    alone.reference_only = true;
    const auto pair = again_(alone);
    if (!pair) return false;
    const auto& named = pair->expected.gradients;
    const std::map<std::string, at::Tensor> gradients(named.begin(), named.end());
    // Alone, its tokens are all there are: its mean is over its own.
    for (const auto& parameter : parameters_) {
      const at::Tensor part = gradients.at(parameter.name).to(at::kDouble);
      cell.part.push_back(pair->of_whole ? part : part * (cell.targets / targets_));
      cell.norm.push_back(norm_of(cell.part.back()));
    }
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Tensors parts;
    for (const Cell& cell : cells_) parts.push_back(cell.part[i]);
    const double missing = missing_in(parts, parameters_[i].expected);
    if (!(missing == 0 || missing / parameters_[i].scale <= limit())) return false;
  }
  parts_ = Parts::kFound;
  return true;
}

std::optional<ComparedStep> made_under(const Experiment& setting, const RunAgain& again) {
  auto pair = again ? again(setting) : std::nullopt;
  if (!pair) return std::nullopt;
  return ComparedStep(std::move(*pair), setting, again);
}

std::vector<ParameterVerdict> verdicts_of(const ComparedStep& one) {
  std::vector<ParameterVerdict> verdicts;
  for (const ComparedStep::Parameter& compared : one.parameters())
    verdicts.push_back({.name = compared.name,
                        .elements = compared.expected.numel(),
                        .norm = compared.norm,
                        .by_floor = compared.by_floor,
                        .alone_error = compared.alone_error,
                        .exact = compared.comparison,
                        .rounded = compared.comparison});
  return verdicts;
}

std::string text_of(const ComparedStep& one, const Experiment& experiment) {
  const auto& axes = one.found().axes;
  if (experiment.only_axis < 0 || experiment.only_axis >= static_cast<int>(axes.size()))
    return experiment.text();
  Experiment rest = experiment;
  rest.only_axis = -1;
  const auto text =
      fmt::format("all ranks along {}", axes[static_cast<std::size_t>(experiment.only_axis)].name);
  return rest == Experiment{} ? text : text + ", " + rest.text();
}

bool close_together(double a, double b, double limit) {
  return std::abs(a - b) <= limit * std::max(std::abs(a), std::abs(b));
}

std::string list_names(const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(kShown, names.size()); ++i) text += (i ? ", " : "") + names[i];
  if (names.size() > kShown) text += fmt::format(" and {} more", names.size() - kShown);
  return text;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

}  // namespace isograd
