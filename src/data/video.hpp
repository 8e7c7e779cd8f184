// Functions that the room's video files share.
#pragma once

#include <chrono>

#include "isograd/data.hpp"

namespace isograd {

// ConfigError when an option is out of range.
void check(const VideoOptions& options);

// As decode_video(), with a limit on the time without a frame.
at::Tensor decode_video(const std::filesystem::path& file, const VideoOptions& options,
                        std::chrono::milliseconds limit);

}  // namespace isograd
