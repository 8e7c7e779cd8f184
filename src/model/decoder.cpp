#include "model/decoder.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
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

constexpr std::int64_t kAllRows = std::numeric_limits<std::int64_t>::max();

const Adapter* adapter_of_all(const std::vector<AdaptedRows>& adapters) {
  return adapters.size() == 1 && adapters[0].end == kAllRows ? adapters[0].adapter : nullptr;
}

bool adapts(const std::vector<AdaptedRows>& adapters, std::int64_t layer, Projection projection) {
  return std::ranges::any_of(adapters, [&](const AdaptedRows& rows) {
    return rows.adapter && rows.adapter->find(layer, projection);
  });
}

[[noreturn]] void refuse_rows(const std::string& found, const std::string& expected) {
  refuse("rows of DecoderLM::set_adapters()", found, expected,
         "Set the rows of each batch before its forward, and those of the hidden states before logits_of()");
}

// The number of rows and the adapter of each run of a forward's rows.
std::vector<std::pair<std::int64_t, const Adapter*>> runs_of(const std::vector<AdaptedRows>& adapters,
                                                             std::int64_t rows) {
  std::vector<std::pair<std::int64_t, const Adapter*>> runs;
  std::int64_t done = 0;
  for (const auto& [begin, end, adapter] : adapters) {
    if (begin > rows) break;
    runs.emplace_back(std::min(end, rows) - begin, adapter);
    done = end;
  }
  if (done != rows && done != kAllRows)
    refuse_rows(fmt::format("rows to {}, and a forward of {}", done, rows), "the same number");
  return runs;
}

// How a layer's experts are adapted, of `rows` tokens.
std::vector<std::pair<std::int64_t, ExpertUpdates>> expert_runs(const std::vector<AdaptedRows>& adapters,
                                                                std::int64_t layer, std::int64_t rows) {
  constexpr std::array kOfExperts = {Projection::kGate, Projection::kUp, Projection::kDown};
  std::vector<std::pair<std::int64_t, ExpertUpdates>> runs;
  if (std::ranges::none_of(kOfExperts, [&](Projection each) { return adapts(adapters, layer, each); }))
    return runs;
  for (const auto& [count, adapter] : runs_of(adapters, rows)) {
    runs.emplace_back(count, ExpertUpdates{});
    for (std::size_t i = 0; adapter && i < kOfExperts.size(); ++i)
      runs.back().second[i] = adapter->find(layer, kOfExperts[i]);
  }
  return runs;
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
  const at::Tensor &cos = pass.cos, &sin = pass.sin;
  const std::int64_t dim = config.head_dim;
  const double epsilon = config.norm_epsilon;
  const Block& block = blocks[layer];
  auto [normed, residual] = rms_norm_and_residual(stream, block.input_norm, epsilon);
  const std::int64_t count = cos.size(0);  // of all tokens, also where each rank's stream has some of them
  const auto projected = projections(layer, normed, count,
                                     {{Projection::kQuery, block.q},
                                      {Projection::kKey, key_rows(block.k)},
                                      {Projection::kValue, key_rows(block.v)}},
                                     pass);
  const auto by_head = [&](const at::Tensor& x) { return x.view({count, x.size(1) / dim, dim}); };
  at::Tensor q = by_head(projected[0]), k = by_head(projected[1]), v = by_head(projected[2]);
  if (config.query_key_norm) {
    q = isograd::rms_norm(q, block.q_norm, epsilon);
    k = isograd::rms_norm(k, block.k_norm, epsilon);
  }
  q = isograd::rotary(q, cos, sin), k = isograd::rotary(k, cos, sin);
  read_by_queries(k, v);
  const at::Tensor attended = pass.attend(layer, q, k, v);
  stream =
      onto(residual, attended.reshape({count, q.size(1) * dim}), layer, {Projection::kOutput, block.o}, pass);

  std::tie(normed, residual) = rms_norm_and_residual(stream, block.post_attention_norm, epsilon);
  if (!config.has_experts(layer)) {
    const auto inner = projections(layer, normed, count,
                                   {{Projection::kGate, block.gate}, {Projection::kUp, block.up}}, pass);
    return {onto(residual, swiglu(inner[0], inner[1]), layer, {Projection::kDown, block.down}, pass)};
  }
  const MixtureOutput mixed =
      compute_mixture(block.mixture, config.experts, normed, count,
                      [&](const ExpertScores& scores, const at::Tensor& likeliest) {
                        return pass.choose ? pass.choose(layer, scores, likeliest) : likeliest;
                      },
                      hooks,
                      {.runs = expert_runs(pass.adapters, layer, count),
                       .shared = [&](const at::Tensor& y, const at::Tensor& x, Projection projection) {
                         return updated(y, x, layer, projection, pass.adapters);
                       }});
  if (pass.chosen) pass.chosen->at(static_cast<std::size_t>(layer)) = mixed.chosen;
  return {residual + mixed.sum, mixed.router_logits};
}

