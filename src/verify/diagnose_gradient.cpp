// Which known mistake explains the parameters that are off: each one predicts the gradient as a weighted sum
// of the micro-batches' parts. Those that fit are held against experiments in which they predict different
// things.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "verify/fits.hpp"

namespace isograd {
namespace {

double ratio_in(const ComparedStep& one, const std::string& name) {
  for (const auto& parameter : one.parameters())
    if (parameter.name == name) return parameter.comparison.ratio;
  return NAN;
}

// The one ratio of all the named parameters, if there is one and it is not 1.
std::optional<double> scale_of(ComparedStep& one, const std::vector<std::string>& names) {
  Tensors errors, direction;
  for (std::size_t i = 0; i < one.parameters().size(); ++i) {
    const auto& parameter = one.parameters()[i];
    if (!one.shows(i) || std::find(names.begin(), names.end(), parameter.name) == names.end()) continue;
    errors.push_back(parameter.found - parameter.expected);
    direction.push_back(parameter.expected);
  }
  const Along along_itself = along(errors, direction, direction, one.allowance().bounds.unit);
  const double ratio = 1 + along_itself.share;
  if (std::isinf(along_itself.scatter) || !std::isfinite(ratio)) return std::nullopt;
  const auto prediction =
      one.weighted(std::vector<double>(std::max<std::size_t>(1, one.cells().size()), ratio), names);
  if (!prediction || !one.is(*prediction)) return std::nullopt;
  return ratio;
}

// The type of 16 bits that all elements of the gradient found are numbers of, if its run is in a finer one
// and that is all that is wrong with it.
const char* coarser_type(const ComparedStep& one) {
  if (one.found().precision == "bf16" || one.found().precision == "fp16") return nullptr;
  Tensors found, expected, errors;
  bool bf16 = true, fp16 = true;
  for (const auto& parameter : one.parameters()) {
    bf16 = bf16 && parameter.found.equal(parameter.found.to(at::kBFloat16).to(at::kDouble));
    fp16 = fp16 && parameter.found.equal(parameter.found.to(at::kHalf).to(at::kDouble));
    found.push_back(parameter.found);
    expected.push_back(parameter.expected);
    errors.push_back(parameter.found - parameter.expected);
  }
  if (!bf16 && !fp16) return nullptr;
  const double unit = bounds_for(bf16 ? at::kBFloat16 : at::kHalf, 1, 1).unit;
  const bool near = norm_of(errors) <= 32 * unit * norm_of(expected) && scale_agrees(found, expected, unit);
  return !near ? nullptr : bf16 ? "bf16" : "fp16";
}

// The ratio, whichever way round: a whole number where it is one but for rounding.
double factor_of(const ComparedStep& one, double ratio) {
  const double factor = std::max(ratio, 1 / ratio), whole = std::round(factor);
  return std::abs(factor - whole) <= std::max(one.limit(), 1e-6) * factor ? whole : factor;
}

// What in the run has that size.
std::string hints_of(const ComparedStep& one, double ratio, bool all) {
  const double near = std::max(one.limit(), 1e-6);
  for (const auto& [name, value] : one.found().scales)
    if (value != 0 && std::abs(ratio - value) <= near * std::abs(value)) return ": " + name;
  if (ratio == 0) return ": nothing arrives there";
  const double factor = factor_of(one, ratio);
  std::string text = factors_of(one, factor);
  if (!text.empty() && ratio < 1) text = "averaged over " + text;
  if (factor == 2 && !all)
    text +=
        (text.empty() ? "" : "; or ") + std::string("a weight that is used twice and counted twice, or once");
  if (!text.empty()) return ": " + text;
  return ", which is no size in the run";
}

// Where these are the parameters that are cut along one axis, and all of them: that axis.
std::optional<Axis> axis_of_cut(const ComparedStep& one, const std::vector<std::string>& names) {
  const auto& cut = one.found().cut;
  const auto along = std::find_if(cut.begin(), cut.end(), [&](const auto& each) {
    return std::find(names.begin(), names.end(), each.name) != names.end();
  });
  if (along == cut.end()) return std::nullopt;
  std::size_t as_well = 0;
  for (const auto& each : cut) {
    if (each.axis.name != along->axis.name) continue;
    if (std::find(names.begin(), names.end(), each.name) == names.end()) return std::nullopt;
    ++as_well;
  }
  if (as_well != names.size()) return std::nullopt;
  return along->axis;
}

// The axes along which ranks have parts of parameters: "tp (2)".
std::vector<Axis> axes_of_cuts(const ComparedStep& one) {
  std::vector<Axis> axes;
  for (const auto& each : one.found().cut)
    if (std::none_of(axes.begin(), axes.end(),
                     [&](const Axis& known) { return known.name == each.axis.name; }))
      axes.push_back(each.axis);
  return axes;
}

// A few parameters have one ratio.
Finding some_scaled(const ComparedStep& one, const std::vector<std::string>& names, double ratio) {
  const auto axis = axis_of_cut(one, names);
  const double factor = factor_of(one, ratio);
  const std::string which = subject(one, names);
  const std::string size = axis && factor > 1 ? factors_of(one, factor) : "";
  const bool of_axis = axis && factor == axis->size;
  // Of whole copies, whose gradient the ranks along that axis have alike.
  for (const Axis& along : axes_of_cuts(one))
    if (!axis && which != "all parameters" && ratio > 1 && factor == static_cast<double>(along.size))
      return {"some_parameters_scaled",
              fmt::format(
                  "{} scaled by {}: the size of {} ({}), along which each rank has the whole gradient and "
                  "it is summed once more (a summed axis in its placement, or an enter() too many{})",
                  which, ratio_text(ratio), along.name, along.size,
                  factor == 2 ? "); or a weight that is used twice and counted twice" : ")"),
              {}};
  if (!of_axis && size.empty())
    return {"some_parameters_scaled",
            fmt::format("{} scaled by {}{}", which, ratio_text(ratio),
                        hints_of(one, ratio, which == "all parameters")),
            {}};
  return {"cut_parameters_scaled",
          fmt::format("{}, which alone are cut along {} ({}), scaled by {}: {}", which, axis->name,
                      axis->size, ratio_text(ratio),
                      of_axis ? "the size of that axis, whose sum needs no factor"
                              : size + ", by which no other parameter is"),
          {}};
}

// A term of the loss that is off by a factor, and nothing but what it reaches; by that factor alone, if one
// is given. Whether a term is multiplied, or made otherwise, its value does not tell: a factor is believed
// that is a size of the run or a whole number.
std::optional<Finding> diagnose_term(const ComparedStep& one, const std::vector<std::string>& names,
                                     std::optional<double> factor_of_all = {}) {
  if (subject(one, names) == "all parameters" || one.expected().terms.size() < 2) return std::nullopt;
  for (const auto& [name, expected] : one.expected().terms)
    for (const auto& [own, value] : one.found().terms) {
      if (own != name || expected == 0) continue;
      const double ratio = value / expected;
      if (std::abs(ratio - 1) <= std::max(one.limit(), 1e-9)) continue;
      // Each of the two figures may be off by the limit.
      if (factor_of_all && !(std::abs(ratio / *factor_of_all - 1) <= 2 * std::max(one.limit(), 1e-9)))
        continue;
      const double size = std::max(ratio, 1 / ratio);
      const std::string factor = factors_of(one, size);
      const bool whole = std::abs(size - std::round(size)) <= std::max(one.limit(), 1e-9) * size;
      if (!(ratio > 0) || (factor.empty() && !whole))
        return Finding{
            "undecided",
            fmt::format("the loss term {} is another one: {:.9g}, expected {:.9g} (ratio {}, which is "
                        "no size in the run): a mean over other rows, a mean of ranks' or "
                        "micro-batches' means, or a factor of its own; off are {}",
                        name, value, expected, ratio_text(ratio), list_names(names)),
            {numbers_of(one, names),
             "to tell: the same with equal counts on all ranks and micro-batches (means of means "
             "are right there), and with the term alone"}};
      return Finding{"term_scaled",
                     fmt::format("the loss term {} is scaled by {}{}: it reaches {}", name, ratio_text(ratio),
                                 factor.empty() ? "" : ", " + factor, list_names(names)),
                     {numbers_of(one, names)}};
    }
  return std::nullopt;
}

// What is worth running, in this order, as long as several causes fit.
std::vector<Experiment> trials(const ComparedStep& one, const std::vector<Cause>& fitting) {
  using Counts = Experiment::Counts;
  std::vector<Experiment> all = {{.counts = Counts::kUneven},
                                 {.one_micro_batch = true},
                                 {.split_micro_batches = true},
                                 {.counts = Counts::kEqual}};
  std::vector<int> holders;
  for (int rank = 0; rank < one.ranks(); ++rank)
    if (one.targets_of(rank) > 0) holders.push_back(rank);
  // Whose part is missing, the rank's or that of what it has?
  for (const Cause& cause : fitting) {
    if (cause.id != "missing_data_part") continue;
    for (const int other : holders)
      if (other != cause.rank) {
        all.push_back({.swapped = {cause.rank, other}});
        break;
      }
  }
  if (holders.size() > 1) all.push_back({.empty_rank = holders.back()});
  const auto& axes = one.found().axes;
  // Where all ranks lie along an axis already it would be the same step.
  for (std::size_t i = 0; i < axes.size(); ++i)
    if (axes[i].size < one.size_of(kAllRanks)) all.push_back({.only_axis = static_cast<int>(i)});
  return all;
}

Finding diagnose_not_finite(ComparedStep& one) {
  std::vector<std::string> broken;
  for (const auto& parameter : one.parameters())
    if (!parameter.found.isfinite().all().item<bool>()) broken.push_back(parameter.name);
  const auto reached = std::count_if(
      one.parameters().begin(), one.parameters().end(),
      [](const auto& parameter) { return parameter.expected.ne(0).any().template item<bool>(); });
  const bool everywhere = static_cast<std::ptrdiff_t>(broken.size()) >= reached;
  if (one.silent() && everywhere)
    return {"not_finite_empty_micro_batch",
            "not finite in any parameter, and a micro-batch has no target: a mean over none is zero by zero",
            {"to make sure: leave that micro-batch out and compare again"}};
  return {"not_finite", fmt::format("not finite: {} parameters ({})", broken.size(), list_names(broken)), {}};
}

// Which experiments were made.
struct Tried {
  bool any = false, emptied = false, swapped = false;
};
// Each candidate has to hold where the others predict something else: `fitting` keeps those that do.
Tried try_apart(ComparedStep& one, const RunAgain& again, const std::vector<std::string>& names,
                std::vector<Cause>& fitting, std::vector<std::string>& evidence) {
  Tried tried;
  for (const Experiment& setting : trials(one, fitting)) {
    if (fitting.empty() || !again) break;
    if (tried.any && same_ids(fitting) && !(setting.only_axis >= 0 && fitting.size() > 1)) continue;
    auto pair = again(setting);
    if (!pair) continue;
    ComparedStep other(std::move(*pair), setting, again);
    std::vector<Cause> still;
    std::string dropped;
    for (auto& cause : fitting) {
      if (explains(other, cause, names).value_or(true))
        still.push_back(std::move(cause));
      else
        dropped += " not " + cause.id + ";";
    }
    evidence.push_back(fmt::format("{}: ratio of {} {:.6g}, {} of {} parameters off;{}",
                                   text_of(one, setting), names[0], ratio_in(other, names[0]),
                                   other.off().size(), other.parameters().size(),
                                   dropped.empty() ? " still fits" : dropped));
    fitting = std::move(still);
    tried.any = true;
    tried.emptied = tried.emptied || setting.empty_rank >= 0 || setting.only_axis >= 0;
    tried.swapped = tried.swapped || setting.swapped[0] >= 0;
  }
  return tried;
}

// What no known mistake makes, with what speaks for and against it.
Finding unexplained(ComparedStep& one, const std::vector<std::string>& names, bool all,
                    const std::optional<Fitted>& fitted, std::vector<std::string> evidence) {
  Finding finding;
  finding.id = "unknown";
  finding.sentence =
      fmt::format("unknown pattern: {}; {}: {}",
                  multiples(one, names) ? fmt::format("each of {} of {} parameters has a factor of its own",
                                                      names.size(), one.parameters().size())
                                        : fmt::format("the direction of {} of {} parameters differs",
                                                      names.size(), one.parameters().size()),
                  numbers_of(one, names), list_names(names));
  // A forward that is another one along the axes on which ranks hold the model together changes the loss too.
  const auto together = axes_of_cuts(one);
  const double loss = one.found().figures.loss, right = one.expected().figures.loss;
  std::string along;
  if (!together.empty() && std::abs(loss - right) > std::max(one.limit(), 1e-9) * std::abs(right)) {
    for (const Axis& axis : together)
      along += fmt::format("{}{} ({})", along.empty() ? "" : " and ", axis.name, axis.size);
    along = fmt::format(
        "a forward that computes another loss along {} ({:.9g}, expected {:.9g}): a bias or a "
        "residual that is added before leave(), once by each rank, or a seam left out",
        along, loss, right);
    finding.sentence += "; perhaps " + along;
  }
  if (const auto terms = other_terms(one); !terms.empty())
    evidence.push_back("terms of the loss: " + list_names(terms));
  if (fitted) {
    evidence.push_back(text_of(one, *fitted));
    constexpr double kElsewhere = 1e-3;
    if (all && fitted->left > std::max(kElsewhere, one.limit())) {
      finding.id = "undecided";
      finding.sentence = fmt::format(
          "all parameters: {:.3g} of the gradient is in no way made of this step's micro-batches: {}other "
          "weights of samples or tokens within one (each sample's own mean); or gradients left from an "
          "earlier step; or other targets or parameters than the reference has; or a wrong model; {}",
          fitted->left, along.empty() ? "" : along + "; or ", numbers_of(one, names));
      evidence.push_back(
          "to tell: dump the first step after the start (gradients left from earlier are not there), with "
          "initial checksums under \"ranks\", then one sample alone on one rank (a model or its targets)");
    }
  } else if (one.dealt_otherwise()) {
    finding.id = "undecided";
    finding.sentence = fmt::format(
        "{}: not told, because the targets lie otherwise on ranks and micro-batches in the two "
        "dumps, so that the reference's parts are not those of these ranks; {}",
        subject(one, names), numbers_of(one, names));
    evidence.push_back("to tell: make the reference with the samples dealt as in the run");
  }
  finding.evidence = std::move(evidence);
  return finding;
}

}  // namespace

std::vector<Finding> diagnose_gradient(ComparedStep& one, const RunAgain& again) {
  std::vector<std::string> names = one.off();
  if (!one.finite()) return {diagnose_not_finite(one)};

  // Rounding may hide a mistake in some parameters: first what explains all of them.
  bool all = subject(one, names) == "all parameters";
  if (all) names = all_names(one);  // those too in which nothing would show
  std::vector<Cause> fitting;
  const auto consider = [&](const std::vector<std::string>& of) {
    for (auto& cause : causes_of(one))
      if (explains(one, cause, of).value_or(false)) fitting.push_back(std::move(cause));
    if (!fitting.empty()) names = of;
  };
  if (!one.allowance().exact && !all) consider(all_names(one));
  if (fitting.empty()) consider(names);
  prefer_nearest(one, fitting, names);
  all = subject(one, names) == "all parameters";
  std::vector<std::string> evidence = {fmt::format("as given: {}", numbers_of(one, names))};
  const Tried tried = try_apart(one, again, names, fitting, evidence);
  // Where all ranks have as many micro-batches these are one and the same.
  bool alike = !tried.any;
  for (int rank = 0; rank < one.ranks(); ++rank)
    alike = alike && one.micro_batches(rank) == one.micro_batches(0);
  if (alike && fitting.size() > 1)
    std::erase_if(fitting,
                  [](const Cause& cause) { return cause.id == "mean_of_micro_batch_means_by_rank"; });
  // The twins of commoner causes, the same numbers in all but one experiment, count where that could be made.
  const auto is_twin = [&](const Cause& cause) {
    return (cause.id == "missing_data_part" && !tried.swapped) ||
           (cause.id == "averaged_over_holders" && !tried.emptied && one.holders() == one.ranks());
  };
  if (!std::all_of(fitting.begin(), fitting.end(), is_twin)) std::erase_if(fitting, is_twin);
  Finding finding;
  if (!fitting.empty()) {
    const bool decided = same_ids(fitting);
    std::string text;
    for (std::size_t i = 0; i < fitting.size(); ++i) {
      const Cause& cause = fitting[i];
      if (i > 0 && decided && !cause.axis.empty())
        text += fmt::format(" or {} ({:.0f})", cause.axis, one.size_of(cause.axis));
      else
        text += (text.empty() ? "" : "; or ") + cause.sentence(one);
    }
    finding.id = decided ? fitting[0].id : "undecided";
    // A mistake of counts or of the mesh reaches all parameters: of a few with one ratio only that is known.
    const auto ratio = scale_of(one, names);
    if (!all && ratio) {
      if (auto term = diagnose_term(one, names, *ratio)) return {*term};
      finding = some_scaled(one, names, *ratio);
    } else {
      const std::string verb = std::isdigit(static_cast<unsigned char>(text[0])) ? " scaled by " : ": ";
      finding.sentence = subject(one, names) + verb + text;
    }
    if (!decided && finding.id == "undecided") evidence.push_back(would_tell(fitting));
    finding.evidence = evidence;
    return {finding};
  }

  if (auto term = diagnose_term(one, names)) return {*term};

  if (again) {
    if (auto leak = diagnose_leak(one, again)) {
      leak->evidence.insert(leak->evidence.begin(), evidence.begin(), evidence.end());
      return {*leak};
    }
    if (auto together = diagnose_composition(one, again, subject(one, names), evidence)) return {*together};
  }

  // One ratio for all of them, of no known origin; or several. Rounding may hide it in some parameters.
  if (!one.allowance().exact && !all)
    if (const auto ratio = scale_of(one, all_names(one)); ratio && *ratio != 0)
      names = all_names(one), all = true;
  if (const auto ratio = scale_of(one, names)) {
    finding = some_scaled(one, names, *ratio);
    if (*ratio == 0)
      finding.id = "gradient_lost";
    else if (all)
      finding.id = "scaled_by_factor";
    finding.evidence = evidence;
    const auto fitted = all && !one.allowance().exact ? fit_weights(one, names) : std::nullopt;
    if (fitted && nearer_to_other_weights(*fitted, *ratio)) {
      finding.id = "undecided";
      finding.sentence +=
          "; or parts of ranks or micro-batches with weights of their own, which rounding hides in " +
          one.precision();
      finding.evidence.push_back(text_of(one, *fitted));
      finding.evidence.push_back("to tell: --alone with the same micro-batches, or a run in fp32");
    }
    return {finding};
  }
  const auto fitted = fit_weights(one, names);
  if (fitted && one.allowance().exact ? fitted->left <= 1e-8 : fitted && fitted->left <= one.limit())
    for (auto&& told :
         {diagnose_missing_parts(one, names, *fitted), diagnose_clipped_parts(one, names, *fitted)})
      if (told) {
        finding = *told;
        finding.evidence.insert(finding.evidence.begin(), evidence.begin(), evidence.end());
        return {finding};
      }
  if (const char* type = coarser_type(one)) {
    finding.id = "rounding";
    finding.sentence = fmt::format(
        "{}: every element is a number of {}, in a run in {}: summed or reduced in a "
        "coarser type than the run's; {}",
        subject(one, names), type, one.found().precision, numbers_of(one, names));
    finding.evidence = evidence;
    return {finding};
  }
  return {unexplained(one, names, all, fitted, std::move(evidence))};
}

}  // namespace isograd
