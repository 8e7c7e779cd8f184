// Which known mistake explains the parameters that are off: each predicts the gradient as a weighted sum of
// the micro-batches' parts. Experiments tell those that fit apart, or take away one suspect at a time.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "verify/diagnosis.hpp"

namespace isograd {
namespace {

using Parameter = ComparedStep::Parameter;

constexpr double kNoWeight = 1e-6;

std::vector<std::string> all_names(const ComparedStep& one) {
  std::vector<std::string> names;
  for (const auto& parameter : one.parameters()) names.push_back(parameter.name);
  return names;
}

// Whether the loss found is what a trainer with this mistake logs.
bool logs_as(const Cause& cause, const ComparedStep& one) {
  const double found = one.found().figures.loss, expected = one.expected().figures.loss;
  if (cause.loss == Cause::Loss::kAny || std::isnan(found) || std::isnan(expected) || expected == 0)
    return true;
  const double times = cause.loss == Cause::Loss::kRight ? 1 : cause.weight(one, {});
  const bool is = std::abs(found / expected - times) <= std::max(one.limit(), 1e-9) * times;
  return cause.loss == Cause::Loss::kNotScaled ? !is || times == 1 : is;
}

// The weight of each of cells(); where nothing is known of counts, one weight.
std::vector<double> weights_of(const ComparedStep& one, const Cause& cause) {
  std::vector<double> weights;
  for (const auto& cell : one.cells()) weights.push_back(cause.weight(one, cell));
  if (weights.empty()) weights.push_back(cause.weight(one, {}));
  return weights;
}

// Whether the cause explains the named parameters of this step. Nothing: it cannot be told.
std::optional<bool> explains(ComparedStep& one, const Cause& cause, const std::vector<std::string>& names) {
  const auto is = one.is(weights_of(one, cause), names);
  if (!is) return std::nullopt;
  return *is && logs_as(cause, one);
}

// "all parameters", "only 1 of 12 parameters (b)"
std::string subject(const ComparedStep& one, const std::vector<std::string>& names) {
  if (names.size() == one.parameters().size()) return "all parameters";
  std::size_t silent = 0;
  for (std::size_t i = 0; i < one.parameters().size(); ++i)
    silent += !one.shows(i) && !contains(names, one.parameters()[i].name);
  if (names.size() + silent == one.parameters().size()) return "all parameters";
  return fmt::format("only {} of {} parameters ({})", names.size(), one.parameters().size(),
                     list_names(names));
}

std::vector<const Parameter*> where_it_shows(const ComparedStep& one, const std::vector<std::string>& names) {
  std::vector<const Parameter*> parameters;
  for (std::size_t i = 0; i < one.parameters().size(); ++i)
    if (one.shows(i) && contains(names, one.parameters()[i].name)) parameters.push_back(&one.parameters()[i]);
  return parameters;
}

bool same_ids(const std::vector<Cause>& causes) {
  return std::ranges::all_of(causes, [&](const Cause& cause) { return cause.id == causes[0].id; });
}

std::string numbers_of(const ComparedStep& one, const std::vector<std::string>& names) {
  double low = HUGE_VAL, high = -HUGE_VAL, cosine = 1, error = 0;
  for (const Parameter* parameter : where_it_shows(one, names)) {
    low = std::fmin(low, parameter->comparison.ratio);
    high = std::fmax(high, parameter->comparison.ratio);
    cosine = std::fmin(cosine, parameter->comparison.cosine);
    error = std::fmax(error, parameter->comparison.error);
  }
  return fmt::format("ratios {:.6g} to {:.6g}, cosine from {:.6g}, largest error {:.3g} of its scale", low,
                     high, cosine, error);
}

// An action for the reader where nothing can be run again.
std::string would_tell(const std::vector<Cause>& fitting) {
  const auto has = [&](const char* part) {
    return std::ranges::any_of(fitting,
                               [&](const Cause& cause) { return cause.id.find(part) != std::string::npos; });
  };
  std::vector<std::string> ways;
  if (has("micro_batch") || has("accumul")) ways.emplace_back("another number of micro-batches");
  if (has("axis") || has("rank")) ways.emplace_back("another number of ranks");
  if (has("mean") || has("count") || has("sum")) ways.emplace_back("more uneven counts");
  if (ways.empty()) ways.emplace_back("another cut of the batch");
  return fmt::format("to tell: the same with {}", fmt::join(ways, ", or with "));
}

// The weights of the micro-batches' parts that come nearest, by least squares.
struct Fitted {
  std::vector<double> weights;  // by cells()
  std::vector<double> norms;    // of the parts
  double left = 0;              // of the gradient found, as a share of its norm, that they do not explain
};
// Nothing: the parts cannot be had, or are too many for the elements.
std::optional<Fitted> fit_weights(ComparedStep& one, const std::vector<std::string>& names) {
  if (!one.find_parts()) return std::nullopt;
  Tensors columns(one.cells().size()), found;
  for (std::size_t i = 0; i < one.parameters().size(); ++i) {
    const auto& parameter = one.parameters()[i];
    if (!contains(names, parameter.name)) continue;
    found.push_back(parameter.found.reshape({-1}));
    for (std::size_t c = 0; c < columns.size(); ++c) {
      const at::Tensor part = one.cells()[c].part[i].reshape({-1});
      columns[c] = columns[c].defined() ? at::cat({columns[c], part}) : part;
    }
  }
  const at::Tensor matrix = at::stack(columns, 1), target = at::cat(found);
  if (matrix.size(0) < 2 * matrix.size(1)) return std::nullopt;
  const at::Tensor normal = at::matmul(matrix.t(), matrix);
  const at::Tensor ridge = 1e-14 * normal.diagonal().max() * at::eye(matrix.size(1), at::kDouble);
  const at::Tensor weights = at::linalg_solve(normal + ridge, at::matmul(matrix.t(), target));
  const double whole = norm_of(target);
  if (whole == 0) return std::nullopt;
  Fitted fitted{.weights = {}, .norms = {}, .left = norm_of(at::matmul(matrix, weights) - target) / whole};
  for (std::size_t c = 0; c < columns.size(); ++c) {
    fitted.weights.push_back(weights[static_cast<std::int64_t>(c)].item<double>());
    fitted.norms.push_back(norm_of(columns[c]));
  }
  return fitted;
}

// Whether weights of single parts explain more than one factor of all parameters does.
bool nearer_to_other_weights(const Fitted& fitted, double ratio) {
  const auto [least, most] = std::minmax_element(fitted.weights.begin(), fitted.weights.end());
  return *most - *least > std::abs(ratio - 1);
}

std::string text_of(const ComparedStep& one, const Fitted& fitted) {
  std::string text;
  for (int rank = 0; rank < one.ranks(); ++rank) {
    std::vector<std::string> own;  // one where all of a rank's micro-batches have the same
    for (std::size_t c = 0; c < fitted.weights.size(); ++c)
      if (one.cells()[c].rank == rank)
        own.push_back(fmt::format("{:.6g}", std::abs(fitted.weights[c]) < kNoWeight ? 0 : fitted.weights[c]));
    if (own.empty()) continue;
    if (std::ranges::count(own, own[0]) == std::ssize(own)) own.resize(1);
    text += fmt::format("{}{}", text.empty() ? "" : ", ", fmt::join(own, " and "));
  }
  return fmt::format("nearest weights of the ranks' parts: {}; {:.3g} of the gradient stays unexplained",
                     text, fitted.left);
}

// Parts that are cut to one length before they are added up; shorter ones keep theirs.
std::optional<Finding> diagnose_clipped_parts(ComparedStep& one, const std::vector<std::string>& names,
                                              const Fitted& fitted) {
  // By rank where all micro-batches of a rank have one weight, else by micro-batch.
  const double near = std::max(one.limit(), 1e-6);
  const auto close = [&](double a, double b) { return std::abs(a - b) <= near * std::abs(b); };
  struct Part {
    double weight = 0, norm = 0;
    int rank = 0;
  };
  std::vector<Part> by_rank, by_cell;
  bool one_each = true;
  for (int rank = 0; rank < one.ranks(); ++rank) {
    Tensors sum;
    double weight = NAN;
    for (std::size_t c = 0; c < fitted.weights.size(); ++c) {
      if (one.cells()[c].rank != rank) continue;
      one_each = one_each && (std::isnan(weight) || close(fitted.weights[c], weight));
      weight = fitted.weights[c];
      by_cell.push_back({weight, fitted.norms[c], rank});
      for (std::size_t i = 0; i < one.parameters().size(); ++i) {
        if (sum.size() <= i) sum.push_back(at::zeros_like(one.parameters()[i].expected));
        sum[i] += one.cells()[c].part[i];
      }
    }
    if (!sum.empty()) by_rank.push_back({weight, norm_of(sum), rank});
  }
  const auto& parts = one_each ? by_rank : by_cell;
  // The longest part as it is added: all that are shortened have that length.
  double most = 0, limit = 0;
  for (const Part& part : parts) {
    most = std::max(most, part.weight);
    limit = std::max(limit, part.weight * part.norm);
  }
  std::size_t shortened = 0, kept = 0;
  for (const Part& part : parts) {
    if (!(part.weight > 0)) return std::nullopt;
    if (close(part.weight * part.norm, limit))
      ++shortened;
    else if (close(part.weight, most))
      ++kept;
    else
      return std::nullopt;
  }
  if (shortened < 2 || shortened + kept != parts.size()) return std::nullopt;
  std::vector<std::string> lengths;
  for (const Part& part : parts)
    lengths.push_back(fmt::format("{:.6g} of {:.6g}", part.weight * part.norm, part.norm));
  return Finding{
      finding_id::clipped_before_reduction,
      fmt::format("{}: the parts of {} are cut to one length before they are added up ({} of {} "
                  "shortened): clipped before the reduction, by norms of their own",
                  subject(one, names), one_each ? "the ranks" : "the micro-batches", shortened, parts.size()),
      {fmt::format("length as added, of length as it is: {}", fmt::join(lengths, ", "))}};
}

// Parts that are not in the sum at all, where the others are as they should be.
std::optional<Finding> diagnose_missing_parts(const ComparedStep& one, const std::vector<std::string>& names,
                                              const Fitted& fitted) {
  const double near = std::max(one.limit(), kNoWeight);
  std::map<int, std::vector<int>> missing;  // micro-batches by rank
  std::map<int, std::size_t> all;
  for (std::size_t c = 0; c < fitted.weights.size(); ++c) {
    const ComparedStep::Cell& cell = one.cells()[c];
    ++all[cell.rank];
    if (std::abs(fitted.weights[c]) <= near)
      missing[cell.rank].push_back(cell.micro_batch);
    else if (!(std::abs(fitted.weights[c] - 1) <= near))
      return std::nullopt;
  }
  if (missing.empty()) return std::nullopt;
  bool whole = true;
  std::vector<std::string> parts;
  for (const auto& [rank, micro_batches] : missing) {
    const bool of_rank = micro_batches.size() == all[rank];
    whole = whole && of_rank;
    parts.push_back(of_rank
                        ? fmt::format("rank {}", rank)
                        : fmt::format("micro-batch {} of rank {}", fmt::join(micro_batches, " and "), rank));
  }
  return Finding{whole ? finding_id::missing_rank_part : finding_id::missing_data_part,
                 fmt::format("{}: without the part of {}; the others are in it as they should be",
                             subject(one, names), fmt::join(parts, ", ")),
                 {text_of(one, fitted)}};
}

// Scatter up to which a direction is sure: up to 5 times too small, as errors go together through a network.
constexpr double kTold = 1.0 / 32, kLeans = 1.0 / 8;

// Leaves of causes that explain the gradient within rounding those to which it lies nearest.
void prefer_nearest(ComparedStep& one, std::vector<Cause>& fitting, const std::vector<std::string>& names) {
  if (one.allowance().exact) return;
  std::vector<Prediction> predictions;
  for (const Cause& cause : fitting) predictions.push_back(*one.weighted(weights_of(one, cause), names));
  for (std::size_t a = 0; a < fitting.size(); ++a)
    for (std::size_t b = 0; b < fitting.size();) {
      const Along along = a == b ? Along{} : one.between(predictions[a], predictions[b]);
      if (a == b || along.scatter > kTold || along.share > 0.5) {
        ++b;
        continue;
      }
      fitting.erase(fitting.begin() + static_cast<std::ptrdiff_t>(b));
      predictions.erase(predictions.begin() + static_cast<std::ptrdiff_t>(b));
      if (b < a) --a;
    }
}

// Copies on ranks that see the same batch, each of which has its own part of the gradient.
std::optional<Finding> diagnose_peers(const ComparedStep& one, const std::vector<std::string>& names) {
  std::string axes;
  for (const auto& parameter : one.parameters()) {
    if (!contains(names, parameter.name)) continue;
    const auto& sums = one.found().peer_sums;
    const auto peers = std::ranges::find(sums, parameter.name, &StepDump::PeerSum::name);
    if (peers == sums.end()) return std::nullopt;
    const double off = (peers->sum.to(at::kDouble) - parameter.expected).norm().item<double>();
    if (!(off <= one.spread_allowed() * parameter.scale)) return std::nullopt;
    axes = peers->axes;
  }
  if (axes.empty()) return std::nullopt;
  return Finding{
      finding_id::not_summed_over_axis,
      fmt::format("{}: not summed over {}, whose ranks each have the part of their own tokens, heads or "
                  "uses: {}",
                  subject(one, names), axes, list_names(names)),
      {fmt::format("the sum of what these ranks have is right; as given: {}", numbers_of(one, names))},
      "peers"};
}

// The parameter whose gradient changes most from one dump to the other; empty: no bit does.
std::pair<std::string, double> change(const StepDump::Named& before, const StepDump::Named& after) {
  std::pair<std::string, double> most;
  const std::map<std::string, at::Tensor> other(after.begin(), after.end());
  for (const auto& [name, tensor] : before) {
    const auto match = other.find(name);
    if (match == other.end() || tensor.equal(match->second)) continue;
    const double own = (tensor - match->second).abs().max().item<double>();
    if (most.first.empty() || own > most.second) most = {name, own};
  }
  return most;
}

std::optional<Finding> diagnose_leak(const ComparedStep& one, const RunAgain& again) {
  const auto& all = one.expected().samples;
  const std::set<std::int64_t> ids(all.begin(), all.end());
  const std::vector<std::int64_t> sorted(ids.begin(), ids.end());
  if (sorted.size() < 2) return std::nullopt;
  // The first and the last of all, and the ends of the middle; of few some are the same.
  std::set<std::int64_t> tried;
  for (const std::size_t place : {std::size_t{0}, sorted.size() / 2, sorted.size() - 1, std::size_t{1}}) {
    const std::int64_t document = sorted[place];
    if (document < 0 || !tried.insert(document).second) continue;
    Experiment setting{.muted_document = document};
    const auto before = again(setting);
    setting.perturbed = true;
    const auto after = before ? again(setting) : std::nullopt;
    if (!after) continue;
    const auto [name, found] = change(before->found.gradients, after->found.gradients);
    const auto [other, expected] = change(before->expected.gradients, after->expected.gradients);
    if (name.empty() || !other.empty()) continue;
    return Finding{
        finding_id::documents_leak,
        fmt::format("documents leak in this layout: changing document {}, whose own loss does not count, "
                    "changes the others' gradient of {} by {:.3g}",
                    document, name, found),
        {fmt::format("{}: one process's gradient keeps every bit, the layout's does not", setting.text())}};
  }
  return std::nullopt;
}

std::optional<Finding> diagnose_composition(const ComparedStep& one, const RunAgain& again,
                                            const std::string& subject, std::vector<std::string>& evidence) {
  std::vector<std::pair<Experiment, std::string>> removals;  // and what each takes away
  if (one.most_micro_batches() > 1)
    removals.emplace_back(Experiment{.one_micro_batch = true},
                          fmt::format("accumulation ({})", one.most_micro_batches()));
  const auto& axes = one.found().axes;
  for (std::size_t i = 0; axes.size() > 1 && i < axes.size(); ++i) {
    std::vector<std::string> others;
    for (std::size_t j = 0; j < axes.size(); ++j)
      if (j != i && axes[j].size > 1) others.push_back(fmt::format("{} ({})", axes[j].name, axes[j].size));
    if (!others.empty())
      removals.emplace_back(Experiment{.only_axis = static_cast<int>(i)},
                            fmt::format("{}", fmt::join(others, " and ")));
  }
  std::vector<std::string> needed;  // without each of these all is right
  for (const auto& [setting, without] : removals) {
    const auto other = made_under(setting, again);
    if (!other) continue;
    const bool right = other->same() && other->finite();
    evidence.push_back(fmt::format(
        "{}: {}", text_of(one, setting),
        right ? fmt::format("all {} parameters are right", other->parameters().size())
              : fmt::format("{} of {} parameters off", other->off().size(), other->parameters().size())));
    if (right && !contains(needed, without)) needed.push_back(without);
  }
  if (needed.size() == 1) evidence.push_back("it takes " + needed[0] + " to be wrong");
  if (needed.size() < 2) return std::nullopt;
  return Finding{finding_id::composition,
                 fmt::format("{} wrong with {} together, right without any one of them", subject,
                             fmt::join(needed, " and ")),
                 evidence};
}

// The one ratio of all the named parameters, if there is one and it is not 1.
std::optional<double> scale_of(ComparedStep& one, const std::vector<std::string>& names) {
  Tensors errors, direction;
  for (const Parameter* parameter : where_it_shows(one, names)) {
    errors.push_back(parameter->found - parameter->expected);
    direction.push_back(parameter->expected);
  }
  const Along along_itself = along(errors, direction, direction, one.allowance().bounds.unit);
  const double ratio = 1 + along_itself.share;
  if (std::isinf(along_itself.scatter) || !std::isfinite(ratio)) return std::nullopt;
  const std::vector<double> weights(std::max<std::size_t>(1, one.cells().size()), ratio);
  return one.is(weights, names).value_or(false) ? std::optional(ratio) : std::nullopt;
}

// The 16-bit type of all numbers found, if the run is in a finer one and nothing else is wrong.
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

// The quantity in the run that has that size.
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
  // The count by which it would have to be divided.
  const double count = one.targets() / ratio, whole = std::round(count);
  if (!all || !(count >= 1)) return ", which is no size in the run";
  constexpr double kHalf = 0.5;  // any number is that near to a whole one
  const bool is_whole = std::abs(count - whole) <= near * count && near * count < kHalf / 2;
  return fmt::format(", which is no size in the run: as if divided by {}{} {}, where there are {:.9g}{}",
                     is_whole ? "" : "about ",
                     fmt::format(fmt::runtime(is_whole ? "{:.0f}" : "{:.4g}"), count), one.counted(),
                     one.targets(),
                     is_whole && whole == static_cast<double>(one.found().figures.tokens)
                         ? "; that is the number of tokens, also of those that carry no loss"
                         : "");
}

// Where these are the parameters that are cut along one axis, and all of them: that axis.
std::optional<Axis> axis_of_cut(const ComparedStep& one, const std::vector<std::string>& names) {
  const auto& cut = one.found().cut;
  const auto first = std::ranges::find_if(cut, [&](const auto& each) { return contains(names, each.name); });
  if (first == cut.end()) return std::nullopt;
  std::size_t along = 0;
  for (const auto& each : cut)
    if (each.axis.name == first->axis.name) {
      if (!contains(names, each.name)) return std::nullopt;
      ++along;
    }
  if (along != names.size()) return std::nullopt;
  return first->axis;
}

// The axes along which ranks have parts of parameters: "tp (2)".
std::vector<Axis> axes_of_cuts(const ComparedStep& one) {
  std::vector<Axis> axes;
  for (const auto& each : one.found().cut)
    if (std::ranges::find(axes, each.axis.name, &Axis::name) == axes.end()) axes.push_back(each.axis);
  return axes;
}

Finding some_scaled(const ComparedStep& one, const std::vector<std::string>& names, double ratio) {
  const auto axis = axis_of_cut(one, names);
  const double factor = factor_of(one, ratio);
  const std::string which = subject(one, names);
  const std::string size = axis && factor > 1 ? factors_of(one, factor) : "";
  const bool of_axis = axis && factor == axis->size;
  // Whole copies, whose gradient the ranks along that axis have alike.
  for (const Axis& along : axes_of_cuts(one))
    if (!axis && which != "all parameters" && ratio > 1 && factor == static_cast<double>(along.size))
      return {finding_id::some_parameters_scaled,
              fmt::format(
                  "{} scaled by {}: the size of {} ({}), along which each rank has the whole gradient and "
                  "it is summed once more (a summed axis in its placement, or a copy_to_tp() too many{})",
                  which, ratio_text(ratio), along.name, along.size,
                  factor == 2 ? "); or a weight that is used twice and counted twice" : ")")};
  if (!of_axis && size.empty())
    return {finding_id::some_parameters_scaled, fmt::format("{} scaled by {}{}", which, ratio_text(ratio),
                                                            hints_of(one, ratio, which == "all parameters"))};
  return {finding_id::cut_parameters_scaled,
          fmt::format("{}, which alone are cut along {} ({}), scaled by {}: {}", which, axis->name,
                      axis->size, ratio_text(ratio),
                      of_axis ? "the size of that axis, whose sum needs no factor"
                              : size + ", by which no other parameter is")};
}

// A term of the loss that is off by a factor (`factor_of_all`, if given), and only what it reaches. Its value
// does not tell a factor from another mean: a size of the run or a whole number is believed.
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
            finding_id::undecided,
            fmt::format("the loss term {} is another one: {:.9g}, expected {:.9g} (ratio {}, which is "
                        "no size in the run): a mean over other rows, a mean of ranks' or "
                        "micro-batches' means, or a factor of its own; off are {}",
                        name, value, expected, ratio_text(ratio), list_names(names)),
            {numbers_of(one, names),
             "to tell: the same with equal counts on all ranks and micro-batches (means of means "
             "are right there), and with the term alone"}};
      return Finding{finding_id::term_scaled,
                     fmt::format("the loss term {} is scaled by {}{}: it reaches {}", name, ratio_text(ratio),
                                 factor.empty() ? "" : ", " + factor, list_names(names)),
                     {numbers_of(one, names)}};
    }
  return std::nullopt;
}

