// TensorStream: whole tensors one after another, so that a file of all of them can be written where no rank
// ever holds them together.
#pragma once

#include "isograd/error.hpp"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "isograd/batch.hpp"
#include "isograd/data.hpp"
#include "isograd/loss.hpp"

namespace isograd {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

struct TensorStream {
  struct Entry {
    std::string name;
    at::ScalarType dtype;
    std::vector<std::int64_t> shape;
  };
  using Take = std::function<void(const at::Tensor& whole)>;

  std::vector<Entry> entries;
  // Gives `take` each tensor in the order of `entries`; it may be gone afterwards. Once.
  std::function<void(const Take& take)> each;
};

// Of tensors that are there; those of larger elements first, otherwise in the given order.
TensorStream stream_of(NamedTensors tensors);

// The reference language model: Llama to the letter, with its near relatives Qwen2, Qwen3 and Mistral.
// No parallel code: attention, which never crosses a fragment of the batch, and the seams around matrix
// products come in as arguments.

// Rotary embedding scaling as in Hugging Face's `rope_scaling` / `rope_parameters`.
struct RopeScaling {
  std::string kind = "default";  // default | linear | dynamic | llama3 | yarn
  double factor = 1;
  double low_frequency_factor = 1;   // llama3
  double high_frequency_factor = 4;  // llama3
  std::int64_t original_max_positions = 0;
  double beta_fast = 32, beta_slow = 1;      // yarn
  bool truncate = true;                      // yarn: whole dims at the ends of the ramp
  std::optional<double> attention_factor{};  // yarn
};

// A mixture of experts in place of a layer's feed-forward network (mixtral, qwen2_moe, qwen3_moe, dots1).
struct ExpertsShape {
  std::int64_t count = 0;                    // of a layer that has them; 0: no layer has
  std::int64_t per_token = 2;                // of these compute a token
  std::int64_t feed_forward = 0;             // width inside an expert
  bool normalise = true;                     // the weights of a token's experts add up to 1, or to `scale`
  std::int64_t shared_feed_forward = 0;      // of what every token goes through (qwen2_moe, dots1); 0: none
  std::vector<std::int64_t> dense_layers{};  // that have an ordinary network, ascending
  // Of dots1. A token's score for an expert is the sigmoid of its logit, not the softmax over all. Chosen are
  // those with the largest score + bias, a parameter without gradient that balances loads (SelectionBias), of
  // the `groups_per_token` groups of neighbouring experts whose two best add up to most. Weights are the
  // scores, without the bias, times `scale` (DeepSeek-V3, arXiv 2412.19437, eq. 12 to 16).
  bool sigmoid = false;
  std::int64_t groups = 1, groups_per_token = 1;
  double scale = 1;
};

// What experts are chosen by, the larger the sooner: logits, or scores with the selection bias.
struct ExpertScores {
  at::Tensor values;  // [T, E], no gradient
  std::int64_t groups = 1, groups_per_token = 1;
};

struct DecoderConfig {
  // llama | qwen2 | qwen3 | mistral | mixtral | qwen2_moe | qwen3_moe | dots1
  std::string family = "llama";
  std::int64_t vocabulary = 258;
  std::int64_t hidden = 256;
  std::int64_t layers = 4;
  std::int64_t heads = 4;
  std::int64_t key_value_heads = 4;
  std::int64_t head_dim = 64;
  std::int64_t feed_forward = 704;
  std::int64_t max_positions = 2048;
  double rope_theta = 10000;
  RopeScaling rope_scaling;
  double norm_epsilon = 1e-5;
  bool tied_output = false;
  bool attention_bias = false;  // q, k, v (qwen2) and, for llama's attention_bias, o
  bool output_bias = false;     // o_proj
  bool mlp_bias = false;
  bool query_key_norm = false;  // qwen3
  double initializer_range = 0.02;
  std::int64_t bos = -1, eos = -1;
  std::vector<std::int64_t> more_eos;  // further tokens that end a text
  // generation_config.json beside config.json: its text, which is written as it was read (empty: no such
  // file), and the tokens of its eos_token_id.
  std::string generation_config;
  std::vector<std::int64_t> generation_eos;
  std::int64_t pad = -1;  // its row of the embedding gets no gradient as an input; -1: no such token
  // A window is computed only as far as it never slides: no document may be longer. 0: none.
  std::int64_t sliding_window = 0;
  std::int64_t full_layers = 0;  // qwen2, qwen3: so many first layers have no window
  ExpertsShape experts{};

