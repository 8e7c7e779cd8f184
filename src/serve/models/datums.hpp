// The datums of a forward_backward: checked whole, before anything is computed, then packed for the
// model.
#pragma once

#include <cstddef>
#include <vector>

#include "isograd/batch.hpp"
#include "isograd/loss.hpp"
#include "isograd/model.hpp"
#include "serve/wire/messages.hpp"

namespace isograd::serve {

// Numbers by which optim_step may divide, counted since the last one.
struct Counted {
  std::int64_t calls = 0, sequences = 0;  // sequences: datums
  std::int64_t tokens = 0;                // rows with a weight other than 0; without weights all
  double weights = 0;                     // Σ w; 1 for rows without weights

  Counted& operator+=(const Counted& more);
};

// A request that can be computed.
struct CheckedCall {
  RowLoss loss = RowLoss::kCrossEntropy;
  RowLossOptions options{};
  Counted counted{};
  bool negative_weights = false;
};

// ConfigError: a loss, key or input that does not exist or is missing; shapes, token ids and numbers that do
// not fit.
CheckedCall check_call(const ForwardBackward& request, const DecoderConfig& model, std::int64_t context);

// Micro-batches of the datums [begin, end) in order, none split, of at most `most_tokens` unless a datum has
// more. All of one have targets of one shape.
MicroBatches pack(const ForwardBackward& request, const CheckedCall& call, std::int64_t most_tokens,
                  std::size_t begin = 0, std::size_t end = std::size_t(-1));
// The first datum of each of `parts` consecutive parts with about equally many tokens, and the end.
std::vector<std::size_t> split_datums(const ForwardBackward& request, int parts);

// The losses of a packed batch, or of a context rank's part of one: targets, weights, ... are looked
// up by sample id, which is the datum, and position. Padding has weight 0.
RowLossResult losses_of(const DecoderLM& model, const at::Tensor& hidden, const ForwardBackward& request,
                        const CheckedCall& call, const Batch& batch);

Array array_of(const at::Tensor& log_probabilities);

}  // namespace isograd::serve
