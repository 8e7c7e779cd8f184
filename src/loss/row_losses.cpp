// Losses of log-probabilities with signed weights: for each tile of rows the logits are made, the loss's
// slope in each log-probability turns them into their own gradient, and that is multiplied out.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "comm/autograd.hpp"
#include "isograd/loss.hpp"
#include "kernels/matmul/product.hpp"
#include "loss/checks.hpp"
#include "loss/clip.hpp"
#include "loss/projection.hpp"
#include "loss/rows.hpp"

namespace isograd {
namespace {

const char* const kRowLossName = "linear_row_loss";

struct RowProblem {
  RowLoss loss;
  RowLossOptions options;
  at::Tensor hidden, weight;  // [T, H], [V, H]
  at::Tensor a{}, b{};        // [r, H], [V, r]; undefined: no update
  double scale = 1;
  at::Tensor targets;                      // [T, K]
  at::Tensor given{};                      // fp64: weights [T, K] or advantages [T, 1]
  at::Tensor old{};                        // [T, 1] fp64; undefined for the cross entropy
  at::Tensor in_ratio{};                   // [T, 1] bool, kGspo
  std::vector<std::int64_t> cu_seqlens{};  // kGspo
  bool of_hidden = false, of_weight = false, of_a = false, of_b = false;  // gradients wanted
  bool differentiates() const { return of_hidden || of_weight || of_a || of_b; }
};

struct RowResult {
  at::Tensor sum;                   // fp64
  at::Tensor log_probabilities;     // [T, K] fp64, rounded to the computing type
  at::Tensor hidden, weight, a, b;  // gradients of the sum, where wanted
};

// A row's loss and its slope dL/dlp.
struct LossAndSlope {
  at::Tensor loss, slope;
};

// All in fp64. `log_ratio`: log p − q, or its mean over the sequence.
LossAndSlope loss_and_slope(const RowProblem& p, const at::Tensor& log_p, const at::Tensor& given,
                            const at::Tensor& old, const at::Tensor& log_ratio) {
  // A row of weight or advantage 0 adds 0, whatever it would be multiplied by.
  const at::Tensor silent = given.eq(0), minus = given.neg();
  const auto unless_silent = [&](const at::Tensor& values) { return at::where(silent, 0.0, values); };
  const double low = p.options.clip_low, high = p.options.clip_high;
  if (p.loss == RowLoss::kCrossEntropy) return {unless_silent(minus * log_p), minus};
  if (p.loss == RowLoss::kDro) {
    const double beta = p.options.beta;
    LossAndSlope result{unless_silent(minus * log_p), minus};
    if (beta == 0) return result;
    const at::Tensor apart = log_p - old;
    return {result.loss + apart.square() * (0.5 * beta), result.slope + apart * beta};
  }
  const at::Tensor ratio = log_ratio.exp();
  if (p.loss == RowLoss::kCispo) {
    const at::Tensor slope = unless_silent(ratio.clamp(low, high) * minus);
    return {unless_silent(slope * log_p), slope};
  }
  const at::Tensor slope = unless_silent(ratio * minus);
  if (p.loss == RowLoss::kImportanceSampling) return {slope, slope};
  const at::Tensor binds = clip_binds(ratio, given, low, high);
  const at::Tensor bound = at::where(given.gt(0), minus * high, minus * low);
  return {at::where(binds, bound, slope), at::where(binds, 0.0, slope)};
}

class RowSweep {
 public:
  explicit RowSweep(const RowProblem& problem)
      : p_(problem),
        shard_(p_.options.shard),
        tiles_(choose_tiles(p_.weight, shard_, {0, shard_.vocabulary}, p_.hidden.size(0))),
        logits_(p_.weight, {}, tiles_) {}

