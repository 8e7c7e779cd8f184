// The gradient is right: what else of the step may be wrong, and whether either dump contradicts itself. A
// step that contradicts itself is no right one, and no reference.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "verify/diagnosis.hpp"

namespace isograd {
namespace {

using Parameter = ComparedStep::Parameter;

double norm_recorded_for(const StepDump& dump) {
  std::vector<double> norms;
  for (const auto& [name, tensor] : dump.gradients) norms.push_back(norm_of(tensor));
  return norm_of(norms);
}

// Each norm of the whole gradient that was recorded is that of the gradient recorded.
std::vector<Finding> diagnose_own_norm(const StepDump& dump, const char* side, double limit) {
  const double own = norm_recorded_for(dump);
  std::vector<std::string> others;
  const auto note = [&](const std::string& key, double norm) {
    if (!std::isnan(norm) && !close_together(norm, own, limit))
      others.push_back(fmt::format("{} {:.9g}", key, norm));
  };
  note("norm", dump.figures.norm);
  for (std::size_t r = 0; r < dump.ranks.size(); ++r)
    note(fmt::format("ranks.{}.norm", r), dump.ranks[r].norm);
  if (others.empty()) return {};
  return {{finding_id::norm_differs,
           fmt::format("{} recorded{}, where the gradient recorded has a norm of {:.9g}", list_names(others),
                       side, own)}};
}

// On how many ranks elements count, the least and the most.
std::pair<std::int64_t, std::int64_t> times_owned(const StepDump& dump) {
  std::int64_t least = 1, most = 1;
  for (const auto& [low, high] : dump.owners) least = std::min(least, low), most = std::max(most, high);
  return {least, most};
}

// Owners of elements, and the norms of what ranks own, against the norm of all.
std::vector<Finding> diagnose_parts_of_norm(const StepDump& dump, const char* side, double norm,
                                            double limit) {
  const auto [least, most] = times_owned(dump);
  if (least != 1 || most != 1)
    return {{finding_id::elements_not_owned_once,
             fmt::format("elements count on {} to {} ranks{}", least, most, side)}};
  std::vector<double> owned;
  double largest = 0;
  for (const auto& rank : dump.ranks) {
    owned.push_back(rank.owned_norm);
    largest = std::fmax(largest, rank.owned_norm);
  }
  std::size_t along = 1;
  for (const auto& [axis, size] : dump.axes) along *= static_cast<std::size_t>(size);
  const bool all = !owned.empty() && owned.size() >= std::max(dump.counts.size(), along) &&
                   std::ranges::none_of(owned, [](double own) { return std::isnan(own); });
  // Where nobody says how often each element counts, parts may make up more than the norm, but not less.
  const double sum = all ? norm_of(owned) : NAN;
  const bool once = all && !dump.owners.empty() && !close_together(sum, norm, limit);
  if (once || sum < norm * (1 - limit) || largest > norm * (1 + limit))
    return {{finding_id::norm_differs,
             fmt::format("the ranks' parts{} do not make up the gradient's norm of {:.9g}", side, norm),
             {fmt::format("norms of parts: {:.6g}", fmt::join(owned, ", "))}}};
  return {};
}

// The amount that an update took away from one parameter.
struct Update {
  std::string name;
  at::Tensor gradient, applied;       // fp64
  double norm = 0, applied_norm = 0;  // of them
  double floor = 0;                   // what is applied to as many elements of the usual size
  bool small = false;                 // next to no gradient: of that there is no ratio
  double off(double multiple) const { return distance(applied, gradient, multiple); }
  // Whether it is that multiple of the gradient, as far as the rounding of parameters lets one see.
  bool is(double multiple, double limit) const {
    return off(multiple) <= limit * std::max(std::abs(multiple) * norm, floor);
  }
  double ratio() const { return ((applied / norm) * (gradient / norm)).sum().item<double>(); }
  // Whether the direction is no chance: n random elements are that near with a chance below limit^(n - 1).
  bool has_direction(double limit) const {
    constexpr double kByChance = 1e-9;
    return std::pow(limit, static_cast<double>(gradient.numel()) - 1) <= kByChance;
  }
};

std::vector<Update> updates_in(const ComparedStep& one, bool of_found, double coefficient) {
  const StepDump& dump = of_found ? one.found() : one.expected();
  const std::map<std::string, at::Tensor> applied(dump.applied.begin(), dump.applied.end());
  std::vector<Update> updates;
  double elements = 0;
  std::vector<double> norms, taken;
  for (const Parameter& parameter : one.parameters()) {
    const auto own = applied.find(parameter.name);
    if (own == applied.end() || own->second.sizes() != parameter.expected.sizes()) continue;
    Update update{.name = parameter.name,
                  .gradient = of_found ? parameter.found : parameter.expected,
                  .applied = own->second.to(at::kDouble)};
    update.norm = norm_of(update.gradient);
    update.applied_norm = norm_of(update.applied);
    update.small = update.norm == 0 || parameter.norm < parameter.scale / 2;
    elements += static_cast<double>(update.gradient.numel());
    norms.push_back(update.norm);
    taken.push_back(update.applied_norm);
    updates.push_back(std::move(update));
  }
  const double usual = (std::isnan(coefficient) ? norm_of(taken) : coefficient * norm_of(norms)) /
                       std::sqrt(std::max(elements, 1.0));
  for (Update& update : updates)
    update.floor = usual * std::sqrt(static_cast<double>(update.gradient.numel()));
  return updates;
}

// The parameter whose gradient, times the coefficient, is taken away from this one, with either sign.
const Update* whose(const Update& update, const std::vector<Update>& all, double coefficient, double limit) {
  constexpr std::size_t kNearest = 4;  // by their norms: what is another's has its norm
  if (std::isnan(coefficient) || !update.has_direction(limit)) return nullptr;
  std::vector<std::pair<double, const Update*>> candidates;
  for (const Update& other : all) {
    const double apart = std::abs(std::abs(coefficient) * other.norm - update.applied_norm);
    if (other.name != update.name && other.gradient.sizes() == update.gradient.sizes() &&
        apart <= limit * update.applied_norm)
      candidates.emplace_back(apart, &other);
  }
  std::ranges::stable_sort(candidates, {}, &std::pair<double, const Update*>::first);
  candidates.resize(std::min(kNearest, candidates.size()));
  for (const auto& [apart, other] : candidates)
    for (const double sign : {1.0, -1.0})
      if (distance(update.applied, other->gradient, sign * coefficient) <= limit * update.applied_norm)
        return other;
  return nullptr;
}

// Parameters by the multiple of their gradient that is applied.
using Groups = std::vector<std::pair<double, std::vector<std::string>>>;

template <class Same>
void note_group(Groups& groups, const Update& update, const Same& same) {
  auto group = std::ranges::find_if(groups, [&](const auto& known) { return same(known.first); });
  if (group == groups.end()) group = groups.insert(groups.end(), {update.ratio(), {}});
  group->second.push_back(update.name);
}

std::string text_of_group(double ratio, const std::vector<std::string>& names) {
  return fmt::format("applied {:.9g} of the gradient: {}", ratio, list_names(names));
}

// An update of one dump, against the gradient and the clip coefficient of the same dump.
struct OwnUpdate {
  std::vector<std::string> wrong;  // parameters
  std::vector<Finding> findings;   // one, where there are any
};

// Weight decay and momentum are not recorded: where both dumps record an update they are compared with each
// other, and only what neither can make is held against one. Where the other has none, it has to be the
// coefficient times the gradient. `notices` reports a part that is no multiple.
OwnUpdate diagnose_own_update(const ComparedStep& one, bool of_found, std::vector<std::string>* notices) {
  const StepDump &dump = of_found ? one.found() : one.expected(),
                 &other = of_found ? one.expected() : one.found();
  OwnUpdate result;
  if (dump.applied.empty()) return result;
  const bool alone = other.applied.empty();
  constexpr double kExact = 1e-9;  // the figures of a dump of this precision come from sums of many numbers
  const bool half = dump.precision == "bf16" || dump.precision == "fp16";
  const double limit =
      10 * (dump.precision == "fp64" ? kExact : bounds_for(half ? at::kBFloat16 : at::kFloat, 1, 1).figures);
  double coefficient = dump.figures.clip_coefficient;
  const bool recorded = !std::isnan(coefficient);
  // The ratios of parameters with the largest gradients for their size are known best: they come first.
  std::vector<Update> updates = updates_in(one, of_found, coefficient);
  std::ranges::stable_sort(updates, std::greater<>(), [](const Update& update) {
    return update.norm / std::sqrt(std::max(1.0, static_cast<double>(update.gradient.numel())));
  });

  Groups groups;
  std::vector<const Update*> bent, small;
  bool some_right = false;
  for (const Update& update : updates) {
    if (recorded && update.is(coefficient, limit)) {
      some_right = some_right || !update.small;
      continue;
    }
    if (update.small)
      small.push_back(&update);
    else if (!update.is(update.ratio(), limit) || (!alone && !update.has_direction(limit)))
      bent.push_back(&update);
    else
      note_group(groups, update, [&](double ratio) { return update.is(ratio, limit); });
  }
  // A clip only makes shorter, and takes nothing away altogether.
  const auto clips = [&](double ratio) { return ratio > limit && ratio <= 1 + limit; };
  const bool several = alone && !recorded && groups.size() > 1;
  std::vector<std::string> evidence, mixed;
  bool apart = groups.size() > 1 || (some_right && !groups.empty()),
       as_it_is = recorded && groups.size() == 1;
  for (const auto& [ratio, names] : groups) {
    apart = apart && clips(ratio);
    as_it_is = as_it_is && std::abs(ratio - 1) <= limit;
    if (!recorded && !several && clips(ratio)) continue;
    evidence.push_back(text_of_group(ratio, names));
    result.wrong.insert(result.wrong.end(), names.begin(), names.end());
  }
  // Nobody says how much is applied, but all agree: what is too small for a ratio of its own goes by it.
  if (!recorded && groups.size() == 1) coefficient = groups[0].first;
  const auto hold = [&](const Update& update) {
    const bool multiple = update.small && update.is(update.norm > 0 ? update.ratio() : 0, limit) &&
                          (alone || update.has_direction(limit));
    const Update* from = multiple ? nullptr : whose(update, updates, coefficient, limit);
    if (!multiple && !alone && !from) {
      mixed.push_back(update.name);
      return;
    }
    evidence.push_back(
        multiple ? fmt::format("its gradient is next to nothing, its update is not: {}", update.name)
        : from   ? fmt::format("{} is lowered by the update of {}", update.name, from->name)
                 : fmt::format("no multiple of the gradient: {}", update.name));
    apart = as_it_is = false;
    result.wrong.push_back(update.name);
  };
  for (const Update* update : bent) hold(*update);
  for (const Update* update : small)
    if (!std::isnan(coefficient) && !update->is(coefficient, limit)) hold(*update);
  const char* side = of_found ? "run" : "reference";
  if (!mixed.empty() && notices)
    notices->push_back(fmt::format(
        "what an update takes away in the {} is no multiple of its gradient in {}: weight decay or momentum, "
        "which dumps do not record; it is compared with what the other takes away, and with nothing else",
        side, list_names(mixed)));
  if (result.wrong.empty()) return result;
  constexpr std::size_t kShown = 4;
  if (evidence.size() > kShown) evidence.resize(kShown);
  evidence.push_back(recorded ? fmt::format("the clip coefficient is {:.9g}", coefficient)
                              : "no clip coefficient is recorded");
  result.findings.push_back(
      {as_it_is ? finding_id::clip_not_applied
       : apart  ? finding_id::groups_clipped_apart
                : finding_id::optimizer_differs,
       fmt::format(
           "the {} contradicts itself: what an update of plain SGD takes away there is not {} its own "
           "gradient, in {}{}",
           side, recorded ? "the clip coefficient times" : "what a clip leaves of", list_names(result.wrong),
           alone ? fmt::format(" (of weight decay, record \"applied\" in the {} as well)",
                               of_found ? "reference" : "run")
                 : ""),
       evidence});
  return result;
}

// The shares of `dump`, by the parameters of both sides, against the gradient that they are parts of.
std::vector<Finding> diagnose_shares(const ComparedStep& one, const StepDump& dump, const char* side,
                                     bool of_found, std::vector<std::string>* notices) {
  if (dump.shares.empty()) return {};
  std::size_t missing = 0;
  for (std::size_t rank = 0; rank < dump.counts.size(); ++rank)
    for (std::size_t i = 0; i < dump.counts[rank].size(); ++i)
      if (dump.counts[rank][i] > 0 &&
          (rank >= dump.shares.size() || i >= dump.shares[rank].size() || dump.shares[rank][i].empty()))
        ++missing;
  const auto say = [&](std::string text) {
    if (notices) notices->push_back(text + ": wrong weights of ranks and micro-batches are not told");
  };
  if (missing > 0) {
    say(fmt::format("the shares{} are not complete, {} micro-batches with targets have none", side, missing));
    return {};
  }
  std::map<std::string, Tensors> parts;
  for (const auto& rank : dump.shares)
    for (const auto& share : rank)
      for (const auto& [name, tensor] : share) parts[name].push_back(tensor.to(at::kDouble));
  std::vector<std::string> others, blurred;
  double worst = 0;
  for (const Parameter& parameter : one.parameters()) {
    const Tensors& own = parts[parameter.name];
    const double off = missing_in(own, of_found ? parameter.found : parameter.expected);
    if (off <= one.limit() * parameter.scale) continue;
    std::vector<double> sizes = {parameter.scale};
    for (const at::Tensor& part : own) sizes.push_back(norm_of(part));
    // Each share is rounded by itself, and may be larger than their sum.
    const bool rounded = off <= one.limit() * norm_of(sizes);
    (rounded ? blurred : others).push_back(parameter.name);
    if (!rounded) worst = std::fmax(worst, off / parameter.scale);
  }
  if (!others.empty())
    return {{finding_id::shares_differ,
             fmt::format("the shares{} of ranks and micro-batches do not add up to the gradient: {}", side,
                         list_names(others)),
             {fmt::format("{:.3g} of it is left, {:.3g} allowed", worst, one.limit())}}};
  if (!blurred.empty())
    say(fmt::format("the shares{} cancel and add up to the gradient only within their own rounding ({})",
                    side, list_names(blurred)));
  return {};
}

// The parts of which `is` holds, in words: those that ranks own or those at each place along an axis.
template <class Is>
std::optional<std::string> made_of(const ComparedStep& one, const std::vector<double>& owned_norms,
                                   const char* owned, const char* along, const Is& is) {
  if (is(owned_norms)) return owned;
  const Grid& grid = one.grid();
  for (const std::string& axis : long_axes(one)) {
    std::vector<double> parts;  // none where the axes do not say which ranks these are
    const AxisSet others = without(grid.names(), one.axis_set(axis));
    for (int rank = 0; rank < grid.ranks() && grid.ranks() == static_cast<int>(owned_norms.size()); ++rank) {
      double squares = 0;
      for (const int other : grid.ranks_along(others, rank))
        squares += std::pow(owned_norms[static_cast<std::size_t>(other)], 2);
      parts.push_back(std::sqrt(squares));
    }
    if (is(parts)) return fmt::format(fmt::runtime(along), name_of(one, axis));
  }
  return std::nullopt;
}

// Each rank along an axis counts its part of what is cut along it and all of the rest. With the norm n_p at
// place p of P, D of the rest and N of all: Σ n_p² = N² + (P - 1) D², R / P times as much over all R ranks.
std::optional<std::string> cut_not_summed(const ComparedStep& one, const std::vector<double>& norms,
                                          double expected, double limit) {
  std::set<std::string> tried;
  for (const StepDump::CutParameter& first : one.found().cut) {
    const auto& [axis, places] = first.axis;
    if (!tried.insert(axis).second) continue;
    const auto ranks = static_cast<double>(norms.size());
    double all = 0, rest = 0;  // squares
    for (const double norm : norms) all += norm * norm;
    for (const Parameter& parameter : one.parameters()) {
      const bool is_cut = std::ranges::any_of(one.found().cut, [&](const auto& cut) {
        return cut.name == parameter.name && cut.axis.name == axis;
      });
      if (!is_cut) rest += std::pow(norm_of(parameter.found), 2);
    }
    // A difference is known to its terms' share of it, at most P times the limit.
    const double whole = std::sqrt(std::fmax(0, places * all - ranks * (places - 1) * rest));
    if (close_together(whole, std::sqrt(ranks) * expected, places * limit))
      return fmt::format(
          "each rank along {} ({}) counts its own part of what is cut along it, and all of the rest", axis,
          places);
  }
  return std::nullopt;
}

// Parameters with an element that counts nowhere, and the axis that all of them are cut along.
std::string not_counted(const StepDump& dump) {
  std::vector<std::string> names;
  for (std::size_t i = 0; i < std::min(dump.owners.size(), dump.gradients.size()); ++i)
    if (dump.owners[i].first < 1) names.push_back(dump.gradients[i].first);
  const std::string text = fmt::format("elements of {} count nowhere", list_names(names));
  const Axis* axis = nullptr;
  for (const std::string& name : names) {
    const auto cut = std::ranges::find_if(dump.cut, [&](const auto& each) {
      return each.name == name && (!axis || each.axis.name == axis->name);
    });
    if (cut == dump.cut.end()) return text;
    axis = &cut->axis;
  }
  if (!axis) return text;
  return fmt::format("{}, which are cut along {} ({}): what one rank does not count no other has", text,
                     axis->name, axis->size);
}

// Each rank's norm is that of its own data's part of the gradient, which it may have divided by its own
// count.
std::optional<std::string> of_own_data(ComparedStep& one, const std::vector<double>& norms, double limit) {
  if (static_cast<int>(norms.size()) != one.ranks() || one.holders() < one.ranks() || !one.find_parts())
    return std::nullopt;
  for (const bool own_count : {false, true}) {
    std::vector<double> ratios;
    for (int rank = 0; rank < one.ranks(); ++rank) {
      std::vector<double> sizes;
      for (std::size_t i = 0; i < one.parameters().size(); ++i) {
        at::Tensor part = at::zeros_like(one.parameters()[i].expected);
        for (const auto& cell : one.cells())
          if (cell.rank == rank) part += cell.part[i];
        sizes.push_back(norm_of(part));
      }
      const double count = own_count ? one.targets_of(rank) * std::pow(one.targets(), -1) : 1;
      ratios.push_back(norms[static_cast<std::size_t>(rank)] * count / norm_of(sizes));
    }
    if (std::ranges::all_of(ratios, [&](double ratio) { return close_together(ratio, ratios[0], limit); }))
      return fmt::format(
          "each rank has {} norm of the part of the gradient that its own {} make, before the "
          "sum over the ranks",
          close_together(ratios[0], 1, limit) ? "the" : ratio_text(ratios[0]) + " times the",
          own_count ? fmt::format("{}, divided by their number,", one.counted()) : one.counted());
  }
  return std::nullopt;
}

std::vector<Finding> diagnose_norm(ComparedStep& one) {
  const double limit = tolerance(one);
  // The norm that the reference recorded, or its gradient's where it is another one.
  double expected = one.expected().figures.norm;
  if (!close_together(expected, norm_recorded_for(one.expected()), limit)) expected = one.norm();  // also NaN
  std::vector<double> norms, owned_norms;  // of the whole gradient; of what each rank owns
  for (const auto& rank : one.found().ranks) {
    if (!std::isnan(rank.norm)) norms.push_back(rank.norm);
    owned_norms.push_back(rank.owned_norm);
  }
  double found = one.found().figures.norm;
  if (std::isnan(found) && !norms.empty()) found = norms[0];
  bool right = std::isnan(found) || close_together(found, expected, limit), agree = true;
  for (const double norm : norms) {
    right = right && close_together(norm, expected, limit);
    agree = agree && close_together(norm, norms[0], limit);
  }
  if (right) return diagnose_parts_of_norm(one.found(), "", expected, limit);

  const auto [least, most] = times_owned(one.found());
  // "elements count on 1 to 2 ranks, as many as lie along tp (2)".
  std::string once = fmt::format("elements count on {} to {} ranks", least, most), axes;
  for (const std::string& axis : long_axes(one))
    if (most > 1 && one.size_of(axis) == static_cast<double>(most))
      axes += (axes.empty() ? ", as many as lie along " : " or ") + name_of(one, axis);
  once += axes;
  const double ratio = found / expected;
  const auto finding = [&](const char* id, const std::string& how, std::vector<std::string> evidence = {}) {
    return std::vector<Finding>{
        {id, fmt::format("norm {:.9g}, expected {:.9g} (ratio {:.9g}){}", found, expected, ratio, how),
         std::move(evidence)}};
  };
  if (!agree && norms.size() == owned_norms.size())
    for (const auto& how :
         {made_of(one, owned_norms, "each rank has the norm of the part it keeps",
                  "squares are not summed over {}, whose ranks each have the norm of their own part",
                  [&](const std::vector<double>& own) {
                    return std::ranges::equal(
                        own, norms, [&](double a, double b) { return close_together(a, b, limit); });
                  }),
          cut_not_summed(one, norms, expected, limit)})
      if (how)
        return finding(finding_id::norm_of_own_shard, ": " + *how,
                       {fmt::format("norms by rank: {:.6g}", fmt::join(norms, ", "))});
  if (!agree)
    if (const auto how = of_own_data(one, norms, limit))
      return finding(finding_id::norm_before_reduction, ": " + *how,
                     {fmt::format("norms by rank: {:.6g}", fmt::join(norms, ", "))});
  if (!agree) return finding(finding_id::norm_differs, ", and other norms on other ranks");
  const bool owned = close_together(found, norm_of(owned_norms), limit);
  if (most > 1 && owned)
    return finding(finding_id::norm_counts_replicas, ": " + once,
                   {fmt::format("ratio² = {:.9g}", ratio * ratio)});
  if (least < 1 && owned)
    return finding(finding_id::norm_misses_elements, ": " + not_counted(one.found()), {once});
  if (const std::string factor = factors_of(one, ratio * ratio); !factor.empty())
    return finding(finding_id::norm_counts_replicas,
                   fmt::format(": the square is {} times too large: {}", ratio_text(ratio * ratio), factor),
                   {once});
  const auto mean = made_of(
      one, owned_norms, "the mean of the norms of the ranks' parts",
      "the mean over {} of the norms of its ranks' parts", [&](const std::vector<double>& parts) {
        const double sum = std::accumulate(parts.begin(), parts.end(), 0.0);
        return parts.size() > 1 && close_together(found * static_cast<double>(parts.size()), sum, limit);
      });
  const auto largest =
      made_of(one, owned_norms, "the largest of the norms of the ranks' parts",
              "the largest over {} of the norms of its ranks' parts", [&](const std::vector<double>& parts) {
                return parts.size() > 1 && close_together(found, std::ranges::max(parts), limit);
              });
  if (mean || largest)
    return finding(mean ? finding_id::norms_averaged : finding_id::norm_of_largest_part,
                   ": " + (mean ? *mean : *largest),
                   {fmt::format("norms of parts: {:.6g}", fmt::join(owned_norms, ", "))});
  Tensors own_gradient;
  for (const auto& parameter : one.parameters()) own_gradient.push_back(parameter.found);
  return finding(finding_id::norm_differs,
                 close_together(found, norm_of(own_gradient), limit)
                     ? ": that is the norm of the gradient found, whose size is off, though this precision "
                       "hides in which parameters"
                     : "",
                 {one.found().owners.empty() ? "" : once});
}

// Recorded values that are not finite: nobody could act on them.
std::vector<Finding> diagnose_not_finite_figures(const ComparedStep& one) {
  std::vector<std::string> broken;
  for (const auto& [side, dump] : {std::pair{"", &one.found()}, {" of the reference", &one.expected()}}) {
    for (const auto& key : dump->not_numbers) broken.push_back(key + side);
    const auto note = [&](const std::string& key, double value) {
      if (std::isinf(value)) broken.push_back(key + side);
    };
    note("loss", dump->figures.loss);
    note("norm", dump->figures.norm);
    note("clip_coefficient", dump->figures.clip_coefficient);
    for (const auto& [name, value] : dump->terms) note("terms." + name, value);
    for (const auto& [name, value] : dump->scales) note("scales." + name, value);
    for (std::size_t r = 0; r < dump->ranks.size(); ++r) {
      const StepDump::RankView& rank = dump->ranks[r];
      const std::string in = fmt::format("ranks.{}.", r);
      note(in + "norm", rank.norm);
      note(in + "owned_norm", rank.owned_norm);
      note(in + "spread", rank.spread);
      note(in + "bytes_moved", rank.bytes_moved);
    }
    for (const auto& [name, applied] : dump->applied)
      if (!all_finite(applied)) broken.push_back("applied " + name + side);
  }
  if (broken.empty()) return {};
  return {{finding_id::not_finite,
           fmt::format("not finite: {}; the gradient is right", list_names(broken)),
           {},
           "figures"}};
}

// The rounding of numbers of size 1 leaves this many units of a sum that cancels.
constexpr double kUnitsOfCancelled = 16;

// The error allowed in terms and losses of any size: that of rounding the sums of the largest term.
double floor_of_terms(const ComparedStep& one) {
  constexpr double kExact = 1e-12;
  const double of_largest =
      one.allowance().exact ? kExact : std::min(one.limit(), kUnitsOfCancelled * one.allowance().bounds.unit);
  double largest = std::isnan(one.expected().figures.loss) ? 0 : std::abs(one.expected().figures.loss);
  for (const auto& [name, value] : one.expected().terms) largest = std::fmax(largest, std::abs(value));
  return of_largest * largest;
}

// Within what rounding may do to a loss; a loss that cancels is known to the rounding of numbers of size 1.
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
    return {
        {finding_id::loss_differs, fmt::format("the gradient is right{}, terms of the loss are not: {}",
                                               recorded ? " and so is the loss" : "", list_names(terms))}};
  }
  const double ratio = found / expected;
  const std::string factor = factors_of(one, std::max(ratio, 1 / ratio));
  return {{factor.empty() ? finding_id::loss_differs : finding_id::loss_scaled,
           fmt::format("loss {:.9g}, expected {:.9g} (ratio {}{}); the gradient is right", found, expected,
                       ratio_text(ratio), factor.empty() ? "" : ": " + factor),
           {terms.empty() ? "" : "terms: " + list_names(terms)}}};
}

