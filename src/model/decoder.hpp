// Inside a DecoderLM: its weights by role, and one pass through the blocks.
#pragma once

#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "isograd/model.hpp"
#include "model/experts.hpp"
#include "model/hooks.hpp"
#include "model/parameters.hpp"

namespace isograd {

// Frequencies [head_dim/2] of a sequence of `length` positions, and the factor on cosines and sines, by the
// formulas of Hugging Face's modeling_rope_utils in the given type. Only `dynamic` depends on the length, and
// only beyond max_positions.
std::pair<at::Tensor, double> rotary_frequencies(const DecoderConfig& config, std::int64_t length,
                                                 at::ScalarType type);

// Cosines and sines of the positions seen so far; may be used by several threads.
class RotaryTable {
 public:
  RotaryTable(const DecoderConfig& config, at::ScalarType type) : config_(config), type_(type) {}

  // Whether positions of a sequence of that length turn by angles of their own.
  bool depends_on_length(std::int64_t length) const;
  // cos and sin [T, head_dim/2] at `positions` [T]. Where the length matters, that of a fragment's document
  // decides
  // (`lengths` [F]; not given: what its positions reach). `largest_position` saves waiting for a GPU; -1:
  // looked up.
  std::pair<at::Tensor, at::Tensor> at(const at::Tensor& positions,
                                       const std::vector<std::int64_t>& cu_seqlens,
                                       const std::vector<std::int64_t>& lengths = {},
                                       std::int64_t largest_position = -1);

 private:
  std::pair<at::Tensor, at::Tensor> compute(const at::Tensor& positions, std::int64_t length) const;

  const DecoderConfig config_;
  const at::ScalarType type_;
  std::mutex mutex_;
  std::vector<at::Tensor> earlier_;  // shorter ones, which recorded kernels may still read
  at::Tensor cos_, sin_;             // [positions so far, head_dim/2], of lengths up to max_positions
};

struct Block {
  at::Tensor input_norm, post_attention_norm;  // [hidden]
  Linear q, k, v, o;
  at::Tensor q_norm, k_norm;  // [head_dim], or undefined
  Linear gate, up, down;      // undefined where the layer has experts
  Mixture mixture;
};

// Attention comes in as an argument: (layer, q [T, H, D], k and v [T, Hkv, D], turned already) -> [T, H, D].
using Attend =
    std::function<at::Tensor(std::int64_t, const at::Tensor&, const at::Tensor&, const at::Tensor&)>;

// The inputs that all blocks of a forward share.
struct BlockPass {
  at::Tensor cos, sin;
  Attend attend;
  std::function<at::Tensor(std::int64_t layer, const ExpertScores& scores, const at::Tensor& likeliest)>
      choose{};  // not given: the likeliest experts
  // By layer: DecoderOutputs::chosen. A block that is computed again says the same again.
  std::shared_ptr<std::vector<at::Tensor>> chosen{};
  // Impl::outputs() sets it: what a block is computed with does not change before it is computed again.
  std::vector<AdaptedRows> adapters{};
  std::function<at::Tensor(std::int64_t layer, Projection projection, const at::Tensor& x)> drop{};

  // For one input of an adapter; empty: nothing is dropped.
  std::function<at::Tensor(const at::Tensor&)> dropping(std::int64_t layer, Projection projection) const {
    if (!drop) return {};
    return [this, layer, projection](const at::Tensor& x) { return drop(layer, projection, x); };
  }
};

struct DecoderLM::Impl {
  Impl(const DecoderConfig& shape, at::ScalarType dtype, const ModelHooks& hooks);

  // Creates the parameters (values unset) and registers them below `root` under Hugging Face's names.
  void create(torch::nn::Module& root, at::Device device, NamedTensors& in_order);

  DecoderOutputs outputs(const at::Tensor& tokens, const BlockPass& pass) const;
  at::Tensor embed(const at::Tensor& tokens) const;  // [T, hidden]
  // Layers [begin, begin + count); what they say of experts goes to `outputs`.
  at::Tensor layers(std::int64_t begin, std::int64_t count, at::Tensor stream, const BlockPass& pass,
                    DecoderOutputs& outputs) const;
  // The stream and, where the layer has experts, its router's logits.
  std::vector<at::Tensor> block(std::int64_t layer, at::Tensor stream, const BlockPass& pass) const;
  at::Tensor logits(const at::Tensor& hidden, const at::Tensor& dropped = {}) const;
  at::Tensor last_norm(const at::Tensor& stream, std::int64_t tokens) const;  // DecoderOutputs::hidden

  // Steps that tensor parallelism (hooks.tensor) changes in a block: x Wᵀ + b of several projections;
  // residual
  // + x Wᵀ + b; the rows of k_proj or v_proj that are computed here; and a key head for each query head,
  // where it must be said.
  using Role = std::pair<Projection, Linear>;
  std::vector<at::Tensor> projections(std::int64_t layer, const at::Tensor& stream, std::int64_t tokens,
                                      const std::vector<Role>& roles, const BlockPass& pass) const;
  at::Tensor onto(const at::Tensor& residual, const at::Tensor& x, std::int64_t layer, const Role& role,
                  const BlockPass& pass) const;
  Linear key_rows(const Linear& whole) const;
  void read_by_queries(at::Tensor& k, at::Tensor& v) const;
  // y and the updates of its rows by their adapters; x is the projection's input.
  at::Tensor updated(const at::Tensor& y, const at::Tensor& x, std::int64_t layer, Projection projection,
                     const std::vector<AdaptedRows>& adapters,
                     const std::function<at::Tensor(const at::Tensor&)>& drop = {}) const;
  at::Tensor add_update(const at::Tensor& y, const at::Tensor& by_a, const LowRank& update,
                        Projection projection) const;
  // The stages of this forward in a pipeline (hooks.pipeline).
  DecoderOutputs stage_outputs(const at::Tensor& tokens, const BlockPass& pass) const;
  const at::Tensor& output() const { return config.tied_output ? embedding : head; }

  const DecoderConfig config;
  const at::ScalarType dtype;
  RotaryTable rotary;
  at::Tensor embedding;  // [vocabulary, hidden]
  std::vector<Block> blocks;
  at::Tensor norm;              // [hidden]
  at::Tensor head;              // [vocabulary, hidden]; undefined when tied
  AroundBlock around;           // empty: nothing
  const ModelHooks& hooks;      // the model's
  ChooseExperts given_experts;  // empty: the likeliest
  std::vector<AdaptedRows> adapters;
  DropInputs drop;  // empty: nothing
};

}  // namespace isograd
