#include "train/utilisation.hpp"

#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "matmul/product.hpp"

namespace isograd {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_of_product(const at::Tensor& square) {
  const auto start = Clock::now();
  (void)product(square, square).select(0, 0).select(0, 0).item<double>();  // waits for a GPU
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace

double decoder_flops(const DecoderConfig& shape, double tokens, double pairs) {
  const auto [h, heads, kv, d, ff] =
      std::array<double, 5>{static_cast<double>(shape.hidden), static_cast<double>(shape.heads),
                            static_cast<double>(shape.key_value_heads), static_cast<double>(shape.head_dim),
                            static_cast<double>(shape.feed_forward)};
  const auto layers = static_cast<double>(shape.layers);
  const double attention = h * d * (heads + 2 * kv) + heads * d * h;
  const ExpertsShape& experts = shape.experts;
  // Of a layer with experts: its router, the experts that compute a token, and the shared one with its
  // switch.
  const double routed =
      h * static_cast<double>(experts.count) +
      3 * h * static_cast<double>(experts.per_token * experts.feed_forward + experts.shared_feed_forward) +
      (experts.shared_feed_forward > 0 ? h : 0);
  double weights = layers * attention + h * static_cast<double>(shape.vocabulary);
  for (std::int64_t layer = 0; layer < shape.layers; ++layer)
    weights += shape.has_experts(layer) ? routed : 3 * h * ff;
  return 6 * weights * tokens + 12 * layers * heads * d * pairs;
}

Peak find_peak(const RunConfig& config, at::ScalarType dtype, at::Device device, Group& group) {
  if (config.run.peak_tflops > 0)
    return {config.run.peak_tflops * 1e12 * group.size(),
            fmt::format("run.peak_tflops = {:g} of each rank", config.run.peak_tflops)};
  constexpr double kLongEnough = 4e-3;  // seconds of a product, so that starting it costs little
  constexpr std::int64_t kLargest = 16384;
  const at::NoGradGuard none;
  std::int64_t n = 128;
  at::Tensor square;
  do {
    n *= 2;
    square = at::ones({n, n}, at::TensorOptions(dtype).device(device));
    seconds_of_product(square);  // the first one prepares the kernel
  } while (seconds_of_product(square) < kLongEnough && n < kLargest);
  std::array<double, 7> times{};
  for (double& time : times) time = seconds_of_product(square);
  std::sort(times.begin(), times.end());
  // The median: ranks share processors, and the best one is that of a moment in which the others waited.
  at::Tensor flops =
      at::full({1}, 2.0 * static_cast<double>(n * n * n) / times[times.size() / 2], at::kDouble);
  group.all_reduce(flops);
  return {flops.item<double>(),
          fmt::format("measured on all ranks at once: products of {0} x {0} matrices in {1}", n,
                      config.train.dtype)};
}

}  // namespace isograd
