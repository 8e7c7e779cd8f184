#include "model/decoder.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <numbers>

#include "loss/checks.hpp"
#include "model/attention/attention.hpp"
#include "model/fused.hpp"

namespace isograd {
namespace {

void check_batch(const Batch& batch, std::int64_t vocabulary) {
  const auto bad = [](const std::string& found, const std::string& expected) {
    refuse("batch for the model", found, expected,
           "Use the tokenizer that the model was made for, and batches as a loader makes them");
  };
  const auto& tokens = batch.tokens;
  if (!tokens.defined() || tokens.dim() != 1 || tokens.scalar_type() != at::kLong ||
      tokens.numel() != batch.num_tokens() || !batch.positions.defined() ||
      batch.positions.sizes() != tokens.sizes() || batch.positions.scalar_type() != at::kLong)
    bad("tokens, positions and cu_seqlens that do not fit together",
        "tokens and positions [T] int64, cu_seqlens to T");
  if (tokens.numel() == 0 || !tokens.is_cpu()) return;
  const auto [least, most] = at::aminmax(tokens);
  if (least.item<std::int64_t>() < 0 || most.item<std::int64_t>() >= vocabulary)
    bad(fmt::format("tokens from {} to {}", least.item<std::int64_t>(), most.item<std::int64_t>()),
        fmt::format("a vocabulary of {}: 0 to {}", vocabulary, vocabulary - 1));
  if (batch.positions.min().item<std::int64_t>() < 0) bad("a negative position", "positions from 0");
}

}  // namespace

DecoderLM::Impl::Impl(const DecoderConfig& shape, at::ScalarType type, const ModelHooks& of)
    : config(shape), dtype(type), rotary(shape, computing_type(type)), hooks(of) {}

void DecoderLM::Impl::create(torch::nn::Module& root, at::Device device, NamedTensors& in_order) {
  ParameterMaker parameter(root, at::TensorOptions(dtype).device(device), in_order);
  const std::int64_t hidden = config.hidden, inner = config.feed_forward;
  const std::int64_t queries = config.heads * config.head_dim,
                     keys = config.key_value_heads * config.head_dim;
  embedding = parameter("model.embed_tokens.weight", {config.vocabulary, hidden});
  for (std::int64_t layer = 0; layer < config.layers; ++layer) {
    const std::string prefix = fmt::format("model.layers.{}.", layer), attention = prefix + "self_attn.";
    Block block;
    block.q = parameter.linear(attention + "q_proj", queries, hidden, config.attention_bias);
    block.k = parameter.linear(attention + "k_proj", keys, hidden, config.attention_bias);
    block.v = parameter.linear(attention + "v_proj", keys, hidden, config.attention_bias);
    block.o = parameter.linear(attention + "o_proj", hidden, queries, config.output_bias);
    if (config.query_key_norm) {
      block.q_norm = parameter(attention + "q_norm.weight", {config.head_dim});
      block.k_norm = parameter(attention + "k_norm.weight", {config.head_dim});
    }
    if (config.has_experts(layer)) {
      block.mixture = create_mixture(config, prefix + "mlp.", parameter);
    } else {
      block.gate = parameter.linear(prefix + "mlp.gate_proj", inner, hidden, config.mlp_bias);
      block.up = parameter.linear(prefix + "mlp.up_proj", inner, hidden, config.mlp_bias);
      block.down = parameter.linear(prefix + "mlp.down_proj", hidden, inner, config.mlp_bias);
    }
    block.input_norm = parameter(prefix + "input_layernorm.weight", {hidden});
    block.post_attention_norm = parameter(prefix + "post_attention_layernorm.weight", {hidden});
    blocks.push_back(std::move(block));
  }
  norm = parameter("model.norm.weight", {hidden});
  if (!config.tied_output) head = parameter("lm_head.weight", {config.vocabulary, hidden});
}

std::vector<at::Tensor> DecoderLM::Impl::block(std::int64_t layer, at::Tensor stream,
                                               const BlockPass& pass) const {
  const auto& [cos, sin, attend, choose, chosen] = pass;
  const std::int64_t dim = config.head_dim;
  const double epsilon = config.norm_epsilon;
  const Block& block = blocks[layer];
  auto [normed, residual] = rms_norm_and_residual(stream, block.input_norm, epsilon);
  const std::int64_t count = cos.size(0);  // of all tokens, also where each rank's stream has some of them
  const auto projected =
      project(hooks.tensor, normed, count, {block.q, key_rows(block.k), key_rows(block.v)});
  const auto by_head = [&](const at::Tensor& x) { return x.view({count, x.size(1) / dim, dim}); };
  at::Tensor q = by_head(projected[0]), k = by_head(projected[1]), v = by_head(projected[2]);
  if (config.query_key_norm) {
    q = isograd::rms_norm(q, block.q_norm, epsilon);
    k = isograd::rms_norm(k, block.k_norm, epsilon);
  }
  q = isograd::rotary(q, cos, sin), k = isograd::rotary(k, cos, sin);
  read_by_queries(k, v);
  const at::Tensor attended = attend(layer, q, k, v);
  stream = onto(residual, attended.reshape({count, q.size(1) * dim}), block.o);

  std::tie(normed, residual) = rms_norm_and_residual(stream, block.post_attention_norm, epsilon);
  if (!config.has_experts(layer)) {
    const auto inner = project(hooks.tensor, normed, count, {block.gate, block.up});
    return {onto(residual, swiglu(inner[0], inner[1]), block.down)};
  }
  const MixtureOutput mixed = compute_mixture(
      block.mixture, config.experts, normed, count,
      [&](const ExpertScores& scores, const at::Tensor& likeliest) {
        return choose ? choose(layer, scores, likeliest) : likeliest;
      },
      hooks);
  if (chosen) chosen->at(static_cast<std::size_t>(layer)) = mixed.chosen;
  return {residual + mixed.sum, mixed.router_logits};
}

DecoderOutputs DecoderLM::Impl::outputs(const at::Tensor& tokens, const BlockPass& pass) const {
  if (hooks.pipeline.stages) return stage_outputs(tokens, pass);
  DecoderOutputs result;
  result.hidden = last_norm(layers(0, config.layers, embed(tokens), pass, result), tokens.size(0));
  return result;
}

at::Tensor DecoderLM::Impl::layers(std::int64_t begin, std::int64_t count, at::Tensor stream,
                                   const BlockPass& pass, DecoderOutputs& outputs) const {
  for (std::int64_t layer = begin; layer < begin + count; ++layer) {
    // By value: it may be called again when this function has long returned.
    const auto forward = [this, layer, pass](const at::Tensor& in) { return block(layer, in, pass); };
    const auto given = around ? around(layer, stream, forward) : forward(stream);
    stream = given.at(0);
    if (!config.has_experts(layer)) continue;
    outputs.routed.push_back(layer);
    outputs.router_logits.push_back(given.at(1));
    if (pass.chosen) outputs.chosen.push_back(pass.chosen->at(static_cast<std::size_t>(layer)));
  }
  return stream;
}

DecoderOutputs DecoderLM::Impl::stage_outputs(const at::Tensor& tokens, const BlockPass& pass) const {
  DecoderOutputs result;
  for (const StageHooks::Stage& stage : hooks.pipeline.stages()) {
    at::Tensor stream = stage.is_first ? embed(tokens) : hooks.pipeline.receive(stage);
    stream = layers(stage.begin, stage.count, std::move(stream), pass, result);
    result.hidden = stage.is_last ? last_norm(stream, tokens.size(0)) : at::Tensor();
    result.passed_on = stage.is_last ? at::Tensor() : hooks.pipeline.pass_on(stage, stream);
  }
  return result;
}

at::Tensor DecoderLM::Impl::embed(const at::Tensor& tokens) const {
  return hooks.tensor.embed ? hooks.tensor.embed(embedding, tokens, config.pad)
                            : at::embedding(embedding, tokens, config.pad);
}

at::Tensor DecoderLM::Impl::last_norm(const at::Tensor& stream, std::int64_t tokens) const {
  const at::Tensor normed = isograd::rms_norm(stream, norm, config.norm_epsilon);
  return hooks.tensor.region_input ? hooks.tensor.region_input(normed, tokens) : normed;
}

at::Tensor DecoderLM::Impl::onto(const at::Tensor& residual, const at::Tensor& x,
                                 const Linear& linear) const {
  if (!hooks.tensor.row_parallel) return linear_onto(residual, x, linear.weight, linear.bias);
  const at::Tensor sum = residual + hooks.tensor.row_parallel(x, linear.weight);
  return linear.bias.defined() ? sum + linear.bias : sum;
}

Linear DecoderLM::Impl::key_rows(const Linear& whole) const {
  if (hooks.tensor.key_heads == 0) return whole;
  const auto rows = [&](const at::Tensor& of) {
    return of.defined() ? of.narrow(0, hooks.tensor.first_key_head * config.head_dim,
                                    hooks.tensor.key_heads * config.head_dim)
                        : of;
  };
  return {rows(whole.weight), rows(whole.bias)};
}

void DecoderLM::Impl::read_by_queries(at::Tensor& k, at::Tensor& v) const {
  if (hooks.tensor.readers.empty()) return;
  const at::Tensor heads = at::tensor(hooks.tensor.readers, at::kLong).to(k.device());
  k = k.index_select(1, heads), v = v.index_select(1, heads);
}

at::Tensor DecoderLM::Impl::logits(const at::Tensor& hidden) const {
  return linear(hidden, Linear{.weight = output(), .bias = {}});
}

DecoderLM::DecoderLM(const DecoderConfig& config, at::ScalarType dtype, at::Device device)
    : ReferenceModel("model.layers.") {
  check(config);
  check_model_dtype(dtype);
  impl_ = std::make_unique<Impl>(config, dtype, *hooks_);
  impl_->create(*this, device, named_);
}

DecoderLM::DecoderLM(const DecoderConfig& config, at::ScalarType dtype, std::uint64_t seed)
    : DecoderLM(config, dtype) {
  for (auto& [name, tensor] : named_) initialize(name, tensor, seed);
}

std::shared_ptr<DecoderLM> DecoderLM::without_values(const DecoderConfig& config, at::ScalarType dtype) {
  return std::shared_ptr<DecoderLM>(new DecoderLM(config, dtype, at::kMeta));
}

void DecoderLM::initialize(const std::string& name, at::Tensor& values, std::uint64_t seed) const {
  const at::NoGradGuard no_grad;
  if (values.dim() == 1)
    values.fill_(name.ends_with("bias") ? 0 : 1);
  else
    fill_normal(values, config().initializer_range, seed, name);
}

DecoderLM::~DecoderLM() = default;

const DecoderConfig& DecoderLM::config() const { return impl_->config; }

DecoderOutputs DecoderLM::outputs(const Batch& batch) {
  check_batch(batch, impl_->config.vocabulary);
  const auto device = impl_->embedding.device();
  check_attention(batch, static_cast<bool>(attention_));
  std::vector<std::int64_t> lengths;  // of the documents, of which this batch may hold parts
  for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f)
    lengths.push_back(batch.cut ? batch.cut->document_length(batch.cut->own().at(f).document)
                                : batch.cu_seqlens[f + 1] - batch.cu_seqlens[f]);
  if (const std::int64_t window = impl_->config.sliding_window; window > 0)
    for (const std::int64_t length : lengths)
      if (length > window)
        refuse(
            "batch for the model", fmt::format("a document of {} tokens", length),
            fmt::format("at most {}, the sliding window: attention within a window is not supported", window),
            "Shorten the packs (data.pack_length)");
  if (batch.bounds_only && impl_->rotary.depends_on_length(batch.num_tokens()))
    refuse("batch for the model", "bounds of documents, and frequencies that depend on how long each is",
           "the documents' lengths", "Leave StepOptions::capture off for this model");
  const auto [cos, sin] =
      impl_->rotary.at(batch.positions, batch.cu_seqlens, lengths, batch.largest_position);
  BlockPass pass{.cos = cos.to(device), .sin = sin.to(device), .attend = {}};
  if (attention_)
    pass.attend = [given = attention_, batch](std::int64_t, const at::Tensor& q, const at::Tensor& k,
                                              const at::Tensor& v) { return given(batch, q, k, v); };
  else
    pass.attend = [batch](std::int64_t, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
      return variable_length_attention(q, k, v, batch);
    };
  if (impl_->given_experts)
    pass.choose = [given = impl_->given_experts, batch](std::int64_t layer, const ExpertScores& scores,
                                                        const at::Tensor& likeliest) {
      return given(batch, layer, scores, likeliest);
    };
  if (impl_->config.experts.count > 0)
    pass.chosen = std::make_shared<std::vector<at::Tensor>>(impl_->config.layers);
  return impl_->outputs(batch.tokens.to(device), pass);
}

