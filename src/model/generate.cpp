// Text from a model, one token at a time.
#include <cmath>
#include <numeric>

#include "base/refuse.hpp"
#include "isograd/random.hpp"
#include "model/attention/attention.hpp"
#include "model/decoder.hpp"

namespace isograd {
namespace {

[[noreturn]] void refuse_request(const char* where, const std::string& found, const std::string& expected) {
  refuse(where, found, expected, "Change the request");
}

// Keys (turned) and values of every position so far, layer by layer; room grows by doubling.
class Cache {
 public:
  explicit Cache(std::size_t layers) : layers_(layers) {}

  // Appends k and v [L, Hkv, D]; returns everything so far, [N, Hkv, D] each.
  std::pair<at::Tensor, at::Tensor> append(std::size_t layer, const at::Tensor& k, const at::Tensor& v) {
    auto& [keys, values, count] = layers_[layer];
    const std::int64_t all = count + k.size(0);
    if (!keys.defined() || keys.size(0) < all) {
      auto shape = k.sizes().vec();
      shape[0] = 2 * all;
      const at::Tensor more_keys = at::empty(shape, k.options()), more_values = at::empty(shape, v.options());
      if (count > 0) {
        more_keys.narrow(0, 0, count).copy_(keys.narrow(0, 0, count));
        more_values.narrow(0, 0, count).copy_(values.narrow(0, 0, count));
      }
      keys = more_keys, values = more_values;
    }
    keys.narrow(0, count, k.size(0)).copy_(k);
    values.narrow(0, count, v.size(0)).copy_(v);
    count = all;
    return {keys.narrow(0, 0, all), values.narrow(0, 0, all)};
  }

 private:
  struct Layer {
    at::Tensor keys, values;
    std::int64_t count = 0;
  };
  std::vector<Layer> layers_;
};

}  // namespace

std::uint32_t draw_token(const std::vector<double>& logits, const SampleOptions& options,
                         std::uint64_t position) {
  const auto best = std::max_element(logits.begin(), logits.end());
  if (best == logits.end() || !std::isfinite(*best) ||
      std::any_of(logits.begin(), logits.end(), [](double x) { return std::isnan(x); }))
    refuse_request("generate", "logits that are not finite", "a model whose weights are finite");
  if (options.temperature == 0) return static_cast<std::uint32_t>(best - logits.begin());

  // Likeliest first; equal ones by token, so that the order is one.
  std::vector<std::uint32_t> tokens(logits.size());
  std::iota(tokens.begin(), tokens.end(), 0u);
  std::stable_sort(tokens.begin(), tokens.end(), [&](auto a, auto b) { return logits[a] > logits[b]; });
  if (options.top_k > 0 && options.top_k < std::ssize(tokens)) tokens.resize(options.top_k);
  std::vector<double> weights;
  for (const auto token : tokens) weights.push_back(std::exp((logits[token] - *best) / options.temperature));
  double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  // The fewest tokens that together have at least top_p.
  double kept = 0;
  std::size_t count = 0;
  while (count < weights.size() && (count == 0 || kept < options.top_p * total)) kept += weights[count++];
  const RandomKey key{.seed = options.seed, .layer = hash_name("generate")};
  double left = random_uniform(key, position) * kept;
  for (std::size_t i = 0; i + 1 < count; ++i) {
    if (left < weights[i]) return tokens[i];
    left -= weights[i];
  }
  return tokens[count - 1];
}

std::vector<std::uint32_t> generate(DecoderLM& model, const std::vector<std::uint32_t>& prompt,
                                    const SampleOptions& options,
                                    const std::function<void(std::uint32_t)>& on_token) {
  const DecoderConfig& config = model.config();
  if (prompt.empty()) refuse_request("generate: prompt", "no token", "at least one, for example bos");
  for (const auto token : prompt)
    if (token >= config.vocabulary)
      refuse_request("generate: prompt", fmt::format("token {}", token),
                     fmt::format("a vocabulary of {}", config.vocabulary));
  if (!(options.temperature >= 0) || !std::isfinite(options.temperature))
    refuse_request("generate: temperature", fmt::format("{}", options.temperature), "0 or more");
  if (!(options.top_p > 0 && options.top_p <= 1))
    refuse_request("generate: top_p", fmt::format("{}", options.top_p), "above 0, at most 1");
  if (options.top_k < 0) refuse_request("generate: top_k", std::to_string(options.top_k), "0 (off) or more");

  const std::vector<std::int64_t> ends = config.ends();
  const at::NoGradGuard no_grad;
  auto& impl = *model.impl_;
  const auto device = impl.embedding.device();
  std::vector<std::int64_t> text(prompt.begin(), prompt.end());
  std::vector<std::uint32_t> answer;
  std::int64_t done = 0;  // positions in the cache
  Cache cache(static_cast<std::size_t>(config.layers));
  while (std::ssize(answer) < options.max_tokens) {
    const auto length = std::ssize(text);
    if (config.sliding_window > 0 && length > config.sliding_window)
      refuse_request("generate", fmt::format("a text of {} tokens", length),
                     fmt::format("at most {}, the sliding window of the model", config.sliding_window));
    // Where all angles change with the length, the cached keys are of no use: compute the whole text again.
    if (impl.rotary.depends_on_length(length))
      cache = Cache(static_cast<std::size_t>(config.layers)), done = 0;
    const at::Tensor tokens =
        at::tensor(at::ArrayRef<std::int64_t>(text).slice(static_cast<std::size_t>(done)), at::kLong);
    const auto [cos, sin] = impl.rotary.at(at::arange(done, length, at::kLong), {0, length - done});
    const at::Tensor hidden =
        impl.outputs(
                tokens.to(device),
                {.cos = cos.to(device),
                 .sin = sin.to(device),
                 .attend =
                     [&](std::int64_t layer, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
                       const auto [keys, values] = cache.append(static_cast<std::size_t>(layer), k, v);
                       return done == 0 ? variable_length_attention(q, k, v, {0, length})
                                        : cached_attention(q, keys, values);
                     }})
            .hidden;
    done = length;
    at::Tensor last = at::zeros({config.vocabulary}, at::kDouble);
    if (hidden.defined()) {
      last = impl.logits(hidden.narrow(0, hidden.size(0) - 1, 1));
      if (model.hooks().tensor.whole_logits) last = model.hooks().tensor.whole_logits(last);
      last = last.view(-1).to(at::kCPU, at::kDouble);
    }
    if (model.hooks().pipeline.of_last_stage) last = model.hooks().pipeline.of_last_stage(last);
    const double* logits = last.const_data_ptr<double>();
    const std::uint32_t token =
        draw_token({logits, logits + last.numel()}, options, static_cast<std::uint64_t>(answer.size()));
    if (std::find(ends.begin(), ends.end(), token) != ends.end()) break;
    answer.push_back(token);
    text.push_back(token);
    if (on_token) on_token(token);
  }
  return answer;
}

}  // namespace isograd
