#include "train/whole_tensors.hpp"

#include <algorithm>
#include <exception>
#include <tuple>

#include "base/memory.hpp"
#include "layout/flat.hpp"

namespace isograd {

WholeTensors::WholeTensors(DataParallel& layout, OptimizerState parts, const Layout* placed)
    : layout_(layout), parts_(std::move(parts)), placed_(placed) {
  for (const auto& [key, flats] : parts_)
    for (std::size_t bucket = 0; bucket < flats.size(); ++bucket) {
      if (!flats[bucket].defined()) continue;
      for (const Slot& slot : layout.buckets()[bucket].plan.slots)
        places_.push_back(
            {key,
             bucket,
             &slot,
             {.name = key.empty() ? slot.name : slot.name + "." + key,
              .dtype = flats[bucket].scalar_type(),
              .shape = placed ? placed->parameter(slot.name).placement.whole_shape : slot.shape}});
      left_[{key, bucket}] = layout.buckets()[bucket].plan.slots.size();
    }
  // Ranks with other parts of the model may have other buckets: an order that none of them decides.
  std::sort(places_.begin(), places_.end(), [](const Place& a, const Place& b) {
    const auto order = [](const Place& place) {
      return std::tuple(-static_cast<std::ptrdiff_t>(c10::elementSize(place.entry.dtype)), place.slot->index,
                        place.key);
    };
    return order(a) < order(b);
  });
}

TensorStream WholeTensors::stream() {
  TensorStream stream;
  for (const Place& place : places_) stream.entries.push_back(place.entry);
  stream.each = [this](const TensorStream::Take& take) { each(take); };
  return stream;
}

at::Tensor WholeTensors::whole(const Place& place) {
  const Part part{place.key, place.bucket};
  at::Tensor& flat = gathered_[part];
  if (!flat.defined())
    flat = layout_.gather_whole(layout_.buckets()[place.bucket], parts_.at(place.key)[place.bucket]);
  at::Tensor result = slot_view(flat, *place.slot);
  if (placed_) result = placed_->whole(place.slot->name, result);
  if (--left_[part] == 0) gathered_.erase(part);
  return result;
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
