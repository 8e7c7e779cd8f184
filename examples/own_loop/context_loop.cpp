// Your own loop with one sequence cut over context ranks: gradients are summed over them once, at the end.
#include <isograd/isograd.hpp>

#include <ATen/ATen.h>

#include <cstdio>

int main() {
  int wrong = 0;
  constexpr std::int64_t kLength = 12, kVocabulary = 7;
  const at::Tensor text = (at::arange(kLength) * 5 + 2) % kVocabulary;
  const at::Tensor start =
      at::cos(at::arange(kVocabulary * kVocabulary, at::kDouble)).view({kVocabulary, kVocabulary});
  // The shift by one is made on the whole sequence, before any cut.
  at::Tensor targets = at::full({kLength}, isograd::kIgnoreIndex, at::kLong);
  targets.narrow(0, 0, kLength - 1).copy_(text.narrow(0, 1, kLength - 1));

  isograd::run_ranks(3, [&](isograd::World& world) {  // all three are context ranks of one sequence
    at::Tensor table = start.clone().requires_grad_(true);
    at::Tensor idle = at::ones({4}, at::kDouble).requires_grad_(true);  // no gradient anywhere
    const std::int64_t cuts[] = {0, 5, 6, kLength}, begin = cuts[world.rank],
                       length = cuts[world.rank + 1] - begin;
    isograd::Batch batch;
    batch.tokens = text.narrow(0, begin, length);
    batch.targets = targets.narrow(0, begin, length);
    batch.cu_seqlens = {0, length};

    const std::int64_t valid = isograd::count_valid_tokens({batch}, world.group);
    const at::Tensor sum = isograd::cross_entropy_sum(at::embedding(table, batch.tokens), batch.targets);
    (sum / static_cast<double>(valid)).backward();
    isograd::sync_context_gradients({table, idle}, world.group);  // once a step, after the last backward

    at::Tensor alone = start.clone().requires_grad_(true);
    at::cross_entropy_loss(at::embedding(alone, text), targets).backward();
    const double error = (table.grad() - alone.grad()).norm().item<double>();
    if (world.rank == 0) std::printf("%ld tokens, gradient error %.1e\n", long(valid), error);
    if (error > 1e-14) wrong = 1;
  });
  return wrong;
}
