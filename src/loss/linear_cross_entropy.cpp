// The output projection fused with its cross entropy: for each tile of tokens the logits are made, summed up,
// turned into their own gradient in place and multiplied out; then the next tile takes their memory.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "comm/autograd.hpp"
#include "isograd/error.hpp"
#include "isograd/loss.hpp"
#include "kernels/matmul/product.hpp"
#include "loss/checks.hpp"
#include "loss/rows.hpp"

namespace isograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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

// Tile sizes: the whole vocabulary with as many tokens as fit into the buffer, for a row seen whole needs
// its logits made only once; a narrower tile only where a few tokens would not fit. More tokens in a tile
// mean fewer passes over the weight's gradient: where that is small they cost little, and the buffer takes
// half of it. With G bytes of gradient and V columns on a rank of elements of b bytes
//   tokens = clamp(buffer / (b V), 16, 1024), buffer = 64 MiB from G = 64 MiB on, else max(G / 2, least),
// where 64 tokens of V columns fit into 64 MiB. least = 2 MiB, or 8 where a pass over the gradient also
// widens what it adds. Beside the buffer lies a slice of it, which a product makes.
constexpr std::int64_t kSliceBytes = std::int64_t{1} << 19,
                       kMostOnHeap = std::int64_t{32} << 20;  // glibc maps what is larger apart

struct Tiles {
  std::int64_t tokens, vocabulary;
};
Tiles choose_tiles(const Problem& problem, std::int64_t valid) {
  // A GPU has no cache that a tile should fit into, and wants few and large kernels.
  const bool on_cpu = problem.hidden.is_cpu();
  const std::int64_t kMostBytes = std::int64_t{on_cpu ? 64 : 512} << 20, kMost = on_cpu ? 1024 : 1 << 16;
  constexpr std::int64_t kFewest = 16, kFewestUncut = 64;
  const at::ScalarType sum_type = computing_type(problem.weight.scalar_type());
  // Each tile of tokens is a collective: ranks must choose alike, whatever their own columns.
  const std::int64_t ranks = problem.shard.group.size(),
                     vocabulary = std::max<std::int64_t>(1, (problem.shard.vocabulary + ranks - 1) / ranks),
                     element = static_cast<std::int64_t>(problem.weight.element_size()),
                     gradient = problem.shard.vocabulary * problem.weight.size(1) *
                                static_cast<std::int64_t>(c10::elementSize(sum_type)),
                     least = std::int64_t{sum_type == problem.weight.scalar_type() ? 2 : 8} << 20,
                     buffer = gradient >= kMostBytes || !on_cpu ? kMostBytes : std::max(gradient / 2, least);
  Tiles tiles{problem.options.tile_tokens, problem.options.tile_vocabulary};
  if (tiles.vocabulary == 0)
    tiles.vocabulary =
        std::min(vocabulary, kMostBytes / element / (tiles.tokens > 0 ? tiles.tokens : kFewestUncut));
  tiles.vocabulary = std::clamp<std::int64_t>(tiles.vocabulary, 1, vocabulary);
  if (tiles.tokens == 0) tiles.tokens = std::clamp(buffer / element / tiles.vocabulary, kFewest, kMost);
  tiles.tokens = std::clamp<std::int64_t>(tiles.tokens, 1, std::max<std::int64_t>(1, valid));
  return tiles;
}

// to += gradientᵀ rows, the columns' part of the weight's gradient [columns, H]; written the first time.
// `turned`: rows in the other order, where the sum is wider than they are.
void accumulate(const at::Tensor& gradient, const at::Tensor& rows, const at::Tensor& turned, bool first,
                at::Tensor to) {
  if (to.scalar_type() == gradient.scalar_type()) return multiply_into(to, gradient.t(), rows.t(), !first);
  if (!to.is_cpu()) {
    to.add_(at::mm(gradient.t(), rows));
    return;
  }
  // In slices whose partial result is still in the cache when it is added.
  constexpr std::int64_t kSliceElements = std::int64_t{1} << 20;
  const std::int64_t columns = to.size(0), step = std::max<std::int64_t>(
                                               64, kSliceElements / std::max<std::int64_t>(1, to.size(1)));
  for (std::int64_t begin = 0; begin < columns; begin += step) {
    const std::int64_t count = std::min(step, columns - begin);
    const at::Tensor part = product(gradient.narrow(1, begin, count).t(), turned);
    if (first)
      to.narrow(0, begin, count).copy_(part);
    else
      to.narrow(0, begin, count).add_(part);
  }
}

// State that the tiles of one run share.
class Sweep {
 public:
  explicit Sweep(const Problem& problem)
      : p_(problem),
        valid_(problem.all_tokens ? at::Tensor() : problem.tokens.mask.nonzero().squeeze(1)),
        count_(problem.all_tokens ? problem.hidden.size(0) : valid_.size(0)),
        tiles_(choose_tiles(problem, count_)),
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

