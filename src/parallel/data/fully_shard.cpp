// Which parameter belongs to which unit, and the layout around the units.
#include "isograd/fully_shard.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <unordered_map>

#include "isograd/error.hpp"
#include "layout/flat.hpp"
#include "layout/storage.hpp"
#include "parallel/data/freezing.hpp"
#include "parallel/data/same_parameters.hpp"
#include "parallel/data/unit_handle.hpp"
#include "parallel/data/unit_passes.hpp"

namespace isograd {
namespace {

using Named = std::vector<std::pair<std::string, at::Tensor>>;
using Handles = std::vector<UnitHandle>;

[[noreturn]] void refuse(std::string found, std::string expected, std::string action) {
  throw ConfigError({.where = "fully_shard",
                     .found = std::move(found),
                     .expected = std::move(expected),
                     .action = std::move(action)});
}

// Trained and frozen parameters of the model, tied ones once. What is frozen and of another type or layout
// than parameters are trained in stays as it is, whole on every rank.
struct Members {
  TrainableParameters trained;
  std::vector<NamedParameter> frozen;

  std::array<const std::vector<NamedParameter>*, 2> lists() const { return {&trained, &frozen}; }
};

Members members_of(const Named& named, const Mesh& mesh, const FullyShardOptions& options) {
  Members members;
  members.trained = trainable_parameters(named);
  members.trained.placements = options.placements;
  place_parameters(members.trained, mesh.grid(), mesh.rank());
  for (const NamedParameter& parameter : members.trained.frozen) {
    const at::Tensor& tensor = parameter.tensor;
    const auto type = tensor.scalar_type();
    const bool floating = type == at::kFloat || type == at::kDouble || type == at::kBFloat16;
    if (floating && tensor.layout() == at::kStrided && tensor.is_leaf()) members.frozen.push_back(parameter);
  }
  return members;
}

// The units' handles, each once, the root first; and the list of uses in their terms.
struct Uses {
  Handles units;
  std::vector<std::size_t> uses;
};

Uses uses_of(const UnitHandle& root, const Handles& blocks) {
  Uses result{.units = {root}, .uses = {kRootUnit}};
  for (const UnitHandle& block : blocks) {
    std::size_t unit = 0;
    while (unit < result.units.size() && result.units[unit].binding() != block.binding()) ++unit;
    if (unit == kRootUnit) refuse("the root among its own blocks", "blocks only", "Take it off the list");
    if (unit == result.units.size()) result.units.push_back(block);
    result.uses.push_back(unit);
  }
  for (const UnitHandle& handle : result.units)
    if (handle.bound())
      refuse("a model that another layout has sharded", "one layout at a time", "Destroy the other layout");
  return result;
}

// Unit by tensor: the only block that has it, else the root.
std::unordered_map<const c10::TensorImpl*, std::size_t> assign(const Uses& uses, const Named& named) {
  std::unordered_map<const c10::TensorImpl*, std::size_t> units;
  for (const auto& [name, tensor] : named)
    if (tensor.defined()) units[tensor.unsafeGetTensorImpl()] = kRootUnit;
  std::unordered_set<const c10::TensorImpl*> in_blocks;
  for (std::size_t unit = 1; unit < uses.units.size(); ++unit) {
    std::unordered_set<const c10::TensorImpl*> own;
    for (const at::Tensor& tensor : uses.units[unit].binding()->parameters()) {
      const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
      if (!tensor.defined() || !own.insert(impl).second) continue;
      const auto found = units.find(impl);
      if (found == units.end())
        refuse(fmt::format("a parameter {} of block {} that the root does not have", c10::str(tensor.sizes()),
                           unit - 1),
               "blocks that are registered in the root", "Register the block's module in the model");
      found->second = in_blocks.insert(impl).second ? unit : kRootUnit;
    }
  }
  return units;
}

// What the parameters' names have in common, up to a dot.
std::string name_of(std::size_t unit, const std::vector<std::string>& names) {
  if (unit == kRootUnit) return "root";
  std::string common = names.empty() ? "" : names.front();
  for (const std::string& name : names) {
    std::size_t same = 0;
    while (same < std::min(common.size(), name.size()) && common[same] == name[same]) ++same;
    common.resize(same);
  }
  const std::size_t dot = common.rfind('.');
  return dot == std::string::npos || dot == 0 ? fmt::format("block {}", unit - 1) : common.substr(0, dot);
}

void check_same(const Members& members, const Mesh& mesh) {
  std::vector<NamedParameter> all = members.trained;
  all.insert(all.end(), members.frozen.begin(), members.frozen.end());
  for (NamedParameter& parameter : all)
    if (parameter.tensor.is_meta()) {  // no values yet: its name and shape
      parameter.name += c10::str(" ", parameter.tensor.sizes());
      parameter.tensor = at::empty({0}, at::TensorOptions(parameter.tensor.scalar_type()));
    }
  check_same_parameters(all, mesh);
}

// What one unit will be made of.
struct UnitPlan {
  struct Flat {
    BucketPlan plan;
    bool trained;
  };
  std::string name;
  bool reshard = true, fp32_gradients = true;
  std::vector<Flat> flats{};
  std::int64_t bytes = 0;  // gathered
};

std::vector<UnitPlan> plan_units(const Uses& uses, const Named& named, const Members& members,
                                 const FullyShardOptions& options, int shards, bool always_whole) {
  const auto unit_of = assign(uses, named);
  std::vector<UnitPlan> units(uses.units.size());
  for (std::size_t unit = 0; unit < units.size(); ++unit) {
    std::vector<std::string> names;
    for (const auto* list : members.lists()) {
      std::vector<NamedParameter> mine;
      std::vector<std::size_t> places;
      for (std::size_t i = 0; i < list->size(); ++i)
        if (unit_of.at((*list)[i].tensor.unsafeGetTensorImpl()) == unit) {
          mine.push_back((*list)[i]);
          names.push_back((*list)[i].name);
          places.push_back(i);
        }
      for (BucketPlan& plan : plan_buckets(mine, std::numeric_limits<std::int64_t>::max())) {
        for (Slot& slot : plan.slots) slot.index = places[slot.index];
        pad_for(plan, shards);
        if (mine.front().tensor.is_meta()) plan.device = options.device;
        if (!always_whole)
          units[unit].bytes += plan.numel * static_cast<std::int64_t>(c10::elementSize(plan.dtype));
        units[unit].flats.push_back({std::move(plan), list == &members.trained});
      }
    }
    const auto& own = uses.units[unit].binding()->reshard;
    units[unit].fp32_gradients = uses.units[unit].binding()->fp32_gradients.value_or(options.fp32_gradients);
    units[unit].name = name_of(unit, names);
    units[unit].reshard =
        own.value_or(unit == kRootUnit ? options.reshard_root : options.reshard_after_forward);
  }
  return units;
}

void check_limit(const std::vector<UnitPlan>& units, std::int64_t limit) {
  if (limit < 0) refuse(fmt::format("gather_limit_bytes = {}", limit), "0 or more", "0 stands for no limit");
  if (limit == 0) return;
  const auto stays = [&](const UnitPlan& unit) { return &unit == &units[kRootUnit] || !unit.reshard; };
  std::int64_t kept = 0;  // between forward and backward, or as long as the blocks
  for (const UnitPlan& unit : units)
    if (stays(unit)) kept += unit.bytes;
  for (const UnitPlan& unit : units) {
    const std::int64_t bytes = kept + (stays(unit) ? 0 : unit.bytes);
    if (bytes > limit)
      throw ConfigError(
          {.where = fmt::format("sharded unit '{}'", unit.name),
           .found = fmt::format("{} bytes whole at a time, {} of them of units that stay whole", bytes, kept),
           .expected = fmt::format("at most {} (gather_limit_bytes)", limit),
           .action = "Raise the limit, make smaller blocks, or let more units be freed after forward"});
  }
}

class ShardedLayout final : public FullySharded {
 public:
  ShardedLayout(const Uses& uses, const Named& named, const Mesh& mesh, const FullyShardOptions& options)
      : handles_(uses.units), members_(members_of(named, mesh, options)) {
    const SyncAxes copied = sync_axes(placed(mesh.grid(), {}), mesh.grid());
    auto context = std::make_unique<ShardContext>(ShardContext{
        .mesh = mesh, .groups = RoleGroups(mesh, copied, options.sharded), .sharded_axes = options.sharded});
    check_shards(*context);
    context->one_copy = options.share_parameters && context->shards() > 1;
    context->reduce_once = options.reduce_once;
    context->offload = options.offload;
    // Everything that can refuse comes before the model is touched.
    auto plans = plan_units(uses, named, members_, options, context->shards(), context->always_whole());
    check_limit(plans, options.gather_limit_bytes);
    if (options.offload)
      for (const UnitPlan& plan : plans)
        for (const auto& [flat, trained] : plan.flats)
          if (trained) check_can_be_offloaded(flat.device);
    if (!options.initialize) check_values();
    members_.trained.check = options.check;
    if (options.check) options.check();
    claims_.emplace_back(members_.trained);
    claims_.emplace_back(members_.frozen);
    if (options.check_parameters) check_same(members_, mesh);
    std::vector<ShardedUnit> units;
    for (UnitPlan& plan : plans) {
      ShardedUnit& unit = units.emplace_back(ShardedUnit{.name = plan.name, .reshard = plan.reshard});
      for (auto& [flat, trained] : plan.flats) {
        unit.flats.push_back(std::make_unique<FlatShard>(
            std::move(flat), trained ? members_.trained : members_.frozen, plan.name, trained,
            plan.fp32_gradients, options.initialize, *context));
        if (trained)
          buckets_.push_back(unit.flats.back()->bucket());
        else
          frozen_flats_.push_back(unit.flats.back().get());
      }
    }
    passes_ = std::make_shared<UnitPasses>(
        std::move(context), std::move(units), uses.uses, members_.trained,
        PassOptions{.prefetch = options.prefetch, .gather_limit = options.gather_limit_bytes});
    for (std::size_t unit = 0; unit < handles_.size(); ++unit) {
      UnitHandle::Binding& binding = *handles_[unit].binding();
      const bool checkpoint = unit != kRootUnit && binding.checkpoint.value_or(options.checkpoint);
      binding.call = {.host = passes_, .unit = unit, .checkpoint = checkpoint};
    }
  }

