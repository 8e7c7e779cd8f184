// Requests and results of a training server as plain data, whatever dialect they came in. No torch, no
// sockets.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace isograd::serve {

// Dense and row-major; of one dimension or two. One of the two lists is filled.
struct Array {
  std::vector<std::int64_t> shape{};
  std::vector<float> numbers{};
  std::vector<std::int64_t> integers{};
};

struct Datum {
  std::vector<std::int64_t> tokens{};     // N
  std::map<std::string, Array> inputs{};  // "target_tokens", "weights", "logprobs", "advantages", ...
};

using ConfigValue = std::variant<double, std::string>;

struct ForwardBackward {
  std::vector<Datum> data{};
  std::string loss{};  // "cross_entropy", ...
  std::map<std::string, ConfigValue> config{};
  bool forward_only = false;
};

struct AdamParams {
  double learning_rate = 1e-4, beta1 = 0.9, beta2 = 0.95, epsilon = 1e-12, weight_decay = 0;
  double clip = 0;  // of the gradient's norm; <= 0: none
};

struct LoraShape {
  std::int64_t rank = 32;  // 0: the whole weights are trained
  std::optional<std::uint64_t> seed{};
  bool unembed = true, mlp = true, attention = true;
};

struct CreateModel {
  std::string base{};
  LoraShape lora{};
  std::map<std::string, std::string> metadata{};  // the client's; keys "isograd.*" configure this model
};

struct SamplingParams {
  std::optional<std::int64_t> max_tokens;
  std::optional<std::uint64_t> seed;
  // Not given: the model's ends of text. Else these tokens and strings alone, possibly none.
  bool stop_given = false;
  std::vector<std::int64_t> stop_tokens;
  std::vector<std::string> stop_strings;
  double temperature = 1;   // 0: the likeliest token
  std::int64_t top_k = -1;  // -1, 0: off
  double top_p = 1;
};

struct Sample {
  std::vector<std::int64_t> prompt;
  std::int64_t samples = 1;
  SamplingParams params;
  bool prompt_log_probabilities = false;
  std::int64_t prompt_last = -1;                 // prompt_logprobs_last_n; -1: all
  std::int64_t top_prompt = 0, top_samples = 0;  // k of the likeliest tokens that are reported
  std::optional<Array> prompt_targets;           // [len - 1, K] int64, -1: none asked for
};

// ---- results ----

struct ForwardBackwardResult {
  std::vector<Array> log_probabilities{};   // by datum, of its targets' shape
  std::map<std::string, double> metrics{};  // keys "name:reduction"; "loss:sum" always
};

using Metrics = std::map<std::string, double>;  // finite
// A parameter's name behind it: the norm of its gradient, a metric of optim_step.
inline constexpr const char* kNormOf = "norm/";

// Row-major [length, k]; empty cells: token 0, log-probability -99999.
struct TopTokens {
  std::int64_t k = 0, length = 0;
  std::vector<std::int32_t> tokens;
  std::vector<float> log_probabilities;
};

struct SampledSequence {
  bool stopped = false;  // by an end or a stop; else by its length
  std::vector<std::int32_t> tokens;
  std::vector<float> log_probabilities;
  std::optional<TopTokens> top{};
};

struct SampleResult {
  std::vector<SampledSequence> sequences;
  std::optional<std::vector<float>> prompt_log_probabilities;  // NaN: none at that position
  std::optional<TopTokens> top_prompt;
  std::int64_t cached_prompt_tokens = 0;
  std::optional<Array> prompt_targets;  // [len - 1, K] fp32
};

}  // namespace isograd::serve
