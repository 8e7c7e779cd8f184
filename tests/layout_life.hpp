// A small model under every strategy, and the same in one process with plain autograd.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "isograd/fully_shard.hpp"
#include "isograd/optimizer.hpp"
#include "isograd/world.hpp"
#include "parallel/data/strategies_testing.hpp"

namespace isograd::layout_life {

inline const double kExact = 1e-10;  // E1

inline at::Tensor drawn(at::IntArrayRef shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kDouble)) * 0.4;
}

struct Block : torch::nn::Module {
  at::Tensor mid, shift;
  explicit Block(at::ScalarType type) {
    mid = register_parameter("mid", drawn({6, 6}, 3).to(type));
    shift = register_parameter("shift", drawn({6}, 4).to(type));
  }
  at::Tensor forward(at::Tensor x) { return at::tanh(at::linear(x, mid, shift)); }
};

// Registered in another order than that of the gradients: table, out, block, whereas out comes first.
struct Net : torch::nn::Module {
  at::Tensor table, out, target;  // target: what a stop-gradient tie reads
  Sharded<Block> block;
  bool sparse = false;
  explicit Net(at::ScalarType type = at::kDouble) : block(std::make_shared<Block>(type)) {
    table = register_parameter("table", drawn({7, 6}, 1).to(type));
    out = register_parameter("out", drawn({7, 6}, 2).to(type));
    register_module("block", block.ptr());
  }
  at::Tensor forward(at::Tensor tokens) {
    const at::Tensor h = block(at::embedding(table, tokens, -1, false, sparse));
    const at::Tensor logits = at::linear(h, out);
    return target.defined() ? logits + at::linear(h * h, target) : logits;
  }
  std::vector<std::pair<std::string, at::Tensor>> named() const {
    std::vector<std::pair<std::string, at::Tensor>> list;
    for (auto& item : named_parameters()) list.emplace_back(item.key(), item.value());
    return list;
  }
  at::Tensor find(const std::string& name) const { return named_parameters()[name]; }
};

// Rank r's tokens in a step; every third rank has none.
inline at::Tensor tokens(int rank, int step) {
  const std::int64_t length = rank % 3 == 2 ? 0 : 3 + (2 * rank + step) % 5;
  return (at::arange(length) * (step + 2) + rank) % 7;
}

template <typename Model>
at::Tensor loss_of(Model& model, int rank, int step) {
  const at::Tensor in = tokens(rank, step), logits = model(in);
  const at::Tensor nll = at::cross_entropy_loss(logits.to(at::kDouble), (in + 1) % 7, {}, at::Reduction::Sum);
  return nll / 20.0;
}

struct Way {
  std::string name;
  std::function<std::unique_ptr<DataParallel>(const Sharded<Net>&, const Mesh&)> make;
  bool shared = false, units = false;
};

inline std::vector<Way> ways() {
  std::vector<Way> all;
  for (const testing::Strategy& strategy : testing::strategies())
    all.push_back({strategy.name,
                   [strategy](const Sharded<Net>& net, const Mesh& mesh) {
                     return strategy.make(trainable_parameters(net->named()), mesh, {.bucket_bytes = 700});
                   },
                   strategy.share});
  for (const auto& [name, options] :
       std::vector<std::pair<std::string, FullyShardOptions>>{{"zero3", {}},
                                                              {"zero3 once", {.reduce_once = true}},
                                                              {"zero3 shared", {.share_parameters = true}}})
    all.push_back({name,
                   [options](const Sharded<Net>& net, const Mesh& mesh) {
                     return fully_shard(net, {net->block}, mesh, options);
                   },
                   options.share_parameters, /*units=*/true});
  return all;
}

// Gradients of one step; `micro` backwards.
inline void backward(DataParallel& layout, const Sharded<Net>& net, int rank, int step) {
  layout.zero_gradients();
  const at::Tensor loss = loss_of(net, rank, step);
  layout.begin_backward(true);
  loss.backward();
  layout.finish_reduction();
}

inline void update(DataParallel& layout, Optimizer& optimizer) {
  optimizer.update(layout.buckets(), 1);
  layout.publish_parameters();
}

// The reference's tensors for what views() gives under `key`.
inline double worst(DataParallel& layout, Net& wanted, at::Tensor DataParallel::View::*key) {
  double error = 0;
  for (const auto& view : layout.views()) {
    const at::Tensor value = wanted.find(view.name);
    const at::Tensor expected =
        key == &DataParallel::View::gradient
            ? (value.grad().defined() ? value.grad() : at::zeros_like(value)).to_dense()
            : value.detach();
    const double scale = std::max(expected.norm().item<double>(), 1e-3);
    const double off = ((view.*key).to(at::kDouble) - expected).norm().item<double>() / scale;
    error = std::isfinite(off) ? std::max(error, off) : HUGE_VAL;
  }
  return error;
}

// One process: gradients of all ranks' losses, in .grad.
inline void reference_backward(Net& net, int ranks, int step) {
  const auto call = [&](const at::Tensor& in) { return net.forward(in); };
  for (int rank = 0; rank < ranks; ++rank) loss_of(call, rank, step).backward();
}
inline void clear(Net& net) {
  for (auto& [name, tensor] : net.named()) at::Tensor(tensor).mutable_grad() = at::Tensor();
}
inline void descend(Net& net, double rate) {
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : net.named())
    if (tensor.grad().defined()) at::Tensor(tensor).sub_(tensor.grad(), rate);
}

}  // namespace isograd::layout_life
