// A small torch::nn model with every kind of parameter that sharding must get right, uneven batches for it,
// and the reference: plain autograd in one process over all batches, by code of its own.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <map>

#include "isograd/fully_shard.hpp"
#include "parallel/data/strategies_testing.hpp"
#include "toy.hpp"

namespace isograd::zero3 {

inline constexpr std::int64_t kVocabulary = 13, kHidden = 7;  // odd: no size is a multiple of a rank count

// Called where ranks can get out of step; tests put delays and exceptions there.
inline thread_local std::function<void(const char* place)> at_place;

struct Block : torch::nn::Module {
  at::Tensor weight, bias, scale, frozen, sometimes, unused;
  Block(std::int64_t index, at::ScalarType type, at::Device device = at::kCPU) {
    const auto make = [&](const char* name, at::IntArrayRef shape, std::int64_t key, bool trained = true) {
      auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * index + key);
      const at::Tensor values = at::randn(shape, generator, at::TensorOptions(at::kDouble)) * 0.4;
      return register_parameter(name, values.to(type).to(device), trained);
    };
    weight = make("weight", {kHidden, kHidden}, 1);
    bias = make("bias", {kHidden}, 2);
    scale = make("scale", {1}, 3);
    frozen = make("frozen", {kHidden}, 4, false);
    sometimes = make("sometimes", {kHidden}, 5);
    unused = make("unused", {2, 3}, 6);
  }
  at::Tensor forward(at::Tensor x, bool odd) {
    if (at_place) at_place("block");
    at::Tensor y = at::tanh(at::linear(x, weight, bias)) * scale + x * frozen;
    return odd ? y + sometimes : y;
  }
};

// The blocks that forward calls, one after another; the one at `tied` uses the embedding too.
struct Model : torch::nn::Module {
  at::Tensor embedding, gain, frozen, unused;
  std::vector<Sharded<Block>> blocks;
  std::vector<std::size_t> order;
  std::vector<std::size_t> skip;  // positions in `order` that this rank leaves out
  bool constant = false;          // forward gives something that depends on no parameter

  explicit Model(at::ScalarType type = at::kDouble, std::vector<std::size_t> order_ = {0, 1, 0, 2, 2},
                 at::Device device = at::kCPU)
      : order(std::move(order_)) {
    const auto make = [&](const char* name, at::IntArrayRef shape, std::int64_t key, bool trained = true) {
      auto generator = at::make_generator<at::CPUGeneratorImpl>(5000 + key);
      const at::Tensor values = at::randn(shape, generator, at::TensorOptions(at::kDouble)) * 0.4;
      return register_parameter(name, values.to(type).to(device), trained);
    };
    embedding = make("embedding", {kVocabulary, kHidden}, 1);
    gain = make("gain", {1}, 2);
    frozen = make("frozen", {kHidden}, 3, false);
    unused = make("unused", {3, 5}, 4);
    for (std::int64_t i = 0; i < 3; ++i)
      blocks.emplace_back(
          register_module("block" + std::to_string(i), std::make_shared<Block>(i, type, device)));
  }

  at::Tensor forward(at::Tensor tokens, bool odd) {
    if (constant) return at::zeros({1}, embedding.options().requires_grad(false));
    at::Tensor x = at::embedding(embedding, tokens) + frozen;
    for (std::size_t i = 0; i < order.size(); ++i)
      if (std::find(skip.begin(), skip.end(), i) == skip.end()) x = blocks[order[i]](x, odd);
    return at::linear(x, embedding) * gain;
  }

  std::vector<UnitHandle> uses() const {
    std::vector<UnitHandle> handles;
    for (std::size_t i : order) handles.push_back(blocks[i]);
    return handles;
  }
};

// A strategy: on flat buckets of the model's parameters, or on its blocks as units.
struct Way {
  std::string name;
  std::function<std::unique_ptr<DataParallel>(const Sharded<Model>&, const Mesh&)> make;
  bool sharded = false;  // so that there may be replicas
  bool units = false;
};
inline std::vector<Way> unit_ways() {
  std::vector<Way> all;
  for (const auto& [name, options] : std::vector<std::pair<std::string, FullyShardOptions>>{
           {"zero3", {}},
           {"zero3 without prefetch", {.prefetch = false}},
           {"zero3, root freed", {.reshard_root = true}},
           {"zero3, blocks kept", {.reshard_after_forward = false}},
           {"zero3 checkpointed", {.checkpoint = true}},
           {"zero3 once", {.reduce_once = true}},
           {"zero3 shared", {.share_parameters = true}},
           {"zero3 shared once", {.reduce_once = true, .share_parameters = true}}})
    all.push_back({name,
                   [options](const Sharded<Model>& model, const Mesh& mesh) {
                     return fully_shard(model, model->uses(), mesh, options);
                   },
                   true, true});
  return all;
}
inline std::vector<Way> ways(std::int64_t bucket_bytes = 300, bool overlap = true) {
  std::vector<Way> all;
  for (const testing::Strategy& strategy : testing::strategies())
    all.push_back({strategy.name,
                   [=](const Sharded<Model>& model, const Mesh& mesh) {
                     return strategy.make(trainable_parameters(*model), mesh,
                                          {.bucket_bytes = bucket_bytes, .overlap = overlap});
                   },
                   strategy.sharded()});
  for (Way& way : unit_ways()) all.push_back(std::move(way));
  return all;
}
inline Mesh replicas_of(const World& world, int replicas) {
  return Mesh(world, data_grid(world.size, {.dp_replicate = replicas}));
}

