// The gradient is right: what else of the step may be wrong.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "verify/compared_step.hpp"

namespace isograd {
namespace {

// What was recorded and is not finite: nobody could act on it.
std::vector<Finding> diagnose_not_finite(const ComparedStep& one) {
  std::vector<std::string> broken;
  for (const auto& [side, dump] : {std::pair{"", &one.found()}, {" of the reference", &one.expected()}}) {
    std::vector<std::string> keys = dump->not_numbers;
    const StepFigures& figures = dump->figures;
    for (const auto& [key, value] : {std::pair{"loss", figures.loss},
                                     {"norm", figures.norm},
                                     {"clip_coefficient", figures.clip_coefficient}})
      if (std::isinf(value)) keys.emplace_back(key);
    for (const auto& [name, value] : dump->terms)
      if (std::isinf(value)) keys.push_back("terms." + name);
    for (const auto& [name, value] : dump->scales)
      if (std::isinf(value)) keys.push_back("scales." + name);
    for (std::size_t r = 0; r < dump->ranks.size(); ++r) {
      const StepDump::RankView& rank = dump->ranks[r];
      for (const auto& [key, value] : {std::pair{"norm", rank.norm},
                                       {"owned_norm", rank.owned_norm},
                                       {"spread", rank.spread},
                                       {"bytes_moved", rank.bytes_moved}})
        if (std::isinf(value)) keys.push_back(fmt::format("ranks.{}.{}", r, key));
    }
    for (const auto& [name, applied] : dump->applied)
      if (!all_finite(applied)) keys.push_back("applied " + name);
    for (const auto& key : keys) broken.push_back(key + side);
  }
  if (broken.empty()) return {};
  return {{"not_finite", fmt::format("not finite: {}; the gradient is right", list_names(broken)), {}}};
}

// Of numbers of size 1, what their rounding leaves of a sum that cancels.
constexpr double kUnitsOfCancelled = 16;

// By how much terms, and a loss that is made of them, may be off whatever their own size: beside a larger
// term the rounding of its sums shows in one that is nearly zero.
double floor_of_terms(const ComparedStep& one) {
  constexpr double kExact = 1e-12;
  const double of_largest =
      one.allowance().exact ? kExact : std::min(one.limit(), kUnitsOfCancelled * one.allowance().bounds.unit);
  double largest = std::isnan(one.expected().figures.loss) ? 0 : std::abs(one.expected().figures.loss);
  for (const auto& [name, value] : one.expected().terms) largest = std::fmax(largest, std::abs(value));
  return of_largest * largest;
}

// Within what rounding may do to a loss. Of one that cancels, without its terms, that is known for numbers of
// size 1 alone: where both sides are nothing beside them.
bool same_loss(const ComparedStep& one, double found, double expected) {
  if (close_together(found, expected, tolerance(one))) return true;
  if (!one.expected().terms.empty()) return std::abs(found - expected) <= floor_of_terms(one);
  const double unit = one.allowance().exact ? 0x1p-53 : one.allowance().bounds.unit;
  return std::max(std::abs(found), std::abs(expected)) < kUnitsOfCancelled * unit;
}

std::vector<Finding> diagnose_loss(const ComparedStep& one) {
  const double found = one.found().figures.loss, expected = one.expected().figures.loss;
  const auto terms = other_terms(one);
  const bool recorded = !std::isnan(expected) && !std::isnan(found);
  if (!recorded || same_loss(one, found, expected)) {
    if (terms.empty()) return {};
    return {{"loss_differs",
             fmt::format("the gradient is right{}, terms of the loss are not: {}",
                         recorded ? " and so is the loss" : "", list_names(terms)),
             {}}};
  }
  const double ratio = found / expected;
  const std::string factor = factors_of(one, std::max(ratio, 1 / ratio));
  return {{factor.empty() ? "loss_differs" : "loss_scaled",
           fmt::format("loss {:.9g}, expected {:.9g} (ratio {}{}); the gradient is right", found, expected,
                       ratio_text(ratio), factor.empty() ? "" : ": " + factor),
           {terms.empty() ? "" : "terms: " + list_names(terms)}}};
}

// Parameters from which another amount is taken away than there should be. What the reference takes away is
// right, whatever it is made of: weight decay belongs to it. Where the reference does not say, it is the
// run's own gradient, whose rounding it shares, times the coefficient; NaN: that is not known. `unbelieved`:
// where the reference contradicts itself.
std::vector<std::string> applied_otherwise(const ComparedStep& one, double coefficient, double limit,
                                           const std::vector<std::string>& unbelieved) {
  std::map<std::string, at::Tensor> references;
  Tensors taken;
  for (const auto& [name, tensor] : one.expected().applied)
    if (std::find(unbelieved.begin(), unbelieved.end(), name) == unbelieved.end())
      taken.push_back(references[name] = tensor.to(at::kDouble));
  double elements = 0;
  for (const auto& parameter : one.parameters()) elements += static_cast<double>(parameter.expected.numel());
  // What a parameter with next to no gradient is held to: an update is known to the rounding of parameters.
  const double usual = (taken.empty() ? std::abs(coefficient) * one.norm() : norm_of(taken)) /
                       std::sqrt(std::max(elements, 1.0));
  std::vector<std::string> others;
  for (const auto& [name, tensor] : one.found().applied)
    for (const auto& parameter : one.parameters()) {
      if (parameter.name != name) continue;
      const auto reference = references.find(name);
      const bool known = reference != references.end() && reference->second.sizes() == tensor.sizes();
      if (!known && std::isnan(coefficient)) continue;
      const at::Tensor wanted = known ? reference->second : parameter.found * coefficient;
      const double scale = std::fmax(norm_of(wanted), usual * std::sqrt(static_cast<double>(wanted.numel())));
      if (!(distance(tensor, wanted) <= limit * scale)) others.push_back(name);
    }
  return others;
}

// How the gradient was applied.
std::vector<Finding> diagnose_clip(const ComparedStep& one, const std::vector<std::string>& unbelieved) {
  const double own = one.found().figures.clip_coefficient;
  const double limit = tolerance(one);
  // Where the reference has none: what the run itself says it did.
  const double wanted = one.expected().figures.clip_coefficient;
  const double coefficient = std::isnan(wanted) ? own : wanted;
  std::vector<std::pair<double, std::vector<std::string>>> groups;  // applied / gradient
  std::vector<std::string> bent;                                    // applied in another direction
  auto others = applied_otherwise(one, coefficient, 10 * limit, unbelieved);
  const bool as_reference = others.empty() && one.expected().applied.size() > unbelieved.size();
  for (std::size_t i = 0; i < one.found().applied.size() && !as_reference; ++i) {
    const auto& [name, tensor] = one.found().applied[i];
    for (const auto& parameter : one.parameters()) {
      // Of next to nothing there is no ratio.
      if (parameter.name != name || parameter.expected.eq(0).all().item<bool>() ||
          parameter.expected.norm().item<double>() < parameter.scale / 2)
        continue;
      // Against the run's own gradient, whose rounding it shares.
      const at::Tensor applied = tensor.to(at::kDouble);
      const double ratio =
          ((applied * parameter.found).sum() / parameter.found.square().sum()).item<double>();
      auto group = std::find_if(groups.begin(), groups.end(),
                                [&](const auto& g) { return close_together(g.first, ratio, 10 * limit); });
      if (group == groups.end()) group = groups.insert(groups.end(), {ratio, {}});
      group->second.push_back(name);
      if (!(distance(applied, parameter.found, ratio) <=
            10 * limit * std::abs(ratio) * norm_of(parameter.found)))
        bent.push_back(name);
    }
  }
  // Nobody says how much is applied, but all agree: what is too small for a ratio of its own goes by it.
  if (std::isnan(coefficient) && groups.size() == 1 && bent.empty())
    others = applied_otherwise(one, groups[0].first, 10 * limit, unbelieved);
  const auto numbers = fmt::format("expected coefficient {:.9g}, reported {:.9g}", coefficient, own);
  // A clip only makes shorter, and takes nothing away altogether; and the coefficient is what it reports.
  bool clips = bent.empty();
  std::vector<std::string> evidence = {numbers};
  for (const auto& [ratio, names] : groups) {
    clips = clips && ratio <= 1 + 10 * limit && ratio > 10 * limit;
    evidence.push_back(fmt::format("applied {:.9g} of the gradient: {}", ratio, list_names(names)));
  }
  const bool reports = close_together(own, coefficient, limit) && coefficient > 0;
  const bool wrong =
      groups.size() > 1 || !bent.empty() ||
      (groups.size() == 1 && reports && !close_together(groups[0].first, coefficient, 10 * limit));
  if (wrong && (reports || !bent.empty()) &&
      (!clips || (groups.size() == 1 && !close_together(groups[0].first, 1, 10 * limit)))) {
    const std::string how =
        !bent.empty() ? "is no multiple of the gradient, in " + list_names(bent)
        : groups.size() == 1
            ? fmt::format("is {} times what it should be", ratio_text(groups[0].first / coefficient))
            : "is another multiple of the gradient in different parameters";
    return {{"optimizer_differs",
             fmt::format("the gradient {} right, but what an update of plain SGD takes away {}",
                         reports ? "and the clip coefficient are" : "is", how),
             evidence}};
  }
  if (groups.size() > 1) {
    return {{"groups_clipped_apart",
             fmt::format("the gradient is right, but {} groups of parameters are clipped by coefficients of "
                         "their own",
                         groups.size()),
             evidence}};
  }
  if (groups.size() == 1 && !std::isnan(coefficient) &&
      !close_together(groups[0].first, coefficient, 10 * limit)) {
    if (close_together(groups[0].first, 1, 10 * limit))
      return {{"clip_not_applied",
               "the gradient is applied as it is, though its norm exceeds the limit",
               {numbers}}};
    return {
        {"clip_differs", fmt::format("the gradient is applied {:.9g} times", groups[0].first), {numbers}}};
  }
  if (!std::isnan(own) && !std::isnan(coefficient) && !close_together(own, coefficient, limit))
    return {{"clip_differs", "another clip coefficient is reported: " + numbers, {}}};
  if (own > 1 + limit)
    return {{"clip_differs",
             fmt::format("a clip coefficient of {:.9g} is reported: no clip makes longer", own),
             {}}};
  // Whatever it is: not what the reference takes away, or what no clip makes of a gradient.
  if (!others.empty() || !clips)
    return {{"optimizer_differs",
             "the gradient is right, but an update of plain SGD takes something else away" +
                 (others.empty() ? std::string() : ": from " + list_names(others)),
             evidence}};
  return {};
}

std::vector<Finding> diagnose_traffic(const ComparedStep& one) {
  if (one.expected().ranks.empty() || one.found().ranks.empty()) return {};
  const double found = one.found().ranks[0].bytes_moved, expected = one.expected().ranks[0].bytes_moved;
  if (std::isnan(found) || !(expected > 0)) return {};  // one process moves nothing, and asks for nothing
  // Each message is rounded to whole bytes, and none but whole parameters' are uneven.
  const double rounding = std::max(1.0, static_cast<double>(one.parameters().size()));
  if (std::abs(found - expected) <= rounding) return {};
  constexpr double kSame = 1e-3;
  const double ratio = found / expected;
  const bool rounds = one.most_micro_batches() > 1 && close_together(ratio, one.most_micro_batches(), kSame);
  return {
      {rounds ? "reduced_every_micro_batch" : "traffic_differs",
       fmt::format("right values, but {:.0f} bytes moved where {:.0f} are needed (ratio {:.6g}{})", found,
                   expected, ratio,
                   rounds ? fmt::format(": {} micro-batches, each reduced", one.most_micro_batches()) : ""),
       {}}};
}

}  // namespace

std::vector<std::string> other_terms(const ComparedStep& one) {
  const double least = floor_of_terms(one);
  std::vector<std::string> others;
  for (const auto& [name, expected] : one.expected().terms)
    for (const auto& [own, found] : one.found().terms) {
      if (own != name || std::isnan(found) || std::isnan(expected)) continue;
      if (!close_together(found, expected, tolerance(one)) && !(std::abs(found - expected) <= least))
        others.push_back(fmt::format("{} {:.9g}, expected {:.9g}", name, found, expected));
    }
  return others;
}

// Where the figures come from sums of many numbers, fp64 dumps differ by more than one rounding.
double tolerance(const ComparedStep& one) {
  return std::max(one.limit(), 1e-9);
}

std::vector<Finding> diagnose_figures(const ComparedStep& one, std::vector<std::string>* notices) {
  std::vector<Finding> findings = diagnose_not_finite(one);
  if (!findings.empty()) return findings;  // nothing was updated
  findings = diagnose_loss(one);
  const auto norm = diagnose_norm(one);
  findings.insert(findings.end(), norm.begin(), norm.end());
  OwnUpdate reference = diagnose_own_update(one, false, notices);
  const auto clip = diagnose_clip(one, reference.wrong);
  for (const auto& finding : clip)
    // A wrong norm makes a wrong coefficient: said once.
    if (norm.empty() || finding.id == "groups_clipped_apart") findings.push_back(finding);
  // What two dumps say alike contradicts both of their gradients alike.
  if (clip.empty())
    for (auto& finding : diagnose_own_update(one, true, nullptr).findings)
      findings.push_back(std::move(finding));
  for (auto& finding : reference.findings) findings.push_back(std::move(finding));
  for (auto& finding : diagnose_traffic(one)) findings.push_back(std::move(finding));
  return findings;
}

}  // namespace isograd