  // In the sweep's own buffer, which a product fills slice by slice: tiles made one after the other would
  // leave adjacent holes in the C library's heap. One too large for the heap is given back at once.
  at::Tensor logits(const at::Tensor& rows, std::int64_t first, std::int64_t columns) {
    const auto of = [&](std::int64_t begin, std::int64_t count) {
      return product(rows, p_.weight.narrow(0, first + begin, count), {},
                     p_.bias.defined() ? p_.bias.narrow(0, first + begin, count) : at::Tensor());
    };
    const std::int64_t count = rows.size(0), whole = tiles_.tokens * tiles_.vocabulary,
                       element = static_cast<std::int64_t>(p_.weight.element_size()),
                       elements = kSliceBytes / element;
    if (!rows.is_cpu() || count * columns <= elements || whole * element > kMostOnHeap) return of(0, columns);
    if (!buffer_.defined()) buffer_ = at::empty({whole}, rows.options());
    at::Tensor made = buffer_.narrow(0, 0, count * columns).view({count, columns});
    const std::int64_t step = std::max<std::int64_t>(64, elements / count);
    for (std::int64_t begin = 0; begin < columns; begin += step) {
      const std::int64_t width = std::min(step, columns - begin);
      made.narrow(1, begin, width).copy_(of(begin, width));
    }
    return made;
  }

  void tile(std::int64_t begin, std::int64_t count) {
    const at::Tensor rows = cut(p_.hidden, begin, count), targets = cut(p_.targets, begin, count),
                     weights = cut(p_.tokens.weights, begin, count);
    const std::int64_t vocabulary = p_.weight.size(0), whole = p_.shard.vocabulary;
    RowStatistics statistics = begin_rows(count, loss_, rows.device());
    at::Tensor made;  // the logits of the last columns
    for (std::int64_t first = 0; first < vocabulary; first += tiles_.vocabulary) {
      made.reset();  // before the next are made
      made = logits(rows, first, std::min(tiles_.vocabulary, vocabulary - first));
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
        made = logits(rows, first, columns);
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
  const bool all_valid_;
  const RowLoss loss_;
  at::Tensor sums_;    // [3] fp64: cross entropy, z
  at::Tensor buffer_;  // of a tile's logits
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
    if (at::GradMode::is_enabled())
      refuse(kWhere, "a backward with create_graph", "first derivatives only",
             "Use at::linear and at::cross_entropy_loss where second derivatives are needed");
    const auto type = static_cast<at::ScalarType>(ctx->saved_data["type"].toInt());
    const bool keep = torch::autograd::get_current_graph_task_keep_graph();
    variable_list gradients = ctx->get_saved_variables();
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      at::Tensor& gradient = gradients[i];
      if (!gradient.defined()) continue;
      if (!ctx->needs_input_grad(i)) {
        gradient = at::Tensor();
        continue;
      }
      const at::Tensor scale = upstream[0].to(computing_type(gradient.scalar_type()));
      // They are not read again unless the graph is kept.
      gradient = (keep ? gradient * scale : gradient.detach().mul_(scale)).to(type);
    }
    gradients.emplace_back();
    return gradients;
  }
};

const differentiable::Separable<LinearCrossEntropyFunction> kFusedLossIsSeparable;

bool wants_gradient(const at::Tensor& values) {
  return at::GradMode::is_enabled() && values.defined() && values.requires_grad();
}

void check_shapes(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& bias) {
  check_type(kWhere, "hidden", hidden);
  check_type(kWhere, "weight", weight);
  const auto describe = [](const at::Tensor& t) {
    return fmt::format("{} of {} on {}", c10::str(t.sizes()), c10::toString(t.scalar_type()),
                       t.device().str());
  };
  const auto fits = [&](const at::Tensor& t) {
    return t.scalar_type() == hidden.scalar_type() && t.device() == hidden.device();
  };
  if (hidden.dim() != 2 || weight.dim() != 2 || hidden.size(1) != weight.size(1) || !fits(weight))
    refuse(kWhere, fmt::format("hidden {}, weight {}", describe(hidden), describe(weight)),
           "hidden [T, H] and weight [V, H] of one type on one device", "Flatten the leading dims of hidden");
  if (bias.defined() && (bias.dim() != 1 || bias.size(0) != weight.size(0) || !fits(bias)))
    refuse(kWhere, fmt::format("bias {}, weight {}", describe(bias), describe(weight)),
           "bias [V] of the weight's type on its device", "Pass one bias for each token of the vocabulary");
}

}  // namespace

LinearCrossEntropy linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                        const at::Tensor& targets, const LinearCrossEntropyOptions& options) {
  check_shapes(hidden, weight, options.bias);
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
