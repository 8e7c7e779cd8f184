#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>

#include "base/print.hpp"
#include "isograd/data.hpp"

namespace isograd {
namespace {

constexpr std::size_t kPreviewTokens = 200, kPreviewCharacters = 100;

// The first tokens of [begin, end) of a document: text if there is a tokenizer, else numbers.
std::string beginning(const TokenStore& store, const Tokenizer* tokenizer, std::int64_t document,
                      std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> wide(
      std::min<std::size_t>(kPreviewTokens, static_cast<std::size_t>(end - begin)));
  store.read(document, begin, wide);
  const std::vector<std::uint32_t> tokens(wide.begin(), wide.end());
  if (tokenizer) return printable(tokenizer->decode(tokens), kPreviewCharacters);
  return fmt::format(
      "{}{}", fmt::join(tokens.begin(), tokens.begin() + std::min<std::ptrdiff_t>(16, tokens.size()), " "),
      tokens.size() > 16 ? " …" : "");
}

}  // namespace

std::string describe_packs(const std::vector<PackContents>& packs, const TokenStore& store,
                           const Tokenizer* tokenizer) {
  std::string text;
  for (std::size_t i = 0; i < packs.size(); ++i) {
    std::int64_t tokens = 0, targets = 0;
    for (const auto& part : packs[i].parts) {
      tokens += part.end - part.begin;
      targets += part.num_targets();
    }
    text += fmt::format("pack {}: rank {}, micro-batch {}, {} tokens, {} targets\n", i + 1, packs[i].rank,
                        packs[i].micro_batch + 1, tokens, targets);
    for (const auto& part : packs[i].parts)
      text +=
          fmt::format("  document {}, tokens {} to {} of {}: {}\n", part.document, part.begin, part.end - 1,
                      part.length, beginning(store, tokenizer, part.document, part.begin, part.end));
  }
  return text;
}

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
  for (std::int64_t d = 0; d < std::min(documents, count); ++d)
    text += fmt::format("document {} ({} tokens): {}\n", d, store.document_length(d),
                        beginning(store, tokenizer, d, 0, store.document_length(d)));
  return text;
}

}  // namespace isograd