at::Tensor DecoderLM::hidden(const Batch& batch) { return outputs(batch).hidden; }

at::Tensor DecoderLM::logits_of(const at::Tensor& hidden) { return impl_->logits(hidden); }

at::Tensor DecoderLM::logits(const Batch& batch) { return impl_->logits(hidden(batch)); }

const at::Tensor& DecoderLM::output_weight() const { return impl_->output(); }

const VocabularyShard& DecoderLM::vocabulary() const { return hooks_->tensor.vocabulary; }

void DecoderLM::set_around_block(AroundBlock around) { impl_->around = std::move(around); }

void DecoderLM::set_choice_of_experts(ChooseExperts choose) { impl_->given_experts = std::move(choose); }

namespace {

// Yarn's ramp from 0 at dim `low` to 1 at dim `high` (Peng et al. 2023).
at::Tensor ramp(double low, double high, std::int64_t half, const at::TensorOptions& options) {
  if (low == high) high += 0.001;
  return ((at::arange(half, options) - low) / (high - low)).clamp(0, 1);
}

// The dim whose wave turns `rotations` times over the original positions.
double correction_dim(double rotations, const DecoderConfig& config) {
  const auto positions = static_cast<double>(config.rope_scaling.original_max_positions);
  return static_cast<double>(config.head_dim) * std::log(positions / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(config.rope_theta));
}

at::Tensor yarn(const DecoderConfig& config, const at::Tensor& wavelengths) {
  const RopeScaling& scaling = config.rope_scaling;
  double low = correction_dim(scaling.beta_fast, config), high = correction_dim(scaling.beta_slow, config);
  if (scaling.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, static_cast<double>(config.head_dim - 1));
  const at::Tensor kept = 1 - ramp(low, high, config.head_dim / 2, wavelengths.options());
  return at::reciprocal(wavelengths * scaling.factor) * (1 - kept) + at::reciprocal(wavelengths) * kept;
}

at::Tensor llama3(const RopeScaling& scaling, const at::Tensor& frequencies) {
  const auto positions = static_cast<double>(scaling.original_max_positions);
  const double low_wave = positions / scaling.low_frequency_factor;
  const double high_wave = positions / scaling.high_frequency_factor;
  const at::Tensor waves = at::reciprocal(frequencies) * (2 * std::numbers::pi);
  const at::Tensor scaled = at::where(waves > low_wave, frequencies / scaling.factor, frequencies);
  const at::Tensor smooth = (at::reciprocal(waves) * positions - scaling.low_frequency_factor) /
                            (scaling.high_frequency_factor - scaling.low_frequency_factor);
  const at::Tensor between = (1 - smooth) * scaled / scaling.factor + smooth * scaled;
  return at::where((waves >= high_wave).logical_and(waves <= low_wave), between, scaled);
}

}  // namespace

