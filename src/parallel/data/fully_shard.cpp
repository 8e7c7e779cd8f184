// ZeRO-3: the passes over units, and the layout around them.
#include "isograd/fully_shard.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "base/memory.hpp"
#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "layout/storage.hpp"
#include "parallel/data/flat_shard.hpp"
#include "parallel/data/planned_bucket.hpp"
#include "parallel/data/unit_node.hpp"

namespace isograd {
namespace {

using differentiable::GradientPlace;

[[noreturn]] void refuse_unit(const std::string& unit, std::string found, std::string expected,
                              std::string action) {
  refuse(fmt::format("sharded unit '{}'", unit), std::move(found), std::move(expected), std::move(action));
}

struct ShardedUnit {
  std::string name;
  bool reshard = true;  // freed after forward and gathered again for backward
  std::vector<std::unique_ptr<FlatShard>> flats{};
};

// Places in the list of uses, without the root's.
struct UseRange {
  std::size_t begin = 1, end = 1;
};

// The order in which units are gathered, freed and reduced: one list of uses, walked forwards and backwards.
//
// All ranks issue the same collectives in the same order whatever their batches make them do, because that
// order follows from the list alone. Where a rank leaves a use out (a branch not taken) its part is made up
// for when it comes to the next one, and so is a whole backward that was announced and left out (a loss that
// is a constant) when it comes to the next pass or to the step's end.
class UnitPasses final : public UnitHost {
 public:
  // uses[0] is the root, then the blocks in the order in which forward uses them. `uses_of_pass`: those of
  // the pass that begins; empty: all.
  UnitPasses(std::unique_ptr<ShardContext> context, std::vector<ShardedUnit> units,
             std::vector<std::size_t> uses, const UnitMembers& members, const FullyShardOptions& options,
             std::function<UseRange()> uses_of_pass)
      : context_(std::move(context)),
        units_(std::move(units)),
        uses_(std::move(uses)),
        first_use_(units_.size()),
        prefetch_(options.prefetch),
        gather_limit_(options.gather_limit_bytes),
        uses_of_pass_(std::move(uses_of_pass)),
        reduced_(units_.size()) {
    for (std::size_t use = uses_.size(); use-- > 0;) first_use_[uses_[use]] = use;
    for (auto* flat : flats()) {
      if (flat->storage())
        for (const c10::StorageImpl* storage : flat->storage()->storages()) storages_.insert(storage);
      if (flat->trained())
        add_places(*flat, members.trained);
      else
        for (const Slot& slot : flat->bucket().plan.slots)
          frozen_.insert(members.frozen.at(slot.index).tensor.unsafeGetTensorImpl());
    }
    make_buffers();
  }

  // ---- called by the layout ----

  void zero_gradients() {
    forget_passes();
    wait_for_reductions();
    last_ = false;
    reduced_.assign(units_.size(), false);
    may_be_updated_ = false;
    for (auto* flat : flats()) {
      flat->check_in_place();
      flat->take_over_between_calls();
      flat->zero();
    }
  }

  void begin_backward(bool last) {
    if (last_)
      refuse("begin_backward", "a backward after the one announced as the last", "finish_reduction() next",
             "Pass last = true only before the last micro-batch of a step");
    make_up_backward();
    last_ = last;
    announced_ = true;
    announced_pass_ = pass_that_begins();
  }

  void finish_reduction() {
    make_up_backward();
    forget_passes();
    if (context_->reduce_once) {  // a rank without micro-batches, or a last one that was not announced
      last_ = true;
      for (std::size_t use = uses_.size(); use-- > 0;)
        if (is_last_in_backward(use) && !reduced_[uses_[use]]) reduce(uses_[use]);
      reduced_.assign(units_.size(), false);
    }
    last_ = false;
    complete();
    context_->waited.during([&] {
      for (auto* flat : flats())
        if (flat->trained()) flat->sum_over_replicas();
    });
    for (auto* flat : flats()) {
      flat->wait();
      flat->to_host();
      flat->check_in_place();
      flat->take_over_between_calls();
    }
    may_be_updated_ = true;
    free_units();  // a forward without backward has left something whole, which the update would make stale
    // Nobody reads the one copy any more, so that its owners may write to it.
    if (context_->parameters_shared) context_->meet();
  }

