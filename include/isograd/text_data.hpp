// Text into batches: tokenizers, token shards on disk, packing, and a loader whose order is independent of
// ranks.
#pragma once

#include "isograd/cxx20.hpp"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "isograd/loader.hpp"

namespace isograd {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // "bytes", "sentencepiece:<xxh of the model>", "tokenizer.json:<xxh of the file>"; recorded in shards.
  virtual std::string name() const = 0;
  virtual std::int64_t vocabulary() const = 0;
  virtual std::int64_t bos() const = 0;  // -1: none
  virtual std::int64_t eos() const = 0;  // -1: none
  // One document, with bos in front and eos behind where they exist.
  virtual std::vector<std::uint32_t> encode(std::string_view text) const = 0;
  // Ids of special tokens and ids outside the vocabulary give nothing; invalid byte sequences are replaced by
  // U+FFFD.
  virtual std::string decode(std::span<const std::uint32_t> tokens) const = 0;
  // The files that it is made from, into a checkpoint's folder under the names that transformers knows
  // (tokenizer.model, tokenizer.json, tokenizer_config.json), and, unchanged, those beside them that
  // transformers reads with a tokenizer (special_tokens_map.json, added_tokens.json, chat_template.jinja or
  // .json). Nothing where it needs none.
  virtual void write(const std::filesystem::path& /*directory*/) const {}
};

// 256 bytes, then bos = 256, eos = 257: vocabulary 258.
std::unique_ptr<Tokenizer> byte_tokenizer();
// A SentencePiece model file. ConfigError when it cannot be read.
std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const std::filesystem::path& model);
// A Hugging Face tokenizer.json, with the tokenizer_config.json beside it if there is one. A document gets
// what the tokenizer adds by itself, bos_token in front where add_bos_token is true, and eos_token behind. It
// runs in a process of the Python ($PYTHON, .venv/bin/python of the checkout this program was built in,
// python3) that has the package `tokenizers`; ConfigError where none has, or when the files cannot be read.
std::unique_ptr<Tokenizer> json_tokenizer(const std::filesystem::path& file);
// By name: "bytes", a file *.json, or a SentencePiece model.
std::unique_ptr<Tokenizer> open_tokenizer(const std::string& name);

// Files to documents. Each pattern is a file, a directory (all regular files below it, but for names that
// begin with a dot) or a glob; *.jsonl files give one document per line (field "text"), any other file is one
// document (without its byte order mark). Sorted by path, so the order does not depend on the file system; a
// file that two patterns name is read once. ConfigError: a pattern matches nothing, empty corpus, not UTF-8
// (names file and byte offset), a bad line of JSON (names file and line).
struct CorpusOptions {
  std::vector<std::string> patterns;
  std::int64_t shard_tokens = 64 << 20;  // most tokens of a shard; a longer document has a shard of its own
  bool replace = true;  // shards of other inputs where these are packed to; false: such are a ConfigError
  // Asked while another process packs into the same directory; true: do not wait for it (ConfigError).
  std::function<bool()> stop{};
};

// What packing did.
struct PackSummary {
  std::int64_t files = 0;  // read, or found unchanged
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
  std::int64_t empty_documents = 0;  // left out: no text in them
  std::int64_t doubled_marks = 0;    // documents whose own begin or end token stands beside the tokenizer's
  std::string first_doubled{};       // of these: "document 3 of a.jsonl begins with token 1 twice"
  bool reused = false;               // the directory held the shards of these very inputs already
};

// Reads, tokenizes and writes shards (magic, version, tokenizer, dtype, token and document counts, document
// offsets, tokens, xxh3 checksum) into `directory`, beside-then-rename. Returns the shard files. `directory`
// belongs to this corpus: shards of other inputs in it are removed once these are written, or refused before
// (CorpusOptions::replace). Shards made from the same inputs (paths, content, tokenizer) are used again as
// they are; a file is read again for that where its size, times or inode have changed. Safe to call from
// several processes: one packs, the others wait, at most an hour (ConfigError).
std::vector<std::filesystem::path> pack_corpus(const CorpusOptions& corpus, const Tokenizer& tokenizer,
                                               const std::filesystem::path& directory,
                                               PackSummary* summary = nullptr);

