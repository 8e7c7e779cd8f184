// TokenStore over mapped shards, and its split into training and validation documents.
#include "data/store.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/print.hpp"
#include "base/refuse.hpp"
#include "isograd/data.hpp"
#include "isograd/random.hpp"

namespace isograd {
namespace {

class ShardStore final : public TokenStore {
 public:
  ShardStore(const std::vector<fs::path>& files, std::optional<std::uint32_t> end_of_text) {
    for (const auto& file : files) {
      const Shard& shard = *shards_.emplace_back(std::make_unique<Shard>(file, end_of_text));
      if (shard.tokenizer() != shards_.front()->tokenizer())
        refuse("token shard " + file.string(), describe_tokenizer(shard),
               describe_tokenizer(*shards_.front()) + ", as in " + shards_.front()->path().string(),
               "Open shards of one tokenizer together");
      first_.push_back(first_.back() + shard.num_documents());
      tokens_ += shard.num_tokens();
      max_token_ = std::max(max_token_, shard.max_token());
      weights_ = std::max(weights_, shard.weights());
    }
  }

  std::int64_t num_documents() const override { return first_.back(); }
  std::int64_t num_tokens() const override { return tokens_; }
  std::uint32_t max_token() const override { return max_token_; }
  std::string tokenizer_name() const override { return shards_.front()->tokenizer(); }

  std::int64_t document_length(std::int64_t document) const override {
    const auto [shard, local] = find(document);
    return static_cast<std::int64_t>(shard->offset(local + 1) - shard->offset(local));
  }

  void read(std::int64_t document, std::int64_t begin, std::span<std::int64_t> out) const override {
    const auto [shard, at] = place(document, begin, out.size());
    shard->read(at, out);
  }

  Weights weights() const override { return weights_; }
  void read_weights(std::int64_t document, std::int64_t begin, std::span<float> out) const override {
    const auto [shard, at] = place(document, begin, out.size());
    shard->read_weights(at, out);
  }

 private:
  // The shard of tokens [begin, begin + count) of a document, and the first of them in it.
  std::pair<const Shard*, std::uint64_t> place(std::int64_t document, std::int64_t begin,
                                               std::size_t count) const {
    const auto [shard, local] = find(document);
    shard->require_whole();
    const std::uint64_t at = shard->offset(local), length = shard->offset(local + 1) - at;
    const auto skip = static_cast<std::uint64_t>(begin);
    ISOGRAD_INVARIANT(begin >= 0 && skip <= length && count <= length - skip,
                      fmt::format("tokens [{}, {} + {}) of {}", begin, begin, count, length));
    return {shard, at + skip};
  }

  static std::string describe_tokenizer(const Shard& shard) {
    return shard.tokenizer().empty() ? "a foreign shard" : "tokens of " + shard.tokenizer();
  }

  std::pair<const Shard*, std::int64_t> find(std::int64_t document) const {
    ISOGRAD_INVARIANT(document >= 0 && document < num_documents(), std::to_string(document));
    const auto after = std::upper_bound(first_.begin(), first_.end(), document);
    const auto shard = after - first_.begin() - 1;
    return {shards_[static_cast<std::size_t>(shard)].get(), document - *(after - 1)};
  }

