// Flat storage: buckets made from plans, and the views that connect them with a model's parameters.
#pragma once

#include <vector>

#include "isograd/parameters.hpp"

namespace isograd {

// Slots begin at multiples of this many elements: 64 bytes in bf16, more in wider types.
inline constexpr std::int64_t kSlotAlignment = 32;

// What gradients of parameters of `parameters` type are kept and reduced in.
at::ScalarType gradient_type(at::ScalarType parameters);

// Moves the parameters of `plan` (indices into `parameters`) into one flat buffer and makes them views of it:
// same tensors, same values, new memory. `gradients` is [plan.numel], zero-filled, of gradient_type; the
// parameters' .grad are not touched. `rank` of `size` ranks owns one slice of the bucket.
Bucket make_bucket(BucketPlan plan, const std::vector<NamedParameter>& parameters, at::Tensor gradients,
                   int rank, int size);

// The elements of one slot in a flat tensor of the bucket, in the parameter's shape. Shares memory.
at::Tensor slot_view(const at::Tensor& flat, const Slot& slot);

// Whether `tensor` still is that view (same memory, type and shape).
bool is_slot_view(const at::Tensor& tensor, const at::Tensor& flat, const Slot& slot);

}  // namespace isograd
