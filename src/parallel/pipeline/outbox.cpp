#include "parallel/pipeline/outbox.hpp"

#include <ATen/ATen.h>

#include <algorithm>

namespace isograd {
namespace {

constexpr std::int64_t kAlignment = 64;  // bytes, for any type
constexpr std::int64_t kSmall = 1024;    // bytes that travel with a message's announcement

}  // namespace

void Outbox::forget_what_was_taken() {
  std::erase_if(sent_, [&](Sent& one) {
    if (!one.pending.progress()) return false;
    if (one.slot >= 0) used_[static_cast<std::size_t>(one.slot)] = false;
    return true;
  });
}

std::int64_t Outbox::free_slot(std::int64_t bytes) {
  if (!memory_.defined() || bytes > memory_.size(1) || bytes <= kSmall) return -1;
  const auto found = std::find(used_.begin(), used_.end(), false);
  return found == used_.end() ? -1 : found - used_.begin();
}

void Outbox::send(const at::Tensor& values, int to) {
  forget_what_was_taken();
  const auto bytes = static_cast<std::int64_t>(values.nbytes());
  const std::int64_t slot = values.is_cpu() ? free_slot(bytes) : -1;
  at::Tensor from = values;
  if (slot >= 0) {
    used_[static_cast<std::size_t>(slot)] = true;
    from = memory_[slot].narrow(0, 0, bytes).view(values.scalar_type()).view(values.sizes());
    from.copy_(values);
  }
  sent_.push_back({ranks_.send_async(from, to), slot, bytes});
  if (!values.is_cpu() || bytes <= kSmall) return;
  largest_ = std::max(largest_, bytes);
  const auto large = std::ranges::count_if(sent_, [](const Sent& one) { return one.bytes > kSmall; });
  most_under_way_ = std::max(most_under_way_, static_cast<std::int64_t>(large));
}

void Outbox::wait_for_last() {
  if (!sent_.empty()) sent_.back().pending.wait();
}

void Outbox::wait() {
  for (Sent& one : sent_) one.pending.wait();
  sent_.clear();
  used_.assign(used_.size(), false);
}

void Outbox::grow() {
  at::Tensor wanted = at::tensor({most_under_way_, largest_}, at::kLong);
  ranks_.all_reduce(wanted, ReduceOp::kMax);
  const auto slots = wanted[0].item<std::int64_t>();
  const std::int64_t bytes = (wanted[1].item<std::int64_t>() + kAlignment - 1) / kAlignment * kAlignment;
  const auto enough = [&](std::int64_t has, std::int64_t of) { return memory_.defined() && has >= of; };
  if (slots == 0 || bytes == 0 ||
      (enough(static_cast<std::int64_t>(used_.size()), slots) && enough(memory_.size(1), bytes)))
    return;
  memory_ = at::Tensor();  // given back before more is taken
  memory_ = ranks_.empty_shared(slots * bytes, at::kByte).view({slots, bytes});
  used_.assign(static_cast<std::size_t>(slots), false);
}

}  // namespace isograd
