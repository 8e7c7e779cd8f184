// Checks of options, shared by loaders and stores.
#pragma once

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "base/refuse.hpp"
#include "isograd/data.hpp"

namespace isograd {

// ConfigError with the key's name unless the number is in the range. NaN is not.
template <typename Number>
void in_range(const char* key, Number value, Number least, Number most) {
  if (!(value >= least && value <= most))
    refuse(key, fmt::format("{}", value), fmt::format("{} to {}", least, most), "Correct the value");
}

// The samples of a loader: `one` is what they are called, `source` what they are taken from. A repeated
// sample would be one of twice the length, as sample ids are their numbers.
inline void check_samples(const std::string& one, const std::string& source,
                          const std::vector<std::int64_t>& samples, std::int64_t count, int rank, int size) {
  in_range<std::int64_t>("ranks", size, 1, 1 << 20);
  in_range<std::int64_t>("rank", rank, 0, size - 1);
  if (samples.empty())
    refuse("data", fmt::format("no {}s", one), "at least one",
           fmt::format("Name more {}, or lower data.validation_fraction", source));
  std::vector<bool> seen(static_cast<std::size_t>(count));
  for (const std::int64_t sample : samples) {
    in_range<std::int64_t>(one.c_str(), sample, 0, count - 1);
    const auto place = static_cast<std::size_t>(sample);
    if (seen[place])
      refuse(one + "s", fmt::format("{} {} twice", one, sample), fmt::format("each {} once", one),
             "Remove the repetition");
    seen[place] = true;
  }
}

// `same`: what a resumed run must have alike.
inline void check_position(LoaderPosition at, std::int64_t steps, const char* same) {
  if (at.epoch < 0 || at.step < 0 || at.step >= steps)
    refuse("position of the data", fmt::format("step {} of epoch {}", at.step, at.epoch),
           fmt::format("a step below {}, those of an epoch", steps),
           fmt::format("Resume with {} that the run began with", same));
}
inline LoaderPosition position_after(LoaderPosition at, std::int64_t steps) {
  return at.step + 1 == steps ? LoaderPosition{at.epoch + 1, 0} : LoaderPosition{at.epoch, at.step + 1};
}

// ConfigError when an option is out of range.
void check(const VideoOptions& options);

// As decode_video(), with a limit on the time without a frame.
at::Tensor decode_video(const fs::path& file, const VideoOptions& options, std::chrono::milliseconds limit);

}  // namespace isograd