std::pair<at::Tensor, double> rotary_frequencies(const DecoderConfig& config, std::int64_t length,
                                                 at::ScalarType type) {
  const RopeScaling& scaling = config.rope_scaling;
  const auto dim = static_cast<double>(config.head_dim), longest = static_cast<double>(config.max_positions);
  double base = config.rope_theta;
  if (scaling.kind == "dynamic" && length > config.max_positions)
    base *= std::pow(scaling.factor * static_cast<double>(length) / longest - (scaling.factor - 1),
                     dim / (dim - 2));
  const at::Tensor exponents = at::arange(0, config.head_dim, 2, at::TensorOptions().dtype(type)) / dim;
  const at::Tensor wavelengths = at::pow(base, exponents);
  if (scaling.kind == "yarn") {
    const double logarithmic = scaling.factor <= 1 ? 1.0 : 0.1 * std::log(scaling.factor) + 1.0;
    return {yarn(config, wavelengths), scaling.attention_factor.value_or(logarithmic)};
  }
  const at::Tensor frequencies = at::reciprocal(wavelengths);
  if (scaling.kind == "linear") return {frequencies / scaling.factor, 1.0};
  if (scaling.kind == "llama3") return {llama3(scaling, frequencies), 1.0};
  return {frequencies, 1.0};
}