// The experiments to make, in this order, as long as several causes fit.
std::vector<Experiment> trials(const ComparedStep& one, const std::vector<Cause>& fitting) {
  using Counts = Experiment::Counts;
  std::vector<Experiment> all = {{.counts = Counts::kUneven},
                                 {.one_micro_batch = true},
                                 {.split_micro_batches = true},
                                 {.counts = Counts::kEqual}};
  std::vector<int> holders;
  for (int rank = 0; rank < one.ranks(); ++rank)
    if (one.targets_of(rank) > 0) holders.push_back(rank);
  // The missing part may be the rank's, or that of the data it has.
  for (const Cause& cause : fitting) {
    const auto other = std::ranges::find_if(holders, [&](int rank) { return rank != cause.rank; });
    if (cause.id == finding_id::missing_data_part && other != holders.end())
      all.push_back({.swapped = {cause.rank, *other}});
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
  std::size_t reached = 0;
  for (const Parameter& parameter : one.parameters()) {
    if (!parameter.found.isfinite().all().item<bool>()) broken.push_back(parameter.name);
    reached += parameter.expected.ne(0).any().item<bool>();
  }
  if (one.silent() && broken.size() >= reached)
    return {finding_id::not_finite_empty_micro_batch,
            "not finite in any parameter, and a micro-batch has no target: a mean over none is zero by zero",
            {"to make sure: leave that micro-batch out and compare again"}};
  return {finding_id::not_finite,
          fmt::format("not finite: {} parameters ({})", broken.size(), list_names(broken))};
}

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
    auto other = made_under(setting, again);
    if (!other) continue;
    std::vector<Cause> still;
    std::string dropped;
    for (auto& cause : fitting) {
      if (explains(*other, cause, names).value_or(true))
        still.push_back(std::move(cause));
      else
        dropped += " not " + cause.id + ";";
    }
    const auto first = std::ranges::find(other->parameters(), names[0], &Parameter::name);
    const double ratio = first == other->parameters().end() ? NAN : first->comparison.ratio;
    evidence.push_back(fmt::format("{}: ratio of {} {:.6g}, {} of {} parameters off;{}",
                                   text_of(one, setting), names[0], ratio, other->off().size(),
                                   other->parameters().size(), dropped.empty() ? " still fits" : dropped));
    fitting = std::move(still);
    tried.any = true;
    tried.emptied = tried.emptied || setting.empty_rank >= 0 || setting.only_axis >= 0;
    tried.swapped = tried.swapped || setting.swapped[0] >= 0;
  }
  return tried;
}