struct Batch {
  at::Tensor tokens, targets;  // [T], T may be 0
  bool odd = false;
};

// Rank 1 has no token at all, the others different numbers; `odd` ones use a parameter that others do not.
inline std::int64_t length_of(int rank, int step, int micro) {
  return rank == 1 ? 0 : 2 + (3 * rank + 5 * micro + step) % 7;
}
inline Batch batch(int rank, int step, int micro) {
  const std::int64_t length = length_of(rank, step, micro);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 * rank + 10 * step + micro);
  const auto draw = [&] {
    return at::randint(0, kVocabulary, {length}, generator, at::TensorOptions(at::kLong));
  };
  Batch made{.tokens = draw(), .targets = {}, .odd = (rank + micro) % 3 == 2};
  made.targets = draw();
  return made;
}

inline std::int64_t count(int ranks, int step, int micros) {
  std::int64_t sum = 0;
  for (int rank = 0; rank < ranks; ++rank)
    for (int micro = 0; micro < micros; ++micro) sum += length_of(rank, step, micro);
  return sum;
}

inline at::Tensor loss(const at::Tensor& logits, const Batch& from, std::int64_t global) {
  return at::cross_entropy_loss(logits, from.targets, {}, at::Reduction::Sum) / static_cast<double>(global);
}

// One process, no isograd: parameters by name, the forward written out, gradients by plain autograd.
struct Reference {
  std::map<std::string, at::Tensor> p;
  std::vector<std::size_t> order;

  explicit Reference(const Model& model) : order(model.order) {
    for (auto& item : model.named_parameters())
      p[item.key()] = item.value().detach().clone().requires_grad_(item.value().requires_grad());
  }
  at::Tensor forward(const Batch& from, const std::vector<std::size_t>& skip = {}) const {
    at::Tensor x = at::embedding(p.at("embedding"), from.tokens) + p.at("frozen");
    for (std::size_t i = 0; i < order.size(); ++i) {
      if (std::find(skip.begin(), skip.end(), i) != skip.end()) continue;
      const std::string b = "block" + std::to_string(order[i]) + ".";
      at::Tensor y = at::tanh(at::linear(x, p.at(b + "weight"), p.at(b + "bias"))) * p.at(b + "scale");
      y = y + x * p.at(b + "frozen");
      x = from.odd ? y + p.at(b + "sometimes") : y;
    }
    return at::linear(x, p.at("embedding")) * p.at("gain");
  }
  // By name, of trained parameters; zeros where unused.
  std::map<std::string, at::Tensor> gradients(int ranks, int step, int micros) const {
    at::Tensor sum = at::zeros({}, at::kDouble);
    const std::int64_t global = count(ranks, step, micros);
    for (int rank = 0; rank < ranks; ++rank)
      for (int micro = 0; micro < micros; ++micro) {
        const Batch from = batch(rank, step, micro);
        if (from.tokens.numel() > 0) sum = sum + loss(forward(from), from, global);
      }
    return gradients_of(sum);
  }
  std::map<std::string, at::Tensor> gradients_of(const at::Tensor& sum) const {
    std::vector<at::Tensor> leaves;
    std::vector<std::string> names;
    for (const auto& [name, tensor] : p)
      if (tensor.requires_grad()) {
        names.push_back(name);
        leaves.push_back(tensor);
      }
    const auto found = torch::autograd::grad({sum}, leaves, {}, false, false, /*allow_unused=*/true);
    std::map<std::string, at::Tensor> result;
    for (std::size_t i = 0; i < names.size(); ++i)
      result[names[i]] = found[i].defined() ? found[i] : at::zeros_like(leaves[i].detach());
    return result;
  }
};

// The step's gradients of this rank in `layout`.
inline void accumulate(DataParallel& layout, const Sharded<Model>& model, int rank, int ranks, int step,
                       int micros) {
  layout.zero_gradients();
  const std::int64_t global = count(ranks, step, micros);
  for (int micro = 0; micro < micros; ++micro) {
    const Batch from = batch(rank, step, micro);
    if (at_place) at_place("forward");
    const at::Tensor share = loss(model(from.tokens, from.odd), from, global);
    layout.begin_backward(micro + 1 == micros);
    if (at_place) at_place("backward");
    share.backward();
  }
  if (at_place) at_place("finish");
  layout.finish_reduction();
}

// Largest error over the parameters in units of the E1 scale (architecture: s = max(|g|, 1e-3 RMS sqrt(n))).
inline double worst_error(DataParallel& layout, const std::map<std::string, at::Tensor>& wanted) {
  std::vector<at::Tensor> found, expected;
  for (const DataParallel::View& view : layout.views()) {
    found.push_back(view.gradient);
    expected.push_back(wanted.at(view.name));
  }
  return found.size() == wanted.size() ? toy::worst_error(found, expected) : HUGE_VAL;
}

}  // namespace isograd::zero3