// Memory-mapped tokens with document boundaries. Opens isograd shards (any name), and files named *.bin:
// llm.c shards (magic 20240520: uint16, 20240801: uint32) and nanoGPT's (headerless uint16). In the latter
// two `end_of_text` delimits documents: it begins a document in llm.c's shards and ends one in nanoGPT's, as
// their own scripts write it; without it, a file is one document. A document never crosses files. open()
// reads every byte once: ConfigError (naming the file) when a file is missing, truncated, inconsistent or its
// checksum is wrong, and when files of different tokenizers are mixed.
class TokenStore {
 public:
  static std::shared_ptr<TokenStore> open(const std::vector<std::filesystem::path>& files,
                                          std::optional<std::uint32_t> end_of_text = std::nullopt);
  virtual ~TokenStore() = default;
  virtual std::int64_t num_documents() const = 0;
  virtual std::int64_t num_tokens() const = 0;
  virtual std::int64_t document_length(std::int64_t document) const = 0;
  // Copies tokens [begin, begin + out.size()) of the document.
  virtual void read(std::int64_t document, std::int64_t begin, std::span<std::int64_t> out) const = 0;
  virtual std::uint32_t max_token() const = 0;
  virtual std::string tokenizer_name() const = 0;  // "" for foreign shards
};

// What a store holds, for people: counts, lengths and the first `documents` documents, decoded where a
// tokenizer is given, with control characters escaped.
std::string describe(const TokenStore& store, const Tokenizer* tokenizer = nullptr,
                     std::int64_t documents = 3);

// Which documents train and which validate: by (seed, document), the same for every layout. A fraction above
// 0 gives at least one validation document where there are two documents or more, and leaves one to train on.
// ConfigError unless 0 <= validation_fraction < 1.
struct Split {
  std::vector<std::int64_t> train;
  std::vector<std::int64_t> validation;
};
Split split_documents(const TokenStore& store, double validation_fraction, std::uint64_t seed);

struct LoaderOptions {
  std::int64_t pack_length = 512;   // tokens of a pack
  std::int64_t packs_per_step = 8;  // the global batch, over all ranks and micro-batches
  std::int64_t packs_per_micro_batch = 4;
  std::uint64_t seed = 0;
  bool shuffle = true;  // the documents; false: in order (validation)
  bool shuffle_packs =
      false;  // the packs too: a step then mixes many documents; off, long ones stay together
  int rank = 0;
  int size = 1;
  bool read_ahead = true;  // prepare the next step on a thread
};

// A pack of a step: which rank takes it, in which of its micro-batches (both from 0), and the parts of
// documents in it, in order: tokens [begin, end) of a document of `length`.
struct PackContents {
  struct Part {
    std::int64_t document, begin, end, length;
    // All its tokens' but the document's last one's.
    std::int64_t num_targets() const { return end - begin - (end == length ? 1 : 0); }
  };
  int rank = 0;
  std::int64_t micro_batch = 0;
  std::vector<Part> parts;
};

// The packs of a step for people, one line a part, decoded where a tokenizer is given.
std::string describe_packs(const std::vector<PackContents>& packs, const TokenStore& store,
                           const Tokenizer* tokenizer = nullptr);

// Documents are shuffled by (seed, epoch), laid end to end and cut every pack_length tokens: a pack is a list
// of fragments. Step k of an epoch takes packs [k·P, (k+1)·P), in
// the order they lie or in one shuffled by (seed, epoch); rank r takes a contiguous part of them (sizes
// differ by at most one), cut into micro-batches. The last step of an epoch is short; nothing is dropped or
// repeated. Sample id = document index in the store. Targets are shifted before any cut: the last token of a
// fragment predicts the first of the sample's next fragment; the last token of a document has kIgnoreIndex.
class TextLoader : public BatchLoader {
 public:
  // ConfigError: no documents, a document twice, or an option out of range.
  TextLoader(std::shared_ptr<TokenStore> store, std::vector<std::int64_t> documents, LoaderOptions options);
  ~TextLoader() override;
  std::int64_t steps_per_epoch() const override;
  MicroBatches next() override;
  MicroBatches whole_step(LoaderPosition position) const override;  // one micro-batch per pack
  // What the step at `position` consists of, over all ranks, in the order of the packs. ConfigError: no such
  // step.
  std::vector<PackContents> packs(LoaderPosition position) const;
  LoaderPosition position() const override;
  void seek(LoaderPosition position) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace isograd
