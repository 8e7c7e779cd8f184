// Cross entropy as a sum over targets, in two fused passes: row sums forward, softmax minus one-hot backward.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cmath>
#include <memory>

#include "isograd/error.hpp"
#include "isograd/loss.hpp"
#include "kernels/softmax.hpp"
#include "kernels/threads/parallel_for.hpp"
#include "loss/checks.hpp"
#include "loss/rows.hpp"

namespace isograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Sums of the rows that have a target, and the loss. `sums` [T, 2] fp64 holds kernels::RowSum.
double forward_pass(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& mask,
                    at::Tensor& sums) {
  const std::int64_t rows = logits.size(0), vocabulary = logits.size(1);
  const auto* valid = mask.const_data_ptr<bool>();
  const auto* target = targets.const_data_ptr<std::int64_t>();
  auto* row_sums = static_cast<kernels::RowSum*>(sums.mutable_data_ptr());
  std::vector<double> losses(rows);
  with_elements(logits, [&](auto* elements) {
    parallel_for(0, rows, rows_per_task(vocabulary), [&](std::int64_t begin, std::int64_t end) {
      kernels::row_sums(elements + begin * vocabulary, end - begin, vocabulary, valid + begin,
                        row_sums + begin);
    });
    for (std::int64_t t = 0; t < rows; ++t)
      if (valid[t]) {
        const double value = value_of(elements[t * vocabulary + target[t]]);
        losses[t] = row_sums[t].maximum - value + std::log(row_sums[t].sum);
      }
  });
  double sum = 0;  // in the order of the rows, whatever the threads
  for (double loss : losses) sum += loss;
  return sum;
}

// No other code can see these logits and no second backward will read them. Both sides of the count are
// tested: logits that a caller holds keep their values, others are overwritten.
bool may_overwrite(const at::Tensor& logits) {
  constexpr std::size_t kSavedAndUnpacked = 3;  // the context's list, its saved variable, our copy of it
  return logits.is_contiguous() && !logits.is_leaf() && logits.use_count() <= kSavedAndUnpacked &&
         logits.storage().use_count() == 1 && !torch::autograd::get_current_graph_task_keep_graph();
}

void refuse_second_derivatives() {
  if (at::GradMode::is_enabled())
    refuse("cross_entropy_sum", "a backward with create_graph", "first derivatives only",
           "Use at::cross_entropy_loss where second derivatives are needed");
}

