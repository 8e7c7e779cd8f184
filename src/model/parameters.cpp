#include "model/parameters.hpp"

#include "isograd/random.hpp"
#include "kernels/threads/parallel_for.hpp"
#include "model/hooks.hpp"

namespace isograd {
namespace {

template <typename T>
void fill(at::Tensor& values, double range, const RandomKey& key) {
  T* to = values.mutable_data_ptr<T>();
  // Each value by its own place: the bits do not depend on the threads. One thread takes 23 s for 200 M
  // values.
  constexpr std::int64_t kGrain = 1 << 16;
  parallel_for(0, values.numel(), kGrain, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i)
      to[i] = static_cast<T>(static_cast<std::conditional_t<std::is_same_v<T, double>, double, float>>(
          range * random_normal(key, static_cast<std::uint64_t>(i))));
  });
}

}  // namespace

torch::nn::Module& ParameterMaker::module(const std::string& name) {
  if (const auto known = made_.find(name); known != made_.end()) return *known->second;
  const auto dot = name.rfind('.');
  const std::string own = dot == std::string::npos ? name : name.substr(dot + 1);
  torch::nn::Module& parent = module(dot == std::string::npos ? "" : name.substr(0, dot));
  return *(made_[name] = parent.register_module(own, std::make_shared<torch::nn::Module>(own)).get());
}

at::Tensor ParameterMaker::operator()(const std::string& name, at::IntArrayRef shape, bool trained) {
  const bool widens = !trained && options_.dtype() != at::kDouble;
  const at::Tensor made =
      at::empty(shape, widens ? options_.dtype(at::kFloat) : options_).requires_grad_(trained);
  const auto dot = name.rfind('.');
  module(dot == std::string::npos ? "" : name.substr(0, dot))
      .register_parameter(dot == std::string::npos ? name : name.substr(dot + 1), made, trained);
  in_order_.emplace_back(name, made);
  return made;
}

Linear ParameterMaker::linear(const std::string& name, std::int64_t out, std::int64_t in, bool bias) {
  Linear made{.weight = (*this)(name + ".weight", {out, in}), .bias = {}};
  if (bias) made.bias = (*this)(name + ".bias", {out});
  return made;
}

void check_attention(const Batch& batch, bool has_attention) {
  if (batch.cut && !has_attention)
    refuse(
        "batch for the model",
        fmt::format("a part of a batch that is cut over {} context ranks, and attention that knows no ranks",
                    batch.cut->pieces.size()),
        "attention over the context ranks", "Give the model a ContextAttention (set_attention)");
}

ReferenceModel::ReferenceModel(std::string blocks)
    : hooks_(std::make_shared<ModelHooks>()), blocks_(std::move(blocks)) {}

std::vector<at::Tensor> ReferenceModel::block_parameters(std::int64_t layer) const {
  std::vector<at::Tensor> parameters;
  const std::string prefix = fmt::format("{}{}.", blocks_, layer);
  for (const auto& [name, tensor] : named_)
    if (name.starts_with(prefix)) parameters.push_back(tensor);
  return parameters;
}

void fill_normal(at::Tensor& values, double range, std::uint64_t seed, const std::string& name) {
  const at::NoGradGuard no_grad;
  const RandomKey key{.seed = seed, .layer = hash_name(name)};
  if (values.scalar_type() == at::kDouble)
    fill<double>(values, range, key);
  else if (values.scalar_type() == at::kFloat)
    fill<float>(values, range, key);
  else
    fill<at::BFloat16>(values, range, key);
}

void check_model_dtype(at::ScalarType dtype) {
  if (dtype != at::kDouble && dtype != at::kFloat && dtype != at::kBFloat16)
    refuse("the model's dtype", c10::toString(dtype), "Double, Float or BFloat16", "Choose one of them");
}

void check_finite(const std::filesystem::path& file, const std::string& name, const at::Tensor& values) {
  const at::Tensor finite = values.isfinite();
  if (finite.all().item<bool>()) return;
  const at::Tensor others = finite.logical_not().nonzero();
  const at::Tensor first = others[0].contiguous();
  const at::ArrayRef<std::int64_t> place(first.data_ptr<std::int64_t>(),
                                         static_cast<std::size_t>(first.numel()));
  refuse(file.string() + ": " + name,
         fmt::format("{} of {} values that are not finite as {}, the first at {}", others.size(0),
                     values.numel(), c10::toString(values.scalar_type()), c10::str(place)),
         "finite weights",
         "Load weights from before they diverged, or in a type that holds them (train.dtype)");
}

}  // namespace isograd
