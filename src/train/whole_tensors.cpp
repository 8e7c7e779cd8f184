#include "train/whole_tensors.hpp"

#include <algorithm>
#include <exception>
#include <tuple>

#include "base/memory.hpp"
#include "layout/flat.hpp"

namespace isograd {

WholeTensors::WholeTensors(DataParallel& layout, OptimizerState parts, const Layout* placed)
    : WholeTensors(layout, placed) {
  for (const auto& [key, flats] : parts)
    for (std::size_t bucket = 0; bucket < flats.size(); ++bucket)
      if (flats[bucket].defined()) add(key, layout.buckets()[bucket], flats[bucket]);
  sort_from(0);
}

WholeTensors WholeTensors::parameters(DataParallel& layout, const Layout* placed) {
  WholeTensors all(layout, placed);
  for (const Bucket& bucket : layout.buckets()) all.add("", bucket, bucket.parameters);
  all.sort_from(0);
  const std::size_t trained = all.places_.size();
  const DataParallel::Frozen frozen = layout.frozen();
  for (const Bucket* bucket : frozen.buckets) all.add("", *bucket, bucket->parameters);
  all.sort_from(trained);
  for (const NamedParameter& parameter : frozen.tensors)
    all.places_.push_back({.part = {},
                           .slot = nullptr,
                           .parameter = parameter.name,
                           .tensor = parameter.tensor.detach(),
                           .entry = {.name = parameter.name,
                                     .dtype = parameter.tensor.scalar_type(),
                                     .shape = all.whole_shape(parameter.name, parameter.tensor.sizes())}});
  return all;
}

std::vector<std::int64_t> WholeTensors::whole_shape(const std::string& parameter, at::IntArrayRef own) const {
  return placed_ ? placed_->parameter(parameter).placement.whole_shape : own.vec();
}

void WholeTensors::add(const std::string& key, const Bucket& bucket, const at::Tensor& flat) {
  const Part part{key, &bucket};
  parts_[part] = flat;
  left_[part] = bucket.plan.slots.size();
  for (const Slot& slot : bucket.plan.slots)
    places_.push_back({.part = part,
                       .slot = &slot,
                       .parameter = slot.name,
                       .tensor = {},
                       .entry = {.name = key.empty() ? slot.name : slot.name + "." + key,
                                 .dtype = flat.scalar_type(),
                                 .shape = whole_shape(slot.name, slot.shape)}});
}

// Ranks with other parts of the model may have other buckets: an order that none of them decides.
void WholeTensors::sort_from(std::size_t begin) {
  const auto order = [](const Place& place) {
    return std::tuple(-static_cast<std::ptrdiff_t>(c10::elementSize(place.entry.dtype)), place.slot->index,
                      place.part.first);
  };
  std::sort(places_.begin() + static_cast<std::ptrdiff_t>(begin), places_.end(),
            [&](const Place& a, const Place& b) { return order(a) < order(b); });
}

TensorStream WholeTensors::stream() {
  TensorStream stream;
  for (const Place& place : places_) stream.entries.push_back(place.entry);
  stream.each = [this](const TensorStream::Take& take) { each(take); };
  return stream;
}

at::Tensor WholeTensors::whole(const Place& place) {
  at::Tensor result = place.tensor;
  if (place.slot) {
    at::Tensor& flat = gathered_[place.part];
    if (!flat.defined()) flat = layout_.gather_whole(*place.part.second, parts_.at(place.part));
    result = slot_view(flat, *place.slot);
    if (--left_[place.part] == 0) gathered_.erase(place.part);
  }
  return placed_ ? placed_->whole(place.parameter, result) : result;
}

void WholeTensors::each(const TensorStream::Take& take) {
  std::exception_ptr problem;  // of the one that takes: the other ranks know nothing of it
  while (next_ < places_.size()) {
    const std::size_t gathered = gathered_.size();
    at::Tensor tensor = whole(places_[next_++]);
    try {
      if (take && !problem) take(tensor);
    } catch (...) {
      problem = std::current_exception();
    }
    tensor.reset();
    if (gathered_.size() < gathered || next_ == places_.size()) return_freed_memory();
  }
  if (problem) std::rethrow_exception(problem);
}

}  // namespace isograd
