#include "train/evaluate.hpp"

#include <algorithm>
#include <chrono>

#include "base/print.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

// The tokens given to the model. Nothing follows an end token; an empty prompt starts a document.
std::vector<std::uint32_t> prompt_tokens(const Tokenizer& tokenizer, const std::string& prompt) {
  std::vector<std::uint32_t> tokens = tokenizer.encode(prompt);
  const auto eos = tokenizer.eos();
  if (eos >= 0 && !tokens.empty() && tokens.back() == static_cast<std::uint32_t>(eos)) tokens.pop_back();
  if (tokens.empty() && eos >= 0) tokens.push_back(static_cast<std::uint32_t>(eos));
  if (tokens.empty()) tokens = tokenizer.encode("\n");
  return tokens;
}

// The maximum number of tokens of a generated text, and the reason.
struct TextLimit {
  std::int64_t tokens;
  const char* name;
};

TextLimit text_limit(const DecoderConfig& model) {
  if (model.sliding_window > 0 && model.sliding_window < model.max_positions)
    return {model.sliding_window, "the model's sliding window"};
  return {model.max_positions, "the model's positions"};
}

// Length of the common prefix of two decodings, of some tokens and of more. It contains whole characters
// and no U+FFFD at the end, which stands for a character whose tokens are incomplete.
std::size_t settled(std::string_view before, std::string_view now) {
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
  auto size = static_cast<std::size_t>(std::ranges::mismatch(before, now).in1 - before.begin());
  const auto inside = [&](std::size_t at) {
    return at < now.size() && (static_cast<unsigned char>(now[at]) & 0xC0) == 0x80;
  };
  while (size > 0 && inside(size)) --size;
  while (now.substr(0, size).ends_with(kReplacement)) size -= kReplacement.size();
  return size;
}

}  // namespace

void check_prompt(const Tokenizer& tokenizer, const std::string& prompt, const DecoderConfig& model,
                  const std::string& where) {
  if (prompt.empty()) return;
  if (tokenizer.encode(prompt).size() <= tokenizer.encode("").size())
    refuse(where, "a text of which the tokenizer makes no token", "a prompt that the model can see",
           "Give another, or none for a new document");
  const TextLimit limit = text_limit(model);
  const auto taken = static_cast<std::int64_t>(prompt_tokens(tokenizer, prompt).size());
  if (taken >= limit.tokens)
    refuse(where, fmt::format("{} tokens", taken),
           fmt::format("fewer than {}, {}, so that some are left to generate", limit.tokens, limit.name),
           "Shorten the prompt");
}

std::vector<std::string> prompt_notices(const Tokenizer& tokenizer, const std::string& prompt,
                                        const DecoderConfig& model, std::int64_t max_tokens) {
  constexpr std::size_t kShown = 80;  // characters of a prompt
  std::vector<std::string> notices;
  const std::vector<std::uint32_t> tokens = prompt_tokens(tokenizer, prompt);
  if (const std::string seen = tokenizer.decode(tokens); !prompt.empty() && seen != prompt)
    notices.push_back(fmt::format("the tokenizer does not keep all of the prompt: the model is given \"{}\"",
                                  printable(seen, kShown)));
  const TextLimit limit = text_limit(model);
  const auto taken = static_cast<std::int64_t>(tokens.size());
  if (const std::int64_t room = limit.tokens - taken; room < max_tokens)
    notices.push_back(fmt::format("at most {} of {} tokens are generated: {} are {}, and the prompt takes {}",
                                  std::max<std::int64_t>(room, 0), max_tokens, limit.tokens, limit.name,
                                  taken));
  return notices;
}

std::string sample_text(DecoderLM& model, const Tokenizer& tokenizer, const std::string& prompt,
                        SampleOptions options, const std::function<void(std::string_view)>& on_text) {
  std::vector<std::uint32_t> tokens = prompt_tokens(tokenizer, prompt);
  const std::int64_t room = text_limit(model.config()).tokens - static_cast<std::int64_t>(tokens.size());
  options.max_tokens = std::clamp<std::int64_t>(room, 0, options.max_tokens);
  // A decoding takes as long as all of its tokens, so that not every token has one.
  constexpr std::chrono::milliseconds kPause(50);
  std::string before = on_text ? tokenizer.decode(tokens) : std::string();
  std::size_t given = 0;
  const auto give = [&](std::string_view text, std::size_t until) {
    if (until <= given) return;
    on_text(text.substr(given, until - given));
    given = until;
  };
  if (on_text) give(before, settled(before, before));
  auto last = std::chrono::steady_clock::now() - kPause;
  generate(model, tokens, options, [&](std::uint32_t token) {
    tokens.push_back(token);
    if (!on_text || std::chrono::steady_clock::now() - last < kPause) return;
    std::string now = tokenizer.decode(tokens);
    give(now, settled(before, now));
    before = std::move(now);
    last = std::chrono::steady_clock::now();
  });
  std::string text = tokenizer.decode(tokens);
  if (on_text) give(text, text.size());
  return text;
}

}  // namespace isograd
