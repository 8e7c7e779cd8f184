// Causes held against a gradient: in whose words, how near, and what weights of the parts come nearest.
#include "verify/fits.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>

namespace isograd {
namespace {

constexpr double kNothing = 1e-6;  // of a weight

}  // namespace

std::vector<std::string> all_names(const ComparedStep& one) {
  std::vector<std::string> names;
  for (const auto& parameter : one.parameters()) names.push_back(parameter.name);
  return names;
}

bool logs_as(const Cause& cause, const ComparedStep& one) {
  const double found = one.found().figures.loss, expected = one.expected().figures.loss;
  if (cause.loss == Cause::Loss::kAny || std::isnan(found) || std::isnan(expected) || expected == 0)
    return true;
  const double wanted = cause.loss == Cause::Loss::kRight ? 1 : cause.weight(one, {});
  const bool is = std::abs(found / expected - wanted) <= std::max(one.limit(), 1e-9) * wanted;
  return cause.loss == Cause::Loss::kNotScaled ? !is || wanted == 1 : is;
}

std::optional<bool> explains(ComparedStep& one, const Cause& cause, const std::vector<std::string>& names) {
  const auto is = one.is(weights_of(one, cause), names);
  if (!is) return std::nullopt;
  return *is && logs_as(cause, one);
}

std::string subject(const ComparedStep& one, const std::vector<std::string>& names) {
  if (names.size() == one.parameters().size()) return "all parameters";
  std::size_t silent = 0;
  for (std::size_t i = 0; i < one.parameters().size(); ++i)
    silent += !one.shows(i) && std::find(names.begin(), names.end(), one.parameters()[i].name) == names.end();
  if (names.size() + silent == one.parameters().size()) return "all parameters";
  return fmt::format("only {} of {} parameters ({})", names.size(), one.parameters().size(),
                     list_names(names));
}

bool nearer_to_other_weights(const Fitted& fitted, double ratio) {
  const auto [least, most] = std::minmax_element(fitted.weights.begin(), fitted.weights.end());
  return *most - *least > std::abs(ratio - 1);
}

bool multiples(const ComparedStep& one, const std::vector<std::string>& names) {
  for (std::size_t i = 0; i < one.parameters().size(); ++i) {
    const auto& parameter = one.parameters()[i];
    if (one.shows(i) && std::find(names.begin(), names.end(), parameter.name) != names.end() &&
        !(parameter.comparison.cosine >= 1 - std::max(one.limit() * one.limit() / 2, 1e-12)))
      return false;
  }
  return true;
}

bool same_ids(const std::vector<Cause>& causes) {
  return std::all_of(causes.begin(), causes.end(), [&](const Cause& c) { return c.id == causes[0].id; });
}

std::string numbers_of(const ComparedStep& one, const std::vector<std::string>& names) {
  double low = HUGE_VAL, high = -HUGE_VAL, cosine = 1, error = 0;
  for (std::size_t i = 0; i < one.parameters().size(); ++i) {
    const auto& parameter = one.parameters()[i];
    if (!one.shows(i) || std::find(names.begin(), names.end(), parameter.name) == names.end()) continue;
    low = std::fmin(low, parameter.comparison.ratio);
    high = std::fmax(high, parameter.comparison.ratio);
    cosine = std::fmin(cosine, parameter.comparison.cosine);
    error = std::fmax(error, parameter.comparison.error);
  }
  return fmt::format("ratios {:.6g} to {:.6g}, cosine from {:.6g}, largest error {:.3g} of its scale", low,
                     high, cosine, error);
}

// What a person can do where nothing can be run again.
std::string would_tell(const std::vector<Cause>& fitting) {
  const auto has = [&](const char* part) {
    return std::any_of(fitting.begin(), fitting.end(),
                       [&](const Cause& cause) { return cause.id.find(part) != std::string::npos; });
  };
  std::vector<std::string> ways;
  if (has("micro_batch") || has("accumul")) ways.emplace_back("another number of micro-batches");
  if (has("axis") || has("rank")) ways.emplace_back("another number of ranks");
  if (has("mean") || has("count") || has("sum")) ways.emplace_back("more uneven counts");
  if (ways.empty()) ways.emplace_back("another cut of the batch");
  return fmt::format("to tell: the same with {}", fmt::join(ways, ", or with "));
}

std::optional<Fitted> fit_weights(ComparedStep& one, const std::vector<std::string>& names) {
  if (!one.find_parts()) return std::nullopt;
  Tensors columns(one.cells().size()), wanted;
  for (std::size_t i = 0; i < one.parameters().size(); ++i) {
    const auto& parameter = one.parameters()[i];
    if (std::find(names.begin(), names.end(), parameter.name) == names.end()) continue;
    wanted.push_back(parameter.found.reshape({-1}));
    for (std::size_t c = 0; c < columns.size(); ++c) {
      const at::Tensor part = one.cells()[c].part[i].reshape({-1});
      columns[c] = columns[c].defined() ? at::cat({columns[c], part}) : part;
    }
  }
  const at::Tensor matrix = at::stack(columns, 1), target = at::cat(wanted);
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

std::string text_of(const ComparedStep& one, const Fitted& fitted) {
  std::string text;
  for (int rank = 0; rank < one.ranks(); ++rank) {
    std::vector<std::string> own;  // one where all of a rank's micro-batches have the same
    for (std::size_t c = 0; c < fitted.weights.size(); ++c)
      if (one.cells()[c].rank == rank)
        own.push_back(fmt::format("{:.6g}", std::abs(fitted.weights[c]) < kNothing ? 0 : fitted.weights[c]));
    if (own.empty()) continue;
    if (std::all_of(own.begin(), own.end(), [&](const auto& weight) { return weight == own[0]; }))
      own.resize(1);
    text += fmt::format("{}{}", text.empty() ? "" : ", ", fmt::join(own, " and "));
  }
  return fmt::format("nearest weights of the ranks' parts: {}; {:.3g} of the gradient stays unexplained",
                     text, fitted.left);
}

// Parts that are cut to one length before they are added up: the weight of a long one is the limit over its
// norm, and the same limit for all of them; the others keep theirs.
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
  double most = 0;
  for (const Part& part : parts) most = std::max(most, part.weight);
  // The longest part as it is added: all that are shortened have that length.
  double limit = 0;
  for (const Part& part : parts) limit = std::max(limit, part.weight * part.norm);
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
      "clipped_before_reduction",
      fmt::format("{}: the parts of {} are cut to one length before they are added up ({} of {} "
                  "shortened): clipped before the reduction, by norms of their own",
                  subject(one, names), one_each ? "the ranks" : "the micro-batches", shortened, parts.size()),
      {fmt::format("length as added, of length as it is: {}", fmt::join(lengths, ", "))}};
}

