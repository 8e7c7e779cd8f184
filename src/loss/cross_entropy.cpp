// Cross entropy as a sum over targets, in two fused passes: row sums forward, softmax minus one-hot backward.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cmath>
#include <memory>

#include "isograd/error.hpp"
#include "isograd/loss.hpp"
#include "kernels/softmax.hpp"

namespace isograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

static_assert(sizeof(kernels::Bfloat16) == sizeof(at::BFloat16));

// Calls pass(typed pointer to the logits' elements).
template <typename F>
void with_elements(const at::Tensor& logits, F&& pass) {
  void* data = const_cast<void*>(logits.const_data_ptr());
  switch (logits.scalar_type()) {
    case at::kFloat:
      return pass(static_cast<float*>(data));
    case at::kDouble:
      return pass(static_cast<double*>(data));
    default:
      return pass(static_cast<kernels::Bfloat16*>(data));
  }
}

std::int64_t rows_per_task(std::int64_t vocabulary) {
  constexpr std::int64_t kTaskElements = 1 << 15;
  return std::max<std::int64_t>(1, kTaskElements / std::max<std::int64_t>(1, vocabulary));
}

// Sums of the rows that have a target, and the loss. `sums` [T, 2] fp64 holds kernels::RowSum.
double forward_pass(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& mask,
                    at::Tensor& sums) {
  const std::int64_t rows = logits.size(0), vocabulary = logits.size(1);
  const auto* valid = mask.const_data_ptr<bool>();
  const auto* target = targets.const_data_ptr<std::int64_t>();
  auto* row_sums = static_cast<kernels::RowSum*>(sums.mutable_data_ptr());
  std::vector<double> losses(rows);
  with_elements(logits, [&](auto* elements) {
    at::parallel_for(0, rows, rows_per_task(vocabulary), [&](std::int64_t begin, std::int64_t end) {
      kernels::row_sums(elements + begin * vocabulary, end - begin, vocabulary, valid + begin,
                        row_sums + begin);
    });
    for (std::int64_t t = 0; t < rows; ++t)
      if (valid[t]) {
        const auto logit = elements[t * vocabulary + target[t]];
        double value;
        if constexpr (std::is_same_v<std::remove_cv_t<decltype(logit)>, kernels::Bfloat16>)
          value = kernels::to_float(logit);
        else
          value = logit;
        losses[t] = row_sums[t].maximum - value + std::log(row_sums[t].sum);
      }
  });
  double sum = 0;  // in the order of the rows, whatever the threads
  for (double loss : losses) sum += loss;
  return sum;
}

// Nobody else can see these logits and no second backward will read them. Both sides of the count are tested:
// logits that a caller holds keep their values, others are overwritten.
bool may_overwrite(const at::Tensor& logits) {
  constexpr std::size_t kSavedAndUnpacked = 3;  // the context's list, its saved variable, our copy of it
  return logits.is_contiguous() && !logits.is_leaf() && logits.use_count() <= kSavedAndUnpacked &&
         logits.storage().use_count() == 1 && !torch::autograd::get_current_graph_task_keep_graph();
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
    if (at::GradMode::is_enabled())
      throw ConfigError({.where = "cross_entropy_sum",
                         .found = "a backward with create_graph",
                         .expected = "first derivatives only",
                         .action = "Use at::cross_entropy_loss where second derivatives are needed"});
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &logits = saved[0], &targets = saved[1], &mask = saved[2], &sums = saved[3];
    const std::int64_t vocabulary = logits.size(1);
    const double scale = upstream[0].defined() ? upstream[0].item<double>() : 0;
    const at::Tensor rows = logits.contiguous();
    const bool in_place = may_overwrite(logits);
    at::Tensor gradient = in_place ? logits.detach() : at::empty_like(rows);
    with_elements(rows, [&](auto* elements) {
      auto* out = static_cast<decltype(elements)>(const_cast<void*>(gradient.const_data_ptr()));
      at::parallel_for(0, rows.size(0), rows_per_task(vocabulary), [&](std::int64_t begin, std::int64_t end) {
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

void check_arguments(const at::Tensor& logits, const at::Tensor& targets) {
  const auto refuse = [](std::string found, std::string expected, std::string action) {
    throw ConfigError({.where = "cross_entropy_sum",
                       .found = std::move(found),
                       .expected = std::move(expected),
                       .action = std::move(action)});
  };
  const auto type = logits.scalar_type();
  if (!logits.device().is_cpu() || !targets.device().is_cpu() ||
      (type != at::kFloat && type != at::kDouble && type != at::kBFloat16))
    refuse(fmt::format("logits of {} on {}, targets on {}", c10::toString(type), logits.device().str(),
                       targets.device().str()),
           "float64, float32 or bfloat16 on the CPU", "Convert the logits");
  if (logits.dim() != 2 || targets.dim() != 1 || logits.size(0) != targets.size(0) ||
      targets.scalar_type() != at::kLong)
    refuse(fmt::format("logits {}, targets {} of {}", c10::str(logits.sizes()), c10::str(targets.sizes()),
                       c10::toString(targets.scalar_type())),
           "logits [T, V] and targets [T] of int64", "Flatten the leading dims of both");
  const auto* target = targets.const_data_ptr<std::int64_t>();
  for (std::int64_t t = 0; t < targets.size(0); ++t)
    if (target[t] != kIgnoreIndex && (target[t] < 0 || target[t] >= logits.size(1)))
      refuse(fmt::format("targets[{}] = {}", t, target[t]),
             fmt::format("0 to {} (the vocabulary), or {} for no loss", logits.size(1) - 1, kIgnoreIndex),
             "Check that the data were tokenized for this model");
}

}  // namespace

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& targets) {
  const at::Tensor wanted = targets.contiguous();
  check_arguments(logits, wanted);
  return CrossEntropySum::apply(logits, wanted, wanted.ne(kIgnoreIndex));
}

}  // namespace isograd
