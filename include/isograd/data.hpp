// What gives a run its batches, of whatever kind its data is.
#pragma once

#include "isograd/error.hpp"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "isograd/batch.hpp"

namespace isograd {

// Where a loader stands: enough to resume bit for bit.
struct LoaderPosition {
  std::int64_t epoch = 0;
  std::int64_t step = 0;  // within the epoch
};

// The order of samples is a function of options and seed, not of ranks: what a step holds is the same
// whatever part of it each rank gets.
class BatchLoader {
 public:
  virtual ~BatchLoader() = default;
  virtual std::int64_t steps_per_epoch() const = 0;
  // This rank's micro-batches of the next step; crosses into the next epoch by itself. May be empty on a
  // rank.
  virtual MicroBatches next() = 0;
  // The whole step on one rank, regardless of the loader's rank and size (for the oracle).
  virtual MicroBatches whole_step(LoaderPosition position) const = 0;
  virtual LoaderPosition position() const = 0;     // of the step that next() returns
  virtual void seek(LoaderPosition position) = 0;  // ConfigError: no such step
};

// Which samples of one's own data set each rank sees in each step, for people who do not train on text.

struct SamplerOptions {
  std::int64_t samples = 0;           // of the data set
  std::int64_t samples_per_step = 1;  // the global batch, over all ranks
  int rank = 0;
  int size = 1;
  std::uint64_t seed = 0;
  bool shuffle = true;  // each epoch anew, by (seed, epoch) and never by rank
  // How a step is dealt out. The step's samples are the same either way, and so is the gradient.
  enum class Deal {
    kBlock,  // rank r gets a contiguous part; parts differ by at most one sample
    kStride  // rank r gets the r-th of every `size` samples
  } deal = Deal::kBlock;
  // Leaves out the last step of an epoch where it is short. Nothing in isograd needs it: a short step has the
  // gradient of what is in it, ranks without samples take part with zeros.
  bool drop_last = false;
};

// An epoch is a permutation of the samples, cut into steps; the last one may be short. Every sample comes
// once an epoch: nothing is repeated to make ranks even (museum B25), nothing is left out unless drop_last
// asks for it. Steps do not depend on the number of ranks, so that a run continues on another.
class Sampler {
 public:
  // ConfigError: options out of range, or drop_last with fewer samples than a step takes.
  explicit Sampler(const SamplerOptions& options);

  struct Position {
    std::int64_t epoch = 0;
    std::int64_t step = 0;  // within the epoch
  };
  std::int64_t steps_per_epoch() const;
  // Indices of this rank's samples of the next step, possibly none; crosses into the next epoch by itself.
  std::vector<std::int64_t> next();
  Position position() const { return position_; }  // of the step that next() returns
  void seek(Position position);                    // ConfigError: no such step

 private:
  void shuffle();

  SamplerOptions options_;
  Position position_;
  std::int64_t shuffled_epoch_ = -1;
  std::vector<std::int64_t> order_;  // of shuffled_epoch_
};

// Text into batches: tokenizers, token shards on disk, packing, and a loader whose order is independent of
// ranks.

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

// From video files to batches: decoding, 3-D patches as tokens, whole videos dealt over ranks. The same for
// every number of ranks.

// Of a patch, in frames, rows and columns of pixels; of a video, in patches.
struct VideoGrid {
  std::int64_t t = 1, h = 1, w = 1;
  std::int64_t count() const { return t * h * w; }
  // Frame, row and column of a video's token.
  std::array<std::int64_t, 3> place_of(std::int64_t token) const {
    return {token / (h * w), token / w % h, token % w};
  }
  bool operator==(const VideoGrid&) const = default;
};

struct VideoOptions {
  std::vector<std::string> patterns;  // files, folders or globs, in the order given
  std::int64_t height = 64;           // the most rows of pixels; larger frames are scaled down, none is up
  double frames_per_second = 8;       // at most so many are taken, by their time stamps; 0: every frame
  std::int64_t max_frames = 0;        // of a video, its first; 0: all
  VideoGrid patch{2, 8, 8};
};

// Frames are scaled to whole patches: rows are the most multiples of patch.h within `height` and the file's
// own, columns keep the aspect as far as multiples of patch.w allow. Frames beyond whole patches are left
// out. Decoded once, by FFmpeg's libraries on one thread in their bit-exact mode, and kept as bytes in the
// order of tokens: read-only, may be shared by threads.
class VideoStore {
 public:
  // ConfigError naming the file: missing, no video in it, damaged, truncated, no frame, fewer frames or
  // pixels than a patch; options out of range.
  static std::shared_ptr<const VideoStore> open(const VideoOptions& options);
  // From frames at hand: uint8 [frames, rows, columns, 3], whole patches.
  static std::shared_ptr<const VideoStore> from_frames(const std::vector<at::Tensor>& videos,
                                                       VideoGrid patch);