// Parts that are not in the sum at all, where the others are as they should be.
std::optional<Finding> diagnose_missing_parts(const ComparedStep& one, const std::vector<std::string>& names,
                                              const Fitted& fitted) {
  const double near = std::max(one.limit(), kNothing);
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
  return Finding{whole ? "missing_rank_part" : "missing_data_part",
                 fmt::format("{}: without the part of {}; the others are in it as they should be",
                             subject(one, names), fmt::join(parts, ", ")),
                 {text_of(one, fitted)}};
}

namespace {

// How sure it must be towards which of two gradients a third lies: errors of rounding go together through a
// network, so that the scatter of the pieces is too small by up to five times.
constexpr double kTold = 1.0 / 32, kLeans = 1.0 / 8;

}  // namespace

void prefer_nearest(ComparedStep& one, std::vector<Cause>& fitting, const std::vector<std::string>& names) {
  if (one.allowance().exact) return;
  std::vector<Prediction> predictions;
  for (const Cause& cause : fitting) predictions.push_back(*prediction_of(one, cause, names));
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

std::vector<Finding> diagnose_rivals(ComparedStep& one, std::vector<std::string>* untold) {
  if (one.allowance().exact || !one.same() || !one.finite()) return {};
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
    const auto numbers = fmt::format(
        "{} would move the gradient by {:.2g} of its norm; found {:.2g} +- {:.2g} "
        "of that way",
        cause.id, norm_of(moved) / one.norm(), along.share, along.scatter);
    if (along.scatter <= kLeans && along.share > 0.5) {
      evidence.push_back(numbers);
      nearer.push_back(std::move(cause));
    } else if (along.scatter > kTold) {
      hidden.push_back(numbers);
    }
  }
  if (nearer.empty()) {
    if (untold && !hidden.empty())
      for (const auto& numbers : hidden)
        untold->push_back("not told from the right gradient in this precision: " + numbers +
                          "; a run in fp32, --alone with the same micro-batches or more uneven counts tell");
    return {};
  }
  prefer_nearest(one, nearer, names);
  const bool sure = same_ids(nearer) && std::all_of(nearer.begin(), nearer.end(), [&](const Cause& cause) {
                      return one.between(right, *prediction_of(one, cause, names)).scatter <= kTold;
                    });
  std::string text = "all parameters: " + nearer[0].sentence(one);
  for (std::size_t i = 1; i < nearer.size(); ++i) text += "; or " + nearer[i].sentence(one);
  if (!sure && same_ids(nearer)) text += "; or rounding that looks like it";
  evidence.emplace_back("within what rounding may do, but nearer to the mistake than to the right gradient");
  if (!sure) evidence.push_back(would_tell(nearer));
  return {{sure ? nearer[0].id : "undecided", text, evidence}};
}

}  // namespace isograd
