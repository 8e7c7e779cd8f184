#include "verify/diagnosis.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

namespace isograd {

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

// The sum over ranks and micro-batches; kNotRecorded where there are no counts.
static std::int64_t counted_targets(const StepDump& dump) {
  std::int64_t sum = dump.counts.empty() ? kNotRecorded : 0;
  for (const auto& rank : dump.counts) sum = std::accumulate(rank.begin(), rank.end(), sum);
  return sum;
}

static std::int64_t targets_of(const StepDump& dump) {
  return dump.figures.targets == kNotRecorded ? counted_targets(dump) : dump.figures.targets;
}

bool counted_several_times(const StepDump& found, const StepDump& expected) {
  const std::int64_t own = found.figures.targets, theirs = expected.figures.targets;
  if (found.samples.empty() || found.samples != expected.samples || theirs <= 0) return false;
  const Grid grid(found.axes);
  const auto times = [&](const AxisSet& along) { return own == theirs * grid.size(along); };
  for (const auto& [name, size] : grid.axes())
    if (size > 1 && times({name})) return true;
  return own > theirs && (times(present(grid, kContextAxes)) || times(grid.names()));
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

namespace {

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

// Along which axes a step is wrong whose ranks all lie along one of them: ", along a (2) and b (3)"; none
// where that cannot be tried.
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

}  // namespace

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
  ended_by(diagnose_rivals(one, ambiguous));
  if (findings.empty()) ended_by(diagnose_figures(one, ambiguous));  // else another model's
  if (findings.empty() && counted_several_times(pair.found, pair.expected))
    ended_by({{finding_id::counted_on_peers,
               fmt::format("{} targets are reported, there are {}; loss and gradient are right",
                           pair.found.figures.targets, pair.expected.figures.targets)}});
  if (findings.empty()) ended_by(diagnose_replicas(one, pair.expected, " of the reference", RunAgain()));
  if (findings.empty()) ended_by(diagnose_contradictions(one, tolerance(one), ambiguous));
  return findings;
}

}  // namespace isograd
