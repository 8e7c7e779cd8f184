#include "model/scorer.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>

#include "isograd/random.hpp"

namespace isograd {

Scorer::Scorer(const ScorerShape& shape, at::ScalarType dtype, std::uint64_t seed) {
  for (std::int64_t layer = 0; layer <= shape.layers; ++layer) {
    const bool last = layer == shape.layers;
    const std::int64_t inputs = layer == 0 ? shape.features : shape.hidden, outputs = last ? 1 : shape.hidden;
    const std::string name = fmt::format("layers.{}.weight", layer);
    at::Tensor weight = at::empty({outputs, inputs}, at::kDouble);
    const RandomKey key{.seed = seed, .layer = hash_name(name)};
    const double deviation = std::sqrt(2.0 / static_cast<double>(inputs));
    for (std::int64_t i = 0; i < weight.numel(); ++i)
      weight.data_ptr<double>()[i] = deviation * random_normal(key, static_cast<std::uint64_t>(i));
    named_.emplace_back(name, weight.to(dtype).requires_grad_(true));
    if (last && !shape.output_bias) break;
    named_.emplace_back(fmt::format("layers.{}.bias", layer),
                        at::zeros({outputs}, at::TensorOptions(dtype)).requires_grad_(true));
  }
}

at::Tensor Scorer::scores(const at::Tensor& features) const {
  at::Tensor stream = features.to(named_.front().second.scalar_type());
  for (std::size_t i = 0; i < named_.size(); i += 2) {
    stream =
        at::linear(stream, named_[i].second, i + 1 < named_.size() ? named_[i + 1].second : at::Tensor());
    if (i + 2 < named_.size()) stream = at::relu(stream);
  }
  return stream;
}

}  // namespace isograd
