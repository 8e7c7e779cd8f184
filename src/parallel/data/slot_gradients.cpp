#include "parallel/data/slot_gradients.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/refuse.hpp"
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

at::Tensor SlotGradients::view(const Place& place) const { return slot_view(memory_, place.slot); }

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

differentiable::GradientPlace::Taken SlotGradients::take(std::size_t slot, const at::Tensor& parameter,
                                                         at::ScalarType type) {
  Place& place = places_[slot];
  if (place.taken || memory_.scalar_type() != type) return {};
  if (place.written && !is_slot_view(parameter.grad(), memory_, place.slot)) refuse_lost(place);
  place.taken = true;
  // The gradient given to autograd takes the place of .grad, or of another type (gradient_in) is added to it.
  at::Tensor(parameter).mutable_grad() = type == parameter.scalar_type() ? at::Tensor() : view(place);
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

void SlotGradients::append_places(const std::vector<NamedParameter>& parameters,
                                  std::vector<std::uint64_t>& words) const {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (i % 32 == 0) words.push_back(0);
    const std::uint64_t trained = parameters[places_[i].slot.index].tensor.requires_grad();
    words.back() |= (std::uint64_t{places_[i].written} | trained << 1) << (2 * (i % 32));
  }
}

void SlotGradients::restore_places(const std::vector<NamedParameter>& parameters,
                                   const std::vector<std::uint64_t>& words, std::size_t& word) {
  for (std::size_t i = 0; i < places_.size(); ++i) {
    if (i % 32 == 0) ++word;
    Place& place = places_[i];
    place.written = words[word - 1] >> (2 * (i % 32)) & 1;
    place.taken = false;
    at::Tensor parameter = parameters[place.slot.index].tensor;
    parameter.mutable_grad() = place.written ? view(place) : at::Tensor();
  }
}

void SlotGradients::arrive_again(const std::vector<NamedParameter>& parameters) {
  for (Place& place : places_) {
    at::Tensor parameter = parameters[place.slot.index].tensor;
    if (!parameter.requires_grad()) continue;
    if (!std::exchange(place.written, true)) parameter.mutable_grad() = view(place);
    place.taken = false;
  }
}

bool SlotGradients::all_arrived(const std::vector<NamedParameter>& parameters) const {
  return std::ranges::all_of(places_, [&](const Place& place) {
    return !parameters[place.slot.index].tensor.requires_grad() || (place.written && !place.taken);
  });
}

void SlotGradients::check(const std::vector<NamedParameter>& parameters) const {
  for (const Place& place : places_)
    if (place.written && !is_slot_view(parameters[place.slot.index].tensor.grad(), memory_, place.slot))
      refuse_lost(place);
}

void SlotGradients::refuse_lost(const Place& place) const {
  refuse(fmt::format("parameter '{}'", place.slot.name), "a .grad that is no longer the view of its bucket",
         "the gradient left in place",
         "Call zero_gradients() of the layout, not zero_grad() of the module (it drops "
         "gradients), and run backward without create_graph (it replaces them)");
}

}  // namespace isograd
