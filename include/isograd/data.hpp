// Batch sources: loaders for text and video, a sampler for other data, tokenizers and token shards.
#pragma once

#include "isograd/error.hpp"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "isograd/batch.hpp"

namespace isograd {

// The position of a loader. Enough to resume bit for bit.
struct LoaderPosition {
  std::int64_t epoch = 0;
  std::int64_t step = 0;  // within the epoch
};

// The order of samples depends on options and seed, not on ranks.
class BatchLoader {
 public:
  virtual ~BatchLoader() = default;
  virtual std::int64_t steps_per_epoch() const = 0;
  // Returns this rank's micro-batches of the next step, possibly none. Continues into the next epoch.
  virtual MicroBatches next() = 0;
  // The whole step on one rank, regardless of the loader's rank and size (for the oracle).
  virtual MicroBatches whole_step(LoaderPosition position) const = 0;
  virtual LoaderPosition position() const = 0;     // of the step that next() returns
  virtual void seek(LoaderPosition position) = 0;  // ConfigError: no such step
};

// Sampler: which samples of a data set each rank sees in each step. For data other than text and video.

struct SamplerOptions {
  std::int64_t samples = 0;           // of the data set
  std::int64_t samples_per_step = 1;  // the global batch, over all ranks
  int rank = 0;
  int size = 1;
  std::uint64_t seed = 0;
  bool shuffle = true;  // each epoch anew, by (seed, epoch) and never by rank
  // How the samples of a step are assigned to ranks. Does not change the step's samples or gradient.
  enum class Assign {
    kBlock,  // rank r gets a contiguous part; parts differ by at most one sample
    kStride  // rank r gets the r-th of every `size` samples
  } assign = Assign::kBlock;
  // Leaves out a short last step. Not needed for correctness: ranks without samples contribute zeros.
  bool drop_last = false;
};

// An epoch is a permutation of the samples, split into steps: every sample comes once, on any number of
// ranks.
class Sampler {
 public:
  // ConfigError: options out of range, or drop_last with fewer samples than a step takes.
  explicit Sampler(const SamplerOptions& options);

  using Position = LoaderPosition;
  std::int64_t steps_per_epoch() const;
  // Returns indices of this rank's samples of the next step, possibly none. Continues into the next epoch.
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

// A Sampler as torch::data::make_data_loader() takes one: a batch for each step, from where it stands,
// without end.
class LoaderSampler {
 public:
  using BatchRequestType = std::vector<std::size_t>;
  explicit LoaderSampler(Sampler sampler) : sampler_(std::move(sampler)) {}
  // ConfigError: no samples in a step, of which torch::data makes no batch. Give drop_last, and a step at
  // least as many samples as there are ranks.
  std::optional<BatchRequestType> next(std::size_t /*batch_size*/);
  void reset(std::optional<std::size_t> /*size*/ = {}) {}

