// From video files to batches: decoding, 3-D patches as tokens, whole videos dealt over ranks. The same for
// every number of ranks.
#pragma once

#include "isograd/cxx20.hpp"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "isograd/loader.hpp"

namespace isograd {

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