// Parameters whose update differs from the reference's (weight decay included) or, without that, from their
// gradient times `coefficient` (NaN: not known). `unbelieved`: where the reference contradicts itself.
std::vector<std::string> applied_otherwise(const ComparedStep& one, double coefficient, double limit,
                                           const std::vector<std::string>& unbelieved) {
  std::map<std::string, at::Tensor> references;
  Tensors taken;
  for (const auto& [name, tensor] : one.expected().applied)
    if (!contains(unbelieved, name)) taken.push_back(references[name] = tensor.to(at::kDouble));
  double elements = 0;
  for (const auto& parameter : one.parameters()) elements += static_cast<double>(parameter.expected.numel());
  // The scale for a parameter with next to no gradient: an update is known to the rounding of parameters.
  const double usual = (taken.empty() ? std::abs(coefficient) * one.norm() : norm_of(taken)) /
                       std::sqrt(std::max(elements, 1.0));
  std::vector<std::string> others;
  for (const auto& [name, tensor] : one.found().applied)
    for (const auto& parameter : one.parameters()) {
      if (parameter.name != name) continue;
      const auto reference = references.find(name);
      const bool known = reference != references.end() && reference->second.sizes() == tensor.sizes();
      if (!known && std::isnan(coefficient)) continue;
      const at::Tensor expected = known ? reference->second : parameter.found * coefficient;
      const double scale =
          std::fmax(norm_of(expected), usual * std::sqrt(static_cast<double>(expected.numel())));
      if (!(distance(tensor, expected) <= limit * scale)) others.push_back(name);
    }
  return others;
}

