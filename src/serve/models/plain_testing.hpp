// For tests of engines: a plain reference, calls, and a fixture with bases on disk.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "lora/plain_testing.hpp"
#include "model/decoder_testing.hpp"
#include "model/safetensors.hpp"
#include "serve/models/model_engine.hpp"

namespace isograd::serve {

inline constexpr std::uint64_t kSeed = 20261128;

// "tied": a Llama whose head is its embedding, with all biases that it may have.
inline DecoderConfig config_of(const std::string& family) {
  DecoderConfig config = small_config(family == "tied" ? "llama" : family);
  if (family == "qwen3_moe") {
    config.query_key_norm = true;
    config.experts.count = 4, config.experts.per_token = 2, config.experts.feed_forward = 24;
  }
  if (family == "tied")
    config.tied_output = config.attention_bias = config.output_bias = config.mlp_bias = true;
  return config;
}

inline CreateModel request_of(std::int64_t rank, std::map<std::string, std::string> metadata = {}) {
  CreateModel request;
  request.base = "tiny", request.lora.rank = rank, request.lora.seed = 7,
  request.metadata = std::move(metadata);
  return request;
}

inline double apart(const Tensors& a, const Tensors& b) {
  double most = a.size() == b.size() ? 0 : 1e9;
  for (const auto& [name, tensor] : a) {
    const at::Tensor other = b.at(name).to(at::kDouble);
    most = std::max(most, ((tensor.to(at::kDouble) - other).norm() / (other.norm() + 1e-30)).item<double>());
  }
  return most;
}
inline bool same_bits(const Tensors& a, const Tensors& b) {
  return a.size() == b.size() &&
         std::ranges::all_of(a, [&](const auto& each) { return each.second.equal(b.at(each.first)); });
}

// ---- a plain reference: torch operations and formulas ----

struct Mistake {
  bool divides_by_call = false, drops_negative = false, fixed_beta2 = false, clips_before_scale = false,
       counts_first_call_twice = false,
       sums_ranks_again = false;  // two ranks' sum after each call, and again with the next one's
};

class Plain {
 public:
  // `trained`: matrices "x.lora_A.weight", "x.lora_B.weight", or parameters of the model itself.
  Plain(const DecoderConfig& config, Tensors base, const Tensors& trained, double scale, Mistake mistake = {})
      : c_(config), all_(std::move(base)), scale_(scale), mistake_(mistake) {
    for (const auto& [name, tensor] : trained) {
      trained_[name] = tensor.clone().requires_grad_(true);
      all_[name] = trained_[name];
      sum_[name] = m_[name] = v_[name] = at::zeros_like(tensor);
    }
  }
  const Tensors& trained() const { return trained_; }

  at::Tensor log_probabilities(const Datum& datum) const {
    const at::Tensor logits =
        plain_logits(c_, all_, scale_, at::tensor(datum.tokens, at::kLong)).log_softmax(-1);
    const Array& targets = datum.inputs.at("target_tokens");
    const auto rows = static_cast<std::int64_t>(datum.tokens.size());
    return logits.gather(1, at::tensor(targets.integers, at::kLong).view({rows, -1})).view(targets.shape);
  }

  double accumulate(const ForwardBackward& call) {
    double total = 0;
    std::map<std::string, at::Tensor> of_call;
    for (const Datum& datum : call.data) {
      const at::Tensor lp = log_probabilities(datum);
      at::Tensor w = input(datum, "weights", lp);
      if (mistake_.drops_negative) w = w.clamp_min(0);
      const at::Tensor loss = loss_of(call, datum, lp, w);
      total += loss.item<double>();
      loss.backward();
      sequences_ += 1;
      tokens_ += (w.dim() == 2 ? w.ne(0).any(1) : w.ne(0)).sum().item<double>();
      weights_ += w.sum().item<double>();
    }
    const bool again = mistake_.counts_first_call_twice && std::exchange(first_call_, false);
    const double factor =
        (mistake_.divides_by_call ? 1.0 / static_cast<double>(call.data.size()) : 1.0) * (again ? 2.0 : 1.0);
    for (auto& [name, tensor] : trained_) {
      if (!tensor.grad().defined()) continue;
      sum_[name] = sum_[name] * (mistake_.sums_ranks_again ? 2 : 1) + tensor.grad() * factor;
      tensor.mutable_grad() = at::Tensor();
    }
    return total;
  }

