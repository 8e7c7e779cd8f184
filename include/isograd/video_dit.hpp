// A small diffusion transformer for videos: 3-D patches as tokens, factorised positions, adaptive layer norm
// by timestep. No parallel code; full attention inside each fragment of the batch. For batches that are cut
// over ranks attention comes in as an argument.
#pragma once

#include "isograd/cxx20.hpp"

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "isograd/batch.hpp"
#include "isograd/decoder_lm.hpp"

namespace isograd {

struct VideoDiTConfig {
  std::int64_t patch_elements = 384;  // 3 · pt · ph · pw
  std::int64_t hidden = 128;
  std::int64_t layers = 4;
  std::int64_t heads = 4;
  std::int64_t head_dim = 0;  // 0: hidden / heads
  std::int64_t feed_forward = 512;
  std::int64_t max_frames = 32, max_height = 16, max_width = 32;  // in patches
  std::int64_t timestep_features = 128;                           // even
  double norm_epsilon = 1e-6;
  double initializer_range = 0.02;
  // 0: adaLN-Zero: the projections that modulate and the one to the output begin at zero, each block as the
  // identity. Otherwise gates begin here, those projections like all others; then no gradient is zero at
  // first.
  double gate_init = 0;

  std::int64_t width_of_head() const { return head_dim > 0 ? head_dim : hidden / heads; }
};
// Throws ConfigError on impossible combinations.
void check(const VideoDiTConfig& config);

// DiT (Peebles & Xie 2023, arXiv 2212.09748) over tubelets (ViViT, Arnab et al. 2021, arXiv 2103.15691). A
// token's position is the sum of three learned embeddings, of its frame, row and column of patches
// (factorised as in NaViT, Dehghani et al. 2023, arXiv 2307.06304), so that videos of any size up to the
// largest fit. Each block: layer norm without parameters, scaled and shifted by the fragment's timestep;
// attention with normalised queries and keys (as in Stable Diffusion 3, Esser et al. 2024, arXiv 2403.03206),
// a feed-forward with GELU; both gated by the timestep.
class VideoDiT : public torch::nn::Module {
 public:
  // Initial values by (seed, parameter name): matrices and tables normal(0, initializer_range), norms one,
  // biases zero, and see gate_init.
  VideoDiT(const VideoDiTConfig& config, at::ScalarType dtype, std::uint64_t seed);
  // Parameters on the meta device, which take no memory.
  static std::shared_ptr<VideoDiT> without_values(const VideoDiTConfig& config, at::ScalarType dtype);
  // What the constructor gives parameter `name`, zero-filled `values` of its shape.
  void initialize(const std::string& name, at::Tensor& values, std::uint64_t seed) const;
  ~VideoDiT() override;
  const VideoDiTConfig& config() const;
  at::ScalarType dtype() const;
  at::Device device() const;                                // of its parameters
  std::vector<std::pair<std::string, at::Tensor>> named();  // in registration order

  // The predicted velocity [T_local, E], in the model's dtype. `noised` [T_local, E]; `coordinates` [T_local,
  // 3] int64: frame, row and column of patches; `times` [F] in [0, 1], of the batch's fragments. `noised` on
  // the model's device, the others anywhere.
  // Differentiable once. ConfigError when coordinates lie outside the largest grid or the batch contradicts
  // itself.
  at::Tensor velocity(const Batch& batch, const at::Tensor& noised, const at::Tensor& coordinates,
                      const at::Tensor& times);

  // What stands around the forward of each block, as DecoderLM has it; `condition` [F, hidden], what the
  // timesteps became, needs a gradient too and so comes in beside the stream [T_local, hidden].
  using BlockForward = std::function<at::Tensor(const at::Tensor& stream, const at::Tensor& condition)>;
  using AroundBlock = std::function<at::Tensor(std::int64_t layer, const at::Tensor& stream,
                                               const at::Tensor& condition, const BlockForward& block)>;
  void set_around_block(AroundBlock around);
  std::vector<at::Tensor> block_parameters(std::int64_t layer) const;

  // Full attention within the batch's videos, e.g. ContextAttention(mesh, /*causal=*/false). Not set:
  // variable_length_attention over cu_seqlens, which refuses batches that are cut over context ranks.
  using Attention = DecoderLM::Attention;
  void set_attention(Attention attention);
  void set_seams(ModelSeams seams);

 private:
  struct Impl;
  VideoDiT(const VideoDiTConfig& config, at::ScalarType dtype, at::Device device = at::kCPU);
  std::unique_ptr<Impl> impl_;
};

}  // namespace isograd
