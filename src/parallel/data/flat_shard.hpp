// The parameters of one type in one unit: this rank's shard of them, their gathering and the reduction of
// their gradients.
#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "isograd/error.hpp"
#include "layout/flat.hpp"
#include "parallel/data/flat_parameters.hpp"
#include "parallel/data/unit_storage.hpp"

namespace isograd {

// Memory for gathered parameters, used again and counted. In use and spare together are never more than what
// was once in use, and less again after keep().
class GatherPool {
 public:
  at::Tensor take(at::ScalarType dtype, std::int64_t numel, at::Device device) {
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
  void give(at::Tensor memory) {
    const auto bytes = static_cast<std::int64_t>(memory.nbytes());
    bytes_ -= bytes;
    spare_bytes_ += bytes;
    spare_.push_back(std::move(memory));
    trim();
  }
  std::int64_t bytes() const { return bytes_; }  // in use
  std::int64_t most_bytes() const { return most_bytes_; }
  std::int64_t kept_bytes() const { return kept_bytes_; }  // how much stays, in use or spare, at most
  void keep(std::int64_t bytes) {                          // gives back spare memory beyond that
    kept_bytes_ = std::max(bytes, bytes_);
    trim();
  }

 private:
  void trim() {
    while (!spare_.empty() && bytes_ + spare_bytes_ > kept_bytes_) {
      spare_bytes_ -= static_cast<std::int64_t>(spare_.front().nbytes());
      spare_.pop_front();
    }
  }
  std::deque<at::Tensor> spare_;  // the longest unused first
  std::int64_t bytes_ = 0, most_bytes_ = 0, kept_bytes_ = 0, spare_bytes_ = 0;
};

// Shared by all shards of a layout.
struct ShardContext : FlatContext {
  using FlatContext::FlatContext;
  bool reduce_once = false;         // whole gradients are kept until the last micro-batch
  bool even_micro_batches = false;  // all ranks make as many passes: something is exchanged in each
  GatherPool pool{};
};

class FlatShard final : public FlatParameters {
 public:
  // Gives a parameter without values yet (on the meta device) its first ones.
  using Initialize = std::function<void(const std::string& name, at::Tensor& values)>;

  // Collective. Moves the parameters of `plan` (indices into `parameters`) into this rank's shard; from then
  // on they can be read only while whole. The plan is padded for the shards.
  FlatShard(BucketPlan plan, const std::vector<NamedParameter>& parameters, const std::string& unit,
            bool trained, bool fp32_gradients, const Initialize& initialize, ShardContext& context)
      : FlatParameters(plan, context),
        shard_context_(context),
        trained_(trained),
        fp32_gradients_(fp32_gradients),
        pieces_(plan.slots.size()) {
    fresh_ = true;
    const at::NoGradGuard no_grad;
    const auto [held, owned, sharded] = groups_.roles.held_ranges(plan.numel, /*in_shards=*/true);
    ISOGRAD_INVARIANT(held.size() * shards() == plan.numel,
                      fmt::format("{} of {} elements for {} shards", held.size(), plan.numel, shards()));
    bucket_.held = held;
    bucket_.owned = owned;
    bucket_.sharded = sharded;
    if (context.parameters_shared || shards() == 1) {
      const auto write = [&](const at::Tensor& whole) {
        for (const Slot& slot : plan.slots)
          write_values(whole, {0, plan.numel}, slot, parameters.at(slot.index).tensor, initialize);
      };
      at::Tensor whole;
      if (shards() > 1)
        whole = shared_copy(plan, write);
      else
        write(whole = at::zeros({plan.numel}, at::TensorOptions(plan.dtype).device(plan.device)));
      for (const Slot& slot : plan.slots)  // where the values are now
        if (at::Tensor parameter = parameters.at(slot.index).tensor; parameter.is_meta())
          parameter.unsafeGetTensorImpl()->shallow_copy_from(slot_view(whole, slot).getIntrusivePtr());
      move_parameters(plan, parameters, whole);
      bucket_.parameters = whole.narrow(0, bucket_.held.begin, bucket_.held.size());
      state_ = State::kWhole;
    } else {
      bucket_.parameters = groups_.shard.empty_shared(bucket_.held.size(), plan.dtype, plan.device);
      storage_ = std::make_unique<UnitStorage>(
          plan.numel, plan.dtype, plan.device,
          fmt::format("parameter read while sharded: those of unit '{}' are whole only inside its own call. "
                      "Call the block through its handle, or hold whole_parameters() of the layout",
                      unit));
      for (const Slot& slot : plan.slots) {
        const at::Tensor& parameter = parameters.at(slot.index).tensor;
        write_values(bucket_.parameters, bucket_.held, slot, parameter, initialize);
        storage_->adopt(parameter, slot);
      }
    }
    bucket_.master = plan.dtype == at::kBFloat16 ? bucket_.parameters.to(at::kFloat) : bucket_.parameters;
    writes_ = Writes(plan, parameters);
    bucket_.plan = std::move(plan);
    make_gradients();
  }

