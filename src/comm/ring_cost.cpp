// Measures what a message costs between two ranks, for the ring's cost model.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "comm/ring.hpp"
#include "isograd/error.hpp"

namespace isograd {
namespace {

// The median time of one way of a ping-pong.
double one_way_seconds(Group& group, std::int64_t bytes, int repetitions) {
  using Clock = std::chrono::steady_clock;
  const at::Tensor ball = at::zeros({bytes}, at::kByte);
  const int other = 1 - group.rank();
  std::vector<double> seconds;
  for (int i = 0; i <= repetitions; ++i) {  // the first one warms up
    const auto begin = Clock::now();
    if (group.rank() == 0) group.send(ball, other, kRingTag);
    group.recv(ball, other, kRingTag);
    if (group.rank() == 1) group.send(ball, other, kRingTag);
    if (i > 0) seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count() / 2);
  }
  const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
  std::nth_element(seconds.begin(), middle, seconds.end());
  return *middle;
}

}  // namespace

LinkCost measure_link(Group group, std::int64_t bytes, int repetitions) {
  if (group.size() < 2 || bytes <= 8 || repetitions < 1) {
    throw ConfigError(
        {.where = fmt::format("measure_link of group '{}'", group.name()),
         .found = fmt::format("{} rank(s), {} bytes, {} repetitions", group.size(), bytes, repetitions),
         .expected = "two ranks, more than 8 bytes and one repetition or more",
         .action = "Measure between ranks that exist, with a message that takes some time"});
  }
  at::Tensor cost = at::zeros({2}, at::kDouble);
  group.barrier();
  if (group.rank() < 2) {
    const double small = one_way_seconds(group, 8, repetitions);
    const double large = one_way_seconds(group, bytes, repetitions);
    cost[0] = small;
    cost[1] = static_cast<double>(bytes) / std::max(large - small, 1e-9);
  }
  group.broadcast(cost, 0);
  return {cost[0].item<double>(), cost[1].item<double>()};
}

double predicted_seconds(const RingTraffic& traffic, const LinkCost& link) {
  return static_cast<double>(traffic.messages) * link.seconds_per_message +
         static_cast<double>(traffic.bytes) / link.bytes_per_second;
}

}  // namespace isograd