  void complete() {  // for whoever reads gradients
    const at::NoGradGuard no_grad;
    wait_for_reductions();
    for (auto* flat : flats()) flat->complete();
  }

  // A gather reads a shard only after its owner has taken part in it, hence after the owner's update: nothing
  // to wait for here unless parameters are read without being gathered.
  void publish_parameters() {
    if (held_ && !storages_.empty())
      refuse("publish_parameters", "an update while whole_parameters() is held",
             "parameters that are gathered after it",
             "Let go of whole_parameters() before the optimizer's update");
    const bool updated = std::exchange(may_be_updated_, false);
    for (auto* flat : flats()) {
      updated ? flat->refuse_lost_writes() : flat->take_over_between_calls();
      flat->to_device();
    }
    free_units();  // a forward without backward has left something whole, which is stale now
    if (context_->parameters_shared) context_->meet();
  }

  void hold_everything() {  // whole until release_everything(), collective
    if (in_forward_ || in_backward_ || held_)
      refuse("whole_parameters",
             held_ ? "a second one at the same time" : "a call during forward or backward",
             "one at a time, between passes", "Let go of the first before, and call it outside of the model");
    take_over_writes({});
    kept_by_steps_ = context_->pool.kept_bytes();
    for (ShardedUnit& unit : units_) gather(unit);
    held_ = true;
  }
  void release_everything() {
    held_ = false;
    free_units();
    context_->pool.keep(kept_by_steps_);  // no step needs the whole model
  }

  // For parameters that are whole; nobody can write to the others.
  void take_over_writes(const std::set<std::string>& excluded) {
    for (auto* flat : flats()) flat->take_over_writes(excluded);
  }
  void forget_writes(const std::set<std::string>& names) {
    for (auto* flat : flats()) flat->forget_writes(names);
  }
  void check_writable() const {
    const bool held = held_ && !storages_.empty();
    if (!held && !in_forward_ && !in_backward_) return;
    refuse("write()",
           held ? "a call while whole_parameters() is held" : "a call during the model's forward or backward",
           "a call between steps, of which parameters are gathered afterwards",
           held ? "Let go of whole_parameters() before, or write in place while it is held, the same on "
                  "every rank"
                : "Call it outside of the model");
  }

  void close() {  // the layout is gone
    closed_ = true;
    abandon();
  }

  // `flat`, of parameters that were frozen so far, is trained from here on; its slots index `parameters`.
  // Collective, between steps.
  void train(FlatShard& flat, const std::vector<NamedParameter>& parameters) {
    flat.train();
    add_places(flat, parameters);
    make_buffers();
  }

  bool needs_even_micro_batches() const { return context_->even_micro_batches; }

  std::int64_t whole_numel(bool experts_only) const {
    std::int64_t numel = 0;
    for (const ShardedUnit& unit : units_)
      for (const auto& flat : unit.flats) {
        const BucketPlan& plan = flat->bucket().plan;
        if (unit.reshard || !flat->trained()) continue;
        if (!experts_only || cut_along_data(plan.sync, context_->mesh.grid())) numel += plan.numel;
      }
    return numel;
  }

  ShardContext& context() const { return *context_; }
  std::vector<FlatShard*> flats() const {  // unit by unit
    std::vector<FlatShard*> all;
    for (const ShardedUnit& unit : units_)
      for (const auto& flat : unit.flats) all.push_back(flat.get());
    return all;
  }

  // ---- called by the units' nodes ----

  const std::string& unit_name(std::size_t unit) const override { return units_[unit].name; }

