// Requests for samples, as the sampler takes them, and its answers, as the wire has them.

#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/refuse.hpp"
#include "serve/models/model_engine.hpp"

namespace isograd::serve {
namespace {

void want(bool holds, const char* field, const std::string& found, const std::string& expected) {
  if (!holds) refuse(fmt::format("asample: {}", field), found, expected, "Change it");
}

// The size of an answer, and what a tensor cannot be made of; the wire and the sampler check the rest.
void check_sample(const Sample& request) {
  const SamplingParams& params = request.params;
  want(params.max_tokens.value_or(1) > 0, "max_tokens", fmt::format("{}", params.max_tokens.value_or(1)),
       "1 or more");
  // An answer is in memory as a whole, and in the journal.
  constexpr std::int64_t kMostNumbers = std::int64_t{1} << 26;
  const std::int64_t most = params.max_tokens.value_or(1);
  want(most <= kMostNumbers / std::max<std::int64_t>(request.samples, 1) / (1 + request.top_samples),
       "num_samples",
       fmt::format("{} of {} tokens with {} likeliest each", request.samples, most, request.top_samples),
       fmt::format("at most {} numbers in all", kMostNumbers));
  want(std::ssize(request.prompt) <= kMostNumbers / (1 + request.top_prompt), "topk_prompt_logprobs",
       fmt::format("{} for {} tokens", request.top_prompt, request.prompt.size()),
       fmt::format("at most {} numbers in all", kMostNumbers));
  if (!request.prompt_targets) return;
  const Array& targets = *request.prompt_targets;
  const auto rows = static_cast<std::int64_t>(request.prompt.size()) - 1;
  want(targets.shape.size() == 2 && targets.shape[0] == rows && targets.shape[1] >= 0 &&
           static_cast<std::int64_t>(targets.integers.size()) == rows * targets.shape[1],
       "target_prompt_logprobs", fmt::format("{} integers", targets.integers.size()),
       fmt::format("[{}, K] integers: a row for each token after the first", rows));
}

// A special token, which decodes to nothing, is found by its id.
std::optional<std::int64_t> special_token(const std::string& text, const Tokenizer& tokenizer) {
  std::vector<std::uint32_t> tokens = tokenizer.encode(text);
  const auto is = [&](std::uint32_t token, std::int64_t mark) {
    return static_cast<std::int64_t>(token) == mark;
  };
  if (tokens.size() > 1 && is(tokens.front(), tokenizer.bos())) tokens.erase(tokens.begin());
  if (tokens.size() > 1 && is(tokens.back(), tokenizer.eos())) tokens.pop_back();
  if (tokens.size() != 1 || !tokenizer.decode(tokens).empty()) return std::nullopt;
  return tokens.front();
}

// Asked after each token, so a stop string can only be at the end: a token in it has a byte at least, or
// decodes to nothing.
std::function<bool(const std::vector<std::int64_t>&)> stops_at(const std::vector<std::string>& strings,
                                                               std::shared_ptr<Base> base) {
  constexpr std::size_t kMoreTokens = 8;
  std::size_t longest = 0;
  for (const std::string& each : strings) longest = std::max(longest, each.size());
  return [strings, base = std::move(base),
          most = longest + kMoreTokens](const std::vector<std::int64_t>& tokens) {
    const std::size_t begin = tokens.size() - std::min(tokens.size(), most);
    const std::vector<std::uint32_t> last(tokens.begin() + static_cast<std::ptrdiff_t>(begin), tokens.end());
    const std::string text = base->tokenizer().decode(last);
    return std::ranges::any_of(strings,
                               [&](const auto& each) { return text.find(each) != std::string::npos; });
  };
}

SampleRequest to_request(const Sample& sample, const FixedWeights& weights, std::uint64_t seed) {
  Base& base = *weights.base;
  const SamplingParams& params = sample.params;
  const auto length = static_cast<std::int64_t>(sample.prompt.size());
  SampleRequest request{
      .prompt = sample.prompt,
      .samples = sample.samples,
      .max_tokens = params.max_tokens.value_or(std::max<std::int64_t>(1, base.info.context - length + 1)),
      .temperature = params.temperature,
      .top_k = params.top_k == -1 ? 0 : params.top_k,
      .top_p = params.top_p,
      .seed = params.seed.value_or(seed),
      .stop_tokens = params.stop_given ? params.stop_tokens : base.shape().ends(),
      .prompt_log_probabilities = sample.prompt_log_probabilities,
      .prompt_last = sample.prompt_last,
      .top_prompt = sample.top_prompt,
      .top_samples = sample.top_samples,
      .adapter = weights.adapter,
      .weights = weights.number};
  std::vector<std::string> strings;
  for (const std::string& stop : params.stop_strings)
    if (const auto token = special_token(stop, base.tokenizer()))
      request.stop_tokens.push_back(*token);
    else
      strings.push_back(stop);
  if (!strings.empty()) request.stops = stops_at(strings, weights.base);
  if (sample.prompt_targets)
    request.prompt_targets =
        at::tensor(sample.prompt_targets->integers, at::kLong).view(sample.prompt_targets->shape);
  return request;
}

TopTokens top_of(const at::Tensor& tokens, const at::Tensor& log_probabilities) {
  const at::Tensor ids = tokens.to(at::kCPU, at::kInt).contiguous();
  return {.k = ids.size(1),
          .length = ids.size(0),
          .tokens = {ids.const_data_ptr<int>(), ids.const_data_ptr<int>() + ids.numel()},
          .log_probabilities = array_of(log_probabilities).numbers};
}

SampleResult to_result(const isograd::Sampled& sampled, const Sample& request) {
  SampleResult result;
  result.cached_prompt_tokens = sampled.cached_prompt_tokens;
  for (const auto& sequence : sampled.sequences) {
    SampledSequence& one = result.sequences.emplace_back();
    one.stopped = sequence.stopped;
    one.tokens.assign(sequence.tokens.begin(), sequence.tokens.end());
    one.log_probabilities.assign(sequence.log_probabilities.begin(), sequence.log_probabilities.end());
    if (request.top_samples > 0) one.top = top_of(sequence.top_tokens, sequence.top_log_probabilities);
  }
  if (request.prompt_log_probabilities)
    result.prompt_log_probabilities = array_of(sampled.prompt_log_probabilities).numbers;
  if (request.top_prompt > 0)
    result.top_prompt = top_of(sampled.prompt_top_tokens, sampled.prompt_top_log_probabilities);
  if (request.prompt_targets) result.prompt_targets = array_of(sampled.prompt_target_log_probabilities);
  return result;
}

}  // namespace

void ModelEngine::submit(const std::string& id, const std::string& sampler, const Sample& request,
                         std::uint64_t seed) {
  const std::shared_ptr<const FixedWeights>& weights = this->sampler(sampler);
  check_sample(request);
  SampledModel* of = weights->sampled.get();
  of->sampler.submit(id, to_request(request, *weights, seed));
  waiting_[id] = {weights, request};
  if (std::ranges::find(turns_, of) == turns_.end()) turns_.push_back(of);
}

std::vector<Engine::Sampled> ModelEngine::sample_pass() {
  std::vector<Sampled> complete;
  if (turns_.empty()) return complete;
  SampledModel* of = turns_.front();
  turns_.pop_front();
  std::vector<std::pair<std::string, isograd::Sampled>> sampled;
  try {
    sampled = of->sampler.pass();
  } catch (const std::exception& error) {  // half a pass: its requests end, those of other models go on
    of->sampler.abandon();
    for (const auto& [id, request] : waiting_)
      if (request.weights->sampled.get() == of)
        complete.push_back({.id = id, .error = error.what(), .of_server = true, .result = {}});
    for (const Sampled& one : complete) waiting_.erase(one.id);
    return complete;
  }
  if (of->sampler.busy()) turns_.push_back(of);  // models with requests take turns
  for (const auto& [id, answer] : sampled) {
    const auto found = waiting_.extract(id);  // keeps the weights to the end of the conversion
    Sampled& done = complete.emplace_back();
    done.id = id, done.error = answer.error;
    if (answer.error.empty()) done.result = to_result(answer, found.mapped().request);
  }
  return complete;
}

}  // namespace isograd::serve
