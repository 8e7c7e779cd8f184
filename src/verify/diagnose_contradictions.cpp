// Compares what a dump records in several places, on both sides: a step that contradicts itself is no
// right one, and no reference.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "verify/compared_step.hpp"

namespace isograd {
namespace {

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
};

// Parameters with the largest gradients for their number of elements come first: their ratios are known best.
std::vector<Update> updates_in(const ComparedStep& one, bool of_found, double coefficient) {
  const StepDump& dump = of_found ? one.found() : one.expected();
  std::map<std::string, at::Tensor> applied;
  for (const auto& [name, tensor] : dump.applied) applied[name] = tensor;
  std::vector<Update> updates;
  double elements = 0;
  std::vector<double> norms, taken;
  for (const ComparedStep::Parameter& parameter : one.parameters()) {
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
  const auto density = [](const Update& update) {
    return update.norm / std::sqrt(std::max(1.0, static_cast<double>(update.gradient.numel())));
  };
  for (Update& update : updates)
    update.floor = usual * std::sqrt(static_cast<double>(update.gradient.numel()));
  std::stable_sort(updates.begin(), updates.end(),
                   [&](const Update& a, const Update& b) { return density(a) > density(b); });
  return updates;
}

// Whether lying within `limit` of a direction is no chance: of n elements at random that has a probability
// below limit^(n - 1).
bool has_direction(const Update& update, double limit) {
  constexpr double kByChance = 1e-9;
  return std::pow(limit, static_cast<double>(update.gradient.numel()) - 1) <= kByChance;
}

// The parameter whose gradient, times the coefficient, is taken away from this one, with either sign.
const Update* whose(const Update& update, const std::vector<Update>& all, double coefficient, double limit) {
  constexpr std::size_t kNearest = 4;  // by their norms: what is another's has its norm
  if (std::isnan(coefficient) || !has_direction(update, limit)) return nullptr;
  std::vector<std::pair<double, const Update*>> candidates;
  for (const Update& other : all) {
    const double apart = std::abs(std::abs(coefficient) * other.norm - update.applied_norm);
    if (other.name != update.name && other.gradient.sizes() == update.gradient.sizes() &&
        apart <= limit * update.applied_norm)
      candidates.emplace_back(apart, &other);
  }
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  candidates.resize(std::min(kNearest, candidates.size()));
  for (const auto& [apart, other] : candidates)
    for (const double sign : {1.0, -1.0})
      if (distance(update.applied, other->gradient, sign * coefficient) <= limit * update.applied_norm)
        return other;
  return nullptr;
}

// The figures of a dump of this precision come from sums of many numbers.
double own_tolerance(const StepDump& dump) {
  constexpr double kExact = 1e-9;
  if (dump.precision == "fp64") return kExact;
  const bool half = dump.precision == "bf16" || dump.precision == "fp16";
  return bounds_for(half ? at::kBFloat16 : at::kFloat, 1, 1).figures;
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
  for (const ComparedStep::Parameter& parameter : one.parameters()) {
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
    return {{finding_id::elements_not_owned_once,
             fmt::format("elements count on {} to {} ranks{}", least, most, side)}};
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
  const bool once = all && !dump.owners.empty() && !close_together(sum, norm, limit);
  if (once || sum < norm * (1 - limit) || largest > norm * (1 + limit))
    return {{finding_id::norm_differs,
             fmt::format("the ranks' parts{} do not make up the gradient's norm of {:.9g}", side, norm),
             {fmt::format("norms of parts: {:.6g}", fmt::join(owned, ", "))}}};
  return {};
}

// Weight decay and momentum take away what is no multiple of the gradient, and dumps do not record them:
// where both dumps say what was taken away they are compared with each other, and only what neither of the
// two can make is held against one of them. Where the other says nothing of it, it has to be the format's
// update of plain SGD: the coefficient times the gradient.
OwnUpdate diagnose_own_update(const ComparedStep& one, bool of_found, std::vector<std::string>* notices) {
  const StepDump &dump = of_found ? one.found() : one.expected(),
                 &other = of_found ? one.expected() : one.found();
  OwnUpdate result;
  if (dump.applied.empty()) return result;
  const bool alone = other.applied.empty();
  const double limit = 10 * own_tolerance(dump);
  double coefficient = dump.figures.clip_coefficient;
  const bool recorded = !std::isnan(coefficient);
  const std::vector<Update> updates = updates_in(one, of_found, coefficient);

  std::vector<std::pair<double, std::vector<std::string>>> groups;  // applied / gradient
  std::vector<const Update*> bent, small;
  bool some_right = false;
  for (const Update& update : updates) {
    if (recorded && update.is(coefficient, limit)) {
      some_right = some_right || !update.small;
      continue;
    }
    if (update.small) {
      small.push_back(&update);
      continue;
    }
    const double ratio = update.ratio();
    if (!update.is(ratio, limit) || (!alone && !has_direction(update, limit))) {
      bent.push_back(&update);
      continue;
    }
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const auto& known) { return update.is(known.first, limit); });
    if (group == groups.end()) group = groups.insert(groups.end(), {ratio, {}});
    group->second.push_back(update.name);
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
    evidence.push_back(fmt::format("applied {:.9g} of the gradient: {}", ratio, list_names(names)));
    result.wrong.insert(result.wrong.end(), names.begin(), names.end());
  }
  // Nobody says how much is applied, but all agree: what is too small for a ratio of its own goes by it.
  if (!recorded && groups.size() == 1) coefficient = groups[0].first;
  const auto hold = [&](const Update& update) {
    const bool multiple = update.small && update.is(update.norm > 0 ? update.ratio() : 0, limit) &&
                          (alone || has_direction(update, limit));
    if (!multiple) {
      const Update* from = whose(update, updates, coefficient, limit);
      if (!alone && !from) {
        mixed.push_back(update.name);
        return;
      }
      evidence.push_back(from ? fmt::format("{} is lowered by the update of {}", update.name, from->name)
                              : fmt::format("no multiple of the gradient: {}", update.name));
    } else {
      evidence.push_back(fmt::format("its gradient is next to nothing, its update is not: {}", update.name));
    }
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

double norm_to_expect(const ComparedStep& one, double limit) {
  const double recorded = one.expected().figures.norm, own = norm_recorded_for(one.expected());
  return close_together(recorded, own, limit) ? recorded : one.norm();  // not for NaN
}

std::vector<Finding> diagnose_contradictions(const ComparedStep& one, double limit,
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
    add({{finding_id::clip_differs,
          fmt::format("a clip coefficient of {:.9g}{} is reported: no clip makes longer",
                      expected.figures.clip_coefficient, kTheirs)}});
  add(diagnose_shares(one, found, "", true, notices));
  add(diagnose_shares(one, expected, kTheirs, false, notices));
  return findings;
}

}  // namespace isograd