  bool trained() const { return trained_; }
  // Parameters that were frozen when the layout was made get gradients from here on. Collective.
  void train() {
    trained_ = true;
    make_gradients();
  }
  const UnitStorage* storage() const { return storage_.get(); }  // none where always whole

  // Collective, in the same order on all ranks. Does nothing unless freed.
  void begin_gather() {
    if (state_ != State::kFreed) return;
    const BucketPlan& plan = bucket_.plan;
    memory_ = shard_context_.pool.take(plan.dtype, plan.numel, plan.device);
    gather_ = groups_.shard.all_gather_async(memory_.view({shards(), bucket_.held.size()}), parameters_);
    state_ = State::kGathering;
  }
  void finish_gather() {
    if (state_ != State::kGathering) return;
    context_.waited.during([&] { gather_.wait(); });
    storage_->put_in(memory_);
    state_ = State::kWhole;
  }
  void free() {  // nothing unless whole
    if (state_ != State::kWhole || !storage_) return;
    take_over_writes();  // as long as they can be read
    storage_->take_out();
    shard_context_.pool.give(std::move(memory_));
    state_ = State::kFreed;
  }
  void drop() noexcept {                                                      // whatever state it is in
    for (const std::size_t place : writes_.written()) writes_.settle(place);  // of a pass that is given up
    if (state_ == State::kGathering) {
      try {
        finish_gather();  // the others have begun it too; a group that failed throws at once
      } catch (...) {
        shard_context_.pool.give(std::exchange(memory_, at::Tensor()));
        state_ = State::kFreed;
      }
    }
    free();
  }
  bool is_freed() const { return state_ == State::kFreed; }
  std::int64_t gathered_bytes() const { return storage_ ? storage_->bytes() : 0; }  // 0 where always whole

