// The layout around the units.
#include "isograd/fully_shard.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/memory.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "layout/flat.hpp"
#include "layout/storage.hpp"
#include "parallel/data/same_parameters.hpp"
#include "parallel/data/unit_node.hpp"
#include "parallel/data/unit_passes.hpp"
#include "parallel/data/unit_plan.hpp"

namespace isograd {
namespace {

using Handles = std::vector<UnitHandle>;

[[noreturn]] void refuse_options(std::string found, std::string expected, std::string action) {
  refuse("fully_shard", std::move(found), std::move(expected), std::move(action));
}

void check_same(const UnitMembers& members, const Mesh& mesh) {
  std::vector<NamedParameter> all = members.trained;
  all.insert(all.end(), members.frozen.begin(), members.frozen.end());
  for (NamedParameter& parameter : all)
    if (parameter.tensor.is_meta()) {  // no values yet: its name and shape
      parameter.name += c10::str(" ", parameter.tensor.sizes());
      parameter.tensor = at::empty({0}, at::TensorOptions(parameter.tensor.scalar_type()));
    }
  check_same_parameters(all, mesh);
}

void check_limit(const std::vector<UnitPlan>& units, std::int64_t limit) {
  if (limit < 0)
    refuse_options(fmt::format("gather_limit_bytes = {}", limit), "0 or more", "0 stands for no limit");
  if (limit == 0) return;
  const auto stays = [&](const UnitPlan& unit) { return &unit == &units[kRootUnit] || !unit.reshard; };
  std::int64_t kept = 0;  // between forward and backward, or as long as the blocks
  for (const UnitPlan& unit : units)
    if (stays(unit)) kept += unit.bytes;
  for (const UnitPlan& unit : units) {
    const std::int64_t bytes = kept + (stays(unit) ? 0 : unit.bytes);
    if (bytes > limit)
      refuse(fmt::format("sharded unit '{}'", unit.name),
             fmt::format("{} bytes whole at a time, {} of them of units that stay whole", bytes, kept),
             fmt::format("at most {} (gather_limit_bytes)", limit),
             "Raise the limit, make smaller blocks, or let more units be freed after forward");
  }
}

// Parameters of other stages, empty here, are on the device of the rank's own: a model may ask any parameter
// for it.
void leave_meta_device(const NamedTensors& named, const at::Device& device) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : named) {
    if (!tensor.is_meta() || tensor.numel() > 0) continue;
    const at::Tensor empty = at::empty(tensor.sizes(), tensor.options().device(device));
    tensor.unsafeGetTensorImpl()->shallow_copy_from(empty.getIntrusivePtr());
  }
}

// The blocks of a pass by their places in the list of uses.
std::function<UseRange()> uses_of_pass(const UnitUses& uses,
                                       const std::function<std::vector<UnitHandle>()>& blocks_of_pass) {
  if (!blocks_of_pass) return {};
  return [uses, blocks_of_pass] {
    UseRange range{uses.uses.size(), 1};
    for (const UnitHandle& block : blocks_of_pass())
      for (std::size_t use = 1; use < uses.uses.size(); ++use)
        if (uses.units[uses.uses[use]].binding() == block.binding())
          range = {std::min(range.begin, use), std::max(range.end, use + 1)};
    if (range.begin >= range.end) range = {1, 1};  // a stage without blocks
    return range;
  };
}

