// What a run on videos shows at its end: frames beside what the model makes of them, and losses by length.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "isograd/model.hpp"
#include "train/task.hpp"

namespace isograd {

// Frames of some of `videos`, as they are, noised, and as the model estimates them from that in one step; the
// loss of each of `held_out` and of some of `trained` by their lengths. On one rank, which has the whole
// model.
Showing show_videos(VideoDiT& model, const VideoStore& store, const std::vector<std::int64_t>& held_out,
                    const std::vector<std::int64_t>& trained, std::uint64_t seed);

std::string base64(std::string_view bytes);  // RFC 4648, with padding

}  // namespace isograd
