// Where each parameter lives: flat storage in buckets, slots, and who owns which elements.
// The only code that computes offsets and slices.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace isograd {

// A trainable parameter as the model names it. Tied weights appear once.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;   // leaf that requires a gradient
  bool decays = true;  // weight decay applies (matrices; not norms and biases)
};

// Parameters of a module in registration order: frozen ones left out, tied ones once (first name).
// decays = dim() >= 2.
std::vector<NamedParameter> trainable_parameters(
    const std::vector<std::pair<std::string, at::Tensor>>& named);

// Place of one parameter in a bucket, in elements.
struct Slot {
  std::string name;
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  std::vector<std::int64_t> shape;
  bool decays = true;
  std::size_t index = 0;  // into the list given at construction
};

// A half-open range of elements.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};

// Rank `rank`'s part of `numel` elements split into `size` contiguous parts whose boundaries are multiples of
// `alignment` elements: disjoint, complete, possibly empty. The owner of an element is the rank whose slice
// has it.
Range owned_slice(std::int64_t numel, int rank, int size, std::int64_t alignment = 16);

struct BucketPlan {
  std::int64_t numel = 0;             // padded
  at::ScalarType dtype = at::kFloat;  // of the parameters in it
  std::vector<Slot> slots;
};

// Packs parameters into buckets in *reverse* order (backward makes the last gradients first), one dtype per
// bucket, each at most `bucket_bytes` unless a single parameter is larger. Pure.
std::vector<BucketPlan> plan_buckets(const std::vector<NamedParameter>& parameters,
                                     std::int64_t bucket_bytes);

// Flat storage of one bucket: the model's parameters and their .grad become views of it.
struct Bucket {
  BucketPlan plan;
  at::Tensor parameters;  // [numel] in the parameters' dtype; the model's tensors are views of it
  at::Tensor master;      // [numel] fp32 for bf16 parameters, otherwise the same tensor as `parameters`
  at::Tensor gradients;   // [numel] fp64 for fp64 parameters, otherwise fp32; .grad are views of it
  Range owned;            // this rank's elements, for norms and counts
};

}  // namespace isograd
