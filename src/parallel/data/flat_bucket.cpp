#include "parallel/data/flat_bucket.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/refuse.hpp"
#include "comm/squares.hpp"
#include "isograd/error.hpp"
#include "layout/flat.hpp"
#include "parallel/data/bucket_shard.hpp"

namespace isograd {
namespace {

// While one is reduced the next is filled; more would only cost memory.
constexpr std::size_t kTransientBuffers = 2;

std::pair<AxisSet, at::ScalarType> transient_key(const FlatBucket& bucket) {
  return {bucket.groups().roles.sharded, bucket.bucket().gradients.scalar_type()};
}

}  // namespace

BucketPolicy::BucketPolicy(const Mesh& mesh_, const DataParallelOptions& options,
                           const TrainableParameters& parameters)
    : BucketRules(options, parameters, mesh_.grid()),
      mesh(mesh_),
      sharded_axes(options.sharded),
      copied(sync_axes(placed(mesh.grid(), {}), mesh.grid())),
      groups(mesh, copied, options.sharded),
      offload(options.offload),
      fp32_gradients(options.fp32_gradients),
      replicas_last(any_cut_along_data(parameters, mesh.grid())),
      written(mesh_) {}

std::size_t BucketPolicy::most_in_flight() const {
  return reduces_each_micro_batch ? kTransientBuffers : std::numeric_limits<std::size_t>::max();
}

void BucketPolicy::make_transient(const std::vector<std::unique_ptr<FlatBucket>>& buckets) {
  if (!reduces_each_micro_batch) return;
  transient_.clear();
  std::map<std::pair<AxisSet, at::ScalarType>, const FlatBucket*> largest;
  for (const auto& bucket : buckets) {
    const FlatBucket*& most = largest[transient_key(*bucket)];
    if (!most || bucket->bucket().plan.numel > most->bucket().plan.numel) most = bucket.get();
  }
  for (const auto& [key, bucket] : largest)
    for (std::size_t i = 0; i < kTransientBuffers; ++i) {
      Group shard = bucket->groups().shard;
      const BucketPlan& plan = bucket->bucket().plan;
      transient_[key].push_back(shard.empty_shared(plan.numel, key.second, plan.device));
    }
}

at::Tensor BucketPolicy::transient(std::size_t turn, const FlatBucket& bucket) const {
  const auto& buffers = transient_.at(transient_key(bucket));
  return buffers[turn % kTransientBuffers].narrow(0, 0, bucket.bucket().plan.numel);
}

void BucketPolicy::meet() {
  waited.during([&] { sharers.meet(); });
}

FlatBucket::FlatBucket(BucketPlan plan, const std::vector<NamedParameter>& parameters, BucketPolicy& policy)
    : policy_(policy), groups_(policy.mesh, plan.sync, policy.sharded_axes) {
  Group& shard = groups_.shard;
  const auto [held, owned, sharded] = groups_.roles.held_ranges(plan.numel, policy.sharded);
  if (policy.parameters_shared && shard.size() > 1) {
    check_can_be_shared(plan);
    policy.sharers.add(shard);
    parameters_ = shard.host_shared(plan.numel, plan.dtype);
    if (shard.rank() == 0) write_parameters(plan, parameters, parameters_);
    shard.barrier();  // ranks move their parameters to this memory once rank 0 has written it
  } else {
    const at::TensorOptions options = at::TensorOptions(plan.dtype).device(plan.device);
    parameters_ = policy.sharded ? shard.empty_shared(plan.numel, plan.dtype, plan.device)
                                 : at::zeros({plan.numel}, options);
    write_parameters(plan, parameters, parameters_);
  }
  move_parameters(plan, parameters, parameters_);
  const at::ScalarType type = gradient_type(plan.dtype, policy.fp32_gradients);
  at::Tensor held_gradients;
  if (policy.reduces_each_micro_batch) {
    held_gradients = at::zeros({held.size()}, at::TensorOptions(type).device(plan.device));
  } else {
    gradients_ = (shard.size() > 1 && policy.sharded ? shard : groups_.summed)
                     .empty_shared(plan.numel, type, plan.device);
    held_gradients = gradients_.narrow(0, held.begin, held.size());
  }
  bucket_ = make_bucket(std::move(plan), parameters_, held_gradients, owned, held);
  bucket_.sharded = sharded;
  held_ = BucketShard(bucket_, policy.offload, keeps_gradients());
  writes_ = Writes(bucket_.plan, parameters);
  if (keeps_gradients()) slot_gradients_.emplace(bucket_.plan, gradients_, parameters);
}

void FlatBucket::take_over_writes(const std::set<std::string>& excluded) {
  for (std::size_t place : writes_.written()) {
    const Slot& slot = bucket_.plan.slots[place];
    if (excluded.contains(slot.name)) continue;
    if (policy_.parameters_shared && groups_.shard.size() > 1)
      refuse_write_to_shared_parameters(slot.name, groups_.shard.size());
    writes_.settle(place);
    held_.take_over(bucket_, slot);
    policy_.written.add(slot.name, bucket_.plan.sync.copies, slot_view(parameters_, slot));
  }
}

void FlatBucket::forget_writes(const std::set<std::string>& names) {
  for (std::size_t place = 0; place < bucket_.plan.slots.size(); ++place) {
    const std::string& name = bucket_.plan.slots[place].name;
    if (!names.contains(name)) continue;
    writes_.settle(place);
    policy_.written.forget(name);
  }
}

void FlatBucket::refuse_lost_writes() { held_.refuse_lost_writes(bucket_, writes_); }

void FlatBucket::zero(const std::vector<NamedParameter>& parameters) {
  if (slot_gradients_)
    slot_gradients_->forget(parameters);
  else
    bucket_.gradients.zero_();
}

// Gradients of one micro-batch, and zeros where there are none: between slots too, for another bucket has
// been here.
void FlatBucket::pack(const at::Tensor& buffer, const std::vector<NamedParameter>& parameters) const {
  at::NoGradGuard no_grad;
  std::int64_t at = 0;
  const auto zero_to = [&](std::int64_t end) {
    if (end > at) buffer.narrow(0, at, end - at).zero_();
  };
  for (const Slot& slot : bucket_.plan.slots) {
    at::Tensor parameter = parameters[slot.index].tensor;
    if (!parameter.grad().defined()) continue;
    zero_to(slot.offset);
    slot_view(buffer, slot).copy_(as_dense(parameter.grad()));
    parameter.mutable_grad() = at::Tensor();
    at = slot.offset + slot.numel;
  }
  zero_to(bucket_.plan.numel);
}

void FlatBucket::launch(std::size_t turn, const std::vector<NamedParameter>& parameters) {
  squares_ = nullptr;
  complete(parameters);
  if (!policy_.sharded) {
    pending_ = groups_.summed.all_reduce_async(gradients_);
    return;
  }
  at::Tensor whole = gradients_;
  if (!keeps_gradients()) {
    whole = policy_.transient(turn, *this);
    pack(whole, parameters);
  }
  const at::Tensor part = whole.narrow(0, bucket_.held.begin, bucket_.held.size());
  if (!keeps_gradients()) scattered_ = part;
  then_replicas_ = keeps_gradients() && groups_.replicate.size() > 1;
  if (groups_.shard.size() ==
      1) {  // experts without a copy among the data ranks: all of it is this rank's part
    pending_ = Pending();
    if (!policy_.replicas_last && std::exchange(then_replicas_, false)) sum_over_replicas();
    return;
  }
  // Final as it is written: nothing is added to it afterwards, and this rank owns all of it (with copies
  // along other axes the first of them does).
  if (keeps_gradients() && !then_replicas_ && bucket_.owned.size() == bucket_.held.size()) {
    auto squares = std::make_shared<double>(0);
    if (auto begun = reduce_scatter_with_squares(groups_.shard, part, whole, squares)) {
      pending_ = std::move(*begun);
      squares_ = std::move(squares);
      return;
    }
  }
  pending_ = groups_.shard.reduce_scatter_async(part, whole);
}

void FlatBucket::sum_over_replicas() {
  Group& replicas = groups_.replicate;
  if (replicas.size() == 1) return;
  if (held_.gradients().defined()) {
    pending_ = replicas.all_reduce_async(held_.gradients());
    return;
  }
  // In host memory alone: they go by way of the device, a bucket at a time, and come back as the sum.
  scattered_ = bucket_.gradients.to(bucket_.plan.device);
  bucket_.gradients.zero_();
  pending_ = replicas.all_reduce_async(scattered_);
  wait();
}

void FlatBucket::gather_parameters() {
  const std::int64_t shards = groups_.shard.size();
  if (shards == 1) return;
  pending_ =
      groups_.shard.all_gather_async(parameters_.view({shards, bucket_.held.size()}), held_.parameters());
}

// Called once the collective under way is complete.
void FlatBucket::settle() {
  if (scattered_.defined()) {
    bucket_.gradients.add_(scattered_.to(bucket_.gradients.device()));
    scattered_ = at::Tensor();
  }
}

bool FlatBucket::progress() {
  if (!pending_.progress()) return false;
  settle();
  if (!then_replicas_) return true;
  if (policy_.replicas_last) return false;
  then_replicas_ = false;
  sum_over_replicas();
  return pending_.progress();
}

void FlatBucket::wait() {
  policy_.waited.during([&] { pending_.wait(); });
  settle();
  if (!then_replicas_) return;
  then_replicas_ = false;
  policy_.waited.during([&] {
    sum_over_replicas();
    pending_.wait();
  });
}

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
