// Tiny runs on videos: generated files of different lengths and sizes, a transformer of one or two small
// blocks.
#pragma once

#include "train/trainer_testing.hpp"

namespace isograd::testing_runs {

// An uncompressed video (YUV4MPEG2) of a bright square that wanders over a gradient.
inline void write_video(const std::filesystem::path& file, int frames, int rows, int columns, int seed) {
  std::string bytes = fmt::format("YUV4MPEG2 W{} H{} F8:1 Ip A1:1 C444\n", columns, rows);
  for (int frame = 0; frame < frames; ++frame) {
    bytes += "FRAME\n";
    for (int plane = 0; plane < 3; ++plane)
      for (int y = 0; y < rows; ++y)
        for (int x = 0; x < columns; ++x) {
          const bool inside = (x + frame + seed) % columns < 4 && (y + 2 * frame + 3 * seed) % rows < 5;
          bytes += static_cast<char>(inside ? 220 - 40 * plane : 60 + 5 * x + 3 * y + 7 * seed + 11 * plane);
        }
  }
  write_file(file, bytes);
}

class TinyVideos : public TinyRuns {
 protected:
  void SetUp() override {
    TinyRuns::SetUp();
    std::filesystem::create_directories(root_ / "videos");
    // Videos of 1 to 4 frames of patches and 2 x 2 to 3 x 4 patches: 4 to 48 tokens.
    const int shapes[][3] = {{2, 8, 8},  {4, 8, 12}, {8, 12, 16}, {3, 8, 8},
                             {6, 12, 8}, {8, 8, 16}, {2, 12, 12}};
    int seed = 0;
    for (const auto& shape : shapes) {
      write_video(root_ / "videos" / fmt::format("clip{}.y4m", seed), shape[0], shape[1], shape[2], seed);
      ++seed;
    }
  }

  RunConfig videos(const std::string& name, const std::string& dtype = "float32") const {
    RunConfig config = tiny(name, dtype);
    config.model.kind = "video";
    config.data = RunConfig{}.data;
    config.data.validation_fraction = 0.2;
    config.batch = RunConfig{}.batch;
    config.batch.videos_per_step = 5;
    config.batch.tokens_per_micro_batch = 30;  // several micro-batches, some of several videos
    config.video.files = {(root_ / "videos").string()};
    config.video.height = 12;
    config.video.frames_per_second = 0;
    config.video.patch_height = config.video.patch_width = 4;
    config.video.timestep_features = 8;
    config.video.gate_init = 0.5;  // no gradient is zero
    config.model.shape.heads = 4;
    config.model.shape.head_dim = 4;
    config.model.shape.initializer_range = 0.1;
    config.train.evaluate_packs = 4;
    return config;
  }
};

// Layouts on `ranks` ranks that are compared with plain data parallelism.
struct VideoLayout {
  const char* name;
  int ranks;
  void (*change)(RunConfig&);
};
inline const VideoLayout kVideoLayouts[] = {
    {"two", 2, [](RunConfig&) {}},
    {"three", 3, [](RunConfig&) {}},
    {"ring2", 2, [](RunConfig& c) { c.parallel.cp_ring = 2; }},
    {"ring3", 3, [](RunConfig& c) { c.parallel.cp_ring = 3; }},
    {"ulysses2", 2, [](RunConfig& c) { c.parallel.cp_ulysses = 2; }},
    {"ring2_ulysses2", 4, [](RunConfig& c) { c.parallel.cp_ring = c.parallel.cp_ulysses = 2; }},
    {"two_of_ring2_zero2", 4,
     [](RunConfig& c) {
       c.parallel.cp_ring = 2;
       c.parallel.strategy = "zero2";
     }},
    {"zero3_checkpointed_ring2", 2,
     [](RunConfig& c) {
       c.parallel.cp_ring = 2;
       c.parallel.strategy = "zero3";
       c.parallel.checkpoint_activations = true;
     }},
    {"zero3_four", 4, [](RunConfig& c) { c.parallel.strategy = "zero3"; }},
};

}  // namespace isograd::testing_runs