  RowResult run() {
    const at::Tensor trains = trained_rows(), trained = trains.nonzero().squeeze(1),
                     others = trains.logical_not().nonzero().squeeze(1);
    result_.log_probabilities = at::zeros(p_.targets.sizes(), p_.given.options());
    if (p_.of_hidden) result_.hidden = at::zeros_like(p_.hidden);
    // Written whole by the first tile, unless there is none or a device adds up.
    const auto wide = [&](const at::Tensor& of) {
      const auto options = of.options().dtype(computing_type(of.scalar_type()));
      return trained.size(0) == 0 || !of.is_cpu() ? at::zeros(of.sizes(), options)
                                                  : at::empty(of.sizes(), options);
    };
    if (p_.of_weight) result_.weight = wide(p_.weight);
    if (p_.of_a) result_.a = wide(p_.a);
    if (p_.of_b) result_.b = wide(p_.b);

    // The ratio of a sequence is known when all its rows are, so their logits are made twice.
    const bool twice = p_.loss == RowLoss::kGspo;
    each_tile(trained, !twice);
    each_tile(others, false);
    if (twice) {
      log_ratio_ = log_ratio_of_sequences();
      each_tile(trained, true);
    }
    result_.sum = terms(result_.log_probabilities, {}).loss.sum();
    return std::move(result_);
  }

 private:
  // [T] bool: rows whose slope may differ from 0. The others need no gradient.
  at::Tensor trained_rows() const {
    if (!p_.differentiates()) return at::zeros({p_.hidden.size(0)}, p_.given.options().dtype(at::kBool));
    if (p_.loss == RowLoss::kDro && p_.options.beta > 0)
      return at::ones({p_.hidden.size(0)}, p_.given.options().dtype(at::kBool));
    return p_.given.ne(0).any(1);
  }

  // For the rows `places`, or for all where it is undefined.
  LossAndSlope terms(const at::Tensor& log_p, const at::Tensor& places) const {
    const auto of = [&](const at::Tensor& all) {
      return all.defined() && places.defined() ? all.index_select(0, places) : all;
    };
    const at::Tensor old = of(p_.old);
    at::Tensor log_ratio = of(log_ratio_);
    if (!log_ratio.defined() && old.defined()) log_ratio = log_p - old;
    return loss_and_slope(p_, log_p, of(p_.given), old, log_ratio);
  }

  at::Tensor log_ratio_of_sequences() const {  // [T, 1]
    const at::Tensor each = at::where(p_.in_ratio, result_.log_probabilities - p_.old, 0.0);
    at::Tensor result = at::zeros_like(each);
    for (std::size_t f = 0; f + 1 < p_.cu_seqlens.size(); ++f) {
      const auto of = [&](const at::Tensor& rows) {
        return rows.narrow(0, p_.cu_seqlens[f], p_.cu_seqlens[f + 1] - p_.cu_seqlens[f]);
      };
      // Sequences without such rows have advantage 0 everywhere.
      of(result).copy_(of(each).sum() / of(p_.in_ratio).sum().clamp_min(1));  // in the definition of s
    }
    return result;
  }

  void each_tile(const at::Tensor& rows, bool differentiate) {
    for (std::int64_t begin = 0; begin < rows.size(0); begin += tiles_.tokens)
      tile(rows.narrow(0, begin, std::min(tiles_.tokens, rows.size(0) - begin)), differentiate);
  }

  void tile(const at::Tensor& places, bool differentiate) {
    const at::Tensor rows = p_.hidden.index_select(0, places),
                     columns = p_.targets.index_select(0, places) - shard_.first;
    at::Tensor made = logits_(rows, 0, p_.weight.size(0)), low_rank;  // [n, V], [n, r]
    if (p_.a.defined()) {
      low_rank = product(rows, p_.a).mul_(p_.scale);
      multiply_into(made, low_rank, p_.b, /*adds=*/true);
    }
    const EntropyLoss loss;
    RowStatistics statistics = begin_rows(places.size(0), loss, rows.device());
    take_in(made, 0, no_targets(places.size(0)), {}, statistics);
    take_in_columns_of(shard_.group, statistics);
    const at::Tensor here = within(columns, made);
    at::Tensor at_target =
        at::where(here, made.gather(1, columns.clamp(0, made.size(1) - 1)).to(at::kDouble), 0.0);
    if (shard_.group.size() > 1) shard_.group.all_reduce(at_target);
    const at::Tensor log_p =
        (at_target - statistics.sums.narrow(1, 0, 1)).sub_(statistics.sums.narrow(1, 1, 1).log());
    // Rounded as it is answered, so that the same number sent back is a ratio of exactly 1.
    const at::Tensor answered = log_p.to(computing_type(rows.scalar_type())).to(at::kDouble);
    result_.log_probabilities.index_copy_(0, places, answered);
    if (!differentiate) return;
    const at::Tensor slope = terms(answered, places).slope;
    write_logits_gradient(made, columns, log_p, slope, statistics);
    multiply_out(places, rows, low_rank, made);
  }

