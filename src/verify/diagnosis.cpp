#include "verify/diagnosis.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "model/safetensors.hpp"

namespace isograd {
namespace {

// The sum over ranks and micro-batches; kNotRecorded where there are no counts.
std::int64_t counted_targets(const StepDump& dump) {
  std::int64_t sum = dump.counts.empty() ? kNotRecorded : 0;
  for (const auto& rank : dump.counts) sum = std::accumulate(rank.begin(), rank.end(), sum);
  return sum;
}

std::int64_t targets_of(const StepDump& dump) {
  return dump.figures.targets == kNotRecorded ? counted_targets(dump) : dump.figures.targets;
}

std::vector<Finding> diagnose_names(const RunPair& pair) {
  std::vector<Finding> findings;
  using ByName = std::map<std::string, at::Tensor>;
  const ByName found(pair.found.gradients.begin(), pair.found.gradients.end()),
      expected(pair.expected.gradients.begin(), pair.expected.gradients.end());
  std::vector<std::string> missing, extra, reshaped;
  for (const auto& [name, tensor] : expected) {
    const auto match = found.find(name);
    if (match == found.end())
      missing.push_back(name);
    else if (match->second.sizes() != tensor.sizes())
      reshaped.push_back(fmt::format("{} [{}], expected [{}]", name,
                                     fmt::join(match->second.sizes().vec(), ", "),
                                     fmt::join(tensor.sizes().vec(), ", ")));
  }
  for (const auto& [name, tensor] : found)
    if (!expected.count(name)) extra.push_back(name);
  if (!reshaped.empty())
    findings.push_back({finding_id::parameters_reshaped, fmt::format("{} parameters have another shape: {}",
                                                                     reshaped.size(), list_names(reshaped))});
  // One old name fits one new one by shape: renamed; otherwise missing.
  if (missing.size() == extra.size() && !missing.empty()) {
    std::multiset<std::vector<std::int64_t>> old_shapes, new_shapes;
    for (const auto& name : missing) old_shapes.insert(expected.at(name).sizes().vec());
    for (const auto& name : extra) new_shapes.insert(found.at(name).sizes().vec());
    if (old_shapes == new_shapes) {
      findings.push_back({finding_id::parameters_renamed,
                          fmt::format("{} parameters have other names: found {}, expected {}", missing.size(),
                                      list_names(extra), list_names(missing)),
                          {"the shapes are the same"}});
      return findings;
    }
  }
  if (!missing.empty() || !extra.empty())
    findings.push_back(
        {finding_id::parameters_missing,
         fmt::format("not on both sides: {}{}{}", missing.empty() ? "" : "missing " + list_names(missing),
                     missing.empty() || extra.empty() ? "" : "; ",
                     extra.empty() ? "" : "not expected " + list_names(extra))});
  return findings;
}

// The same samples, but as many targets as if each were counted once on every rank of some axes.
bool counted_several_times(const StepDump& found, const StepDump& expected) {
  const std::int64_t own = found.figures.targets, theirs = expected.figures.targets;
  if (found.samples.empty() || found.samples != expected.samples || theirs <= 0) return false;
  const Grid grid(found.axes);
  const auto times = [&](const AxisSet& along) { return own == theirs * grid.size(along); };
  for (const auto& [name, size] : grid.axes())
    if (size > 1 && times({name})) return true;
  return own > theirs && (times(present(grid, kContextAxes)) || times(grid.names()));
}

std::vector<Finding> diagnose_samples(const StepDump& found, const StepDump& expected) {
  if (!found.samples.empty() && !expected.samples.empty() && found.samples != expected.samples) {
    std::map<std::int64_t, int> extra;
    for (auto id : found.samples) ++extra[id];
    for (auto id : expected.samples) --extra[id];
    const std::set<std::int64_t> known(expected.samples.begin(), expected.samples.end());
    std::vector<std::string> twice, strange, missing;
    for (const auto& [id, count] : extra) {
      if (count < 0) missing.push_back(std::to_string(id));
      if (count > 0) (known.count(id) ? twice : strange).push_back(std::to_string(id));
    }
    if (strange.empty() && missing.empty())
      return {{finding_id::sample_twice,
               fmt::format("{} samples count more than once: ids {}", twice.size(), list_names(twice)),
               {fmt::format("{} ids seen, expected {}", found.samples.size(), expected.samples.size())}}};
    return {{finding_id::other_batch,
             fmt::format("the runs did not see the same samples: {} ids too often, {} missing, {} not in the "
                         "batch",
                         twice.size(), missing.size(), strange.size()),
             {twice.empty() ? "" : "too often: " + list_names(twice),
              missing.empty() ? "" : "missing: " + list_names(missing),
              strange.empty() ? "" : "not in the batch: " + list_names(strange)}}};
  }
  const auto &f = found.figures, &e = expected.figures;
  if (counted_several_times(found, expected)) return {};  // the same samples: a matter of the gradient
  const std::int64_t own = targets_of(found), theirs = targets_of(expected);
  if (own < 0 || theirs < 0 || own == theirs) return {};
  const bool ids = !found.samples.empty() && !expected.samples.empty();
  const auto of = [](std::int64_t targets, std::int64_t tokens) {
    return tokens == kNotRecorded ? fmt::format("{} targets", targets)
                                  : fmt::format("{} targets of {} tokens", targets, tokens);
  };
  Finding finding{ids ? finding_id::other_targets : finding_id::other_batch,
                  fmt::format("counts differ: {}, expected {}", of(own, f.tokens), of(theirs, e.tokens))};
  if (!ids) {
    finding.evidence.emplace_back(
        "no sample ids on both sides: record them (\"samples\") to tell other samples from other targets");
    return {finding};
  }
  finding.sentence = "the same samples, but other targets: " + finding.sentence;
  const auto samples = static_cast<std::int64_t>(
      std::set<std::int64_t>(expected.samples.begin(), expected.samples.end()).size());
  if (own == f.tokens || own == e.tokens)
    finding.evidence.emplace_back(
        "every token counts: padding, prompts or each document's last one carry loss");
  if (own - theirs == samples)
    finding.evidence.push_back(fmt::format(
        "one more for each of {} samples: the first label counts, or labels are not shifted", samples));
  if (theirs - own == samples)
    finding.evidence.push_back(
        fmt::format("one fewer for each of {} samples: labels are shifted twice", samples));
  if (finding.evidence.empty())
    finding.evidence.push_back(
        fmt::format("{} {} than expected: {}", std::abs(own - theirs), own > theirs ? "more" : "fewer",
                    own > theirs ? "padding or prompts carry loss" : "targets are masked or cut off"));
  return {finding};
}

// Checksums by the names of their parameters; where they are not as many, by their places.
std::map<std::string, std::uint64_t> start_of(const StepDump& dump, const StepDump::RankView& rank) {
  std::map<std::string, std::uint64_t> start;
  const bool named = rank.initial.size() == dump.gradients.size();
  for (std::size_t i = 0; i < rank.initial.size(); ++i)
    start[named ? dump.gradients[i].first : std::to_string(i)] = rank.initial[i];
  return start;
}

// Parameters whose checksum differs from the first rank that recorded one, or from the reference.
std::vector<Finding> diagnose_start_of(const StepDump& dump, const char* side,
                                       const std::map<std::string, std::uint64_t>& reference) {
  auto first = reference;
  std::set<std::string> parameters;
  std::vector<std::string> ranks;
  for (std::size_t r = 0; r < dump.ranks.size(); ++r) {
    const auto own = start_of(dump, dump.ranks[r]);
    if (first.empty()) first = own;
    bool differs = false;
    for (const auto& [name, hash] : own) {
      const auto other = first.find(name);
      if (other == first.end() || other->second == hash) continue;
      parameters.insert(name);
      differs = true;
    }
    if (differs) ranks.push_back(std::to_string(r));
  }
  if (parameters.empty()) return {};
  const auto in_order = std::ranges::find_if(
      dump.gradients, [&](const auto& gradient) { return parameters.contains(gradient.first); });
  return {
      {finding_id::initial_parameters_differ,
       fmt::format("{} of {} parameters differ over the ranks{} before the step, first {}: nothing else was "
                   "compared",
                   parameters.size(), first.size(), side,
                   in_order == dump.gradients.end() ? *parameters.begin() : in_order->first),
       {fmt::format("other bits on ranks {}: initialisation depends on the rank or the layout",
                    list_names(ranks))}}};
}

std::vector<Finding> diagnose_start(const StepDump& found, const StepDump& expected) {
  std::map<std::string, std::uint64_t> theirs;
  // The same values have other bits in another precision.
  if (found.precision == expected.precision)
    for (const auto& rank : expected.ranks)
      if (theirs.empty()) theirs = start_of(expected, rank);
  if (auto own = diagnose_start_of(found, "", theirs); !own.empty()) return own;
  return diagnose_start_of(expected, " of the reference", {});
}

std::vector<Finding> diagnose_repeat(const ComparedStep& one, const RunAgain& again) {
  if (!again) return {};
  const auto repeated = again(Experiment{});
  if (!repeated) return {};
  const auto &before = one.found().gradients, &after = repeated->found.gradients;
  std::vector<std::string> differing;
  for (std::size_t i = 0; i < std::min(before.size(), after.size()); ++i)
    if (!before[i].second.equal(after[i].second)) differing.push_back(before[i].first);
  // NaN is not equal to itself: what is not finite is named as that.
  if (!one.finite() || differing.empty()) return {};
  return {{finding_id::not_repeatable,
           fmt::format("the same step made twice gives different bits: {}", list_names(differing)),
           {fmt::format("run again as given: {} of {} parameters changed", differing.size(),
                        one.found().gradients.size())}}};
}

// `again` is asked of the run; nothing can be asked of the reference, whose `side` is " of the reference".
std::vector<Finding> diagnose_replicas(const ComparedStep& one, const StepDump& dump, const char* side,
                                       const RunAgain& again) {
  const auto& ranks = dump.ranks;
  if (ranks.empty()) return {};
  const auto holder = std::ranges::find_if(ranks, [](const auto& rank) { return !rank.gradients.empty(); });
  const auto first = holder == ranks.end() ? std::vector<std::uint64_t>() : holder->gradients;
  std::set<std::string> names;
  double spread = 0;
  bool apart = false;  // by what the ranks say, with checksums or without
  for (const auto& rank : ranks) {
    apart = apart || rank.spread > 0;
    const bool comparable = rank.gradients.size() == first.size();
    if (rank.spread > 0 || (comparable && rank.gradients != first))  // NaN stays: not recorded
      spread = std::isnan(spread) || std::isnan(rank.spread) ? NAN : std::max(spread, rank.spread);
    for (std::size_t i = 0; comparable && i < first.size(); ++i)
      if (rank.gradients[i] != first[i] && i < dump.gradients.size()) names.insert(dump.gradients[i].first);
  }
  if (names.empty() && !apart) return {};
  std::vector<std::string> list(names.begin(), names.end());
  if (list.empty()) list.emplace_back("which of them no checksum tells");
  Finding finding{
      finding_id::replicas_differ,
      fmt::format("the ranks{} hold different gradients: {}", side, list_names(list)),
      {std::isnan(spread) ? "how far apart they are was not recorded (\"spread\")"
                          : fmt::format("largest distance from rank 0's: {:.3g} of its norm", spread)}};
  if (spread <= one.spread_allowed() && one.same()) {
    finding.id = finding_id::sum_order_depends_on_rank;
    finding.sentence = fmt::format(
        "the ranks{} hold different bits of the same gradient, within rounding: each adds up in its own "
        "order: {}",
        side, list_names(list));
    if (again && ranks.size() > 2) {
      const auto two = again({.ranks = 2});
      if (two && two->found.ranks.size() == 2)
        finding.evidence.push_back(
            fmt::format("2 ranks: bits {}", two->found.ranks[0].gradients == two->found.ranks[1].gradients
                                                ? "agree: sums of two terms commute"
                                                : "differ too"));
    }
  }
  return {finding};
}

// The axes along which the step stays wrong with all ranks along one: ", along a (2) and b (3)".
std::string wrong_axes(const ComparedStep& one, const RunAgain& again, std::vector<std::string>& evidence) {
  const auto& axes = one.found().axes;
  std::vector<std::string> wrong;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    if (axes[i].size == 1) continue;
    if (axes[i].size < one.size_of(kAllRanks)) {
      const Experiment setting{.only_axis = static_cast<int>(i)};
      const auto alone = made_under(setting, again);
      if (!alone) continue;
      evidence.push_back(fmt::format("{}: {} of {} parameters off", text_of(one, setting),
                                     alone->off().size(), alone->parameters().size()));
      if (alone->same()) continue;
    }
    wrong.push_back(name_of(one, axes[i].name));
  }
  return wrong.empty() ? "" : fmt::format(", along {}", fmt::join(wrong, " and "));
}

// Whether what is wrong goes away in other circumstances; they were chosen because they take one cause away.
std::vector<Finding> diagnose_without(const ComparedStep& one, const RunAgain& again) {
  if (!again || (one.same() && one.finite_loss())) return {};
  const auto vanishes = [&](const Experiment& setting, const char* id, const char* sentence) {
    const auto other = made_under(setting, again);
    if (!other || !other->same() || !other->finite() || !other->finite_loss() ||
        !diagnose_samples(other->found(), other->expected()).empty())
      return std::vector<Finding>();
    return std::vector<Finding>{
        {id,
         sentence,
         {fmt::format("{}: all {} parameters are right (as given: {} are not, loss {:.9g}, expected {:.9g})",
                      setting.text(), other->parameters().size(), one.off().size(), one.found().figures.loss,
                      one.expected().figures.loss)}}};
  };
  if (one.finite() && one.finite_loss()) {
    auto noise =
        vanishes({.without_noise = true}, finding_id::noise_depends_on_layout,
                 "the difference vanishes without dropout: random numbers depend on the rank or layout");
    for (Finding& finding : noise) finding.sentence += wrong_axes(one, again, finding.evidence);
    return noise;
  }
  if (!one.silent()) return {};
  return vanishes({.without_silent = true}, finding_id::not_finite_empty_micro_batch,
                  "not finite: a micro-batch without a target divides zero by zero");
}

std::vector<Finding> diagnose_resume(const RunPair& pair, const RunAgain& again, const std::string& how) {
  const auto uninterrupted = made_under({.without_resume = true}, again);
  if (!uninterrupted || !uninterrupted->same() ||
      !diagnose_samples(uninterrupted->found(), uninterrupted->expected()).empty())
    return {};
  return {{finding_id::resume_changes_step,
           fmt::format("the resumed step is another one ({}): the loss jumps from {:.9g} to {:.9g}", how,
                       pair.expected.figures.loss, pair.found.figures.loss),
           {"without the resume: the same samples, the right gradient"}}};
}

bool uniform(const std::vector<double>& weights) {
  return std::ranges::all_of(
      weights, [&](double weight) { return std::abs(weight - weights[0]) <= 1e-12 * std::abs(weights[0]); });
}

at::ScalarType type_of(const std::string& precision) {
  const FloatType* const found = float_type(precision, &FloatType::precision);
  return found ? found->type : at::kFloat;
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
// Units of bf16 by which a matrix's scale may be off: nearly three times the most, 12, of right steps of nine
// models. Vectors have no such bound: PyTorch sums a LayerNorm's in bf16, 58 % too small in some right steps.
constexpr double kUnitsOfMatrix = 32;

}  // namespace

const std::vector<Diagnosis> kDiagnoses = {
#define ISOGRAD_ENTRY(id, meaning) {#id, meaning},
    ISOGRAD_FINDINGS(ISOGRAD_ENTRY)
#undef ISOGRAD_ENTRY
};

std::string Experiment::text() const {
  std::string text;
  const auto add = [&](const std::string& what) { text += (text.empty() ? "" : ", ") + what; };
  if (counts == Counts::kEqual) add("equal counts");
  if (counts == Counts::kUneven) add("uneven counts");
  if (split_micro_batches) add("accumulation on (micro-batches cut in two)");
  if (one_micro_batch) add("accumulation off");
  if (without_silent) add("micro-batches without a target left out");
  if (empty_rank >= 0) add(fmt::format("rank {} emptied", empty_rank));
  if (only_rank >= 0 && only_micro_batch >= 0)
    add(fmt::format("only micro-batch {} of rank {}", only_micro_batch, only_rank));
  else if (only_rank >= 0)
    add(fmt::format("only rank {}", only_rank));
  if (swapped[0] >= 0) add(fmt::format("ranks {} and {} swapped", swapped[0], swapped[1]));
  if (only_axis >= 0) add(fmt::format("all ranks along axis {}", only_axis));
  if (muted_document >= 0)
    add(fmt::format("document {} {}", muted_document, perturbed ? "muted, with other tokens" : "muted"));
  if (ranks > 0) add(fmt::format("{} ranks", ranks));
  if (without_noise) add("without dropout");
  if (without_resume) add("without the resume");
  return text.empty() ? "as given" : text;
}

std::string ratio_text(double ratio) {
  constexpr double kLargest = 4096, kSame = 1e-6;
  const auto same = [](double a, double b) { return std::abs(a - b) <= kSame * std::abs(b); };
  const double rounded = std::round(ratio), inverse = std::round(1 / ratio);
  if (rounded >= 1 && rounded <= kLargest && same(ratio, rounded)) return fmt::format("{:.0f}", rounded);
  if (inverse >= 2 && inverse <= kLargest && same(ratio * inverse, 1))
    return fmt::format("1/{:.0f}", inverse);
  return fmt::format("{:.8g}", ratio);
}

AxisSet present(const Grid& grid, AxisSet along) {
  std::erase_if(along, [&](const std::string& name) { return !grid.has(name); });
  return along;
}

std::vector<Finding> diagnose_counts(const StepDump& dump, const char* side) {
  const std::int64_t reported = dump.figures.targets;
  const auto contradicts = [](std::string text) -> std::vector<Finding> {
    return {{finding_id::other_targets, std::move(text)}};
  };
  if (targets_of(dump) == 0)  // with a gradient: one that is zero everywhere is no step to compare
    return contradicts(
        fmt::format("0 targets are reported{}, which make no loss and no gradient; there is one", side));
  if (dump.figures.tokens != kNotRecorded && reported > dump.figures.tokens)
    return contradicts(fmt::format("{} targets of {} tokens are reported{}: each target is a token", reported,
                                   dump.figures.tokens, side));
  const std::int64_t sum = counted_targets(dump);
  if (reported == kNotRecorded || dump.counts.empty() || sum == reported) return {};
  return contradicts(
      fmt::format("{} targets are reported{}, but the counts of ranks and micro-batches add up to {}; the "
                  "gradient is right",
                  reported, side, sum));
}

std::vector<Finding> diagnose(const RunPair& pair, const RunAgain& again,
                              std::vector<std::string>* ambiguous) {
  ComparedStep one(pair, {}, again);
  return diagnose(one, again, ambiguous);
}

std::vector<Finding> diagnose(ComparedStep& one, const RunAgain& again, std::vector<std::string>* ambiguous) {
  const RunPair& pair = one.pair();
  std::vector<Finding> findings = diagnose_names(pair);
  const auto ended_by = [&](std::vector<Finding> more) {
    const bool ends = !more.empty();
    for (auto& finding : more) {
      std::erase(finding.evidence, "");
      findings.push_back(std::move(finding));
    }
    return ends;
  };
  if (const auto samples = diagnose_samples(pair.found, pair.expected); !samples.empty()) {
    if (!ended_by(diagnose_resume(pair, again, samples[0].sentence))) ended_by(samples);
    return findings;
  }
  if (ended_by(diagnose_start(pair.found, pair.expected))) return findings;
  const bool nothing =
      std::ranges::all_of(one.parameters(), [](auto& parameter) { return parameter.norm == 0; });
  if (nothing) {
    ended_by(
        {{finding_id::no_gradient,
          fmt::format("the expected gradient is zero everywhere, over {} parameters: nothing can be compared",
                      one.parameters().size()),
          {fmt::format("the gradient found is {}zero everywhere", one.same() ? "" : "not ")}}});
    return findings;
  }
  if (ended_by(diagnose_repeat(one, again))) return findings;
  auto replicas = diagnose_replicas(one, one.found(), "", again);
  if (!replicas.empty() && replicas[0].id == finding_id::replicas_differ &&
      ended_by(diagnose_without(one, again)))
    return findings;
  if (!replicas.empty() && replicas[0].id == finding_id::replicas_differ)
    if (auto unsummed = diagnose_unsummed(one)) {
      unsummed->evidence.push_back(replicas[0].sentence);
      unsummed->evidence.push_back(replicas[0].evidence[0]);
      replicas = {*unsummed};
    }
  if (ended_by(std::move(replicas))) return findings;
  if (ended_by(diagnose_without(one, again))) return findings;
  if (!one.same()) {
    if (ended_by(diagnose_resume(pair, again, "the same samples"))) return findings;
    ended_by(diagnose_gradient(one, again));
    return findings;
  }
  if (!one.allowance().exact && one.finite()) ended_by(diagnose_rivals(one, ambiguous));
  if (findings.empty()) ended_by(diagnose_figures(one, ambiguous));  // else another model's
  if (findings.empty() && counted_several_times(pair.found, pair.expected))
    ended_by({{finding_id::counted_on_peers,
               fmt::format("{} targets are reported, there are {}; loss and gradient are right",
                           pair.found.figures.targets, pair.expected.figures.targets)}});
  if (findings.empty()) ended_by(diagnose_replicas(one, pair.expected, " of the reference", RunAgain()));
  if (findings.empty()) ended_by(diagnose_contradictions(one, tolerance(one), ambiguous));
  return findings;
}

const std::string& ComparedStep::precision() const {
  const auto row = [](const StepDump& dump) { return &float_type(type_of(dump.precision)); };
  return row(expected()) > row(found()) ? expected().precision : found().precision;
}

ComparedStep::ComparedStep(RunPair pair, Experiment setting, const RunAgain& again)
    : pair_(std::move(pair)), grid_(pair_.found.axes), setting_(setting), again_(again) {
  const std::map<std::string, at::Tensor> own(found().gradients.begin(), found().gradients.end()),
      by_one(pair_.alone.begin(), pair_.alone.end());
  const at::ScalarType type = type_of(precision());
  allowance_.exact = type == at::kDouble;
  allowance_.bounds = bounds_of(found(), type);
  // Other trainers add gradients up in the precision of the run.
  allowance_.bounds.unit_roundoff = allowance_.bounds.unit;
  const bool measured = !allowance_.exact && !by_one.empty();
  Tensors reference;
  for (const auto& [name, tensor] : expected().gradients) reference.push_back(tensor.to(at::kDouble));
  const std::vector<double> norms = norms_of(reference);
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
      allowed = widest;
      if (measured) allowed = std::min(bounds.rounded(few ? most_alone : parameter.alone_error), widest);
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
  allowance_.whole = kUnitsOfWhole * bounds.unit * norm_;
  if (const double moved = kRoundingFactor * norm_of(moves_); moved > allowance_.whole) {
    allowance_.moved = true;
    allowance_.whole = moved;
  }
  if (!alone_.empty())
    allowance_.whole =
        std::min(kRoundingFactor * norm_of(alone_apart_) + bounds.sums() * norm_, allowance_.whole);
  if (expected().scale_moves > 0) {
    allowance_.scale = {.alone = std::numeric_limits<double>::infinity(), .most = expected().scale_moves};
    if (!alone_.empty()) {
      Tensors off;
      for (std::size_t i = 0; i < alone_.size(); ++i) off.push_back(alone_[i] - reference[i]);
      const double share = along(off, reference, reference, bounds.unit).share;
      allowance_.scale.alone = std::fmax(std::abs(share), pair_.alone_scale_rounding);
    }
  }
  scale_ = test_scale(own, reference, bounds.unit, allowance_.scale);
  if (expected().scale_moves > 0 && scale_.passed && !scale_agrees(own, reference, bounds.unit))
    allowance_.moved = true;
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

std::optional<bool> ComparedStep::is(const std::vector<double>& weights,
                                     const std::vector<std::string>& names, Prediction* made) {
  if (!can_weight(weights)) return std::nullopt;
  Prediction prediction = right();
  Tensors gradient;
  double off = 0, grown = 0;  // the error of the whole and its bound, both squared
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    if (contains(names, parameter.name)) weight_one(i, weights, prediction);
    const at::Tensor& predicted = prediction.gradient[i];
    const double error = distance(parameter.found, predicted);
    const double limit = allowance_.exact ? Bounds{}.exact * std::max(parameter.scale, norm_of(predicted))
                                          : allowance_.parameter[i] * prediction.growth[i];
    if (!(error <= limit)) return false;
    off += error * error;
    const double more = prediction.growth[i] * parameter.norm;
    grown += more * more;
    gradient.push_back(parameter.found);
    if (!scale_told(parameter)) continue;
    const double own = norm_of(predicted);
    if (!(own <= 0) && !scale_of_one_agrees(parameter.found, predicted, allowance_.bounds.unit,
                                            allowance_.matrix * more / own))
      return false;
  }
  const double unit = allowance_.whole / norm_;  // 0 / 0: nothing to be near to
  if (!allowance_.exact &&
      (!(std::sqrt(off) <= unit * std::sqrt(grown)) ||
       !scale_agrees(gradient, prediction.gradient, allowance_.bounds.unit, allowance_.scale)))
    return false;
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
