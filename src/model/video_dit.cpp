#include "isograd/model.hpp"

#include <algorithm>
#include <cmath>

#include "base/refuse.hpp"
#include "data/move.hpp"
#include "model/attention/attention.hpp"
#include "model/fused.hpp"
#include "model/hooks.hpp"
#include "model/parameters.hpp"

namespace isograd {
namespace {

using Lengths = std::vector<std::int64_t>;  // tokens of each fragment

// f(tokens of a fragment..., its row of each of `rows`) for every fragment, one after another. `of_tokens`
// [T, ...], `rows` [F, hidden]. Autograd adds a row's gradient up over its tokens in one sum; gathering the
// rows token by token would cost T rows of memory for each use.
template <typename F>
at::Tensor by_fragment(const Lengths& lengths, const std::vector<at::Tensor>& of_tokens,
                       const std::vector<at::Tensor>& rows, F&& f) {
  if (lengths.size() <= 1) return f(of_tokens, rows);  // [1, hidden], or nothing at all, by broadcasting
  std::vector<std::vector<at::Tensor>> tokens, row;
  for (const at::Tensor& x : of_tokens) tokens.push_back(x.split_with_sizes(lengths));
  for (const at::Tensor& x : rows) row.push_back(x.split(1));
  std::vector<at::Tensor> results;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    std::vector<at::Tensor> own, of;
    for (const auto& parts : tokens) own.push_back(parts[i]);
    for (const auto& parts : row) of.push_back(parts[i]);
    results.push_back(f(own, of));
  }
  return at::cat(results);
}

// x (1 + scale) + shift.
at::Tensor modulated(const at::Tensor& x, const at::Tensor& shift, const at::Tensor& scale,
                     const Lengths& lengths) {
  return by_fragment(lengths, {x}, {shift, scale}, [](const auto& own, const auto& row) {
    return at::addcmul(own[0] + row[0], own[0], row[1]);
  });
}

// stream + gate · x.
at::Tensor gated(const at::Tensor& stream, const at::Tensor& gate, const at::Tensor& x,
                 const Lengths& lengths) {
  return by_fragment(lengths, {stream, x}, {gate},
                     [](const auto& own, const auto& row) { return at::addcmul(own[0], own[1], row[0]); });
}

// cos and sin of 1000 t at frequencies from 1 to 1/10000 (DiT's, whose steps are those of 1000): [F,
// features].
at::Tensor features_of(const at::Tensor& times, std::int64_t features) {
  constexpr double kSteps = 1000, kLongest = 10000;
  const std::int64_t half = features / 2;
  const at::Tensor frequencies = at::exp(at::arange(half, at::kDouble) * (-std::log(kLongest) / half));
  const at::Tensor angles = times.to(at::kDouble).unsqueeze(1) * kSteps * frequencies;
  return at::cat({angles.cos(), angles.sin()}, 1);
}

struct DiTBlock {
  Linear modulation, q, k, v, o, in, out;
  at::Tensor q_norm, k_norm;  // [head_dim]
};

}  // namespace

void check(const VideoDiTConfig& config) {
  want_size("patch_elements", config.patch_elements);
  want_size("hidden", config.hidden);
  want_size("layers", config.layers);
  want_size("heads", config.heads);
  want_size("feed_forward", config.feed_forward);
  want_size("max_frames", config.max_frames);
  want_size("max_height", config.max_height);
  want_size("max_width", config.max_width);
  want(config.head_dim >= 0, "head_dim", config.head_dim, "0 (hidden / heads) or more");
  if (config.head_dim > 0) want_size("head_dim", config.head_dim);
  if (config.head_dim > 0) want_size("heads * head_dim", config.heads * config.head_dim);
  want(config.head_dim > 0 || config.hidden % config.heads == 0, "hidden", config.hidden,
       fmt::format("a multiple of heads, {}", config.heads));
  want_size("timestep_features", config.timestep_features);
  want(config.timestep_features % 2 == 0, "timestep_features", config.timestep_features,
       "an even number, 2 or more");
  want(config.norm_epsilon > 0 && std::isfinite(config.norm_epsilon), "norm_epsilon", config.norm_epsilon,
       "a number above 0");
  want(config.initializer_range >= 0 && std::isfinite(config.initializer_range), "initializer_range",
       config.initializer_range, "0 or more");
  want(std::isfinite(config.gate_init), "gate_init", config.gate_init, "a finite number");
}

struct VideoDiT::Impl {
  const VideoDiTConfig config;
  const at::ScalarType dtype;
  const ModelHooks& hooks;  // the model's
  const Attention& given_attention;
  Linear patch{}, time_in{}, time_out{}, final_modulation{}, final_linear{};
  at::Tensor frame{}, row{}, column{};  // [max_frames, hidden], ...
  std::vector<DiTBlock> blocks{};
  AroundBlock around{};  // empty: nothing