  // Targets that are columns of this rank.
  static at::Tensor within(const at::Tensor& columns, const at::Tensor& made) {
    return columns.ge(0).logical_and(columns.lt(made.size(1)));
  }
  at::Tensor no_targets(std::int64_t rows) const { return at::full({rows}, -1, p_.targets.options()); }

  // Σ_k slope_k (1[j = column_k] − p_j) in place of the logits.
  void write_logits_gradient(at::Tensor& made, const at::Tensor& columns, const at::Tensor& log_p,
                             const at::Tensor& slope, const RowStatistics& statistics) const {
    const at::Tensor softmax = slope.sum(1).neg();
    const bool one = columns.size(1) == 1;
    write_gradient(made, 0, one ? columns.squeeze(1) : no_targets(columns.size(0)), {},
                   gradient_coefficients(statistics, {}, shard_.vocabulary, softmax), made);
    if (one) return;
    // At the targets anew, so that a difference of nearly equal numbers is rounded once; a repeated id is
    // written as often, with the same sum.
    const at::Tensor here = within(columns, made), inside = columns.clamp(0, made.size(1) - 1);
    at::Tensor slopes = at::zeros(made.sizes(), slope.options());  // by column
    slopes.scatter_add_(1, inside, at::where(here, slope, 0.0));
    const at::Tensor at_target = log_p.exp().mul_(softmax.unsqueeze(1)).add_(slopes.gather(1, inside)),
                     rows = at::arange(columns.size(0), columns.options()).unsqueeze(1).expand_as(columns);
    made.index_put_({rows.masked_select(here), columns.masked_select(here)},
                    at_target.to(made.scalar_type()).masked_select(here));
  }

  void multiply_out(const at::Tensor& places, const at::Tensor& rows, const at::Tensor& low_rank,
                    const at::Tensor& gradient) {
    const auto turned = [&](const at::Tensor& values, const at::Tensor& into) {
      return into.scalar_type() != values.scalar_type() ? values.t().contiguous() : at::Tensor();
    };
    at::Tensor of_low_rank;  // [n, r], of the rows' product with a
    if (p_.a.defined() && (p_.of_a || p_.of_hidden)) of_low_rank = product(gradient, p_.b.t()).mul_(p_.scale);
    if (p_.of_hidden) {
      at::Tensor of_rows = product(gradient, p_.weight.t());
      if (of_low_rank.defined()) multiply_into(of_rows, of_low_rank, p_.a.t(), /*adds=*/true);
      result_.hidden.index_copy_(0, places, of_rows);
    }
    if (p_.of_weight) accumulate(gradient, rows, turned(rows, result_.weight), first_, result_.weight);
    if (p_.of_a) accumulate(of_low_rank, rows, turned(rows, result_.a), first_, result_.a);
    if (p_.of_b) accumulate(gradient, low_rank, turned(low_rank, result_.b), first_, result_.b);
    first_ = false;
  }

  const RowProblem& p_;
  VocabularyShard shard_;
  const Tiles tiles_;
  TiledLogits logits_;
  at::Tensor log_ratio_;  // [T, 1], of the sequences
  bool first_ = true;
  RowResult result_;
};

struct LinearRowLossFunction : torch::autograd::Function<LinearRowLossFunction> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& /*hidden*/,
                               const at::Tensor& /*weight*/, const std::optional<at::Tensor>& /*a*/,
                               const std::optional<at::Tensor>& /*b*/, const RowProblem* problem) {
    const RowResult result = RowSweep(*problem).run();
    ctx->save_for_backward({result.hidden, result.weight, result.a, result.b});
    ctx->saved_data["type"] = static_cast<std::int64_t>(problem->hidden.scalar_type());
    const auto type = computing_type(problem->hidden.scalar_type());
    const variable_list outputs{result.sum.to(type, false, /*copy=*/true),
                                result.log_probabilities.to(type, false, /*copy=*/true), result.sum};
    ctx->mark_non_differentiable({outputs[1], outputs[2]});
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list upstream) {
    return made_gradients(kRowLossName, *ctx, upstream[0]);
  }
};

