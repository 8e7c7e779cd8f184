// Token shards on disk. isograd's format is written and read; llm.c's and nanoGPT's are read.
//
// isograd's format, little-endian, every part padded to 8 bytes:
//    0  magic "isograd\x01"      8  u32 version = 1        12  u32 bytes of a token, 2 or 4
//   16  u64 documents           24  u64 tokens             32  u64 vocabulary of the tokenizer
//   40  u64 bytes of its name   48  u64 bytes of the file  56  u64 XXH3-64 of bytes 64 .. end, then 0 .. 56
//   64  name of the tokenizer, tokens, u64 offsets [documents + 1] of the documents, in tokens
// Version 2 has the weights of tokens as targets in runs of equal ones: u64 number of runs, u64 ends of the
// runs in tokens, f32 weights of the runs. Version 1 is written where all are 1.
#pragma once

#include <sys/stat.h>
#include <xxhash.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/files.hpp"
#include "isograd/data.hpp"

namespace isograd {

inline constexpr char kShardMagic[8] = {'i', 's', 'o', 'g', 'r', 'a', 'd', '\x01'};
inline constexpr std::uint64_t kShardHeader = 64;
inline constexpr std::uint64_t kLongestName = 255;

// Appends documents to one shard; finish() completes the header and publishes the file.
class ShardWriter {
 public:
  ShardWriter(const fs::path& path, std::string tokenizer, std::int64_t vocabulary);
  // REQUIRES: not empty. weights: one each, finite and >= 0; empty: all 1.
  void add(std::span<const std::uint32_t> document, std::span<const float> weights = {});
  std::int64_t tokens() const { return static_cast<std::int64_t>(offsets_.back()); }
  void finish();

 private:
  void append(const void* data, std::size_t bytes);
  void pad();

  AtomicFile file_;
  std::string tokenizer_;
  std::uint64_t vocabulary_;
  std::uint32_t token_bytes_;
  std::vector<std::uint64_t> offsets_{0};
  std::vector<std::uint64_t> run_ends_;  // of tokens with one weight
  std::vector<float> run_weights_;
  std::vector<std::uint16_t> narrow_;
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> hash_{XXH3_createState(), XXH3_freeState};
};

// One mapped file of tokens, checked when opened.
class Shard {
 public:
  // ConfigError with the file's name unless the whole file is valid. `end_of_text` as in TokenStore::open.
  Shard(const fs::path& path, std::optional<std::uint32_t> end_of_text);
  std::int64_t num_documents() const { return static_cast<std::int64_t>(offsets_.size()) - 1; }
  std::int64_t num_tokens() const { return static_cast<std::int64_t>(offsets_.back()); }
  std::uint64_t offset(std::int64_t document) const { return offsets_[static_cast<std::size_t>(document)]; }
  std::uint32_t max_token() const { return max_token_; }
  const std::string& tokenizer() const { return tokenizer_; }  // empty: a foreign shard
  const fs::path& path() const { return file_.path(); }
  void read(std::uint64_t begin, std::span<std::int64_t> out) const;
  void read_weights(std::uint64_t begin, std::span<float> out) const;
  TokenStore::Weights weights() const { return weights_; }
  // ConfigError if the file was truncated in place since: reading beyond its new end is a SIGBUS (and still
  // is, between this check and the read). A replaced or removed file stays readable.
  void require_whole() const;

 private:
  bool resembles_own() const;
  void open_own();
  void open_llm_c(std::uint32_t magic, std::optional<std::uint32_t> end_of_text);
  void open_nano_gpt(std::optional<std::uint32_t> end_of_text);
  void set_weights(std::uint64_t begin, std::uint64_t runs);
  void set_tokens(std::uint64_t begin, std::uint64_t count, std::uint32_t token_bytes);
  // Splits into documents at each `end_of_text`: at its start (at_start), or after it.
  void split(std::optional<std::uint32_t> end_of_text, bool at_start);
  std::uint32_t token(std::uint64_t index) const { return narrow_ ? narrow_[index] : wide_[index]; }
  [[noreturn]] void fail(const std::string& found, const std::string& expected) const;

  MappedFile file_;
  struct stat opened_ {};
  const std::uint16_t* narrow_ = nullptr;  // one of the two is set
  const std::uint32_t* wide_ = nullptr;
  std::uint64_t count_ = 0;
  std::vector<std::uint64_t> split_offsets_;  // of a foreign shard, or of one with few documents
  std::span<const std::uint64_t> offsets_;    // [documents + 1], in the file or in split_offsets_
  std::span<const std::uint64_t> run_ends_;   // in the file; empty: all weights are 1
  std::span<const float> run_weights_;
  TokenStore::Weights weights_ = TokenStore::Weights::kOnes;
  std::uint32_t max_token_ = 0;
  std::string tokenizer_;
};

}  // namespace isograd
