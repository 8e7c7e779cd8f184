// The output projection fused with its cross entropy: for each tile of tokens the logits are made, summed up,
// turned into their own gradient in place and multiplied out; then the next tile takes their memory.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "comm/autograd.hpp"
#include "isograd/error.hpp"
#include "isograd/loss.hpp"
#include "kernels/matmul/product.hpp"
#include "loss/checks.hpp"
#include "loss/projection.hpp"
#include "loss/rows.hpp"

namespace isograd {
namespace {

const char* const kWhere = "linear_cross_entropy";

struct Problem {
  at::Tensor hidden, weight, bias;  // [T, H], [V, H], [V] or undefined
  at::Tensor targets;               // [T]
  TokenWeights tokens;              // [T]
  const LinearCrossEntropyOptions& options;
  VocabularyShard shard{};
  bool of_hidden = false, of_weight = false, of_bias = false;  // gradients wanted
  // Tokens without a loss are computed too, from zeros, with weight 0: their number is not asked of the
  // device.
  bool all_tokens = false;
};

struct Result {
  at::Tensor sum, cross_entropy, z_loss;  // scalars in fp64
  at::Tensor log_probabilities;           // [T] fp64
  // Gradients of the sum, in the accumulating type, where wanted.
  at::Tensor hidden, weight, bias;
};

// State that the tiles of one run share.
class Sweep {
 public:
  explicit Sweep(const Problem& problem)
      : p_(problem),
        valid_(problem.all_tokens ? at::Tensor() : problem.tokens.mask.nonzero().squeeze(1)),
        count_(problem.all_tokens ? problem.hidden.size(0) : valid_.size(0)),
        tiles_(choose_tiles(problem.weight, problem.shard,
                            {problem.options.tile_tokens, problem.options.tile_vocabulary}, count_)),
        logits_(problem.weight, problem.bias, tiles_),
        all_valid_(count_ == problem.hidden.size(0)),
        loss_{.cross_entropy = 1,
              .label_smoothing = problem.options.label_smoothing,
              .z_loss = problem.options.z_loss} {
    const auto wide = p_.hidden.options().dtype(at::kDouble),
               options = p_.hidden.options().dtype(computing_type(p_.hidden.scalar_type()));
    sums_ = at::zeros({3}, wide);
    result_.log_probabilities = at::zeros({p_.hidden.size(0)}, wide);
    const bool nothing = count_ == 0;
    // Rows that no tile visits stay 0; the weight's gradient is written whole by the first tile.
    if (p_.of_hidden)
      result_.hidden = all_valid_ ? at::empty(p_.hidden.sizes(), p_.hidden.options())
                                  : at::zeros(p_.hidden.sizes(), p_.hidden.options());
    if (p_.of_weight)
      result_.weight = nothing || !p_.hidden.is_cpu() ? at::zeros(p_.weight.sizes(), options)
                                                      : at::empty(p_.weight.sizes(), options);
    if (p_.of_bias) result_.bias = at::zeros({p_.weight.size(0)}, options);
  }

  Result run() {
    for (std::int64_t begin = 0; begin < count_; begin += tiles_.tokens)
      tile(begin, std::min(tiles_.tokens, count_ - begin));
    if (p_.all_tokens) result_.log_probabilities.masked_fill_(p_.tokens.mask.logical_not(), 0);
    result_.sum = sums_[0] + p_.options.z_loss * sums_[1];
    if (p_.options.z_loss == 0) result_.sum = sums_[0];
    result_.cross_entropy = sums_[0], result_.z_loss = sums_[1];
    return std::move(result_);
  }

 private:
  // The tile's tokens of a tensor over tokens.
  at::Tensor cut(const at::Tensor& of_tokens, std::int64_t begin, std::int64_t count) const {
    return all_valid_ ? of_tokens.narrow(0, begin, count)
                      : of_tokens.index_select(0, valid_.narrow(0, begin, count));
  }

  void put(at::Tensor& of_tokens, std::int64_t begin, const at::Tensor& values) const {
    if (all_valid_)
      of_tokens.narrow(0, begin, values.size(0)).copy_(values);
    else
      of_tokens.index_copy_(0, valid_.narrow(0, begin, values.size(0)), values.to(of_tokens.scalar_type()));
  }

  void tile(std::int64_t begin, std::int64_t count) {
    const at::Tensor rows = cut(p_.hidden, begin, count), targets = cut(p_.targets, begin, count),
                     weights = cut(p_.tokens.weights, begin, count);
    const std::int64_t vocabulary = p_.weight.size(0), whole = p_.shard.vocabulary;
    RowStatistics statistics = begin_rows(count, loss_, rows.device());
    at::Tensor made;  // the logits of the last columns
    for (std::int64_t first = 0; first < vocabulary; first += tiles_.vocabulary) {
      made.reset();  // before the next are made
      made = logits_(rows, first, std::min(tiles_.vocabulary, vocabulary - first));
      take_in(made, p_.shard.first + first, targets, {}, statistics);
    }
    take_in_columns_of(p_.shard.group, statistics);
    const at::Tensor each = smoothed_cross_entropy(statistics, loss_.label_smoothing, whole);
    sums_[0].add_((each * weights).sum());
    sums_[1].add_((log_sum_exp(statistics).square() * weights).sum());
    put(result_.log_probabilities, begin, 0.0 - negative_log_likelihood(statistics));
    if (p_.of_hidden || p_.of_weight || p_.of_bias)
      gradients(begin, rows, targets, gradient_coefficients(statistics, loss_, whole, weights), made);
  }

