#include "model/decoder.hpp"

#include <bit>
#include <cmath>
#include <numbers>

namespace isograd {
namespace {

// Yarn's ramp from 0 at dim `low` to 1 at dim `high` (Peng et al. 2023).
at::Tensor ramp(double low, double high, std::int64_t half, const at::TensorOptions& options) {
  if (low == high) high += 0.001;
  return ((at::arange(half, options) - low) / (high - low)).clamp(0, 1);
}

// The dim whose wave turns `rotations` times over the original positions.
double correction_dim(double rotations, const DecoderConfig& config) {
  const auto positions = static_cast<double>(config.rope_scaling.original_max_positions);
  return static_cast<double>(config.head_dim) * std::log(positions / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(config.rope_theta));
}

at::Tensor yarn(const DecoderConfig& config, const at::Tensor& wavelengths) {
  const RopeScaling& scaling = config.rope_scaling;
  double low = correction_dim(scaling.beta_fast, config), high = correction_dim(scaling.beta_slow, config);
  if (scaling.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, static_cast<double>(config.head_dim - 1));
  const at::Tensor kept = 1 - ramp(low, high, config.head_dim / 2, wavelengths.options());
  return at::reciprocal(wavelengths * scaling.factor) * (1 - kept) + at::reciprocal(wavelengths) * kept;
}

at::Tensor llama3(const RopeScaling& scaling, const at::Tensor& frequencies) {
  const auto positions = static_cast<double>(scaling.original_max_positions);
  const double low_wave = positions / scaling.low_frequency_factor;
  const double high_wave = positions / scaling.high_frequency_factor;
  const at::Tensor waves = at::reciprocal(frequencies) * (2 * std::numbers::pi);
  const at::Tensor scaled = at::where(waves > low_wave, frequencies / scaling.factor, frequencies);
  const at::Tensor smooth = (at::reciprocal(waves) * positions - scaling.low_frequency_factor) /
                            (scaling.high_frequency_factor - scaling.low_frequency_factor);
  const at::Tensor between = (1 - smooth) * scaled / scaling.factor + smooth * scaled;
  return at::where((waves >= high_wave).logical_and(waves <= low_wave), between, scaled);
}

}  // namespace

std::pair<at::Tensor, double> rotary_frequencies(const DecoderConfig& config, std::int64_t length,
                                                 at::ScalarType type) {
  const RopeScaling& scaling = config.rope_scaling;
  const auto dim = static_cast<double>(config.head_dim), longest = static_cast<double>(config.max_positions);
  double base = config.rope_theta;
  if (scaling.kind == "dynamic" && length > config.max_positions)
    base *= std::pow(scaling.factor * static_cast<double>(length) / longest - (scaling.factor - 1),
                     dim / (dim - 2));
  const at::Tensor exponents = at::arange(0, config.head_dim, 2, at::TensorOptions().dtype(type)) / dim;
  const at::Tensor wavelengths = at::pow(base, exponents);
  if (scaling.kind == "yarn") {
    const double logarithmic = scaling.factor <= 1 ? 1.0 : 0.1 * std::log(scaling.factor) + 1.0;
    return {yarn(config, wavelengths), scaling.attention_factor.value_or(logarithmic)};
  }
  const at::Tensor frequencies = at::reciprocal(wavelengths);
  if (scaling.kind == "linear") return {frequencies / scaling.factor, 1.0};
  if (scaling.kind == "llama3") return {llama3(scaling, frequencies), 1.0};
  return {frequencies, 1.0};
}

bool RotaryTable::depends_on_length(std::int64_t length) const {
  return config_.rope_scaling.kind == "dynamic" && length > config_.max_positions;
}

std::pair<at::Tensor, at::Tensor> RotaryTable::compute(const at::Tensor& positions,
                                                       std::int64_t length) const {
  const auto [frequencies, factor] = rotary_frequencies(config_, length, type_);
  const at::Tensor angles = positions.to(type_).unsqueeze(1) * frequencies;
  return {angles.cos() * factor, angles.sin() * factor};
}

std::pair<at::Tensor, at::Tensor> RotaryTable::at(const at::Tensor& positions,
                                                  const std::vector<std::int64_t>& cu_seqlens,
                                                  const std::vector<std::int64_t>& lengths,
                                                  std::int64_t largest_position) {
  const at::NoGradGuard no_grad;
  if (largest_position < 0 && positions.numel() > 0) largest_position = positions.max().item<std::int64_t>();
  std::int64_t longest = largest_position + 1;
  if (positions.numel() > 0 && !lengths.empty())
    longest = std::max(longest, *std::max_element(lengths.begin(), lengths.end()));
  at::Tensor cos, sin;
  if (!depends_on_length(longest)) {
    const std::lock_guard lock(mutex_);
    if (!cos_.defined() || cos_.size(0) < longest || cos_.device() != positions.device()) {
      const auto size = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(longest + 1)));
      earlier_.push_back(cos_), earlier_.push_back(sin_);
      std::tie(cos_, sin_) = compute(at::arange(size), 0);  // on the CPU: the same bits everywhere
      cos_ = cos_.to(positions.device()), sin_ = sin_.to(positions.device());
    }
    cos = cos_.index_select(0, positions), sin = sin_.index_select(0, positions);
  } else {
    const at::Tensor places = positions.cpu();
    std::vector<at::Tensor> all_cos, all_sin;
    for (std::size_t f = 0; f + 1 < cu_seqlens.size(); ++f) {
      if (cu_seqlens[f + 1] == cu_seqlens[f]) continue;
      const at::Tensor own = places.narrow(0, cu_seqlens[f], cu_seqlens[f + 1] - cu_seqlens[f]);
      const std::int64_t reached = own.max().item<std::int64_t>() + 1;
      const auto [own_cos, own_sin] = compute(own, lengths.empty() ? reached : std::max(reached, lengths[f]));
      all_cos.push_back(own_cos), all_sin.push_back(own_sin);
    }
    cos = at::cat(all_cos), sin = at::cat(all_sin);
  }
  return {cos.to(positions.device()), sin.to(positions.device())};
}

}  // namespace isograd