  void add(std::size_t slot, at::Tensor gradient) {
    const at::NoGradGuard no_grad;
    gradient = as_dense(gradient);
    if (whole_gradients_.defined()) {
      slot_view(whole_gradients_, bucket_.plan.slots[slot]).add_(gradient);
      return;
    }
    const Slot& own = bucket_.plan.slots[slot];
    // Computed in another's place, as by a function that recomputes that one's gradient: packing writes
    // there.
    if (buffer_.defined() && gradient.is_alias_of(buffer_) && !is_slot_view(gradient, buffer_, own))
      gradient = gradient.clone();
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
  // Where needs_buffer(): [numel] in memory of the shard group, for the next reduction, in use until wait()
  // returns or progress() is true.
  bool has_buffer() const { return buffer_.defined(); }
  void give_buffer(at::Tensor buffer) { buffer_ = std::move(buffer); }
  const void* buffer() const { return buffer_.const_data_ptr(); }
  // The slot's place in the buffer, for a gradient that nothing has been added to. Given once.
  at::Tensor place_of(std::size_t slot) {
    PartialSum& piece = pieces_[slot];
    if (piece.sum.defined() || std::exchange(piece.placed, true)) return {};
    return slot_view(buffer_, bucket_.plan.slots[slot]);
  }
  // Reduces what was added, zeros where nothing was.
  void begin_reduction() {
    const at::NoGradGuard no_grad;
    if (whole_gradients_.defined()) {
      if (shards() > 1) pending_ = groups_.shard.reduce_scatter_async(gradients_, whole_gradients_);
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
    const at::Tensor buffer = buffer_;
    pack(buffer, [&](std::size_t slot) { return pieces_[slot].sum; });
    forget();
    at::Tensor sum = bucket_.gradients;  // of the step's first micro-batch, unless it is in host memory
    if (!sum.is_same(gradients_) || !std::exchange(fresh_, false))
      sum = scattered_ = buffer.narrow(0, bucket_.held.begin, bucket_.held.size());
    pending_ = groups_.shard.reduce_scatter_async(sum, buffer);
  }
  bool needs_buffer() const { return shards() > 1 && !shard_context_.reduce_once; }
  bool progress() {
    if (state_ == State::kGathering) gather_.progress();
    return FlatParameters::progress();
  }
  void zero() {
    fresh_ = true;
    forget();
    if (whole_gradients_.defined())
      whole_gradients_.zero_();
    else if (trained_ && !needs_buffer())
      bucket_.gradients.zero_();
  }
  // Zeros where nothing has been reduced in this step; from then on the gradients can be read.
  void complete() {
    if (trained_ && needs_buffer() && std::exchange(fresh_, false)) bucket_.gradients.zero_();
  }
  void forget() {  // what was added and not reduced
    for (PartialSum& piece : pieces_) piece = {};
    buffer_ = at::Tensor();
  }

  // Does nothing while the parameters are not whole: nobody can write to them.
  void take_over_writes(const std::set<std::string>& excluded = {}) override {
    if (state_ == State::kWhole) FlatParameters::take_over_writes(excluded);
  }
  // Between calls and after an update, for parameters that are whole all the time.
  void take_over_between_calls() {
    if (!storage_) take_over_writes();
  }
  void refuse_lost_writes() const {
    if (!storage_) FlatParameters::refuse_lost_writes();
  }

 private:
  enum class State { kFreed, kGathering, kWhole };
  struct PartialSum {
    at::Tensor sum;
    bool own = false;     // memory nobody else sees
    bool placed = false;  // place_of() was given
  };

  static void write_values(const at::Tensor& to, Range held, const Slot& slot, const at::Tensor& parameter,
                           const Initialize& initialize) {
    if (!parameter.is_meta()) return write_slot(to, held, slot, parameter.detach());
    at::Tensor values = at::zeros(slot.shape, to.options().device(at::kCPU));  // the same bits on any device
    initialize(slot.name, values);
    write_slot(to, held, slot, values);
  }

  void make_gradients() {
    if (trained_) {
      const BucketPlan& plan = bucket_.plan;
      const at::ScalarType type = gradient_type(plan.dtype, fp32_gradients_);
      const std::int64_t kept = bucket_.held.size();
      if (shard_context_.reduce_once) {
        whole_gradients_ = groups_.shard.empty_shared(plan.numel, type, plan.device);
        bucket_.gradients = whole_gradients_.narrow(0, bucket_.held.begin, kept);
      } else {
        bucket_.gradients = groups_.replicate.empty_shared(kept, type, plan.device);
      }
    }
    place(context_.offload && trained_, shard_context_.reduce_once);
  }

  void write_to_shard(const Slot& slot) override {
    if (storage_) write_slot(parameters_, bucket_.held, slot, slot_view(memory_, slot));
  }

  ShardContext& shard_context_;
  bool trained_, fp32_gradients_;
  std::unique_ptr<UnitStorage> storage_{};
  State state_ = State::kFreed;
  at::Tensor memory_;               // gathered into
  at::Tensor whole_gradients_;      // [numel], where kept until the last micro-batch
  std::vector<PartialSum> pieces_;  // by slot
  at::Tensor buffer_;               // of the next reduction
  Pending gather_{};
};

}  // namespace isograd
