// Selects trained parameters, packs them into buckets, and makes buckets and views from these plans.
#include "layout/flat.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "base/refuse.hpp"
#include "layout/storage.hpp"

namespace isograd {
namespace {

std::string quoted(const std::string& name) { return fmt::format("parameter '{}'", name); }

void check_one(const std::string& name, const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || !(tensor.is_cpu() || tensor.is_cuda() || tensor.is_meta()))
    refuse(quoted(name),
           fmt::format("layout {}, device {}", c10::str(tensor.layout()), tensor.device().str()),
           "a dense tensor on the CPU or a GPU", "Make the parameter dense and move the model");
  if (!tensor.is_leaf())
    refuse(quoted(name), "a tensor computed from others", "a leaf of the autograd graph",
           "Register the leaf that it is computed from");
  const auto type = tensor.scalar_type();
  if (type != at::kFloat && type != at::kDouble && type != at::kBFloat16)
    refuse(quoted(name), c10::toString(type), "float64, float32 or bfloat16",
           "Convert the model before this call");
}

// First and last byte a strided tensor can touch. They show whether two parameters share memory.
std::pair<std::uintptr_t, std::uintptr_t> extent(const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * tensor.element_size()};
}

// One flat buffer holds many parameters, so these must be on one device; parameters without values may go
// anywhere.
void check_one_device(const std::vector<NamedParameter>& parameters) {
  const NamedParameter* first = nullptr;
  for (const auto& parameter : parameters) {
    if (parameter.tensor.is_meta()) continue;
    if (!first) first = &parameter;
    if (parameter.tensor.device() != first->tensor.device())
      refuse(quoted(parameter.name),
             fmt::format("device {} where '{}' is on {}", parameter.tensor.device().str(), first->name,
                         first->tensor.device().str()),
             "all parameters on one device", "Move the whole model with model.to(device)");
  }
}

void check_disjoint(const std::vector<NamedParameter>& parameters) {
  std::map<std::uintptr_t, std::pair<std::uintptr_t, const std::string*>> by_begin;
  for (const auto& parameter : parameters)
    if (parameter.tensor.numel() > 0 && !parameter.tensor.is_meta()) {
      const auto [begin, end] = extent(parameter.tensor);
      const auto next = by_begin.lower_bound(begin);
      const std::string* other = nullptr;
      if (next != by_begin.end() && next->first < end) other = next->second.second;
      if (next != by_begin.begin() && std::prev(next)->second.first > begin)
        other = std::prev(next)->second.second;
      if (other)
        refuse(quoted(parameter.name), fmt::format("memory shared with '{}', a different tensor", *other),
               "memory of its own, or the very same tensor for tied weights",
               "Tie weights by registering one tensor under both names");
      by_begin[begin] = {end, &parameter.name};
    }
}

std::int64_t padded(std::int64_t numel, std::int64_t alignment) {
  return (numel + alignment - 1) / alignment * alignment;
}

}  // namespace

TrainableParameters trainable_parameters(const std::vector<std::pair<std::string, at::Tensor>>& named) {
  TrainableParameters parameters;
  std::set<const c10::TensorImpl*> seen;
  std::set<std::string> names;
  for (const auto& [name, tensor] : named) {
    if (!tensor.defined()) continue;
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;  // tied: the first name stays
    NamedParameter parameter{.name = name, .tensor = tensor, .decays = tensor.dim() >= 2};
    if (!tensor.requires_grad()) {
      parameters.frozen.push_back(std::move(parameter));
      continue;
    }
    check_one(name, tensor);
    if (!names.insert(name).second)
      refuse(quoted(name), "two different tensors of this name", "a name for each parameter",
             "Rename one of them");
    parameters.push_back(std::move(parameter));
  }
  check_disjoint(parameters);
  check_one_device(parameters);
  return parameters;
}

std::vector<const NamedParameter*> all_parameters(const TrainableParameters& parameters) {
  std::vector<const NamedParameter*> all;
  for (const NamedParameter& parameter : parameters) all.push_back(&parameter);
  for (const NamedParameter& parameter : parameters.frozen) all.push_back(&parameter);
  return all;
}