  void create(torch::nn::Module& root, at::Device device, NamedTensors& in_order) {
    ParameterMaker parameter(root, at::TensorOptions(dtype).device(device), in_order);
    const std::int64_t hidden = config.hidden, dim = config.width_of_head(), inner = config.heads * dim;
    patch = parameter.linear("patch_embedding", hidden, config.patch_elements);
    frame = parameter("frame_embedding.weight", {config.max_frames, hidden});
    row = parameter("row_embedding.weight", {config.max_height, hidden});
    column = parameter("column_embedding.weight", {config.max_width, hidden});
    time_in = parameter.linear("timestep.in", hidden, config.timestep_features);
    time_out = parameter.linear("timestep.out", hidden, hidden);
    for (std::int64_t layer = 0; layer < config.layers; ++layer) {
      const std::string prefix = fmt::format("blocks.{}.", layer);
      DiTBlock block;
      block.modulation = parameter.linear(prefix + "modulation", 6 * hidden, hidden);
      block.q = parameter.linear(prefix + "attention.q", inner, hidden);
      block.k = parameter.linear(prefix + "attention.k", inner, hidden);
      block.v = parameter.linear(prefix + "attention.v", inner, hidden);
      block.q_norm = parameter(prefix + "attention.q_norm.weight", {dim});
      block.k_norm = parameter(prefix + "attention.k_norm.weight", {dim});
      block.o = parameter.linear(prefix + "attention.o", hidden, inner);
      block.in = parameter.linear(prefix + "feed_forward.in", config.feed_forward, hidden);
      block.out = parameter.linear(prefix + "feed_forward.out", hidden, config.feed_forward);
      blocks.push_back(std::move(block));
    }
    final_modulation = parameter.linear("final.modulation", 2 * hidden, hidden);
    final_linear = parameter.linear("final.linear", config.patch_elements, hidden);
  }

  at::Tensor norm(const at::Tensor& x) const {
    return at::layer_norm(x, {config.hidden}, {}, {}, config.norm_epsilon);
  }

  at::Tensor block(std::int64_t layer, at::Tensor stream, const at::Tensor& condition, const Batch& batch,
                   const Lengths& lengths) const {
    const std::int64_t count = batch.num_tokens(), dim = config.width_of_head();
    const DiTBlock& block = blocks[layer];
    const auto onto_stream = [&](const at::Tensor& x, const Linear& with) {
      if (!hooks.tensor.row_parallel) return linear(x, with);
      return hooks.tensor.row_parallel(x, with.weight) + with.bias;
    };
    const auto modulation = linear(condition, block.modulation).chunk(6, 1);
    const auto projected =
        project(hooks.tensor, modulated(norm(stream), modulation[0], modulation[1], lengths), count,
                {block.q, block.k, block.v});
    const auto heads = [&](const at::Tensor& x) { return x.view({count, x.size(1) / dim, dim}); };
    const at::Tensor q = rms_norm(heads(projected[0]), block.q_norm, config.norm_epsilon),
                     k = rms_norm(heads(projected[1]), block.k_norm, config.norm_epsilon),
                     v = heads(projected[2]);
    at::Tensor out = given_attention ? given_attention(batch, q, k, v)
                                     : variable_length_attention(q, k, v, batch, /*causal=*/false);
    out = onto_stream(out.reshape({count, q.size(1) * dim}), block.o);
    stream = gated(stream, modulation[2], out, lengths);
    out = project(hooks.tensor, modulated(norm(stream), modulation[3], modulation[4], lengths), count,
                  {block.in})[0];
    out = onto_stream(at::gelu(out, "tanh"), block.out);
    return gated(stream, modulation[5], out, lengths);
  }

  void check_input(const Batch& batch, const at::Tensor& noised, const at::Tensor& coordinates,
                   const at::Tensor& times) const {
    const std::string where = "batch for the model";
    const std::int64_t count = batch.num_tokens(), fragments = std::ssize(batch.cu_seqlens) - 1;
    if (noised.dim() != 2 || noised.size(0) != count || noised.size(1) != config.patch_elements ||
        coordinates.dim() != 2 || coordinates.size(0) != count || coordinates.size(1) != 3 ||
        coordinates.scalar_type() != at::kLong || times.dim() != 1 || times.size(0) != fragments)
      refuse(where,
             c10::str("noised ", noised.sizes(), ", coordinates ", coordinates.sizes(), ", times ",
                      times.sizes()),
             fmt::format("[{0}, {1}], [{0}, 3] int64 and [{2}]", count, config.patch_elements, fragments),
             "Pass what belongs to the batch, cut into the patches that the model was made for");
    check_attention(batch, static_cast<bool>(given_attention));
    if (count == 0) return;
    const at::Tensor places = coordinates.cpu(), most = places.amax(0), least = places.amin(0);
    const at::Tensor largest =
        at::tensor({config.max_frames, config.max_height, config.max_width}, at::kLong);
    if (least.lt(0).any().item<bool>() || most.ge(largest).any().item<bool>())
      refuse(where,
             fmt::format("a patch at frame {}, row {}, column {}", most[0].item<std::int64_t>(),
                         most[1].item<std::int64_t>(), most[2].item<std::int64_t>()),
             fmt::format("videos of at most {} x {} x {} patches (model.max_frames, max_height, max_width)",
                         config.max_frames, config.max_height, config.max_width),
             "Raise the model's limits, or scale and cut the videos");
  }
};