  std::vector<std::unique_ptr<Shard>> shards_;
  std::vector<std::int64_t> first_{0};  // [shards + 1], first document of each shard
  std::int64_t tokens_ = 0;
  std::uint32_t max_token_ = 0;
  Weights weights_ = Weights::kOnes;
};

}  // namespace

void TokenStore::read_weights(std::int64_t /*document*/, std::int64_t /*begin*/, std::span<float> out) const {
  std::ranges::fill(out, 1.0F);
}

std::shared_ptr<TokenStore> TokenStore::open(const std::vector<fs::path>& files,
                                             std::optional<std::uint32_t> end_of_text) {
  if (files.empty())
    refuse("data.shards", "no files", "at least one token shard", "Name shards, or text to pack");
  return std::make_shared<ShardStore>(files, end_of_text);
}

Split split_documents(const TokenStore& store, double validation_fraction, std::uint64_t seed) {
  if (!(validation_fraction >= 0 && validation_fraction < 1))
    refuse("data.validation_fraction", std::to_string(validation_fraction), "0 or more, below 1",
           "Choose a share of the documents, such as 0.02");
  const std::int64_t documents = store.num_documents();
  std::int64_t held_out = std::llround(validation_fraction * static_cast<double>(documents));
  if (validation_fraction > 0 && documents > 1)
    held_out = std::clamp<std::int64_t>(held_out, 1, documents - 1);
  if (documents == 1) held_out = 0;

  // The `held_out` documents with the smallest random numbers.
  std::vector<std::pair<std::uint64_t, std::int64_t>> drawn(static_cast<std::size_t>(documents));
  const std::uint64_t purpose = hash_name("data.split");
  for (std::int64_t d = 0; d < documents; ++d)
    drawn[static_cast<std::size_t>(d)] = {
        random_bits({.seed = seed, .sample = static_cast<std::uint64_t>(d), .layer = purpose}, 0), d};
  if (held_out > 0 && held_out < documents)
    std::nth_element(drawn.begin(), drawn.begin() + held_out, drawn.end());
  Split split;
  split.validation.reserve(static_cast<std::size_t>(held_out));
  split.train.reserve(static_cast<std::size_t>(documents - held_out));
  for (std::int64_t i = 0; i < documents; ++i)
    (i < held_out ? split.validation : split.train).push_back(drawn[static_cast<std::size_t>(i)].second);
  std::sort(split.validation.begin(), split.validation.end());
  std::sort(split.train.begin(), split.train.end());
  return split;
}

namespace {

static_assert(std::endian::native == std::endian::little, "shards are mapped, and little-endian");

constexpr std::uint32_t kVersion = 1, kWithWeights = 2;
constexpr std::size_t kPiece = std::size_t{16} << 20;            // of a mapped file that is read through
constexpr std::uint32_t kLlmC16 = 20240520, kLlmC32 = 20240801;  // llm.c: dev/data/data_common.py
constexpr std::uint64_t kLlmCHeader = 1024;
constexpr std::uint64_t kLargestVocabulary = std::uint64_t{1} << 32;

struct Header {
  char magic[8];
  std::uint32_t version, token_bytes;
  std::uint64_t documents, tokens, vocabulary, name_bytes, file_bytes, checksum;
};
static_assert(sizeof(Header) == kShardHeader && offsetof(Header, checksum) == 56);

constexpr std::uint64_t padded(std::uint64_t bytes) { return (bytes + 7) / 8 * 8; }

}  // namespace

ShardWriter::ShardWriter(const fs::path& path, std::string tokenizer, std::int64_t vocabulary)
    : file_(path),
      tokenizer_(std::move(tokenizer)),
      vocabulary_(static_cast<std::uint64_t>(vocabulary)),
      token_bytes_(vocabulary <= 65536 ? 2 : 4) {
  ISOGRAD_INVARIANT(!tokenizer_.empty() && tokenizer_.size() <= kLongestName, tokenizer_);
  ISOGRAD_INVARIANT(vocabulary > 0 && vocabulary_ <= kLargestVocabulary, std::to_string(vocabulary));
  XXH3_64bits_reset(hash_.get());
  file_.write(std::string(kShardHeader, '\0'));
  append(tokenizer_.data(), tokenizer_.size());
  pad();
}

void ShardWriter::append(const void* data, std::size_t bytes) {
  XXH3_64bits_update(hash_.get(), data, bytes);
  file_.write(data, bytes);
}

void ShardWriter::pad() {
  const std::uint64_t zero = 0;
  append(&zero, padded(file_.position()) - file_.position());
}

void ShardWriter::add(std::span<const std::uint32_t> document, std::span<const float> weights) {
  ISOGRAD_INVARIANT(!document.empty(), "a document without tokens");
  ISOGRAD_INVARIANT(weights.empty() || weights.size() == document.size(), std::to_string(weights.size()));
  const std::uint32_t largest = *std::max_element(document.begin(), document.end());
  ISOGRAD_INVARIANT(largest < vocabulary_, std::to_string(largest));
  if (token_bytes_ == 2) {
    narrow_.assign(document.begin(), document.end());
    append(narrow_.data(), 2 * narrow_.size());
  } else {
    append(document.data(), document.size_bytes());
  }
  for (std::size_t i = 0; i < document.size(); ++i) {
    const float weight = weights.empty() ? 1.0F : weights[i];
    if (run_weights_.empty() || run_weights_.back() != weight)
      run_ends_.push_back(0), run_weights_.push_back(weight);
    run_ends_.back() = offsets_.back() + i + 1;
    if (weights.empty()) {
      run_ends_.back() = offsets_.back() + document.size();
      break;
    }
  }
  offsets_.push_back(offsets_.back() + document.size());
}

void ShardWriter::finish() {
  pad();
  append(offsets_.data(), 8 * offsets_.size());
  const bool weighted = run_weights_.size() > 1 || run_weights_.front() != 1;
  if (weighted) {
    const std::uint64_t runs = run_ends_.size();
    append(&runs, 8);
    append(run_ends_.data(), 8 * runs);
    append(run_weights_.data(), 4 * runs);
    pad();
  }
  Header header{.magic = {},
                .version = weighted ? kWithWeights : kVersion,
                .token_bytes = token_bytes_,
                .documents = offsets_.size() - 1,
                .tokens = offsets_.back(),
                .vocabulary = vocabulary_,
                .name_bytes = tokenizer_.size(),
                .file_bytes = file_.position(),
                .checksum = 0};
  std::memcpy(header.magic, kShardMagic, sizeof kShardMagic);
  XXH3_64bits_update(hash_.get(), &header, offsetof(Header, checksum));
  header.checksum = XXH3_64bits_digest(hash_.get());
  file_.write_at(0, &header, sizeof header);
  file_.commit();
}

Shard::Shard(const fs::path& path, std::optional<std::uint32_t> end_of_text) : file_(path) {
  if (file_.size() == 0) fail("an empty file", "tokens");
  if (::stat(path.c_str(), &opened_) != 0) opened_ = {};  // removed meanwhile: no other file matches it
  std::uint32_t first = 0;
  std::memcpy(&first, file_.data(), std::min<std::size_t>(4, file_.size()));
  // Only *.bin may be foreign, and not if it resembles isograd's format: nanoGPT's has no header.
  const bool may_be_foreign = path.extension() == ".bin";
  if (!may_be_foreign || resembles_own())
    open_own();
  else if (file_.size() >= kLlmCHeader && (first == kLlmC16 || first == kLlmC32))
    open_llm_c(first, end_of_text);
  else
    open_nano_gpt(end_of_text);
}

// Most of the magic number, or the file's size in its place: no chance of tokens in another format.
bool Shard::resembles_own() const {
  Header header{};
  const std::size_t size = std::min<std::size_t>(sizeof header, file_.size());
  std::memcpy(&header, file_.data(), size);
  int equal = 0;
  for (std::size_t i = 0; i < std::min(size, sizeof kShardMagic); ++i)
    equal += header.magic[i] == kShardMagic[i];
  return equal >= 5 || (size == sizeof header && header.file_bytes == file_.size());
}

void Shard::fail(const std::string& found, const std::string& expected) const {
  refuse("token shard " + file_.path().string(), found, expected,
         "Pack the text again, or copy the shard again");
}

void Shard::open_own() {
  const std::uint64_t size = file_.size();
  if (size < kShardHeader) fail(fmt::format("{} bytes", size), "a header of 64 bytes");
  Header header;
  std::memcpy(&header, file_.data(), sizeof header);
  if (std::memcmp(header.magic, kShardMagic, sizeof kShardMagic) != 0)
    fail("no magic number of isograd", "an isograd shard, or a foreign one whose name ends in .bin");
  if (header.version != kVersion && header.version != kWithWeights)
    fail(fmt::format("version {}", header.version), "version 1 or 2");
  if (header.token_bytes != 2 && header.token_bytes != 4)
    fail(fmt::format("tokens of {} bytes", header.token_bytes), "2 or 4");
  if (header.file_bytes != size)
    fail(fmt::format("{} bytes", size), fmt::format("{} bytes, as its header says", header.file_bytes));
  // Each is bounded by the size of the file before it is multiplied or added.
  if (header.name_bytes == 0 || header.name_bytes > kLongestName)
    fail(fmt::format("a tokenizer name of {} bytes", header.name_bytes), "1 to 255");
  if (header.tokens == 0 || header.tokens > size / header.token_bytes || header.documents == 0 ||
      header.documents > header.tokens || header.documents > size / 8)
    fail(fmt::format("{} documents of {} tokens in {} bytes", header.documents, header.tokens, size),
         "at least one of each, and room for them");
  const std::uint64_t tokens_at = kShardHeader + padded(header.name_bytes);
  const std::uint64_t offsets_at = tokens_at + padded(header.tokens * header.token_bytes);
  std::uint64_t end = offsets_at + 8 * (header.documents + 1), runs = 0;
  if (header.version == kWithWeights && end <= size - 8) {
    std::memcpy(&runs, file_.data() + end, 8);
    if (runs == 0 || runs > header.tokens) fail(fmt::format("{} runs of weights", runs), "1 to one a token");
    end += 8 + 8 * runs + padded(4 * runs);
  }
  if (end != size) fail(fmt::format("{} bytes", size), fmt::format("{} bytes for its contents", end));

  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> hash(XXH3_createState(), XXH3_freeState);
  XXH3_64bits_reset(hash.get());
  for (std::size_t at = kShardHeader; at < size; at += kPiece) {
    XXH3_64bits_update(hash.get(), file_.data() + at, std::min(kPiece, size - at));
    file_.release(at, std::min(kPiece, size - at));
  }
  XXH3_64bits_update(hash.get(), file_.data(), offsetof(Header, checksum));
  if (const std::uint64_t found = XXH3_64bits_digest(hash.get()); found != header.checksum)
    fail(fmt::format("checksum {:016x}", found), fmt::format("checksum {:016x}", header.checksum));

  tokenizer_.assign(reinterpret_cast<const char*>(file_.data()) + kShardHeader, header.name_bytes);
  if (std::any_of(tokenizer_.begin(), tokenizer_.end(), [](char c) { return c < 32 || c > 126; }))
    fail("a tokenizer name with unprintable characters", "printable ASCII");
  offsets_ = {reinterpret_cast<const std::uint64_t*>(file_.data() + offsets_at), header.documents + 1};
  if (offsets_.front() != 0 || offsets_.back() != header.tokens)
    fail(fmt::format("documents from token {} to {}", offsets_.front(), offsets_.back()),
         fmt::format("0 to {}", header.tokens));
  if (std::adjacent_find(offsets_.begin(), offsets_.end(), std::greater_equal<>()) != offsets_.end())
    fail("documents that overlap or are empty", "offsets that increase");
  if (constexpr std::uint64_t kFew = 1 << 23; header.documents < kFew) {  // 64 MB: safe from a truncation
    split_offsets_.assign(offsets_.begin(), offsets_.end());
    offsets_ = split_offsets_;
  }
  if (runs > 0) set_weights(offsets_at + 8 * (header.documents + 1) + 8, runs);
  set_tokens(tokens_at, header.tokens, header.token_bytes);
  if (max_token_ >= header.vocabulary || header.vocabulary > kLargestVocabulary)
    fail(fmt::format("token {} of a vocabulary of {}", max_token_, header.vocabulary),
         "tokens below the vocabulary, and it at most 2^32");
}

void Shard::open_llm_c(std::uint32_t magic, std::optional<std::uint32_t> end_of_text) {
  std::uint32_t version = 0, count = 0;
  std::memcpy(&version, file_.data() + 4, 4);
  std::memcpy(&count, file_.data() + 8, 4);
  const std::uint32_t known = magic == kLlmC16 ? 1 : 7, token_bytes = magic == kLlmC16 ? 2 : 4;
  if (version != known) fail(fmt::format("llm.c version {}", version), fmt::format("version {}", known));
  const std::uint64_t expected = kLlmCHeader + std::uint64_t{count} * token_bytes;
  if (count == 0 || expected != file_.size())
    fail(fmt::format("{} bytes", file_.size()), fmt::format("{} bytes for {} tokens", expected, count));
  set_tokens(kLlmCHeader, count, token_bytes);
  split(end_of_text, true);
}

void Shard::open_nano_gpt(std::optional<std::uint32_t> end_of_text) {
  const std::uint64_t size = file_.size();
  if (size % 2 != 0)
    fail(fmt::format("{} bytes and no magic number", size), "llm.c's header or whole uint16 tokens");
  if (size >= kLlmCHeader &&
      std::all_of(file_.data() + 12, file_.data() + kLlmCHeader, [](std::uint8_t byte) { return byte == 0; }))
    fail("the zeros of an llm.c header without its magic number",
         fmt::format("the magic number {} or {}, or plain uint16 tokens", kLlmC16, kLlmC32));
  set_tokens(0, size / 2, 2);
  split(end_of_text, false);
}

void Shard::set_weights(std::uint64_t begin, std::uint64_t runs) {
  run_ends_ = {reinterpret_cast<const std::uint64_t*>(file_.data() + begin), runs};
  run_weights_ = {reinterpret_cast<const float*>(file_.data() + begin + 8 * runs), runs};
  if (run_ends_.front() == 0 || run_ends_.back() != offsets_.back() ||
      std::ranges::adjacent_find(run_ends_, std::greater_equal<>()) != run_ends_.end())
    fail("runs of weights that are empty or overlap", "ends that increase to the number of tokens");
  for (const float weight : run_weights_) {
    if (!(weight >= 0) || std::isinf(weight))
      fail(fmt::format("a weight of {}", weight), "finite weights of 0 or more");
    if (weight != 1)
      weights_ = std::max(weights_, weight == 0 ? TokenStore::Weights::kMask : TokenStore::Weights::kNumbers);
  }
}

void Shard::read_weights(std::uint64_t begin, std::span<float> out) const {
  ISOGRAD_INVARIANT(begin <= count_ && out.size() <= count_ - begin, file_.path().string());
  std::ranges::fill(out, 1.0F);
  if (run_ends_.empty()) return;
  auto run = static_cast<std::size_t>(std::ranges::upper_bound(run_ends_, begin) - run_ends_.begin());
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (begin + i >= run_ends_[run]) ++run;
    out[i] = run_weights_[run];
  }
}

