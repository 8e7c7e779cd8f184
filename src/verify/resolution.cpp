#include "verify/resolution.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace isograd {
namespace {

constexpr std::int64_t kPieces = 16, kLeastPiece = 64;

// The products that a fit takes from one piece of a parameter.
struct FitSums {
  double error_direction = 0, direction = 0, error = 0, value = 0;  // ⟨e, d⟩, ⟨d, d⟩, ⟨e, e⟩, ⟨v, v⟩
  double elements = 0;
};

double product(const at::Tensor& a, const at::Tensor& b) {
  return (a * b).sum().item<double>();
}

std::vector<FitSums> pieces_of(const Tensors& errors, const Tensors& direction, const Tensors& values) {
  std::vector<FitSums> pieces;
  for (std::size_t i = 0; i < errors.size(); ++i) {
    const std::int64_t numel = errors[i].numel();
    if (numel == 0) continue;
    const std::int64_t number = std::clamp<std::int64_t>(numel / kLeastPiece, 1, kPieces);
    const auto cut = [&](const at::Tensor& tensor) { return tensor.reshape({-1}).tensor_split(number); };
    const auto e = cut(errors[i]), d = cut(direction[i]), v = cut(values[i]);
    for (std::size_t p = 0; p < e.size(); ++p)
      pieces.push_back({.error_direction = product(e[p], d[p]),
                        .direction = product(d[p], d[p]),
                        .error = product(e[p], e[p]),
                        .value = product(v[p], v[p]),
                        .elements = static_cast<double>(e[p].numel())});
  }
  return pieces;
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

Tensors minus(const Tensors& a, const Tensors& b) {
  Tensors difference;
  for (std::size_t i = 0; i < a.size(); ++i) difference.push_back(a[i] - b[i]);
  return difference;
}

double scale_allowed(const Along& fitted, double unit, double alone = 0) {
  return 4 * (unit + fitted.scatter + std::abs(alone));
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

WholeScale test_one(const std::vector<FitSums>& pieces, double unit, double allowed) {
  const Along fitted = fit(pieces, unit);
  WholeScale result{.tested = true,
                    .error = fitted.share,
                    .allowed = allowed + 4 * fitted.scatter + 2 * left_of(pieces, fitted.share)};
  result.passed = std::abs(result.error) <= result.allowed;  // not for NaN
  return result;
}

// The largest error of scale that still passes on a fine grid, a step up: above it all fail.
template <typename Passes>
double found_from(const std::vector<FitSums>& pieces, double unit, const Passes& passes) {
  double from = 0;
  constexpr double kStep = 1.05;
  for (double more = unit / 8; more < 1; more *= kStep)
    for (const double signed_more : {more, -more})
      if (passes(scaled(pieces, signed_more))) from = more * kStep;
  return from;
}

}  // namespace

Along along(const Tensors& errors, const Tensors& direction, const Tensors& values, double unit) {
  return fit(pieces_of(errors, direction, values), unit);
}

bool scale_agrees(const Tensors& gradient, const Tensors& reference, double unit) {
  const Along fitted = along(minus(gradient, reference), reference, reference, unit);
  return std::abs(fitted.share) <= scale_allowed(fitted, unit);
}

WholeScale test_scale(const Tensors& gradient, const Tensors& reference, double unit, double alone) {
  const auto pieces = pieces_of(minus(gradient, reference), reference, reference);
  const Along fitted = fit(pieces, unit);
  WholeScale result{.tested = true, .error = fitted.share, .allowed = scale_allowed(fitted, unit, alone)};
  result.passed = std::abs(result.error) <= result.allowed;  // not for NaN
  result.found_from = found_from(pieces, unit, [&](const auto& other) {
    const Along there = fit(other, unit);
    return std::abs(there.share) <= scale_allowed(there, unit, alone);
  });
  return result;
}

WholeScale test_scale_of_one(const at::Tensor& gradient, const at::Tensor& reference, double unit,
                             double allowed) {
  const auto pieces = pieces_of({gradient - reference}, {reference}, {reference});
  WholeScale result = test_one(pieces, unit, allowed);
  result.found_from =
      found_from(pieces, unit, [&](const auto& other) { return test_one(other, unit, allowed).passed; });
  return result;
}

bool scale_of_one_agrees(const at::Tensor& gradient, const at::Tensor& reference, double unit,
                         double allowed) {
  return test_one(pieces_of({gradient - reference}, {reference}, {reference}), unit, allowed).passed;
}

double smallest_scale_error(const at::Tensor& gradient_, const at::Tensor& reference, double allowed) {
  // Relative to the gradient: a square of its own size may be no number.
  const double unit = norm_of(gradient_);
  if (unit == 0) return norm_of(reference) <= allowed ? std::numeric_limits<double>::infinity() : 0;
  const at::Tensor gradient = gradient_ / unit, error = gradient - reference / unit;
  allowed /= unit;
  const double square = product(gradient, gradient), cross = product(gradient, error);
  // ‖e + δ g‖² = allowed²
  const double rest = product(error, error) - allowed * allowed;
  if (!(rest <= 0)) return 0;  // fails as it is
  if (!(square > 0)) return std::numeric_limits<double>::infinity();
  return (std::abs(cross) + std::sqrt(cross * cross - square * rest)) / square;
}

// Between these a sum of squares has neither overflown nor lost anything but what is far below its last bit.
static bool holds(double squares) {
  constexpr double kLeast = 1e-270, kMost = 1e300;
  return squares >= kLeast && squares <= kMost;
}

double norm_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  const double squares = tensor.square().sum().item<double>();
  if (holds(squares)) return std::sqrt(squares);
  const double largest = tensor.abs().max().item<double>();  // NaN where there is one
  if (!(largest > 0) || !std::isfinite(largest)) return largest;
  return largest * std::sqrt((tensor / largest).square().sum().item<double>());
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
