#include "parallel/data/flat_parameters.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/refuse.hpp"
#include "layout/flat.hpp"

namespace isograd {
namespace {

at::Tensor in_host_memory(const at::Tensor& flat) {
  const at::Tensor copy = flat.to(at::kCPU);
  return flat.is_cuda() ? copy.pin_memory() : copy;
}

bool has_own_master(const Bucket& bucket) {
  return bucket.master.scalar_type() != bucket.parameters.scalar_type();
}

}  // namespace

RoleGroups::RoleGroups(const Mesh& mesh, const SyncAxes& sync, const AxisSet& asked)
    : roles(mesh.grid(), sync, asked, mesh.rank()),
      summed(mesh.along(roles.summed)),
      shard(mesh.along(roles.sharded)),
      replicate(mesh.along(roles.replicate)) {}

std::int64_t bytes_sent(const std::vector<Group>& groups) {
  std::set<std::string> seen;
  std::int64_t bytes = 0;
  for (const Group& group : groups)
    if (seen.insert(group.name()).second) bytes += group.traffic().bytes();
  return bytes;
}

void check_can_be_offloaded(at::Device parameters) {
  if (!parameters.is_cpu()) return;
  refuse("offload", "parameters on the CPU",
         "parameters on another device: offload moves states and gradients to host memory, where "
         "they already are",
         "Leave offload out, or move the model to a GPU first");
}

at::Tensor as_dense(const at::Tensor& gradient) {
  return gradient.layout() == at::kStrided ? gradient : gradient.to_dense();
}

HeldBucket::HeldBucket(WrittenValues& written, Bucket bucket, const std::vector<NamedParameter>& parameters,
                       bool offload)
    : bucket_(std::move(bucket)), writes_(bucket_.plan, parameters), written_(written) {
  place(offload, /*reduced_on_device=*/true);
}

void HeldBucket::place(bool offload, bool reduced_on_device) {
  parameters_ = bucket_.parameters, gradients_ = bucket_.gradients;
  if (!offload) return;
  const at::NoGradGuard no_grad;
  const bool own_master = has_own_master(bucket_);
  bucket_.parameters = host_parameters_ = in_host_memory(parameters_);
  bucket_.master = own_master ? bucket_.master.to(at::kCPU) : bucket_.parameters;
  bucket_.gradients = host_gradients_ = in_host_memory(gradients_);
  if (!reduced_on_device) gradients_ = at::Tensor();
}

void HeldBucket::take_over_writes(const std::set<std::string>& excluded) {
  for (const std::size_t place : writes_.written()) {
    const Slot& slot = bucket_.plan.slots[place];
    if (excluded.contains(slot.name)) continue;
    if (sharers_ > 1)
      refuse(fmt::format("parameter '{}'", slot.name),
             fmt::format("an in-place operation on the one copy that {} ranks share, to which each rank's "
                         "would be applied",
                         sharers_),
             "values written by the layout",
             "Call write() of the layout on every rank, or set share_parameters to off");
    writes_.settle(place);
    write_to_shard(slot);
    write_to_copies(slot);
    written_.add(slot.name, bucket_.plan.sync.copies, writes_.parameter(place));
  }
}

void HeldBucket::write_to_copies(const Slot& slot) const {
  const Range own = within(bucket_.held, slot);
  if (own.size() == 0 || !keeps_copies()) return;
  const at::NoGradGuard no_grad;
  const auto part = [&](const at::Tensor& flat) {
    return flat.narrow(0, own.begin - bucket_.held.begin, own.size());
  };
  const at::Tensor written = part(parameters_);
  if (host_parameters_.defined()) part(host_parameters_).copy_(written);
  if (!has_own_master(bucket_)) return;
  const at::Tensor master = part(bucket_.master), values = written.to(master.options());
  master.copy_(
      at::where(master.to(written.scalar_type()).to(master.scalar_type()).eq(values), master, values));
}

bool HeldBucket::keeps_copies() const { return host_parameters_.defined() || has_own_master(bucket_); }

void HeldBucket::forget_writes(const std::set<std::string>& names) {
  for (std::size_t place = 0; place < bucket_.plan.slots.size(); ++place) {
    const std::string& name = bucket_.plan.slots[place].name;
    if (!names.contains(name)) continue;
    writes_.settle(place);
    written_.forget(name);
  }
}

void HeldBucket::refuse_lost_writes() const {
  if (!keeps_copies()) return;
  for (const std::size_t place : writes_.written())
    refuse(fmt::format("parameter '{}'", bucket_.plan.slots[place].name),
           "values written between finish_reduction() and publish_parameters()",
           "none: the update has replaced them by those of its own copy",
           "Write values after publish_parameters(), before the next step");
}

void HeldBucket::to_host() const {
  const at::NoGradGuard no_grad;
  if (host_gradients_.defined() && gradients_.defined()) host_gradients_.copy_(gradients_);
}

void HeldBucket::to_device() const {
  const at::NoGradGuard no_grad;
  if (host_parameters_.defined()) parameters_.copy_(host_parameters_);
}

FlatContext::FlatContext(const Mesh& mesh_, const AxisSet& sharded, bool offload_, bool parameters_shared_)
    : mesh(mesh_),
      sharded_axes(sharded),
      groups(mesh, sync_axes(placed(mesh.grid(), {}), mesh.grid()), sharded),
      offload(offload_),
      parameters_shared(parameters_shared_),
      written(mesh) {}

void FlatContext::meet() {
  waited.during([&] {
    for (Group& ranks : sharers) ranks.barrier();
  });
}

at::Tensor FlatParameters::shared_copy(const BucketPlan& plan,
                                       const std::function<void(const at::Tensor&)>& write) {
  Group& shard = groups_.shard;
  check_can_be_shared(plan);
  sharers_ = shards();
  if (std::ranges::find(context_.sharers, shard.name(), [](const Group& one) { return one.name(); }) ==
      context_.sharers.end())
    context_.sharers.push_back(shard);
  const at::Tensor memory = shard.host_shared(plan.numel, plan.dtype);
  if (shard.rank() == 0) write(memory);
  shard.barrier();  // ranks move their parameters to this memory once rank 0 has written it
  return memory;
}

void FlatParameters::pack(const at::Tensor& buffer,
                          const std::function<at::Tensor(std::size_t)>& take) const {
  const at::NoGradGuard no_grad;
  std::int64_t at = 0;
  const auto zero_to = [&](std::int64_t end) {
    if (end > at) buffer.narrow(0, at, end - at).zero_();
  };
  for (std::size_t place = 0; place < bucket_.plan.slots.size(); ++place) {
    const at::Tensor gradient = take(place);
    if (!gradient.defined()) continue;
    const Slot& slot = bucket_.plan.slots[place];
    zero_to(slot.offset);
    if (!is_slot_view(gradient, buffer, slot)) slot_view(buffer, slot).copy_(gradient);
    at = slot.offset + slot.numel;
  }
  zero_to(bucket_.plan.numel);
}

void FlatParameters::sum_over_replicas() {
  Group& replicas = groups_.replicate;
  if (replicas.size() == 1) return;
  if (gradients_.defined()) {
    pending_ = replicas.all_reduce_async(gradients_);
    return;
  }
  // In host memory alone: they go by way of the device, a bucket at a time, and come back as the sum.
  scattered_ = bucket_.gradients.to(bucket_.plan.device);
  fresh_ = true;
  pending_ = replicas.all_reduce_async(scattered_);
  FlatParameters::wait();
}

// Called once the reduction under way is complete.
void FlatParameters::settle() {
  if (!scattered_.defined()) return;
  const at::NoGradGuard no_grad;
  if (std::exchange(fresh_, false))
    bucket_.gradients.copy_(scattered_);
  else
    bucket_.gradients.add_(scattered_.to(bucket_.gradients.device()));
  scattered_ = at::Tensor();
}

bool FlatParameters::progress() {
  if (!pending_.progress()) return false;
  settle();
  return true;
}

void FlatParameters::wait() {
  context_.waited.during([&] { pending_.wait(); });
  settle();
}

PackBuffers::Key PackBuffers::key_of(const User& user) {
  return {user.single, user.flat->groups().roles.sharded, user.flat->bucket().gradients.scalar_type()};
}

void PackBuffers::make(const std::vector<User>& users) {
  std::map<Key, const FlatParameters*> largest;
  for (const User& user : users) {
    const FlatParameters*& most = largest[key_of(user)];
    if (!most || user.flat->bucket().plan.numel > most->bucket().plan.numel) most = user.flat;
  }
  for (const auto& [key, flat] : largest) {
    const auto& [single, axes, type] = key;
    const BucketPlan& plan = flat->bucket().plan;
    Group shard = flat->groups().shard;
    auto& buffers = buffers_[key];
    if (!buffers.empty() && buffers.front().numel() >= plan.numel) continue;
    buffers.clear();
    for (std::size_t i = 0; i < (single ? 1 : kTurns); ++i)
      buffers.push_back(shard.empty_shared(plan.numel, type, plan.device));
  }
}

at::Tensor PackBuffers::next(const User& user) {
  const auto& buffers = buffers_.at(key_of(user));
  return buffers[turn_++ % buffers.size()].narrow(0, 0, user.flat->bucket().plan.numel);
}

}  // namespace isograd
