// Your own loop and a loss that comes as a mean: count once, scale each mean, sum the gradients.
#include <isograd/isograd.hpp>

#include <ATen/ATen.h>
#include <cstdio>

constexpr std::int64_t kVocabulary = 11;

// 4 tokens on rank 0, 9 on rank 1, 14 on rank 2; the last one of each carries no loss.
isograd::Batch make_batch(int rank, int micro_batch) {
  isograd::Batch batch;
  const std::int64_t length = 4 + 5 * rank + micro_batch;
  batch.tokens = (at::arange(length) * (rank + 2)) % kVocabulary;
  batch.targets = (batch.tokens * 3 + 1) % kVocabulary;
  batch.targets[length - 1] = isograd::kIgnoreIndex;
  batch.cu_seqlens = {0, length};
  return batch;
}

// The loss as most code has it: a mean over the valid tokens at hand.
at::Tensor mean_loss(const at::Tensor& table, const isograd::Batch& batch) {
  return at::cross_entropy_loss(at::embedding(table, batch.tokens), batch.targets);
}

int main() {
  int wrong = 0;
  isograd::run_ranks(3, [&](isograd::World& world) {
    at::Tensor table =
        at::sin(at::arange(kVocabulary * kVocabulary, at::kDouble)).view({kVocabulary, kVocabulary});
    table.requires_grad_(true);  // the same on every rank
    const isograd::MicroBatches batches = {make_batch(world.rank, 0), make_batch(world.rank, 1)};

    const std::int64_t valid =
        isograd::count_valid_tokens(batches, world.group);  // of all ranks, before any forward
    double loss = 0;
    for (const auto& batch : batches) {
      auto share =
          isograd::gradient_accumulate_loss(mean_loss(table, batch), batch.num_targets(), valid, world.group);
      share.backward();
      loss += share.item<double>();
    }
    world.group.all_reduce(table.mutable_grad());  // SUM. Never an average

    // One process on the whole batch.
    at::Tensor tokens = at::empty({0}, at::kLong), targets = tokens;
    for (int rank = 0; rank < world.size; ++rank)
      for (int i = 0; i < 2; ++i) {
        tokens = at::cat({tokens, make_batch(rank, i).tokens});
        targets = at::cat({targets, make_batch(rank, i).targets});
      }
    at::Tensor alone = table.detach().clone().requires_grad_(true);
    at::cross_entropy_loss(at::embedding(alone, tokens), targets).backward();
    const double error = (table.grad() - alone.grad()).norm().item<double>();
    if (world.rank == 0)
      std::printf("loss %.6f of %ld tokens, gradient error %.1e\n", loss, long(valid), error);
    if (error > 1e-14) wrong = 1;
  });
  return wrong;
}
