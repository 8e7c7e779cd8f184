#include "bench/cases/optim_case.hpp"

#include <ATen/ops/arange.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "bench/cases/step_case.hpp"
#include "bench/rounds.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

// The parameters of a Llama, as DecoderLM registers them.
OptimCase llama(std::string name, std::int64_t vocabulary, std::int64_t hidden, std::int64_t feed_forward,
                std::int64_t layers) {
  OptimCase of{.name = std::move(name)};
  of.shapes.push_back({vocabulary, hidden});
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    of.shapes.push_back({hidden});
    for (int i = 0; i < 4; ++i) of.shapes.push_back({hidden, hidden});
    of.shapes.push_back({hidden});
    for (int i = 0; i < 2; ++i) of.shapes.push_back({feed_forward, hidden});
    of.shapes.push_back({hidden, feed_forward});
  }
  of.shapes.push_back({hidden});
  of.shapes.push_back({vocabulary, hidden});
  return of;
}

std::vector<OptimCase> make_optim_cases() {
  auto tiny = llama("tiny", 131, 48, 128, 2);
  tiny.standard = false;
  return {llama("communication", 256, 768, 2048, 6), std::move(tiny)};
}

}  // namespace

std::int64_t OptimCase::numel() const {
  std::int64_t sum = 0;
  for (const auto& shape : shapes) {
    std::int64_t product = 1;
    for (std::int64_t size : shape) product *= size;
    sum += product;
  }
  return sum;
}

const std::vector<OptimCase>& optim_cases() {
  static const std::vector<OptimCase> cases = make_optim_cases();
  return cases;
}

const OptimCase& find_optim_case(const std::string& name) {
  std::string names;
  for (const auto& of : optim_cases()) {
    if (of.name == name) return of;
    names += (names.empty() ? "" : ", ") + of.name;
  }
  throw ConfigError(
      {.where = "bench optim --case", .found = name, .expected = names, .action = "Choose one of them"});
}

void write_optim_exchange(const std::filesystem::path& directory, const OptimCase& of, int ranks) {
  const AdamWOptions adamw = bench_adamw();
  const nlohmann::ordered_json description = {
      {"name", of.name},           {"ranks", ranks},
      {"shapes", of.shapes},       {"updates_per_turn", of.updates_per_turn},
      {"max_norm", kBenchMaxNorm}, {"learning_rate", adamw.learning_rate},
      {"beta1", adamw.beta1},      {"beta2", adamw.beta2},
      {"epsilon", adamw.epsilon},  {"weight_decay", adamw.weight_decay}};
  write_file(directory / "case.json", description.dump(2) + "\n");
}

at::Tensor pattern(std::int64_t offset, std::int64_t numel, std::int64_t salt) {
  const at::Tensor place = at::arange(offset, offset + numel, at::kLong);
  return place.mul_(40503).add_(salt * 7919).remainder_(1019).sub_(509).to(at::kFloat);
}

double gradient_factor(std::int64_t update) {
  return static_cast<double>(1 + update % 5) * (update % 3 == 1 ? -1 : 1);
}

// With u = 2⁻²⁴ and equal gradients, the clipped gradients of update t differ by a relative δ: that of the
// two norms, and a few roundings. So m differs by at most (δ + (t + 4)u) Σ wᵢ|gᵢ|, √v by a relative δ + (t +
// 4)u, where wᵢ are AdamW's weights of past gradients in m and zᵢ those in v, both corrected for bias. By
// Cauchy and Schwarz Σ wᵢ|gᵢ| ≤ √(Σ wᵢ² / zᵢ) · √v. A parameter is rounded a few times besides.
double allowed_difference(const std::vector<double>& ours, const std::vector<double>& theirs,
                          double largest_parameter) {
  const AdamWOptions options = bench_adamw();
  constexpr double kRounding = 0x1p-24;
  double delta = 4 * kRounding, sum = 0;
  for (std::size_t step = 0; step < std::min(ours.size(), theirs.size()); ++step) {
    delta = std::max(delta, relative_difference(ours[step], theirs[step]) + 4 * kRounding);
    const auto t = static_cast<double>(step + 1);
    double reach = 0;  // Σ wᵢ² / zᵢ
    for (double age = 0; age < t; ++age) {
      const double w = (1 - options.beta1) * std::pow(options.beta1, age) / (1 - std::pow(options.beta1, t));
      const double z = (1 - options.beta2) * std::pow(options.beta2, age) / (1 - std::pow(options.beta2, t));
      reach += w * w / z;
    }
    sum += options.learning_rate * std::sqrt(reach) * (2 * delta + 2 * (t + 4) * kRounding) +
           4 * kRounding * largest_parameter;
  }
  return sum;
}

}  // namespace isograd
