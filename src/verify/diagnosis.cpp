#include "verify/diagnosis.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "verify/compared_step.hpp"

namespace isograd {

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

namespace {

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
