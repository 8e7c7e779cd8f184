// History: the last operations of a rank in a group, for error messages.
#pragma once

#include <array>
#include <string>

#include "comm/shm/task.hpp"

namespace isograd::shm {

class History {
 public:
  static constexpr std::size_t kLength = 64;

  // Cheap: it stores a few words per call.
  void begin(const Fingerprint& fingerprint, const CallSite& site, std::uint64_t number);
  // Oldest first, runs of the same call on one line. Operations in `under_way` are marked as incomplete.
  std::string text(const std::vector<std::shared_ptr<Task>>& under_way) const;

 private:
  struct Entry {
    Fingerprint fingerprint;
    CallSite site;
    std::uint64_t number = 0;
  };
  std::array<Entry, kLength> entries_;
  std::uint64_t count_ = 0;
};

}  // namespace isograd::shm