std::vector<Finding> diagnose_clip(const ComparedStep& one, const std::vector<std::string>& unbelieved) {
  const double own = one.found().figures.clip_coefficient;
  const double limit = tolerance(one), wide = 10 * limit;
  // Where the reference has none: what the run itself says it did.
  const double expected = one.expected().figures.clip_coefficient;
  const double coefficient = std::isnan(expected) ? own : expected;
  Groups groups;
  std::vector<std::string> bent;  // applied in another direction
  auto others = applied_otherwise(one, coefficient, wide, unbelieved);
  const bool as_reference = others.empty() && one.expected().applied.size() > unbelieved.size();
  if (!as_reference)  // against the run's own gradient, whose rounding it shares
    for (const Update& update : updates_in(one, true, coefficient)) {
      if (update.small) continue;
      const double ratio = update.ratio();
      note_group(groups, update, [&](double known) { return close_together(known, ratio, wide); });
      if (!(update.off(ratio) <= wide * std::abs(ratio) * update.norm)) bent.push_back(update.name);
    }
  // Nobody says how much is applied, but all agree: what is too small for a ratio of its own goes by it.
  if (std::isnan(coefficient) && groups.size() == 1 && bent.empty())
    others = applied_otherwise(one, groups[0].first, wide, unbelieved);
  const auto numbers = fmt::format("expected coefficient {:.9g}, reported {:.9g}", coefficient, own);
  // A clip only makes shorter, and takes nothing away altogether; and the coefficient is what it reports.
  bool clips = bent.empty();
  std::vector<std::string> evidence = {numbers};
  for (const auto& [ratio, names] : groups) {
    clips = clips && ratio <= 1 + wide && ratio > wide;
    evidence.push_back(text_of_group(ratio, names));
  }
  const auto all_apply = [&](double multiple) {
    return groups.size() == 1 && close_together(groups[0].first, multiple, wide);
  };
  const bool reports = close_together(own, coefficient, limit) && coefficient > 0;
  const bool wrong =
      groups.size() > 1 || !bent.empty() || (groups.size() == 1 && reports && !all_apply(coefficient));
  if (wrong && (reports || !bent.empty()) && (!clips || (groups.size() == 1 && !all_apply(1)))) {
    const std::string how =
        !bent.empty() ? "is no multiple of the gradient, in " + list_names(bent)
        : groups.size() == 1
            ? fmt::format("is {} times what it should be", ratio_text(groups[0].first / coefficient))
            : "is another multiple of the gradient in different parameters";
    return {{finding_id::optimizer_differs,
             fmt::format("the gradient {} right, but what an update of plain SGD takes away {}",
                         reports ? "and the clip coefficient are" : "is", how),
             evidence}};
  }
  // A norm of its own is at most that of all: a group that is clipped by it is cut by less.
  std::vector<std::string> further;
  bool as_the_whole = false;
  for (const auto& [ratio, names] : groups) {
    const bool as_whole = close_together(ratio, coefficient, wide);
    as_the_whole = as_the_whole || as_whole;
    if (!as_whole && ratio < coefficient) further.push_back(text_of_group(ratio, names));
  }
  if (as_the_whole && reports && !further.empty() && further.size() + 1 == groups.size())
    return {
        {finding_id::some_parameters_scaled,
         fmt::format("the gradient and the clip coefficient of {:.9g} are right, but less is applied of some "
                     "parameters: {}",
                     coefficient, list_names(further)),
         evidence, "applied"}};
  if (groups.size() > 1)
    return {{finding_id::groups_clipped_apart,
             fmt::format("the gradient is right, but {} groups of parameters are clipped by coefficients of "
                         "their own",
                         groups.size()),
             evidence}};
  if (groups.size() == 1 && !std::isnan(coefficient) && !all_apply(coefficient)) {
    if (all_apply(1))
      return {{finding_id::clip_not_applied,
               "the gradient is applied as it is, though its norm exceeds the limit",
               {numbers}}};
    return {{finding_id::clip_differs,
             fmt::format("the gradient is applied {:.9g} times", groups[0].first),
             {numbers}}};
  }
  if (!std::isnan(own) && !std::isnan(coefficient) && !close_together(own, coefficient, limit))
    return {{finding_id::clip_differs, "another clip coefficient is reported: " + numbers}};
  if (own > 1 + limit)
    return {{finding_id::clip_differs,
             fmt::format("a clip coefficient of {:.9g} is reported: no clip makes longer", own)}};
  // The update differs from the reference's, or no clip makes it of the gradient.
  if (!others.empty() || !clips)
    return {{finding_id::optimizer_differs,
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
      {rounds ? finding_id::reduced_every_micro_batch : finding_id::traffic_differs,
       fmt::format("right values, but {:.0f} bytes moved where {:.0f} are needed (ratio {:.6g}{})", found,
                   expected, ratio,
                   rounds ? fmt::format(": {} micro-batches, each reduced", one.most_micro_batches()) : "")}};
}

void append(std::vector<Finding>& findings, std::vector<Finding> more) {
  std::ranges::move(more, std::back_inserter(findings));
}

}  // namespace

