// Keys and rules of runs on videos.
#include <algorithm>

#include "isograd/error.hpp"
#include "isograd/group.hpp"
#include "train/config_keys.hpp"
#include "train/task.hpp"
#include "train/task_kind.hpp"
#include "train/video_model.hpp"

namespace isograd {
namespace key_table {
namespace {

std::vector<ConfigKey> video_keys() {
  return {
      KEY("batch.videos_per_step", batch.videos_per_step, "videos", at_least(1, kManyTokens),
          "The global batch of a `video` run: whole videos, over all ranks and micro-batches; the "
          "last step of an epoch may be shorter. Each rank gets about the same Σ length²."),
      KEY("batch.tokens_per_micro_batch", batch.tokens_per_micro_batch, "patches", at_least(1, kManyTokens),
          "Of videos: how many patches one forward and backward sees on one rank, at most; a "
          "longer video is a micro-batch by itself. A speed and memory option: the gradient does "
          "not depend on it."),

      KEY("video.files", video.files, "", any(),
          "Files, directories or globs of videos in any format that FFmpeg decodes."),
      KEY("video.height", video.height, "pixels", at_least(1, 8192),
          "Rows of pixels of a frame, at most: larger frames are scaled down, to whole patches."),
      KEY("video.frames_per_second", video.frames_per_second, "", at_least(0, 1000),
          "How many frames of a second are taken, at most. 0: every frame."),
      KEY("video.max_frames", video.max_frames, "frames", at_least(0, kManyTokens),
          "How many of a video's frames are taken, at most: its first. 0: all."),
      KEY("video.patch_frames", video.patch_frames, "frames", at_least(1, 256),
          "Of a patch, which is a token."),
      KEY("video.patch_height", video.patch_height, "pixels", at_least(1, 1024), "Rows of a patch."),
      KEY("video.patch_width", video.patch_width, "pixels", at_least(1, 1024), "Columns of a patch."),
      KEY("video.timestep_features", video.timestep_features, "", at_least(2, kWide),
          "Sines and cosines that tell the model the timestep; even."),
      KEY("video.gate_init", video.gate_init, "", at_least(-1, 1),
          "Where the gates of the blocks begin. 0: each block begins as the identity (adaLN-Zero), "
          "and has no gradient in the first step. Otherwise the projections that modulate begin "
          "like all others."),
  };
}

}  // namespace
}  // namespace key_table

namespace {

constexpr const char* kNotOfVideos = "model.kind is \"video\", which learns from video.files";
constexpr const char* kOnlyOfVideos = "model.kind is not \"video\"";

// A video at a time, or all of a rank's at once.
std::vector<RunConfig> video_accumulations(const RunConfig& config, int) {
  std::vector<RunConfig> all{config};
  std::int64_t& most_tokens = all.emplace_back(config).batch.tokens_per_micro_batch;
  most_tokens = most_tokens > 1 ? 1 : kAllTokens;
  return all;
}

void check_video_cut(const RunConfig& config, int) {
  if (config.parallel.tp == 1) return;
  const auto& fresh = config.model.shape;
  const std::string& load = config.model.load;
  const VideoDiTConfig shape = load.empty()
                                   ? VideoDiTConfig{.heads = fresh.heads, .feed_forward = fresh.feed_forward}
                                   : read_video_shape(load);
  check_dealt(config, {.heads = shape.heads,
                       .key_heads = shape.heads,
                       .others = {{"features of the feed-forward network", shape.feed_forward}}});
}

}  // namespace

const TaskKind& video_kind() {
  static const TaskKind kind{
      .name = "video",
      .samples = "videos",
      .tokens = "patches",
      .smaller = "batch.tokens_per_micro_batch, video.height or video.max_frames",
      .samples_per_step = [](const RunConfig& config) { return config.batch.videos_per_step; },
      .keys = key_table::video_keys,
      .unused = {{"model.",
                  kNotOfVideos,
                  {"model.kind", "model.load", "model.hidden", "model.layers", "model.heads",
                   "model.head_dim", "model.feed_forward", "model.initializer_range"}},
                 {"data.", kNotOfVideos, {"data.validation_fraction"}},
                 {"batch.",
                  kNotOfVideos,
                  {"batch.videos_per_step", "batch.tokens_per_micro_batch", "batch.max_tokens_per_rank"}},
                 {"ranking.", kNotOfVideos},
                 {"sample.", kNotOfVideos},
                 {"loss.fused", kNotOfVideos}},
      .of_no_other = {{"video.", kOnlyOfVideos},
                      {"batch.videos_per_step", kOnlyOfVideos},
                      {"batch.tokens_per_micro_batch", kOnlyOfVideos}},
      .check_ranks = check_video_cut,
      .accumulations = video_accumulations,
      .accumulation_text = [](const RunConfig& config) -> std::string {
        return config.batch.tokens_per_micro_batch == 1 ? "a video to a micro-batch" : "one micro-batch";
      },
      .make = make_video_task};
  return kind;
}

}  // namespace isograd