  std::size_t enter_forward(std::size_t unit) override {
    if (closed_)
      refuse_unit(units_[unit].name, "a call after the layout was destroyed", "a layout that lives",
                  "Keep the layout as long as the model is used, or load the model anew");
    if (unit == kRootUnit) {
      if (in_forward_ || in_backward_)
        refuse_unit(units_[unit].name, "a forward inside its own forward or backward", "one at a time",
                    "Call the model once per pass");
      if (forwards_ > 0) make_up_backward();  // with none, this may be the forward of the one announced
      in_forward_ = true;
      with_graph_ = at::GradMode::is_enabled();
      if (with_graph_) ++forwards_;
      pass_ = pass_that_begins();
      hold(0);
      ahead(pass_.begin);
      cursor_ = pass_.begin;
      return 0;
    }
    if (!in_forward_)
      refuse_unit(units_[unit].name, "a call outside of the model's own", "a call inside the root's forward",
                  "Call the whole model through the handle that fully_shard() got as the root");
    if (inside_ != 0)
      refuse_unit(units_[unit].name, fmt::format("a call inside of '{}'", units_[uses_[inside_]].name),
                  "blocks that do not contain one another", "List either the block or its parts");
    const std::size_t use = next_use(unit);
    leave_out_forward(use);
    hold(use);
    ahead(use + 1);
    cursor_ = use + 1;
    inside_ = use;
    return use;
  }

  void leave_forward(std::size_t use) override {
    if (use == 0) {
      leave_out_forward(pass_.end);
      after_forward(0);
      in_forward_ = false;
    } else {
      after_forward(use);
      inside_ = 0;
    }
    progress();
  }

  void enter_backward(std::size_t use) override {
    if (closed_)
      refuse_unit(units_[uses_[use]].name, "a backward after the layout was destroyed", "a layout that lives",
                  "Run backward before the layout ends");
    if (use == 0) {
      if (in_forward_ || in_backward_)
        refuse_unit(units_[0].name, "a backward inside its own forward or backward", "one at a time",
                    "Run backward after the model's forward has returned");
      in_backward_ = true;
      pass_ = announced_ ? announced_pass_ : pass_that_begins();
      announced_ = false;
      if (forwards_ > 0) --forwards_;
      back_ = pass_.end - 1;
      hold(0);
      ahead(back_);
      return;
    }
    ISOGRAD_INVARIANT(in_backward_ && use <= back_,
                      fmt::format("use {} of '{}' after {}", use, units_[uses_[use]].name, back_));
    leave_out_backward(use);
    hold(use);
    ahead(use - 1);
    back_ = use - 1;
    inside_ = use;
  }

  void take_gradient(const at::Tensor& parameter, at::Tensor gradient) override {
    const Place place = places_.at(parameter.unsafeGetTensorImpl());
    place.flat->add(place.slot, std::move(gradient));
  }

  // In the buffer of the unit's next reduction, for the flat that is reduced first: no other one needs a
  // buffer until then.
  GradientPlace::Taken place_of_gradient(const at::Tensor& parameter, at::ScalarType type) override {
    const auto found = places_.find(parameter.unsafeGetTensorImpl());
    if (!in_backward_ || found == places_.end() || type != parameter.scalar_type()) return {};
    const auto [flat, slot] = found->second;
    ShardedUnit& unit = units_[uses_[inside_]];
    const auto first = std::ranges::find_if(unit.flats, [](const auto& one) { return one->trained(); });
    if (first == unit.flats.end() || first->get() != flat || !flat->needs_buffer() ||
        type != flat->bucket().gradients.scalar_type() || !is_last_in_backward(inside_))
      return {};
    take_buffer(*flat, uses_[inside_]);
    return {.memory = flat->place_of(slot)};
  }

  void leave_backward(std::size_t use) override {
    if (use == 0) {
      leave_out_backward(pass_.begin - 1);
      after_backward(0);
      in_backward_ = false;
    } else {
      after_backward(use);
      inside_ = 0;
    }
    progress();
  }

  void exchanges(std::size_t unit) override {
    if (unit != kRootUnit || uses_.size() == 1) exchanging_ = unit;  // a root with blocks always holds units
  }
  bool everything_is_held() const override { return held_; }

  void abandon() noexcept override {
    in_forward_ = in_backward_ = false;
    forget_passes();
    inside_ = 0;
    for (auto* flat : flats()) {
      if (!held_) flat->drop();
      flat->forget();
    }
  }

  bool is_trained(const c10::TensorImpl* leaf) const override { return places_.contains(leaf); }
  bool is_frozen(const c10::TensorImpl* leaf) const override { return frozen_.contains(leaf); }
  bool is_freed_memory(const c10::StorageImpl* storage) const override { return storages_.contains(storage); }

 private:
  struct Place {
    FlatShard* flat;
    std::size_t slot;
  };

