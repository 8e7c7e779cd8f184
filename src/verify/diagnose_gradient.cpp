// Which known mistake explains the parameters that are off: each one predicts the gradient as a weighted sum
// of the micro-batches' parts. Those that fit are held against experiments in which they predict different
// things.
#include <algorithm>
#include <cmath>

#include "verify/case.hpp"

namespace isograd {
namespace {

bool logs_as(const Cause& cause, const Case& one) {
  const double found = one.found().figures.loss, expected = one.expected().figures.loss;
  if (cause.loss == Cause::Loss::kAny || std::isnan(found) || std::isnan(expected) || expected == 0)
    return true;
  const double wanted = cause.loss == Cause::Loss::kRight ? 1 : cause.weight(one, {});
  const bool is = std::abs(found / expected - wanted) <= std::max(one.limit(), 1e-9) * wanted;
  return cause.loss == Cause::Loss::kNotScaled ? !is || wanted == 1 : is;
}

double ratio_in(const Case& one, const std::string& name) {
  for (const auto& parameter : one.parameters())
    if (parameter.name == name) return parameter.comparison.ratio;
  return NAN;
}

// Does the cause explain the named parameters, here? Nothing: it cannot be told.
std::optional<bool> explains(Case& one, const Cause& cause, const std::vector<std::string>& names) {
  const auto off = misfit(one, cause, names);
  if (!off) return std::nullopt;
  return *off <= one.limit() && logs_as(cause, one);
}

std::string subject(const Case& one, const std::vector<std::string>& names) {
  if (names.size() == one.parameters().size()) return "all parameters";
  std::size_t meaningful = 0;
  for (const auto& parameter : one.parameters())
    if (parameter.expected.ne(0).any().item<bool>()) ++meaningful;
  if (names.size() == meaningful) return "all parameters";
  return fmt::format("only {} of {} parameters ({})", names.size(), one.parameters().size(),
                     list_names(names));
}

bool same_ids(const std::vector<Cause>& causes) {
  return std::all_of(causes.begin(), causes.end(), [&](const Cause& c) { return c.id == causes[0].id; });
}

std::string numbers_of(const Case& one, const std::vector<std::string>& names) {
  double low = HUGE_VAL, high = -HUGE_VAL, cosine = 1, error = 0;
  for (const auto& parameter : one.parameters()) {
    if (std::find(names.begin(), names.end(), parameter.name) == names.end()) continue;
    low = std::fmin(low, parameter.comparison.ratio);
    high = std::fmax(high, parameter.comparison.ratio);
    cosine = std::fmin(cosine, parameter.comparison.cosine);
    error = std::fmax(error, parameter.comparison.error);
  }
  return fmt::format("ratios {:.6g} to {:.6g}, cosine from {:.6g}, largest error {:.3g} of {:.3g} allowed",
                     low, high, cosine, error, one.limit());
}

// The weights of the ranks that come nearest, by least squares: numbers for what no known mistake explains.
std::string fitted_weights(Case& one, const std::vector<std::string>& names) {
  if (!one.find_parts()) return "";
  std::vector<at::Tensor> columns(static_cast<std::size_t>(one.ranks())), wanted;
  for (std::size_t i = 0; i < one.parameters().size(); ++i) {
    const auto& parameter = one.parameters()[i];
    if (std::find(names.begin(), names.end(), parameter.name) == names.end()) continue;
    wanted.push_back(parameter.found.reshape({-1}) / parameter.scale);
    for (std::size_t rank = 0; rank < columns.size(); ++rank) {
      at::Tensor sum = at::zeros_like(parameter.found);
      for (const auto& cell : one.cells())
        if (cell.rank == static_cast<int>(rank)) sum += cell.part[i];
      sum = sum.reshape({-1}) / parameter.scale;
      columns[rank] = columns[rank].defined() ? at::cat({columns[rank], sum}) : sum;
    }
  }
  const at::Tensor matrix = at::stack(columns, 1), target = at::cat(wanted);
  if (matrix.size(0) < 2 * matrix.size(1)) return "";
  const at::Tensor normal = at::matmul(matrix.t(), matrix) + 1e-14 * at::eye(matrix.size(1), at::kDouble);
  const at::Tensor weights = at::linalg_solve(normal, at::matmul(matrix.t(), target));
  const double left = (at::matmul(matrix, weights) - target).norm().item<double>();
  std::string text;
  for (std::int64_t rank = 0; rank < weights.size(0); ++rank)
    text += fmt::format("{}{:.6g}", rank ? ", " : "", weights[rank].item<double>());
  return fmt::format("nearest weights of the ranks' parts: {}; {:.3g} of the scale stays unexplained", text,
                     left);
}

// What is worth running, in this order, as long as several causes fit.
std::vector<Experiment> trials(const Case& one, const std::vector<Cause>& fitting) {
  using Counts = Experiment::Counts;
  std::vector<Experiment> all = {{.counts = Counts::kUneven},
                                 {.one_micro_batch = true},
                                 {.split_micro_batches = true},
                                 {.counts = Counts::kEqual}};
  std::vector<int> holders;
  for (int rank = 0; rank < one.ranks(); ++rank)
    if (one.targets_of(rank) > 0) holders.push_back(rank);
  // Whose part is missing, the rank's or that of what it has?
  for (const Cause& cause : fitting) {
    if (cause.id != "missing_data_part") continue;
    for (const int other : holders)
      if (other != cause.rank) {
        all.push_back({.swapped = {cause.rank, other}});
        break;
      }
  }
  if (holders.size() > 1) all.push_back({.empty_rank = holders.back()});
  const auto& axes = one.found().axes;
  // Where all ranks lie along an axis already it would be the same step.
  for (std::size_t i = 0; i < axes.size(); ++i)
    if (axes[i].second < one.size_of(kAllRanks)) all.push_back({.only_axis = static_cast<int>(i)});
  return all;
}

}  // namespace

std::optional<Finding> diagnose_unsummed(Case& one) {
  const std::vector<std::string> names = one.off();
  if (names.empty() || !one.finite()) return std::nullopt;
  for (const Cause& cause : unsummed_causes(one))
    if (explains(one, cause, names).value_or(false))
      return Finding{cause.id,
                     subject(one, names) + ": " + cause.sentence(one),
                     {fmt::format("rank 0 has the sum of its own parts along that axis; as given: {}",
                                  numbers_of(one, names))}};
  return std::nullopt;
}

std::vector<Finding> diagnose_gradient(Case& one, const RunAgain& again) {
  const std::vector<std::string> names = one.off();
  Finding finding;
  if (!one.finite()) {
    std::vector<std::string> broken;
    for (const auto& parameter : one.parameters())
      if (!parameter.found.isfinite().all().item<bool>()) broken.push_back(parameter.name);
    return {
        {"not_finite", fmt::format("not finite: {} parameters ({})", broken.size(), list_names(broken)), {}}};
  }

  // A term of the loss that is off by a factor, and nothing but what it reaches.
  const bool all = subject(one, names) == "all parameters";
  for (const auto& [name, expected] : one.expected().terms)
    for (const auto& [own, value] : one.found().terms) {
      if (own != name || expected == 0 || one.expected().terms.size() < 2) continue;
      const double ratio = value / expected;
      if (all || std::abs(ratio - 1) <= std::max(one.limit(), 1e-9)) continue;
      const std::string factor = factors_of(one, std::max(ratio, 1 / ratio));
      return {{"term_scaled",
               fmt::format("the loss term {} is scaled by {}{}: it reaches {}", name, ratio_text(ratio),
                           factor.empty() ? "" : ", " + factor, list_names(names)),
               {numbers_of(one, names)}}};
    }

  std::vector<Cause> fitting;
  for (auto& cause : causes_of(one))
    if (explains(one, cause, names).value_or(false)) fitting.push_back(std::move(cause));
  std::vector<std::string> evidence = {fmt::format("as given: {}", numbers_of(one, names))};
  // Each candidate has to hold where the others predict something else.
  bool tested = false, emptied = false, swapped = false;
  for (const Experiment& setting : trials(one, fitting)) {
    if (fitting.empty() || !again) break;
    if (tested && same_ids(fitting) && !(setting.only_axis >= 0 && fitting.size() > 1)) continue;
    auto pair = again(setting);
    if (!pair) continue;
    Case other(std::move(*pair), setting, again);
    std::vector<Cause> still;
    std::string dropped;
    for (auto& cause : fitting) {
      if (explains(other, cause, names).value_or(true))
        still.push_back(std::move(cause));
      else
        dropped += " not " + cause.id + ";";
    }
    evidence.push_back(fmt::format("{}: ratio of {} {:.6g}, {} of {} parameters off;{}",
                                   text_of(one, setting), names[0], ratio_in(other, names[0]),
                                   other.off().size(), other.parameters().size(),
                                   dropped.empty() ? " still fits" : dropped));
    fitting = std::move(still);
    tested = true;
    emptied = emptied || setting.empty_rank >= 0 || setting.only_axis >= 0;
    swapped = swapped || setting.swapped[0] >= 0;
  }
  // The twins of commoner causes, the same numbers in all but one experiment, count where that could be made.
  const auto is_twin = [&](const Cause& cause) {
    return (cause.id == "missing_data_part" && !swapped) ||
           (cause.id == "averaged_over_holders" && !emptied && one.holders() == one.ranks());
  };
  if (!std::all_of(fitting.begin(), fitting.end(), is_twin)) std::erase_if(fitting, is_twin);
  if (!fitting.empty()) {
    const bool decided = same_ids(fitting);
    std::string text;
    for (std::size_t i = 0; i < fitting.size(); ++i) {
      const Cause& cause = fitting[i];
      if (i > 0 && decided && !cause.axis.empty())
        text += fmt::format(" or {} ({:.0f})", cause.axis, one.size_of(cause.axis));
      else
        text += (text.empty() ? "" : "; or ") + cause.sentence(one);
    }
    finding.id = decided ? fitting[0].id : "undecided";
    const bool factor = fitting[0].id.find("axis") != std::string::npos;
    if (!all && factor && decided) finding.id = "some_parameters_scaled";
    const std::string verb = std::isdigit(static_cast<unsigned char>(text[0])) ? " scaled by " : ": ";
    finding.sentence = subject(one, names) + verb + text;
    finding.evidence = evidence;
    return {finding};
  }

  if (again) {
    if (auto leak = diagnose_leak(one, again)) {
      leak->evidence.insert(leak->evidence.begin(), evidence.begin(), evidence.end());
      return {*leak};
    }
    if (auto together = diagnose_composition(one, again, subject(one, names), evidence)) return {*together};
  }

  // One ratio for all of them, of no known origin; or several.
  const double first = ratio_in(one, names[0]);
  const Cause scaled{.id = "scaled",
                     .weight = [first](const Case&, const Case::Cell&) { return first; },
                     .sentence = nullptr};
  const bool one_ratio =
      misfit(one, scaled, names).value_or(HUGE_VAL) <= one.limit() && std::abs(first - 1) > one.limit();
  if (one_ratio) {
    finding.id = all ? "unknown" : "some_parameters_scaled";
    const std::string factor = factors_of(one, std::max(first, 1 / first));
    finding.sentence = fmt::format("{} scaled by {}{}", subject(one, names), ratio_text(first),
                                   factor.empty() ? ", which is no size in the run" : ": " + factor);
  } else {
    finding.id = "unknown";
    finding.sentence =
        fmt::format("unknown pattern: the direction of {} of {} parameters differs; {}: {}", names.size(),
                    one.parameters().size(), numbers_of(one, names), list_names(names));
    const std::string weights = fitted_weights(one, names);
    if (!weights.empty()) evidence.push_back(weights);
  }
  finding.evidence = evidence;
  return {finding};
}

}  // namespace isograd
