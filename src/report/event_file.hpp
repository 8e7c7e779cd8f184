// Event files of TensorBoard, and checks of files that a run writes to.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string_view>

namespace isograd {

// TensorBoard's event file. A reader sees every event as soon as flush() has returned.
class EventFile {
 public:
  // A new events.out.tfevents.<time>.isograd in `directory`, which makes earlier events from `first_step` on
  // obsolete.
  EventFile(const std::filesystem::path& directory, std::int64_t first_step);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;
  void scalar(std::string_view tag, std::int64_t step, double value);
  void flush();
  const std::filesystem::path& path() const { return path_; }

 private:
  void record(std::string_view event);
  std::filesystem::path path_;
  std::FILE* file_ = nullptr;
};

// ConfigError if `file` was deleted: what is written to it would be lost when this process ends.
void require_name(std::FILE* file, const std::filesystem::path& path);

[[noreturn]] void cannot_write(const std::filesystem::path& file);  // ConfigError with errno's text

// CRC-32 of Castagnoli (RFC 3720, appendix B.4).
std::uint32_t crc32c(std::string_view bytes);

}  // namespace isograd
