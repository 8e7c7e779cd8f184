#include "loss/rows.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/softmax.hpp"
#include "kernels/threads/parallel_for.hpp"
#include "loss/checks.hpp"

namespace isograd {
namespace {

static_assert(sizeof(kernels::RowGradient) == 4 * sizeof(double));
static_assert(sizeof(kernels::RowSum) == 2 * sizeof(double));

constexpr double kInfinity = std::numeric_limits<double>::infinity();

static_assert(sizeof(kernels::Bfloat16) == sizeof(at::BFloat16));

// Calls pass(typed pointer to the elements of a contiguous CPU tensor).
template <typename F>
void with_elements(const at::Tensor& logits, F&& pass) {
  void* data = const_cast<void*>(logits.const_data_ptr());
  switch (logits.scalar_type()) {
    case at::kFloat: return pass(static_cast<float*>(data));
    case at::kDouble: return pass(static_cast<double*>(data));
    default: return pass(static_cast<kernels::Bfloat16*>(data));
  }
}

double value_of(float x) { return x; }
double value_of(double x) { return x; }
double value_of(kernels::Bfloat16 x) { return kernels::to_float(x); }

std::int64_t rows_per_task(std::int64_t columns) {
  constexpr std::int64_t kTaskElements = 1 << 15;
  return std::max<std::int64_t>(1, kTaskElements / std::max<std::int64_t>(1, columns));
}

const bool* mask_of(const at::Tensor& mask) { return mask.defined() ? mask.const_data_ptr<bool>() : nullptr; }

// The sum over both parts of a row. Columns that are all −inf add nothing, and their sum is a NaN of the
// computation, not of the data.
template <typename T>
kernels::RowSum merge(const kernels::RowSum& before, kernels::RowSum tile, const T* row,
                      std::int64_t columns) {
  if (tile.maximum == -kInfinity &&
      std::all_of(row, row + columns, [](T x) { return value_of(x) == -kInfinity; }))
    return before;
  if (before.sum == 0) return tile;
  const double maximum = std::max(before.maximum, tile.maximum);
  return {maximum,
          before.sum * std::exp(before.maximum - maximum) + tile.sum * std::exp(tile.maximum - maximum)};
}

}  // namespace

RowStatistics begin_rows(std::int64_t rows, const EntropyLoss& loss, const at::Device& device) {
  const auto options = at::TensorOptions().dtype(at::kDouble).device(device);
  RowStatistics result{.sums = at::zeros({rows, 2}, options), .target = at::zeros({rows}, options)};
  result.sums.select(1, 0).fill_(-kInfinity);
  if (loss.cross_entropy != 0 && loss.label_smoothing != 0) result.total = at::zeros({rows}, options);
  return result;
}

void take_in(const at::Tensor& logits, std::int64_t first_column, const at::Tensor& targets,
             const at::Tensor& mask, RowStatistics& rows) {
  const std::int64_t columns = logits.size(1);
  if (columns == 0) return;
  if (!logits.is_cpu()) return naive_twin::take_in(logits, first_column, targets, mask, rows);
  const bool* valid = mask_of(mask);
  const auto* target = targets.const_data_ptr<std::int64_t>();
  auto* sums = static_cast<kernels::RowSum*>(rows.sums.mutable_data_ptr());
  auto* at_target = rows.target.mutable_data_ptr<double>();
  double* total = rows.total.defined() ? rows.total.mutable_data_ptr<double>() : nullptr;
  with_elements(logits, [&](auto* elements) {
    parallel_for(0, logits.size(0), rows_per_task(columns), [&](std::int64_t begin, std::int64_t end) {
      constexpr bool kThis = true;
      for (std::int64_t t = begin; t < end; ++t) {
        if (valid && !valid[t]) continue;
        const auto* row = elements + t * columns;
        kernels::RowSum tile;
        kernels::row_sums(row, 1, columns, &kThis, &tile);
        sums[t] = merge(sums[t], tile, row, columns);
        const std::int64_t column = target[t] - first_column;
        if (column >= 0 && column < columns) at_target[t] = value_of(row[column]);
        if (total) {
          double sum = 0;
          kernels::logit_sums(row, 1, columns, &kThis, &sum);
          total[t] += sum;
        }
      }
    });
  });
}

void take_in_columns_of(Group group, RowStatistics& rows) {
  if (group.size() == 1) return;
  std::vector<at::Tensor> own{rows.sums, rows.target.unsqueeze(1)};
  if (rows.total.defined()) own.push_back(rows.total.unsqueeze(1));
  const at::Tensor all = group.all_gather(at::cat(own, 1));  // [ranks, T, 3 or 4]
  const at::Tensor maxima = all.select(2, 0), sums = all.select(2, 1),
                   most = maxima.amax(0);  // NaN where one is
  const at::Tensor parts = at::where(sums.eq(0), 0.0, sums * (maxima - most).exp());
  rows.sums = at::stack({most, parts.sum(0)}, 1);
  rows.target = all.select(2, 2).sum(0);
  if (rows.total.defined()) rows.total = all.select(2, 3).sum(0);
}

at::Tensor log_sum_exp(const RowStatistics& rows) {
  return rows.sums.select(1, 0) + rows.sums.select(1, 1).log();
}

at::Tensor negative_log_likelihood(const RowStatistics& rows) {
  return (rows.sums.select(1, 0) - rows.target).add_(rows.sums.select(1, 1).log());
}

at::Tensor smoothed_cross_entropy(const RowStatistics& rows, double label_smoothing,
                                  std::int64_t vocabulary) {
  const at::Tensor likelihood = negative_log_likelihood(rows);
  if (label_smoothing == 0) return likelihood;
  const at::Tensor average = log_sum_exp(rows) - rows.total / static_cast<double>(vocabulary);
  return (1 - label_smoothing) * likelihood + label_smoothing * average;
}

at::Tensor losses(const RowStatistics& rows, const EntropyLoss& loss, std::int64_t vocabulary) {
  at::Tensor result;
  if (loss.cross_entropy != 0)
    result = loss.cross_entropy * smoothed_cross_entropy(rows, loss.label_smoothing, vocabulary);
  if (loss.z_loss != 0) {
    const at::Tensor z = loss.z_loss * log_sum_exp(rows).square();
    result = result.defined() ? result + z : z;
  }
  return result.defined() ? result : at::zeros_like(rows.target);
}

at::Tensor gradient_coefficients(const RowStatistics& rows, const EntropyLoss& loss, std::int64_t vocabulary,
                                 const at::Tensor& upstream) {
  at::Tensor of_softmax = upstream * loss.cross_entropy;
  if (loss.z_loss != 0) of_softmax = of_softmax + upstream * (2 * loss.z_loss) * log_sum_exp(rows);
  const double uniform = loss.cross_entropy * loss.label_smoothing / static_cast<double>(vocabulary);
  return at::stack({rows.sums.select(1, 0), of_softmax / rows.sums.select(1, 1), upstream * uniform,
                    upstream * (loss.cross_entropy * (1 - loss.label_smoothing))},
                   1);
}

void write_gradient(const at::Tensor& logits, std::int64_t first_column, const at::Tensor& targets,
                    const at::Tensor& mask, const at::Tensor& coefficients, at::Tensor& gradient) {
  const std::int64_t columns = logits.size(1);
  if (!logits.is_cpu())
    return naive_twin::write_gradient(logits, first_column, targets, mask, coefficients, gradient);
  const at::Tensor here = first_column == 0 ? targets : targets - first_column;
  const auto* target = here.const_data_ptr<std::int64_t>();
  const bool* valid = mask_of(mask);
  const auto* of = static_cast<const kernels::RowGradient*>(coefficients.const_data_ptr());
  with_elements(logits, [&](auto* elements) {
    auto* out = static_cast<decltype(elements)>(const_cast<void*>(gradient.const_data_ptr()));
    parallel_for(0, logits.size(0), rows_per_task(columns), [&](std::int64_t begin, std::int64_t end) {
      kernels::softmax_gradient(elements + begin * columns, end - begin, columns,
                                valid ? valid + begin : nullptr, target + begin, of + begin,
                                out + begin * columns);
    });
  });
}

namespace naive_twin {

void take_in(const at::Tensor& logits, std::int64_t first_column, const at::Tensor& targets,
             const at::Tensor& mask, RowStatistics& rows) {
  const std::int64_t columns = logits.size(1);
  if (columns == 0) return;
  const at::Tensor wide = logits.to(computing_type(logits.scalar_type()));
  const at::Tensor maximum = wide.amax(1);  // [T], NaN where one is
  at::Tensor sum = wide.sub(maximum.unsqueeze(1)).exp_().sum(1, false, at::kDouble);
  sum = at::where(maximum.eq(-kInfinity), 0.0, sum);
  const at::Tensor before_maximum = rows.sums.select(1, 0), before = rows.sums.select(1, 1);
  const at::Tensor both = at::maximum(before_maximum, maximum.to(at::kDouble));
  const auto share = [&](const at::Tensor& part, const at::Tensor& of_maximum) {
    return at::where(part.eq(0), 0.0, part * (of_maximum - both).exp());
  };
  const at::Tensor merged =
      at::stack({both, share(before, before_maximum) + share(sum, maximum.to(at::kDouble))}, 1);
  const at::Tensor column = targets - first_column;
  at::Tensor here = column.ge(0).logical_and(column.lt(columns));
  if (mask.defined()) here = here.logical_and(mask);
  const at::Tensor at_target =
      wide.gather(1, column.clamp(0, columns - 1).unsqueeze(1)).squeeze(1).to(at::kDouble);
  rows.sums = mask.defined() ? at::where(mask.unsqueeze(1), merged, rows.sums) : merged;
  rows.target = at::where(here, at_target, rows.target);
  if (rows.total.defined()) {
    const at::Tensor total = rows.total + wide.sum(1, false, at::kDouble);
    rows.total = mask.defined() ? at::where(mask, total, rows.total) : total;
  }
}

void write_gradient(const at::Tensor& logits, std::int64_t first_column, const at::Tensor& targets,
                    const at::Tensor& mask, const at::Tensor& coefficients, at::Tensor& gradient) {
  const std::int64_t columns = logits.size(1);
  const auto type = computing_type(logits.scalar_type());
  const at::Tensor of = coefficients.to(type);
  const auto coefficient = [&](std::int64_t i) { return of.select(1, i).unsqueeze(1); };
  at::Tensor result = logits.to(type).sub(coefficient(0)).exp_().mul_(coefficient(1)).sub_(coefficient(2));
  const at::Tensor column = targets - first_column;
  const at::Tensor here = column.ge(0).logical_and(column.lt(columns));
  if (columns > 0)
    result.scatter_add_(1, column.clamp(0, columns - 1).unsqueeze(1),
                        at::where(here.unsqueeze(1), coefficient(3).neg(), 0.0));
  if (mask.defined()) result = at::where(mask.unsqueeze(1), result, 0.0);
  gradient.copy_(result);
}

}  // namespace naive_twin
}  // namespace isograd