const differentiable::Separable<LinearRowLossFunction> kRowLossIsSeparable;

// The first element where `bad` holds is refused, by its place.
void refuse_where(const at::Tensor& bad, const std::string& name, const at::Tensor& values,
                  const std::string& expected, const std::string& action) {
  if (!bad.any().item<bool>()) return;
  const at::Tensor place = bad.nonzero()[0].cpu();
  at::Tensor value = values;
  for (std::int64_t i = 0; i < place.size(0); ++i) value = value[place[i].item<std::int64_t>()];
  const std::string found = values.is_floating_point() ? fmt::format("{}", value.item<double>())
                                                       : fmt::format("{}", value.item<std::int64_t>());
  const auto* at = place.const_data_ptr<std::int64_t>();
  refuse(kRowLossName, fmt::format("{}[{}] = {}", name, fmt::join(at, at + place.size(0), ", "), found),
         expected, action);
}

// A constant of a shape, in fp64 as [rows, ...].
at::Tensor constant_of_rows(const std::string& name, const at::Tensor& given, at::IntArrayRef shape,
                            const at::Device& device, bool may_be_infinite = false) {
  if (!given.defined() || given.sizes() != shape ||
      !(given.is_floating_point() || given.scalar_type() == at::kBool))
    refuse(kRowLossName,
           given.defined()
               ? fmt::format("{} {} of {}", name, c10::str(given.sizes()), c10::toString(given.scalar_type()))
               : name + " undefined",
           fmt::format("{} {}, floating or bool, one for each target", name, c10::str(shape)),
           "Pass the " + name);
  if (given.requires_grad())
    refuse(kRowLossName, name + " that require a gradient", "constants", "Detach them");
  const at::Tensor wide = given.to(device, at::kDouble);
  refuse_where(may_be_infinite ? wide.isnan() : wide.isfinite().logical_not(), name, wide,
               may_be_infinite ? "a number" : "a finite number", "Look for where it was computed");
  return wide.dim() == 1 ? wide.unsqueeze(1) : wide;
}

void check_row_options(RowLoss loss, const RowLossOptions& options) {
  const double low = options.clip_low, high = options.clip_high;
  const bool clips = loss == RowLoss::kPpo || loss == RowLoss::kCispo || loss == RowLoss::kGspo;
  if (clips && !(low >= 0 && low <= high && std::isfinite(high)))
    refuse(kRowLossName, fmt::format("clip_low = {}, clip_high = {}", low, high),
           "0 <= clip_low <= clip_high, limits of the ratio itself", "Set both, 0.8 and 1.2 for example");
  if (loss == RowLoss::kDro && !(options.beta >= 0 && std::isfinite(options.beta)))
    refuse(kRowLossName, fmt::format("beta = {}", options.beta), "a finite number, 0 or more", "Set beta");
}

void take_update(const LowRankUpdate& update, RowProblem& problem) {
  const auto fits = [&](const at::Tensor& t) {
    return t.defined() && t.dim() == 2 && t.scalar_type() == problem.hidden.scalar_type() &&
           t.device() == problem.hidden.device();
  };
  const auto describe = [](const at::Tensor& t) {
    return t.defined() ? fmt::format("{} of {}", c10::str(t.sizes()), c10::toString(t.scalar_type()))
                       : "undefined";
  };
  if (!fits(update.a) || !fits(update.b) || update.a.size(1) != problem.hidden.size(1) ||
      update.b.size(0) != problem.weight.size(0) || update.b.size(1) != update.a.size(0) ||
      update.a.size(0) == 0 || !std::isfinite(update.scale))
    refuse(kRowLossName,
           fmt::format("a low-rank update of a {}, b {}, scale {}", describe(update.a), describe(update.b),
                       update.scale),
           fmt::format("a [r, {}] and b [{}, r] of hidden's type and device, a finite scale",
                       problem.hidden.size(1), problem.weight.size(0)),
           "Make the adapter for this head");
  problem.a = update.a.detach().contiguous(), problem.b = update.b.detach().contiguous();
  problem.scale = update.scale;
  problem.of_a = wants_gradient(update.a), problem.of_b = wants_gradient(update.b);
}