 private:
  Sampler sampler_;
};

// Text: tokenizers, token shards on disk, packing, and a loader whose order does not depend on ranks.

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // "bytes", "sentencepiece:<xxh of the model>", "tokenizer.json:<xxh of the file>"; recorded in shards.
  virtual std::string name() const = 0;
  virtual std::int64_t vocabulary() const = 0;
  virtual std::int64_t bos() const = 0;  // -1: none
  virtual std::int64_t eos() const = 0;  // -1: none
  // Encodes one document, with bos before and eos after it where they exist.
  virtual std::vector<std::uint32_t> encode(std::string_view text) const = 0;
  // Encodes a conversation by the tokenizer's chat template; returns what each token counts as a target.
  // `record`: JSON, {"messages": [...], "all": false} or {"prompt": [...], "completion": [...], "all":
  // false}. ConfigError: no chat template, or one that does not mark what the assistant says.
  virtual std::vector<float> encode_conversation(std::string_view record,
                                                 std::vector<std::uint32_t>& tokens) const;
  virtual std::string chat_template() const { return ""; }  // all that a conversation's tokens depend on
  // Special tokens and ids outside the vocabulary decode to nothing, invalid byte sequences to U+FFFD.
  virtual std::string decode(std::span<const std::uint32_t> tokens) const = 0;
  // Writes its files into a checkpoint's folder, as transformers names them, with copies of related ones.
  virtual void write(const std::filesystem::path& /*directory*/) const {}
};

// 256 bytes, then bos = 256, eos = 257: vocabulary 258.
std::unique_ptr<Tokenizer> byte_tokenizer();
// A SentencePiece model file. ConfigError when it cannot be read.
std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const std::filesystem::path& model);
// A Hugging Face tokenizer.json: bos_token before a document where the tokenizer_config.json next to it sets
// add_bos_token, eos_token after it. Runs in a process of the first Python ($PYTHON, the checkout's .venv,
// python3), which needs the package `tokenizers` (ConfigError).
std::unique_ptr<Tokenizer> json_tokenizer(const std::filesystem::path& file);
// By name: "bytes", a file *.json, or a SentencePiece model.
std::unique_ptr<Tokenizer> open_tokenizer(const std::string& name);

// A pattern is a file, a glob, or a directory (all files below, except names that begin with a dot). *.jsonl,
// *.jsonl.gz and *.jsonl.zst files give a document per line, others are one. Each file is read once, by path.
// A line has the field "text"; "prompt" and "completion", as texts or as messages; "messages"; or "tokens"
// (docs/conversations.md). "weight" (>= 0) weighs the line's targets, "weights" each of its "tokens".
// ConfigError: a pattern without match, no text, text that is not UTF-8, a bad line where on_bad_line =
// kStop.
struct CorpusOptions {
  std::vector<std::string> patterns;
  enum class OnBadLine { kStop, kSkip } on_bad_line = OnBadLine::kStop;
  bool train_on_all = false;       // targets of conversations are all tokens, not the assistant's alone
  bool drop_doubled_mark = false;  // of a text that begins or ends with the token that the tokenizer adds
  std::int64_t shard_tokens = 64 << 20;  // most tokens of a shard; a longer document has a shard of its own
  bool replace = true;  // replaces shards of other inputs in the same directory; false: ConfigError
  // Asked while another process packs into the same directory; true: do not wait for it (ConfigError).
  std::function<bool()> stop{};
};

// Results of packing.
struct PackSummary {
  std::int64_t files = 0;  // read, or found unchanged
  std::int64_t documents = 0;
  std::int64_t tokens = 0;
  std::int64_t empty_documents = 0;  // left out: no text in them
  std::int64_t doubled_marks = 0;    // documents that begin or end with the token that the tokenizer adds
  std::string first_doubled{};       // the first of them: "document 3 of a.jsonl begins with token 1 twice"
  std::int64_t bad_lines = 0;        // left out; the directory's .bad-lines.txt names each
  std::string first_bad{};           // "a.jsonl:3: ..."
  bool reused = false;               // the directory already held the shards of these inputs
};

// Writes a corpus as shards into `directory` and returns them. Shards of the same inputs (paths, content,
// tokenizer) are reused, others replaced or refused. Of several processes one packs, the others wait, at most
// an hour.
std::vector<std::filesystem::path> pack_corpus(const CorpusOptions& corpus, const Tokenizer& tokenizer,
                                               const std::filesystem::path& directory,
                                               PackSummary* summary = nullptr);

// Memory-mapped tokens of isograd's shards, llm.c's *.bin (magic 20240520: uint16, 20240801: uint32) and
// nanoGPT's (uint16, no header). `end_of_text` begins a document in llm.c's and ends one in nanoGPT's;
// without it a file is one. ConfigError: missing, truncated, inconsistent, a wrong checksum, another
// tokenizer.
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
  // Weights of tokens as targets: all 1; 1 or 0 (no target); any numbers >= 0.
  enum class Weights { kOnes, kMask, kNumbers };
  virtual Weights weights() const { return Weights::kOnes; }
  // Copies the weights of tokens [begin, begin + out.size()) of the document.
  virtual void read_weights(std::int64_t document, std::int64_t begin, std::span<float> out) const;
};

