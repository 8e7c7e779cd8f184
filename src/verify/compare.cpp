#include "verify/compare.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <tuple>

#include "kernels/threads/parallel_for.hpp"
#include "verify/diagnosis.hpp"

namespace isograd {
namespace {

constexpr std::int64_t kBlock = 1 << 14;  // elements that one thread adds up, whatever the number of threads
constexpr std::size_t kLanes = 8;

// Between these a sum of squares has neither overflown nor lost anything but what is far below its last bit.
bool holds(double squares) {
  constexpr double kLeast = 1e-270, kMost = 1e300;
  return squares >= kLeast && squares <= kMost;
}

// N sums over elements [begin, end) of what `of` makes of the tensors' elements, block by block.
template <std::size_t N, std::size_t M, typename Of>
std::array<double, N> summed(std::array<at::Tensor, M> tensors, std::int64_t begin, std::int64_t end,
                             const Of& of) {
  std::array<const double*, M> values;
  for (std::size_t m = 0; m < M; ++m) {
    ISOGRAD_INVARIANT(tensors[m].numel() == tensors[0].numel(), "sums over tensors of other sizes");
    tensors[m] = tensors[m].to(at::kCPU, at::kDouble).contiguous();  // usually the tensor itself
    values[m] = tensors[m].template const_data_ptr<double>();
  }
  const std::int64_t blocks = (end - begin + kBlock - 1) / kBlock;
  std::vector<std::array<double, N>> of_block(static_cast<std::size_t>(std::max<std::int64_t>(blocks, 0)));
  parallel_for(0, blocks, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t b = first; b < last; ++b) {
      std::array<std::array<double, kLanes>, N> lanes{};
      const auto add = [&lanes, &of, values](std::int64_t i, std::size_t lane) {
        const auto more = std::apply([&](const auto*... value) { return of(value[i]...); }, values);
        for (std::size_t n = 0; n < N; ++n) lanes[n][lane] += more[n];
      };
      std::int64_t i = begin + b * kBlock;
      const std::int64_t stop = std::min(end, i + kBlock);
      for (; i + static_cast<std::int64_t>(kLanes) <= stop; i += kLanes)
        for (std::size_t lane = 0; lane < kLanes; ++lane) add(i + static_cast<std::int64_t>(lane), lane);
      for (std::size_t lane = 0; i < stop; ++i, ++lane) add(i, lane);
      for (std::size_t n = 0; n < N; ++n)
        for (const double lane : lanes[n]) of_block[static_cast<std::size_t>(b)][n] += lane;
    }
  });
  std::array<double, N> sums{};
  for (const auto& block : of_block)
    for (std::size_t n = 0; n < N; ++n) sums[n] += block[n];
  return sums;
}

constexpr std::int64_t kPieces = 16, kLeastPiece = 64;

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