  // The tokens that end a text, as transformers' generate() knows them: those of generation_config.json where
  // it names any, else those of config.json.
  std::vector<std::int64_t> ends() const;
  bool has_experts(std::int64_t layer) const;
  // Whose attention and norms it has: mixtral those of mistral, qwen2_moe of qwen2, qwen3_moe and dots1 of
  // qwen3.
  std::string dense_family() const;
};
// Throws ConfigError on impossible combinations (heads not a multiple of key_value_heads, odd head_dim,
// biases that the family does not have, ...).
void check(const DecoderConfig& config);

// What a forward does at the seams between the stream of tokens and its matrix products, where several ranks
// hold the matrices of one model together (tensor_parallel.hpp makes them). Not given: one device, nothing.
struct ModelSeams {
  using Map = std::function<at::Tensor(const at::Tensor&)>;
  // The stream, normed, on its way into products that are cut by their outputs; of so many `tokens`, of which
  // each rank's stream may have some.
  std::function<at::Tensor(const at::Tensor& stream, std::int64_t tokens)> enter{};
  Map leave{};  // what a product cut by its inputs gives, before its bias and the residual are added
  // In place of enter() and the products behind it, and of a product and the leave() behind it, for what
  // travels while they are computed: the stream with weights [out, in] cut by their outputs and their biases
  // (undefined: none), and what is cut by features with a weight cut by its inputs. Not given: one after the
  // other.
  std::function<std::vector<at::Tensor>(const at::Tensor& stream, std::int64_t tokens,
                                        const std::vector<at::Tensor>& weights,
                                        const std::vector<at::Tensor>& biases)>
      enter_products{};
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight)> product_leave{};
  // What is the same on all these ranks, on its way into what each computes for itself: the weights of
  // experts' outputs, of which each rank has a part of a sum.
  Map use{};

  // Where each rank's stream has some of so many tokens: which (of a model whose inputs and outputs are rows
  // of tokens), and what is made of all from what is made of this rank's.
  std::function<std::pair<std::int64_t, std::int64_t>(std::int64_t tokens)> own_tokens{};  // begin, count
  std::function<at::Tensor(const at::Tensor& own, std::int64_t tokens)> all_tokens{};

  // Of a layer whose experts lie on several ranks: copies of this rank's tokens [R, hidden], of expert e
  // those in [begin[e], begin[e + 1]), in `expert_parts` parts of the tokens one after another, to what the
  // experts make of them. `compute` is what this rank's own make of rows sorted alike; `besides`, to be
  // called once, is what else the layer computes meanwhile. Collective over these ranks, in forward and in
  // backward.
  struct Copies {
    at::Tensor rows;
    std::vector<std::int64_t> begin;
  };
  using Experts = std::function<at::Tensor(const at::Tensor& rows, const std::vector<std::int64_t>& begin)>;
  std::function<std::vector<at::Tensor>(const std::vector<Copies>& parts, const Experts& compute,
                                        const std::function<void()>& besides)>
      experts{};
  int expert_parts = 1;

  // Of a model whose layers lie in stages on several ranks: the layers of those that this forward is of (one
  // in a step, all of the rank's outside of it), what each is given unless it is the first, and where its
  // stream goes unless it is the last; that gives a zero to be added to the loss, whose backward waits for
  // the stream's gradient.
  struct Stage {
    int index = 0;
    std::int64_t begin = 0, count = 0;
    bool is_first = true, is_last = true;
  };
  std::function<std::vector<Stage>()> stages{};
  std::function<at::Tensor(const Stage&)> receive{};
  std::function<at::Tensor(const Stage&, const at::Tensor& stream)> pass_on{};
  Map of_last_stage{};  // a tensor of one shape on all these ranks; the last stage's, on each. No gradient

  // Of a language model.
  Map whole_logits{};  // this rank's columns to those of the vocabulary; no gradient
  // tokens [T] -> the stream, from this rank's rows of the embedding.
  std::function<at::Tensor(const at::Tensor& weight, const at::Tensor& tokens, std::int64_t pad)> embed{};
  VocabularyShard vocabulary{};  // the rows of the output weight that this rank has
  // Where the weights of keys and values are whole: their heads [first, first + count) are computed, and
  // query head h of this rank reads computed key head readers[h]. Empty: all, and h / (H / Hkv).
  std::int64_t first_key_head = 0, key_heads = 0;
  std::vector<std::int64_t> readers{};
};

