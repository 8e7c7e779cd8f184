#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

#include "comm/shm/control.hpp"

namespace isograd::shm {

void Bell::ring() {
  if (sleepers.load(std::memory_order_seq_cst) == 0) return;
  count.fetch_add(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, &count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::uint32_t Bell::listen() {
  sleepers.fetch_add(1, std::memory_order_seq_cst);
#if !defined(ISOGRAD_SANITIZE_THREAD)  // it does not support fences; a missed ring costs a nap
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
  return count.load(std::memory_order_seq_cst);
}

void Bell::sleep(std::uint32_t seen, long nanoseconds) {
  const timespec duration{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  ::syscall(SYS_futex, &count, FUTEX_WAIT, seen, &duration, nullptr, 0);
}

void Bell::leave() {
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace isograd::shm