  ~ShardedLayout() override {
    for (const UnitHandle& handle : handles_) handle.binding()->call = {};
    passes_->close();
  }
  ShardedLayout(const ShardedLayout&) = delete;
  ShardedLayout& operator=(const ShardedLayout&) = delete;

  void zero_gradients() override {
    if (members_.trained.check) members_.trained.check();
    passes_->zero_gradients();
    follow(/*joining=*/true);
  }
  void begin_backward(bool last) override { passes_->begin_backward(last); }
  void finish_reduction() override {
    passes_->finish_reduction();
    follow(/*joining=*/false);
  }
  void publish_parameters() override { passes_->publish_parameters(); }
  bool takes_every_round() const override { return passes_->takes_every_round(); }
  std::vector<Bucket>& buckets() override { return buckets_; }
  const Mesh& mesh() const override { return passes_->context().mesh; }
  std::int64_t bytes_sent() override {
    const RoleGroups& groups = passes_->context().groups;
    std::vector<Group> all{groups.summed, groups.shard, groups.replicate};
    for (const ShardedUnit& unit : passes_->units())
      for (const auto& flat : unit.flats) {
        all.push_back(flat->groups().summed);
        all.push_back(flat->groups().replicate);
      }
    return isograd::bytes_sent(all);
  }
  double exposed_seconds() const override { return passes_->context().waited.seconds(); }
  std::int64_t gathered_bytes() const override { return passes_->context().pool.bytes(); }
  std::int64_t most_gathered_bytes() const override { return passes_->context().pool.most_bytes(); }
  std::int64_t gather_bound_bytes() const override { return passes_->gather_bound(); }
  std::int64_t whole_numel() const override { return passes_->whole_numel(); }