void take_sequences(const RowLossInputs& inputs, RowProblem& problem) {
  const auto& cu = inputs.cu_seqlens;
  const std::int64_t rows = problem.hidden.size(0);
  if (cu.empty() || cu.front() != 0 || cu.back() != rows || !std::is_sorted(cu.begin(), cu.end()))
    refuse(kRowLossName, fmt::format("cu_seqlens [{}] over {} rows", fmt::join(cu, ", "), rows),
           fmt::format("ascending from 0 to {}", rows), "Pass the bounds of the sequences");
  problem.cu_seqlens = cu;
  problem.in_ratio = constant_of_rows("ratio_mask", inputs.ratio_mask, {rows}, problem.hidden.device()).ne(0);
  for (std::size_t f = 0; f + 1 < cu.size(); ++f) {
    const auto any = [&](const at::Tensor& of_rows) {
      return of_rows.narrow(0, cu[f], cu[f + 1] - cu[f]).any().item<bool>();
    };
    if (any(problem.given.ne(0)) && !any(problem.in_ratio))
      refuse(kRowLossName, fmt::format("sequence {} with advantages and an empty ratio_mask", f),
             "a token at least over which the sequence's ratio is a mean",
             "Set the mask of the sequence's sampled tokens to 1");
  }
}

}  // namespace

RowLossResult linear_row_loss(const at::Tensor& hidden, const at::Tensor& weight, const RowLossInputs& inputs,
                              RowLoss loss, const RowLossOptions& options, const LowRankUpdate* update) {
  check_projection(kRowLossName, hidden, weight, {});
  check_row_options(loss, options);
  const bool entropy = loss == RowLoss::kCrossEntropy;
  const std::int64_t rows = hidden.size(0);
  const at::Tensor& targets = inputs.targets;
  if (!targets.defined() || targets.scalar_type() != at::kLong || targets.dim() < 1 ||
      targets.dim() > (entropy ? 2 : 1) || targets.size(0) != rows)
    refuse(kRowLossName,
           targets.defined() ? fmt::format("targets {} of {}", c10::str(targets.sizes()),
                                           c10::toString(targets.scalar_type()))
                             : "targets undefined",
           fmt::format("targets [{}]{} of int64, for each row of hidden", rows,
                       entropy ? fmt::format(" or [{}, K]", rows) : ""),
           "Pass one row of targets for each row of hidden");
  const VocabularyShard shard = checked_shard(kRowLossName, options.shard, weight.size(0));
  refuse_where(targets.lt(0).logical_or(targets.ge(shard.vocabulary)), "targets", targets,
               fmt::format("0 to {} (the vocabulary)", shard.vocabulary - 1),
               "Check that the data were tokenized for this model; leave a row out by weight 0");
  RowProblem problem{.loss = loss,
                     .options = options,
                     .hidden = hidden.detach().contiguous(),
                     .weight = weight.detach().contiguous(),
                     .targets = targets.to(hidden.device())};
  problem.options.shard = shard;
  if (entropy) {
    problem.given = constant_of_rows("weights", inputs.weights, targets.sizes(), hidden.device());
  } else {
    problem.given = constant_of_rows("advantages", inputs.advantages, {rows}, hidden.device());
    problem.old = constant_of_rows("old_log_probabilities", inputs.old_log_probabilities, {rows},
                                   hidden.device(), /*may_be_infinite=*/true);
  }
  if (targets.dim() == 1) problem.targets = problem.targets.unsqueeze(1);
  if (loss == RowLoss::kGspo) take_sequences(inputs, problem);
  if (update) take_update(*update, problem);
  problem.of_hidden = wants_gradient(hidden), problem.of_weight = wants_gradient(weight);
  const auto optional = [&](at::Tensor LowRankUpdate::*of) {
    return update ? std::optional(update->*of) : std::nullopt;
  };
  const variable_list outputs = LinearRowLossFunction::apply(hidden, weight, optional(&LowRankUpdate::a),
                                                             optional(&LowRankUpdate::b), &problem);
  return {.sum = outputs[0], .log_probabilities = outputs[1].view(targets.sizes()), .value = outputs[2]};
}

}  // namespace isograd
