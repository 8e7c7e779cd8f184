#include "optim/runs.hpp"

#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "kernels/threads/parallel_for.hpp"

namespace isograd {

void UpdateCounter::look(const std::vector<Bucket>& buckets, std::int64_t updates) {
  const bool first = known_.empty();
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const auto& slots = buckets[b].plan.slots;
    if (b == known_.size()) {
      auto& places = known_.emplace_back();
      for (const Slot& slot : slots) {
        places.push_back({slot.name, slot.offset});
        if (!first && updates > 0) missed_[slot.name] = updates;
      }
      continue;
    }
    for (std::size_t s = 0; s < std::max(slots.size(), known_[b].size()); ++s)
      if (s >= slots.size() || s >= known_[b].size() || slots[s].name != known_[b][s].name ||
          slots[s].offset != known_[b][s].offset)
        refuse("an optimizer's state",
               fmt::format("bucket {} with {} where the state is that of {}", b,
                           s < slots.size() ? "'" + slots[s].name + "'" : "no further parameter",
                           s < known_[b].size() ? "'" + known_[b][s].name + "'" : "none"),
               "the buckets of the layout that it was made for",
               "Make an optimizer for each layout; copy state() by parameter from one to the other");
  }
}

void UpdateCounter::count_update(const std::vector<Bucket>& buckets) {
  for (const Bucket& bucket : buckets)
    for (const Slot& slot : bucket.plan.slots)
      if (!slot.trained) ++missed_[slot.name];
}

std::vector<Run> runs_of(const Bucket& bucket, std::int64_t most_elements, const Optimizer::Missed& missed) {
  const BucketPlan& plan = bucket.plan;
  const Range held = bucket.held;
  const auto missed_by = [&](const Slot& slot) {
    const auto found = missed.find(slot.name);
    return found == missed.end() ? 0 : found->second;
  };
  std::vector<Run> runs;
  for (std::size_t i = 0; i < plan.slots.size();) {
    const Slot& head = plan.slots[i];
    const std::int64_t late = missed.empty() ? 0 : missed_by(head);
    const auto goes_along = [&](const Slot& slot) {
      return slot.decays == head.decays && slot.trained == head.trained &&
             (missed.empty() || missed_by(slot) == late);
    };
    while (i < plan.slots.size() && goes_along(plan.slots[i])) ++i;
    if (!head.trained) continue;
    const std::int64_t last = i < plan.slots.size() ? plan.slots[i].offset : plan.numel;
    const std::int64_t end = std::min(last, held.end);
    for (std::int64_t begin = std::max(head.offset, held.begin); begin < end; begin += most_elements)
      runs.push_back(
          {{begin - held.begin, std::min(end, begin + most_elements) - held.begin}, head.decays, late});
  }
  return runs;
}

void for_each_run(const Bucket& bucket, const Optimizer::Missed& missed,
                  const std::function<void(const Run&)>& pass) {
  const auto runs = runs_of(bucket, 1 << 16, missed);
  parallel_for(0, static_cast<std::int64_t>(runs.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) pass(runs[i]);
  });
}

std::vector<LongRun> long_runs_of(const Bucket& bucket, const Optimizer::Missed& missed) {
  std::vector<LongRun> joined;
  for (const Run& run : runs_of(bucket, std::max<std::int64_t>(1, bucket.held.size()), missed)) {
    const bool goes_on =
        !joined.empty() && joined.back().range.end == run.range.begin && joined.back().missed == run.missed;
    if (!goes_on) joined.push_back({.range = {run.range.begin, run.range.begin}, .missed = run.missed});
    joined.back().range.end = run.range.end;
    if (run.decays) joined.back().decaying.push_back(run.range);
  }
  return joined;
}

void ensure_state(std::vector<at::Tensor>& state, const std::vector<Bucket>& buckets) {
  for (std::size_t i = state.size(); i < buckets.size(); ++i)
    state.push_back(at::zeros_like(buckets[i].master));
  ISOGRAD_INVARIANT(state.size() == buckets.size(),
                    fmt::format("state of {} buckets, {} buckets", state.size(), buckets.size()));
  for (std::size_t i = 0; i < buckets.size(); ++i)
    ISOGRAD_INVARIANT(state[i].numel() == buckets[i].held.size(),
                      fmt::format("state of {} elements for {} held of bucket {}", state[i].numel(),
                                  buckets[i].held.size(), i));
}

}  // namespace isograd