  std::shared_ptr<const void> whole_parameters() override {
    passes_->hold_everything();
    return {passes_.get(), [passes = passes_](const void*) { passes->release_everything(); }};
  }

 private:
  // A parameter that is unfrozen in mid-step joins at the next one's beginning: its forward must know of it.
  void follow(bool joining) {
    TrainableParameters& trained = members_.trained;
    std::vector<NamedParameter> later;
    if (!joining) later.swap(trained.frozen);
    const auto unfrozen = follow_freezing(trained, buckets_, mesh());
    if (!joining) later.swap(trained.frozen);
    for (const NamedParameter& parameter : unfrozen) join(parameter);
  }

  // With all parameters of its flat, of which the others stay frozen.
  void join(const NamedParameter& parameter) {
    const auto has_it = [&](const FlatShard* flat) {
      const auto& slots = flat->bucket().plan.slots;
      return std::any_of(slots.begin(), slots.end(), [&](const Slot& slot) {
        return members_.frozen[slot.index].tensor.is_same(parameter.tensor);
      });
    };
    const auto found = std::find_if(frozen_flats_.begin(), frozen_flats_.end(), has_it);
    if (found == frozen_flats_.end()) {
      for (const NamedParameter& member : members_.trained)
        if (member.tensor.is_same(parameter.tensor)) return;  // with another of its flat
      refuse(fmt::format("parameter '{}', unfrozen, of {} {}", parameter.name,
                         c10::toString(parameter.tensor.scalar_type()), c10::str(parameter.tensor.layout())),
             "a dense leaf in float64, float32 or bfloat16", "Convert the model before making the layout");
    }
    passes_->train(**found, members_.frozen);
    Bucket& bucket = buckets_.emplace_back((*found)->bucket());
    for (Slot& slot : bucket.plan.slots) {
      const NamedParameter& member = members_.frozen[slot.index];
      slot.index = members_.trained.size();
      slot.trained = member.tensor.requires_grad();
      members_.trained.push_back(member);
      std::erase_if(members_.trained.frozen,
                    [&](const NamedParameter& one) { return one.tensor.is_same(member.tensor); });
    }
    frozen_flats_.erase(found);
  }

