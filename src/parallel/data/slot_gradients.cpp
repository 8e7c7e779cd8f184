#include "parallel/data/slot_gradients.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <utility>

#include "isograd/error.hpp"
#include "layout/flat.hpp"
#include "parallel/data/bucket_shard.hpp"

namespace isograd {

SlotGradients::SlotGradients(const BucketPlan& plan, at::Tensor memory,
                             const std::vector<NamedParameter>& parameters)
    : memory_(std::move(memory)) {
  for (const Slot& slot : plan.slots) {
    places_.push_back({.slot = slot});
    at::Tensor parameter = parameters[slot.index].tensor;
    parameter.mutable_grad() = view(places_.back());
  }
}

at::Tensor SlotGradients::view(const Place& place) const {
  return slot_view(memory_, place.slot);
}

void SlotGradients::forget(const std::vector<NamedParameter>& parameters) {
  for (Place& place : places_) {
    at::Tensor parameter = parameters[place.slot.index].tensor;
    parameter.mutable_grad() = at::Tensor();
    place.written = place.taken = false;
  }
  complete_ = false;
}

void SlotGradients::arrived(std::size_t slot, const at::Tensor& parameter) {
  Place& place = places_[slot];
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined() && !place.written && !place.taken) return;  // a backward without one: nothing yet
  const bool replaces = !place.written || place.taken;                // and does not add to what is there
  if (!is_slot_view(gradient, memory_, place.slot)) {
    if (!replaces || !gradient.defined() || gradient.requires_grad()) refuse_lost(place);
    const at::NoGradGuard no_grad;
    const at::Tensor own = view(place);
    own.copy_(as_dense(gradient));
    at::Tensor(parameter).mutable_grad() = own;
  }
  place.written = true;
  place.taken = false;
}

differentiable::GradientPlace::Taken SlotGradients::take(std::size_t slot, const at::Tensor& parameter) {
  Place& place = places_[slot];
  if (place.taken || memory_.scalar_type() != parameter.scalar_type()) return {};
  if (place.written && !is_slot_view(parameter.grad(), memory_, place.slot)) refuse_lost(place);
  place.taken = true;
  at::Tensor(parameter).mutable_grad() = at::Tensor();
  return {.memory = view(place), .adds = place.written};
}

void SlotGradients::complete(const std::vector<NamedParameter>& parameters) {
  if (std::exchange(complete_, true)) return;
  const at::NoGradGuard no_grad;
  for (Place& place : places_) {
    if (std::exchange(place.written, true)) continue;
    place.taken = false;  // by a backward that was given up
    at::Tensor parameter = parameters[place.slot.index].tensor;
    parameter.mutable_grad() = view(place).zero_();
  }
}

void SlotGradients::check(const std::vector<NamedParameter>& parameters) const {
  for (const Place& place : places_)
    if (place.written && !is_slot_view(parameters[place.slot.index].tensor.grad(), memory_, place.slot))
      refuse_lost(place);
}

void SlotGradients::refuse_lost(const Place& place) const {
  throw ConfigError(
      {.where = fmt::format("parameter '{}'", place.slot.name),
       .found = "a .grad that is no longer the view of its bucket",
       .expected = "the gradient left in place",
       .action = "Call zero_gradients() of the layout, not zero_grad() of the module (it drops gradients), "
                 "and run backward without create_graph (it replaces them)"});
}

}  // namespace isograd
