#include "verify/diagnosis.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "verify/compared_step.hpp"

namespace isograd {

// All answers of a diagnosis, as docs/museum.md lists them.
const std::vector<Diagnosis> kDiagnoses = {
    {"averaged_over_axis", "gradients are averaged over ranks whose parts should be summed"},
    {"averaged_over_holders",
     "gradients are averaged over the ranks that have data, whose parts should be summed"},
    {"counted_on_peers",
     "targets are counted again on ranks that see the same ones: loss and gradient are too small"},
    {"multiplied_by_axis", "gradients are summed over ranks where the loss expects an average"},
    {"summed_over_micro_batches", "the means of micro-batches are summed, not divided by their number"},
    {"unscaled_sum", "nothing divides the loss: it grows with the batch"},
    {"gradient_scaled_by_count", "the loss in the log is right, the gradient is multiplied by the count"},
    {"loss_scaled", "the gradient is right, the loss in the log is multiplied"},
    {"loss_differs",
     "the gradient is right, the loss in the log is another one: one rank's own, a mean of rank means"},
    {"count_not_reduced", "the loss is divided by the targets of one rank instead of all"},
    {"mean_of_rank_means", "each rank's mean counts the same, however much it holds"},
    {"mean_of_micro_batch_means", "each micro-batch's mean counts the same, however much it holds"},
    {"mean_of_micro_batch_means_by_rank", "the same within each rank, then the ranks are averaged"},
    {"accumulation_rescaled", "every micro-batch rescales what was accumulated before it"},
    {"averaged_over_micro_batches",
     "the gradient is divided by the number of micro-batches, though the count covers the whole step"},
    {"reduced_while_accumulating",
     "what was accumulated is summed over ranks again with every further micro-batch"},
    {"clipped_before_reduction",
     "each rank's or micro-batch's part is clipped by itself, then they are added up"},
    {"not_finite_empty_micro_batch", "a micro-batch without a target divides zero by zero"},
    {"not_finite", "the gradient, or what was recorded beside it, is not finite"},
    {"replicas_differ", "ranks hold different gradients for the same parameter"},
    {"buffers_differ", "forward changes a buffer by each rank's own rows"},
    {"not_summed_over_axis", "gradients are not summed over an axis: each rank along it keeps its own part"},
    {"sum_order_depends_on_rank", "each rank adds the parts up in another order: replicas differ in bits"},
    {"not_repeatable", "the same step made twice gives different bits"},
    {"norm_counts_replicas", "elements count in the norm once for each rank that has a copy"},
    {"norm_of_own_shard", "each rank takes the norm of the part it keeps"},
    {"norms_averaged", "norms of parts are averaged instead of their squares summed"},
    {"norm_of_largest_part",
     "the norm is that of the largest part instead of the root of their squares' sum"},
    {"norm_misses_elements", "some elements count on no rank: the norm is too small, alike everywhere"},
    {"clip_not_applied", "the gradient is applied as if it had not been clipped"},
    {"groups_clipped_apart", "groups of parameters are clipped by coefficients of their own"},
    {"documents_leak", "a document in a pack changes what another one computes"},
    {"term_scaled", "one term of the loss is multiplied, the others are right"},
    {"some_parameters_scaled",
     "some parameters' gradients are multiplied, the others are right: a tied weight counted twice, for "
     "example"},
    {"cut_parameters_scaled",
     "the gradients of what is cut along one axis are multiplied by a size of the run, or divided by it: "
     "that of the axis, over which the sum is whole already, of all ranks, of accumulation"},
    {"scaled_by_factor",
     "all gradients are multiplied by one factor that comes from no count: a learning rate, a loss scale"},
    {"gradient_lost", "some or all parameters get no gradient where there should be one"},
    {"micro_batches_lost", "only the last (or first) micro-batch of each rank is in the gradient"},
    {"missing_rank_part", "a rank's part of some gradient is not in the sum"},
    {"missing_data_part", "the part of some data is not in the sum, whichever rank has them"},
    {"composition", "right with each of two features alone, wrong with both"},
    {"sample_twice", "some samples count more than once"},
    {"other_batch", "the runs did not see the same samples"},
    {"other_targets",
     "the same samples, but other tokens carry loss: padding or the first label counted, labels not shifted"},
    {"initial_parameters_differ", "parameters differ before the first step"},
    {"noise_depends_on_layout", "random numbers depend on the rank, not on the sample"},
    {"resume_changes_step", "a resumed run goes on otherwise than one that was never stopped"},
    {"reduced_every_micro_batch", "gradients are reduced after every micro-batch instead of once"},
    {"traffic_differs", "another number of bytes was moved than the strategy needs"},
    {"elements_not_owned_once", "some element has no owner, or several, in norms and checkpoints"},
    {"norm_differs", "the norm is wrong in a way that fits no known mistake"},
    {"shares_differ", "the recorded shares of ranks and micro-batches do not add up to the gradient"},
    {"clip_differs", "the clip coefficient does not follow from the norm"},
    {"optimizer_differs", "the gradient is right, the parameters after some updates are not"},
    {"not_in_optimizer", "no group of an optimizer holds a parameter that is trained"},
    {"not_updated", "the optimizer stepped, and a parameter that has a gradient did not move"},
    {"updates_differ",
     "the gradient is right, but ranks update otherwise: one that does not step, another learning rate"},
    {"frozen_otherwise", "the run trains other parameters than the model that it was made from"},
    {kReductionNotProven, "all ranks have the same samples: without a reduction the numbers are the same"},
    {"random_model", "the model gives other numbers when it runs again: nothing can be compared"},
    {"no_gradient", "the gradient is zero everywhere: nothing can be compared"},
    {"parameters_missing", "the runs do not have the same parameters"},
    {"parameters_renamed", "parameters have other names"},
    {"parameters_reshaped", "parameters have other shapes"},
    {"living_layout_differs",
     "a fresh layout has the right gradient, the one of the run under way does not (--verify-every)"},
    {"other_experts",
     "tokens went to experts that the oracle did not choose, and not because rounding turned a near tie"},
    {"rounding", "right but for rounding that the run's precision does not explain: sums in a coarser type"},
    {"unresolved",
     "nothing is found to be wrong, but too large a mistake would not show: no pass, and it says what would "
     "tell"},
    {"undecided", "several mistakes fit, and what is there does not tell them apart: it says what would"},
    {"unknown", "fits no known mistake"},
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

// kNotRecorded where it is not known.
static std::int64_t targets_of(const StepDump& dump) {
  if (dump.figures.targets != kNotRecorded || dump.counts.empty()) return dump.figures.targets;
  std::int64_t sum = 0;
  for (const auto& rank : dump.counts)
    for (const auto count : rank) sum += count;
  return sum;
}

bool counted_several_times(const StepDump& found, const StepDump& expected) {
  const std::int64_t own = found.figures.targets, wanted = expected.figures.targets;
  if (found.samples.empty() || found.samples != expected.samples || wanted <= 0) return false;
  const Grid grid(found.axes);
  const auto times = [&](const AxisSet& along) { return own == wanted * grid.size(along); };
  for (const auto& [name, size] : grid.axes())
    if (size > 1 && times({name})) return true;
  return own > wanted && (times(present(grid, kContextAxes)) || times(grid.names()));
}

std::vector<Finding> diagnose_counts(const StepDump& dump, const char* side) {
  const std::int64_t reported = dump.figures.targets;
  const auto contradicts = [](std::string text) -> std::vector<Finding> {
    return {{"other_targets", std::move(text), {}}};
  };
  if (targets_of(dump) == 0)  // beside a gradient: one that is zero everywhere is no step to compare
    return contradicts(
        fmt::format("0 targets are reported{}, which make no loss and no gradient; there is one", side));
  if (dump.figures.tokens != kNotRecorded && reported > dump.figures.tokens)
    return contradicts(fmt::format("{} targets of {} tokens are reported{}: each target is a token", reported,
                                   dump.figures.tokens, side));
  if (reported == kNotRecorded || dump.counts.empty()) return {};
  std::int64_t sum = 0;
  for (const auto& rank : dump.counts)
    for (const auto count : rank) sum += count;
  if (sum == reported) return {};
  return contradicts(
      fmt::format("{} targets are reported{}, but the counts of ranks and micro-batches add up to {}; the "
                  "gradient is right",
                  reported, side, sum));
}

namespace {

std::vector<Finding> diagnose_names(const RunPair& pair) {
  std::vector<Finding> findings;
  const auto by_name = [](const StepDump& dump) {
    std::map<std::string, at::Tensor> map;
    for (const auto& [name, tensor] : dump.gradients) map[name] = tensor;
    return map;
  };
  const auto found = by_name(pair.found), expected = by_name(pair.expected);
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
    findings.push_back(
        {"parameters_reshaped",
         fmt::format("{} parameters have another shape: {}", reshaped.size(), list_names(reshaped)),
         {}});
  // One old name fits one new one by shape: renamed; otherwise missing.
  if (missing.size() == extra.size() && !missing.empty()) {
    std::multiset<std::vector<std::int64_t>> old_shapes, new_shapes;
    for (const auto& name : missing) old_shapes.insert(expected.at(name).sizes().vec());
    for (const auto& name : extra) new_shapes.insert(found.at(name).sizes().vec());
    if (old_shapes == new_shapes) {
      findings.push_back({"parameters_renamed",
                          fmt::format("{} parameters have other names: found {}, expected {}", missing.size(),
                                      list_names(extra), list_names(missing)),
                          {"the shapes are the same"}});
      return findings;
    }
  }
  if (!missing.empty() || !extra.empty())
    findings.push_back(
        {"parameters_missing",
         fmt::format("not on both sides: {}{}{}", missing.empty() ? "" : "missing " + list_names(missing),
                     missing.empty() || extra.empty() ? "" : "; ",
                     extra.empty() ? "" : "not expected " + list_names(extra)),
         {}});
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
      return {{"sample_twice",
               fmt::format("{} samples count more than once: ids {}", twice.size(), list_names(twice)),
               {fmt::format("{} ids seen, expected {}", found.samples.size(), expected.samples.size())}}};
    return {{"other_batch",
             fmt::format("the runs did not see the same samples: {} ids too often, {} missing, {} not in the "
                         "batch",
                         twice.size(), missing.size(), strange.size()),
             {twice.empty() ? "" : "too often: " + list_names(twice),
              missing.empty() ? "" : "missing: " + list_names(missing),
              strange.empty() ? "" : "not in the batch: " + list_names(strange)}}};
  }
  const auto &f = found.figures, &e = expected.figures;
  if (counted_several_times(found, expected)) return {};  // the same samples: a matter of the gradient
  const std::int64_t own = targets_of(found), wanted = targets_of(expected);
  if (own < 0 || wanted < 0 || own == wanted) return {};
  const bool ids = !found.samples.empty() && !expected.samples.empty();
  const auto of = [](std::int64_t targets, std::int64_t tokens) {
    return tokens == kNotRecorded ? fmt::format("{} targets", targets)
                                  : fmt::format("{} targets of {} tokens", targets, tokens);
  };
  Finding finding{ids ? "other_targets" : "other_batch",
                  fmt::format("counts differ: {}, expected {}", of(own, f.tokens), of(wanted, e.tokens)),
                  {}};
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
  if (own - wanted == samples)
    finding.evidence.push_back(fmt::format(
        "one more for each of {} samples: the first label counts, or labels are not shifted", samples));
  if (wanted - own == samples)
    finding.evidence.push_back(
        fmt::format("one fewer for each of {} samples: labels are shifted twice", samples));
  if (finding.evidence.empty())
    finding.evidence.push_back(
        fmt::format("{} {} than expected: {}", std::abs(own - wanted), own > wanted ? "more" : "fewer",
                    own > wanted ? "padding or prompts carry loss" : "targets are masked or cut off"));
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

// What is other than on the first rank that says, or than in the reference.
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
  const auto in_order = std::find_if(dump.gradients.begin(), dump.gradients.end(), [&](const auto& gradient) {
    return parameters.contains(gradient.first);
  });
  return {
      {"initial_parameters_differ",
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

bool same_bits(const StepDump& a, const StepDump& b, std::vector<std::string>& differing) {
  for (std::size_t i = 0; i < std::min(a.gradients.size(), b.gradients.size()); ++i)
    if (!a.gradients[i].second.equal(b.gradients[i].second)) differing.push_back(a.gradients[i].first);
  return differing.empty();
}

std::vector<Finding> diagnose_repeat(const ComparedStep& one, const RunAgain& again) {
  if (!again) return {};
  const auto repeated = again(Experiment{});
  if (!repeated) return {};
  std::vector<std::string> differing;
  // NaN is not equal to itself: what is not finite is named as that.
  if (!one.finite() || same_bits(one.found(), repeated->found, differing)) return {};
  return {{"not_repeatable",
           fmt::format("the same step made twice gives different bits: {}", list_names(differing)),
           {fmt::format("run again as given: {} of {} parameters changed", differing.size(),
                        one.found().gradients.size())}}};
}

// `again` is asked of the run; nothing can be asked of the reference, whose `side` is " of the reference".
std::vector<Finding> diagnose_replicas(const ComparedStep& one, const StepDump& dump, const char* side,
                                       const RunAgain& again) {
  const auto& ranks = dump.ranks;
  if (ranks.empty()) return {};
  const auto holder =
      std::find_if(ranks.begin(), ranks.end(), [](const auto& rank) { return !rank.gradients.empty(); });
  const std::vector<std::uint64_t> none;
  const auto& first = holder == ranks.end() ? none : holder->gradients;
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
      "replicas_differ",
      fmt::format("the ranks{} hold different gradients: {}", side, list_names(list)),
      {std::isnan(spread) ? "how far apart they are was not recorded (\"spread\")"
                          : fmt::format("largest distance from rank 0's: {:.3g} of its norm", spread)}};
  if (spread <= one.spread_allowed() && one.same()) {
    finding.id = "sum_order_depends_on_rank";
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
      auto pair = again(setting);
      if (!pair) continue;
      const ComparedStep alone(std::move(*pair), setting, again);
      evidence.push_back(fmt::format("{}: {} of {} parameters off", text_of(one, setting), alone.off().size(),
                                     alone.parameters().size()));
      if (alone.same()) continue;
    }
    wrong.push_back(name_of(one, axes[i].name));
  }
  return wrong.empty() ? "" : fmt::format(", along {}", fmt::join(wrong, " and "));
}

// Whether what is wrong goes away in other circumstances; they were chosen because they take one cause away.
std::vector<Finding> diagnose_without(const ComparedStep& one, const RunAgain& again) {
  if (!again || (one.same() && one.finite_loss())) return {};
  const auto vanishes = [&](const Experiment& setting) -> std::optional<Finding> {
    auto pair = again(setting);
    if (!pair) return std::nullopt;
    const ComparedStep other(std::move(*pair), setting, again);
    if (!other.same() || !other.finite() || !other.finite_loss() ||
        !diagnose_samples(other.found(), other.expected()).empty())
      return std::nullopt;
    const auto& loss = one.found().figures.loss;
    return Finding{"",
                   "",
                   {fmt::format("{}: all {} parameters are right (as given: {} are not, loss {:.9g}, "
                                "expected {:.9g})",
                                setting.text(), other.parameters().size(), one.off().size(), loss,
                                one.expected().figures.loss)}};
  };
  if (one.finite() && one.finite_loss()) {
    if (auto finding = vanishes({.without_noise = true})) {
      finding->id = "noise_depends_on_layout";
      finding->sentence =
          "the difference vanishes without dropout: random numbers depend on the rank or layout" +
          wrong_axes(one, again, finding->evidence);
      return {*finding};
    }
  } else if (one.silent()) {
    if (auto finding = vanishes({.without_silent = true})) {
      finding->id = "not_finite_empty_micro_batch";
      finding->sentence = "not finite: a micro-batch without a target divides zero by zero";
      return {*finding};
    }
  }
  return {};
}

std::vector<Finding> diagnose_resume(const RunPair& pair, const RunAgain& again, const std::string& how) {
  if (!again) return {};
  const Experiment setting{.without_resume = true};
  auto other = again(setting);
  if (!other || !diagnose_samples(other->found, other->expected).empty()) return {};
  const ComparedStep uninterrupted(std::move(*other), setting, again);
  if (!uninterrupted.same()) return {};
  return {{"resume_changes_step",
           fmt::format("the resumed step is another one ({}): the loss jumps from {:.9g} to {:.9g}", how,
                       pair.expected.figures.loss, pair.found.figures.loss),
           {"without the resume: the same samples, the right gradient"}}};
}

}  // namespace

std::vector<Finding> diagnose(const RunPair& pair, const RunAgain& again, std::vector<std::string>* untold) {
  ComparedStep one(pair, {}, again);
  return diagnose(one, again, untold);
}

std::vector<Finding> diagnose(ComparedStep& one, const RunAgain& again, std::vector<std::string>* untold) {
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
  const bool nothing = std::all_of(one.parameters().begin(), one.parameters().end(),
                                   [](const auto& parameter) { return parameter.norm == 0; });
  if (nothing) {
    ended_by(
        {{"no_gradient",
          fmt::format("the expected gradient is zero everywhere, over {} parameters: nothing can be compared",
                      one.parameters().size()),
          {fmt::format("the gradient found is {}zero everywhere", one.same() ? "" : "not ")}}});
    return findings;
  }
  if (ended_by(diagnose_repeat(one, again))) return findings;
  auto replicas = diagnose_replicas(one, one.found(), "", again);
  if (!replicas.empty() && replicas[0].id == "replicas_differ" && ended_by(diagnose_without(one, again)))
    return findings;
  if (!replicas.empty() && replicas[0].id == "replicas_differ")
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
  ended_by(diagnose_rivals(one, untold));
  if (findings.empty()) ended_by(diagnose_figures(one, untold));  // else another model's
  if (findings.empty() && counted_several_times(pair.found, pair.expected))
    ended_by({{"counted_on_peers",
               fmt::format("{} targets are reported, there are {}; loss and gradient are right",
                           pair.found.figures.targets, pair.expected.figures.targets),
               {}}});
  if (findings.empty()) ended_by(diagnose_replicas(one, pair.expected, " of the reference", RunAgain()));
  if (findings.empty()) ended_by(diagnose_contradictions(one, tolerance(one), untold));
  return findings;
}

}  // namespace isograd
