// What a rank sends to other stages, in memory from which they read it while this rank computes.
#pragma once

#include <ATen/Tensor.h>

#include <cstdint>
#include <deque>
#include <vector>

#include "isograd/group.hpp"

namespace isograd {

// A message from ordinary memory flows through a ring that its sender must fill, and a sender that computes
// the next action does not. So messages are copied into slots of shared memory, which the receiver reads by
// itself (src/comm/shm/README.md). The slots are as many and as large as the steps before needed; what finds
// none goes from its own memory.
class Outbox {
 public:
  explicit Outbox(Group ranks) : ranks_(std::move(ranks)) {}

  // `values` contiguous; they may be changed after the call.
  void send(const at::Tensor& values, int to);
  void wait_for_last();
  // Waits until all that was sent has been taken.
  void wait();
  // Collective, with nothing under way: memory for all that this step sent.
  void grow();

 private:
  struct Sent {
    Pending pending;
    std::int64_t slot;  // -1: from its own memory
    std::int64_t bytes;
  };
  void forget_what_was_taken();
  std::int64_t free_slot(std::int64_t bytes);

  Group ranks_;
  std::deque<Sent> sent_{};
  at::Tensor memory_{};  // [slots, bytes of each], uint8
  std::vector<bool> used_{};
  std::int64_t largest_ = 0;         // bytes of a message, ever
  std::int64_t most_under_way_ = 0;  // messages, ever
};

}  // namespace isograd
