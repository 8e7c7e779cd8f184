// Whole tensors by parameter, from whatever a layout holds.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "isograd/data_parallel.hpp"
#include "isograd/error.hpp"
#include "layout/flat.hpp"
#include "parallel/data/role_groups.hpp"

namespace isograd {

at::Tensor DataParallel::gather_whole(const Bucket& bucket, const at::Tensor& shard) {
  if (bucket.whole()) return shard;
  return mesh().along(bucket.sharded).all_gather(shard).view({-1});  // [S, numel / S]
}

void DataParallel::finish_reduction_with(const Reduced& reduced) {
  finish_reduction();
  for (const Bucket& bucket : buckets()) reduced(bucket, std::nullopt);
}

std::int64_t DataParallel::bytes_sent() {
  return isograd::bytes_sent({mesh().counting()});
}

std::vector<std::size_t> DataParallel::launch_order() {
  std::vector<std::size_t> order(buckets().size());
  std::iota(order.begin(), order.end(), 0);
  return order;
}

void DataParallel::write(const std::vector<std::pair<std::string, at::Tensor>>& values) {
  std::map<std::string, std::pair<const Bucket*, const Slot*>> places;
  for (const Bucket& bucket : buckets())
    for (const Slot& slot : bucket.plan.slots) places[slot.name] = {&bucket, &slot};
  for (const auto& [name, tensor] : values) {
    const auto found = places.find(name);
    const auto refuse = [&](std::string what, std::string expected) {
      throw ConfigError({.where = fmt::format("write() of parameter '{}'", name),
                         .found = std::move(what),
                         .expected = std::move(expected),
                         .action = "Give names and shapes as views() of the layout has them"});
    };
    if (found == places.end()) refuse("no trained parameter of this name", "one of the layout's");
    if (!tensor.defined() || tensor.sizes() != found->second.second->shape)
      refuse(tensor.defined() ? c10::str(tensor.sizes()) : "no tensor",
             c10::str(at::IntArrayRef(found->second.second->shape)));
  }
  if (Group all = mesh().all(); all.size() > 1) all.barrier();  // no rank reads the values any more
  for (const auto& [name, tensor] : values) {
    const auto& [bucket, slot] = places.at(name);
    write_slot(bucket->master, bucket->held, *slot, tensor.detach());
    if (bucket->master.scalar_type() != bucket->parameters.scalar_type())
      write_slot(bucket->parameters, bucket->held, *slot, tensor.detach());
  }
  publish_parameters();
}

std::vector<std::string> DataParallel::bucket_order() {
  std::vector<std::string> names;
  for (const Bucket& bucket : buckets())
    for (const Slot& slot : bucket.plan.slots) names.push_back(slot.name);
  return names;
}

std::vector<DataParallel::View> DataParallel::views() {
  std::vector<std::pair<std::size_t, View>> ordered;
  for (Bucket& bucket : buckets()) {
    const at::Tensor parameters = gather_whole(bucket, bucket.parameters);
    const at::Tensor gradients = gather_whole(bucket, bucket.gradients);
    const bool same = bucket.master.scalar_type() == bucket.parameters.scalar_type();
    const at::Tensor master = same ? parameters : gather_whole(bucket, bucket.master);
    for (const Slot& slot : bucket.plan.slots)
      ordered.emplace_back(slot.index, View{.name = slot.name,
                                            .parameter = slot_view(parameters, slot),
                                            .master = slot_view(master, slot),
                                            .gradient = slot_view(gradients, slot)});
  }
  std::sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<View> views;
  for (auto& [index, view] : ordered) views.push_back(std::move(view));
  return views;
}

}  // namespace isograd