// Counts, lengths and the first documents, decoded where a tokenizer is given, control characters escaped.
std::string describe(const TokenStore& store, const Tokenizer* tokenizer = nullptr,
                     std::int64_t documents = 3);

// By (seed, document); above 0 at least one document on either side. ConfigError unless 0 <= fraction < 1.
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
  // kSplit: documents are concatenated and split at pack_length. kBestFit: a pack holds whole documents, by
  // best fit decreasing; a longer document is split at pack_length.
  enum class Packing { kSplit, kBestFit } packing = Packing::kSplit;
  bool shuffle_packs = false;  // mixes many documents in a step; off: packs of a long document stay together
  int rank = 0;
  int size = 1;
  bool read_ahead = true;  // prepare the next step on a thread
};

// A pack of a step: its rank, micro-batch, and parts: tokens [begin, end) of a document of `length`.
struct PackContents {
  struct Part {
    std::int64_t document, begin, end, length;
    std::int64_t ignored = 0;  // tokens whose target has weight 0
    // The last token of the document has no target.
    std::int64_t num_targets() const { return end - begin - (end == length ? 1 : 0) - ignored; }
  };
  int rank = 0;
  std::int64_t micro_batch = 0;
  std::vector<Part> parts;
};

// Human-readable list of a step's packs, one line per part, decoded where a tokenizer is given.
std::string describe_packs(const std::vector<PackContents>& packs, const TokenStore& store,
                           const Tokenizer* tokenizer = nullptr);

// Documents are shuffled by (seed, epoch) and packed into pack_length tokens (LoaderOptions::packing). Step k
// takes packs [k·P, (k+1)·P), rank r a contiguous part of them. The last step is short; nothing is dropped or
// repeated. Sample id = document. Targets are shifted before any split; a document's last token has
// kIgnoreIndex.
class TextLoader : public BatchLoader {
 public:
  // ConfigError: no documents, a document twice, or an option out of range.
  TextLoader(std::shared_ptr<TokenStore> store, std::vector<std::int64_t> documents, LoaderOptions options);
  ~TextLoader() override;
  std::int64_t steps_per_epoch() const override;
  MicroBatches next() override;
  MicroBatches whole_step(LoaderPosition position) const override;  // one micro-batch per pack
  // Contents of the step at `position` over all ranks, in the order of the packs. ConfigError: no such step.
  std::vector<PackContents> packs(LoaderPosition position) const;
  LoaderPosition position() const override;
  void seek(LoaderPosition position) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Video: decoding, 3-D patches as tokens, whole videos assigned to ranks.

// Size of a patch in frames, rows and columns of pixels; or size of a video in patches.
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
  std::int64_t height = 64;           // at most this many rows of pixels; larger frames are scaled down
  double frames_per_second = 8;       // at most this many, by time stamps; 0: every frame
  std::int64_t max_frames = 0;        // the first ones of a video; 0: all
  VideoGrid patch{2, 8, 8};
};

// Frames are scaled to whole patches: rows to the most within `height` and the file's, columns by the aspect
// ratio; frames beyond whole patches are left out. Decoded once, bit-exact. Threads may share a store.
class VideoStore {
 public:
  // ConfigError naming the file: missing, damaged, truncated, too small for a patch; options out of range.
  static std::shared_ptr<const VideoStore> open(const VideoOptions& options);
  // Makes a store from decoded frames: uint8 [frames, rows, columns, 3], whole patches.
  static std::shared_ptr<const VideoStore> from_frames(const std::vector<at::Tensor>& videos,
                                                       VideoGrid patch);

