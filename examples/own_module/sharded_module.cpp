// A user's own torch::nn module under ZeRO-3: each of three ranks keeps a third of the parameters, gradients
// and optimizer state, and gathers one block at a time while it is used. The loss is that of one process.
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tanh.h>
#include <isograd/isograd.hpp>

#include <cstdio>

constexpr std::int64_t kVocabulary = 11, kHidden = 8, kBlocks = 4;

struct Block : torch::nn::Module {
  at::Tensor weight, bias;
  explicit Block(at::Generator& generator) {
    weight = register_parameter("weight", at::randn({kHidden, kHidden}, generator) * 0.3);
    bias = register_parameter("bias", at::zeros({kHidden}));
  }
  at::Tensor forward(at::Tensor x) { return x + at::tanh(at::linear(x, weight, bias)); }
};

struct Model : torch::nn::Module {
  at::Tensor table, output;
  std::vector<isograd::Sharded<Block>> blocks;  // instead of std::shared_ptr<Block>
  Model() {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);  // never keyed by a rank
    table = register_parameter("table", at::randn({kVocabulary, kHidden}, generator));
    output = register_parameter("output", at::randn({kVocabulary, kHidden}, generator) * 0.1);
    for (std::int64_t i = 0; i < kBlocks; ++i)
      blocks.emplace_back(register_module("block" + std::to_string(i), std::make_shared<Block>(generator)));
  }
  at::Tensor forward(at::Tensor tokens) {
    at::Tensor x = at::embedding(table, tokens);
    for (auto& block : blocks) x = block(x);
    return at::linear(x, output);
  }
};

// Tokens of rank `rank`: 5 + 3 rank of them, each followed by its successor.
at::Tensor tokens_of(int rank) { return (at::arange(5 + 3 * rank) + rank) % kVocabulary; }

// Trains for 40 steps on the batches of `ranks` ranks; returns the last loss.
double train(isograd::World& world, int ranks) {
  const auto module = std::make_shared<Model>();
  isograd::prepare_module(*module, world.group);  // one model on all ranks, nothing in it that breaks the law
  isograd::Sharded<Model> model(module);
  auto layout = isograd::fully_shard(model, model->blocks, world.group);
  auto adamw = isograd::adamw({.learning_rate = 0.05});
  // Targets of all ranks, by which each share is divided; isograd::Step would count and divide for us.
  double global = 0;
  for (int rank = 0; rank < ranks; ++rank) global += static_cast<double>(tokens_of(rank).numel());
  at::Tensor loss = at::zeros({1});
  for (int step = 0; step < 40; ++step) {
    layout->zero_gradients();
    loss.zero_();
    for (int rank = world.rank; rank < ranks; rank += world.size) {  // one batch each, or all of them
      const at::Tensor tokens = tokens_of(rank), targets = (tokens + 1) % kVocabulary;
      const at::Tensor share = isograd::cross_entropy_sum(model(tokens), targets) / global;
      layout->begin_backward(rank + world.size >= ranks);
      share.backward();
      loss += share.detach();
    }
    layout->finish_reduction();
    adamw->update(layout->buckets(), /*gradient_scale=*/1);
    layout->publish_parameters();
  }
  world.group.all_reduce(loss);
  return loss.item<double>();
}

int main() {
  std::vector<double> losses(3);
  isograd::run_ranks(3, [&](isograd::World& world) { losses[world.rank] = train(world, 3); });
  isograd::World one;
  const double sharded = losses[0], alone = train(one, 3);
  std::printf("loss after 40 steps: three ranks %.6f, one process %.6f\n", sharded, alone);
  return alone < 0.1 && std::abs(sharded - alone) < 1e-3 * alone ? 0 : 1;
}