  double step(const AdamParams& p, const std::string& mode) {
    const double divisor = mode == "tokens"      ? tokens_
                           : mode == "weights"   ? weights_
                           : mode == "sequences" ? sequences_
                                                 : 1;
    double squares = 0;
    for (auto& [name, sum] : sum_)
      squares += (mistake_.clips_before_scale ? sum : sum / divisor).square().sum().item<double>();
    const double norm = std::sqrt(squares);
    double factor = 1 / divisor;
    if (p.clip > 0) factor *= std::min(1.0, p.clip / (norm + 1e-6));
    ++t_;
    const double beta2 = mistake_.fixed_beta2 ? 0.95 : p.beta2;
    const at::NoGradGuard no_grad;
    // With betas that change, bias corrections are by this step's, as in torch.optim.AdamW.
    for (auto& [name, parameter] : trained_) {
      const at::Tensor g = sum_[name] * factor;
      m_[name] = m_[name] * p.beta1 + g * (1 - p.beta1);
      v_[name] = v_[name] * beta2 + g * g * (1 - beta2);
      parameter.mul_(1 - p.learning_rate * p.weight_decay);
      const at::Tensor root = v_[name].sqrt() / std::sqrt(1 - std::pow(beta2, t_)) + p.epsilon;
      parameter.sub_(m_[name] / root * (p.learning_rate / (1 - std::pow(p.beta1, t_))));
      sum_[name] = at::zeros_like(parameter);
    }
    tokens_ = weights_ = sequences_ = 0, first_call_ = true;
    return norm;
  }

 private:
  static at::Tensor input(const Datum& datum, const std::string& name, const at::Tensor& like) {
    const auto found = datum.inputs.find(name);
    if (found == datum.inputs.end()) return at::ones_like(like).detach();
    std::vector<double> values(found->second.numbers.begin(), found->second.numbers.end());
    return at::tensor(values, at::kDouble).view(found->second.shape);
  }

  static at::Tensor loss_of(const ForwardBackward& call, const Datum& datum, const at::Tensor& lp,
                            const at::Tensor& w) {
    const auto key = [&](const char* name, double otherwise) {
      const auto found = call.config.find(name);
      return found == call.config.end() ? otherwise : std::get<double>(found->second);
    };
    if (call.loss == "cross_entropy") return -(w * lp).sum();
    const at::Tensor q = input(datum, "logprobs", lp), a = input(datum, "advantages", lp);
    at::Tensor r = (lp - q).exp();
    if (call.loss == "importance_sampling") return -(r * a).sum();
    if (call.loss == "dro") return -(lp * a - 0.5 * key("beta", 0) * (lp - q).square()).sum();
    const bool cispo = call.loss == "cispo";
    const double low = key("clip_low_threshold", cispo ? 0 : 0.8),
                 high = key("clip_high_threshold", cispo ? 4 : 1.2);
    if (cispo) return -(r.clamp(low, high).detach() * lp * a).sum();
    if (call.loss == "gspo") {
      const at::Tensor mask = input(datum, "sequence_ratio_mask", lp).ne(0);
      r = (lp - q).masked_select(mask).mean().exp().detach() * (lp - lp.detach()).exp();
    }
    return -at::min(r * a, r.clamp(low, high) * a).sum();
  }

  DecoderConfig c_;
  Tensors all_, trained_;  // the trained ones are in both
  double scale_;
  Mistake mistake_;
  Tensors sum_, m_, v_;
  double tokens_ = 0, weights_ = 0, sequences_ = 0, t_ = 0;
  bool first_call_ = true;
};

// ---- calls ----

class Calls {
 public:
  explicit Calls(std::uint64_t seed, std::int64_t vocabulary = 61) : random_(seed), vocabulary_(vocabulary) {}