VideoDiT::VideoDiT(const VideoDiTConfig& config, at::ScalarType dtype, at::Device device)
    : ReferenceModel("blocks.") {
  check(config);
  check_model_dtype(dtype);
  impl_ = std::make_unique<Impl>(
      Impl{.config = config, .dtype = dtype, .hooks = *hooks_, .given_attention = attention_});
  impl_->create(*this, device, named_);
}

VideoDiT::VideoDiT(const VideoDiTConfig& config, at::ScalarType dtype, std::uint64_t seed)
    : VideoDiT(config, dtype) {
  for (auto& [name, tensor] : named_) initialize(name, tensor, seed);
}

std::shared_ptr<VideoDiT> VideoDiT::without_values(const VideoDiTConfig& config, at::ScalarType dtype) {
  return std::shared_ptr<VideoDiT>(new VideoDiT(config, dtype, at::kMeta));
}

void VideoDiT::initialize(const std::string& name, at::Tensor& values, std::uint64_t seed) const {
  const at::NoGradGuard no_grad;
  if (name.ends_with(".bias")) {
    values.zero_();
    if (name.starts_with("blocks.") && name.ends_with(".modulation.bias"))
      for (const std::int64_t gate : {2, 5})
        values.narrow(0, gate * config().hidden, config().hidden).fill_(config().gate_init);
  } else if (values.dim() == 1) {
    values.fill_(1);
  } else if (config().gate_init == 0 &&
             (name.ends_with("modulation.weight") || name == "final.linear.weight")) {
    values.zero_();
  } else {
    fill_normal(values, config().initializer_range, seed, name);
  }
}

VideoDiT::~VideoDiT() = default;

const VideoDiTConfig& VideoDiT::config() const { return impl_->config; }

at::ScalarType VideoDiT::dtype() const { return impl_->dtype; }

at::Device VideoDiT::device() const { return impl_->frame.device(); }

at::Tensor VideoDiT::velocity(const Batch& batch, const at::Tensor& noised, const at::Tensor& coordinates,
                              const at::Tensor& times) {
  const Impl& model = *impl_;
  model.check_input(batch, noised, coordinates, times);
  const std::int64_t count = batch.num_tokens();
  const auto [begin, own] = model.hooks.tensor.own_tokens ? model.hooks.tensor.own_tokens(count)
                                                          : std::pair(std::int64_t{0}, count);
  Lengths lengths;  // of the fragments, as far as they are in this rank's stream
  for (std::size_t f = 0; f + 1 < batch.cu_seqlens.size(); ++f) {
    const auto within = [&](std::int64_t at) { return std::clamp<std::int64_t>(at - begin, 0, own); };
    lengths.push_back(within(batch.cu_seqlens[f + 1]) - within(batch.cu_seqlens[f]));
  }
  const at::Device device = noised.device();
  at::Tensor stream = linear(noised.narrow(0, begin, own).to(model.dtype), model.patch);
  const at::Tensor* tables[] = {&model.frame, &model.row, &model.column};
  for (std::int64_t axis = 0; axis < 3; ++axis)
    stream =
        stream + at::embedding(*tables[axis],
                               moved(coordinates.narrow(0, begin, own).select(1, axis).contiguous(), device));
  const at::Tensor features =
      moved(features_of(times.cpu(), model.config.timestep_features).to(model.dtype), device);
  const at::Tensor condition = at::silu(linear(at::silu(linear(features, model.time_in)), model.time_out));
  for (std::int64_t layer = 0; layer < model.config.layers; ++layer) {
    if (!model.around) {
      stream = model.block(layer, stream, condition, batch, lengths);
      continue;
    }
    // By value: it may be called again when this function has long returned.
    stream =
        model.around(layer, stream, condition,
                     [impl = impl_.get(), layer, batch, lengths](const at::Tensor& in, const at::Tensor& of) {
                       return impl->block(layer, in, of, batch, lengths);
                     });
  }
  const auto modulation = linear(condition, model.final_modulation).chunk(2, 1);
  const at::Tensor velocity =
      linear(modulated(model.norm(stream), modulation[0], modulation[1], lengths), model.final_linear);
  return model.hooks.tensor.gather_tokens ? model.hooks.tensor.gather_tokens(velocity, count) : velocity;
}

void VideoDiT::set_around_block(AroundBlock around) { impl_->around = std::move(around); }

}  // namespace isograd
