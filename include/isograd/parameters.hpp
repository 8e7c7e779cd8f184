// Where each parameter lives: flat storage in buckets, slots, and who owns which elements.
// The only code that computes offsets and slices.
#pragma once

#include "isograd/cxx20.hpp"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "isograd/placement.hpp"

namespace isograd {

// A trainable parameter as the model names it. Tied weights appear once.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;   // leaf that requires a gradient
  bool decays = true;  // weight decay applies (matrices; not norms and biases)
  SyncAxes sync{};     // as place_parameters() finds them; none before
};

// The parameters that a layout is made for: a list of those that are trained, and what it looks after beside
// them.
struct TrainableParameters : std::vector<NamedParameter> {
  using std::vector<NamedParameter>::vector;
  TrainableParameters() = default;
  TrainableParameters(std::vector<NamedParameter> list)  // NOLINT: a list is the usual case
      : std::vector<NamedParameter>(std::move(list)) {}

  // Where those live that are not merely copied, by name. The tensor is then what this rank holds.
  std::vector<std::pair<std::string, Placement>> placements{};
  // Frozen now. One that is unfrozen later joins the layout.
  std::vector<NamedParameter> frozen{};
  // Called when a layout is made and before each of its steps: ConfigError on what would break the law.
  std::function<void()> check{};
};

// Parameters of a module in registration order: frozen ones apart, tied ones once (first name).
// decays = dim() >= 2.
TrainableParameters trainable_parameters(const std::vector<std::pair<std::string, at::Tensor>>& named);

// Takes the axes of each parameter from its placement, or from one that every rank has a copy of and that is
// summed along the data axes. ConfigError: what check_placement() refuses, a tensor that is not of the rank's
// local shape, a placement of no parameter, one on several stages but not on all (their group is no axis).
void place_parameters(TrainableParameters& parameters, const Grid& grid, int rank);

// Place of one parameter in a bucket, in elements.
struct Slot {
  std::string name;
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  std::vector<std::int64_t> shape;
  bool decays = true;
  std::size_t index = 0;  // into the list given at construction, and what has joined it since
  // Off while the parameter is frozen: optimizers leave it and its state as they are.
  bool trained = true;
};

struct BucketPlan {
  std::int64_t numel = 0;             // padded
  at::ScalarType dtype = at::kFloat;  // of the parameters in it
  at::Device device = at::kCPU;       // of them too; where values are still to come (meta), the host
  SyncAxes sync{};                    // and so are these
  std::vector<Slot> slots;
};

// Packs parameters into buckets in *reverse* order (backward makes the last gradients first), of one dtype
// and the same SyncAxes, each at most `bucket_bytes` of gradients unless a single parameter is larger; the
// first one of each kind at most `first_bucket_bytes`, so that communication begins early (0: like the
// others). Pure. `order`, if not empty, is every index into `parameters` once: packed in this order instead.
std::vector<BucketPlan> plan_buckets(const std::vector<NamedParameter>& parameters, std::int64_t bucket_bytes,
                                     std::int64_t first_bucket_bytes = 0,
                                     const std::vector<std::size_t>& order = {});

// What a rank keeps of one bucket, flat. A layout that replicates holds all of it; one that shards holds the
// elements that this rank updates. Norms, optimizers and checkpoints see nothing else.
struct Bucket {
  BucketPlan plan;
  Range owned;        // elements of the bucket that this rank counts, in norms: each element has one owner
  AxisSet sharded{};  // where not held whole: the axes along which the other parts lie, in the ranks' order
  Range held;  // elements whose master, optimizer state and summed gradient are here; `owned` is a part
  at::Tensor parameters;  // [held.size()] in the parameters' dtype: what an update writes
  at::Tensor master;      // [held.size()] fp32 for bf16 parameters, otherwise the same memory as `parameters`
  at::Tensor
      gradients;  // [held.size()] in the parameters' dtype; of bf16 ones in fp32 unless asked otherwise

  bool whole() const { return held.size() == plan.numel; }
};

}  // namespace isograd
