// Accounts of memory: bytes are counted where they are allocated, on the account of the allocating thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace isograd {

struct MemoryAccount {
  std::atomic<std::int64_t> alive{0}, peak{0};  // private memory
  std::atomic<std::int64_t> shared{0};          // this rank's part of memory between ranks

  void add(std::int64_t bytes) {
    const std::int64_t now = alive.fetch_add(bytes) + bytes;
    std::int64_t most = peak.load();
    while (now > most && !peak.compare_exchange_weak(most, now)) {
    }
  }
};

// This thread's account; null: not counted. layout/cost/meter.hpp opens one, and allocators add to it.
inline std::shared_ptr<MemoryAccount>& memory_account() {
  static thread_local std::shared_ptr<MemoryAccount> account;
  return account;
}

inline void count_shared(std::int64_t bytes) {
  if (memory_account()) memory_account()->shared += bytes;
}

}  // namespace isograd
