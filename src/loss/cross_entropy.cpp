// Cross entropy as a sum over targets, in two fused passes: row sums forward, softmax minus one-hot backward.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cmath>

#include "comm/autograd.hpp"
#include "isograd/loss.hpp"
#include "kernels/softmax.hpp"
#include "loss/checks.hpp"
#include "loss/rows.hpp"

namespace isograd {
namespace {

// Σ ℓ in the order of the rows, whatever the threads.
double sum_in_order(const RowStatistics& rows, const at::Tensor& mask) {
  const auto* valid = mask.const_data_ptr<bool>();
  const auto* sums = static_cast<const kernels::RowSum*>(rows.sums.const_data_ptr());
  const auto* target = rows.target.const_data_ptr<double>();
  double sum = 0;
  for (std::int64_t t = 0; t < mask.size(0); ++t)
    if (valid[t]) sum += sums[t].maximum - target[t] + std::log(sums[t].sum);
  return sum;
}

// No other code can see these logits and no second backward will read them. Both sides of the count are
// tested: logits that a caller holds keep their values, others are overwritten.
bool may_overwrite(const at::Tensor& logits) {
  constexpr std::size_t kSavedAndUnpacked = 3;  // the context's list, its saved variable, our copy of it
  return logits.is_contiguous() && !logits.is_leaf() && logits.use_count() <= kSavedAndUnpacked &&
         logits.storage().use_count() == 1 && !torch::autograd::get_current_graph_task_keep_graph();
}

// ℓ of each row, [T] in fp64 with 0 where the mask is false; or with `summed`, on the CPU, its sum over the
// rows. Two passes over the logits: row sums forward, softmax minus one-hot backward.
struct RowLosses : torch::autograd::Function<RowLosses> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& targets,
                            const at::Tensor& mask, const EntropyLoss& loss, const VocabularyShard& shard,
                            bool summed) {
    RowStatistics rows = begin_rows(logits.size(0), loss, logits.device());
    take_in(logits.contiguous(), shard.first, targets, mask, rows);
    take_in_columns_of(shard.group, rows);
    ctx->save_for_backward({logits, targets, mask, rows.sums});
    ctx->saved_data["loss"] = std::vector<double>{loss.cross_entropy, loss.label_smoothing, loss.z_loss};
    ctx->saved_data["first"] = shard.first;
    ctx->saved_data["vocabulary"] = shard.vocabulary;
    return summed ? at::scalar_tensor(sum_in_order(rows, mask),
                                      logits.options().dtype(computing_type(logits.scalar_type())))
                  : at::where(mask, losses(rows, loss, shard.vocabulary), 0.0);
  }

  static variable_list backward(AutogradContext* ctx, variable_list upstream) {
    if (at::GradMode::is_enabled())
      refuse("cross_entropy_sum", "a backward with create_graph", "first derivatives only",
             "Use at::cross_entropy_loss where second derivatives are needed");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &logits = saved[0], &targets = saved[1], &mask = saved[2];
    const auto terms = ctx->saved_data["loss"].toDoubleVector();
    const at::Tensor rows = logits.contiguous();
    const bool in_place = may_overwrite(logits);
    at::Tensor gradient = in_place ? logits.detach() : at::empty_like(rows);
    const at::Tensor coefficients = gradient_coefficients(
        {.sums = saved[3], .target = {}, .total = {}},
        {.cross_entropy = terms[0], .label_smoothing = terms[1], .z_loss = terms[2]},
        ctx->saved_data["vocabulary"].toInt(), upstream[0].to(at::kDouble).expand({logits.size(0)}));
    write_gradient(rows, ctx->saved_data["first"].toInt(), targets, mask, coefficients, gradient);
    if (in_place) logits.unsafeGetTensorImpl()->bump_version();  // a reader we did not foresee gets an error
    return {gradient, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
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

}  // namespace

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets) {
  const at::Tensor wanted = targets.contiguous();
  const VocabularyShard shard = check_arguments("cross_entropy_sum", logits, wanted);
  if (!logits.is_cpu()) return cross_entropy_sum(logits, wanted, CrossEntropyOptions{});
  return RowLosses::apply(logits, wanted, wanted.ne(kIgnoreIndex), EntropyLoss{}, shard, /*summed=*/true);
}

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets,
                             const CrossEntropyOptions& options) {
  const std::string where = "cross_entropy_sum";
  const at::Tensor wanted = targets.contiguous();
  const VocabularyShard shard = check_arguments(where, logits, wanted, options.shard);
  check_coefficients(where, options.label_smoothing, options.z_loss);
  const TokenWeights tokens =
      token_weights(where, options.weights, wanted, logits.size(0), logits.device(), shard.vocabulary);
  const EntropyLoss loss{.label_smoothing = options.label_smoothing, .z_loss = options.z_loss};
  const at::Tensor each = RowLosses::apply(logits, wanted, tokens.mask, loss, shard, false);
  return (each * tokens.weights).sum().to(computing_type(logits.scalar_type()));
}

at::Tensor z_loss_sum(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& weights,
                      const VocabularyShard& given) {
  const at::Tensor wanted = targets.contiguous();
  const VocabularyShard shard = check_arguments("z_loss_sum", logits, wanted, given);
  const TokenWeights tokens =
      token_weights("z_loss_sum", weights, wanted, logits.size(0), logits.device(), shard.vocabulary);
  const EntropyLoss loss{.cross_entropy = 0, .z_loss = 1};
  const at::Tensor each = RowLosses::apply(logits, wanted, tokens.mask, loss, shard, false);
  return (each * tokens.weights).sum().to(computing_type(logits.scalar_type()));
}

at::Tensor token_log_probabilities(const at::Tensor& logits, const at::Tensor& targets,
                                   const VocabularyShard& given) {
  const at::Tensor wanted = targets.contiguous();
  const VocabularyShard shard = check_arguments("token_log_probabilities", logits, wanted, given);
  // Subtracted from 0, not negated: an ignored token has 0, not −0.
  return at::rsub(RowLosses::apply(logits, wanted, wanted.ne(kIgnoreIndex), EntropyLoss{}, shard, false), 0.0)
      .to(computing_type(logits.scalar_type()));
}

}  // namespace isograd
