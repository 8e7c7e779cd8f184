// Names and sums of the bytes that a group has moved.
#include <algorithm>

#include "comm/group_impl.hpp"
#include "comm/hosts/backend.hpp"
#include "isograd/world.hpp"

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

void Group::Impl::count(TrafficCounter::Kind kind, const at::Tensor& whole, std::int64_t turns) const {
  const std::int64_t bytes = turns * static_cast<std::int64_t>(whole.nbytes()) * (size - 1) / size;
  const bool summed_by_host =
      over_hosts && (kind == TrafficCounter::kAllReduce || kind == TrafficCounter::kReduceScatter ||
                     kind == TrafficCounter::kAllGather);
  count_bytes(kind, bytes, hosts && !summed_by_host && !hosts->next_is_here() ? bytes : 0);
}

void Group::Impl::count_bytes(TrafficCounter::Kind kind, std::int64_t bytes, std::int64_t across) const {
  traffic.add(kind, bytes);
  if (!hosts) return;
  hosts->add(bytes);
  if (across > 0) hosts->add_across(across);
}

bool Group::Impl::here(int other) const {
  return !hosts || hosts->here(other);
}

HostBytes host_bytes(const Group& group) {
  const auto& impl = Group::Impl::of(group);
  HostBytes bytes{.across = impl->hosts ? impl->hosts->across() : 0};
  bytes.within = std::max<std::int64_t>(0, impl->traffic.read().bytes() - bytes.across);
  return bytes;
}

}  // namespace isograd
