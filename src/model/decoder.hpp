// Inside a DecoderLM: its weights by role, and one pass through the blocks.
#pragma once

#include <functional>

#include "isograd/model.hpp"
#include "model/hooks.hpp"
#include "model/mixture.hpp"
#include "model/parameters.hpp"
#include "model/rotary_table.hpp"

namespace isograd {

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

// What is the same for all blocks of a forward.
struct BlockPass {
  at::Tensor cos, sin;
  Attend attend;
  std::function<at::Tensor(std::int64_t layer, const ExpertScores& scores, const at::Tensor& likeliest)>
      choose{};  // not given: the likeliest experts
  // By layer: DecoderOutputs::chosen. A block that is computed again says the same again.
  std::shared_ptr<std::vector<at::Tensor>> chosen{};
};

struct DecoderLM::Impl {
  Impl(const DecoderConfig& shape, at::ScalarType dtype);

  // Creates the parameters (values unset) and registers them below `root` under Hugging Face's names.
  void create(torch::nn::Module& root, at::Device device);
  // normal(0, initializer_range) for matrices, one for norms, zero for biases.
  void initialize(const std::string& name, at::Tensor& values, std::uint64_t seed) const;

  DecoderOutputs outputs(const at::Tensor& tokens, const BlockPass& pass) const;
  at::Tensor embed(const at::Tensor& tokens) const;  // [T, hidden]
  // Layers [begin, begin + count); what they say of experts goes to `outputs`.
  at::Tensor layers(std::int64_t begin, std::int64_t count, at::Tensor stream, const BlockPass& pass,
                    DecoderOutputs& outputs) const;
  // The stream and, where the layer has experts, its router's logits.
  std::vector<at::Tensor> block(std::int64_t layer, at::Tensor stream, const BlockPass& pass) const;
  at::Tensor logits(const at::Tensor& hidden) const;
  at::Tensor last_norm(const at::Tensor& stream, std::int64_t tokens) const;  // DecoderOutputs::hidden

  // What tensor parallelism (hooks.tensor) changes in a block: x Wᵀ + b of all tokens; residual + x Wᵀ + b;
  // the rows of k_proj or v_proj that are computed here; and a key head for each query head, where it must be
  // said.
  std::vector<at::Tensor> project(const at::Tensor& stream, std::int64_t tokens,
                                  const std::vector<Linear>& with) const;
  at::Tensor onto(const at::Tensor& residual, const at::Tensor& x, const Linear& linear) const;
  Linear key_rows(const Linear& whole) const;
  at::Tensor read_by_queries(const at::Tensor& heads) const;
  // The stages of this forward in a pipeline (hooks.pipeline).
  DecoderOutputs stage_outputs(const at::Tensor& tokens, const BlockPass& pass) const;
  const at::Tensor& output() const { return config.tied_output ? embedding : head; }

  const DecoderConfig config;
  const at::ScalarType dtype;
  RotaryTable rotary;
  at::Tensor embedding;  // [vocabulary, hidden]
  std::vector<Block> blocks;
  at::Tensor norm;                                           // [hidden]
  at::Tensor head;                                           // [vocabulary, hidden]; undefined when tied
  std::vector<std::pair<std::string, at::Tensor>> in_order;  // all parameters, by name
  AroundBlock around;                                        // empty: nothing
  ModelHooks hooks;
  Attention given_attention;    // empty: within fragments, on one device
  ChooseExperts given_experts;  // empty: the likeliest
};

}  // namespace isograd
