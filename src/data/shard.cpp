#include "data/shard.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "base/refuse.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

static_assert(std::endian::native == std::endian::little, "shards are mapped, and little-endian");

constexpr std::uint32_t kVersion = 1;
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

ShardWriter::ShardWriter(const std::filesystem::path& path, std::string tokenizer, std::int64_t vocabulary)
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

void ShardWriter::add(std::span<const std::uint32_t> document) {
  ISOGRAD_INVARIANT(!document.empty(), "a document without tokens");
  const std::uint32_t largest = *std::max_element(document.begin(), document.end());
  ISOGRAD_INVARIANT(largest < vocabulary_, std::to_string(largest));
  if (token_bytes_ == 2) {
    narrow_.assign(document.begin(), document.end());
    append(narrow_.data(), 2 * narrow_.size());
  } else {
    append(document.data(), document.size_bytes());
  }
  offsets_.push_back(offsets_.back() + document.size());
}

void ShardWriter::finish() {
  pad();
  append(offsets_.data(), 8 * offsets_.size());
  Header header{.magic = {},
                .version = kVersion,
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

Shard::Shard(const std::filesystem::path& path, std::optional<std::uint32_t> end_of_text) : file_(path) {
  if (file_.size() == 0) fail("an empty file", "tokens");
  if (::stat(path.c_str(), &opened_) != 0) opened_ = {};  // removed meanwhile: no other file matches it
  std::uint32_t first = 0;
  std::memcpy(&first, file_.data(), std::min<std::size_t>(4, file_.size()));
  // A damaged isograd shard must not be read as nanoGPT's, which has no header. Only *.bin may be foreign,
  // and not if it still resembles isograd's format.
  const bool may_be_foreign = path.extension() == ".bin";
  if (!may_be_foreign || resembles_own())
    open_own();
  else if (file_.size() >= kLlmCHeader && (first == kLlmC16 || first == kLlmC32))
    open_llm_c(first, end_of_text);
  else
    open_nano_gpt(end_of_text);
}

// Most of the magic number, or the file's size at its place after our version, which tokens of another format
// would not contain by chance.
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
  if (header.version != kVersion) fail(fmt::format("version {}", header.version), "version 1");
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
  const std::uint64_t end = offsets_at + 8 * (header.documents + 1);
  if (end != size) fail(fmt::format("{} bytes", size), fmt::format("{} bytes for its contents", end));

  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> hash(XXH3_createState(), XXH3_freeState);
  XXH3_64bits_reset(hash.get());
  XXH3_64bits_update(hash.get(), file_.data() + kShardHeader, size - kShardHeader);
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

void Shard::set_tokens(std::uint64_t begin, std::uint64_t count, std::uint32_t token_bytes) {
  count_ = count;
  if (token_bytes == 2) {
    narrow_ = reinterpret_cast<const std::uint16_t*>(file_.data() + begin);
    max_token_ = *std::max_element(narrow_, narrow_ + count);
  } else {
    wide_ = reinterpret_cast<const std::uint32_t*>(file_.data() + begin);
    max_token_ = *std::max_element(wide_, wide_ + count);
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

}  // namespace isograd
