#include "optim/runs.hpp"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include "isograd/error.hpp"

namespace isograd {
std::vector<Run> runs_of(const Bucket& bucket, std::int64_t most_elements) {
  const BucketPlan& plan = bucket.plan;
  const Range held = bucket.held;
  std::vector<Run> runs;
  for (std::size_t i = 0; i < plan.slots.size();) {
    const bool decays = plan.slots[i].decays;
    const std::int64_t first = plan.slots[i].offset;
    while (i < plan.slots.size() && plan.slots[i].decays == decays) ++i;
    const std::int64_t last = i < plan.slots.size() ? plan.slots[i].offset : plan.numel;
    const std::int64_t end = std::min(last, held.end);
    for (std::int64_t begin = std::max(first, held.begin); begin < end; begin += most_elements)
      runs.push_back({{begin - held.begin, std::min(end, begin + most_elements) - held.begin}, decays});
  }
  return runs;
}

void for_each_run(const Bucket& bucket, const std::function<void(const Run&)>& pass) {
  if (!bucket.master.is_cpu()) {  // a device has threads of its own and wants long passes
    for (const Run& run : runs_of(bucket, std::max<std::int64_t>(1, bucket.held.size()))) pass(run);
    return;
  }
  const auto runs = runs_of(bucket);
  at::parallel_for(0, static_cast<std::int64_t>(runs.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) pass(runs[i]);
  });
}

void ensure_state(std::vector<at::Tensor>& state, const std::vector<Bucket>& buckets) {
  if (state.empty())
    for (const Bucket& bucket : buckets) state.push_back(at::zeros_like(bucket.master));
  ISOGRAD_INVARIANT(state.size() == buckets.size(),
                    fmt::format("state of {} buckets, {} buckets", state.size(), buckets.size()));
  for (std::size_t i = 0; i < buckets.size(); ++i)
    ISOGRAD_INVARIANT(state[i].numel() == buckets[i].held.size(),
                      fmt::format("state of {} elements for {} held of bucket {}", state[i].numel(),
                                  buckets[i].held.size(), i));
}

}  // namespace isograd