  void add_places(FlatShard& flat, const std::vector<NamedParameter>& parameters) {
    const BucketPlan& plan = flat.bucket().plan;
    for (std::size_t slot = 0; slot < plan.slots.size(); ++slot) {
      const c10::TensorImpl* parameter = parameters.at(plan.slots[slot].index).tensor.unsafeGetTensorImpl();
      places_[parameter] = {&flat, slot};
      frozen_.erase(parameter);
    }
  }

  void make_buffers() {
    std::vector<PackBuffers::User> users;
    for (const ShardedUnit& unit : units_)
      for (const auto& flat : unit.flats)
        if (flat->trained() && flat->needs_buffer())
          users.push_back({flat.get(), &unit == &units_[kRootUnit]});
    buffers_.make(users);
  }

  std::size_t next_use(std::size_t unit) const {
    for (std::size_t use = cursor_; use < pass_.end; ++use)
      if (uses_[use] == unit) return use;
    const std::size_t before = cursor_ > pass_.begin ? cursor_ - 1 : 0;
    refuse_unit(units_[unit].name, fmt::format("a call after that of '{}'", units_[uses_[before]].name),
                "the order of the list given to fully_shard(), one entry for each use",
                "List the blocks in the order in which forward calls them, a block used twice twice");
  }

  static void gather(ShardedUnit& unit) {
    for (auto& flat : unit.flats) flat->begin_gather();
    for (auto& flat : unit.flats) flat->finish_gather();
  }
  // Nothing is computed meanwhile: what was not gathered ahead is waited for from its launch on.
  void hold(std::size_t use) {
    context_->waited.during([&] { gather(units_[uses_[use]]); });
  }
  // The decision is the same on all ranks, for it rests on the options, and what is whole at this point of
  // the list.
  void ahead(std::size_t use) {
    if (!prefetch_ || use < pass_.begin || use >= pass_.end) return;
    ShardedUnit& unit = units_[uses_[use]];
    std::int64_t more = 0;
    for (const auto& flat : unit.flats)
      if (flat->is_freed()) more += flat->gathered_bytes();
    if (gather_limit_ > 0 && context_->pool.bytes() + more > gather_limit_) return;
    for (auto& flat : unit.flats) flat->begin_gather();
  }
  void free_unit(std::size_t unit) {
    if (held_) return;
    for (auto& flat : units_[unit].flats) flat->free();
  }
  void free_units() {
    for (std::size_t unit = 0; unit < units_.size(); ++unit) free_unit(unit);
  }

  // Uses before `end`, and after `end` in backward, which this rank leaves out.
  void leave_out_forward(std::size_t end) {
    for (; cursor_ < end; ++cursor_) {
      hold(cursor_);
      ahead(cursor_ + 1);
      after_forward(cursor_);
    }
  }
  void leave_out_backward(std::size_t end) {
    for (; back_ > end; --back_) {
      hold(back_);
      ahead(back_ - 1);
      after_backward(back_);
    }
  }

  void after_forward(std::size_t use) {
    const std::size_t unit = uses_[use];
    const bool again_at_once = use + 1 < pass_.end && uses_[use + 1] == unit;
    if (again_at_once || (!units_[unit].reshard && with_graph_)) return;
    free_unit(unit);
  }
  void after_backward(std::size_t use) {
    const bool again_at_once = use > pass_.begin && uses_[use - 1] == uses_[use];
    const bool for_others = !units_[uses_[use]].reshard && forwards_ > 0;  // that wait for their backwards
    if (!again_at_once && !for_others) free_unit(uses_[use]);
    if (is_last_in_backward(use)) reduce(uses_[use]);
  }
  bool is_last_in_backward(std::size_t use) const { return first_use_[uses_[use]] == use; }

