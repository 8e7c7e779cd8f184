// Your own loop and the per-sample mean, with a sample that lies on several ranks.
#include <isograd/isograd.hpp>

#include <ATen/ATen.h>

#include <cstdio>

// Tokens [begin, end) of a video of `length` frames; one regression loss a frame.
isograd::Batch make_batch(std::int64_t id, std::int64_t length, std::int64_t begin, std::int64_t end) {
  isograd::Batch batch;
  batch.tokens = batch.targets = at::arange(begin, end);  // any value but kIgnoreIndex: the frame is valid
  batch.positions = at::arange(end - begin);
  batch.cu_seqlens = {0, end - begin};
  batch.sample_ids = {id};
  batch.sample_targets = {length};  // in the whole step: this is how a rank knows that the rest is elsewhere
  return batch;
}

at::Tensor frame_losses(const at::Tensor& x, const at::Tensor& frames) {
  return (x * frames.to(at::kDouble) - 1).square();
}

int main() {
  int wrong = 0;
  isograd::run_ranks(2, [&](isograd::World& world) {
    at::Tensor x = at::full({}, 0.3, at::kDouble).requires_grad_(true);
    // Video 1 has 10 frames, 6 of them on rank 0. Video 2 has 3, in two micro-batches of rank 1.
    const isograd::MicroBatches batches =
        world.rank == 0
            ? isograd::MicroBatches{make_batch(1, 10, 0, 6)}
            : isograd::MicroBatches{make_batch(1, 10, 6, 10), make_batch(2, 3, 0, 2), make_batch(2, 3, 2, 3)};

    isograd::SampleMean mean;
    const isograd::StepCounts step_counts = mean.count(batches, world.group, /*stop_requested=*/false);
    const isograd::Denominator denominator = mean.denominator(step_counts);
    for (const auto& batch : batches) {
      const isograd::Batch prepared = mean.prepare(batch, denominator);  // weights 1 / T_b
      const at::Tensor sum = (frame_losses(x, batch.tokens) * prepared.weights).sum();
      mean.scale({{"mse", sum}}, denominator).backward();  // divided by B, once
    }
    world.group.all_reduce(x.mutable_grad());  // SUM

    at::Tensor alone = x.detach().clone().requires_grad_(true);
    ((frame_losses(alone, at::arange(10)).mean() + frame_losses(alone, at::arange(3)).mean()) / 2).backward();
    const double error = (x.grad() - alone.grad()).abs().item<double>();
    if (world.rank == 0)
      std::printf("%ld samples, gradient %.6f, error %.1e\n", long(step_counts.samples),
                  x.grad().item<double>(), error);
    if (error > 1e-14 || step_counts.samples != 2) wrong = 1;
  });
  return wrong;
}