Finding unexplained(ComparedStep& one, const std::vector<std::string>& names, bool all,
                    const std::optional<Fitted>& fitted, std::vector<std::string> evidence) {
  Finding finding;
  finding.id = finding_id::unknown;
  // Whether what is off keeps its direction.
  const bool multiples = std::ranges::all_of(where_it_shows(one, names), [&](const Parameter* parameter) {
    return parameter->comparison.cosine >= 1 - std::max(one.limit() * one.limit() / 2, 1e-12);
  });
  finding.sentence = fmt::format(
      fmt::runtime(multiples ? "unknown pattern: each of {} of {} parameters has a factor of its own; {}: {}"
                             : "unknown pattern: the direction of {} of {} parameters differs; {}: {}"),
      names.size(), one.parameters().size(), numbers_of(one, names), list_names(names));
  // A forward that is another one along the axes on which ranks hold the model together changes the loss too.
  const double loss = one.found().figures.loss, right = one.expected().figures.loss;
  std::vector<std::string> together;
  for (const Axis& axis : axes_of_cuts(one)) together.push_back(fmt::format("{} ({})", axis.name, axis.size));
  std::string along;
  if (!together.empty() && std::abs(loss - right) > std::max(one.limit(), 1e-9) * std::abs(right)) {
    along = fmt::format(
        "a forward that computes another loss along {} ({:.9g}, expected {:.9g}): a bias or a "
        "residual that is added before reduce_from_tp(), once by each rank, or one left out",
        fmt::join(together, " and "), loss, right);
    finding.sentence += "; perhaps " + along;
  }
  if (const auto terms = other_terms(one); !terms.empty())
    evidence.push_back("terms of the loss: " + list_names(terms));
  if (fitted) {
    evidence.push_back(text_of(one, *fitted));
    constexpr double kElsewhere = 1e-3;
    if (all && fitted->left > std::max(kElsewhere, one.limit())) {
      finding.id = finding_id::undecided;
      finding.sentence = fmt::format(
          "all parameters: {:.3g} of the gradient is in no way made of this step's micro-batches: {}other "
          "weights of samples or tokens within one (each sample's own mean); or gradients left from an "
          "earlier step; or other targets or parameters than the reference has; or a wrong model; {}",
          fitted->left, along.empty() ? "" : along + "; or ", numbers_of(one, names));
      evidence.push_back(
          "to tell: dump the first step after the start (gradients left from earlier are not there), with "
          "initial checksums under \"ranks\", then one sample alone on one rank (a model or its targets)");
    }
  } else if (one.assigned_otherwise()) {
    finding.id = finding_id::undecided;
    finding.sentence = fmt::format(
        "{}: not told, because the targets lie otherwise on ranks and micro-batches in the two "
        "dumps, so that the reference's parts are not those of these ranks; {}",
        subject(one, names), numbers_of(one, names));
    evidence.push_back("to tell: make the reference with the samples assigned as in the run");
  }
  finding.evidence = std::move(evidence);
  return finding;
}

}  // namespace