// Sums of gradient − reference along the reference.
std::vector<FitSums> pieces_between(const Tensors& gradient, const Tensors& reference) {
  return cut(reference, [&](std::size_t i, std::int64_t begin, std::int64_t end) {
    const PairSums sums = pair_sums(gradient[i], reference[i], begin, end);
    return FitSums{sums.along_other, sums.other, sums.apart, sums.other, static_cast<double>(end - begin)};
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

// `allowed`: what the scale of pieces may be off by, from them and their fit.
using AllowedScale = std::function<double(const std::vector<FitSums>& pieces, const Along& fitted)>;

AllowedScale allowed_of_whole(double unit, const ScaleRounding& rounding) {
  return [=](const auto&, const Along& fitted) {
    const double least = unit + fitted.scatter;  // a NaN of one process allows no more
    return kRoundingFactor * std::max(least, std::min(least + std::abs(rounding.alone), rounding.most));
  };
}
AllowedScale allowed_of_one(double allowed) {
  return [=](const auto& pieces, const Along& fitted) {
    double left = 0, all = 0;  // ‖e − share · d‖², ‖d‖²
    for (const FitSums& piece : pieces) {
      left += piece.error - 2 * fitted.share * piece.error_direction +
              fitted.share * fitted.share * piece.direction;
      all += piece.direction;
    }
    return allowed + 4 * fitted.scatter + 2 * std::sqrt(std::max(left, 0.0) / all);
  };
}

WholeScale held_to(const std::vector<FitSums>& pieces, double unit, const AllowedScale& allowed) {
  const Along fitted = fit(pieces, unit);
  WholeScale result{.tested = true, .error = fitted.share, .allowed = allowed(pieces, fitted)};
  result.passed = std::abs(result.error) <= result.allowed;  // not for NaN
  return result;
}

WholeScale test(const std::vector<FitSums>& pieces, double unit, const AllowedScale& allowed) {
  WholeScale result = held_to(pieces, unit, allowed);
  // The largest error of scale that still passes on a fine grid, a step up: above it all fail.
  constexpr double kStep = 1.05;
  for (double more = unit / 8; more < 1; more *= kStep)
    for (const double signed_more : {more, -more})
      if (held_to(scaled(pieces, signed_more), unit, allowed).passed) result.found_from = more * kStep;
  return result;
}

// The root of a sum of squares; where that over- or underflows, the norm of what `made` gives.
template <typename Made>
double root_of(double squares, const Made& made) {
  if (holds(squares)) return std::sqrt(squares);
  const at::Tensor tensor = made();
  if (tensor.numel() == 0) return 0;
  const double largest = tensor.abs().max().template item<double>();  // NaN where there is one
  if (!(largest > 0) || !std::isfinite(largest)) return largest;
  return largest * std::sqrt((tensor / largest).square().sum().template item<double>());
}

constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();

// The smallest δ for which (1 ± δ) g is further than `allowed` (a norm) from the reference; `sums` of both.
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

// Remembers the parameter that used most of its allowance. A NaN counts as the worst.
void note(Grade& grade, const ParameterVerdict& parameter, const Comparison& comparison) {
  const auto share = [](double error, double allowed) { return error > 0 ? error / allowed : 0.0; };
  const double share_now = share(comparison.error, comparison.allowed);
  if (grade.worst.empty() || std::isnan(comparison.error) ||
      (!std::isnan(grade.error) && share_now > share(grade.error, grade.allowed))) {
    grade.worst = parameter.name;
    grade.error = comparison.error;
    grade.allowed = comparison.allowed;
  }
  if (!comparison.passed) ++grade.failed;
}

}  // namespace

PairSums pair_sums(const at::Tensor& a, const at::Tensor& b, std::int64_t begin, std::int64_t end) {
  const auto sums = summed<6, 2>({a, b}, begin, end, [](double x, double y) {
    const double apart = x - y;
    return std::array{x * x, y * y, x * y, apart * apart, apart * x, apart * y};
  });
  return {sums[0], sums[1], sums[2], sums[3], sums[4], sums[5]};
}

PairSums pair_sums(const at::Tensor& a, const at::Tensor& b) { return pair_sums(a, b, 0, a.numel()); }

FitSums fit_sums(const at::Tensor& error, const at::Tensor& direction, const at::Tensor& value,
                 std::int64_t begin, std::int64_t end) {
  const auto sums = summed<4, 3>({error, direction, value}, begin, end, [](double e, double d, double v) {
    return std::array{e * d, d * d, e * e, v * v};
  });
  return {sums[0], sums[1], sums[2], sums[3], static_cast<double>(end - begin)};
}

double squares_apart(const at::Tensor& a, const at::Tensor& b, double factor) {
  return summed<1, 2>({a, b}, 0, a.numel(), [factor](double x, double y) {
    const double apart = x - factor * y;
    return std::array{apart * apart};
  })[0];
}

double squares(const at::Tensor& tensor) {
  return summed<1, 1>({tensor}, 0, tensor.numel(), [](double x) { return std::array{x * x}; })[0];
}

Along along(const Tensors& errors, const Tensors& direction, const Tensors& values, double unit) {
  const auto sums_of = [&](std::size_t i, std::int64_t begin, std::int64_t end) {
    return fit_sums(errors[i], direction[i], values[i], begin, end);
  };
  return fit(cut(errors, sums_of), unit);
}

bool scale_agrees(const Tensors& gradient, const Tensors& reference, double unit,
                  const ScaleRounding& rounding) {
  return held_to(pieces_between(gradient, reference), unit, allowed_of_whole(unit, rounding)).passed;
}

WholeScale test_scale(const Tensors& gradient, const Tensors& reference, double unit,
                      const ScaleRounding& rounding) {
  return test(pieces_between(gradient, reference), unit, allowed_of_whole(unit, rounding));
}

WholeScale test_scale_of_one(const at::Tensor& gradient, const at::Tensor& reference, double unit,
                             double allowed) {
  return test(pieces_between({gradient}, {reference}), unit, allowed_of_one(allowed));
}

bool scale_of_one_agrees(const at::Tensor& gradient, const at::Tensor& reference, double unit,
                         double allowed) {
  return held_to(pieces_between({gradient}, {reference}), unit, allowed_of_one(allowed)).passed;
}

double norm_of(const at::Tensor& tensor) {
  return root_of(squares(tensor), [&] { return tensor; });
}

double distance(const at::Tensor& a, const at::Tensor& b, double factor) {
  return root_of(squares_apart(a, b, factor), [&] { return a - factor * b; });
}

double missing_in(const Tensors& parts, const at::Tensor& whole) {
  at::Tensor sum = at::zeros_like(whole);
  for (const at::Tensor& part : parts) sum.add_(part);
  return distance(sum, whole);
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

std::vector<double> norms_of(const Tensors& tensors) {
  std::vector<double> norms;
  for (const at::Tensor& tensor : tensors) norms.push_back(norm_of(tensor));
  return norms;
}

double norm_of(const Tensors& tensors) { return norm_of(norms_of(tensors)); }

double in_scales(double difference, double scale) {
  if (!std::isfinite(scale)) return kNothing;         // nothing is small against it
  return difference == 0 ? 0.0 : difference / scale;  // a gradient that is zero everywhere has s = 0
}

Comparison compare(const at::Tensor& gradient, const at::Tensor& reference, double scale, double allowed) {
  Comparison result;
  const PairSums sums = pair_sums(gradient, reference);
  const auto root = [](double squares, const at::Tensor& of) {
    return holds(squares) ? std::sqrt(squares) : norm_of(of);
  };
  const double own = root(sums.own, gradient), expected = root(sums.other, reference);
  // Normalizes both first where their squares would over- or underflow.
  const auto cosine = [&] {
    return holds(sums.own) && holds(sums.other)
               ? sums.product / (own * expected)
               : ((gradient / own) * (reference / expected)).sum().item<double>();
  };
  result.cosine = expected > 0 && own > 0 ? cosine() : kNothing;
  result.ratio = !(expected > 0) ? kNothing : own == 0 ? 0 : result.cosine * (own / expected);
  result.error = in_scales(holds(sums.apart) ? std::sqrt(sums.apart) : distance(gradient, reference), scale);
  result.residual =
      expected > 0 ? in_scales(distance(gradient, reference, result.ratio), scale) : result.error;
  result.allowed = allowed;
  result.passed = std::isfinite(result.error) && result.error <= result.allowed;
  result.scale_found = smallest_scale_error(gradient, reference, result.allowed * scale, sums);
  return result;
}

Bounds bounds_for(at::ScalarType dtype, int ranks, std::int64_t micro_batches) {
  Bounds bounds;
  // bf16 parameters have fp32 gradients: that is the type of the sums.
  bounds.unit_roundoff = dtype == at::kDouble ? 0x1p-53 : 0x1p-24;
  bounds.unit = dtype == at::kBFloat16 ? 0x1p-9 : dtype == at::kHalf ? 0x1p-11 : bounds.unit_roundoff;
  bounds.figures = dtype == at::kBFloat16 || dtype == at::kHalf ? 1e-2 : 1e-4;
  bounds.sum_length =
      static_cast<double>(ranks) * static_cast<double>(std::max<std::int64_t>(1, micro_batches));
  return bounds;
}

std::vector<double> error_scales(const Tensors& reference, double floor) {
  return error_scales(reference, norms_of(reference), floor);
}

std::vector<double> error_scales(const Tensors& reference, const std::vector<double>& norms, double floor) {
  double elements = 0;
  for (const auto& gradient : reference) elements += static_cast<double>(gradient.numel());
  const double root_mean_square = elements > 0 ? norm_of(norms) / std::sqrt(elements) : 0;
  std::vector<double> scales;
  for (std::size_t i = 0; i < reference.size(); ++i)
    scales.push_back(
        std::max(norms[i], floor * root_mean_square * std::sqrt(static_cast<double>(reference[i].numel()))));
  return scales;
}

bool held_to_floor(double norm, double scale) {
  return norm < scale * (1 - 0x1p-40) || norm == 0;  // the norm may have been added up in another order
}

std::vector<OtherFigure> figures_off(const StepFigures& figures, const StepFigures& oracle,
                                     const Bounds& bounds, const StepFigures* alone) {
  std::vector<OtherFigure> off;
  const auto hold = [&](const char* name, double StepFigures::*of) {
    const double found = figures.*of, expected = oracle.*of;
    double allowed = (alone ? bounds.figures : bounds.exact) * std::abs(expected);
    if (alone) allowed = std::fmax(allowed, kRoundingFactor * std::abs(alone->*of - expected));
    if (!std::isfinite(found) || !(std::abs(found - expected) <= allowed))
      off.push_back({.name = name, .found = found, .expected = expected, .allowed = allowed});
  };
  hold("loss", &StepFigures::loss);
  hold("norm", &StepFigures::norm);
  if (!std::isnan(oracle.unclipped_norm)) hold("unclipped_norm", &StepFigures::unclipped_norm);
  hold("clip_coefficient", &StepFigures::clip_coefficient);
  const auto count = [&](const char* name, std::int64_t found, std::int64_t expected) {
    if (found != expected)
      off.push_back(
          {.name = name, .found = static_cast<double>(found), .expected = static_cast<double>(expected)});
  };
  count("targets", figures.targets, oracle.targets);
  count("tokens", figures.tokens, oracle.tokens);
  return off;
}

void note_resolution(Grade& grade, const std::vector<ParameterVerdict>& parameters, bool exact) {
  grade.uniform_found = std::numeric_limits<double>::infinity();
  for (const ParameterVerdict& parameter : parameters) {
    const Comparison& comparison = exact ? parameter.exact : parameter.rounded;
    if (parameter.by_floor) {
      grade.by_floor.push_back(parameter.name);
      if (parameter.norm > 0 && comparison.scale_found >= 1) grade.unseen.push_back(parameter.name);
      continue;
    }
    grade.uniform_found = std::min(grade.uniform_found, comparison.scale_found);
    if (comparison.scale_found > grade.single_found || grade.single_least.empty()) {
      grade.single_found = comparison.scale_found;
      grade.single_least = parameter.name;
    }
  }
  if (grade.scale.tested) grade.uniform_found = std::min(grade.uniform_found, grade.scale.found_from);
}

std::optional<Finding> diagnose_resolution(const std::vector<ParameterVerdict>& parameters,
                                           const Grade& grade, bool exact, const std::string& action,
                                           double limit) {
  const bool none = !(grade.uniform_found <= limit);
  std::vector<std::string> names, evidence;
  for (const ParameterVerdict& parameter : parameters) {
    const Comparison& comparison = exact ? parameter.exact : parameter.rounded;
    const double shows = parameter.by_floor ? comparison.allowed : comparison.scale_found;
    if (!none && shows <= limit) continue;
    names.push_back(parameter.name);
    constexpr std::size_t kMost = 5;
    if (evidence.size() < kMost)
      evidence.push_back(fmt::format(
          "{}: {} from {:.2g} % on", parameter.name,
          parameter.by_floor ? "of the floor that it is held to, for want of a gradient, an error shows"
                             : "an error of scale shows",
          100 * shows));
  }
  if (names.empty()) return std::nullopt;
  return Finding{
      finding_id::unresolved,
      fmt::format("nothing is found to be wrong, but an error of scale of {:.0f} % would not show in {} "
                  "of {} parameters: {}. {}",
                  100 * limit, names.size(), parameters.size(), list_names(names), action),
      std::move(evidence)};
}

void grade(LayoutVerdict& layout, const StepFigures& oracle, const std::string& e2_bound, bool exact_run,
           const Bounds& bounds, const WholeScale& scale) {
  layout.e1 = layout.e2 = layout.e3 = {};
  layout.e1.bound = fmt::format(
      "fp64: |g - g64| <= {:g} s for each parameter; counts equal, loss, norm and clip "
      "coefficient to {:g} relative",
      bounds.exact, bounds.exact);
  layout.e2.bound = e2_bound;
  layout.e3.bound = "the same bits when the step is made again, and on every rank";
  for (const auto& parameter : layout.parameters) {
    note(layout.e1, parameter, parameter.exact);
    if (!exact_run) note(layout.e2, parameter, parameter.rounded);
    if (!parameter.repeats || !parameter.replicas_agree) {
      if (layout.e3.worst.empty()) layout.e3.worst = parameter.name;
      ++layout.e3.failed;
    }
  }
  layout.e2.scale = scale;
  note_resolution(layout.e1, layout.parameters, true);
  if (!exact_run) note_resolution(layout.e2, layout.parameters, false);
  layout.figures_agree = figures_off(layout.exact, oracle, bounds).empty();
  const auto state = [](bool passed) { return passed ? Grade::State::kPassed : Grade::State::kFailed; };
  layout.e1.state = state(layout.e1.failed == 0 && layout.figures_agree);
  // A run in fp64 has nothing to say within rounding that E1 does not say more sharply.
  layout.e2.state = exact_run ? Grade::State::kNotClaimed
                              : state(layout.e2.failed == 0 && scale.passed && layout.rounded_off.empty());
  layout.e3.state = state(layout.e3.failed == 0);
  layout.passed = layout.e1.state == Grade::State::kPassed && layout.e2.state != Grade::State::kFailed &&
                  layout.e3.state == Grade::State::kPassed;
}

}  // namespace isograd
