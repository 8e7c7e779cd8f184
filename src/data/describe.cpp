#include <fmt/format.h>
#include <fmt/ranges.h>
#include <utf8.h>

#include <algorithm>
#include <bit>

#include "isograd/text_data.hpp"

namespace isograd {
namespace {

constexpr std::size_t kPreviewTokens = 200, kPreviewCharacters = 100;

// One line that is safe on a terminal: control characters escaped, cut after kPreviewCharacters.
std::string preview(const std::string& text) {
  std::string line;
  std::size_t shown = 0;
  for (auto at = text.begin(); at != text.end(); ++shown) {
    if (shown == kPreviewCharacters) return line + "…";
    const std::uint32_t character = utf8::next(at, text.end());
    if (character == '\n')
      line += "\\n";
    else if (character == '\t')
      line += "\\t";
    else if (character < 32 || (character >= 127 && character < 160) || character == '\\' ||
             (character >= 0x202A && character <= 0x202E) || (character >= 0x2066 && character <= 0x2069))
      line += fmt::format("\\u{{{:x}}}", character);  // also what turns the direction of text around
    else
      utf8::append(static_cast<char32_t>(character), line);
  }
  return line;
}

}  // namespace

std::string describe(const TokenStore& store, const Tokenizer* tokenizer, std::int64_t documents) {
  const std::int64_t count = store.num_documents();
  std::int64_t shortest = store.num_tokens(), longest = 0;
  std::vector<std::int64_t> by_power(64, 0);  // documents of 2^i .. 2^(i+1) - 1 tokens
  for (std::int64_t d = 0; d < count; ++d) {
    const std::int64_t length = store.document_length(d);
    shortest = std::min(shortest, length);
    longest = std::max(longest, length);
    ++by_power[static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(length)) - 1)];
  }
  std::string text = fmt::format(
      "documents  {}\ntokens     {}\ntokenizer  {}\nlargest    {}\nlength     {} to {}, {:.1f} on average\n",
      count, store.num_tokens(),
      store.tokenizer_name().empty() ? "unknown (foreign shards)" : store.tokenizer_name(), store.max_token(),
      shortest, longest, static_cast<double>(store.num_tokens()) / static_cast<double>(count));
  const std::int64_t most = *std::max_element(by_power.begin(), by_power.end());
  for (std::size_t i = 0; i < by_power.size(); ++i)
    if (by_power[i] > 0)
      text += fmt::format("  {:>12} tokens or more {:>10} {}\n", std::int64_t{1} << i, by_power[i],
                          std::string(static_cast<std::size_t>((by_power[i] * 40 + most - 1) / most), '#'));
  for (std::int64_t d = 0; d < std::min(documents, count); ++d) {
    std::vector<std::int64_t> wide(
        std::min<std::size_t>(kPreviewTokens, static_cast<std::size_t>(store.document_length(d))));
    store.read(d, 0, wide);
    const std::vector<std::uint32_t> tokens(wide.begin(), wide.end());
    text += fmt::format("document {} ({} tokens): ", d, store.document_length(d));
    if (tokenizer)
      text += preview(tokenizer->decode(tokens)) + "\n";
    else
      text += fmt::format(
          "{}{}\n",
          fmt::join(tokens.begin(), tokens.begin() + std::min<std::ptrdiff_t>(16, tokens.size()), " "),
          tokens.size() > 16 ? " …" : "");
  }
  return text;
}

}  // namespace isograd