void place_parameters(TrainableParameters& parameters, const Grid& grid, int rank) {
  const SyncAxes copied = sync_axes(placed(grid, {}), grid);
  std::map<std::string, NamedParameter*> by_name;
  for (auto* list : {static_cast<std::vector<NamedParameter>*>(&parameters), &parameters.frozen})
    for (NamedParameter& parameter : *list) {
      parameter.sync = copied;
      by_name[parameter.name] = &parameter;
    }
  for (const auto& [name, placement] : parameters.placements) {
    check_placement(name, placement, grid);
    const std::string where = fmt::format("the placement of parameter '{}'", name);
    const auto place = by_name.find(name);
    if (place == by_name.end()) {
      if (!holds(placement, grid, rank)) continue;
      refuse(where, "no parameter of this name", "one of the model's", "Correct the name");
    }
    NamedParameter* const found = place->second;
    const auto shape = local_shape(placement, grid, rank);
    if (found->tensor.sizes() != at::IntArrayRef(shape))
      refuse(where, fmt::format("a tensor of {} on rank {}", c10::str(found->tensor.sizes()), rank),
             fmt::format("its part there, {}", c10::str(at::IntArrayRef(shape))),
             "Give the model the rank's part of the parameter, or correct the placement");
    found->sync = sync_axes(placement, grid);
  }
}

