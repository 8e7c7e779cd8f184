// Steps of a model's forward that model parallelism replaces, by axis. Each axis sets its own hooks
// (parallel/tensor, parallel/expert, parallel/pipeline); without them the model computes on one device.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "isograd/loss.hpp"
#include "isograd/model.hpp"
#include "model/fused.hpp"
#include "model/parameters.hpp"

namespace isograd {

// Ranks along tp hold the matrices together (tensor_parallel.hpp). Under sequence parallelism each rank's
// stream has some of the `tokens`.
struct TensorHooks {
  // x Wᵢᵀ + bᵢ of all tokens' x, weights [out, in], biases undefined where there is none.
  std::function<std::vector<at::Tensor>(const at::Tensor& stream, std::int64_t tokens,
                                        const std::vector<at::Tensor>& weights,
                                        const std::vector<at::Tensor>& biases)>
      column_parallel{};
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight)> row_parallel{};  // for the stream
  // The same two steps without products: the normed stream for products of all tokens, and a part of a sum.
  std::function<at::Tensor(const at::Tensor& stream, std::int64_t tokens)> region_input{};
  std::function<at::Tensor(const at::Tensor& part)> region_output{};
  // For what is the same on all ranks and read by each for its own features (weights of experts' outputs).
  std::function<at::Tensor(const at::Tensor& same)> copy_to_tp{};
  // Under sequence parallelism: this rank's tokens (begin, count), and the rows of all ranks.
  std::function<std::pair<std::int64_t, std::int64_t>(std::int64_t tokens)> own_tokens{};
  std::function<at::Tensor(const at::Tensor& own, std::int64_t tokens)> gather_tokens{};

  // Language models: tokens [T] -> the stream, from this rank's rows of the embedding; those of the output
  // weight; and this rank's columns of logits to the whole vocabulary, without gradient.
  std::function<at::Tensor(const at::Tensor& weight, const at::Tensor& tokens, std::int64_t pad)> embed{};
  VocabularyShard vocabulary{};
  std::function<at::Tensor(const at::Tensor& columns)> whole_logits{};
  // Where keys and values are whole: only heads [first, first + count) are computed, and query head h of this
  // rank reads computed head readers[h]. Empty: all, and h / (H / Hkv).
  std::int64_t first_key_head = 0, key_heads = 0;
  std::vector<std::int64_t> readers{};
};

// Several projections x Wᵢᵀ + bᵢ of all `tokens`.
inline std::vector<at::Tensor> project(const TensorHooks& tp, const at::Tensor& stream, std::int64_t tokens,
                                       const std::vector<Linear>& with) {
  std::vector<at::Tensor> weights, biases;
  for (const Linear& one : with) weights.push_back(one.weight), biases.push_back(one.bias);
  return tp.column_parallel ? tp.column_parallel(stream, tokens, weights, biases)
                            : linears(stream, weights, biases);
}

inline at::Tensor linear(const at::Tensor& x, const Linear& with) {
  return linears(x, {with.weight}, {with.bias})[0];
}

// Experts are on several ranks along ep (expert_parallel.hpp).
struct ExpertHooks {
  // Copies of tokens [R, hidden] sorted by expert: those of expert e are [begin[e], begin[e + 1]).
  struct Copies {
    at::Tensor rows;
    std::vector<std::int64_t> begin;
  };
  using Compute = std::function<at::Tensor(const at::Tensor& rows, const std::vector<std::int64_t>& begin)>;
  // The experts' outputs, in the same order, for each of `parts` parts of this rank's tokens. `compute` runs
  // this rank's experts; `meanwhile`, the rest of the layer, must be called once. Collective in forward and
  // backward.
  std::function<std::vector<at::Tensor>(const std::vector<Copies>& copies, const Compute& compute,
                                        const std::function<void()>& meanwhile)>
      dispatch{};
  int parts = 1;
};

// Layers are in stages on several ranks along pp (pipeline_parallel.hpp).
struct StageHooks {
  struct Stage {
    int index = 0;
    std::int64_t begin = 0, count = 0;  // layers
    bool is_first = true, is_last = true;
  };
  // The stages of this forward: one in a step, all of the rank's outside of it.
  std::function<std::vector<Stage>()> stages{};
  std::function<at::Tensor(const Stage&)> receive{};
  // Returns a zero to add to the loss, whose backward waits for the stream's gradient.
  std::function<at::Tensor(const Stage&, const at::Tensor& stream)> pass_on{};
  // The last stage's tensor, of one shape on all ranks, to each. No gradient.
  std::function<at::Tensor(const at::Tensor&)> of_last_stage{};
};

struct ModelHooks {
  TensorHooks tensor{};
  ExpertHooks experts{};
  StageHooks pipeline{};
};

}  // namespace isograd
