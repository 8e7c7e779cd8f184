#include <algorithm>

#include "isograd/data_parallel.hpp"
#include "layout/flat.hpp"

namespace isograd {

std::vector<DataParallel::View> DataParallel::views() {
  std::vector<std::pair<std::size_t, View>> ordered;
  for (Bucket& bucket : buckets())
    for (const Slot& slot : bucket.plan.slots)
      ordered.emplace_back(slot.index, View{.name = slot.name,
                                            .parameter = slot_view(bucket.parameters, slot),
                                            .master = slot_view(bucket.master, slot),
                                            .gradient = slot_view(bucket.gradients, slot)});
  std::sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<View> views;
  for (auto& [index, view] : ordered) views.push_back(std::move(view));
  return views;
}

}  // namespace isograd
