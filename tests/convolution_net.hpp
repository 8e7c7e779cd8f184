// A user's own convolutional model of odd sizes, and micro-batches for it.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/module.h>

#include "isograd/verify_module.hpp"

namespace isograd::convolution {

inline constexpr std::int64_t kChannels = 5, kClasses = 3, kSide = 7;

inline at::Tensor drawn(at::IntArrayRef shape, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::TensorOptions(at::kDouble));
}

// Classes of images. A batch's token is the number of an image.
struct Net : torch::nn::Module {
  at::Tensor first, second, head, unused, frozen;
  Net() {
    first = register_parameter("first", drawn({kChannels, 2, 3, 3}, 1) * 0.3);
    second = register_parameter("second", drawn({kClasses, kChannels, 3, 3}, 2) * 0.3);
    head = register_parameter("head", drawn({kClasses}, 3));
    unused = register_parameter("unused", drawn({3}, 4));
    frozen = register_parameter("frozen", drawn({1, kClasses}, 5), false);
  }
  at::Tensor logits(const at::Tensor& numbers) {  // [T] -> [T, classes]
    std::vector<at::Tensor> images = {at::zeros({0, 2, kSide, kSide}, at::kDouble)};
    for (std::int64_t i = 0; i < numbers.numel(); ++i)
      images.push_back(
          drawn({1, 2, kSide, kSide}, 100 + static_cast<std::uint64_t>(numbers[i].item<std::int64_t>())));
    const at::Tensor x = at::tanh(at::conv2d(at::cat(images).to(first.scalar_type()), first));
    return at::conv2d(x, second, {}, {2, 2}).mean({2, 3}) * head + frozen;
  }
};

inline VerifyModel make_model(at::ScalarType dtype) {
  auto net = std::make_shared<Net>();
  net->to(dtype);
  return verify_model(net, [](Net& self, const Batch& batch) { return self.logits(batch.tokens); });
}

// Micro-batches of 1 to 5 images, the last of them missing: at one per rank, the last rank has nothing.
inline MicroBatches make_batches(int ranks, int accumulation, std::int64_t step = 0) {
  MicroBatches batches;
  const int count = ranks * accumulation - (ranks > 1 ? 1 : 0);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t length = 1 + (3 * i) % 5;
    Batch batch = empty_batch();
    batch.tokens = at::arange(length) + 10 * i + 1000 * step;
    batch.targets = (batch.tokens * 7 + i) % kClasses;
    batch.cu_seqlens = {0, length};
    batch.sample_ids = {i};
    batch.sample_targets = {length};
    batches.push_back(batch);
  }
  return batches;
}

}  // namespace isograd::convolution