void Shard::set_tokens(std::uint64_t begin, std::uint64_t count, std::uint32_t token_bytes) {
  count_ = count;
  if (token_bytes == 2)
    narrow_ = reinterpret_cast<const std::uint16_t*>(file_.data() + begin);
  else
    wide_ = reinterpret_cast<const std::uint32_t*>(file_.data() + begin);
  for (std::uint64_t at = 0; at < count; at += kPiece) {
    for (std::uint64_t i = at; i < std::min<std::uint64_t>(at + kPiece, count); ++i)
      max_token_ = std::max(max_token_, token(i));
    file_.release(begin + at * token_bytes, std::min<std::uint64_t>(kPiece, count - at) * token_bytes);
  }
}

void Shard::split(std::optional<std::uint32_t> end_of_text, bool at_start) {
  split_offsets_.push_back(0);
  if (end_of_text)
    for (std::uint64_t i = 0; i < count_; ++i) {
      if (token(i) != *end_of_text) continue;
      const std::uint64_t border = at_start ? i : i + 1;
      if (border > split_offsets_.back() && border < count_) split_offsets_.push_back(border);
    }
  split_offsets_.push_back(count_);
  offsets_ = split_offsets_;
}

void Shard::require_whole() const {
  struct stat found {};
  if (::stat(file_.path().c_str(), &found) != 0) return;
  if (found.st_dev != opened_.st_dev || found.st_ino != opened_.st_ino) return;
  const auto bytes = static_cast<std::uint64_t>(found.st_size);
  if (bytes < file_.size())
    fail(fmt::format("{} bytes: it was truncated while it was read", bytes),
         fmt::format("the {} bytes that it had when it was opened", file_.size()));
}

