// TextSampler: continuous batching over a decoder, with a paged cache of keys and values (src/sampler).
#pragma once

#include "isograd/error.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "isograd/model.hpp"

namespace isograd {

struct TextSamplerOptions {
  std::int64_t most_rows = 256;  // tokens of a pass
  std::int64_t page = 32;        // positions of a page of the cache
  std::int64_t cache_bytes = std::int64_t{1} << 30;
};

struct SampleRequest {
  std::vector<std::int64_t> prompt;  // not empty
  std::int64_t samples = 1;
  std::int64_t max_tokens = 200;
  double temperature = 1;  // 0: the likeliest token
  std::int64_t top_k = 0;  // 0: off
  double top_p = 1;
  std::uint64_t seed = 0;
  std::vector<std::int64_t>
      stop_tokens{};  // ends are the caller's to add; a sequence includes the one it stops at
  // Stop strings: asked after each token of a sequence with all its tokens; true: it ends there. It throws
  // nothing.
  std::function<bool(const std::vector<std::int64_t>& tokens)> stops{};
  bool prompt_log_probabilities = false;
  std::int64_t prompt_last = -1;  // only of the last positions; -1: all
  std::int64_t top_prompt = 0, top_samples = 0;
  at::Tensor prompt_targets{};               // [len - 1, K] int64 for positions 1 to len - 1, -1: none
  std::shared_ptr<const Adapter> adapter{};  // null: none, also where the model has one
  // Requests of equal numbers share cached prefixes: a number belongs to one base and adapter for ever.
  std::uint64_t weights = 0;
};

struct Sampled {
  struct Sequence {
    bool stopped = false;
    std::vector<std::int64_t> tokens{};
    // By softmax(logits / temperature), before top_k and top_p (softmax(logits) at temperature 0).
    std::vector<double> log_probabilities{};
    at::Tensor top_tokens{}, top_log_probabilities{};  // [tokens, k]
  };
  std::vector<Sequence> sequences{};
  // Raw, [len], NaN at 0 and before the last ones asked for; top: [len, k], row 0 token 0 and -99999.
  at::Tensor prompt_log_probabilities{}, prompt_top_tokens{}, prompt_top_log_probabilities{};
  at::Tensor prompt_target_log_probabilities{};  // [len - 1, K], 0 where none was asked for
  std::int64_t cached_prompt_tokens = 0;
  std::string error{};  // not empty: the logits were not finite, and nothing else is set
};

// Draws are keyed by (seed, index of the sample, position): the same tokens alone, in any company and after a
// restart. For one thread, between the model's forwards; a pass leaves the model's own adapter as it was.
class TextSampler {
 public:
  explicit TextSampler(DecoderLM& model, TextSamplerOptions options = {});  // keeps a reference
  ~TextSampler();
  // ConfigError: an empty prompt, a token outside the vocabulary, more positions than model or cache can
  // hold, numbers outside their ranges.
  void submit(std::string id, SampleRequest request);
  // One pass over up to most_rows rows of all requests. Those that are complete.
  std::vector<std::pair<std::string, Sampled>> pass();
  bool busy() const;                   // some requests are not complete
  void abandon();                      // all requests, which are never answered
  void forget(std::uint64_t weights);  // frees cached prefixes of these weights

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace isograd