std::vector<Finding> diagnose_contradictions(const ComparedStep& one, double limit,
                                             std::vector<std::string>* notices) {
  const StepDump &found = one.found(), &expected = one.expected();
  constexpr const char* kTheirs = " of the reference";
  std::vector<Finding> findings = diagnose_own_norm(found, "", limit);
  append(findings, diagnose_own_norm(expected, kTheirs, limit));
  append(findings, diagnose_parts_of_norm(expected, kTheirs, norm_recorded_for(expected), limit));
  append(findings, diagnose_counts(found, ""));
  append(findings, diagnose_counts(expected, kTheirs));
  if (expected.figures.clip_coefficient > 1 + limit)
    findings.push_back({finding_id::clip_differs,
                        fmt::format("a clip coefficient of {:.9g}{} is reported: no clip makes longer",
                                    expected.figures.clip_coefficient, kTheirs)});
  append(findings, diagnose_shares(one, found, "", true, notices));
  append(findings, diagnose_shares(one, expected, kTheirs, false, notices));
  return findings;
}

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
double tolerance(const ComparedStep& one) { return std::max(one.limit(), 1e-9); }

std::optional<Finding> diagnose_values(const Tensors& found, const Tensors& right, double near) {
  Tensors all_found, all_right;
  for (std::size_t i = 0; i < found.size(); ++i) {
    all_found.push_back(found[i].reshape({-1}));
    all_right.push_back(right[i].reshape({-1}));
  }
  if (found.empty()) return std::nullopt;
  const at::Tensor taken = at::cat(all_found), given = at::cat(all_right);
  const double most = taken.abs().max().item<double>();
  const at::Tensor inside = taken.abs().lt(most * (1 - near));
  const double multiple =
      ((taken * given).masked_select(inside).sum() / given.square().masked_select(inside).sum())
          .item<double>();
  const at::Tensor unclipped = given * multiple;
  const auto cut = unclipped.abs().gt(most * (1 + near)).sum().item<std::int64_t>();
  const double rest = norm_of(taken - unclipped.clamp(-most, most));
  // One element that is cut may be any other mistake, and with two inside their multiple is no chance.
  if (!(multiple > 0) || cut < 2 || inside.sum().item<std::int64_t>() < 2 || !(rest <= near * norm_of(taken)))
    return std::nullopt;
  return Finding{
      finding_id::values_clipped,
      fmt::format("elements beyond {:.6g} are cut to that, {} of {}, each by itself: clip_grad_value_",
                  most / multiple, cut, taken.numel()),
      {fmt::format("the others have the right value{}",
                   close_together(multiple, 1, near) ? "" : fmt::format(", times {:.6g}", multiple))}};
}

