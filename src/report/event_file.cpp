// TensorBoard's event file: records of length, CRC-32C, event, CRC-32C
// (tensorflow/core/lib/io/record_writer.h), with the field numbers of tensorflow/core/util/event.proto and
// framework/summary.proto.
#include "report/event_file.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <protozero/pbf_writer.hpp>

#include "base/files.hpp"
#include "base/paths.hpp"
#include "base/refuse.hpp"

namespace isograd {
namespace {

static_assert(std::endian::native == std::endian::little, "lengths and checksums are written as they are");

// Fields of Event, SessionLog, Summary and Summary.Value.
enum : protozero::pbf_tag_type { kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7 };
enum : protozero::pbf_tag_type { kStatus = 1 };
enum : protozero::pbf_tag_type { kValue = 1 };
enum : protozero::pbf_tag_type { kTag = 1, kSimpleValue = 2 };
constexpr std::int32_t kSessionStart = 1;

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

constexpr std::array<std::uint32_t, 256> kCrcTable = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
    table[byte] = crc;
  }
  return table;
}();

// A record that holds records would otherwise have checksums of checksums.
std::uint32_t masked_crc(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xa282ead8u; }

std::string_view raw(const auto& value) { return {reinterpret_cast<const char*>(&value), sizeof value}; }

}  // namespace

void cannot_write(const fs::path& file) {
  isograd::refuse(file.string(), std::strerror(errno), "a file that can be written",
                  "Free space or give another folder (run.directory, run.json_log)");
}

void require_name(std::FILE* file, const fs::path& path) {
  struct stat status {};
  if (::fstat(::fileno(file), &status) == 0 && status.st_nlink > 0) return;
  isograd::refuse(path.string(), "a file that was removed while the run wrote to it",
                  "the metrics of this run",
                  "Continue from the last checkpoint (--set checkpoint.resume=latest), or start anew, and "
                  "leave the file there");
}

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = ~0u;
  for (const char byte : bytes) crc = (crc >> 8) ^ kCrcTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff];
  return ~crc;
}

EventFile::EventFile(const fs::path& directory, std::int64_t first_step) {
  make_folders(directory);
  // Readers take a folder's files by name, so a later run's name must sort behind an earlier one's.
  const auto milliseconds = static_cast<std::int64_t>(wall_time() * 1000);
  for (int attempt = 0; !file_; ++attempt) {
    path_ = directory / fmt::format("events.out.tfevents.{:013}.{:03}.isograd", milliseconds, attempt);
    file_ = std::fopen(path_.c_str(), "wbx");
    if (!file_ && (errno != EEXIST || attempt == 999)) cannot_write(path_);
  }
  std::string version, start, log;
  protozero::pbf_writer event(version);
  event.add_double(kWallTime, wall_time());
  event.add_string(kFileVersion, "brain.Event:2");
  record(version);
  protozero::pbf_writer(log).add_enum(kStatus, kSessionStart);
  protozero::pbf_writer session(start);
  session.add_double(kWallTime, wall_time());
  session.add_int64(kStep, first_step);
  session.add_message(kSessionLog, log);
  record(start);
  flush();
}

EventFile::~EventFile() {
  if (file_) std::fclose(file_);
}

void EventFile::record(std::string_view event) {
  const std::uint64_t length = event.size();
  const std::uint32_t length_crc = masked_crc(raw(length)), event_crc = masked_crc(event);
  for (const std::string_view part : {raw(length), raw(length_crc), event, raw(event_crc)})
    if (std::fwrite(part.data(), 1, part.size(), file_) != part.size()) cannot_write(path_);
}

void EventFile::scalar(std::string_view tag, std::int64_t step, double value) {
  std::string entry, summary, message;
  protozero::pbf_writer entry_writer(entry);
  entry_writer.add_string(kTag, tag.data(), tag.size());
  entry_writer.add_float(kSimpleValue, static_cast<float>(value));
  protozero::pbf_writer(summary).add_message(kValue, entry);
  protozero::pbf_writer event(message);
  event.add_double(kWallTime, wall_time());
  event.add_int64(kStep, step);
  event.add_message(kSummary, summary);
  record(message);
}

void EventFile::flush() {
  if (std::fflush(file_) != 0) cannot_write(path_);
  require_name(file_, path_);
}

}  // namespace isograd
