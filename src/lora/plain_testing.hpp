// A decoder with an adapter in plain torch operations, for tests.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <map>
#include <string>
#include <tuple>

#include "isograd/model.hpp"

namespace isograd {

using Tensors = std::map<std::string, at::Tensor>;

// The logits of one text, [T, vocabulary]. `w`: parameters by the names of files, and x.lora_A.weight,
// x.lora_B.weight of adapted matrices x, whose product counts with the factor `scale`.
inline at::Tensor plain_logits(const DecoderConfig& c, Tensors w, double scale, const at::Tensor& tokens) {
  if (c.tied_output) w["lm_head.weight"] = w.at("model.embed_tokens.weight");
  const auto norm = [&](const at::Tensor& x, const std::string& name) {
    return x * (x.square().mean(-1, true) + c.norm_epsilon).rsqrt() * w.at(name);
  };
  const auto linear = [&](const at::Tensor& x, const std::string& name) {
    at::Tensor y = x.matmul(w.at(name + ".weight").t());
    if (w.contains(name + ".bias")) y = y + w.at(name + ".bias");
    if (w.contains(name + ".lora_A.weight"))
      y = y + x.matmul(w.at(name + ".lora_A.weight").t()).matmul(w.at(name + ".lora_B.weight").t()) * scale;
    return y;
  };
  const std::int64_t length = tokens.size(0), half = c.head_dim / 2;
  const at::Tensor frequencies =
      at::pow(c.rope_theta, at::arange(half, at::kDouble) * (-1.0 / static_cast<double>(half)));
  const at::Tensor angles =
      at::outer(at::arange(length, at::kDouble), frequencies).repeat({1, 2}).unsqueeze(1);
  const auto turned = [&](const at::Tensor& x) {
    return x * angles.cos() + at::cat({-x.narrow(-1, half, half), x.narrow(-1, 0, half)}, -1) * angles.sin();
  };
  const at::Tensor later = at::ones({length, length}, at::kBool).triu(1);
  at::Tensor x = w.at("model.embed_tokens.weight").index_select(0, tokens);
  for (std::int64_t layer = 0; layer < c.layers; ++layer) {
    const std::string at = fmt::format("model.layers.{}.", layer);
    at::Tensor n = norm(x, at + "input_layernorm.weight");
    const auto heads = [&](const char* name, std::int64_t number) {
      return linear(n, at + "self_attn." + name).view({length, number, c.head_dim});
    };
    at::Tensor q = heads("q_proj", c.heads), k = heads("k_proj", c.key_value_heads),
               v = heads("v_proj", c.key_value_heads);
    if (c.query_key_norm)
      q = norm(q, at + "self_attn.q_norm.weight"), k = norm(k, at + "self_attn.k_norm.weight");
    q = turned(q), k = turned(k).repeat_interleave(c.heads / c.key_value_heads, 1);
    v = v.repeat_interleave(c.heads / c.key_value_heads, 1);
    const at::Tensor scores = at::einsum("qhd,khd->hqk", {q, k}) / std::sqrt(static_cast<double>(c.head_dim));
    const at::Tensor mixed =
        at::einsum("hqk,khd->qhd", {scores.masked_fill(later, -INFINITY).softmax(-1), v});
    x = x + linear(mixed.reshape({length, -1}), at + "self_attn.o_proj");
    n = norm(x, at + "post_attention_layernorm.weight");
    const auto network = [&](const std::string& of) {
      return linear(at::silu(linear(n, of + "gate_proj")) * linear(n, of + "up_proj"), of + "down_proj");
    };
    if (!c.has_experts(layer)) {
      x = x + network(at + "mlp.");
      continue;
    }
    // Every expert computes every token; those that were not chosen count with weight 0.
    const at::Tensor shares = n.matmul(w.at(at + "mlp.gate.weight").t()).softmax(1);
    const at::Tensor least = std::get<0>(shares.topk(c.experts.per_token, 1)).select(1, -1).unsqueeze(1);
    const at::Tensor kept = shares * shares.ge(least), weights = kept / kept.sum(1, true);
    for (std::int64_t e = 0; e < c.experts.count; ++e) {
      for (const char* matrix : {"gate_proj", "up_proj", "down_proj"})
        for (const char* end : {"", ".lora_A.weight", ".lora_B.weight"})
          if (const auto all = w.find(at + "mlp.experts." + matrix + end); all != w.end())
            w[fmt::format("expert.{}{}", matrix, *end ? end : ".weight")] = all->second[e];
      x = x + network("expert.") * weights.select(1, e).unsqueeze(1);
    }
    if (c.experts.shared_feed_forward > 0)
      x = x + at::sigmoid(n.matmul(w.at(at + "mlp.shared_expert_gate.weight").t())) *
                  network(at + "mlp.shared_expert.");
  }
  return linear(norm(x, "model.norm.weight"), "lm_head");
}

}  // namespace isograd
