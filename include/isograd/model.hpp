// Models: the decoder language model, the video model, and streams of their tensors. No parallel code.
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

struct ModelHooks;

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// Whole tensors one at a time, so that they can be written to a file although no rank ever holds all.
struct TensorStream {
  struct Entry {
    std::string name;
    at::ScalarType dtype;
    std::vector<std::int64_t> shape;
  };
  using Take = std::function<void(const at::Tensor& whole)>;

  std::vector<Entry> entries;
  // Calls `take` with each tensor in the order of `entries`; it may be freed afterwards. Call it once.
  std::function<void(const Take& take)> each;
};

// Makes a stream of existing tensors; larger element types first, otherwise in the given order.
TensorStream stream_of(NamedTensors tensors);

// The reference language model: Llama and relatives. Attention and parallel hooks come in as arguments.

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
  std::int64_t count = 0;                    // experts of a layer; 0: no layer has experts
  std::int64_t per_token = 2;                // experts that compute a token
  std::int64_t feed_forward = 0;             // width of an expert
  bool normalise = true;                     // the weights of a token's experts sum to 1, or to `scale`
  std::int64_t shared_feed_forward = 0;      // width of the shared expert (qwen2_moe, dots1); 0: none
  std::vector<std::int64_t> dense_layers{};  // layers with a dense network, ascending
  // For dots1 (DeepSeek-V3, arXiv 2412.19437, eq. 12 to 16): the score is the sigmoid of an expert's logit,
  // not the softmax. A token goes to the largest score + bias in the `groups_per_token` groups whose two best
  // have the largest sums. The bias has no gradient (SelectionBias); weights are scores without it, times
  // `scale`.
  bool sigmoid = false;
  std::int64_t groups = 1, groups_per_token = 1;
  double scale = 1;
};

// Scores by which experts are chosen, the largest first: logits, or scores with the selection bias.
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
  // Text of generation_config.json, written back as read (empty: no such file), and its eos_token_id.
  std::string generation_config;
  std::vector<std::int64_t> generation_eos;
  std::int64_t pad = -1;  // its row of the embedding gets no gradient as an input; -1: no such token
  // Supported as long as the window never slides: no document may be longer. 0: none.
  std::int64_t sliding_window = 0;
  std::int64_t full_layers = 0;  // qwen2, qwen3: number of leading layers without a window
  ExpertsShape experts{};

  // Tokens that end a text, as in transformers' generate(): generation_config.json's, else config.json's.
  std::vector<std::int64_t> ends() const;
  bool has_experts(std::int64_t layer) const;
  // The family whose attention and norms it has: mistral for mixtral, qwen2 for qwen2_moe, else qwen3.
  std::string dense_family() const;
};
// ConfigError on impossible combinations (heads, head_dim, biases that the family does not have, ...).
void check(const DecoderConfig& config);

// Outputs of a decoder for a batch, before the output layer.
struct DecoderOutputs {
  at::Tensor hidden;  // [T_local, hidden], after the last norm
  // By layer with experts, ascending: index, router logits [T_local, experts], chosen experts [T_local, k].
  std::vector<std::int64_t> routed{};
  std::vector<at::Tensor> router_logits{}, chosen{};
  at::Tensor dropped{};    // `hidden` as the adapter of the head reads it; undefined: as it is
  at::Tensor passed_on{};  // instead of `hidden`, for a stage before the last: Pipeline::pass_on()
};

// The base of the reference models.
class ReferenceModel : public torch::nn::Module {
 public:
  // Writes the constructor's value of parameter `name` into zero-filled `values` of its shape.
  virtual void initialize(const std::string& name, at::Tensor& values, std::uint64_t seed) const = 0;
  NamedTensors named() const { return named_; }  // in registration order, tied ones once (first name)
  std::vector<at::Tensor> block_parameters(std::int64_t layer) const;

  // Attention within the batch's documents: q [T_local, H, D], k and v [T_local, Hkv, D] (after rotary
  // embedding). Not set: variable_length_attention, which refuses batches split over context ranks
  // (Batch::cut).
  using Attention = std::function<at::Tensor(const Batch& batch, const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v)>;
  void set_attention(Attention attention) { attention_ = std::move(attention); }
  ModelHooks& hooks() const { return *hooks_; }  // of model parallelism (src/model/hooks.hpp)

 protected:
  explicit ReferenceModel(std::string blocks);
  NamedTensors named_;
  Attention attention_;
  std::shared_ptr<ModelHooks> hooks_;

 private:
  std::string blocks_;  // before a block's index in its parameters' names
};

// A low-rank update of a matrix, y += scale · (x aᵀ) bᵀ (Hu et al. 2021, arXiv 2106.09685).
struct LowRank {
  at::Tensor a;  // [rank, in]; of the experts of a layer: [experts, rank, in]
  at::Tensor b;  // [out, rank]; [experts, out, rank]
  double scale = 1;
};
// kHead is of layer 0. kGate, kUp and kDown of a layer with experts are those of all its routed experts.
enum class Projection {
  kQuery,
  kKey,
  kValue,
  kOutput,
  kGate,
  kUp,
  kDown,
  kHead,
  kSharedGate,
  kSharedUp,
  kSharedDown
};
class Adapter {
 public:
  virtual ~Adapter() = default;
  virtual const LowRank* find(std::int64_t layer, Projection projection) const = 0;  // null: not adapted
};
// Rows [begin, end) of a forward are computed with this adapter; null: with none.
struct AdaptedRows {
  std::int64_t begin = 0, end = 0;
  const Adapter* adapter = nullptr;
};

