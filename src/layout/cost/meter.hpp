// Measures the memory of tensors through LibTorch's CPU allocator, per allocating thread (and so per rank).
#pragma once

#include <cstdint>
#include <memory>

namespace isograd {

struct MemoryAccount;

// Counts the calling thread's tensors while it exists. Memory that this thread allocated is counted as
// freed whichever thread frees it; backward on the CPU runs in the thread that calls it. Memory that ranks
// share is counted where a group creates it. One at a time in each thread.
class MemoryMeter {
 public:
  // Puts the watch in LibTorch's place for good: before other threads use tensors. The constructor does it
  // too.
  static void install();

  MemoryMeter();
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  std::int64_t alive() const;   // bytes of this rank alone
  std::int64_t shared() const;  // this rank's part of memory between ranks
  std::int64_t peak() const;    // the most that were alive since the start or restart_peak()
  void restart_peak();

 private:
  std::shared_ptr<MemoryAccount> account_, outer_;
};

}  // namespace isograd