void Shard::read(std::uint64_t begin, std::span<std::int64_t> out) const {
  ISOGRAD_INVARIANT(begin <= count_ && out.size() <= count_ - begin, file_.path().string());
  if (narrow_)
    std::copy_n(narrow_ + begin, out.size(), out.begin());
  else
    std::copy_n(wide_ + begin, out.size(), out.begin());
}

// ---- descriptions ----

namespace {

constexpr std::size_t kPreviewTokens = 200, kPreviewCharacters = 100, kMarkedCharacters = 400;

// Text of which the parts that are learnt stand in [[ ]], with a weight other than 1 behind them.
std::string marked(const TokenStore& store, const Tokenizer& tokenizer, std::int64_t document,
                   std::int64_t begin, const std::vector<std::uint32_t>& tokens) {
  std::vector<float> weights(tokens.size());
  store.read_weights(document, begin, weights);
  std::string text;
  for (std::size_t i = 0, end = 0; i < tokens.size() && text.size() < kMarkedCharacters; i = end) {
    while (end < tokens.size() && weights[end] == weights[i]) ++end;
    const std::string part = printable(tokenizer.decode({tokens.data() + i, end - i}), kPreviewCharacters);
    if (weights[i] == 0)
      text += part;
    else
      text += "[[" + part + "]]" + (weights[i] == 1 ? "" : fmt::format("x{:g}", weights[i]));
  }
  return text;
}

// The first tokens of [begin, end) of a document: text if there is a tokenizer, else numbers.
std::string beginning(const TokenStore& store, const Tokenizer* tokenizer, std::int64_t document,
                      std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> wide(
      std::min<std::size_t>(kPreviewTokens, static_cast<std::size_t>(end - begin)));
  store.read(document, begin, wide);
  const std::vector<std::uint32_t> tokens(wide.begin(), wide.end());
  if (tokenizer && store.weights() != TokenStore::Weights::kOnes)
    return marked(store, *tokenizer, document, begin, tokens);
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
