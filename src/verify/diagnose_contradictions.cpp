// What a dump records against what it records elsewhere, on both sides: a step that contradicts itself is no
// right one, and no reference.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "verify/case.hpp"

namespace isograd {
namespace {

bool as_large(double a, double b, double limit) {
  return std::abs(a - b) <= limit * std::max(std::abs(a), std::abs(b));
}

double norm_recorded_for(const StepDump& dump) {
  Tensors gradient;
  for (const auto& [name, tensor] : dump.gradients) gradient.push_back(tensor.to(at::kDouble));
  return norm_of(gradient);
}

// Each norm of the whole gradient that was recorded is that of the gradient recorded.
std::vector<Finding> diagnose_own_norm(const StepDump& dump, const char* side, double limit) {
  const double own = norm_recorded_for(dump);
  std::vector<std::string> others;
  const auto note = [&](const std::string& key, double norm) {
    if (!std::isnan(norm) && !as_large(norm, own, limit))
      others.push_back(fmt::format("{} {:.9g}", key, norm));
  };
  note("norm", dump.figures.norm);
  for (std::size_t r = 0; r < dump.ranks.size(); ++r)
    note(fmt::format("ranks.{}.norm", r), dump.ranks[r].norm);
  if (others.empty()) return {};
  return {{"norm_differs",
           fmt::format("{} recorded{}, where the gradient recorded has a norm of {:.9g}", list_names(others),
                       side, own),
           {}}};
}

// The shares of `dump`, by the parameters of both sides, against the gradient that they are parts of.
std::vector<Finding> diagnose_shares(const Case& one, const StepDump& dump, const char* side, bool of_found,
                                     std::vector<std::string>* notices) {
  if (dump.shares.empty()) return {};
  std::size_t missing = 0;
  for (std::size_t rank = 0; rank < dump.counts.size(); ++rank)
    for (std::size_t i = 0; i < dump.counts[rank].size(); ++i)
      if (dump.counts[rank][i] > 0 &&
          (rank >= dump.shares.size() || i >= dump.shares[rank].size() || dump.shares[rank][i].empty()))
        ++missing;
  const auto say = [&](std::string text) {
    if (notices) notices->push_back(std::move(text));
  };
  if (missing > 0) {
    say(fmt::format(
        "the shares{} are not complete, {} micro-batches with targets have none: wrong weights of "
        "ranks and micro-batches are not told",
        side, missing));
    return {};
  }
  std::map<std::string, std::vector<at::Tensor>> parts;
  for (const auto& rank : dump.shares)
    for (const auto& share : rank)
      for (const auto& [name, tensor] : share) parts[name].push_back(tensor.to(at::kDouble));
  std::vector<std::string> others, blurred;
  double worst = 0;
  for (const Case::Parameter& parameter : one.parameters()) {
    at::Tensor left = -(of_found ? parameter.found : parameter.expected);
    std::vector<double> sizes = {parameter.scale};
    for (const at::Tensor& part : parts[parameter.name]) {
      left = left + part;
      sizes.push_back(norm_of(part));
    }
    const double off = norm_of(left);
    if (off <= one.limit() * parameter.scale) continue;
    // Each share is rounded by itself, and may be larger than their sum.
    const bool rounded = off <= one.limit() * norm_of(sizes);
    (rounded ? blurred : others).push_back(parameter.name);
    if (!rounded) worst = std::fmax(worst, off / parameter.scale);
  }
  if (!others.empty())
    return {{"shares_differ",
             fmt::format("the shares{} of ranks and micro-batches do not add up to the gradient: {}", side,
                         list_names(others)),
             {fmt::format("{:.3g} of it is left, {:.3g} allowed", worst, one.limit())}}};
  if (!blurred.empty())
    say(fmt::format(
        "the shares{} cancel and add up to the gradient only within their own rounding ({}): wrong "
        "weights of ranks and micro-batches are not told",
        side, list_names(blurred)));
  return {};
}

}  // namespace

std::vector<Finding> diagnose_parts_of_norm(const StepDump& dump, const char* side, double norm,
                                            double limit) {
  std::int64_t least = 1, most = 1;
  for (const auto& [low, high] : dump.owners) {
    least = std::min(least, low);
    most = std::max(most, high);
  }
  if (least != 1 || most != 1)
    return {{"elements_not_owned_once",
             fmt::format("elements count on {} to {} ranks{}", least, most, side),
             {}}};
  std::vector<double> owned;
  bool all = !dump.ranks.empty();
  double largest = 0;
  for (const auto& rank : dump.ranks) {
    owned.push_back(rank.owned_norm);
    all = all && !std::isnan(rank.owned_norm);
    largest = std::fmax(largest, rank.owned_norm);
  }
  std::size_t ranks = dump.counts.size(), along = 1;
  for (const auto& [axis, size] : dump.axes) along *= static_cast<std::size_t>(size);
  all = all && owned.size() >= std::max(ranks, along);
  // Parts of a gradient whose elements count once make it up. Where nobody says how often each counts, it may
  // be more than once, but not less; and no part is larger than all of them.
  const double sum = all ? norm_of(owned) : NAN;
  const bool once = all && !dump.owners.empty() && !as_large(sum, norm, limit);
  if (once || sum < norm * (1 - limit) || largest > norm * (1 + limit))
    return {{"norm_differs",
             fmt::format("the ranks' parts{} do not make up the gradient's norm of {:.9g}", side, norm),
             {fmt::format("norms of parts: {:.6g}", fmt::join(owned, ", "))}}};
  return {};
}

double norm_to_expect(const Case& one, double limit) {
  const double recorded = one.expected().figures.norm, own = norm_recorded_for(one.expected());
  return as_large(recorded, own, limit) ? recorded : norm_of(one.right().gradient);  // not for NaN
}

std::vector<Finding> diagnose_contradictions(const Case& one, double limit,
                                             std::vector<std::string>* notices) {
  std::vector<Finding> findings;
  const auto add = [&](std::vector<Finding> more) {
    std::move(more.begin(), more.end(), std::back_inserter(findings));
  };
  const StepDump &found = one.found(), &expected = one.expected();
  constexpr const char* kTheirs = " of the reference";
  add(diagnose_own_norm(found, "", limit));
  add(diagnose_own_norm(expected, kTheirs, limit));
  add(diagnose_parts_of_norm(expected, kTheirs, norm_recorded_for(expected), limit));
  add(diagnose_counts(found, ""));
  add(diagnose_counts(expected, kTheirs));
  if (expected.figures.clip_coefficient > 1 + limit)
    add({{"clip_differs",
          fmt::format("a clip coefficient of {:.9g}{} is reported: no clip makes longer",
                      expected.figures.clip_coefficient, kTheirs),
          {}}});
  add(diagnose_shares(one, found, "", true, notices));
  add(diagnose_shares(one, expected, kTheirs, false, notices));
  return findings;
}

}  // namespace isograd
