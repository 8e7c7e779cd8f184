#include "verify/resolution.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace isograd {
namespace {

constexpr std::int64_t kPieces = 16, kLeastPiece = 64;

// Calls `sums_of(parameter, begin, end)` for each piece of each parameter.
template <typename SumsOf>
std::vector<FitSums> cut(const Tensors& parameters, const SumsOf& sums_of) {
  std::vector<FitSums> pieces;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::int64_t numel = parameters[i].numel();
    if (numel == 0) continue;
    const std::int64_t number = std::clamp<std::int64_t>(numel / kLeastPiece, 1, kPieces);
    std::int64_t begin = 0;
    for (std::int64_t p = 0; p < number; ++p) {
      const std::int64_t end = begin + numel / number + (p < numel % number ? 1 : 0);
      pieces.push_back(sums_of(i, begin, end));
      begin = end;
    }
  }
  return pieces;
}

std::vector<FitSums> pieces_of(const Tensors& errors, const Tensors& direction, const Tensors& values) {
  return cut(errors, [&](std::size_t i, std::int64_t begin, std::int64_t end) {
    return fit_sums(errors[i], direction[i], values[i], begin, end);
  });
}

// Sums of gradient − reference along the reference.
std::vector<FitSums> pieces_between(const Tensors& gradient, const Tensors& reference) {
  return cut(reference, [&](std::size_t i, std::int64_t begin, std::int64_t end) {
    const PairSums sums = pair_sums(gradient[i], reference[i], begin, end);
    return FitSums{.error_direction = sums.along_other,
                   .direction = sums.other,
                   .error = sums.apart,
                   .value = sums.other,
                   .elements = static_cast<double>(end - begin)};
  });
}

Along fit(const std::vector<FitSums>& pieces, double unit) {
  double along = 0, all = 0;
  const auto weight = [&](const FitSums& piece) {
    // A number rounded once is off by up to u of itself: u²/12 in the mean square, at least.
    const double least = unit * unit / 12 * piece.value;
    return piece.elements / std::max(piece.error, least);
  };
  for (const FitSums& piece : pieces) {
    if (piece.direction <= 0) continue;
    along += piece.error_direction * weight(piece);
    all += piece.direction * weight(piece);
  }
  if (all == 0) return {0, std::numeric_limits<double>::infinity()};
  if (!std::isfinite(all)) return {all - all, all - all};  // NaN: what is not finite lies nowhere
  Along result{.share = along / all};
  double squares = 0;
  for (const FitSums& piece : pieces) {
    if (piece.direction <= 0) continue;
    const double left = (piece.error_direction - result.share * piece.direction) * weight(piece);
    squares += left * left;
  }
  // Few pieces may agree by chance: no better than elements that are off each by itself.
  result.scatter = std::max(std::sqrt(squares) / all, 1 / std::sqrt(all));
  return result;
}

// The same pieces with the gradient times 1 + δ.
std::vector<FitSums> scaled(std::vector<FitSums> pieces, double more) {
  for (FitSums& piece : pieces) {
    const double e = piece.error, ed = piece.error_direction, d = piece.direction;
    piece.error_direction = (1 + more) * ed + more * d;
    piece.error = (1 + more) * (1 + more) * e + 2 * more * (1 + more) * ed + more * more * d;
  }
  return pieces;
}

// ‖e − share · d‖ of ‖d‖.
double left_of(const std::vector<FitSums>& pieces, double share) {
  double left = 0, all = 0;
  for (const FitSums& piece : pieces) {
    left += piece.error - 2 * share * piece.error_direction + share * share * piece.direction;
    all += piece.direction;
  }
  return std::sqrt(std::max(left, 0.0) / all);
}

// `allowed`: what the scale of pieces may be off by, from them and their fit.
using Allowed = std::function<double(const std::vector<FitSums>& pieces, const Along& fitted)>;

Allowed allowed_of_whole(double unit, double alone = 0) {
  return [=](const auto&, const Along& fitted) { return 4 * (unit + fitted.scatter + std::abs(alone)); };
}
Allowed allowed_of_one(double allowed) {
  return [=](const auto& pieces, const Along& fitted) {
    return allowed + 4 * fitted.scatter + 2 * left_of(pieces, fitted.share);
  };
}

WholeScale held_to(const std::vector<FitSums>& pieces, double unit, const Allowed& allowed) {
  const Along fitted = fit(pieces, unit);
  WholeScale result{.tested = true, .error = fitted.share, .allowed = allowed(pieces, fitted)};
  result.passed = std::abs(result.error) <= result.allowed;  // not for NaN
  return result;
}

