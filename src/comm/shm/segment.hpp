// Memory that several ranks map: an anonymous file (memfd) that vanishes with the last process that maps it,
// however that process ends. It has no name, so nothing can be left behind or guessed.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace isograd::shm {

// How another process of this host finds a segment while its owner keeps the descriptor open.
struct SegmentId {
  std::int32_t pid = 0;
  std::int32_t descriptor = -1;
  std::uint64_t inode = 0;  // detects a descriptor that was closed and reused
  std::uint64_t bytes = 0;
};

class Segment {
 public:
  // Reserves the pages of the first `at_once` bytes. The owner calls reserve() before anyone touches others.
  // So too little memory is a ConfigError of either and never a SIGBUS. Mode 0600, sealed against changes of
  // size, zero-filled. `purpose` appears in errors.
  static std::shared_ptr<Segment> create(std::uint64_t bytes, std::uint64_t at_once,
                                         const std::string& purpose);
  static std::shared_ptr<Segment> create(std::uint64_t bytes, const std::string& purpose) {
    return create(bytes, bytes, purpose);
  }
  // Only the owner calls it. It is cheap for memory that is already reserved.
  void reserve(const std::byte* begin, std::uint64_t bytes);

  // Maps a segment of another rank through /proc. Ranks of one process share one mapping, so that thread
  // ranks see each other's memory at one address. ConfigError when the owner's descriptors cannot be reached.
  static std::shared_ptr<Segment> open(const SegmentId& id, const std::string& purpose);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }
  const SegmentId& id() const { return id_; }
  // Called once every peer has mapped it. open() no longer works afterwards.
  void close_descriptor();

 private:
  Segment() = default;
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  SegmentId id_;
  int descriptor_ = -1;
  std::string purpose_;
  std::vector<bool> reserved_;  // by blocks of reserve()
};

// Bytes that this process may still take: of the machine and of its control groups.
std::uint64_t available_memory();

// ConfigError unless `bytes` (of all ranks together) fit into `available`.
void require_memory(std::uint64_t bytes, std::uint64_t available, const std::string& purpose);

}  // namespace isograd::shm