  void gradients(std::int64_t begin, const at::Tensor& rows, const at::Tensor& targets,
                 const at::Tensor& coefficients, at::Tensor& made) {
    const std::int64_t vocabulary = p_.weight.size(0);
    const bool widens = p_.of_weight && result_.weight.scalar_type() != rows.scalar_type();
    const at::Tensor turned = widens ? rows.t().contiguous() : at::Tensor();  // [H, tile]
    at::Tensor of_rows;
    for (std::int64_t first = 0; first < vocabulary; first += tiles_.vocabulary) {
      const std::int64_t columns = std::min(tiles_.vocabulary, vocabulary - first);
      if (columns < vocabulary) {
        made.reset();
        made = logits_(rows, first, columns);
      }
      write_gradient(made, p_.shard.first + first, targets, {}, coefficients, made);
      if (p_.of_hidden) {
        const at::Tensor part = product(made, p_.weight.narrow(0, first, columns).t());
        // Parts of the vocabulary add up in the computing type.
        if (columns == vocabulary)
          of_rows = part;
        else
          of_rows = of_rows.defined() ? of_rows.add_(part)
                                      : part.to(computing_type(part.scalar_type()), false, /*copy=*/true);
      }
      if (p_.of_weight) accumulate(made, rows, turned, begin == 0, result_.weight.narrow(0, first, columns));
      if (p_.of_bias)
        result_.bias.narrow(0, first, columns).add_(made.sum(0, false, result_.bias.scalar_type()));
    }
    if (p_.of_hidden) put(result_.hidden, begin, of_rows.defined() ? of_rows : at::zeros_like(rows));
  }

  const Problem& p_;
  const at::Tensor valid_;  // [N] indices of the valid tokens, ascending; undefined: all tokens
  const std::int64_t count_;
  const Tiles tiles_;
  TiledLogits logits_;
  const bool all_valid_;
  const EntropyLoss loss_;
  at::Tensor sums_;  // [3] fp64: cross entropy, z
  Result result_;
};

struct LinearCrossEntropyFunction : torch::autograd::Function<LinearCrossEntropyFunction> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& /*hidden*/,
                               const at::Tensor& /*weight*/, const std::optional<at::Tensor>& /*bias*/,
                               const Problem* problem) {
    const Result result = Sweep(*problem).run();
    ctx->save_for_backward({result.hidden, result.weight, result.bias});
    ctx->saved_data["type"] = static_cast<std::int64_t>(problem->hidden.scalar_type());
    const auto type = computing_type(problem->hidden.scalar_type());
    variable_list outputs;
    for (const auto& value : {result.sum, result.cross_entropy, result.z_loss, result.log_probabilities})
      outputs.push_back(value.to(type, false, /*copy=*/true));
    ctx->mark_non_differentiable({outputs[1], outputs[2], outputs[3]});
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, variable_list upstream) {
    return made_gradients(kWhere, *ctx, upstream[0]);
  }
};

const differentiable::Separable<LinearCrossEntropyFunction> kFusedLossIsSeparable;

}  // namespace

LinearCrossEntropy linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                        const at::Tensor& targets, const LinearCrossEntropyOptions& options) {
  check_projection(kWhere, hidden, weight, options.bias);
  check_coefficients(kWhere, options.label_smoothing, options.z_loss);
  if (options.tile_tokens < 0 || options.tile_vocabulary < 0)
    refuse(
        kWhere,
        fmt::format("tile_tokens = {}, tile_vocabulary = {}", options.tile_tokens, options.tile_vocabulary),
        "1 or more, or 0 to have it chosen", "Leave them 0");
  const at::Tensor wanted = targets.contiguous();
  const VocabularyShard shard = checked_shard(kWhere, options.shard, weight.size(0));
  check_targets(kWhere, wanted, hidden.size(0), shard.vocabulary);
  Problem problem{.hidden = hidden.detach().contiguous(),
                  .weight = weight.detach().contiguous(),
                  .bias = options.bias.defined() ? options.bias.detach().contiguous() : at::Tensor(),
                  .targets = wanted.to(hidden.device()),
                  .tokens = token_weights(kWhere, options.weights, wanted, hidden.size(0), hidden.device(),
                                          shard.vocabulary),
                  .options = options,
                  .shard = shard,
                  .of_hidden = wants_gradient(hidden),
                  .of_weight = wants_gradient(weight),
                  .of_bias = wants_gradient(options.bias),
                  .all_tokens = !hidden.is_cpu() && FixedShapes::wanted()};
  if (problem.all_tokens)
    problem.hidden =
        at::where(problem.tokens.mask.unsqueeze(1), problem.hidden, at::zeros({}, hidden.options()));
  const std::optional<at::Tensor> bias = options.bias.defined() ? std::optional(options.bias) : std::nullopt;
  const variable_list outputs = LinearCrossEntropyFunction::apply(hidden, weight, bias, &problem);
  return {
      .sum = outputs[0], .cross_entropy = outputs[1], .z_loss = outputs[2], .log_probabilities = outputs[3]};
}

at::Tensor linear_cross_entropy_sum(const at::Tensor& hidden, const at::Tensor& weight,
                                    const at::Tensor& targets, const LinearCrossEntropyOptions& options) {
  return linear_cross_entropy(hidden, weight, targets, options).sum;
}

}  // namespace isograd
