#include "isograd/batch.hpp"

#include <ATen/ATen.h>

#include <fmt/format.h>

#include "base/refuse.hpp"
#include "data/move.hpp"

namespace isograd {

std::int64_t Batch::num_targets() const {
  if (!targets.defined() || targets.numel() == 0) return 0;
  return targets.ne(kIgnoreIndex).sum().item<std::int64_t>();
}

std::int64_t ContextCut::document_length(std::int64_t document) const {
  const auto fragments = static_cast<std::int64_t>(cu_seqlens.size()) - 1;
  if (document < fragments)
    return cu_seqlens[static_cast<std::size_t>(document) + 1] -
           cu_seqlens[static_cast<std::size_t>(document)];
  std::int64_t length = 0;
  for (const Piece& piece : pieces[static_cast<std::size_t>(document - fragments)])
    if (piece.document == document) length += piece.length;
  return length;
}

std::int64_t ContextCut::tokens_of(int of_rank) const {
  std::int64_t length = 0;
  for (const Piece& piece : pieces[static_cast<std::size_t>(of_rank)]) length += piece.length;
  return length;
}

at::Tensor moved(const at::Tensor& tensor, at::Device device) {
  if (tensor.device() == device) return tensor;
  // LibTorch returns pinned memory to its pool only after the copy is complete.
  const bool pinned = device.is_cuda() && tensor.is_cpu();
  return (pinned ? tensor.pin_memory() : tensor).to(device, /*non_blocking=*/pinned);
}

Batch to_device(const Batch& batch, at::Device device) {
  Batch moved = batch;
  for (at::Tensor* tensor : {&moved.tokens, &moved.targets, &moved.positions, &moved.weights,
                             &moved.given_weights, &moved.sample_weights}) {
    if (tensor->defined()) *tensor = isograd::moved(*tensor, device);
  }
  for (at::Tensor& input : moved.inputs) input = isograd::moved(input, device);
  if (device.is_cpu()) return moved;
  if (batch.positions.defined() && batch.positions.is_cpu() && batch.positions.numel() > 0)
    moved.largest_position = batch.positions.max().item<std::int64_t>();
  if (!moved.cu_seqlens_on_device.defined())
    moved.cu_seqlens_on_device = isograd::moved(at::tensor(batch.cu_seqlens, at::kInt), device);
  return moved;
}

std::size_t BatchInputs::present(std::size_t i) const {
  if (i >= size())
    refuse(fmt::format("inputs[{}] of a batch", i), empty() ? "no inputs" : fmt::format("{} of them", size()),
           "as many as the forward reads",
           empty() ? "Under ZeRO-2 and ZeRO-3 step({}) runs the forward on a batch without inputs: take an "
                     "empty tensor where batch.inputs.empty() (docs/own_data.md, Empty batches)"
                   : "Give them to batch_of_samples()");
  return i;
}

Batch empty_batch() {
  Batch batch;
  batch.tokens = at::empty({0}, at::kLong);
  batch.targets = at::empty({0}, at::kLong);
  batch.positions = at::empty({0}, at::kLong);
  return batch;
}

Batch batch_of_samples(std::vector<at::Tensor> inputs, const at::Tensor& targets,
                       std::vector<std::int64_t> sample_ids) {
  const auto samples = static_cast<std::int64_t>(sample_ids.size());
  const auto check = [&](bool holds, const std::string& what, std::string found, std::string expected) {
    if (!holds)
      refuse("batch_of_samples: " + what, std::move(found), std::move(expected),
             "Give one row for each of the sample_ids");
  };
  check(targets.defined() && targets.scalar_type() == at::kLong && targets.dim() >= 1 &&
            targets.size(0) == samples,
        "targets",
        targets.defined()
            ? fmt::format("{} of {}", c10::str(targets.sizes()), c10::toString(targets.scalar_type()))
            : "undefined",
        fmt::format("[{}] or [{}, ...] of int64", samples, samples));
  for (std::size_t i = 0; i < inputs.size(); ++i)
    check(inputs[i].defined() && inputs[i].dim() >= 1 && inputs[i].size(0) == samples,
          fmt::format("inputs[{}]", i), inputs[i].defined() ? c10::str(inputs[i].sizes()) : "undefined",
          fmt::format("[{}, ...]", samples));
  Batch batch;
  const at::Tensor by_sample = targets.dim() == 1 ? targets.unsqueeze(1) : targets.flatten(1);
  for (std::int64_t i = 0; i < samples; ++i) {
    batch.cu_seqlens.push_back(batch.cu_seqlens.back() + by_sample.size(1));
    batch.sample_targets.push_back(by_sample[i].ne(kIgnoreIndex).sum().item<std::int64_t>());
  }
  batch.targets = by_sample.flatten();
  batch.tokens = batch.positions = at::zeros_like(batch.targets);  // samples without token sequences
  batch.inputs = std::move(inputs);
  batch.sample_ids = std::move(sample_ids);
  return batch;
}

}  // namespace isograd