// Parameters carry Hugging Face names: named_parameters() gives "model.layers.0.self_attn.q_proj.weight", ...
class DecoderLM : public ReferenceModel {
 public:
  // Values are keyed by (seed, parameter name): weights normal(0, initializer_range), norms one, biases zero.
  DecoderLM(const DecoderConfig& config, at::ScalarType dtype, std::uint64_t seed);
  // Makes a model on the meta device, without memory, for a layout that gives each rank its shard.
  static std::shared_ptr<DecoderLM> without_values(const DecoderConfig& config, at::ScalarType dtype);
  ~DecoderLM() override;
  void initialize(const std::string& name, at::Tensor& values, std::uint64_t seed) const override;
  const DecoderConfig& config() const;
  // Differentiable once. ConfigError: an unknown token, a document beyond the window, a contradictory batch.
  at::Tensor hidden(const Batch& batch);  // [T_local, hidden], after the last norm
  at::Tensor logits(const Batch& batch);  // [T_local, vocabulary]: hidden · output_weightᵀ
  DecoderOutputs outputs(const Batch& batch);
  // For the hidden states of outputs(), and its `dropped`.
  at::Tensor logits_of(const at::Tensor& hidden, const at::Tensor& dropped = {});
  // [vocabulary, hidden], for linear_cross_entropy(). With tied output, the embedding.
  const at::Tensor& output_weight() const;
  // The part of the vocabulary that output_weight()'s rows and logits()' columns are, for a loss.
  const VocabularyShard& vocabulary() const;

  // Wraps the forward of each block, for layouts that gather and free parameters. `stream` is [T_local,
  // hidden]; `block` may be called again and returns the stream and, with experts, the router's logits.
  using BlockForward = std::function<std::vector<at::Tensor>(const at::Tensor& stream)>;
  using AroundBlock = std::function<std::vector<at::Tensor>(std::int64_t layer, const at::Tensor& stream,
                                                            const BlockForward& block)>;
  void set_around_block(AroundBlock around);
  // Chooses the experts of each token instead of the `likeliest` [T, k]; weights stay the router's.
  using ChooseExperts = std::function<at::Tensor(const Batch& batch, std::int64_t layer,
                                                 const ExpertScores& scores, const at::Tensor& likeliest)>;
  void set_choice_of_experts(ChooseExperts choose);
  // For all forwards from now on; the adapters must outlive them. The rows of set_adapters() are those of the
  // next forwards' batches and of what logits_of() is given, from 0, ascending and without gaps; ConfigError
  // where they are not.
  void set_adapter(const Adapter* adapter);
  void set_adapters(std::vector<AdaptedRows> rows);
  const Adapter* adapter() const;  // of set_adapter(); logits() and logits_of() add its update of the head
  // Drops features of the input of an adapter's `a` (not of experts', whose rows are copies of tokens of
  // several ranks) in forwards with gradients. `x`: all tokens of the batch and this rank's features.
  using DropInputs = std::function<at::Tensor(const Batch& batch, std::int64_t layer, Projection projection,
                                              const at::Tensor& x)>;
  void set_dropout_of_adapter(DropInputs drop);
  // Parameters of an adapter that a layout trains with the model: named() and block_parameters() have them
  // behind the model's own.
  void include(const NamedTensors& of_adapter);

 private:
  struct Impl;
  // Makes a model without values.
  DecoderLM(const DecoderConfig& config, at::ScalarType dtype, at::Device device = at::kCPU);
  std::unique_ptr<Impl> impl_;

  friend class HfWeights;
  friend class TextSampler;
};

// Hugging Face directories. ConfigError: an unsupported key that changes the mathematics, truncated files,
// wrong shapes, missing, unexpected or infinite tensors.
DecoderConfig read_hf_config(const std::filesystem::path& directory);
void write_hf(const std::filesystem::path& directory, DecoderLM& model);
// For a stream with the model's names: one file, or several of at most `file_bytes` with an index.
inline constexpr std::int64_t kHfFileBytes = 5'000'000'000;  // transformers 4's max_shard_size
void write_hf(const std::filesystem::path& directory, const DecoderConfig& config,
              const TensorStream& weights, std::int64_t file_bytes = kHfFileBytes);
std::shared_ptr<DecoderLM> read_hf(const std::filesystem::path& directory, at::ScalarType dtype);

// ---- video: a small diffusion transformer ----

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
  // 0: adaLN-Zero: modulation and output projections begin at zero, so each block begins as the identity.
  // Otherwise gates begin here and those projections like all others, so that no gradient is zero at first.
  double gate_init = 0;

  std::int64_t width_of_head() const { return head_dim > 0 ? head_dim : hidden / heads; }
};
// Throws ConfigError on impossible combinations.
void check(const VideoDiTConfig& config);