  void reduce(std::size_t unit) {
    if (context_->reduce_once) {
      if (!last_) return;
      if (reduced_[unit])
        refuse_unit(units_[unit].name, "a second backward after the one announced as the last",
                    "one backward after begin_backward(true)", "Add the losses up and call backward once");
      reduced_[unit] = true;
    }
    for (auto& flat : units_[unit].flats) {
      if (!flat->trained()) continue;
      // The backward before, where no forward came between.
      wait_while([&](const Reduction& reduction) { return reduction.flat == flat.get(); });
      const void* memory = nullptr;
      if (flat->needs_buffer()) {
        take_buffer(*flat, unit);
        memory = flat->buffer();
      }
      flat->begin_reduction();
      under_way_.push_back({flat.get(), memory});
    }
  }
  // The buffer of the flat's next reduction, once nobody reads it any more.
  void take_buffer(FlatShard& flat, std::size_t unit) {
    if (flat.has_buffer()) return;
    const at::Tensor buffer = buffers_.next({&flat, unit == kRootUnit});
    wait_while([memory = buffer.const_data_ptr()](const Reduction& reduction) {
      return reduction.buffer == memory;
    });
    flat.give_buffer(buffer);
  }
  void wait_for_oldest() {
    under_way_.front().flat->wait();
    under_way_.pop_front();
  }
  template <typename Which>
  void wait_while(const Which& which) {  // a reduction under way is one of these
    while (std::ranges::any_of(under_way_, which)) wait_for_oldest();
  }
  void wait_for_reductions() {
    while (!under_way_.empty()) wait_for_oldest();
  }
  // In the order in which they began, so that sums are formed in one order.
  void progress() {
    while (!under_way_.empty() && under_way_.front().flat->progress()) under_way_.pop_front();
  }

  // The loss of the backward that was announced is a constant on this rank, or its model was not even called.
  // The other ranks gather and reduce: so does this one, with zeros.
  void make_up_backward() {
    if (!announced_ || !needs_even_micro_batches()) {
      announced_ = false;
      return;
    }
    announced_ = !exchanging_;
    if (exchanging_)
      refuse_unit(unit_name(*exchanging_),
                  "no backward after begin_backward(): a loss that is a constant on this rank, while "
                  "others wait for what the unit's backward exchanges with them",
                  "a loss that depends on the model's output, on every rank",
                  "Add 0 * output.sum() to the constant, or compute the loss as on the other ranks: the "
                  "library's means take micro-batches without targets");
    try {
      if (forwards_ == 0) {
        const at::AutoGradMode with_graph(true);  // what then stays whole is what stays whole on the others
        leave_forward(enter_forward(kRootUnit));
      }
      enter_backward(0);
      leave_backward(0);
    } catch (...) {
      abandon();
      throw;
    }
  }
  void forget_passes() {
    announced_ = false;
    forwards_ = 0;
    exchanging_.reset();
  }

  std::unique_ptr<ShardContext> context_;
  std::vector<ShardedUnit> units_;
  std::vector<std::size_t> uses_;       // unit by use
  std::vector<std::size_t> first_use_;  // use by unit
  bool prefetch_;                       // the next use is gathered while this one computes
  std::int64_t gather_limit_;           // bytes whole at a time; 0: no limit
  std::function<UseRange()> uses_of_pass_;
  std::unordered_map<const c10::TensorImpl*, Place> places_{};
  std::unordered_set<const c10::TensorImpl*> frozen_{};
  std::unordered_set<const c10::StorageImpl*> storages_{};

  // The pass that runs, and the backward that is announced.
  UseRange pass_{}, announced_pass_{};
  UseRange pass_that_begins() const { return uses_of_pass_ ? uses_of_pass_() : UseRange{1, uses_.size()}; }
  // Forward has passed uses [pass_.begin, cursor_), backward with (back_, pass_.end).
  bool in_forward_ = false, in_backward_ = false, with_graph_ = false, held_ = false, closed_ = false;
  std::size_t cursor_ = 0, back_ = 0;
  std::size_t inside_ = 0;          // the use whose block computes; 0: none
  bool announced_ = false;          // a backward that has not begun
  std::size_t forwards_ = 0;        // with a graph, whose backward has not begun, in this step
  std::int64_t kept_by_steps_ = 0;  // bytes of the pool before everything was held
  // A unit that has exchanged something with other ranks in this step.
  std::optional<std::size_t> exchanging_{};

