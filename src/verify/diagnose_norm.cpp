// The gradient is right: whether its norm is, and whose norm it is instead.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "verify/compared_step.hpp"

namespace isograd {
namespace {

// What the ranks say of the norm. `owned` by rank: of the elements that it owns.
struct Norms {
  std::vector<double> found, owned;

  explicit Norms(const StepDump& dump) {
    for (const auto& rank : dump.ranks) {
      if (!std::isnan(rank.norm)) found.push_back(rank.norm);
      owned.push_back(rank.owned_norm);
    }
  }
  bool all_found() const { return found.size() > 1 && found.size() == owned.size(); }
};

// By rank, the norm of what is owned by the ranks at its place along `axis`; nothing where the axes do not
// say which these are.
std::vector<double> norms_without(const ComparedStep& one, const Norms& norms, const std::string& axis) {
  const Grid& grid = one.grid();
  if (grid.ranks() != static_cast<int>(norms.owned.size())) return {};
  const AxisSet others = without(grid.names(), one.axis_set(axis));
  std::vector<double> result;
  for (int rank = 0; rank < grid.ranks(); ++rank) {
    double squares = 0;
    for (const int other : grid.ranks_along(others, rank)) {
      const double own = norms.owned[static_cast<std::size_t>(other)];
      squares += own * own;
    }
    result.push_back(std::sqrt(squares));
  }
  return result;
}

// The axis over which squares were not summed, in words, where each rank has the norm of the others' sums.
std::optional<std::string> not_summed_over(const ComparedStep& one, const Norms& norms, double limit) {
  const auto have = [&](const std::vector<double>& own) {
    return own.size() == norms.found.size() &&
           std::equal(own.begin(), own.end(), norms.found.begin(),
                      [&](double a, double b) { return close_together(a, b, limit); });
  };
  if (!norms.all_found()) return std::nullopt;
  if (have(norms.owned)) return "each rank has the norm of the part it keeps";
  for (const std::string& axis : long_axes(one))
    if (have(norms_without(one, norms, axis)))
      return fmt::format("squares are not summed over {}, whose ranks each have the norm of their own part",
                         name_of(one, axis));
  return std::nullopt;
}

// Likewise where the norm is the mean of those.
std::optional<std::string> averaged_over(const ComparedStep& one, const Norms& norms, double found,
                                         double limit) {
  const auto is_mean_of = [&](const std::vector<double>& parts) {
    double sum = 0;
    for (const double part : parts) sum += part;
    return parts.size() > 1 && close_together(found * static_cast<double>(parts.size()), sum, limit);
  };
  if (is_mean_of(norms.owned)) return "the mean of the norms of the ranks' parts";
  // Every part comes as often as there are ranks at its place.
  for (const std::string& axis : long_axes(one))
    if (is_mean_of(norms_without(one, norms, axis)))
      return fmt::format("the mean over {} of the norms of its ranks' parts", name_of(one, axis));
  return std::nullopt;
}

}  // namespace

std::vector<Finding> diagnose_norm(const ComparedStep& one) {
  const double limit = tolerance(one);
  const double expected = norm_to_expect(one, limit);
  const Norms norms(one.found());
  double found = one.found().figures.norm;
  if (std::isnan(found) && !norms.found.empty()) found = norms.found[0];
  bool right = std::isnan(found) || close_together(found, expected, limit), agree = true;
  for (const double norm : norms.found) {
    right = right && close_together(norm, expected, limit);
    agree = agree && close_together(norm, norms.found[0], limit);
  }
  std::int64_t least = 1, most = 1;
  for (const auto& [low, high] : one.found().owners) {
    least = std::min(least, low);
    most = std::max(most, high);
  }
  const auto once = fmt::format("elements count on {} to {} ranks", least, most);
  if (right) return diagnose_parts_of_norm(one.found(), "", expected, limit);
  const double ratio = found / expected;
  const auto numbers = fmt::format("norm {:.9g}, expected {:.9g} (ratio {:.9g})", found, expected, ratio);
  if (!agree)
    if (const auto how = not_summed_over(one, norms, limit))
      return {{"norm_of_own_shard",
               numbers + ": " + *how,
               {fmt::format("norms by rank: {:.6g}", fmt::join(norms.found, ", "))}}};
  if (!agree) return {{"norm_differs", numbers + ", and other norms on other ranks", {}}};
  if (most > 1 && close_together(found, norm_of(norms.owned), limit))
    return {{"norm_counts_replicas", numbers + ": " + once, {fmt::format("ratio² = {:.9g}", ratio * ratio)}}};
  const std::string factor = factors_of(one, ratio * ratio);
  if (!factor.empty())
    return {
        {"norm_counts_replicas",
         fmt::format("{}: the square is {} times too large: {}", numbers, ratio_text(ratio * ratio), factor),
         {once}}};
  if (const auto how = averaged_over(one, norms, found, limit))
    return {{"norms_averaged",
             numbers + ": " + *how,
             {fmt::format("norms of parts: {:.6g}", fmt::join(norms.owned, ", "))}}};
  Tensors own_gradient;
  for (const auto& parameter : one.parameters()) own_gradient.push_back(parameter.found);
  const bool of_own = close_together(found, norm_of(own_gradient), limit);
  return {{"norm_differs",
           numbers + (of_own ? ": that is the norm of the gradient found, whose size is off, though this "
                               "precision hides in which parameters"
                             : ""),
           {one.found().owners.empty() ? "" : once}}};
}

}  // namespace isograd