  std::int64_t integer(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random_);
  }
  float number(double least, double most) {
    return static_cast<float>(std::uniform_real_distribution<double>(least, most)(random_));
  }
  Array tokens(std::vector<std::int64_t> shape) {
    Array array{.shape = shape};
    for (std::int64_t i = 0; i < size(shape); ++i) array.integers.push_back(integer(0, vocabulary_ - 1));
    return array;
  }
  Array numbers(std::vector<std::int64_t> shape, double least, double most) {
    Array array{.shape = shape};
    for (std::int64_t i = 0; i < size(shape); ++i) array.numbers.push_back(number(least, most));
    return array;
  }
  // A cross entropy of signed, fractional weights; sometimes with several targets a token.
  Datum supervised(std::int64_t length, std::int64_t columns = 0, double least = -0.6) {
    Datum datum{.tokens = tokens({length}).integers};
    std::vector<std::int64_t> shape = {length};
    if (columns > 0) shape.push_back(columns);
    datum.inputs["target_tokens"] = tokens(shape);
    datum.inputs["weights"] = numbers(shape, least, 1);
    if (length > 2) datum.inputs["weights"].numbers[1] = 0;
    return datum;
  }
  ForwardBackward cross_entropy(std::vector<std::int64_t> lengths, double least = -0.6) {
    ForwardBackward call{.loss = "cross_entropy"};
    for (const std::int64_t length : lengths) call.data.push_back(supervised(length, 0, least));
    return call;
  }
  // Any loss. Old log-probabilities are near the model's, so that ratios are inside and outside of the clip.
  ForwardBackward any(Engine& engine, const std::string& model, double least_weight = -0.6) {
    const char* losses[] = {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"};
    ForwardBackward call{.loss = "cross_entropy"};
    const std::string loss = losses[integer(0, 5)];
    for (std::int64_t i = integer(1, 4); i > 0; --i)
      call.data.push_back(
          supervised(integer(1, 12), loss == "cross_entropy" ? integer(0, 3) : 0, least_weight));
    if (loss == "cross_entropy") return call;
    call.forward_only = true;
    const ForwardBackwardResult now = engine.forward_backward(model, call);
    call.forward_only = false, call.loss = loss;
    if (loss == "dro") call.config["beta"] = 0.05;
    if (loss == "ppo" && integer(0, 1)) call.config["clip_high_threshold"] = 1.4;
    for (std::size_t i = 0; i < call.data.size(); ++i) {
      auto& inputs = call.data[i].inputs;
      const std::vector<std::int64_t> shape = inputs.at("target_tokens").shape;
      inputs.erase("weights");
      inputs["logprobs"] = now.log_probabilities[i];
      for (float& q : inputs["logprobs"].numbers) q += number(-0.5, 0.5);
      inputs["advantages"] = numbers(shape, -1, 1);
      if (loss == "gspo") {
        inputs["sequence_ratio_mask"] = numbers(shape, 0, 1);
        for (float& mask : inputs["sequence_ratio_mask"].numbers) mask = mask > 0.4F ? 1.F : 0.F;
        inputs["sequence_ratio_mask"].numbers.back() = 1;
      }
    }
    return call;
  }
  AdamParams params() {
    AdamParams p{
        .learning_rate = number(1e-3, 2e-2), .beta1 = number(0.8, 0.95), .beta2 = number(0.9, 0.999)};
    p.epsilon = std::pow(10.0, static_cast<double>(integer(-8, -4)));
    p.weight_decay = integer(0, 1) ? 0.1 : 0;
    p.clip = integer(0, 2) == 0 ? 0 : integer(0, 1) ? 1e6 : 0.05;
    return p;
  }

 private:
  static std::int64_t size(const std::vector<std::int64_t>& shape) {
    std::int64_t product = 1;
    for (const std::int64_t each : shape) product *= each;
    return product;
  }
  std::mt19937_64 random_;
  std::int64_t vocabulary_;
};

// ---- directories ----

inline Tensors read(const std::filesystem::path& file) {
  Tensors all;
  for (const auto& [name, tensor] : read_safetensors(file)) all[name] = tensor.clone();
  return all;
}
inline Tensors base_weights(const std::filesystem::path& directory) {
  return read(directory / "model.safetensors");
}
// A model's weights, from a directory that peft (rank 0: transformers) would load.
inline Tensors weights_in(const std::filesystem::path& directory) {
  if (std::filesystem::exists(directory / "model.safetensors")) return base_weights(directory);
  Tensors found;
  for (const auto& [name, tensor] : read(directory / "adapter_model.safetensors"))
    found[name.substr(std::string("base_model.model.").size())] = tensor;
  return found;
}

class EngineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::path(::testing::TempDir()) /
            fmt::format("engine_{}_{}", ::getpid(),
                        ::testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::remove_all(root_);
    fmt::print("seed {}\n", kSeed);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  std::filesystem::path folder(const std::string& name) const {
    std::filesystem::create_directories(root_ / name);
    return root_ / name;
  }
  std::filesystem::path base(const std::string& family, at::ScalarType dtype = at::kDouble) const {
    DecoderLM model(config_of(family), dtype, kSeed);
    perturb(model, kSeed + 1);
    write_hf(folder("base_" + family), model);
    return folder("base_" + family);
  }
  static ModelEngineOptions options(const std::filesystem::path& base, at::ScalarType dtype = at::kDouble,
                                    std::int64_t micro_batch_tokens = 20) {
    ModelEngineOptions options;
    options.bases = {{"tiny", base}};
    options.dtype = dtype, options.micro_batch_tokens = micro_batch_tokens;
    return options;
  }
  Tensors weights(Engine& engine, const std::string& model) {
    const std::filesystem::path directory = folder(fmt::format("weights_{}", saves_++));
    engine.save(model, Engine::Save::kExternal, directory);
    return weights_in(directory);
  }

 private:
  std::filesystem::path root_;
  int saves_ = 0;
};

}  // namespace isograd::serve