DecoderOutputs DecoderLM::Impl::outputs(const at::Tensor& tokens, const BlockPass& given) const {
  BlockPass pass = given;
  pass.adapters = adapters;
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

std::vector<at::Tensor> DecoderLM::Impl::projections(std::int64_t layer, const at::Tensor& stream,
                                                     std::int64_t tokens, const std::vector<Role>& roles,
                                                     const BlockPass& pass) const {
  std::vector<Linear> with;
  std::vector<std::pair<std::size_t, const LowRank*>> updates;  // by role
  for (const auto& [projection, linear] : roles) with.push_back(linear);
  // Under one adapter, products by `a` are made with the others: their gradients travel along tp together.
  if (const Adapter* one = pass.drop ? nullptr : adapter_of_all(pass.adapters))
    for (std::size_t i = 0; i < roles.size(); ++i)
      if (const LowRank* update = one->find(layer, roles[i].first)) {
        updates.emplace_back(i, update);
        with.push_back({.weight = update->a, .bias = {}});
      }
  auto results = project(hooks.tensor, stream, tokens, with);
  for (std::size_t i = 0; i < updates.size(); ++i) {
    const auto& [role, update] = updates[i];
    results[role] = add_update(results[role], results[roles.size() + i], *update, roles[role].first);
  }
  results.resize(roles.size());
  const bool adapted =
      std::ranges::any_of(roles, [&](const Role& role) { return adapts(pass.adapters, layer, role.first); });
  if (!adapted || !updates.empty()) return results;
  const at::Tensor x = hooks.tensor.region_input ? hooks.tensor.region_input(stream, tokens) : stream;
  for (std::size_t i = 0; i < roles.size(); ++i)
    results[i] =
        updated(results[i], x, layer, roles[i].first, pass.adapters, pass.dropping(layer, roles[i].first));
  return results;
}

at::Tensor DecoderLM::Impl::onto(const at::Tensor& residual, const at::Tensor& x, std::int64_t layer,
                                 const Role& role, const BlockPass& pass) const {
  const auto& [projection, linear] = role;
  const auto with_updates = [&, &of = role.first](const at::Tensor& y) {
    return updated(y, x, layer, of, pass.adapters, pass.dropping(layer, of));
  };
  if (!hooks.tensor.row_parallel) return with_updates(linear_onto(residual, x, linear.weight, linear.bias));
  // Each rank has its columns of `a`: its update is a part, as its product is.
  const at::Tensor sum =
      residual + (adapts(pass.adapters, layer, projection)
                      ? hooks.tensor.region_output(with_updates(isograd::linear(x, {linear.weight, {}})))
                      : hooks.tensor.row_parallel(x, linear.weight));
  return linear.bias.defined() ? sum + linear.bias : sum;
}

at::Tensor DecoderLM::Impl::add_update(const at::Tensor& y, const at::Tensor& by_a, const LowRank& update,
                                       Projection projection) const {
  const bool of_keys = projection == Projection::kKey || projection == Projection::kValue;
  const at::Tensor b = of_keys ? key_rows({.weight = update.b, .bias = {}}).weight : update.b;
  return linear_onto(y, update.scale == 1 ? by_a : by_a * update.scale, b, {});
}

at::Tensor DecoderLM::Impl::updated(const at::Tensor& y, const at::Tensor& x, std::int64_t layer,
                                    Projection projection, const std::vector<AdaptedRows>& rows,
                                    const std::function<at::Tensor(const at::Tensor&)>& dropping) const {
  if (!adapts(rows, layer, projection)) return y;
  std::vector<at::Tensor> parts;
  std::int64_t begin = 0;
  for (const auto& [count, adapter] : runs_of(rows, y.size(0))) {
    const at::Tensor own = y.narrow(0, begin, count);
    const LowRank* update = adapter ? adapter->find(layer, projection) : nullptr;
    if (update) {
      const at::Tensor in = x.narrow(0, begin, count);
      const at::Tensor by_a = linear(dropping ? dropping(in) : in, {.weight = update->a, .bias = {}});
      parts.push_back(add_update(own, by_a, *update, projection));
    } else {
      parts.push_back(own);
    }
    begin += count;
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts);
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

at::Tensor DecoderLM::Impl::logits(const at::Tensor& hidden, const at::Tensor& dropped) const {
  return updated(linear(hidden, Linear{.weight = output(), .bias = {}}), dropped.defined() ? dropped : hidden,
                 0, Projection::kHead, adapters);
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
  if (impl_->drop && at::GradMode::is_enabled())
    pass.drop = [given = impl_->drop, batch](std::int64_t layer, Projection projection, const at::Tensor& x) {
      return given(batch, layer, projection, x);
    };
  if (impl_->config.experts.count > 0)
    pass.chosen = std::make_shared<std::vector<at::Tensor>>(impl_->config.layers);
  DecoderOutputs outputs = impl_->outputs(batch.tokens.to(device), pass);
  if (pass.drop && outputs.hidden.defined() && adapts(impl_->adapters, 0, Projection::kHead))
    outputs.dropped = pass.drop(0, Projection::kHead, outputs.hidden);
  return outputs;
}

at::Tensor DecoderLM::hidden(const Batch& batch) { return outputs(batch).hidden; }

at::Tensor DecoderLM::logits_of(const at::Tensor& hidden, const at::Tensor& dropped) {
  return impl_->logits(hidden, dropped);
}

at::Tensor DecoderLM::logits(const Batch& batch) {
  const DecoderOutputs found = outputs(batch);
  return impl_->logits(found.hidden, found.dropped);
}

const at::Tensor& DecoderLM::output_weight() const { return impl_->output(); }

const VocabularyShard& DecoderLM::vocabulary() const { return hooks_->tensor.vocabulary; }

void DecoderLM::set_around_block(AroundBlock around) { impl_->around = std::move(around); }

void DecoderLM::set_choice_of_experts(ChooseExperts choose) { impl_->given_experts = std::move(choose); }

void DecoderLM::set_adapter(const Adapter* adapter) {
  impl_->adapters.clear();
  if (adapter) impl_->adapters.push_back({.begin = 0, .end = kAllRows, .adapter = adapter});
}

void DecoderLM::set_adapters(std::vector<AdaptedRows> rows) {
  std::int64_t next = 0;
  for (const AdaptedRows& own : rows) {
    if (own.begin != next || own.end < own.begin || own.end == kAllRows)
      refuse_rows(fmt::format("rows {} to {} behind {} others", own.begin, own.end, next),
                  "rows from 0, ascending and without gaps");
    next = own.end;
  }
  impl_->adapters = std::move(rows);
}

const Adapter* DecoderLM::adapter() const { return adapter_of_all(impl_->adapters); }

void DecoderLM::set_dropout_of_adapter(DropInputs drop) { impl_->drop = std::move(drop); }

void DecoderLM::include(const NamedTensors& of_adapter) {
  named_.insert(named_.end(), of_adapter.begin(), of_adapter.end());
}

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
