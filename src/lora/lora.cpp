#include "isograd/lora.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/refuse.hpp"
#include "isograd/random.hpp"
#include "kernels/threads/parallel_for.hpp"
#include "lora/modules.hpp"
#include "model/experts.hpp"
#include "model/hf.hpp"

namespace isograd {
namespace {

constexpr std::string_view kA = ".lora_A.weight", kB = ".lora_B.weight";

// Rows and columns of a projection's matrix.
std::pair<std::int64_t, std::int64_t> shape_of(const DecoderConfig& model, std::int64_t layer,
                                               Projection projection) {
  const std::int64_t hidden = model.hidden, shared = model.experts.shared_feed_forward,
                     inner = model.has_experts(layer) ? model.experts.feed_forward : model.feed_forward,
                     queries = model.heads * model.head_dim, keys = model.key_value_heads * model.head_dim;
  switch (projection) {
    case Projection::kQuery: return {queries, hidden};
    case Projection::kKey:
    case Projection::kValue: return {keys, hidden};
    case Projection::kOutput: return {hidden, queries};
    case Projection::kGate:
    case Projection::kUp: return {inner, hidden};
    case Projection::kDown: return {hidden, inner};
    case Projection::kHead: return {model.vocabulary, hidden};
    case Projection::kSharedGate:
    case Projection::kSharedUp: return {shared, hidden};
    case Projection::kSharedDown: return {hidden, shared};
  }
  return {};
}

// In a model with experts PEFT has limits.
void check_experts(const LoraConfig& config) {
  const bool gate = config.adapts(Projection::kGate);
  if (config.adapts(Projection::kUp) != gate || config.adapts(Projection::kDown) != gate)
    refuse("a low-rank adapter's matrices",
           "some of gate_proj, up_proj and down_proj, and layers with experts",
           "all three or none: PEFT has gate and up of all experts in one matrix", "Name all three, or mlp");
  if (gate && config.dropout > 0)
    refuse("the dropout of a low-rank adapter", fmt::format("{}, and layers with experts", config.dropout),
           "0: neither PEFT nor isograd drops inputs of experts",
           "Leave it out, or mlp of the adapter's targets");
}

}  // namespace

bool LoraConfig::adapts(Projection projection) const {
  const Adaptable& matrix = matrix_of(projection);
  if (!modules.empty()) return std::ranges::find(modules, matrix.name) != modules.end();
  return matrix.group == kAttention ? attention : matrix.group == kMlp ? mlp : unembed;
}

void check(const LoraConfig& config) {
  constexpr std::int64_t kMostRank = 512;
  const auto want = [](bool holds, const char* what, const std::string& found, const std::string& expected) {
    if (!holds) refuse(fmt::format("{} of a low-rank adapter", what), found, expected, "Change it");
  };
  want(config.rank >= 1 && config.rank <= kMostRank, "the rank", std::to_string(config.rank),
       fmt::format("1 to {}", kMostRank));
  want(std::isfinite(config.alpha) && config.alpha > 0, "alpha", fmt::format("{}", config.alpha), "above 0");
  want(config.dropout >= 0 && config.dropout < 1, "the dropout", fmt::format("{}", config.dropout),
       "at least 0, below 1");
  for (const std::string& name : config.modules)
    want(std::ranges::find(kAdaptable, name, &Adaptable::name) != kAdaptable.end(), "a module", name,
         module_names());
  want(!config.modules.empty() || config.attention || config.mlp || config.unembed, "the matrices", "none",
       "attention, mlp or unembed");
}

void initialize_lora(const std::string& name, at::Tensor& values, std::uint64_t seed) {
  const at::NoGradGuard no_grad;
  if (!name.ends_with(kA)) return;
  const double bound = 1 / std::sqrt(static_cast<double>(values.size(-1)));
  const RandomKey key{.seed = seed, .layer = hash_name(name)};
  at::Tensor exact = at::empty(values.sizes(), at::kDouble);
  double* to = exact.mutable_data_ptr<double>();
  constexpr std::int64_t kGrain = 1 << 14;
  parallel_for(0, exact.numel(), kGrain, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i)
      to[i] = bound * (2 * random_uniform(key, static_cast<std::uint64_t>(i)) - 1);
  });
  values.copy_(values.scalar_type() == at::kDouble ? exact : exact.to(at::kFloat));
}

at::Tensor drop_inputs(const at::Tensor& x, const Batch& batch, std::int64_t layer, Projection projection,
                       const LoraDropout& dropout) {
  // Four features share 64 random bits; the fraction is a multiple of 2⁻¹⁶.
  constexpr double kSteps = 65536;
  const auto least = static_cast<std::uint64_t>(std::llround(dropout.fraction * kSteps));
  const float kept = static_cast<float>(1 / (1 - static_cast<double>(least) / kSteps));
  const auto of_layer = static_cast<std::uint64_t>(layer) * kAdaptable.size() +
                        static_cast<std::uint64_t>(projection) + hash_name("lora dropout");
  const std::int64_t features = x.size(1), words = (dropout.width + 3) / 4;
  at::Tensor factors = at::empty({x.size(0), features}, at::kFloat);
  float* to = factors.mutable_data_ptr<float>();
  const at::Tensor positions = batch.positions.cpu();
  const auto* position = positions.const_data_ptr<std::int64_t>();
  parallel_for(0, batch.num_fragments(), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t f = first; f < last; ++f) {
      const auto fragment = static_cast<std::size_t>(f);
      const RandomKey key{.seed = dropout.seed,
                          .step = static_cast<std::uint64_t>(batch.draw),
                          .sample = static_cast<std::uint64_t>(batch.sample_ids[fragment]),
                          .layer = of_layer};
      for (std::int64_t t = batch.cu_seqlens[fragment]; t < batch.cu_seqlens[fragment + 1]; ++t) {
        std::uint64_t bits = 0;
        for (std::int64_t i = 0; i < features; ++i) {
          const std::int64_t feature = dropout.first + i;
          if (i == 0 || feature % 4 == 0)
            bits = random_bits(key, static_cast<std::uint64_t>(position[t] * words + feature / 4));
          to[t * features + i] = (bits >> (16 * (feature % 4)) & 0xffff) < least ? 0 : kept;
        }
      }
    }
  });
  return x * factors.to(x.device(), x.scalar_type());
}