  // Gradients. Reductions under way, oldest first, each with the buffer it uses.
  struct Reduction {
    FlatShard* flat;
    const void* buffer;
  };
  std::deque<Reduction> under_way_{};
  PackBuffers buffers_{};
  bool last_ = false;
  bool may_be_updated_ = false;  // between finish_reduction() and publish_parameters()
  std::vector<bool> reduced_;    // by unit, where gradients are reduced once a step
};

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

// The most bytes that are gathered at a time. ConfigError: more than the limit.
std::int64_t gather_bound(const std::vector<UnitPlan>& units, const FullyShardOptions& options) {
  const std::int64_t limit = options.gather_limit_bytes;
  if (limit < 0)
    refuse_options(fmt::format("gather_limit_bytes = {}", limit), "0 or more", "0 stands for no limit");
  // The root is whole all the time where it is freed in between, too.
  const auto stays = [&](const UnitPlan& unit) { return &unit == &units[kRootUnit] || !unit.reshard; };
  std::int64_t kept = 0;  // between forward and backward, or as long as the blocks
  std::vector<std::int64_t> others;
  for (const UnitPlan& unit : units)
    if (stays(unit))
      kept += unit.bytes;
    else
      others.push_back(unit.bytes);
  for (const UnitPlan& unit : units) {
    const std::int64_t bytes = kept + (stays(unit) ? 0 : unit.bytes);
    if (limit > 0 && bytes > limit)
      refuse_unit(unit.name,
                  fmt::format("{} bytes whole at a time, {} of them of units that stay whole", bytes, kept),
                  fmt::format("at most {} (gather_limit_bytes)", limit),
                  "Raise the limit, make smaller blocks, or let more units be freed after forward");
  }
  std::ranges::sort(others, std::greater<>());
  for (std::size_t i = 0; i < std::min<std::size_t>(others.size(), options.prefetch ? 2 : 1); ++i)
    kept += others[i];
  return limit > 0 ? std::min(kept, limit) : kept;
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
    const int shards = most_shards(members_.trained, mesh.grid(), options.sharded);
    auto context = std::make_unique<ShardContext>(mesh, options.sharded, options.offload,
                                                  options.share_parameters && shards > 1);
    context->reduce_once = options.reduce_once;
    context->even_micro_batches = (shards > 1 && !(context->parameters_shared && options.reduce_once)) ||
                                  any_cut_along_data(members_.trained, mesh.grid());
    // Everything that can refuse comes before the model is touched.
    auto plans = plan_units(uses, named, members_, options, mesh.grid());
    gather_bound_ = gather_bound(plans, options);
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
      std::size_t written = 0;
      for (auto& [flat, trained] : plan.flats) {
        written += static_cast<std::size_t>(flat.numel) * c10::elementSize(flat.dtype);
        unit.flats.push_back(std::make_unique<FlatShard>(
            std::move(flat), trained ? members_.trained : members_.frozen, plan.name, trained,
            plan.fp32_gradients, options.initialize, *context));
        if (trained)
          buckets_.push_back(unit.flats.back()->bucket());
        else
          frozen_flats_.push_back(unit.flats.back().get());
      }
      return_freed_memory(written);  // of values that were whole
    }
    leave_meta_device(named, options.device);
    passes_ = std::make_shared<UnitPasses>(std::move(context), std::move(units), uses.uses, members_, options,
                                           uses_of_pass(uses, options.blocks_of_pass));
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
  std::vector<Bucket>& buckets() override {
    passes_->complete();  // for whoever looks in mid-step
    return buckets_;
  }
  const Mesh& mesh() const override { return passes_->context().mesh; }
  std::int64_t bytes_sent() override { return passes_->context().bytes_sent(passes_->flats()); }
  double exposed_seconds() const override { return passes_->context().waited.seconds(); }
  std::int64_t gathered_bytes() const override { return passes_->context().pool.bytes(); }
  std::int64_t most_gathered_bytes() const override { return passes_->context().pool.most_bytes(); }
  std::int64_t gather_bound_bytes() const override { return gather_bound_; }
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
  std::int64_t gather_bound_ = 0;
  std::shared_ptr<UnitPasses> passes_;
};

}  // namespace

std::unique_ptr<FullySharded> fully_shard(const UnitHandle& root, const NamedTensors& named,
                                          const Handles& blocks, const Mesh& mesh,
                                          FullyShardOptions options) {
  return std::make_unique<ShardedLayout>(unit_uses(root, blocks), named, mesh, options);
}

}  // namespace isograd
