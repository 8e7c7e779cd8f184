// Whole tensors by parameter, from whatever a layout holds.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <map>
#include <numeric>
#include <optional>

#include "base/refuse.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/error.hpp"
#include "layout/flat.hpp"
#include "parallel/data/flat_parameters.hpp"

namespace isograd {

at::Tensor HeldValues::gather_whole(const Bucket& bucket, const at::Tensor& shard) {
  if (bucket.whole()) return shard;
  return mesh().along(bucket.sharded).all_gather(shard).view({-1});  // [S, numel / S]
}

void DataParallel::finish_reduction_with(const Reduced& reduced) {
  finish_reduction();
  for (const Bucket& bucket : buckets()) reduced(bucket, std::nullopt);
}

std::int64_t HeldValues::bytes_sent() { return isograd::bytes_sent({mesh().counting()}); }

std::vector<std::size_t> HeldValues::launch_order() {
  std::vector<std::size_t> order(buckets().size());
  std::iota(order.begin(), order.end(), 0);
  return order;
}

namespace {

// Where the values of one parameter go: what a rank keeps of a bucket, or the tensor itself.
struct Destination {
  const Bucket* bucket = nullptr;
  const Slot* slot = nullptr;
  at::Tensor tensor;
  AxisSet copies;  // along which ranks hold the same values

  at::ScalarType type() const { return bucket ? bucket->master.scalar_type() : tensor.scalar_type(); }
  at::IntArrayRef shape() const { return slot ? at::IntArrayRef(slot->shape) : tensor.sizes(); }
  void write(const at::Tensor& values) const {
    const at::NoGradGuard no_grad;
    if (!bucket) {
      at::Tensor(tensor).copy_(values);
      return;
    }
    write_slot(bucket->master, bucket->held, *slot, values);
    if (bucket->master.scalar_type() != bucket->parameters.scalar_type())
      write_slot(bucket->parameters, bucket->held, *slot, values);
  }
};

void check_values(const std::string& name, const at::Tensor& values, const Destination* found) {
  const auto refuse = [&](std::string what, std::string expected) {
    isograd::refuse(fmt::format("write() of parameter '{}'", name), std::move(what), std::move(expected),
                    "Give names and shapes as the model has them, on every rank");
  };
  if (!found) refuse("no parameter of this name", "one of the layout's, trained or frozen");
  if (!values.defined() || values.sizes() != found->shape())
    refuse(values.defined() ? c10::str(values.sizes()) : "no tensor", c10::str(found->shape()));
}

// Every rank comes here before any goes on, so that none reads the values any more. Where one has a problem
// all throw.
void agree_to_write(const std::optional<ErrorText>& problem, Group all) {
  const at::Tensor refuses = all.all_gather(at::full({1}, problem.has_value(), at::kLong)).flatten();  // [W]
  if (refuses.any().item<bool>()) all.barrier();  // nobody leaves before everybody has read that
  if (problem) throw ConfigError(*problem);
  for (int rank = 0; rank < all.size(); ++rank)
    if (refuses[rank].item<std::int64_t>() != 0)
      isograd::refuse("write()", fmt::format("an error on rank {}, so that no rank writes", rank),
                      "names, shapes, values and a layout that every rank can write to",
                      "Look at the error of that rank, and give the same values on all");
}

// The first parameter for which ranks with copies of it were not all given the same, as it would be written.
// Each asks about every parameter that it has: it may have been given fewer than others. Collective.
std::optional<ErrorText> difference_between_ranks(
    const std::vector<std::pair<std::string, at::Tensor>>& values,
    const std::map<std::string, Destination>& places, const Mesh& mesh) {
  std::map<std::string, std::int64_t> given;
  for (const auto& [name, tensor] : values)
    given[name] = ValueHashes::of(tensor.detach().to(places.at(name).type()));
  std::map<AxisSet, ValueHashes> kinds;
  for (const auto& [name, place] : places) {
    const auto found = given.find(name);
    kinds[place.copies].add(name, found == given.end() ? ValueHashes::kNone : found->second);
  }
  std::optional<ErrorText> first;
  for (const auto& [copies, hashes] : kinds) {
    if (mesh.size(copies) == 1) continue;
    const at::Tensor by_rank = mesh.along(copies).all_gather(hashes.mine());
    const auto difference = hashes.first_difference(
        by_rank, "given to write()", "Compute them alike on all ranks, or broadcast those of one");
    if (!first) first = difference;
  }
  return first;
}

}  // namespace

void DataParallel::write(const std::vector<std::pair<std::string, at::Tensor>>& values) {
  std::map<std::string, Destination> places;
  const auto add = [&](const Bucket& bucket) {
    for (const Slot& slot : bucket.plan.slots)
      places[slot.name] = {&bucket, &slot, {}, bucket.plan.sync.copies};
  };
  const Frozen fixed = frozen();
  for (const NamedParameter& parameter : fixed.tensors)
    places[parameter.name] = {nullptr, nullptr, parameter.tensor, parameter.sync.copies};
  for (const Bucket* bucket : fixed.buckets) add(*bucket);
  for (const Bucket& bucket : buckets()) add(bucket);
  std::set<std::string> names;
  std::optional<ErrorText> problem;
  try {
    check_writable();
    for (const auto& [name, tensor] : values) {
      const auto found = places.find(name);
      check_values(name, tensor, found == places.end() ? nullptr : &found->second);
      names.insert(name);
    }
    take_over_writes(names);
  } catch (const ConfigError& error) {
    problem = error.text();
  }
  agree_to_write(problem, mesh().all());
  agree_to_write(difference_between_ranks(values, places, mesh()), mesh().all());
  bool all_apart = true;  // in the model as they are, which each rank writes for itself
  for (const auto& [name, tensor] : values) {
    const Destination& place = places.at(name);
    place.write(tensor.detach());
    all_apart = all_apart && !place.bucket;
  }
  forget_writes(names);
  if (!all_apart) publish_parameters();
}

std::vector<std::string> HeldValues::bucket_order() {
  std::vector<std::string> names;
  for (const Bucket& bucket : buckets())
    for (const Slot& slot : bucket.plan.slots) names.push_back(slot.name);
  return names;
}

std::vector<HeldValues::View> HeldValues::views() {
  take_over_writes({});
  std::map<std::size_t, View> ordered;  // by the model's order
  for (Bucket& bucket : buckets()) {
    const at::Tensor parameters = gather_whole(bucket, bucket.parameters);
    const at::Tensor gradients = gather_whole(bucket, bucket.gradients);
    const bool same = bucket.master.scalar_type() == bucket.parameters.scalar_type();
    const at::Tensor master = same ? parameters : gather_whole(bucket, bucket.master);
    for (const Slot& slot : bucket.plan.slots)
      ordered[slot.index] = {.name = slot.name,
                             .parameter = slot_view(parameters, slot),
                             .master = slot_view(master, slot),
                             .gradient = slot_view(gradients, slot)};
  }
  std::vector<View> views;
  for (auto& [index, view] : ordered) views.push_back(std::move(view));
  return views;
}

}  // namespace isograd