std::vector<Finding> diagnose_rivals(ComparedStep& one, std::vector<std::string>* ambiguous) {
  const std::vector<std::string> names = all_names(one);
  const Prediction right = one.right();
  std::vector<Cause> nearer;
  std::vector<std::string> evidence, hidden;
  for (auto& cause : causes_of(one)) {
    Prediction prediction;
    if (!logs_as(cause, one) || !one.is(weights_of(one, cause), names, &prediction).value_or(false)) continue;
    const Along along = one.between(right, prediction);
    if (std::isinf(along.scatter)) continue;  // the same gradient
    std::vector<double> moved;
    for (std::size_t i = 0; i < names.size(); ++i)
      moved.push_back(distance(prediction.gradient[i], right.gradient[i]));
    const auto numbers =
        fmt::format("{} would move the gradient by {:.2g} of its norm; found {:.2g} +- {:.2g} of that way",
                    cause.id, norm_of(moved) / one.norm(), along.share, along.scatter);
    if (along.scatter <= kLeans && along.share > 0.5) {
      evidence.push_back(numbers);
      nearer.push_back(std::move(cause));
    } else if (along.scatter > kTold) {
      hidden.push_back(numbers);
    }
  }
  if (nearer.empty()) {
    for (const auto& numbers : hidden)
      if (ambiguous)
        ambiguous->push_back(
            "not told from the right gradient in this precision: " + numbers +
            "; a run in fp32, --alone with the same micro-batches or more uneven counts tell");
    return {};
  }
  prefer_nearest(one, nearer, names);
  const bool sure =
      same_ids(nearer) && std::ranges::all_of(nearer, [&](const Cause& cause) {
        return one.between(right, *one.weighted(weights_of(one, cause), names)).scatter <= kTold;
      });
  std::string text = "all parameters: " + nearer[0].sentence;
  for (std::size_t i = 1; i < nearer.size(); ++i) text += "; or " + nearer[i].sentence;
  if (!sure && same_ids(nearer)) text += "; or rounding that looks like it";
  evidence.emplace_back("within what rounding may do, but nearer to the mistake than to the right gradient");
  if (!sure) evidence.push_back(would_tell(nearer));
  return {{sure ? nearer[0].id : finding_id::undecided, text, evidence}};
}