std::vector<BucketPlan> plan_buckets(const std::vector<NamedParameter>& parameters, std::int64_t bucket_bytes,
                                     std::int64_t first_bucket_bytes, const std::vector<std::size_t>& order) {
  ISOGRAD_INVARIANT(order.empty() || order.size() == parameters.size(),
                    fmt::format("an order of {} of {} parameters", order.size(), parameters.size()));
  const char* const action = "Raise it; the default is 25 MiB, and 1 MiB for the first bucket";
  if (bucket_bytes <= 0) refuse("bucket_bytes", std::to_string(bucket_bytes), "1 or more", action);
  if (first_bucket_bytes < 0)
    refuse("first_bucket_bytes", std::to_string(first_bucket_bytes), "0 or more", action);
  const std::int64_t first_limit =
      first_bucket_bytes > 0 ? std::min(first_bucket_bytes, bucket_bytes) : bucket_bytes;
  struct Open {
    BucketPlan plan{};
    std::size_t last = 0;    // place of its last parameter
    std::int64_t limit = 0;  // bytes; 0: the first of its kind
  };
  std::map<std::pair<at::ScalarType, SyncAxes>, Open> open;
  std::vector<std::pair<std::size_t, BucketPlan>> closed;
  for (std::size_t place = 0; place < parameters.size(); ++place) {
    const std::size_t index = order.empty() ? parameters.size() - 1 - place : order[place];
    const auto& [name, tensor, decays, sync] = parameters[index];
    const auto type = tensor.scalar_type();
    const std::int64_t bytes = c10::elementSize(gradient_type(type)),
                       numel = padded(tensor.numel(), kSlotAlignment);
    auto& [plan, last, limit] = open[{type, sync}];
    if (limit == 0) limit = first_limit;
    if (!plan.slots.empty() && (plan.numel + numel) * bytes > limit) {
      closed.emplace_back(last, std::exchange(plan, {}));
      limit = bucket_bytes;
    }
    plan.dtype = type;
    plan.sync = sync;
    if (!tensor.is_meta()) plan.device = tensor.device();
    plan.slots.push_back({.name = name,
                          .offset = plan.numel,
                          .numel = tensor.numel(),
                          .shape = tensor.sizes().vec(),
                          .decays = decays,
                          .index = index});
    plan.numel += numel;
    last = place;
  }
  for (auto& [kind, bucket] : open) closed.emplace_back(bucket.last, std::move(bucket.plan));
  // A bucket is complete when its last gradient arrives: launch in that order.
  std::sort(closed.begin(), closed.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<BucketPlan> plans;
  for (auto& [place, plan] : closed) plans.push_back(std::move(plan));
  return plans;
}

at::ScalarType gradient_type(at::ScalarType parameters, bool fp32_gradients) {
  return parameters == at::kBFloat16 && fp32_gradients ? at::kFloat : parameters;
}

void check_can_be_shared(const BucketPlan& plan) {
  if (plan.device.is_cpu()) return;
  refuse("one copy of the parameters", "parameters on " + plan.device.str(),
         "parameters in host memory, which the ranks of a host can share", "Set share_parameters to off");
}

void pad_for(BucketPlan& plan, int parts) {
  const std::int64_t unit = parts * kShardAlignment;
  plan.numel = (plan.numel + unit - 1) / unit * unit;
}

void write_parameters(const BucketPlan& plan, const std::vector<NamedParameter>& parameters,
                      const at::Tensor& flat) {
  at::NoGradGuard no_grad;
  for (const Slot& slot : plan.slots) slot_view(flat, slot).copy_(parameters.at(slot.index).tensor);
}

void move_parameters(const BucketPlan& plan, const std::vector<NamedParameter>& parameters,
                     const at::Tensor& flat) {
  at::NoGradGuard no_grad;
  for (const Slot& slot : plan.slots) {
    at::Tensor parameter = parameters.at(slot.index).tensor;
    if (parameter.is_alias_of(flat)) continue;  // made there
    const at::Tensor view = slot_view(flat, slot);
    if (slot.numel > 0 && fills_its_storage(parameter))
      give_memory(*parameter.storage().unsafeGetStorageImpl(), view);
    else
      parameter.set_data(view);
  }
}

Bucket make_bucket(BucketPlan plan, const at::Tensor& parameters, at::Tensor gradients, Range owned,
                   Range held) {
  ISOGRAD_INVARIANT(
      gradients.dim() == 1 && gradients.size(0) == held.size() && gradients.is_contiguous() &&
          (gradients.scalar_type() == gradient_type(plan.dtype) || gradients.scalar_type() == plan.dtype) &&
          parameters.numel() == plan.numel,
      fmt::format("gradients {} of {} for {} of {} elements of {}", c10::str(gradients.sizes()),
                  c10::toString(gradients.scalar_type()), held.size(), plan.numel,
                  c10::toString(plan.dtype)));
  ISOGRAD_INVARIANT(owned.begin >= held.begin && owned.end <= held.end && held.end <= plan.numel,
                    fmt::format("owned {} to {}, held {} to {}, of {}", owned.begin, owned.end, held.begin,
                                held.end, plan.numel));
  at::NoGradGuard no_grad;
  Bucket bucket;
  bucket.parameters = held.size() == plan.numel ? parameters : parameters.narrow(0, held.begin, held.size());
  bucket.master = plan.dtype == at::kBFloat16 ? bucket.parameters.to(at::kFloat) : bucket.parameters;
  bucket.gradients = std::move(gradients);
  bucket.owned = owned;
  bucket.held = held;
  bucket.plan = std::move(plan);
  return bucket;
}

Bucket make_bucket(BucketPlan plan, const std::vector<NamedParameter>& parameters, at::Tensor gradients,
                   int rank, int size) {
  const at::Tensor flat = at::zeros({plan.numel}, gradients.options().dtype(plan.dtype));
  write_parameters(plan, parameters, flat);
  move_parameters(plan, parameters, flat);
  const Range owned = owned_slice(plan.numel, rank, size), all{0, plan.numel};
  return make_bucket(std::move(plan), flat, std::move(gradients), owned, all);
}

at::Tensor slot_view(const at::Tensor& flat, const Slot& slot) {
  return flat.narrow(0, slot.offset, slot.numel).view(slot.shape);
}

bool is_slot_view(const at::Tensor& tensor, const at::Tensor& flat, const Slot& slot) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.scalar_type() != flat.scalar_type() ||
      tensor.sizes() != slot.shape)
    return false;
  if (slot.numel == 0) return true;
  const auto* place = static_cast<const char*>(flat.const_data_ptr()) + slot.offset * flat.element_size();
  return tensor.const_data_ptr() == place && tensor.is_contiguous();
}

Range within(Range held, const Slot& slot) {
  const std::int64_t begin = std::max(held.begin, slot.offset),
                     end = std::min(held.end, slot.offset + slot.numel);
  return begin < end ? Range{begin, end} : Range{begin, begin};
}

void write_slot(const at::Tensor& shard, Range held, const Slot& slot, const at::Tensor& values) {
  const Range part = within(held, slot);
  if (part.size() == 0) return;
  at::NoGradGuard no_grad;
  shard.narrow(0, part.begin - held.begin, part.size())
      .copy_(values.reshape({-1}).narrow(0, part.begin - slot.offset, part.size()));
}

}  // namespace isograd
