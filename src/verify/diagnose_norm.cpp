// The gradient is right: whether its norm is, and whose norm it is instead.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>

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

// Likewise where it is the largest of those.
std::optional<std::string> largest_of(const ComparedStep& one, const Norms& norms, double found,
                                      double limit) {
  const auto is_largest_of = [&](const std::vector<double>& parts) {
    return parts.size() > 1 && close_together(found, *std::max_element(parts.begin(), parts.end()), limit);
  };
  if (is_largest_of(norms.owned)) return "the largest of the norms of the ranks' parts";
  for (const std::string& axis : long_axes(one))
    if (is_largest_of(norms_without(one, norms, axis)))
      return fmt::format("the largest over {} of the norms of its ranks' parts", name_of(one, axis));
  return std::nullopt;
}

// The axis along which each rank counts its own rows of what is cut along it and all of the rest: with n_p
// the norm at place p of P, D that of the rest and N of the whole gradient, n_p² = D² + (p's rows)², so that
// Σ n_p² = N² + (P - 1) D². All R ranks together have R / P times that.
std::optional<std::string> cut_not_summed(const ComparedStep& one, const Norms& norms, double expected,
                                          double limit) {
  if (!norms.all_found()) return std::nullopt;
  std::set<std::string> tried;
  for (const StepDump::CutParameter& first : one.found().cut) {
    const auto& [axis, places] = first.axis;
    if (!tried.insert(axis).second) continue;
    const auto ranks = static_cast<double>(norms.found.size());
    double all = 0, rest = 0;  // squares
    for (const double norm : norms.found) all += norm * norm;
    for (const ComparedStep::Parameter& parameter : one.parameters()) {
      const bool is_cut = std::any_of(one.found().cut.begin(), one.found().cut.end(), [&](const auto& cut) {
        return cut.name == parameter.name && cut.axis.name == axis;
      });
      if (!is_cut) rest += std::pow(norm_of(parameter.found), 2);
    }
    // What is left of a difference is known to its terms' share of it, at most P times the limit.
    const double whole = std::sqrt(std::fmax(0, places * all - ranks * (places - 1) * rest));
    if (close_together(whole, std::sqrt(ranks) * expected, places * limit))
      return fmt::format(
          "each rank along {} ({}) counts its own part of what is cut along it, and all of the rest", axis,
          places);
  }
  return std::nullopt;
}

// "elements count on 1 to 2 ranks, as many as lie along tp (2)".
std::string times_counted(const ComparedStep& one, std::int64_t least, std::int64_t most) {
  std::string text = fmt::format("elements count on {} to {} ranks", least, most), axes;
  for (const std::string& axis : long_axes(one))
    if (most > 1 && one.size_of(axis) == static_cast<double>(most))
      axes += (axes.empty() ? "" : " or ") + name_of(one, axis);
  return axes.empty() ? text : text + ", as many as lie along " + axes;
}

// Parameters of which some element counts nowhere.
std::vector<std::string> not_counted(const StepDump& dump) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < std::min(dump.owners.size(), dump.gradients.size()); ++i)
    if (dump.owners[i].first < 1) names.push_back(dump.gradients[i].first);
  return names;
}

// ", which are cut along ep (2): each rank along it has others", where all of them are.
std::string cut_along(const StepDump& dump, const std::vector<std::string>& names) {
  std::optional<Axis> axis;
  for (const std::string& name : names) {
    const auto cut = std::find_if(dump.cut.begin(), dump.cut.end(), [&](const auto& each) {
      return each.name == name && (!axis || each.axis.name == axis->name);
    });
    if (cut == dump.cut.end()) return {};
    axis = cut->axis;
  }
  if (!axis) return {};
  return fmt::format(", which are cut along {} ({}): what one rank does not count no other has", axis->name,
                     axis->size);
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
  const auto once = times_counted(one, least, most);
  if (right) return diagnose_parts_of_norm(one.found(), "", expected, limit);
  const double ratio = found / expected;
  const auto numbers = fmt::format("norm {:.9g}, expected {:.9g} (ratio {:.9g})", found, expected, ratio);
  if (!agree)
    if (const auto how = not_summed_over(one, norms, limit))
      return {{"norm_of_own_shard",
               numbers + ": " + *how,
               {fmt::format("norms by rank: {:.6g}", fmt::join(norms.found, ", "))}}};
  if (!agree)
    if (const auto how = cut_not_summed(one, norms, expected, limit))
      return {{"norm_of_own_shard",
               numbers + ": " + *how,
               {fmt::format("norms by rank: {:.6g}", fmt::join(norms.found, ", "))}}};
  if (!agree) return {{"norm_differs", numbers + ", and other norms on other ranks", {}}};
  if (most > 1 && close_together(found, norm_of(norms.owned), limit))
    return {{"norm_counts_replicas", numbers + ": " + once, {fmt::format("ratio² = {:.9g}", ratio * ratio)}}};
  if (least < 1 && close_together(found, norm_of(norms.owned), limit))
    return {{"norm_misses_elements",
             fmt::format("{}: elements of {} count nowhere{}", numbers, list_names(not_counted(one.found())),
                         cut_along(one.found(), not_counted(one.found()))),
             {once}}};
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
  if (const auto how = largest_of(one, norms, found, limit))
    return {{"norm_of_largest_part",
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
