#include "train/utilisation.hpp"

#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>

#include "kernels/matmul/product.hpp"

namespace isograd {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_of_product(const at::Tensor& square) {
  const auto start = Clock::now();
  (void)product(square, square).select(0, 0).select(0, 0).item<double>();  // waits for a GPU
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Ranks share processors: the best time is of a moment in which others waited, the median is not.
double median_of(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

std::optional<double> steady_time(const std::vector<std::vector<double>>& rounds) {
  std::vector<double> all, medians;
  for (const auto& round : rounds) {
    all.insert(all.end(), round.begin(), round.end());
    medians.push_back(median_of(round));
  }
  if (!std::ranges::all_of(all, [](double time) { return std::isfinite(time); })) return std::nullopt;
  const auto [least, most] = std::minmax_element(medians.begin(), medians.end());
  if (!(*most <= kSteadyPeak * *least)) return std::nullopt;
  return median_of(std::move(all));
}

double decoder_flops(const DecoderConfig& shape, double tokens, double pairs) {
  const auto [h, heads, kv, d, ff] =
      std::array<double, 5>{static_cast<double>(shape.hidden), static_cast<double>(shape.heads),
                            static_cast<double>(shape.key_value_heads), static_cast<double>(shape.head_dim),
                            static_cast<double>(shape.feed_forward)};
  const auto layers = static_cast<double>(shape.layers);
  const double attention = h * d * (heads + 2 * kv) + heads * d * h;
  const ExpertsShape& experts = shape.experts;
  // A layer with experts: its router, a token's experts, the shared expert with its gate.
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
  std::vector<std::vector<double>> rounds(3, std::vector<double>(7));
  for (auto& round : rounds)
    for (double& time : round) time = seconds_of_product(square);
  const std::optional<double> time = steady_time(rounds);
  at::Tensor said = at::zeros({2}, at::kDouble);  // FLOP/s, ranks that are not steady
  said[0] = time ? 2.0 * static_cast<double>(n * n * n) / *time : 0.0, said[1] = time ? 0 : 1;
  group.all_reduce(said);
  const std::string what = fmt::format("products of {0} x {0} matrices in {1}", n, config.train.dtype);
  if (said[1].item<double>() > 0)
    return {0, fmt::format(
                   "no MFU: three rounds of {} differ by more than a factor of {}, as on a machine that is "
                   "busy with something else; run.peak_tflops gives a peak",
                   what, kSteadyPeak)};
  return {said[0].item<double>(), "measured on all ranks at once: " + what};
}

}  // namespace isograd