bool RotaryTable::depends_on_length(std::int64_t length) const {
  return config_.rope_scaling.kind == "dynamic" && length > config_.max_positions;
}

std::pair<at::Tensor, at::Tensor> RotaryTable::compute(const at::Tensor& positions,
                                                       std::int64_t length) const {
  const auto [frequencies, factor] = rotary_frequencies(config_, length, type_);
  const at::Tensor angles = positions.to(type_).unsqueeze(1) * frequencies;
  return {angles.cos() * factor, angles.sin() * factor};
}

std::pair<at::Tensor, at::Tensor> RotaryTable::at(const at::Tensor& positions,
                                                  const std::vector<std::int64_t>& cu_seqlens,
                                                  const std::vector<std::int64_t>& lengths,
                                                  std::int64_t largest_position) {
  const at::NoGradGuard no_grad;
  if (largest_position < 0 && positions.numel() > 0) largest_position = positions.max().item<std::int64_t>();
  std::int64_t longest = largest_position + 1;
  if (positions.numel() > 0 && !lengths.empty())
    longest = std::max(longest, *std::max_element(lengths.begin(), lengths.end()));
  at::Tensor cos, sin;
  if (!depends_on_length(longest)) {
    const std::lock_guard lock(mutex_);
    if (!cos_.defined() || cos_.size(0) < longest || cos_.device() != positions.device()) {
      const auto size = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(longest + 1)));
      earlier_.push_back(cos_), earlier_.push_back(sin_);
      std::tie(cos_, sin_) = compute(at::arange(size), 0);  // on the CPU: the same bits everywhere
      cos_ = cos_.to(positions.device()), sin_ = sin_.to(positions.device());
    }
    cos = cos_.index_select(0, positions), sin = sin_.index_select(0, positions);
  } else {
    const at::Tensor places = positions.cpu();
    std::vector<at::Tensor> all_cos, all_sin;
    for (std::size_t f = 0; f + 1 < cu_seqlens.size(); ++f) {
      if (cu_seqlens[f + 1] == cu_seqlens[f]) continue;
      const at::Tensor own = places.narrow(0, cu_seqlens[f], cu_seqlens[f + 1] - cu_seqlens[f]);
      const std::int64_t reached = own.max().item<std::int64_t>() + 1;
      const auto [own_cos, own_sin] = compute(own, lengths.empty() ? reached : std::max(reached, lengths[f]));
      all_cos.push_back(own_cos), all_sin.push_back(own_sin);
    }
    cos = at::cat(all_cos), sin = at::cat(all_sin);
  }
  return {cos.to(positions.device()), sin.to(positions.device())};
}

}  // namespace isograd