std::string adapted_matrix(const std::string& name) {
  for (const std::string_view end : {kA, kB})
    if (name.ends_with(end)) {
      const std::string matrix = name.substr(0, name.size() - end.size());
      return is_stacked(matrix) ? matrix : matrix + ".weight";
    }
  return {};
}

LoraAdapter::LoraAdapter(const DecoderConfig& model, const LoraConfig& config,
                         const at::TensorOptions& options)
    : config_(config) {
  check(config);
  check(model);
  const auto add = [&](const std::string& folder, std::int64_t layer, Projection projection,
                       std::int64_t experts) {
    if (!config.adapts(projection)) return;
    const auto [out, in] = shape_of(model, layer, projection);
    std::vector<std::int64_t> a{config.rank, in}, b{out, config.rank};
    if (experts > 0) a.insert(a.begin(), experts), b.insert(b.begin(), experts);
    LowRank& update = updates_[{layer, projection}];
    update = {.a = at::zeros(a, options).requires_grad_(),
              .b = at::zeros(b, options).requires_grad_(),
              .scale = config.alpha / static_cast<double>(config.rank)};
    const std::string name = folder + std::string(matrix_of(projection).name);
    named_.emplace_back(name + std::string(kA), update.a);
    named_.emplace_back(name + std::string(kB), update.b);
  };
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    const std::string block = fmt::format("model.layers.{}.", layer);
    for (const Projection each :
         {Projection::kQuery, Projection::kKey, Projection::kValue, Projection::kOutput})
      add(block + "self_attn.", layer, each, 0);
    const bool routed = model.has_experts(layer);
    if (routed) check_experts(config);
    for (const Projection each : {Projection::kGate, Projection::kUp, Projection::kDown})
      add(block + (routed ? "mlp.experts." : "mlp."), layer, each, routed ? model.experts.count : 0);
    if (!routed || model.experts.shared_feed_forward == 0) continue;
    for (const Projection each : {Projection::kSharedGate, Projection::kSharedUp, Projection::kSharedDown})
      add(block + "mlp." + shared_expert_folder(model), layer, each, 0);
  }
  add("", 0, Projection::kHead, 0);
}

LoraAdapter::LoraAdapter(const DecoderConfig& model, const LoraConfig& config, at::ScalarType dtype,
                         std::uint64_t seed)
    : LoraAdapter(model, config, at::TensorOptions(dtype)) {
  for (auto& [name, tensor] : named_) initialize_lora(name, tensor, seed);
}

std::shared_ptr<LoraAdapter> LoraAdapter::without_values(const DecoderConfig& model, const LoraConfig& config,
                                                         at::ScalarType dtype) {
  return std::shared_ptr<LoraAdapter>(
      new LoraAdapter(model, config, at::TensorOptions(dtype).device(at::kMeta)));
}

const LowRank* LoraAdapter::find(std::int64_t layer, Projection projection) const {
  const auto found = updates_.find({layer, projection});
  return found == updates_.end() ? nullptr : &found->second;
}

std::shared_ptr<LoraAdapter> LoraAdapter::copy() const {
  auto made = std::make_shared<LoraAdapter>(*this);
  std::map<const c10::TensorImpl*, at::Tensor> copies;
  for (auto& [name, tensor] : made->named_) {
    const at::Tensor copied = tensor.detach().clone();
    copies[tensor.unsafeGetTensorImpl()] = copied;
    tensor = copied;
  }
  for (auto& [place, update] : made->updates_)
    update.a = copies.at(update.a.unsafeGetTensorImpl()),
    update.b = copies.at(update.b.unsafeGetTensorImpl());
  return made;
}

void merge(DecoderLM& model, const LoraAdapter& adapter) {
  const at::NoGradGuard no_grad;
  const NamedTensors of_model = model.named(), &parts = adapter.named();
  const double scale = adapter.config().alpha / static_cast<double>(adapter.config().rank);
  for (std::size_t i = 0; i < parts.size(); i += 2) {
    const std::string name = adapted_matrix(parts[i].first);
    const auto found = std::ranges::find(of_model, name, &NamedTensors::value_type::first);
    if (found == of_model.end())
      refuse("merging an adapter", fmt::format("an update of {}, which this model does not have", name),
             "a matrix of its own: a tied head is the embedding, which the adapter does not update",
             "Keep the adapter apart, or train one without unembed");
    at::Tensor weight = found->second;
    const auto exact = weight.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor a = parts[i].second.to(exact), b = parts[i + 1].second.to(exact);
    weight.copy_(weight.to(exact) + b.matmul(a) * scale);
  }
}

}  // namespace isograd
