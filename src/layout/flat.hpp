// Flat storage: buckets made from plans, and the views that connect them with a model's parameters.
#pragma once

#include <vector>

#include "isograd/parameters.hpp"

namespace isograd {

std::vector<const NamedParameter*> all_parameters(const TrainableParameters& parameters);  // frozen ones last

// Slots begin at multiples of this many elements: 64 bytes in bf16, more in wider types.
inline constexpr std::int64_t kSlotAlignment = 32;

// The type in which gradients are kept and reduced: fp32 for bf16 parameters, so that micro-batches and
// ranks add up without loss, unless the caller wants bf16.
at::ScalarType gradient_type(at::ScalarType parameters, bool fp32_gradients = true);

// Shards of a flat buffer begin at multiples of this many elements: no two ranks write to one cache line.
inline constexpr std::int64_t kShardAlignment = 16;

// ConfigError unless ranks of a host can keep one copy of these parameters between them.
void check_can_be_shared(const BucketPlan& plan);

// Pads the plan so that it divides into `parts` equal shards, which owned_slice() then gives.
void pad_for(BucketPlan& plan, int parts);

// Copies the values of the plan's parameters (indices into `parameters`) to their places in `flat`,
// [plan.numel] in the plan's dtype.
void write_parameters(const BucketPlan& plan, const std::vector<NamedParameter>& parameters,
                      const at::Tensor& flat);
// Moves the parameters into the memory of `flat` and gives them its values. They stay the same tensors and,
// where they fill their storage, the same storages, so tensors that share a parameter's memory move with
// it. Requires a Claim on them. Their .grad is not touched.
void move_parameters(const BucketPlan& plan, const std::vector<NamedParameter>& parameters,
                     const at::Tensor& flat);

// `parameters` is [plan.numel], `gradients` [held.size()] of gradient_type.
Bucket make_bucket(BucketPlan plan, const at::Tensor& parameters, at::Tensor gradients, Range owned,
                   Range held);

// write_parameters() and move_parameters() into a new buffer, for a bucket that is held whole. `gradients`
// is [plan.numel], zero-filled. `rank` of `size` ranks owns one slice of it.
Bucket make_bucket(BucketPlan plan, const std::vector<NamedParameter>& parameters, at::Tensor gradients,
                   int rank, int size);

// The elements of one slot in a flat tensor of the bucket, in the parameter's shape. Shares memory.
at::Tensor slot_view(const at::Tensor& flat, const Slot& slot);

// Whether `tensor` is still that view (same memory, type and shape).
bool is_slot_view(const at::Tensor& tensor, const at::Tensor& flat, const Slot& slot);

// The elements of a slot that are in `held`, as elements of the bucket; empty: none.
Range within(Range held, const Slot& slot);

// Copies the part of `values`, one whole parameter, that is in `held` to its place in `shard`, [held.size()].
void write_slot(const at::Tensor& shard, Range held, const Slot& slot, const at::Tensor& values);

std::int64_t hash_of(const void* data, std::size_t bytes);

// [tensors.size()] of int64: of each tensor's type, shape and bits.
at::Tensor checksums(const std::vector<at::Tensor>& tensors);

}  // namespace isograd
