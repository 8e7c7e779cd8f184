// Flat storage: buckets made from plans, and the views that connect them with a model's parameters.
#pragma once

#include <vector>

#include "isograd/parameters.hpp"

namespace isograd {

// Slots begin at multiples of this many elements: 64 bytes in bf16, more in wider types.
inline constexpr std::int64_t kSlotAlignment = 32;

// What gradients of parameters of `parameters` type are kept and reduced in: bf16 ones in fp32, so that
// micro-batches and ranks add up without loss, unless the caller wants them in bf16.
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
// Brings the parameters into the memory of `flat`, whose values they take on: same tensors and, where they
// fill them, same storages, so that what shares a parameter's memory goes with it. After a Claim on them.
// Their .grad are not touched.
void move_parameters(const BucketPlan& plan, const std::vector<NamedParameter>& parameters,
                     const at::Tensor& flat);

// `parameters` is [plan.numel], `gradients` [held.size()] of gradient_type.
Bucket make_bucket(BucketPlan plan, const at::Tensor& parameters, at::Tensor gradients, Range owned,
                   Range held);

// The two above into a fresh buffer: a bucket that is held whole. `gradients` is [plan.numel], zero-filled.
// `rank` of `size` ranks owns one slice of it.
Bucket make_bucket(BucketPlan plan, const std::vector<NamedParameter>& parameters, at::Tensor gradients,
                   int rank, int size);

// The elements of one slot in a flat tensor of the bucket, in the parameter's shape. Shares memory.
at::Tensor slot_view(const at::Tensor& flat, const Slot& slot);

// Whether `tensor` still is that view (same memory, type and shape).
bool is_slot_view(const at::Tensor& tensor, const at::Tensor& flat, const Slot& slot);

// Of `values`, one whole parameter, what lies in `held` goes to its place in `shard`, [held.size()].
void write_slot(const at::Tensor& shard, Range held, const Slot& slot, const at::Tensor& values);

}  // namespace isograd
