// A convolution net on images, which are no tokens: three ranks with 3, 8 and 13 images a step train it as
// one device would on all 24, and verify proves it.
#include <isograd/isograd.hpp>

#include <ATen/ATen.h>
#include <cstdio>

constexpr std::int64_t kSide = 12, kClasses = 3, kRanks = 3;

// Image `number` of a data set without end, [1, kSide, kSide]: a bar that lies, a bar that stands, or a disc,
// somewhere in noise. Its class is number % kClasses.
at::Tensor image(std::int64_t number) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(number));
  const at::Tensor centre = at::rand({2}, generator) * 6 + 3, line = at::arange(kSide);
  const at::Tensor y = line.unsqueeze(1) - centre[0], x = line.unsqueeze(0) - centre[1];
  const at::Tensor shape = number % kClasses == 0   ? (y.abs() < 1).logical_and(x.abs() < 4)
                           : number % kClasses == 1 ? (x.abs() < 1).logical_and(y.abs() < 4)
                                                    : y * y + x * x < 7;
  return (shape.to(at::kFloat) + 0.3 * at::randn({kSide, kSide}, generator)).unsqueeze(0);
}

// Images first, first + 1, ... as a micro-batch: the tensors that the forward reads, one target for each.
isograd::Batch make_batch(std::int64_t first, std::int64_t count) {
  std::vector<at::Tensor> images;
  std::vector<std::int64_t> numbers;
  for (std::int64_t i = first; i < first + count; ++i) {
    images.push_back(image(i));
    numbers.push_back(i);
  }
  return isograd::batch_of_samples({at::stack(images)}, at::tensor(numbers) % kClasses, numbers);
}
isograd::Batch make_batch_of(int rank, int step) {
  return make_batch(1000 * step + 100 * rank, 3 + 5 * rank);
}

struct Net : torch::nn::Module {
  at::Tensor first, second, head;
  Net() {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(7);  // never keyed by a rank
    first = register_parameter("first", at::randn({8, 1, 5, 5}, generator) * 0.2);
    second = register_parameter("second", at::randn({8, 8, 3, 3}, generator) * 0.2);
    head = register_parameter("head", at::randn({kClasses, 8}, generator) * 0.3);
  }
  at::Tensor logits(const isograd::Batch& batch) {  // [F, kClasses]
    // A batch that only fills up a round has no inputs.
    const at::Tensor images = batch.inputs.empty() ? at::zeros({0, 1, kSide, kSide}) : batch.inputs[0];
    const at::Tensor x = at::relu(at::conv2d(images.to(first.scalar_type()), first, {}, 1, 2));
    return at::linear(at::relu(at::conv2d(x, second, {}, 2)).amax({2, 3}), head);
  }
};

// Each rank's own mean, averaged: what many trainers do. Here an image of rank 0 weighs four times one of
// rank 2.
struct MeanOfRankMeans : isograd::TokenMean {
  isograd::Denominator denominator(const isograd::StepCounts& step_counts) const override {
    isograd::Denominator wrong = isograd::TokenMean::denominator(step_counts);
    wrong.value =
        static_cast<double>(step_counts.targets_by_rank[static_cast<std::size_t>(step_counts.rank)] * kRanks);
    return wrong;
  }
};

int main() {
  double right_of_300 = 0;
  isograd::run_ranks(kRanks, [&](isograd::World& world) {
    Net net;
    isograd::prepare_module(net, world.group);  // rank 0's values on every rank
    auto layout = isograd::bucketed(isograd::trainable_parameters(net), world.group);
    auto adamw = isograd::adamw({.learning_rate = 0.01});
    isograd::TokenMean mean;  // per target, hence per image
    const auto loss = [&](const isograd::Batch& batch) -> isograd::LossTerms {
      return {{"cross_entropy", isograd::cross_entropy_sum(net.logits(batch), batch.targets)}};
    };
    isograd::Step step(loss, *layout, mean, *adamw, {.max_norm = 1.0});
    for (int i = 0; i < 60; ++i) {
      const auto report = step({make_batch_of(world.rank, i)});
      if (world.rank == 0 && i % 20 == 19)
        std::printf("step %2d  loss %.4f  images %ld\n", i + 1, report.loss,
                    long(report.step_counts.targets));
    }
    // Each rank calls the forward once: under ZeRO-3 that is a collective.
    const at::NoGradGuard no_grad;
    const isograd::Batch unseen = make_batch(1'000'000 + 100 * world.rank, 100);
    at::Tensor right = net.logits(unseen).argmax(1).eq(unseen.targets).sum();
    world.group.all_reduce(right);
    if (world.rank == 0) right_of_300 = right.item<double>();
  });
  std::printf("right: %g of 300 new images\n", right_of_300);

  isograd::MicroBatches step;
  for (int rank = 0; rank < kRanks; ++rank) step.push_back(make_batch_of(rank, 0));
  const isograd::MakeVerifyModel model = [](at::ScalarType dtype) {
    auto net = std::make_shared<Net>();
    net->to(dtype);
    return isograd::verify_model(net,
                                 [](Net& self, const isograd::Batch& batch) { return self.logits(batch); });
  };
  const auto layouts = isograd::verify_layouts({"bucketed", "zero2", "zero3"});
  const auto good = isograd::verify(model, step, layouts, {.ranks = kRanks});
  const auto bad = isograd::verify(model, step, layouts, {.ranks = kRanks, .make_normalizer = [] {
                                                            return std::make_unique<MeanOfRankMeans>();
                                                          }});
  std::printf("%s\n%s\n", isograd::parity_line(good).c_str(), isograd::parity_line(bad).c_str());
  return right_of_300 > 285 && good.passed && !bad.passed ? 0 : 1;
}
