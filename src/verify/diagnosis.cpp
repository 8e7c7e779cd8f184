#include "verify/diagnosis.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "verify/case.hpp"

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

namespace {

// Names and shapes that only one side has.
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

}  // namespace

AxisSet present(const Grid& grid, AxisSet along) {
  std::erase_if(along, [&](const std::string& name) { return !grid.has(name); });
  return along;
}

namespace {

// The same samples, but as many targets as if each were counted once on every rank of some axes.
bool counted_several_times(const StepDump& found, const StepDump& expected) {
  const std::int64_t own = found.figures.targets, wanted = expected.figures.targets;
  if (found.samples.empty() || found.samples != expected.samples || wanted <= 0) return false;
  const Grid grid(found.axes);
  const auto times = [&](const AxisSet& along) { return own == wanted * grid.size(along); };
  for (const auto& [name, size] : grid.axes())
    if (size > 1 && times({name})) return true;
  return own > wanted && (times(present(grid, kContextAxes)) || times(grid.names()));
}

// kNotRecorded where it is not known.
std::int64_t targets_of(const StepDump& dump) {
  if (dump.figures.targets != kNotRecorded || dump.counts.empty()) return dump.figures.targets;
  std::int64_t sum = 0;
  for (const auto& rank : dump.counts)
    for (const auto count : rank) sum += count;
  return sum;
}

// Which samples were counted, as far as both sides say.
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

std::vector<Finding> diagnose_start(const StepDump& found, const StepDump& expected) {
  if (found.ranks.empty()) return {};
  const auto& first = expected.ranks.empty() || expected.ranks[0].initial.empty() ? found.ranks[0].initial
                                                                                  : expected.ranks[0].initial;
  std::set<std::size_t> parameters;
  std::vector<std::string> ranks;
  for (std::size_t r = 0; r < found.ranks.size(); ++r) {
    const auto& own = found.ranks[r].initial;
    if (own.size() != first.size()) continue;
    bool differs = false;
    for (std::size_t i = 0; i < own.size(); ++i)
      if (own[i] != first[i]) {
        parameters.insert(i);
        differs = true;
      }
    if (differs) ranks.push_back(std::to_string(r));
  }
  if (parameters.empty()) return {};
  const std::size_t i = *parameters.begin();
  return {
      {"initial_parameters_differ",
       fmt::format("{} of {} parameters differ over the ranks before the step, first {}: nothing else was "
                   "compared",
                   parameters.size(), first.size(),
                   i < found.gradients.size() ? found.gradients[i].first : std::to_string(i)),
       {fmt::format("other bits on ranks {}: initialisation depends on the rank or the layout",
                    list_names(ranks))}}};
}

bool same_bits(const StepDump& a, const StepDump& b, std::vector<std::string>& differing) {
  for (std::size_t i = 0; i < std::min(a.gradients.size(), b.gradients.size()); ++i)
    if (!a.gradients[i].second.equal(b.gradients[i].second)) differing.push_back(a.gradients[i].first);
  return differing.empty();
}

std::vector<Finding> diagnose_repeat(const Case& one, const RunAgain& again) {
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

std::vector<Finding> diagnose_replicas(const Case& one, const RunAgain& again) {
  const auto& ranks = one.found().ranks;
  if (ranks.empty()) return {};
  std::set<std::string> names;
  double spread = 0;
  for (const auto& rank : ranks) {
    if (rank.gradients.size() != ranks[0].gradients.size()) continue;
    if (rank.gradients != ranks[0].gradients)  // NaN stays: not recorded
      spread = std::isnan(spread) || std::isnan(rank.spread) ? NAN : std::max(spread, rank.spread);
    for (std::size_t i = 0; i < rank.gradients.size(); ++i)
      if (rank.gradients[i] != ranks[0].gradients[i] && i < one.found().gradients.size())
        names.insert(one.found().gradients[i].first);
  }
  if (names.empty()) return {};
  const std::vector<std::string> list(names.begin(), names.end());
  Finding finding{
      "replicas_differ",
      fmt::format("the ranks hold different gradients: {}", list_names(list)),
      {std::isnan(spread) ? "how far apart they are was not recorded (\"spread\")"
                          : fmt::format("largest distance from rank 0's: {:.3g} of its norm", spread)}};
  if (spread <= one.spread_allowed() && one.same()) {
    finding.id = "sum_order_depends_on_rank";
    finding.sentence = fmt::format(
        "the ranks hold different bits of the same gradient, within rounding: each adds up in its own order: "
        "{}",
        list_names(list));
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

// Whether what is wrong goes away in other circumstances; they were chosen because they take one cause away.
std::vector<Finding> diagnose_without(const Case& one, const RunAgain& again) {
  if (!again || (one.same() && one.finite_loss())) return {};
  const auto vanishes = [&](const Experiment& setting) -> std::optional<Finding> {
    auto pair = again(setting);
    if (!pair) return std::nullopt;
    const Case other(std::move(*pair), setting, again);
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
          "the difference vanishes without dropout: random numbers depend on the rank or layout";
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
  const Case uninterrupted(std::move(*other), setting, again);
  if (!uninterrupted.same()) return {};
  return {{"resume_changes_step",
           fmt::format("the resumed step is another one ({}): the loss jumps from {:.9g} to {:.9g}", how,
                       pair.expected.figures.loss, pair.found.figures.loss),
           {"without the resume: the same samples, the right gradient"}}};
}

}  // namespace

std::vector<Finding> diagnose(const RunPair& pair, const RunAgain& again, std::vector<std::string>* untold) {
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
  Case one(pair, {}, again);
  const bool nothing =
      std::all_of(one.parameters().begin(), one.parameters().end(),
                  [](const auto& parameter) { return parameter.expected.eq(0).all().template item<bool>(); });
  if (nothing) {
    ended_by(
        {{"no_gradient",
          fmt::format("the expected gradient is zero everywhere, over {} parameters: nothing can be compared",
                      one.parameters().size()),
          {fmt::format("the gradient found is {}zero everywhere", one.same() ? "" : "not ")}}});
    return findings;
  }
  if (ended_by(diagnose_repeat(one, again))) return findings;
  auto replicas = diagnose_replicas(one, again);
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
  if (findings.empty()) ended_by(diagnose_figures(one));  // else another model's
  if (findings.empty() && counted_several_times(pair.found, pair.expected))
    ended_by({{"counted_on_peers",
               fmt::format("{} targets are reported, there are {}; loss and gradient are right",
                           pair.found.figures.targets, pair.expected.figures.targets),
               {}}});
  return findings;
}

}  // namespace isograd
