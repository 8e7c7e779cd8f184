// A user's own convolutional model of odd sizes, and micro-batches for it.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/module.h>

#include "isograd/verify.hpp"

namespace isograd::convolution {

inline constexpr std::int64_t kChannels = 5, kClasses = 3, kSide = 7;

inline at::Tensor drawn(at::IntArrayRef shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kDouble));
}

// Classes of images.
struct Net : torch::nn::Module {
  at::Tensor first, second, head, unused, frozen;
  Net() {
    first = register_parameter("first", drawn({kChannels, 2, 3, 3}, 1) * 0.3);
    second = register_parameter("second", drawn({kClasses, kChannels, 3, 3}, 2) * 0.3);
    head = register_parameter("head", drawn({kClasses}, 3));
    unused = register_parameter("unused", drawn({3}, 4));
    frozen = register_parameter("frozen", drawn({1, kClasses}, 5), false);
  }
  at::Tensor logits(const Batch& batch) {  // [F, classes]
    const at::Tensor images =
        batch.inputs.empty() ? at::zeros({0, 2, kSide, kSide}, at::kDouble) : batch.inputs[0];
    const at::Tensor x = at::tanh(at::conv2d(images.to(first.scalar_type()), first));
    return at::conv2d(x, second, {}, {2, 2}).mean({2, 3}) * head + frozen;
  }
};

inline VerifyModel make_model(at::ScalarType dtype) {
  auto net = std::make_shared<Net>();
  net->to(dtype);
  return verify_model(net, [](Net& self, const Batch& batch) { return self.logits(batch); });
}

// Micro-batches of 1 to 5 images, the last of them missing: at one per rank, the last rank has nothing.
inline MicroBatches make_batches(int ranks, int accumulation, std::int64_t step = 0) {
  MicroBatches batches;
  const int count = ranks * accumulation - (ranks > 1 ? 1 : 0);
  for (std::int64_t i = 0; i < count; ++i) {
    std::vector<at::Tensor> images;
    std::vector<std::int64_t> numbers, classes;
    for (std::int64_t j = 0; j < 1 + (3 * i) % 5; ++j) {
      numbers.push_back(j + 10 * i + 1000 * step);
      classes.push_back((numbers.back() * 7 + i) % kClasses);
      images.push_back(drawn({2, kSide, kSide}, 100 + static_cast<std::uint64_t>(numbers.back())));
    }
    batches.push_back(batch_of_samples({at::stack(images)}, at::tensor(classes, at::kLong), numbers));
  }
  return batches;
}

}  // namespace isograd::convolution
