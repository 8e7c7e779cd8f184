#include "train/whole_tensors.hpp"

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <set>
#include <sstream>
#include <tuple>

#include "base/memory.hpp"
#include "layout/flat.hpp"
#include "train/rank_zero.hpp"

namespace isograd {
namespace {

// One parameter of a bucket, [shape], on all ranks. Ranks with a part of it, in `shard`, broadcast in turn.
at::Tensor gathered(const Mesh& mesh, const Bucket& bucket, const Slot& slot, const at::Tensor& shard) {
  if (bucket.whole()) return slot_view(shard, slot);
  Group group = mesh.along(bucket.sharded);
  at::Tensor flat = at::empty({slot.numel}, shard.options());
  for (int rank = 0; rank < group.size(); ++rank) {
    const Range part = within(owned_slice(bucket.plan.numel, rank, group.size()), slot);
    if (part.size() == 0) continue;
    const at::Tensor piece = flat.narrow(0, part.begin - slot.offset, part.size());
    if (rank == group.rank()) piece.copy_(shard.narrow(0, part.begin - bucket.held.begin, part.size()));
    group.broadcast(piece, rank);
  }
  return flat.view(slot.shape);
}

}  // namespace

WholeTensors::WholeTensors(DataParallel& layout, OptimizerState parts, const Layout* placed)
    : WholeTensors(layout, placed) {
  for (const auto& [key, flats] : parts)
    for (std::size_t bucket = 0; bucket < flats.size(); ++bucket)
      if (flats[bucket].defined()) add(key, layout.buckets()[bucket], flats[bucket]);
  add_other_stages();
  sort();
}

WholeTensors WholeTensors::parameters(DataParallel& layout, const Layout* placed) {
  WholeTensors all(layout, placed);
  for (const Bucket& bucket : layout.buckets()) all.add("", bucket, bucket.parameters);
  const DataParallel::Frozen frozen = layout.frozen();
  std::set<std::string> kept;  // in buckets, not in the model
  for (const Bucket* bucket : frozen.buckets) {
    all.add("", *bucket, bucket->parameters, /*frozen=*/true);
    for (const Slot& slot : bucket->plan.slots) kept.insert(slot.name);
  }
  for (std::size_t i = 0; i < frozen.tensors.size(); ++i) {
    const auto& [name, tensor, decays, sync] = frozen.tensors[i];
    if (kept.contains(name)) continue;
    all.add({.frozen = true, .index = i, .parameter = name, .key = {}, .tensor = tensor.detach()},
            tensor.scalar_type(), tensor.sizes());
  }
  all.add_other_stages();
  all.sort();
  return all;
}

void WholeTensors::add(const std::string& key, const Bucket& bucket, const at::Tensor& flat, bool frozen) {
  for (const Slot& slot : bucket.plan.slots)
    add({.frozen = frozen,
         .index = slot.index,
         .parameter = slot.name,
         .key = key,
         .bucket = &bucket,
         .slot = &slot,
         .tensor = flat},
        flat.scalar_type(), slot.shape);
}

void WholeTensors::add(Place place, at::ScalarType type, at::IntArrayRef own) {
  std::vector<std::int64_t> shape = own.vec();
  if (placed_) {
    const auto& all = placed_->parameters();
    const PlacedParameter& parameter = placed_->parameter(place.parameter);
    place.index = static_cast<std::size_t>(&parameter - all.data());
    shape = parameter.placement.whole_shape;
  }
  place.entry = {.name = place.key.empty() ? place.parameter : place.parameter + "." + place.key,
                 .dtype = type,
                 .shape = std::move(shape)};
  places_.push_back(std::move(place));
}

// Adds the tensors of other pipeline stages, which send name, key and type.
void WholeTensors::add_other_stages() {
  if (!placed_ || !placed_->mesh().grid().has(kStageAxis)) return;
  Group stages = placed_->mesh().along({kStageAxis});
  std::string own;
  for (const Place& place : places_)
    own += fmt::format("{} {} {} {}\n", place.parameter, place.frozen ? 1 : 0,
                       static_cast<int>(place.entry.dtype), place.key);
  std::set<std::string> known;  // tied ones are in two stages
  for (const Place& place : places_) known.insert(place.entry.name);
  for (int rank = 0; rank < stages.size(); ++rank) {
    std::istringstream lines(broadcast_text(stages, own, rank));
    std::string line;
    while (std::getline(lines, line)) {
      std::istringstream words(line);
      Place place;
      int frozen = 0, type = 0;
      words >> place.parameter >> frozen >> type >> place.key;
      if (!known.insert(place.key.empty() ? place.parameter : place.parameter + "." + place.key).second)
        continue;
      place.frozen = frozen != 0;
      place.tensor = at::empty({0}, at::TensorOptions(static_cast<at::ScalarType>(type)));
      add(std::move(place), static_cast<at::ScalarType>(type), {0});
    }
  }
}

// Ranks with other parts of the model may have other buckets: an order that none of them decides.
void WholeTensors::sort() {
  const auto order = [](const Place& place) {
    return std::tuple(place.frozen, -static_cast<std::ptrdiff_t>(c10::elementSize(place.entry.dtype)),
                      place.index, place.key);
  };
  std::stable_sort(places_.begin(), places_.end(),
                   [&](const Place& a, const Place& b) { return order(a) < order(b); });
}

TensorStream WholeTensors::stream() {
  TensorStream stream;
  for (const Place& place : places_) stream.entries.push_back(place.entry);
  stream.each = [this](const TensorStream::Take& take) { each(take); };
  return stream;
}

at::Tensor WholeTensors::whole(const Place& place) {
  const at::Tensor result =
      place.bucket ? gathered(layout_.mesh(), *place.bucket, *place.slot, place.tensor) : place.tensor;
  return placed_ ? placed_->whole(place.parameter, result) : result;
}

void WholeTensors::each(const TensorStream::Take& take) {
  std::exception_ptr problem;  // exception of the rank that takes the tensor; other ranks do not see it
  while (next_ < places_.size()) {
    at::Tensor tensor = whole(places_[next_++]);
    try {
      if (take && !problem) take(tensor);
    } catch (...) {
      problem = std::current_exception();
    }
    const std::size_t freed = tensor.nbytes();
    tensor.reset();
    return_freed_memory(freed);
  }
  if (problem) std::rethrow_exception(problem);
}

void on_rank_zero_with(Group& group, const std::vector<WholeTensors*>& tensors,
                       const std::function<void()>& work) {
  const auto drain = [&] {
    for (WholeTensors* each : tensors) each->drain();
  };
  if (group.rank() != 0) drain();
  on_rank_zero(group, [&] {
    std::exception_ptr problem;
    try {
      work();
    } catch (...) {
      problem = std::current_exception();
    }
    drain();  // the other ranks take part to the end, whatever happens to the files
    if (problem) std::rethrow_exception(problem);
  });
}

}  // namespace isograd
