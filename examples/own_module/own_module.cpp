// A user's own torch::nn module, trained on three ranks as threads, with the gradient of one device.
#include <isograd/isograd.hpp>

#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tanh.h>

#include <cstdio>

// Predicts the next token from the current one.
struct Bigram : torch::nn::Module {
  at::Tensor table, output;
  Bigram(std::int64_t vocabulary, std::int64_t hidden) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);  // never keyed by a rank
    table = register_parameter("table", at::randn({vocabulary, hidden}, generator));
    output = register_parameter("output", at::randn({vocabulary, hidden}, generator) * 0.1);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    return at::linear(at::tanh(at::embedding(table, tokens)), output);
  }
};

// Rank r's part of a batch of uneven documents: 5 + 3 r tokens, each followed by its successor.
isograd::Batch make_batch(int rank, std::int64_t vocabulary) {
  isograd::Batch batch;
  const std::int64_t length = 5 + 3 * rank;
  batch.tokens = (at::arange(length) + rank) % vocabulary;
  batch.targets = (batch.tokens + 1) % vocabulary;
  batch.targets[length - 1] = isograd::kIgnoreIndex;  // the document ends here
  batch.positions = at::arange(length);
  batch.cu_seqlens = {0, length};
  batch.sample_ids = {rank};
  batch.sample_targets = {length - 1};
  return batch;
}

int main() {
  isograd::run_ranks(3, [](isograd::World& world) {
    const std::int64_t vocabulary = 11;
    Bigram model(vocabulary, 8);
    isograd::prepare_module(model, world.group);  // rank 0's values on every rank

    // {.stage = 1} or {.stage = 2} shards optimizer state and gradients, {.share_parameters = true} keeps one
    // copy.
    auto layout = isograd::bucketed(isograd::trainable_parameters(model), world.group);
    auto adamw = isograd::adamw({.learning_rate = 0.05});
    isograd::TokenMean mean;  // who divides, by what
    isograd::Step step(
        [&](const isograd::Batch& batch) -> isograd::LossTerms {
          return {{"cross_entropy", isograd::cross_entropy_sum(model.forward(batch.tokens), batch.targets)}};
        },
        *layout, mean, *adamw, {.max_norm = 1.0});

    for (int i = 0; i < 50; ++i) {
      auto report = step({make_batch(world.rank, vocabulary)});
      if (world.rank == 0 && (i % 10 == 0 || i == 49))
        std::printf("step %2d  loss %.4f  norm %.3f  targets %ld\n", i, report.loss, report.norm,
                    static_cast<long>(report.step_counts.targets));
    }
  });
}
