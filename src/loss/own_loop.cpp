#include "isograd/loss.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>

#include "base/refuse.hpp"
#include "loss/share.hpp"
#include "loss/term_graph.hpp"

namespace isograd {
std::int64_t count_valid_tokens(const MicroBatches& micro_batches, Group& data) {
  std::int64_t count = 0;
  for (const Batch& batch : micro_batches) count += batch.num_targets();
  at::Tensor sum = at::full({1}, count, at::kLong);
  if (data.size() > 1) data.all_reduce(sum);
  return sum.item<std::int64_t>();
}

at::Tensor gradient_accumulate_loss(const at::Tensor& mean_loss, std::int64_t local_valid,
                                    std::int64_t global_valid, Group& data) {
  constexpr const char* kFunction = "gradient_accumulate_loss";
  if (!mean_loss.defined() || mean_loss.numel() != 1)
    refuse(kFunction,
           mean_loss.defined() ? fmt::format("a loss of shape {}", c10::str(mean_loss.sizes())) : "no loss",
           "a scalar: the mean over this micro-batch's valid tokens",
           "Take the mean, and pass its token count");
  if (local_valid < 0 || local_valid > global_valid)
    refuse(kFunction, fmt::format("{} valid tokens here of {} in the whole step", local_valid, global_valid),
           "0 to as many as in the whole step",
           "Count with count_valid_tokens over all micro-batches and ranks");
  if (is_share(mean_loss))
    refuse(kFunction, "a value that was divided already", "the mean over this micro-batch's valid tokens",
           "Divide once: pass the plain mean");
  double value = 0;
  if (local_valid > 0)
    value = mean_loss.detach().to(at::kDouble).item<double>() * static_cast<double>(local_valid);
  // The third number notices calls of different steps that met: their global counts differ.
  const auto valid = static_cast<double>(global_valid);
  // The fourth, whether a rank refuses: then all do. A micro-batch without tokens divides nothing.
  const bool narrow = local_valid > 0 && in_16_bits(mean_loss) != In16Bits::kNothing;
  double sums[] = {value, valid, valid * valid, narrow ? 1. : 0.};
  if (data.size() > 1) {
    at::Tensor message = at::tensor(at::ArrayRef<double>(sums, 4), at::kDouble);
    try {
      data.all_reduce(message);
    } catch (const PeerError& error) {
      ErrorText text = error.text();
      text.where = "gradient_accumulate_loss: " + text.where;
      text.expected = "every rank calls it equally often; " + text.expected;
      text.action =
          "Give ranks with fewer micro-batches a constant loss and local_valid = 0 for those they lack; " +
          text.action;
      throw PeerError(text);
    }
    for (int i = 0; i < 4; ++i) sums[i] = message.const_data_ptr<double>()[i];
    const double ranks = data.size();
    if (sums[1] != ranks * valid || std::abs(sums[2] - ranks * valid * valid) > 1e-9 * ranks * valid * valid)
      refuse(
          kFunction,
          fmt::format(
              "{} valid tokens in the step on this rank, {:.17g} on the ranks together, each counting all",
              global_valid, sums[1]),
          "the same global_valid on every rank and equally many calls on each",
          "Count once for the step, and call this once for each of the most micro-batches that a rank has");
  }
  if (sums[3] != 0)
    refuse(
        kFunction,
        fmt::format("a mean whose gradient begins in 16 bits{}, to which the division would be rounded",
                    narrow ? "" : " on another rank"),
        "losses in float32 or float64, and their mean",
        "Convert what the loss is computed from (log_softmax(logits.to(at::kFloat), 1)). Where all slopes are alike, as those of |x| and max(x, 0), compute the layer before the loss in float32 too, or take DeferredAccumulator, which divides in float32 at the end");
  const double divisor = global_valid > 0 ? valid : 1;
  at::Tensor share = share_of_value(mean_loss, static_cast<double>(local_valid) / divisor, sums[0] / divisor);
  // A constant stands for a micro-batch that the rank lacks: its backward may be called like any other's.
  if (local_valid == 0 && at::GradMode::is_enabled() && !share.requires_grad()) share.requires_grad_(true);
  return share;
}

void sync_context_gradients(const std::vector<at::Tensor>& parameters, Group& context) {
  for (const at::Tensor& parameter : parameters) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) gradient = at::zeros_like(parameter.detach());
    if (gradient.layout() != at::kStrided) gradient = gradient.to_dense();  // of an embedding with `sparse`
    if (context.size() > 1) context.all_reduce(gradient);
  }
}

DeferredAccumulator::DeferredAccumulator(std::unique_ptr<Normalizer> mean, Group data)
    : mean_(std::move(mean)), data_(std::move(data)) {}

MicroBatches DeferredAccumulator::begin_call(const MicroBatches& micro_batches) {
  step_counts_ = mean_.count(micro_batches, data_, false);
  denominator_ = mean_.denominator(step_counts_);
  MicroBatches prepared;
  for (const Batch& batch : micro_batches) prepared.push_back(mean_.prepare(batch, denominator_));
  return prepared;
}

at::Tensor DeferredAccumulator::raw_loss(const LossTerms& terms) {
  at::Tensor raw = mean_.scale(terms, denominator_);
  if (!raw.requires_grad()) raw.requires_grad_(true);  // of constants: a call may hold no target
  sum_ += raw.item<double>();
  return raw;
}

DeferredAccumulator::Result DeferredAccumulator::finish() {
  at::Tensor sum = at::full({1}, sum_, at::kDouble);
  if (data_.size() > 1) data_.all_reduce(sum);
  Result result{.gradient_scale = denominator_.is_empty() ? 0 : denominator_.gradient_scale,
                .step_counts = step_counts_};
  result.loss = sum.item<double>() * result.gradient_scale;
  sum_ = 0;
  step_counts_ = {};
  denominator_ = {};
  mean_.begin_step();
  return result;
}

}  // namespace isograd
