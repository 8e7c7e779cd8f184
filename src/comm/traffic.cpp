// Names and sums of what a group has moved.
#include "comm/group_impl.hpp"

namespace isograd {

std::int64_t Traffic::bytes() const {
  std::int64_t sum = 0;
  for (const auto& [name, operation] : operations) sum += operation.bytes;
  return sum;
}

Traffic TrafficCounter::read() const {
  constexpr const char* kNames[kKinds] = {"all_reduce", "reduce", "reduce_scatter", "broadcast",
                                          "all_gather", "gather", "scatter",        "all_to_all",
                                          "send",       "barrier"};
  Traffic traffic;
  traffic.waited_seconds = static_cast<double>(nanoseconds_.load(std::memory_order_relaxed)) * 1e-9;
  for (std::size_t kind = 0; kind < kKinds; ++kind)
    if (const std::int64_t calls = calls_[kind].load(std::memory_order_relaxed); calls > 0)
      traffic.operations[kNames[kind]] = {calls, bytes_[kind].load(std::memory_order_relaxed)};
  return traffic;
}

}  // namespace isograd
