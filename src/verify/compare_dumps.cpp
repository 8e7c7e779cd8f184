// The verdict on two dumps of one step, for `isograd compare` and isograd.watch.
#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <set>

#include "base/refuse.hpp"
#include "verify/diagnosis.hpp"

namespace isograd {
namespace {

// Causes that a recorder finds by making the step in other ways, where nothing here has a name for it.
constexpr std::array<std::string_view, 29> kTried = {finding_id::cut_in_forward,
                                                     finding_id::weight_decay_in_gradient,
                                                     finding_id::mean_of_rank_means,
                                                     finding_id::mean_of_micro_batch_means,
                                                     finding_id::not_summed_over_axis,
                                                     finding_id::term_scaled,
                                                     finding_id::gradient_of_earlier_step,
                                                     finding_id::loss_over_own_samples,
                                                     finding_id::samples_weighted_differently,
                                                     finding_id::other_denominator,
                                                     finding_id::other_mean,
                                                     finding_id::other_targets,
                                                     finding_id::other_loss,
                                                     finding_id::other_outputs,
                                                     finding_id::extra_rows_counted,
                                                     finding_id::other_backward,
                                                     finding_id::missing_data_part,
                                                     finding_id::scaled_by_factor,
                                                     finding_id::multiplied_by_axis,
                                                     finding_id::initial_parameters_differ,
                                                     finding_id::gradient_lost,
                                                     finding_id::other_reduction,
                                                     finding_id::rounding,
                                                     finding_id::documents_leak,
                                                     finding_id::padding_seen,
                                                     finding_id::noise_depends_on_layout,
                                                     finding_id::buffers_differ,
                                                     finding_id::clip_differs,
                                                     finding_id::undecided};

// A name that fits the numbers, and the recorder's that takes its place, because it has seen what was done.
constexpr std::array<std::pair<std::string_view, std::string_view>, 8> kBetterKnown = {{
    {finding_id::scaled_by_factor, finding_id::other_denominator},
    {finding_id::averaged_over_axis, finding_id::not_summed_over_axis},
    {finding_id::averaged_over_axis, finding_id::undecided},
    {finding_id::averaged_over_axis, finding_id::scaled_by_factor},
    {finding_id::reduced_while_accumulating, finding_id::samples_weighted_differently},
    {finding_id::summed_over_micro_batches, finding_id::undecided},
    {finding_id::summed_over_micro_batches, finding_id::scaled_by_factor},
    {finding_id::unscaled_sum, finding_id::clip_differs},
}};

std::set<std::string> names_of(const StepDump& dump) {
  std::set<std::string> names;
  for (const auto& [name, gradient] : dump.gradients) names.insert(name);
  return names;
}

// Wrappers put one prefix before all names ("module."): what is left without it are the other's.
std::string common_prefix(const StepDump& found, const StepDump& expected) {
  const std::set<std::string> names = names_of(expected);
  const std::string& first = found.gradients[0].first;
  for (std::size_t dot = first.find('.'); dot != std::string::npos; dot = first.find('.', dot + 1)) {
    const std::string prefix = first.substr(0, dot + 1);
    const auto fits = [&](const auto& item) {
      return item.first.starts_with(prefix) && names.contains(item.first.substr(prefix.size()));
    };
    if (!names.contains(first) && std::ranges::all_of(found.gradients, fits)) return prefix;
  }
  return {};
}

void take_off(const std::string& prefix, StepDump& dump) {
  const auto shorten = [&](StepDump::Named& tensors) {
    for (auto& [name, tensor] : tensors)
      if (name.starts_with(prefix)) name.erase(0, prefix.size());
  };
  shorten(dump.gradients);
  shorten(dump.applied);
  for (auto& rank : dump.shares) std::ranges::for_each(rank, shorten);
}

// Takes the prefix that one of two dumps has before all names off it, and says so. Whether there was one.
bool align_names(StepDump& one, const std::string& name, const StepDump& other,
                 std::vector<std::string>& notices) {
  const std::string prefix = common_prefix(one, other);
  if (prefix.empty()) return false;
  take_off(prefix, one);
  notices.push_back(fmt::format("all names of {} begin with \"{}\"; compared without it", name, prefix));
  return true;
}

std::vector<std::string> terms_of(const StepDump& dump) {
  std::vector<std::string> names;
  for (const auto& [name, value] : dump.terms) names.push_back(name);
  return names;
}

void judge(LayoutVerdict& layout, const StepDump& expected, const ComparedStep& one, bool with_alone,
           const std::string& precision) {
  const Allowance& allowance = one.allowance();
  const double sums = allowance.bounds.sums();
  auto scale = fmt::format("scale of the whole gradient within 4 (u + its standard error), u = {:.2g}",
                           allowance.bounds.unit);
  if (const double moves = std::min(allowance.scale.alone, allowance.scale.most); moves > 0)
    scale += fmt::format(", or 4 times what one process {}, {:.2g}, where that is more",
                         with_alone ? "and the right gradient are off" : "moves", moves);
  auto whole =
      fmt::format("of all parameters together {:.2g} of {:.2g} allowed", one.whole_error(), allowance.whole);
  if (allowance.matrix > 0)
    whole += fmt::format("; scale of each matrix within {:.2g} + 4 of its standard errors", allowance.matrix);
  const std::string bound =
      with_alone ? fmt::format(
                       "{}: |g - g64| <= 4 |g1 - g64| + {:.3g} s, at most what is allowed without g1, one "
                       "process in {}; u sqrt(W G) = {:.3g}; {}; {}",
                       precision, sums, precision, sums, whole, scale)
                 : fmt::format(
                       "{}: |g - g64| <= {:.2g} s for each parameter, twice the most that right steps were "
                       "seen to be off; {}; {}; a dump of one process in {} (--alone) gives a sharper bound",
                       precision, layout.parameters.empty() ? 0 : layout.parameters[0].rounded.allowed, whole,
                       scale, precision);
  grade(layout, expected.figures, bound, allowance.exact, allowance.bounds, one.scale());
  layout.figures_agree = true;  // what differs in them is a finding
  const auto not_claimed = [](std::string why) {
    return Grade{.state = Grade::State::kNotClaimed, .bound = std::move(why), .worst = {}};
  };
  layout.e3 = not_claimed("one dump shows one run");
  (allowance.exact ? layout.e1 : layout.e2).state =
      one.same() ? Grade::State::kPassed : Grade::State::kFailed;
  if (allowance.exact)
    layout.e2 = not_claimed("both dumps are in fp64");
  else
    layout.e1 = not_claimed("a dump in " + precision + " says nothing of exact arithmetic");
}

// An action that finds smaller mistakes than a comparison in this precision.
std::string to_tell(const std::string& precision, bool with_alone, const std::string& reference) {
  const std::string run = precision == "bf16" || precision == "fp16" ? "a run in fp32 or fp64"
                          : precision == "fp64"                      ? "a step with a larger gradient"
                                                                     : "a run in fp64";
  const std::string first = reference != "fp64" && precision != "fp64" ? "Make the reference in fp64. " : "";
  if (with_alone || precision == "fp64") return first + "Compare " + run;
  return first +
         fmt::format("Give the step of one process in {} (--alone; in Python alone=True), or compare {}",
                     precision, run);
}

// The error that does not show in the parameter that shows least.
std::string unseen_in(const Grade& grade) {
  if (grade.failed > 0 || grade.single_least.empty()) return {};
  return fmt::format(", in {} not even a gradient that is {:.2g} % too large or too small",
                     grade.single_least, 100 * std::min(1.0, grade.single_found));
}

using Cells = std::vector<std::pair<std::size_t, std::size_t>>;  // rank, micro-batch
Cells cells_of(const std::vector<std::vector<std::int64_t>>& counts) {
  Cells cells;
  for (std::size_t rank = 0; rank < counts.size(); ++rank)
    for (std::size_t i = 0; i < counts[rank].size(); ++i)
      if (counts[rank][i] > 0) cells.emplace_back(rank, i);
  return cells;
}

// The reference with its counts where the run has them: in their order or, if no two are equal, by size.
std::optional<StepDump> assigned_as(const StepDump& expected,
                                    const std::vector<std::vector<std::int64_t>>& counts) {
  const Cells theirs = cells_of(expected.counts), ours = cells_of(counts);
  if (theirs.size() != ours.size()) return std::nullopt;
  const auto count_at = [](const auto& of, const auto& cell) { return of[cell.first][cell.second]; };
  std::vector<std::size_t> from(ours.size());  // by our cells, theirs
  bool in_order = true;
  for (std::size_t c = 0; c < ours.size(); ++c) {
    from[c] = c;
    in_order = in_order && count_at(counts, ours[c]) == count_at(expected.counts, theirs[c]);
  }
  if (!in_order) {
    std::map<std::int64_t, std::size_t> by_count;
    for (std::size_t c = 0; c < theirs.size(); ++c)
      if (!by_count.emplace(count_at(expected.counts, theirs[c]), c).second) return std::nullopt;
    for (std::size_t c = 0; c < ours.size(); ++c) {
      const auto place = by_count.find(count_at(counts, ours[c]));
      if (place == by_count.end()) return std::nullopt;
      from[c] = place->second;
      by_count.erase(place);
    }
  }
  StepDump assigned = expected;
  assigned.counts = counts;
  assigned.shares.clear();
  if (expected.shares.empty()) return assigned;
  for (const auto& rank : counts) assigned.shares.emplace_back(rank.size());
  for (std::size_t c = 0; c < ours.size(); ++c) {
    const auto [rank, i] = theirs[from[c]];
    if (rank < expected.shares.size() && i < expected.shares[rank].size())
      assigned.shares[ours[c].first][ours[c].second] = expected.shares[rank][i];
  }
  return assigned;
}

bool same_by_rank(const StepDump& found, const StepDump& expected) {
  return std::ranges::equal(found.counts, expected.counts, [](const auto& own, const auto& theirs) {
    return std::accumulate(own.begin(), own.end(), std::int64_t{0}) ==
           std::accumulate(theirs.begin(), theirs.end(), std::int64_t{0});
  });
}

// The part of a change that lies along the gradient is no longer than the change.
void expect_scale(const StepDump& dump, const std::string& name) {
  Tensors gradient;
  for (const auto& [parameter, tensor] : dump.gradients) gradient.push_back(tensor.to(at::kDouble));
  const double most = dump.moves.empty() ? 0 : norm_of(dump.moves) / norm_of(gradient);
  if (dump.scale_moves > most * (1 + 1e-6))
    refuse(name + ": \"scale_moves\"", fmt::format("{:.3g}", dump.scale_moves),
           fmt::format("at most {:.3g}, the norm of all \"moves\" by that of the gradient", most),
           "Record both of the same steps (docs/bounds.md, losses that jump), or neither");
}

// `--alone` must be the same step, in A's precision, and right within what rounding does to any.
void expect_alone(const StepDump& alone, const StepDump& found, const StepDump& expected,
                  const DumpNames& names) {
  const auto reject = [](const std::string& what) {
    refuse("--alone", what,
           "the step of one process in the precision of the run, next to that of one "
           "process in fp64",
           "Write both dumps with the same program, from the same parameters and "
           "samples, or compare without --alone");
  };
  if (expected.precision != "fp64") reject(names.expected + " in " + expected.precision);
  if (alone.precision != found.precision)
    reject(fmt::format("{}, where {} is in {}", alone.precision, names.found, found.precision));
  if (names_of(alone) != names_of(expected)) reject("other parameters than in " + names.expected);
  ComparedStep one({.found = alone, .expected = expected});
  const auto findings = diagnose(one);
  if (!findings.empty()) reject("no right step of one process: " + findings[0].sentence);
  if (!one.same())
    reject("a gradient that is further from that of " + names.expected + " than rounding explains");
}

// Makes single micro-batches of the step again from the shares that a dump recorded. Empty without any.
RunAgain again_from_shares(const StepDump& expected) {
  if (expected.shares.empty() || expected.counts.empty()) return {};
  return [&expected](const Experiment& experiment) -> std::optional<RunPair> {
    const Experiment recorded{.only_rank = experiment.only_rank,
                              .only_micro_batch = experiment.only_micro_batch,
                              .reference_only = true};
    if (experiment.only_rank < 0 || experiment.only_micro_batch < 0 || experiment != recorded)
      return std::nullopt;
    const auto rank = static_cast<std::size_t>(experiment.only_rank);
    const auto micro_batch = static_cast<std::size_t>(experiment.only_micro_batch);
    if (rank >= expected.shares.size() || micro_batch >= expected.shares[rank].size() ||
        expected.shares[rank][micro_batch].empty())
      return std::nullopt;
    RunPair pair;
    pair.expected.gradients = expected.shares[rank][micro_batch];
    pair.of_whole = true;
    return pair;
  };
}

}  // namespace

DumpComparison compare_dumps(StepDump found, StepDump expected, const DumpNames& names,
                             std::optional<StepDump> alone) {
  ISOGRAD_INVARIANT(!found.gradients.empty() && !expected.gradients.empty(), "a dump without a gradient");
  if (expected.scale_moves > 0) expect_scale(expected, names.expected);
  DumpComparison result;
  if (!align_names(found, names.found, expected, result.notices))
    align_names(expected, names.expected, found, result.notices);
  if (alone && !alone->gradients.empty() && !align_names(*alone, "--alone", expected, result.notices))
    if (const std::string prefix = common_prefix(expected, *alone); !prefix.empty())
      take_off(prefix, expected), take_off(prefix, found);
  if (alone) expect_alone(*alone, found, expected, names);
  RunPair pair{.found = std::move(found), .expected = expected};
  if (alone) {
    pair.alone = alone->gradients;
    std::map<std::string, double> rounding;
    for (std::size_t i = 0; i < alone->rounding.size(); ++i)
      rounding[alone->gradients[i].first] = alone->rounding[i];
    if (!rounding.empty())
      for (const auto& [name, gradient] : expected.gradients)
        pair.alone_rounding.push_back(rounding.at(name));
    pair.alone_scale_rounding = alone->scale_rounding;
  }
  const bool both = !pair.found.counts.empty() && !expected.counts.empty();
  if (both && pair.found.counts != expected.counts) {
    if (auto assigned = assigned_as(expected, pair.found.counts)) {
      pair.expected = std::move(*assigned);
      result.notices.push_back(names.expected +
                               " has the same micro-batches on other ranks: matched by their counts");
    } else if (!same_by_rank(pair.found, expected)) {
      pair.assigned_otherwise = true;
      result.notices.push_back(
          fmt::format("the targets lie otherwise on ranks and micro-batches in {} than in {}: no part of a "
                      "rank can be told (assign the samples alike)",
                      names.expected, names.found));
    }
  }
  const RunAgain again = again_from_shares(pair.expected);
  ComparedStep one(pair, {}, again);

  LayoutVerdict layout;
  layout.name = names.found;
  layout.exact = layout.rounded = pair.found.figures;
  const bool names_agree =
      names_of(pair.found) == names_of(expected) && one.parameters().size() == expected.gradients.size();
  layout.parameters = verdicts_of(one);
  const std::string& precision = one.precision();
  judge(layout, expected, one, alone.has_value(), precision);
  if (precision != pair.found.precision)
    result.notices.push_back(fmt::format(
        "{} is in {}, coarser than {} in {}: its precision limits the verdict, and what is smaller than "
        "its rounding does not show{} (make the reference in fp64)",
        names.expected, precision, names.found, pair.found.precision, unseen_in(layout.e2)));
  double moved = 0;  // the most that the reference itself moves, as a share of a parameter's scale
  for (std::size_t i = 0; i < one.parameters().size(); ++i)
    if (one.parameters()[i].scale > 0) moved = std::max(moved, one.moves()[i] / one.parameters()[i].scale);
  if (one.allowance().moved)
    result.notices.push_back(fmt::format(
        "the right gradient itself moves, by up to {:.2g} of a parameter's scale and {:.2g} in the scale of "
        "the whole, where numbers move by what rounding in {} is worth, as where a derivative jumps or one "
        "badly conditioned number multiplies all of it: no run in {} is sure of it, and what is smaller does "
        "not show (a run in fp64 tells; docs/bounds.md, losses that jump)",
        moved, expected.scale_moves, precision, precision));
  const auto terms = terms_of(pair.found), their_terms = terms_of(expected);
  const auto in_both = [&](const std::string& term) { return contains(their_terms, term); };
  if (!terms.empty() && !their_terms.empty() && std::ranges::none_of(terms, in_both))
    result.notices.push_back(
        fmt::format("no term of the loss has one name in both: none is compared ({}: {}; {}: {})",
                    names.found, list_names(terms), names.expected, list_names(their_terms)));

  Verdict& verdict = result.verdict;
  verdict.ranks = std::max(1, static_cast<int>(pair.found.counts.size()));
  result.peers = !pair.found.counts.empty() && one.grid().ranks() > verdict.ranks;
  verdict.precision = precision;
  verdict.oracle = expected.figures;
  verdict.parameters_agree = names_agree;
  const auto same_count = [](std::int64_t a, std::int64_t b) {
    return a == kNotRecorded || b == kNotRecorded || a == b;
  };
  verdict.batch_agrees =
      (pair.found.samples.empty() || expected.samples.empty() || pair.found.samples == expected.samples) &&
      same_count(pair.found.figures.targets, expected.figures.targets);
  if (!same_count(pair.found.figures.tokens, expected.figures.tokens))
    result.notices.push_back(fmt::format("{} tokens in {}, {} in {}: padding, or others that carry no loss",
                                         pair.found.figures.tokens, names.found, expected.figures.tokens,
                                         names.expected));
  result.findings = diagnose(one, again, &result.notices);
  for (const Finding& finding : pair.found.findings) {
    const bool unnamed = result.findings.size() == 1 && (result.findings[0].id == finding_id::unknown ||
                                                         result.findings[0].id == finding_id::undecided);
    // A reduction that is not proven is no cause of what is known to be wrong.
    if (finding.id == finding_id::reduction_not_proven && !result.findings.empty()) {
      result.notices.push_back(finding.sentence);
    } else if (std::ranges::count(kTried, finding.id)) {
      std::erase_if(result.findings, [&](const Finding& one) {
        return one.id == finding_id::unknown || one.id == finding_id::undecided ||
               std::ranges::count(kBetterKnown,
                                  std::pair<std::string_view, std::string_view>(one.id, finding.id));
      });
      result.findings.push_back(finding);
    } else if (finding.id == finding_id::clipped_before_reduction &&
               unnamed) {  // it is one of what fits nothing else
      Finding cause = finding;
      cause.evidence = std::move(result.findings[0].evidence);
      result.findings[0] = std::move(cause);
    } else {
      result.findings.push_back(finding);
    }
  }
  const bool right = one.same() && result.findings.empty();
  if (const bool exact = one.allowance().exact; right)
    if (auto coarse =
            diagnose_resolution(layout.parameters, exact ? layout.e1 : layout.e2, exact,
                                to_tell(precision, alone || one.allowance().moved, expected.precision)))
      result.findings.push_back(std::move(*coarse));
  // Every finding fails the verdict, and every failure has a finding.
  verdict.passed = one.same() && names_agree && verdict.batch_agrees && !one.parameters().empty() &&
                   result.findings.empty();
  if (!verdict.passed && result.findings.empty())
    result.findings.push_back(
        {finding_id::unknown, "the step is not the expected one, in no way that has a name"});
  const auto unknown = [](const Finding& finding) { return finding.id == finding_id::unknown; };
  const bool only_whole = !one.same() && std::ranges::all_of(one.parameters(), [](const auto& parameter) {
    return parameter.comparison.passed;
  });
  if (!one.allowance().exact && expected.moves.empty() &&
      (only_whole || std::ranges::any_of(result.findings, unknown)))
    result.notices.push_back(fmt::format(
        "where the derivative of the loss jumps, or a badly conditioned number multiplies it, rounding in {} "
        "alone makes it another one, and no bound on rounding holds: compare a run in fp64, or record "
        "\"moves\" and \"scale_moves\" (docs/bounds.md, losses that jump)",
        precision));
  layout.passed = verdict.passed;
  verdict.layouts.push_back(std::move(layout));

  if (expected.shares.empty()) {
    if (std::ranges::any_of(result.findings, unknown))
      result.notices.push_back(
          names.expected +
          " holds no shares of ranks and micro-batches; with them wrong weights can be named (docs/dump.md)");
    else if (verdict.passed && !one.allowance().exact)
      result.notices.push_back(
          fmt::format("{} holds no shares of ranks and micro-batches: weights of theirs that move the "
                      "gradient by less than {:.1g} of its norm are not told from the right ones",
                      names.expected, one.allowance().whole / one.norm()));
  }
  for (const auto& finding : result.findings) verdict.diagnosis.push_back(finding.sentence);
  verdict.findings = result.findings;
  return result;
}

}  // namespace isograd