// What a decoder computes of a batch, before the output layer.
struct DecoderOutputs {
  at::Tensor hidden;  // [T_local, hidden], after the last norm
  // Of each layer that has experts, ascending, of the stages that this was a forward of: which it is,
  // [T_local, experts], and [T_local, k], what computed the tokens.
  std::vector<std::int64_t> routed{};
  std::vector<at::Tensor> router_logits{}, chosen{};
  at::Tensor passed_on{};  // in place of `hidden`, of a stage before the last: ModelSeams::pass_on
};

// Parameters carry Hugging Face names: named_parameters() gives "model.layers.0.self_attn.q_proj.weight", ...
class DecoderLM : public torch::nn::Module {
 public:
  // Weights are normal(0, initializer_range), norms one, biases zero, keyed by (seed, parameter name):
  // independent of ranks and of construction order.
  DecoderLM(const DecoderConfig& config, at::ScalarType dtype, std::uint64_t seed);
  // Parameters on the meta device, which take no memory: for a layout that gives each rank its shard of them.
  static std::shared_ptr<DecoderLM> without_values(const DecoderConfig& config, at::ScalarType dtype);
  // What the constructor gives parameter `name`, zero-filled `values` of its shape.
  void initialize(const std::string& name, at::Tensor& values, std::uint64_t seed) const;
  ~DecoderLM() override;
  const DecoderConfig& config() const;
  // Differentiable once. ConfigError when a token is outside the vocabulary, a document longer than the
  // sliding window, or the batch contradicts itself.
  at::Tensor hidden(const Batch& batch);  // [T_local, hidden], after the last norm
  at::Tensor logits(const Batch& batch);  // [T_local, vocabulary]: hidden · output_weightᵀ
  DecoderOutputs outputs(const Batch& batch);
  at::Tensor logits_of(const at::Tensor& hidden);  // of outputs()
  // [vocabulary, hidden], for a loss that makes the logits itself (linear_cross_entropy); tied output: the
  // embedding.
  const at::Tensor& output_weight() const;
  // Which of the vocabulary the rows of output_weight() and the columns of logits() are, for a loss: all, but
  // under set_seams().
  const VocabularyShard& vocabulary() const;
  // Parameters in registration order; tied output appears once, under the embedding's name.
  std::vector<std::pair<std::string, at::Tensor>> named();

  // What stands around the forward of each block, `around(layer, stream, block)` instead of block(stream):
  // for layouts whose parameters come and go. `stream` is [T_local, hidden]; `block` may be kept and called
  // again, and gives the stream and, where the layer has experts, its router's logits.
  using BlockForward = std::function<std::vector<at::Tensor>(const at::Tensor& stream)>;
  using AroundBlock = std::function<std::vector<at::Tensor>(std::int64_t layer, const at::Tensor& stream,
                                                            const BlockForward& block)>;
  void set_around_block(AroundBlock around);
  std::vector<at::Tensor> block_parameters(std::int64_t layer) const;

  // Causal attention within the batch's documents: q [T_local, H, D], k and v [T_local, Hkv, D], turned
  // already, -> [T_local, H, D]. Not set: variable_length_attention over cu_seqlens, which refuses batches
  // that are cut over context ranks (Batch::cut).
  using Attention = std::function<at::Tensor(const Batch& batch, const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v)>;
  void set_attention(Attention attention);
  // Which experts compute each token, in place of the `likeliest` [T, k] by the router's scores: the same
  // shape, each expert of a token another one. Its weights stay those of the router. For comparing runs that
  // round otherwise, in which a near tie may go either way. Not set: the likeliest.
  using ChooseExperts = std::function<at::Tensor(const Batch& batch, std::int64_t layer,
                                                 const ExpertScores& scores, const at::Tensor& likeliest)>;
  void set_choice_of_experts(ChooseExperts choose);
  void set_seams(ModelSeams seams);
  const ModelSeams& seams() const;

 private:
  struct Impl;
  // Weights left unset.
  DecoderLM(const DecoderConfig& config, at::ScalarType dtype, at::Device device = at::kCPU);
  std::unique_ptr<Impl> impl_;

  friend class HfWeights;
  friend std::vector<std::uint32_t> generate(DecoderLM& model, const std::vector<std::uint32_t>& prompt,
                                             const struct SampleOptions& options,
                                             const std::function<void(std::uint32_t)>& on_token);
};

// Hugging Face directory: config.json, generation_config.json if there is one, and model.safetensors (or
// sharded index). A key of config.json that changes the mathematics and is not supported is a ConfigError; so
// are truncated files, wrong shapes, missing and unexpected tensors, and weights that are not finite.
DecoderConfig read_hf_config(const std::filesystem::path& directory);
void write_hf(const std::filesystem::path& directory, DecoderLM& model);
// The same of tensors that come one after another, with the model's names: in one file, or in several of at
// most `file_bytes` (but one tensor at least) and an index of them.
inline constexpr std::int64_t kHfFileBytes = 5'000'000'000;  // transformers 4's max_shard_size
void write_hf(const std::filesystem::path& directory, const DecoderConfig& config,
              const TensorStream& weights, std::int64_t file_bytes = kHfFileBytes);