struct CrossEntropySum : torch::autograd::Function<CrossEntropySum> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& targets,
                            const at::Tensor& mask) {
    const at::Tensor rows = logits.contiguous();
    at::Tensor sums = at::zeros({logits.size(0), 2}, logits.options().dtype(at::kDouble));
    const double loss = forward_pass(rows, targets, mask, sums);
    ctx->save_for_backward({logits, targets, mask, sums});
    return at::scalar_tensor(
        loss, logits.options().dtype(logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  }

  static variable_list backward(AutogradContext* ctx, variable_list upstream) {
    refuse_second_derivatives();
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &logits = saved[0], &targets = saved[1], &mask = saved[2], &sums = saved[3];
    const std::int64_t vocabulary = logits.size(1);
    const double scale = upstream[0].defined() ? upstream[0].item<double>() : 0;
    const at::Tensor rows = logits.contiguous();
    const bool in_place = may_overwrite(logits);
    at::Tensor gradient = in_place ? logits.detach() : at::empty_like(rows);
    with_elements(rows, [&](auto* elements) {
      auto* out = static_cast<decltype(elements)>(const_cast<void*>(gradient.const_data_ptr()));
      parallel_for(0, rows.size(0), rows_per_task(vocabulary), [&](std::int64_t begin, std::int64_t end) {
        kernels::cross_entropy_gradient(elements + begin * vocabulary, end - begin, vocabulary,
                                        mask.const_data_ptr<bool>() + begin,
                                        targets.const_data_ptr<std::int64_t>() + begin,
                                        static_cast<const kernels::RowSum*>(sums.const_data_ptr()) + begin,
                                        scale, out + begin * vocabulary);
      });
    });
    if (in_place) logits.unsafeGetTensorImpl()->bump_version();  // a reader we did not foresee gets an error
    return {gradient, at::Tensor(), at::Tensor()};
  }
};

// Every row's ℓ [T] in fp64; 0 where the mask is false. Two passes over the logits, as above.
struct RowLosses : torch::autograd::Function<RowLosses> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& targets,
                            const at::Tensor& mask, const RowLoss& loss, const VocabularyShard& shard) {
    RowStatistics rows = begin_rows(logits.size(0), loss, logits.device());
    take_in(logits.contiguous(), shard.first, targets, mask, rows);
    take_in_columns_of(shard.group, rows);
    ctx->save_for_backward({logits, targets, mask, rows.sums});
    ctx->saved_data["loss"] = std::vector<double>{loss.cross_entropy, loss.label_smoothing, loss.z_loss};
    ctx->saved_data["first"] = shard.first;
    ctx->saved_data["vocabulary"] = shard.vocabulary;
    return at::where(mask, losses(rows, loss, shard.vocabulary), 0.0);
  }

  static variable_list backward(AutogradContext* ctx, variable_list upstream) {
    refuse_second_derivatives();
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &logits = saved[0], &targets = saved[1], &mask = saved[2];
    const auto terms = ctx->saved_data["loss"].toDoubleVector();
    const at::Tensor rows = logits.contiguous();
    const bool in_place = may_overwrite(logits);
    at::Tensor gradient = in_place ? logits.detach() : at::empty_like(rows);
    const at::Tensor coefficients =
        gradient_coefficients({.sums = saved[3], .target = {}, .total = {}},
                              {.cross_entropy = terms[0], .label_smoothing = terms[1], .z_loss = terms[2]},
                              ctx->saved_data["vocabulary"].toInt(), upstream[0].to(at::kDouble));
    write_gradient(rows, ctx->saved_data["first"].toInt(), targets, mask, coefficients, gradient);
    if (in_place) logits.unsafeGetTensorImpl()->bump_version();
    return {gradient, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

// The shard with the vocabulary that it is one of.
VocabularyShard check_arguments(const std::string& where, const at::Tensor& logits, const at::Tensor& targets,
                                const VocabularyShard& given = {}) {
  check_type(where, "logits", logits);
  if (logits.dim() != 2 || !targets.defined() || targets.dim() != 1 || logits.size(0) != targets.size(0))
    refuse(where,
           fmt::format("logits {}, targets {}", c10::str(logits.sizes()),
                       targets.defined() ? c10::str(targets.sizes()) : "undefined"),
           "logits [T, V] and targets [T] of int64", "Flatten the leading dims of both");
  if (logits.device() != targets.device())
    refuse(where, fmt::format("logits on {}, targets on {}", logits.device().str(), targets.device().str()),
           "one device", "Move the targets to the logits");
  const VocabularyShard shard = checked_shard(where, given, logits.size(1));
  check_targets(where, targets, logits.size(0), shard.vocabulary);
  return shard;
}

at::Tensor row_losses(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& mask,
                      const RowLoss& loss, const VocabularyShard& shard) {
  return RowLosses::apply(logits, targets, mask, loss, shard);
}

}  // namespace

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets) {
  const at::Tensor wanted = targets.contiguous();
  check_arguments("cross_entropy_sum", logits, wanted);
  if (!logits.is_cpu()) return cross_entropy_sum(logits, wanted, CrossEntropyOptions{});
  return CrossEntropySum::apply(logits, wanted, wanted.ne(kIgnoreIndex));
}

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets,
                             const CrossEntropyOptions& options) {
  const std::string where = "cross_entropy_sum";
  const at::Tensor wanted = targets.contiguous();
  const VocabularyShard shard = check_arguments(where, logits, wanted, options.shard);
  check_coefficients(where, options.label_smoothing, options.z_loss);
  const TokenWeights tokens =
      token_weights(where, options.weights, wanted, logits.size(0), logits.device(), shard.vocabulary);
  const at::Tensor each = row_losses(
      logits, wanted, tokens.mask,
      {.cross_entropy = 1, .label_smoothing = options.label_smoothing, .z_loss = options.z_loss}, shard);
  return (each * tokens.weights).sum().to(computing_type(logits.scalar_type()));
}

at::Tensor z_loss_sum(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& weights,
                      const VocabularyShard& given) {
  const at::Tensor wanted = targets.contiguous();
  const VocabularyShard shard = check_arguments("z_loss_sum", logits, wanted, given);
  const TokenWeights tokens =
      token_weights("z_loss_sum", weights, wanted, logits.size(0), logits.device(), shard.vocabulary);
  const at::Tensor each = row_losses(logits, wanted, tokens.mask, {.cross_entropy = 0, .z_loss = 1}, shard);
  return (each * tokens.weights).sum().to(computing_type(logits.scalar_type()));
}

at::Tensor token_log_probabilities(const at::Tensor& logits, const at::Tensor& targets,
                                   const VocabularyShard& given) {
  const at::Tensor wanted = targets.contiguous();
  const VocabularyShard shard = check_arguments("token_log_probabilities", logits, wanted, given);
  // Subtracted from 0, not negated: an ignored token has 0, not −0.
  return at::rsub(row_losses(logits, wanted, wanted.ne(kIgnoreIndex), {}, shard), 0.0)
      .to(computing_type(logits.scalar_type()));
}

}  // namespace isograd
