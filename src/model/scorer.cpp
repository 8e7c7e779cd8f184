#include "model/scorer.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <cmath>

#include "isograd/random.hpp"

namespace isograd {

Scorer::Scorer(const ScorerShape& shape, const at::TensorOptions& options) {
  const auto add = [&](std::string name, at::IntArrayRef sizes) {
    named_.emplace_back(std::move(name), at::empty(sizes, options).requires_grad_(true));
  };
  for (std::int64_t layer = 0; layer <= shape.layers; ++layer) {
    const bool last = layer == shape.layers;
    const std::int64_t inputs = layer == 0 ? shape.features : shape.hidden, outputs = last ? 1 : shape.hidden;
    add(fmt::format("layers.{}.weight", layer), {outputs, inputs});
    if (!last || shape.output_bias) add(fmt::format("layers.{}.bias", layer), {outputs});
  }
}

Scorer::Scorer(const ScorerShape& shape, at::ScalarType dtype, std::uint64_t seed)
    : Scorer(shape, at::TensorOptions(dtype)) {
  const at::NoGradGuard no_grad;
  for (auto& [name, values] : named_) {
    if (values.dim() == 1) {
      values.zero_();
      continue;
    }
    at::Tensor drawn = at::empty(values.sizes(), at::kDouble);
    const RandomKey key{.seed = seed, .layer = hash_name(name)};
    const std::int64_t inputs = values.size(1);
    const double deviation = std::sqrt(2.0 / static_cast<double>(inputs));
    for (std::int64_t i = 0; i < drawn.numel(); ++i)
      drawn.data_ptr<double>()[i] = deviation * random_normal(key, static_cast<std::uint64_t>(i));
    values.copy_(drawn);
  }
}

std::shared_ptr<Scorer> Scorer::without_values(const ScorerShape& shape, at::ScalarType dtype) {
  return std::shared_ptr<Scorer>(new Scorer(shape, at::TensorOptions(dtype).device(at::kMeta)));
}

at::Tensor Scorer::scores(const at::Tensor& features) const {
  at::Tensor stream = features.to(named_.front().second.scalar_type());
  for (std::size_t i = 0; i < named_.size(); i += 2) {
    const at::Tensor& weight = named_[i].second;
    const at::Tensor bias = i + 1 < named_.size() ? named_[i + 1].second : at::Tensor();
    const bool last = i + 2 >= named_.size(), in_parts = i / 2 % 2 == 1;
    if (hooks_.reduce_from_tp && in_parts) {
      stream = hooks_.reduce_from_tp(at::linear(stream, weight));
      if (bias.defined()) stream = stream + bias;
    } else {
      stream = at::linear(hooks_.copy_to_tp && !last ? hooks_.copy_to_tp(stream) : stream, weight, bias);
    }
    if (!last) stream = at::relu(stream);
  }
  return stream;
}

}  // namespace isograd