std::shared_ptr<DecoderLM> read_hf(const std::filesystem::path& directory, at::ScalarType dtype);

struct SampleOptions {
  std::int64_t max_tokens = 200;
  double temperature = 0.8;  // 0: greedy
  std::int64_t top_k = 0;    // 0: off
  double top_p = 1.0;
  std::uint64_t seed = 0;
};
// Tokens after `prompt` (which must not be empty), until one of DecoderConfig::ends() or max_tokens;
// `on_token` sees each as it is drawn. Keys and values are cached.
std::vector<std::uint32_t> generate(DecoderLM& model, const std::vector<std::uint32_t>& prompt,
                                    const SampleOptions& options,
                                    const std::function<void(std::uint32_t)>& on_token = {});

// A small diffusion transformer for videos: 3-D patches as tokens, factorised positions, adaptive layer norm
// by timestep. No parallel code; full attention inside each fragment of the batch. For batches that are cut
// over ranks attention comes in as an argument.

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

// Flow matching of a VideoDiT on the videos of a store: a velocity from data (time 0) to noise (time 1) along
// straight lines. Noise and times are keyed by what they are for, so that any cut of the batch sees the same.

// The randomness of one forward, in fp64. Time of a sample: uniform in [0, 1), by (seed, batch.draw, sample
// id); noise: standard normal, by (seed, batch.draw, sample id, position in the video, element).
struct FlowNoise {
  at::Tensor times;  // [F], the same for all fragments of a sample
  at::Tensor noise;  // [T_local, E]
};
FlowNoise flow_noise(const Batch& batch, std::int64_t elements, std::uint64_t seed);

// One term "flow_matching": Σ over tokens with a target of w · mean over a patch's elements of
// (velocity − (ε − x0))², where the model sees x_t = (1 − t) x0 + t ε (Lipman et al. 2023, arXiv 2210.02747;
// rectified flow, Liu et al. 2022, arXiv 2209.03003). Computed in fp32 (fp64 for fp64), summed in fp64.
// `model` must outlive the result.
ForwardLossTerms flow_matching_loss(VideoDiT& model, std::shared_ptr<const VideoStore> store,
                                    std::uint64_t seed);

// What the term sums, token by token [T_local] in fp64, without weights and without gradient; 0 where a token
// has no target. Like the loss a call of every context rank.
at::Tensor flow_matching_token_losses(VideoDiT& model, const VideoStore& store, const Batch& batch,
                                      std::uint64_t seed);

// The one-step estimate of the data, x_t − t · velocity [T_local, E], and what the model saw; no gradient.
struct FlowEstimate {
  at::Tensor times;     // [F]
  at::Tensor noised;    // [T_local, E], x_t
  at::Tensor estimate;  // [T_local, E]
};
// `time`: of all fragments, instead of the drawn ones.
FlowEstimate flow_estimate(VideoDiT& model, const VideoStore& store, const Batch& batch, std::uint64_t seed,
                           std::optional<double> time = {});

// A new video, [T, E] on the CPU, in the order of a store's tokens: the flow from noise (time 1) to data
// (time 0) along the model's velocity, by Euler's method (Lipman et al. 2023, arXiv 2210.02747, section 4): x
// becomes x − velocity(x, t) / steps at t = 1, 1 − 1 / steps, ... `number` tells videos of one seed apart;
// their noise is none that training draws and the same for any number of steps. No gradient. ConfigError
// without a step, and for a grid that is larger than the model's.
struct FlowSampleOptions {
  std::int64_t steps = 50;
  std::uint64_t seed = 0;
  std::int64_t number = 0;
};
at::Tensor sample_flow(VideoDiT& model, VideoGrid grid, const FlowSampleOptions& options);

// One whole video as the batch that a loader makes of it.
Batch video_batch(const VideoStore& store, std::int64_t video, std::int64_t draw = 0);

// For people: frames uint8 [F, H, W, 3] of a video, of what the model saw and of its estimate, on one device.
struct PredictedVideo {
  double time = 0;
  at::Tensor original, noised, predicted;
};
PredictedVideo predict_frames(VideoDiT& model, const VideoStore& store, std::int64_t video, double time,
                              std::uint64_t seed);

}  // namespace isograd