// DiT (Peebles & Xie 2023, arXiv 2212.09748) over tubelets (ViViT, arXiv 2103.15691) with full attention
// inside each fragment. Positions sum three embeddings, for frame, row and column (NaViT, arXiv 2307.06304).
// Blocks: layer norm modulated by the timestep, attention with normalised queries and keys (arXiv
// 2403.03206), GELU network.
class VideoDiT : public ReferenceModel {
 public:
  // As in DecoderLM; see also gate_init.
  VideoDiT(const VideoDiTConfig& config, at::ScalarType dtype, std::uint64_t seed);
  // Makes a model on the meta device, without memory.
  static std::shared_ptr<VideoDiT> without_values(const VideoDiTConfig& config, at::ScalarType dtype);
  ~VideoDiT() override;
  void initialize(const std::string& name, at::Tensor& values, std::uint64_t seed) const override;
  const VideoDiTConfig& config() const;
  at::ScalarType dtype() const;
  at::Device device() const;  // of its parameters

  // Velocity [T_local, E] in the model's dtype. `noised` [T_local, E], on the model's device; `coordinates`
  // [T_local, 3] int64: frame, row, column; `times` [F] in [0, 1]. Differentiable once. ConfigError:
  // coordinates outside the largest grid, a batch that contradicts itself.
  at::Tensor velocity(const Batch& batch, const at::Tensor& noised, const at::Tensor& coordinates,
                      const at::Tensor& times);

  // As in DecoderLM; `condition` [F, hidden], made from the timesteps, needs a gradient too.
  using BlockForward = std::function<at::Tensor(const at::Tensor& stream, const at::Tensor& condition)>;
  using AroundBlock = std::function<at::Tensor(std::int64_t layer, const at::Tensor& stream,
                                               const at::Tensor& condition, const BlockForward& block)>;
  void set_around_block(AroundBlock around);

 private:
  struct Impl;
  VideoDiT(const VideoDiTConfig& config, at::ScalarType dtype, at::Device device = at::kCPU);
  std::unique_ptr<Impl> impl_;
};

// ---- flow matching of a VideoDiT on the videos of a store ----

// Random numbers of a forward in fp64, keyed by (seed, batch.draw, sample id, position, element), so that any
// split of the batch sees the same. Times are uniform in [0, 1), noise is standard normal.
struct FlowNoise {
  at::Tensor times;  // [F], the same for all fragments of a sample
  at::Tensor noise;  // [T_local, E]
};
FlowNoise flow_noise(const Batch& batch, std::int64_t elements, std::uint64_t seed);

// One term "flow_matching": Σ over tokens with a target of w · mean over a patch's elements of (velocity − (ε
// − x0))², x_t = (1 − t) x0 + t ε (Lipman et al. 2023, arXiv 2210.02747; Liu et al. 2022, arXiv 2209.03003).
// In fp32 (fp64 for fp64), summed in fp64. `model` must outlive the result.
ForwardLossTerms flow_matching_loss(VideoDiT& model, std::shared_ptr<const VideoStore> store,
                                    std::uint64_t seed);

// The term's summands [T_local] in fp64, no weights, no gradient; 0 without target. Collective like the loss.
at::Tensor flow_matching_token_losses(VideoDiT& model, const VideoStore& store, const Batch& batch,
                                      std::uint64_t seed);

// The one-step estimate of the data, x_t − t · velocity [T_local, E], and the model's input; no gradient.
struct FlowEstimate {
  at::Tensor times;     // [F]
  at::Tensor noised;    // [T_local, E], x_t
  at::Tensor estimate;  // [T_local, E]
};
// `time`: for all fragments, instead of the drawn ones.
FlowEstimate flow_estimate(VideoDiT& model, const VideoStore& store, const Batch& batch, std::uint64_t seed,
                           std::optional<double> time = {});

// Generates a video [T, E] on the CPU, in a store's token order: Euler's method from noise (time 1) to data
// (time 0) (Lipman et al. 2023, section 4), x becomes x − velocity(x, t) / steps. `number` distinguishes
// videos of one seed; training never draws the same noise. ConfigError: no steps, or a grid larger than the
// model's.
struct FlowSampleOptions {
  std::int64_t steps = 50;
  std::uint64_t seed = 0;
  std::int64_t number = 0;
  std::function<void(std::int64_t step)> begins{};  // called before each, from 0
};
at::Tensor sample_flow(VideoDiT& model, VideoGrid grid, const FlowSampleOptions& options);

// Makes the batch that a loader makes of one whole video.
Batch video_batch(const VideoStore& store, std::int64_t video, std::int64_t draw = 0);

// For viewing: frames uint8 [F, H, W, 3] of a video, of the model's input and of its estimate, on one device.
struct PredictedVideo {
  double time = 0;
  at::Tensor original, noised, predicted;
};
PredictedVideo predict_frames(VideoDiT& model, const VideoStore& store, std::int64_t video, double time,
                              std::uint64_t seed);

}  // namespace isograd
