#include "parallel/data/flat_shard.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "isograd/error.hpp"
#include "layout/flat.hpp"

namespace isograd {

at::Tensor GatherPool::take(at::ScalarType dtype, std::int64_t numel, at::Device device) {
  at::Tensor memory;
  const auto fits = [&](const at::Tensor& spare) {
    return spare.scalar_type() == dtype && spare.numel() == numel;
  };
  if (const auto found = std::find_if(spare_.rbegin(), spare_.rend(), fits); found != spare_.rend()) {
    memory = *found;
    spare_.erase(std::next(found).base());
    spare_bytes_ -= static_cast<std::int64_t>(memory.nbytes());
  }
  bytes_ += numel * static_cast<std::int64_t>(c10::elementSize(dtype));
  most_bytes_ = std::max(most_bytes_, bytes_);
  kept_bytes_ = std::max(kept_bytes_, bytes_);
  trim();  // before more is asked for
  return memory.defined() ? memory : at::empty({numel}, at::TensorOptions(dtype).device(device));
}

void GatherPool::give(at::Tensor memory) {
  const auto bytes = static_cast<std::int64_t>(memory.nbytes());
  bytes_ -= bytes;
  spare_bytes_ += bytes;
  spare_.push_back(std::move(memory));
  trim();
}

void GatherPool::keep(std::int64_t bytes) {
  kept_bytes_ = std::max(bytes, bytes_);
  trim();
}

void GatherPool::trim() {
  while (!spare_.empty() && bytes_ + spare_bytes_ > kept_bytes_) {
    spare_bytes_ -= static_cast<std::int64_t>(spare_.front().nbytes());
    spare_.pop_front();
  }
}

namespace {

void write_values(const at::Tensor& to, Range held, const Slot& slot, const at::Tensor& parameter,
                  const FlatShard::Initialize& initialize) {
  if (!parameter.is_meta()) return write_slot(to, held, slot, parameter.detach());
  at::Tensor values = at::zeros(slot.shape, to.options().device(at::kCPU));  // the same bits on any device
  initialize(slot.name, values);
  write_slot(to, held, slot, values);
}

}  // namespace

FlatShard::FlatShard(BucketPlan plan, const std::vector<NamedParameter>& parameters, const std::string& unit,
                     bool trained, bool fp32_gradients, const Initialize& initialize, ShardContext& context)
    : context_(context),
      groups_(context.mesh, plan.sync, context.sharded_axes),
      trained_(trained),
      fp32_gradients_(fp32_gradients),
      pieces_(plan.slots.size()) {
  Group& shard = groups_.shard;
  const at::NoGradGuard no_grad;
  const Range all{0, plan.numel};
  const auto [held, owned, sharded] = groups_.roles.held_ranges(plan.numel, /*in_shards=*/true);
  ISOGRAD_INVARIANT(held.size() * shards() == plan.numel,
                    fmt::format("{} of {} elements for {} shards", held.size(), plan.numel, shards()));
  bucket_.held = held;
  bucket_.owned = owned;
  bucket_.sharded = sharded;

  if (context.parameters_shared || shards() == 1) {
    const bool parameters_shared = shards() > 1;
    if (parameters_shared) {
      check_can_be_shared(plan);
      context.sharers.add(shard);
    }
    const at::TensorOptions options = at::TensorOptions(plan.dtype).device(plan.device);
    const at::Tensor whole =
        parameters_shared ? shard.host_shared(plan.numel, plan.dtype) : at::zeros({plan.numel}, options);
    if (!parameters_shared || shard.rank() == 0)
      for (const Slot& slot : plan.slots)
        write_values(whole, all, slot, parameters.at(slot.index).tensor, initialize);
    if (parameters_shared)
      shard.barrier();  // ranks move their parameters to this memory once rank 0 has written it
    for (const Slot& slot : plan.slots)
      if (at::Tensor parameter = parameters.at(slot.index).tensor; parameter.is_meta())
        parameter.unsafeGetTensorImpl()->shallow_copy_from(slot_view(whole, slot).getIntrusivePtr());
    move_parameters(plan, parameters, whole);
    bucket_.parameters = whole.narrow(0, held.begin, held.size());
    state_ = State::kWhole;
  } else {
    bucket_.parameters = shard.empty_shared(held.size(), plan.dtype, plan.device);
    storage_ = std::make_unique<UnitStorage>(
        plan.numel, plan.dtype, plan.device,
        fmt::format("parameter read while sharded: those of unit '{}' are whole only inside its own call. "
                    "Call the block through its handle, or hold whole_parameters() of the layout",
                    unit));
    for (const Slot& slot : plan.slots) {
      const at::Tensor& parameter = parameters.at(slot.index).tensor;
      write_values(bucket_.parameters, held, slot, parameter, initialize);
      storage_->adopt(parameter, slot);
    }
  }
  bucket_.master = plan.dtype == at::kBFloat16 ? bucket_.parameters.to(at::kFloat) : bucket_.parameters;
  writes_ = Writes(plan, parameters);
  bucket_.plan = std::move(plan);
  make_gradients();
}

void FlatShard::make_gradients() {
  if (trained_) {
    const BucketPlan& plan = bucket_.plan;
    const at::ScalarType type = gradient_type(plan.dtype, fp32_gradients_);
    const std::int64_t kept = bucket_.held.size();
    if (context_.reduce_once) {
      whole_gradients_ = groups_.shard.empty_shared(plan.numel, type, plan.device);
      bucket_.gradients = whole_gradients_.narrow(0, bucket_.held.begin, kept);
    } else {
      bucket_.gradients = groups_.replicate.empty_shared(kept, type, plan.device);
    }
  }
  held_ = BucketShard(bucket_, context_.offload && trained_, context_.reduce_once);
}

void FlatShard::train() {
  trained_ = true;
  make_gradients();
}

void FlatShard::take_over_writes(const std::set<std::string>& excluded) {
  if (state_ != State::kWhole) return;
  const at::NoGradGuard no_grad;
  for (std::size_t place : writes_.written()) {
    const Slot& slot = bucket_.plan.slots[place];
    if (excluded.contains(slot.name)) continue;
    if (context_.parameters_shared && shards() > 1) refuse_write_to_shared_parameters(slot.name, shards());
    writes_.settle(place);
    if (storage_) write_slot(held_.parameters(), bucket_.held, slot, slot_view(memory_, slot));
    held_.take_over(bucket_, slot);
    context_.written.add(slot.name, bucket_.plan.sync.copies, writes_.parameter(place));
  }
}

void FlatShard::forget_writes(const std::set<std::string>& names) {
  for (std::size_t place = 0; place < bucket_.plan.slots.size(); ++place) {
    const std::string& name = bucket_.plan.slots[place].name;
    if (!names.contains(name)) continue;
    writes_.settle(place);
    context_.written.forget(name);
  }
}

void FlatShard::take_over_between_calls() {
  if (!storage_) take_over_writes();
}

void FlatShard::refuse_lost_writes() {
  if (!storage_) held_.refuse_lost_writes(bucket_, writes_);
}

std::int64_t FlatShard::gathered_bytes() const {
  return storage_ ? bucket_.plan.numel * static_cast<std::int64_t>(c10::elementSize(bucket_.plan.dtype)) : 0;
}

void FlatShard::begin_gather() {
  if (state_ != State::kFreed) return;
  memory_ = context_.pool.take(bucket_.plan.dtype, bucket_.plan.numel, bucket_.plan.device);
  const at::Tensor by_rank = memory_.view({shards(), bucket_.held.size()});
  gather_ = groups_.shard.all_gather_async(by_rank, held_.parameters());
  state_ = State::kGathering;
}

void FlatShard::finish_gather() {
  if (state_ != State::kGathering) return;
  context_.waited.during([&] { gather_.wait(); });
  storage_->put_in(memory_);
  state_ = State::kWhole;
}

void FlatShard::free() {
  if (state_ != State::kWhole || !storage_) return;
  take_over_writes();  // as long as they can be read
  storage_->take_out();
  context_.pool.give(std::move(memory_));
  state_ = State::kFreed;
}

void FlatShard::drop() noexcept {
  for (std::size_t place : writes_.written()) writes_.settle(place);  // of a pass that is given up
  if (state_ == State::kGathering) {
    try {
      finish_gather();  // the others have begun it too; a group that failed throws at once
    } catch (...) {
      context_.pool.give(std::exchange(memory_, at::Tensor()));
      state_ = State::kFreed;
    }
  }
  free();
}

void FlatShard::add(std::size_t slot, at::Tensor gradient) {
  const at::NoGradGuard no_grad;
  gradient = as_dense(gradient);
  if (whole_gradients_.defined()) {
    slot_view(whole_gradients_, bucket_.plan.slots[slot]).add_(gradient);
    return;
  }
  PartialSum& piece = pieces_[slot];
  if (!piece.sum.defined()) {
    piece.sum = std::move(gradient);  // others may see it: not to be written
    return;
  }
  if (!piece.own)
    piece.sum = piece.sum.to(bucket_.gradients.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  piece.own = true;
  piece.sum.add_(gradient);
}

void FlatShard::pack(const at::Tensor& buffer) {
  std::int64_t at = 0;
  const auto zero_to = [&](std::int64_t end) {  // another unit has been here
    if (end > at) buffer.narrow(0, at, end - at).zero_();
  };
  for (std::size_t s = 0; s < pieces_.size(); ++s) {
    if (!pieces_[s].sum.defined()) continue;
    const Slot& slot = bucket_.plan.slots[s];
    zero_to(slot.offset);
    slot_view(buffer, slot).copy_(pieces_[s].sum);
    at = slot.offset + slot.numel;
  }
  zero_to(bucket_.plan.numel);
  forget();
}

void FlatShard::begin_reduction(at::Tensor buffer) {
  const at::NoGradGuard no_grad;
  if (whole_gradients_.defined()) {
    if (shards() > 1) reduction_ = groups_.shard.reduce_scatter_async(held_.gradients(), whole_gradients_);
    return;
  }
  if (shards() == 1) {
    for (std::size_t s = 0; s < pieces_.size(); ++s)
      if (pieces_[s].sum.defined())
        slot_view(bucket_.gradients, bucket_.plan.slots[s])
            .add_(pieces_[s].sum.to(bucket_.gradients.device()));
    forget();
    return;
  }
  ISOGRAD_INVARIANT(!scattered_.defined(), "a second reduction while one is under way");
  pack(buffer);
  scattered_ = buffer.narrow(0, bucket_.held.begin, bucket_.held.size());
  reduction_ = groups_.shard.reduce_scatter_async(scattered_, std::move(buffer));
}

void FlatShard::settle() {
  if (!scattered_.defined()) return;
  const at::NoGradGuard no_grad;
  if (fresh_)
    bucket_.gradients.copy_(scattered_);
  else
    bucket_.gradients.add_(scattered_.to(bucket_.gradients.device()));
  fresh_ = false;
  scattered_ = at::Tensor();
}

bool FlatShard::progress() {
  if (state_ == State::kGathering) gather_.progress();
  if (!reduction_.progress()) return false;
  settle();
  return true;
}

void FlatShard::wait() {
  context_.waited.during([&] { reduction_.wait(); });
  settle();
}

void FlatShard::sum_over_replicas() {
  Group& replicas = groups_.replicate;
  if (!trained_ || replicas.size() == 1) return;
  if (held_.gradients().defined()) {
    reduction_ = replicas.all_reduce_async(held_.gradients());
    return;
  }
  // In host memory alone: they go by way of the device, a unit at a time, and come back as the sum.
  scattered_ = bucket_.gradients.to(bucket_.plan.device);
  fresh_ = true;
  reduction_ = replicas.all_reduce_async(scattered_);
  wait();
}

void FlatShard::zero() {
  fresh_ = true;
  forget();
  if (whole_gradients_.defined())
    whole_gradients_.zero_();
  else if (trained_)
    bucket_.gradients.zero_();
}

void FlatShard::forget() {
  for (PartialSum& piece : pieces_) piece = {};
}

}  // namespace isograd
