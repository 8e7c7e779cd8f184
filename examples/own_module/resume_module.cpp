// A module that is saved and resumed: a run of 40 steps and one that was stopped after 20 have the same bits.
// Two ranks then go on with it.
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <isograd/isograd.hpp>

#include <cstdio>

namespace fs = std::filesystem;
constexpr std::int64_t kVocabulary = 11;

struct BigramImpl : torch::nn::Module {
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear output{nullptr};
  BigramImpl() {
    table = register_module("table", torch::nn::Embedding(kVocabulary, 8));
    output = register_module("output", torch::nn::Linear(8, kVocabulary));
  }
  at::Tensor forward(const at::Tensor& tokens) { return output(at::tanh(table(tokens))); }
};
TORCH_MODULE(Bigram);

// Rank r's part of step i: 5 + 3 r tokens, each followed by its successor.
isograd::Batch make_batch(std::int64_t step, int rank) {
  const std::int64_t length = 5 + 3 * rank;
  isograd::Batch batch = isograd::empty_batch();
  batch.tokens = (at::arange(length) + step + rank) % kVocabulary;
  batch.targets = (batch.tokens + 1) % kVocabulary;
  batch.positions = at::arange(length);
  batch.cu_seqlens = {0, length};
  batch.sample_ids = {rank};
  batch.sample_targets = {length};
  return batch;
}

// Goes on where `root` has stopped, up to step `last`. Returns the loss of an unseen batch.
double train(isograd::World& world, const fs::path& root, std::int64_t last) {
  Bigram model;
  isograd::read_weights("resume.run/start", model);  // the same on every rank
  isograd::prepare_module(model, world.group);
  auto layout = isograd::bucketed(isograd::trainable_parameters(model), world.group, {.stage = 2});
  auto adamw = isograd::adamw({});
  isograd::TokenMean mean;
  const auto loss_sum = [&](const isograd::Batch& batch) {
    return isograd::cross_entropy_sum(model->forward(batch.tokens), batch.targets);
  };
  isograd::Step step(loss_sum, *layout, mean, *adamw, {.max_norm = 1.0});
  const isograd::Schedule schedule{.peak = 0.05, .warmup = 5, .total = 40};

  std::int64_t i = isograd::load_checkpoint(root, model, *layout, *adamw);  // 0: there is none yet
  for (; i < last; ++i) {
    adamw->set_learning_rate(schedule.at(i));
    step(make_batch(i, world.rank));
    if (i % 10 == 9) isograd::save_checkpoint({.root = root}, i + 1, model, *layout, *adamw);
  }
  isograd::write_weights(root / "weights", model, *layout);
  return isograd::evaluate(loss_sum, mean, *layout, {make_batch(1000, world.rank)}).loss;
}

int main() {
  fs::remove_all("resume.run");
  isograd::write_weights("resume.run/start", Bigram());
  std::vector<double> straight(3), stopped(3), on_two(2);
  const auto run = [](int ranks, const char* root, std::int64_t last, std::vector<double>& losses) {
    isograd::run_ranks(ranks, [&](isograd::World& world) { losses[world.rank] = train(world, root, last); });
  };
  run(3, "resume.run/straight", 40, straight);
  run(3, "resume.run/stopped", 20, stopped);
  run(3, "resume.run/stopped", 40, stopped);
  run(2, "resume.run/stopped", 60, on_two);  // other ranks, and further than was planned
  std::printf("loss of unseen tokens: %.9g without a stop, %.9g resumed; 20 steps more on 2 ranks: %.3g\n",
              straight[0], stopped[0], on_two[0]);
  fs::remove_all("resume.run");
  return straight == stopped && on_two[0] < stopped[0] ? 0 : 1;
}