WholeScale test(const std::vector<FitSums>& pieces, double unit, const Allowed& allowed) {
  WholeScale result = held_to(pieces, unit, allowed);
  // The largest error of scale that still passes on a fine grid, a step up: above it all fail.
  constexpr double kStep = 1.05;
  for (double more = unit / 8; more < 1; more *= kStep)
    for (const double signed_more : {more, -more})
      if (held_to(scaled(pieces, signed_more), unit, allowed).passed) result.found_from = more * kStep;
  return result;
}

}  // namespace

Along along(const Tensors& errors, const Tensors& direction, const Tensors& values, double unit) {
  return fit(pieces_of(errors, direction, values), unit);
}

bool scale_agrees(const Tensors& gradient, const Tensors& reference, double unit) {
  return held_to(pieces_between(gradient, reference), unit, allowed_of_whole(unit)).passed;
}

WholeScale test_scale(const Tensors& gradient, const Tensors& reference, double unit, double alone) {
  return test(pieces_between(gradient, reference), unit, allowed_of_whole(unit, alone));
}

WholeScale test_scale_of_one(const at::Tensor& gradient, const at::Tensor& reference, double unit,
                             double allowed) {
  return test(pieces_between({gradient}, {reference}), unit, allowed_of_one(allowed));
}

bool scale_of_one_agrees(const at::Tensor& gradient, const at::Tensor& reference, double unit,
                         double allowed) {
  return held_to(pieces_between({gradient}, {reference}), unit, allowed_of_one(allowed)).passed;
}

double smallest_scale_error(const at::Tensor& gradient, const at::Tensor& reference, double allowed,
                            const PairSums& sums) {
  // Relative to the gradient: a square of its own size may be no number.
  const bool known = holds(sums.own) && holds(std::max({sums.own, sums.other, sums.apart}));
  const double unit = known ? std::sqrt(sums.own) : norm_of(gradient);
  if (unit == 0) return norm_of(reference) <= allowed ? std::numeric_limits<double>::infinity() : 0;
  const PairSums relative =
      known ? PairSums{.own = 1, .apart = sums.apart / sums.own, .along_own = sums.along_own / sums.own}
            : pair_sums(gradient / unit, reference / unit);
  const double square = relative.own, cross = relative.along_own;
  allowed /= unit;
  // ‖e + δ g‖² = allowed²
  const double rest = relative.apart - allowed * allowed;
  if (!(rest <= 0)) return 0;  // fails as it is
  if (!(square > 0)) return std::numeric_limits<double>::infinity();
  return (std::abs(cross) + std::sqrt(cross * cross - square * rest)) / square;
}

double smallest_scale_error(const at::Tensor& gradient, const at::Tensor& reference, double allowed) {
  return smallest_scale_error(gradient, reference, allowed, pair_sums(gradient, reference));
}

// The root of a sum of squares; where that is no number, of what `made` gives, relative to its largest
// element.
template <typename Made>
static double root_of(double squares, const Made& made) {
  if (holds(squares)) return std::sqrt(squares);
  const at::Tensor tensor = made();
  if (tensor.numel() == 0) return 0;
  const double largest = tensor.abs().max().template item<double>();  // NaN where there is one
  if (!(largest > 0) || !std::isfinite(largest)) return largest;
  return largest * std::sqrt((tensor / largest).square().sum().template item<double>());
}

double norm_of(const at::Tensor& tensor) {
  return root_of(squares(tensor), [&] { return tensor; });
}

double distance(const at::Tensor& a, const at::Tensor& b, double factor) {
  return root_of(squares_apart(a, b, factor), [&] { return a - factor * b; });
}

double missing_in(const Tensors& parts, const at::Tensor& whole) {
  return root_of(squares_missing(whole, parts), [&] {
    at::Tensor left = -whole;
    for (const at::Tensor& part : parts) left = left + part;
    return left;
  });
}

bool all_finite(const at::Tensor& tensor) {
  return std::isfinite(squares(tensor)) || tensor.isfinite().all().item<bool>();
}

double norm_of(const std::vector<double>& norms) {
  double squares = 0, largest = 0;
  for (const double norm : norms) {
    squares += norm * norm;
    largest = std::isnan(norm) ? norm : std::max(largest, std::abs(norm));  // NaN stays
  }
  if (holds(squares) || !(largest > 0) || !std::isfinite(largest)) return std::sqrt(squares);
  squares = 0;
  for (const double norm : norms) squares += (norm / largest) * (norm / largest);
  return largest * std::sqrt(squares);
}

double norm_of(const Tensors& tensors) {
  std::vector<double> norms;
  for (const at::Tensor& tensor : tensors) norms.push_back(norm_of(tensor));
  return norm_of(norms);
}

}  // namespace isograd