  std::int64_t num_videos() const { return static_cast<std::int64_t>(grids_.size()); }
  VideoGrid grid(std::int64_t video) const { return grids_[index(video)]; }  // in patches
  std::int64_t num_tokens(std::int64_t video) const { return grid(video).count(); }
  std::int64_t first_token(std::int64_t video) const { return first_[index(video)]; }
  std::int64_t num_tokens() const { return first_.back(); }  // of all videos
  VideoGrid patch() const { return patch_; }
  VideoGrid largest() const;  // of all videos' grids, each axis by itself
  std::int64_t patch_elements() const { return 3 * patch_.count(); }
  std::string name(std::int64_t video) const { return names_[index(video)]; }
  std::uint64_t fingerprint() const { return fingerprint_; }  // of all pixels and shapes

  // `tokens` [T] int64: first_token(video) + position (ConfigError: no such) -> [T, 3 · pt · ph · pw], −1 to
  // 1.
  at::Tensor patches(const at::Tensor& tokens, at::ScalarType dtype) const;
  at::Tensor coordinates(const at::Tensor& tokens) const;  // [T, 3] int64: frame, row, column of patches

 private:
  VideoStore(const std::vector<at::Tensor>& videos, std::vector<std::string> names, VideoGrid patch);
  std::size_t index(std::int64_t video) const;         // ConfigError: no such video
  at::Tensor checked(const at::Tensor& tokens) const;  // int64, contiguous, all of them tokens of a video

  VideoGrid patch_;
  std::vector<std::string> names_;
  std::vector<VideoGrid> grids_{};
  std::vector<std::int64_t> first_{0};  // the first token of each video, and the end of the last
  at::Tensor bytes_{};                  // [tokens, E] uint8
  std::uint64_t fingerprint_ = 0;
};

// One video as VideoOptions say: uint8 [frames, rows, columns, 3]. ConfigErrors as of VideoStore::open.
at::Tensor decode_video(const std::filesystem::path& file, const VideoOptions& options);

// Converts frames uint8 [F, H, W, 3] of whole patches to tokens, uint8 [T, 3 · pt · ph · pw], and back.
at::Tensor patchify(const at::Tensor& frames, VideoGrid patch);
at::Tensor unpatchify(const at::Tensor& patches, VideoGrid grid, VideoGrid patch);
// Converts [−1, 1] to bytes: rounded, values outside clamped.
at::Tensor to_bytes(const at::Tensor& patches);

// Encodes one frame uint8 [H, W, 3] as PNG.
std::string encode_png(const at::Tensor& frame);

// Writes frames uint8 [F, H, W, 3] as a lossless animated PNG. ConfigError: it cannot be written.
void write_apng(const std::filesystem::path& file, const at::Tensor& frames, double frames_per_second);

struct VideoLoaderOptions {
  std::int64_t videos_per_step = 8;            // over all ranks and micro-batches
  std::int64_t tokens_per_micro_batch = 4096;  // at most; a longer video is a micro-batch by itself
  std::uint64_t seed = 0;
  bool shuffle = true;  // the videos; false: in order
  int rank = 0;
  int size = 1;
};

// Videos are shuffled by (seed, epoch); step k takes videos [k·V, (k+1)·V), whole, the longest first to the
// rank with the least Σ tokens²; a rank may get none. Every rank computes the same assignment. Tokens and
// targets are the store's, a video is one fragment, sample id = video, draw = the step since the first epoch.
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
  std::vector<std::vector<std::int64_t>> assign(LoaderPosition at, int ranks) const;
  MicroBatches batches(const std::vector<std::int64_t>& videos, LoaderPosition at, std::int64_t most) const;
  void check(LoaderPosition at) const;

  std::shared_ptr<const VideoStore> store_;
  std::vector<std::int64_t> videos_;
  VideoLoaderOptions options_;
  LoaderPosition position_;
};

}  // namespace isograd
