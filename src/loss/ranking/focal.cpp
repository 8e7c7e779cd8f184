// Focal losses decompose over elements: nothing is gathered, only their denominators are counted over all
// ranks.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <limits>

#include "isograd/random.hpp"
#include "isograd/ranking.hpp"
#include "loss/checks.hpp"
#include "loss/ranking/pool.hpp"

namespace isograd {
namespace {

// Ranks exchange whether the input is refused, the numbers that must agree, and the sums.
struct Totals {
  double sum = 0, mass = 0;
};

Totals totals_over_ranks(const std::string& where, Group& group, std::uint64_t fingerprint, int weighted,
                         const std::optional<ErrorText>& problem, const Totals& own) {
  if (group.size() == 1) {
    if (problem) throw ConfigError(*problem);
    return own;
  }
  at::Tensor row = at::zeros({5}, at::kDouble);
  auto* field = row.data_ptr<double>();
  field[0] = problem ? 1 : 0;
  field[1] = weighted;
  field[2] = static_cast<double>(fingerprint >> 12);  // exact in fp64
  field[3] = own.sum, field[4] = own.mass;
  const at::Tensor all = group.all_gather(row);
  const double* of = all.const_data_ptr<double>();
  Totals totals;
  bool given = false, absent = false;
  for (int rank = 0; rank < group.size(); ++rank)
    if (of[5 * rank] != 0) {
      if (problem) throw ConfigError(*problem);
      refuse(where, fmt::format("rank {} refused its input", rank), "elements that fit on every rank",
             fmt::format("See what rank {} says", rank));
    }
  for (int rank = 0; rank < group.size(); ++rank, of += 5) {
    if (of[2] != field[2])
      refuse(where, fmt::format("rank {} with other options or another type of scores", rank),
             "the same on every rank", "Construct and call it alike on every rank");
    given = given || of[1] == 1, absent = absent || of[1] == 0;
    totals.sum += of[3], totals.mass += of[4];
  }
  if (given && absent)
    refuse(where, "sample_weight on some ranks only", "on all ranks that have elements, or on none",
           "Pass it on every rank, ones where nothing is special");
  return totals;
}

// Reduced over all ranks: the whole's value, with the gradient of this rank's share, times W where the
// trainer averages. `own`: the sum of `losses` and what it is divided by. Collective.
at::Tensor reduced_over_ranks(const std::string& where, Group& group, const std::string& options,
                              int weighted, const std::optional<ErrorText>& problem, const Totals& own,
                              const at::Tensor& losses, LossReduction reduction, GradReduction of_gradients) {
  const Totals totals = totals_over_ranks(where, group, hash_name(options), weighted, problem, own);
  const double factor = of_gradients == GradReduction::kMean ? group.size() : 1;
  if (reduction == LossReduction::kNone)
    return of_gradients == GradReduction::kMean && losses.requires_grad()
               ? losses.detach() + (losses - losses.detach()) * group.size()
               : losses;
  const double divisor = reduction == LossReduction::kSum || totals.mass == 0 ? 1 : totals.mass;
  const at::Tensor share = losses.sum() / divisor;
  const at::Tensor level = at::full({}, totals.sum / divisor, share.options().requires_grad(false));
  return share.requires_grad() ? level + (share - share.detach()) * factor : level;
}

// The losses of scores that are numbers, NaN for the others: an infinite score may have a loss of 0.
at::Tensor where_finite(const at::Tensor& are_finite, const at::Tensor& losses) {
  return at::where(are_finite, losses, std::numeric_limits<double>::quiet_NaN());
}

// x^γ whose derivative stays finite at 0.
at::Tensor power(const at::Tensor& base, double gamma) {
  if (gamma == 0) return at::ones_like(base);
  const double tiny = base.scalar_type() == at::kDouble
                          ? std::numeric_limits<double>::min()
                          : static_cast<double>(std::numeric_limits<float>::min());
  return gamma < 1 ? base.clamp_min(tiny).pow(gamma) : base.pow(gamma);
}

void check_weights(std::optional<ErrorText>& problem, const std::string& where, const at::Tensor& weights) {
  if (problem || !weights.defined() || weights.numel() == 0) return;
  if (!at::isfinite(weights).all().item<bool>() || weights.min().item<double>() < 0)
    problem = ErrorText{where, "a sample_weight that is negative or not finite", "finite weights >= 0",
                        "Correct the weights"};
}

bool broadcasts(const at::Tensor& weights, at::IntArrayRef sizes) {
  if (weights.dim() != std::ssize(sizes) && weights.dim() != 1) return false;
  if (weights.dim() == 0 || weights.size(0) != sizes[0]) return false;
  for (std::int64_t d = 1; d < weights.dim(); ++d)
    if (weights.size(d) != 1 && weights.size(d) != sizes[d]) return false;
  return weights.dim() == std::ssize(sizes);
}

}  // namespace

SigmoidFocalLoss::SigmoidFocalLoss(SigmoidFocalOptions options, Group group)
    : torch::nn::Module("SigmoidFocalLoss"), options_(options), group_(std::move(group)) {
  check_option((options_.alpha >= 0 && options_.alpha <= 1) || options_.alpha == -1, "SigmoidFocalLoss",
               "alpha", options_.alpha, "from 0 to 1, or -1 for none");
  check_option(options_.gamma >= 0 && std::isfinite(options_.gamma), "SigmoidFocalLoss", "gamma",
               options_.gamma, "0 or more");
  if (options_.reduction == LossReduction::kMeanPositive)
    refuse("SigmoidFocalLoss: reduction", "mean_positive",
           "mean, sum or none: mean_positive is softmax focal's", "Choose one of them");
}

at::Tensor SigmoidFocalLoss::forward(const at::Tensor& scores, const at::Tensor& targets,
                                     const at::Tensor& sample_weight) {
  const std::string where = "SigmoidFocalLoss";
  std::optional<ErrorText> problem;
  if (!scores.defined() || scores.dim() < 1 || !at::isFloatingType(scores.scalar_type()))
    problem = ErrorText{where, "scores " + shape_text(scores), "[N, ...] of a floating type", "Pass scores"};
  else if (!targets.defined() || targets.sizes() != scores.sizes())
    problem = ErrorText{where, "targets " + shape_text(targets), shape_text(scores),
                        "Pass one target for each score"};
  else if (sample_weight.defined() && !broadcasts(sample_weight, scores.sizes()))
    problem = ErrorText{where, "sample_weight " + shape_text(sample_weight),
                        shape_text(scores) + ", or 1 in any dim but the first", "Reshape the weights"};
  check_weights(problem, where, sample_weight);
  at::Tensor losses = at::zeros({0}, at::kFloat);
  at::Tensor weights;
  Totals own;
  if (!problem) {
    const auto type = computing_type(scores.scalar_type());
    const at::Tensor x = scores.to(type), y = targets.detach().to(type);
    if (y.numel() > 0 && !(y.min().item<double>() >= 0 && y.max().item<double>() <= 1))
      problem = ErrorText{where, "a target outside [0, 1]", "targets from 0 to 1", "Correct the targets"};
    // 1 − p_t without cancellation, in the derivative too: that of exp(log σ(x)) is σ(x) σ(−x), while
    // at::sigmoid's subtracts σ from 1.
    const at::Tensor wrong = at::log_sigmoid(x).exp() * (1 - y) + at::log_sigmoid(-x).exp() * y;
    const at::Tensor entropy = at::softplus(-x) * y + at::softplus(x) * (1 - y);
    losses = where_finite(at::isfinite(x), power(wrong, options_.gamma) * entropy);
    if (options_.alpha >= 0) losses = losses * (options_.alpha * y + (1 - options_.alpha) * (1 - y));
    own.mass = static_cast<double>(x.numel());
    if (sample_weight.defined()) {
      weights = sample_weight.detach().to(type).expand(scores.sizes());
      losses = losses * weights;
      own.mass = weights.to(at::kDouble).sum().item<double>();
    }
    own.sum = losses.detach().to(at::kDouble).sum().item<double>();
  }
  const int weighted = problem || scores.numel() == 0 ? 2 : sample_weight.defined() ? 1 : 0;
  const std::string options = fmt::format(
      "{} {} {} {} {} {}", where, options_.alpha, options_.gamma, static_cast<int>(options_.reduction),
      static_cast<int>(options_.grad_reduction), problem ? "" : c10::toString(scores.scalar_type()));
  return reduced_over_ranks(where, group_, options, weighted, problem, own, losses, options_.reduction,
                            options_.grad_reduction);
}

SoftmaxFocalLoss::SoftmaxFocalLoss(SoftmaxFocalOptions options, Group group)
    : torch::nn::Module("SoftmaxFocalLoss"), options_(std::move(options)), group_(std::move(group)) {
  const auto check = [](bool holds, const char* key, auto found, const char* expected) {
    check_option(holds, "SoftmaxFocalLoss", key, found, expected);
  };
  check(options_.gamma >= 0 && std::isfinite(options_.gamma), "gamma", options_.gamma, "0 or more");
  check(options_.label_smoothing >= 0 && options_.label_smoothing < 1, "label_smoothing",
        options_.label_smoothing, "from 0 to below 1");
  check(options_.background_class >= 0, "background_class", options_.background_class, "0 or more");
  for (const double alpha : options_.alpha)
    check(alpha >= 0 && std::isfinite(alpha), "alpha", alpha, "finite weights >= 0");
}

at::Tensor SoftmaxFocalLoss::forward(const at::Tensor& scores, const at::Tensor& targets,
                                     const at::Tensor& sample_weight) {
  const std::string where = "SoftmaxFocalLoss";
  std::optional<ErrorText> problem;
  const auto expect = [&](bool holds, std::string found, std::string expected, std::string action) {
    if (!holds && !problem)
      problem = ErrorText{where, std::move(found), std::move(expected), std::move(action)};
    return !problem;
  };
  at::Tensor losses = at::zeros({0}, at::kFloat);
  Totals own;
  bool weighted = false, empty = true;
  std::string kind;
  std::vector<std::int64_t> sizes;
  if (expect(scores.defined() && scores.dim() >= 2 && at::isFloatingType(scores.scalar_type()),
             "scores " + shape_text(scores), "[N, C] or [N, C, ...] of a floating type", "Pass scores")) {
    sizes = scores.sizes().vec();
    sizes.erase(sizes.begin() + 1);
    kind = fmt::format("{} {}", c10::toString(scores.scalar_type()), scores.size(1));
    expect(targets.defined() && targets.sizes() == at::IntArrayRef(sizes) &&
               at::isIntegralType(targets.scalar_type(), false),
           "targets " + shape_text(targets), fmt::format("[{}] of integers", fmt::join(sizes, ", ")),
           "Pass one class for each position");
    expect(!sample_weight.defined() || sample_weight.sizes() == at::IntArrayRef(sizes),
           "sample_weight " + shape_text(sample_weight), fmt::format("[{}]", fmt::join(sizes, ", ")),
           "Pass one weight for each target");
    expect(options_.alpha.empty() || std::ssize(options_.alpha) == scores.size(1),
           fmt::format("alpha of {} classes", options_.alpha.size()),
           fmt::format("{}, as the scores have", scores.size(1)), "Give one weight for each class");
    if (!problem) check_weights(problem, where, sample_weight);
  }
  if (!problem) {
    const auto type = computing_type(scores.scalar_type());
    const std::int64_t classes = scores.size(1);
    const at::Tensor y = targets.detach().flatten().to(at::kLong);
    // Chosen before anything is computed of them: an ignored position's NaN goes nowhere.
    const at::Tensor valid = y.ne(options_.ignore_index).nonzero().squeeze(1);
    const at::Tensor rows = scores.movedim(1, -1).reshape({-1, classes}).index_select(0, valid).to(type);
    const at::Tensor label = y.index_select(0, valid);
    empty = scores.numel() == 0, weighted = sample_weight.defined();
    const bool in_range = label.numel() == 0 || (label.min().item<std::int64_t>() >= 0 &&
                                                 label.max().item<std::int64_t>() < classes);
    expect(in_range, "a target out of range",
           fmt::format("0 to {}, or {} to ignore the position", classes - 1, options_.ignore_index),
           "Correct the targets");
    if (!problem) {
      const at::Tensor log_p = at::log_softmax(rows, 1);
      const at::Tensor log_target = log_p.gather(1, label.unsqueeze(1)).squeeze(1);
      const double smoothing = options_.label_smoothing;
      at::Tensor entropy = -log_target;
      if (smoothing > 0)
        entropy = entropy * (1 - smoothing) - log_p.sum(1) * (smoothing / static_cast<double>(classes));
      // 1 − p_y without cancellation, in the derivative too: that of expm1(log p) adds 1 to its result.
      const at::Tensor right = log_target.exp();
      const at::Tensor wrong = (right.detach() - right) - at::expm1(log_target.detach());
      at::Tensor of_valid = where_finite(at::isfinite(rows).all(1), power(wrong, options_.gamma) * entropy);
      if (!options_.alpha.empty())
        of_valid =
            of_valid * at::tensor(options_.alpha, at::kDouble).to(rows.options()).index_select(0, label);
      const bool by_positive = options_.reduction == LossReduction::kMeanPositive;
      at::Tensor counted = by_positive ? label.ne(options_.background_class).to(at::kDouble)
                                       : at::ones({label.numel()}, at::kDouble);
      if (weighted) {
        const at::Tensor weights = sample_weight.detach().flatten().index_select(0, valid).to(type);
        of_valid = of_valid * weights;
        counted = counted * weights.to(at::kDouble);
      }
      own.mass = counted.sum().item<double>();
      own.sum = of_valid.detach().to(at::kDouble).sum().item<double>();
      losses = options_.reduction == LossReduction::kNone
                   ? at::zeros({y.numel()}, rows.options()).index_copy(0, valid, of_valid).view(sizes)
                   : of_valid;
    }
  }
  const std::string options = fmt::format(
      "{} {} {} {} {} {} {} {}", where, options_.gamma, static_cast<int>(options_.reduction),
      options_.label_smoothing, options_.background_class, static_cast<int>(options_.grad_reduction),
      fmt::join(options_.alpha, ","), problem ? "" : kind);
  const int weights = problem || empty ? 2 : weighted ? 1 : 0;
  return reduced_over_ranks(where, group_, options, weights, problem, own, losses, options_.reduction,
                            options_.grad_reduction);
}

}  // namespace isograd
