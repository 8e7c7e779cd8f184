// The files of a model of videos, and new videos from them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "isograd/model.hpp"

namespace isograd {

// config.json with a shape of our own, model.safetensors. ConfigError naming file and key where something is
// missing or does not fit.
bool is_video_model(const std::filesystem::path& directory);  // by its config.json
std::shared_ptr<VideoDiT> read_video_model(const std::filesystem::path& directory, at::ScalarType dtype);
void write_video_model(const std::filesystem::path& directory, VideoDiTConfig shape,
                       const TensorStream& weights);

struct VideoSampleOptions {
  std::int64_t videos = 1;
  std::int64_t steps = 50;                         // of Euler's method
  std::int64_t frames = 0, height = 0, width = 0;  // in frames and pixels; 0: the most that the model knows
  std::uint64_t seed = 0;
  std::filesystem::path folder = "samples";
};
// New videos from a checkpoint of a video run, as animated PNGs; the files, in order. ConfigError when the
// checkpoint is none, a size is not one of whole patches, or a file cannot be written.
std::vector<std::filesystem::path> sample_videos(const std::filesystem::path& directory,
                                                 const VideoSampleOptions& options);

}  // namespace isograd