// Parameters that alone are not summed: the loop sums the others.
std::string which_of(const ComparedStep& one, const std::string& id, const std::vector<std::string>& names) {
  return id == finding_id::not_summed_over_axis && subject(one, names) != "all parameters" ? "some" : "";
}

std::optional<Finding> diagnose_unsummed(ComparedStep& one) {
  const std::vector<std::string> names = one.off();
  if (names.empty() || !one.finite()) return std::nullopt;
  if (auto peers = diagnose_peers(one, names)) return peers;
  for (const Cause& cause : unsummed_causes(one))
    if (explains(one, cause, names).value_or(false))
      return Finding{cause.id,
                     subject(one, names) + ": " + cause.sentence,
                     {fmt::format("rank 0 has the sum of its own parts along that axis; as given: {}",
                                  numbers_of(one, names))},
                     which_of(one, cause.id, names)};
  return std::nullopt;
}

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
    std::erase_if(fitting, [](const Cause& cause) {
      return cause.id == finding_id::mean_of_micro_batch_means_by_rank;
    });
  // The twins of commoner causes, the same numbers in all but one experiment, count where that could be made.
  const auto is_twin = [&](const Cause& cause) {
    return (cause.id == finding_id::missing_data_part && !tried.swapped) ||
           (cause.id == finding_id::averaged_over_holders && !tried.emptied && one.holders() == one.ranks());
  };
  if (!std::ranges::all_of(fitting, is_twin)) std::erase_if(fitting, is_twin);
  const auto with_evidence = [&](Finding finding) -> std::vector<Finding> {
    finding.evidence.insert(finding.evidence.begin(), evidence.begin(), evidence.end());
    return {finding};
  };
  if (!fitting.empty()) {
    const bool decided = same_ids(fitting);
    std::string text;
    for (std::size_t i = 0; i < fitting.size(); ++i) {
      const Cause& cause = fitting[i];
      if (i > 0 && decided && !cause.axis.empty())
        text += fmt::format(" or {} ({:.0f})", cause.axis, one.size_of(cause.axis));
      else
        text += (text.empty() ? "" : "; or ") + cause.sentence;
    }
    // A mistake of counts or of the mesh reaches all parameters: of a few with one ratio only that is known.
    if (const auto ratio = all ? std::nullopt : scale_of(one, names)) {
      if (auto term = diagnose_term(one, names, *ratio)) return {*term};
      return with_evidence(some_scaled(one, names, *ratio));
    }
    if (!decided) evidence.push_back(would_tell(fitting));
    const std::string verb = std::isdigit(static_cast<unsigned char>(text[0])) ? " scaled by " : ": ";
    return with_evidence({decided ? fitting[0].id : finding_id::undecided,
                          subject(one, names) + verb + text,
                          {},
                          decided ? which_of(one, fitting[0].id, names) : ""});
  }

  if (auto term = diagnose_term(one, names)) return {*term};
  Tensors found, right;
  for (const Parameter& parameter : one.parameters())
    found.push_back(parameter.found), right.push_back(parameter.expected);
  if (auto values = diagnose_values(found, right, std::max(one.limit(), 1e-9))) return with_evidence(*values);

  if (again) {
    if (const auto leak = diagnose_leak(one, again)) return with_evidence(*leak);
    if (auto together = diagnose_composition(one, again, subject(one, names), evidence)) return {*together};
  }

  // One ratio for all of them, of no known origin; or several. Rounding may hide it in some parameters.
  if (!one.allowance().exact && !all)
    if (const auto ratio = scale_of(one, all_names(one)); ratio && *ratio != 0)
      names = all_names(one), all = true;
  if (const auto ratio = scale_of(one, names)) {
    Finding finding = some_scaled(one, names, *ratio);
    if (*ratio == 0)
      finding.id = finding_id::gradient_lost;
    else if (all)
      finding.id = finding_id::scaled_by_factor;
    const auto fitted = all && !one.allowance().exact ? fit_weights(one, names) : std::nullopt;
    if (fitted && nearer_to_other_weights(*fitted, *ratio)) {
      finding.id = finding_id::undecided;
      finding.sentence +=
          "; or parts of ranks or micro-batches with weights of their own, which rounding hides in " +
          one.precision();
      evidence.push_back(text_of(one, *fitted));
      evidence.push_back("to tell: --alone with the same micro-batches, or a run in fp32");
    }
    return with_evidence(finding);
  }
  const auto fitted = fit_weights(one, names);
  if (fitted && fitted->left <= (one.allowance().exact ? 1e-8 : one.limit()))
    for (const auto& told :
         {diagnose_missing_parts(one, names, *fitted), diagnose_clipped_parts(one, names, *fitted)})
      if (told) return with_evidence(*told);
  if (const char* type = coarser_type(one))
    return with_evidence(
        {finding_id::rounding,
         fmt::format("{}: every element is a number of {}, in a run in {}: summed or reduced in a "
                     "coarser type than the run's; {}",
                     subject(one, names), type, one.found().precision, numbers_of(one, names))});
  return {unexplained(one, names, all, fitted, std::move(evidence))};
}

}  // namespace isograd
