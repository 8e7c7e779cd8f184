// The output projection a tile of rows at a time, for losses that never hold all logits and whose forward
// makes the gradients too.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cstdint>
#include <string>

#include "isograd/loss.hpp"

namespace isograd {

struct Tiles {
  std::int64_t tokens, vocabulary;
};
// Sizes for `rows` rows; those wanted, where they are not 0.
Tiles choose_tiles(const at::Tensor& weight, const VocabularyShard& shard, Tiles wanted, std::int64_t rows);

// Logits [rows, columns] of the columns from `first` on, valid until the next call. `bias` may be undefined.
class TiledLogits {
 public:
  TiledLogits(at::Tensor weight, at::Tensor bias, Tiles tiles);
  at::Tensor operator()(const at::Tensor& rows, std::int64_t first, std::int64_t columns);

 private:
  at::Tensor weight_, bias_;
  Tiles tiles_;
  at::Tensor buffer_;
};

// to += gradientᵀ rows, the columns' part of the weight's gradient [columns, H]; written the first time.
// `turned`: rows in the other order, where the sum is wider than they are.
void accumulate(const at::Tensor& gradient, const at::Tensor& rows, const at::Tensor& turned, bool first,
                at::Tensor to);

bool wants_gradient(const at::Tensor& values);

// ConfigError unless hidden is [T, H], weight [V, H] and bias, if defined, [V], of one type on one device.
void check_projection(const std::string& where, const at::Tensor& hidden, const at::Tensor& weight,
                      const at::Tensor& bias);

// The backward of a function that saved the gradients of its tensors and, as "type", their type: these times
// the upstream scalar, and none for one further argument.
torch::autograd::variable_list made_gradients(const std::string& where,
                                              torch::autograd::AutogradContext& context,
                                              const at::Tensor& upstream);

}  // namespace isograd