  std::int64_t num_videos() const;
  VideoGrid grid(std::int64_t video) const;           // in patches
  std::int64_t num_tokens(std::int64_t video) const;  // grid(video).count()
  std::int64_t first_token(std::int64_t video) const;
  std::int64_t num_tokens() const;  // of all videos
  VideoGrid patch() const;
  VideoGrid largest() const;            // of all videos' grids, each axis by itself
  std::int64_t patch_elements() const;  // 3 · patch().count()
  std::string name(std::int64_t video) const;
  std::uint64_t fingerprint() const;  // of all pixels and shapes

  // Token number = first_token(video) + position; positions go by frame, then row, then column of patches.
  // `tokens` [T] int64. ConfigError on a number that is nobody's.
  // [T, 3 · pt · ph · pw] in [−1, 1]; within a patch by frame, row, column, then red, green, blue.
  at::Tensor patches(const at::Tensor& tokens, at::ScalarType dtype) const;
  at::Tensor coordinates(const at::Tensor& tokens) const;  // [T, 3] int64: frame, row, column of patches

 private:
  struct Impl;
  explicit VideoStore(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

// The frames of one video, scaled and taken as VideoOptions say: uint8 [frames, rows, columns, 3].
// ConfigErrors as of VideoStore::open.
at::Tensor decode_video(const std::filesystem::path& file, const VideoOptions& options);

// Whole patches of frames uint8 [F, H, W, 3] as tokens, uint8 [T, 3 · pt · ph · pw], and back.
at::Tensor patchify(const at::Tensor& frames, VideoGrid patch);
at::Tensor unpatchify(const at::Tensor& patches, VideoGrid grid, VideoGrid patch);
// From [−1, 1] to bytes: rounded, what lies outside cut off.
at::Tensor to_bytes(const at::Tensor& patches);

// A PNG of one frame, uint8 [H, W, 3].
std::string encode_png(const at::Tensor& frame);

// Frames uint8 [F, H, W, 3] as an animated PNG, which any browser plays, without loss. ConfigError when the
// file cannot be written.
void write_apng(const std::filesystem::path& file, const at::Tensor& frames, double frames_per_second);

struct VideoLoaderOptions {
  std::int64_t videos_per_step = 8;            // over all ranks and micro-batches
  std::int64_t tokens_per_micro_batch = 4096;  // at most; a longer video is a micro-batch by itself
  std::uint64_t seed = 0;
  bool shuffle = true;  // the videos; false: in order
  int rank = 0;
  int size = 1;
};

// Videos are shuffled by (seed, epoch); step k of an epoch takes videos [k·V, (k+1)·V) of that order, the
// last step what is left. Ranks get whole videos, the longest first to the rank with the least Σ tokens²,
// which is what full attention costs; a rank may get none. Every rank computes this alike; nothing is
// communicated. Of a batch: tokens and targets are token numbers of the store (every token carries a loss),
// one fragment for each video, sample id = video, draw = the number of the step from the first epoch on.
class VideoLoader : public BatchLoader {
 public:
  // ConfigError: no videos, a video twice, an option out of range.
  VideoLoader(std::shared_ptr<const VideoStore> store, std::vector<std::int64_t> videos,
              VideoLoaderOptions options);
  std::int64_t steps_per_epoch() const override;
  MicroBatches next() override;
  MicroBatches whole_step(LoaderPosition position) const override;  // a micro-batch per video
  LoaderPosition position() const override;
  void seek(LoaderPosition position) override;

 private:
  // Videos of each rank, in the order of the step.
  std::vector<std::vector<std::int64_t>> deal(LoaderPosition at, int ranks) const;
  MicroBatches batches(const std::vector<std::int64_t>& videos, LoaderPosition at, std::int64_t most) const;
  void check(LoaderPosition at) const;

  std::shared_ptr<const VideoStore> store_;
  std::vector<std::int64_t> videos_;
  VideoLoaderOptions options_;
  LoaderPosition position_;
};

}  // namespace isograd