std::vector<Finding> diagnose_figures(ComparedStep& one, std::vector<std::string>* notices) {
  std::vector<Finding> findings = diagnose_not_finite_figures(one);
  if (!findings.empty()) return findings;  // nothing was updated
  findings = diagnose_loss(one);
  auto norm = diagnose_norm(one);
  OwnUpdate reference = diagnose_own_update(one, false, notices);
  auto clip = diagnose_clip(one, reference.wrong);
  if (!norm.empty() || !clip.empty()) {
    Tensors gradients, applied;
    for (const Update& update : updates_in(one, true, NAN)) {
      gradients.push_back(update.gradient);
      applied.push_back(update.applied);
    }
    if (auto values = diagnose_values(applied, gradients, 10 * tolerance(one))) norm = {}, clip = {*values};
  }
  append(findings, norm);
  for (const auto& finding : clip)
    // A wrong norm makes a wrong coefficient: said once.
    if (norm.empty() || finding.id == finding_id::groups_clipped_apart) findings.push_back(finding);
  // An update that both dumps agree on contradicts both of their gradients alike.
  if (clip.empty()) append(findings, diagnose_own_update(one, true, nullptr).findings);
  append(findings, std::move(reference.findings));
  append(findings, diagnose_traffic(one));
  return findings;
}

}  // namespace isograd