class ShardedLayout final : public FullySharded {
 public:
  ShardedLayout(const UnitUses& uses, const NamedTensors& named, const Mesh& mesh,
                const FullyShardOptions& options)
      : handles_(uses.units), members_(unit_members(named, options.placements, mesh.grid(), mesh.rank())) {
    const SyncAxes copied = sync_axes(placed(mesh.grid(), {}), mesh.grid());
    auto context = std::make_unique<ShardContext>(ShardContext{
        .mesh = mesh, .groups = RoleGroups(mesh, copied, options.sharded), .sharded_axes = options.sharded});
    const int shards = most_shards(members_.trained, mesh.grid(), options.sharded);
    context->parameters_shared = options.share_parameters && shards > 1;
    context->reduce_once = options.reduce_once;
    context->offload = options.offload;
    context->even_micro_batches = (shards > 1 && !(context->parameters_shared && options.reduce_once)) ||
                                  any_cut_along_data(members_.trained, mesh.grid());
    // Everything that can refuse comes before the model is touched.
    auto plans = plan_units(uses, named, members_, options, mesh.grid());
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
      return_freed_memory();  // of values that were whole
    }
    leave_meta_device(named, options.device);
    passes_ = std::make_shared<UnitPasses>(std::move(context), std::move(units), uses.uses, members_.trained,
                                           members_.frozen,
                                           PassOptions{.prefetch = options.prefetch,
                                                       .gather_limit = options.gather_limit_bytes,
                                                       .uses = uses_of_pass(uses, options.blocks_of_pass)});
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
    compare_writes();
  }
  void publish_parameters() override { passes_->publish_parameters(); }
  bool needs_even_micro_batches() const override { return passes_->needs_even_micro_batches(); }
  std::vector<Bucket>& buckets() override { return buckets_; }
  const Mesh& mesh() const override { return passes_->context().mesh; }
  std::int64_t bytes_sent() override {
    const RoleGroups& groups = passes_->context().groups;
    std::vector<Group> all{groups.summed, groups.shard, groups.replicate};
    for (const ShardedUnit& unit : passes_->units())
      for (const auto& flat : unit.flats) {
        all.push_back(flat->groups().summed);
        all.push_back(flat->groups().shard);
        all.push_back(flat->groups().replicate);
      }
    return isograd::bytes_sent(all);
  }
  double exposed_seconds() const override { return passes_->context().waited.seconds(); }
  std::int64_t gathered_bytes() const override { return passes_->context().pool.bytes(); }
  std::int64_t most_gathered_bytes() const override { return passes_->context().pool.most_bytes(); }
  std::int64_t gather_bound_bytes() const override { return passes_->gather_bound(); }
  std::int64_t whole_numel() const override { return passes_->whole_numel(/*experts_only=*/false); }
  std::int64_t whole_expert_numel() const override { return passes_->whole_numel(/*experts_only=*/true); }

  std::shared_ptr<const void> whole_parameters() override {
    passes_->hold_everything();
    return {passes_.get(), [passes = passes_](const void*) { passes->release_everything(); }};
  }

  void take_over_writes(const std::set<std::string>& excluded) override {
    passes_->take_over_writes(excluded);
  }
  void compare_writes() override { passes_->context().written.compare(members_.trained); }

 protected:
  Frozen frozen() override {
    Frozen all{.buckets = {}, .tensors = members_.trained.frozen};
    for (const FlatShard* flat : frozen_flats_) all.buckets.push_back(&flat->bucket());
    return all;
  }
  void check_writable() const override { passes_->check_writable(); }
  void forget_writes(const std::set<std::string>& names) override { passes_->forget_writes(names); }

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
      refuse_options(
          fmt::format("parameter '{}', unfrozen, of {} {}", parameter.name,
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

  void check_values() const {
    for (const auto* list : members_.lists())
      for (const NamedParameter& parameter : *list)
        if (parameter.tensor.is_meta())
          refuse_options(fmt::format("parameter '{}' on the meta device, without values", parameter.name),
                         "values, or FullyShardOptions::initialize",
                         "Give a function that fills one parameter at a time");
  }

  Handles handles_;
  UnitMembers members_;
  std::vector<Claim> claims_;
  std::vector<Bucket> buckets_;
  std::vector<FlatShard*> frozen_flats_;  // of units, in an order that all ranks share
  std::shared_ptr<UnitPasses> passes_;
};

}  // namespace

std::unique_ptr<FullySharded> fully_shard(const UnitHandle& root, const NamedTensors& named,
                                          const Handles& blocks, const Mesh& mesh,
                                          FullyShardOptions options) {
  return std::make_unique<ShardedLayout>(unit_uses(root, blocks), named, mesh, options);
}

}  // namespace isograd
