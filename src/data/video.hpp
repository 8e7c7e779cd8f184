// What the room's video files share.
#pragma once

#include "isograd/video_data.hpp"

namespace isograd {

// ConfigError when an option is out of range.
void check(const VideoOptions& options);

}  // namespace isograd
