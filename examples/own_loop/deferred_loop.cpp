// A server's loop: calls arrive one by one, and only the last one tells that the step is complete.
#include <isograd/isograd.hpp>

#include <ATen/ATen.h>

#include <cstdio>

isograd::Batch make_batch(std::int64_t begin, std::int64_t end) {
  isograd::Batch batch;
  batch.tokens = batch.targets = at::arange(begin, end);
  batch.positions = at::arange(end - begin);
  batch.cu_seqlens = {0, end - begin};
  batch.sample_ids = {begin};
  batch.sample_targets = {end - begin};
  return batch;
}

at::Tensor token_losses(const at::Tensor& x, const at::Tensor& tokens) {
  return (x * tokens.to(at::kDouble) - 2).square();
}

int main() {
  int wrong = 0;
  isograd::run_ranks(2, [&](isograd::World& world) {
    at::Tensor x = at::full({}, 0.3, at::kDouble).requires_grad_(true);
    isograd::DeferredAccumulator accumulator(std::make_unique<isograd::TokenMean>(), world.group);
    const auto forward_backward = [&](const isograd::MicroBatches& batches) {
      for (const auto& batch : accumulator.begin_call(batches))
        accumulator.raw_loss({{"loss", token_losses(x, batch.tokens).sum()}}).backward();
    };
    // 20 tokens in three calls. Every rank makes each call, with nothing where it has nothing.
    forward_backward(world.rank == 0 ? isograd::MicroBatches{make_batch(0, 3)}
                                     : isograd::MicroBatches{make_batch(3, 4), make_batch(4, 9)});
    forward_backward(world.rank == 0 ? isograd::MicroBatches{} : isograd::MicroBatches{make_batch(9, 19)});
    forward_backward(world.rank == 0 ? isograd::MicroBatches{make_batch(19, 20)} : isograd::MicroBatches{});

    // optim_step: one reduction, one division, then clip and update.
    const auto step = accumulator.finish();
    world.group.all_reduce(x.mutable_grad());
    x.mutable_grad() *= step.gradient_scale;

    at::Tensor alone = x.detach().clone().requires_grad_(true);
    token_losses(alone, at::arange(20)).mean().backward();
    const double error = (x.grad() - alone.grad()).abs().item<double>();
    if (world.rank == 0)
      std::printf("loss %.6f of %ld tokens, gradient error %.1e\n", step.loss, long(step.step_counts.targets),
                  error);
    if (error > 1e-13) wrong = 1;
  });
  return wrong;
}