  // Units are gathered from one shard group.
  void check_shards(const ShardContext& context) const {
    for (const auto* list : members_.lists())
      for (const NamedParameter& parameter : *list)
        if (sharded_along(context.mesh.grid(), parameter.sync, context.sharded_axes) !=
            context.groups.sharded)
          refuse(fmt::format("parameter '{}', cut along axes that are sharded", parameter.name),
                 fmt::format("shards along {}, as of the other parameters",
                             fmt::join(context.groups.sharded, ", ")),
                 "Use bucketed() with stage 0 where parameters are cut along data axes");
  }

  void check_values() const {
    for (const auto* list : members_.lists())
      for (const NamedParameter& parameter : *list)
        if (parameter.tensor.is_meta())
          refuse(fmt::format("parameter '{}' on the meta device, without values", parameter.name),
                 "values, or FullyShardOptions::initialize",
                 "Give a function that fills one parameter at a time");
  }

  Handles handles_;
  Members members_;
  std::vector<Claim> claims_;
  std::vector<Bucket> buckets_;
  std::vector<FlatShard*> frozen_flats_;  // of units, in an order that all ranks share
  std::shared_ptr<UnitPasses> passes_;
};

}  // namespace

std::unique_ptr<FullySharded> fully_shard(const UnitHandle& root, const Named& named, const Handles& blocks,
                                          const Mesh& mesh, FullyShardOptions options) {
  return std::make_unique<ShardedLayout>(uses_of(root, blocks), named, mesh, options);
}

}  // namespace isograd
