// Someone's own loop under every strategy: a loss that is a mean over the micro-batch, and micro-batches and
// ranks that have nothing to take a mean of.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "isograd/fully_shard.hpp"
#include "isograd/module.hpp"
#include "isograd/own_loop.hpp"
#include "isograd/world.hpp"
#include "toy.hpp"

namespace isograd {
namespace {

struct Net : torch::nn::Module {
  at::Tensor table, output;
  Net() {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(3);
    const auto make = [&](const char* name, at::IntArrayRef shape) {
      return register_parameter(name, at::randn(shape, generator, at::TensorOptions(at::kDouble)));
    };
    table = make("table", {toy::kVocabulary, toy::kHidden});
    output = make("output", {toy::kVocabulary, toy::kHidden});
  }
  at::Tensor forward(at::Tensor tokens) { return at::linear(at::tanh(at::embedding(table, tokens)), output); }
};

// Its derivative over nothing is 0 / 0.
at::Tensor mean_of(const at::Tensor& logits, const at::Tensor& targets) {
  const at::Tensor mask = targets.ne(kIgnoreIndex);
  const at::Tensor nll = -at::log_softmax(logits, 1).gather(1, targets.clamp_min(0).unsqueeze(1)).squeeze(1);
  return (nll * mask).sum() / mask.sum();
}

// Rank 1 has no target at all, the others none in their second micro-batch.
Batch micro_batch(int rank, int round) {
  return toy::make_batch({5 + 3 * rank, 4 + round}, 10 * rank + 2 * round, rank == 1 || round == 1);
}

TEST(OwnLoop, AMeanOverNothingLeavesNoNaNUnderAnyStrategy) {
  constexpr int kRanks = 3, kRounds = 3;
  std::vector<MicroBatches> all(kRanks);
  for (int rank = 0; rank < kRanks; ++rank)
    for (int round = 0; round < kRounds; ++round) all[rank].push_back(micro_batch(rank, round));
  const Batch whole = toy::concatenate(all);
  Net alone;
  at::cross_entropy_loss(alone.forward(whole.tokens), whole.targets).backward();
  const std::vector<at::Tensor> wanted = {alone.table.grad(), alone.output.grad()};

  constexpr int kNaive = -1, kZero3 = 3;
  for (int stage = kNaive; stage <= kZero3; ++stage)
    run_ranks(kRanks, [&](World& world) {
      const Sharded<Net> model(std::make_shared<Net>());
      std::unique_ptr<DataParallel> layout;
      if (stage == kZero3)
        layout = fully_shard(model, {}, world.group);
      else if (stage == kNaive)
        layout = naive(trainable_parameters(*model), world.group);
      else
        layout = bucketed(trainable_parameters(*model), world.group, {.stage = stage, .bucket_bytes = 300});
      const MicroBatches& own = all[static_cast<std::size_t>(world.rank)];
      const std::int64_t valid = count_valid_tokens(own, world.group);
      EXPECT_EQ(valid, whole.num_targets());
      for (int step = 0; step < 2; ++step) {
        layout->zero_gradients();
        for (int round = 0; round < kRounds; ++round) {
          const Batch& batch = own[static_cast<std::size_t>(round)];
          const at::Tensor mean = mean_of(model(batch.tokens), batch.targets);
          layout->begin_backward(round + 1 == kRounds);
          gradient_accumulate_loss(mean, batch.num_targets(), valid, world.group).backward();
        }
        layout->finish_reduction();
        const auto views = layout->views();
        for (std::size_t i = 0; i < wanted.size(); ++i)
          EXPECT_LT((views[i].gradient - wanted[i]).norm().item<double>(), 1e-13)
              << "stage " << stage << ", " << views[i].name;
      }
    });
}

}  // namespace
}  // namespace isograd
