#include "parallel/data/unit_passes.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "layout/flat.hpp"

namespace isograd {
namespace {

// While one block's gradients are reduced the next block's are packed; more would only cost memory.
constexpr std::size_t kBuffers = 2;

[[noreturn]] void refuse_unit(const std::string& unit, std::string found, std::string expected,
                              std::string action) {
  refuse(fmt::format("sharded unit '{}'", unit), std::move(found), std::move(expected), std::move(action));
}

}  // namespace

UnitPasses::UnitPasses(std::unique_ptr<ShardContext> context, std::vector<ShardedUnit> units,
                       std::vector<std::size_t> uses, const std::vector<NamedParameter>& trained,
                       const std::vector<NamedParameter>& frozen, PassOptions options)
    : context_(std::move(context)),
      units_(std::move(units)),
      uses_(std::move(uses)),
      first_use_(units_.size()),
      options_(options),
      reduced_(units_.size()) {
  for (std::size_t use = uses_.size(); use-- > 0;) first_use_[uses_[use]] = use;
  for (ShardedUnit& unit : units_)
    for (auto& flat : unit.flats) {
      if (flat->storage())
        for (const c10::StorageImpl* storage : flat->storage()->storages()) storages_.insert(storage);
      if (flat->trained())
        add_places(*flat, trained);
      else
        for (const Slot& slot : flat->bucket().plan.slots)
          frozen_.insert(frozen.at(slot.index).tensor.unsafeGetTensorImpl());
    }
  make_buffers();
}

void UnitPasses::add_places(FlatShard& flat, const std::vector<NamedParameter>& parameters) {
  const BucketPlan& plan = flat.bucket().plan;
  for (std::size_t slot = 0; slot < plan.slots.size(); ++slot) {
    const c10::TensorImpl* parameter = parameters.at(plan.slots[slot].index).tensor.unsafeGetTensorImpl();
    places_[parameter] = {&flat, slot};
    frozen_.erase(parameter);
  }
}

void UnitPasses::make_buffers() {
  std::map<BufferKey, const FlatShard*> largest;
  for (std::size_t unit = 0; unit < units_.size(); ++unit)
    for (auto& flat : units_[unit].flats) {
      if (!flat->trained() || !flat->needs_buffer()) continue;
      const FlatShard*& most = largest[buffer_key(unit, *flat)];
      if (!most || flat->bucket().plan.numel > most->bucket().plan.numel) most = flat.get();
    }
  for (const auto& [key, flat] : largest) {
    const auto& [of_root, axes, type] = key;
    const BucketPlan& plan = flat->bucket().plan;
    Group shard = flat->groups().shard;
    auto& ring = buffers_[key];
    if (!ring.empty() && ring.front().numel() >= plan.numel) continue;
    ring.clear();
    for (std::size_t i = 0; i < (of_root ? 1 : kBuffers); ++i)
      ring.push_back(shard.empty_shared(plan.numel, type, plan.device));
  }
}

UnitPasses::BufferKey UnitPasses::buffer_key(std::size_t unit, const FlatShard& flat) const {
  return {unit == kRootUnit, flat.groups().roles.sharded, flat.bucket().gradients.scalar_type()};
}

void UnitPasses::train(FlatShard& flat, const std::vector<NamedParameter>& parameters) {
  flat.train();
  add_places(flat, parameters);
  make_buffers();
}

std::size_t UnitPasses::next_use(std::size_t unit) const {
  for (std::size_t use = cursor_; use < pass_.end; ++use)
    if (uses_[use] == unit) return use;
  const std::size_t before = cursor_ > pass_.begin ? cursor_ - 1 : 0;
  refuse_unit(units_[unit].name, fmt::format("a call after that of '{}'", units_[uses_[before]].name),
              "the order of the list given to fully_shard(), one entry for each use",
              "List the blocks in the order in which forward calls them, a block used twice twice");
}

// Nothing is computed meanwhile: what was not gathered ahead is waited for from its launch on.
void UnitPasses::hold(std::size_t use) {
  context_->waited.during([&] {
    for (auto& flat : units_[uses_[use]].flats) flat->begin_gather();
    for (auto& flat : units_[uses_[use]].flats) flat->finish_gather();
  });
}

// The decision is the same on all ranks, for it rests on the options, and what is whole at this point of the
// list.
void UnitPasses::ahead(std::size_t use) {
  if (!options_.prefetch || use < pass_.begin || use >= pass_.end) return;
  const std::size_t unit = uses_[use];
  std::int64_t more = 0;
  for (const auto& flat : units_[unit].flats)
    if (flat->is_freed()) more += flat->gathered_bytes();
  if (options_.gather_limit > 0 && context_->pool.bytes() + more > options_.gather_limit) return;
  for (auto& flat : units_[unit].flats) flat->begin_gather();
}

std::int64_t UnitPasses::gather_bound() const {
  std::int64_t whole = 0;
  std::vector<std::int64_t> others;
  for (const ShardedUnit& unit : units_) {
    std::int64_t bytes = 0;
    for (const auto& flat : unit.flats) bytes += flat->gathered_bytes();
    const bool is_root = &unit == &units_[kRootUnit];  // whole all the time where it is freed in between, too
    if (unit.reshard && !is_root)
      others.push_back(bytes);
    else
      whole += bytes;
  }
  std::sort(others.rbegin(), others.rend());
  for (std::size_t i = 0; i < std::min<std::size_t>(others.size(), options_.prefetch ? 2 : 1); ++i)
    whole += others[i];
  return options_.gather_limit > 0 ? std::min(whole, options_.gather_limit) : whole;
}

std::int64_t UnitPasses::whole_numel(bool experts_only) const {
  std::int64_t numel = 0;
  for (const ShardedUnit& unit : units_)
    for (const auto& flat : unit.flats) {
      const BucketPlan& plan = flat->bucket().plan;
      if (unit.reshard || !flat->trained()) continue;
      if (!experts_only || cut_along_data(plan.sync, context_->mesh.grid())) numel += plan.numel;
    }
  return numel;
}

void UnitPasses::free_unit(std::size_t unit) {
  if (held_) return;
  for (auto& flat : units_[unit].flats) flat->free();
}

void UnitPasses::after_forward(std::size_t use) {
  const std::size_t unit = uses_[use];
  const bool again_at_once = use + 1 < pass_.end && uses_[use + 1] == unit;
  if (again_at_once || (!units_[unit].reshard && with_graph_)) return;
  free_unit(unit);
}

std::size_t UnitPasses::enter_forward(std::size_t unit) {
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
  for (; cursor_ < use; ++cursor_) {  // left out on this rank
    hold(cursor_);
    ahead(cursor_ + 1);
    after_forward(cursor_);
  }
  hold(use);
  ahead(use + 1);
  cursor_ = use + 1;
  inside_ = use;
  return use;
}

void UnitPasses::leave_forward(std::size_t use) {
  if (use == 0) {
    for (; cursor_ < pass_.end; ++cursor_) {
      hold(cursor_);
      ahead(cursor_ + 1);
      after_forward(cursor_);
    }
    after_forward(0);
    in_forward_ = false;
  } else {
    after_forward(use);
    inside_ = 0;
  }
  progress();
}

void UnitPasses::after_backward(std::size_t use) {
  const bool again_at_once = use > pass_.begin && uses_[use - 1] == uses_[use];
  const bool for_others = !units_[uses_[use]].reshard && forwards_ > 0;  // that wait for their backwards
  if (!again_at_once && !for_others) free_unit(uses_[use]);
  if (is_last_in_backward(use)) reduce(uses_[use]);
}

void UnitPasses::enter_backward(std::size_t use) {
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
  for (; back_ > use; --back_) {  // left out on this rank
    hold(back_);
    ahead(back_ - 1);
    after_backward(back_);
  }
  hold(use);
  ahead(use - 1);
  back_ = use - 1;
  inside_ = use;
}

void UnitPasses::take_gradient(const at::Tensor& parameter, at::Tensor gradient) {
  const Place place = places_.at(parameter.unsafeGetTensorImpl());
  place.flat->add(place.slot, std::move(gradient));
}

void UnitPasses::leave_backward(std::size_t use) {
  if (use == 0) {
    for (; back_ >= pass_.begin; --back_) {
      hold(back_);
      ahead(back_ - 1);
      after_backward(back_);
    }
    after_backward(0);
    in_backward_ = false;
  } else {
    after_backward(use);
    inside_ = 0;
  }
  progress();
}

void UnitPasses::abandon() noexcept {
  in_forward_ = in_backward_ = false;
  forget_passes();
  inside_ = 0;
  for (ShardedUnit& unit : units_)
    for (auto& flat : unit.flats) {
      if (!held_) flat->drop();
      flat->forget();
    }
}

void UnitPasses::wait_for_oldest() {
  under_way_.front().flat->wait();
  under_way_.pop_front();
}

template <typename Which>
void UnitPasses::wait_while(const Which& which) {
  while (std::any_of(under_way_.begin(), under_way_.end(), which)) wait_for_oldest();
}

at::Tensor UnitPasses::buffer_for(std::size_t unit, const FlatShard& flat) {
  const BucketPlan& plan = flat.bucket().plan;
  auto& ring = buffers_.at(buffer_key(unit, flat));
  const at::Tensor& buffer = ring[turn_++ % ring.size()];
  const void* memory = buffer.const_data_ptr();
  wait_while([&](const Reduction& reduction) { return reduction.buffer == memory; });
  return buffer.narrow(0, 0, plan.numel);
}

void UnitPasses::reduce(std::size_t unit) {
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
    const at::Tensor buffer = flat->needs_buffer() ? buffer_for(unit, *flat) : at::Tensor();
    const void* memory = buffer.defined() ? buffer.const_data_ptr() : nullptr;
    flat->begin_reduction(buffer);
    under_way_.push_back({flat.get(), memory});
  }
}

void UnitPasses::wait_for_reductions() {
  while (!under_way_.empty()) wait_for_oldest();
}

// In the order in which they began, so that sums are formed in one order.
void UnitPasses::progress() {
  while (!under_way_.empty() && under_way_.front().flat->progress()) under_way_.pop_front();
}

void UnitPasses::begin_backward(bool last) {
  if (last_)
    refuse("begin_backward", "a backward after the one announced as the last", "finish_reduction() next",
           "Pass last = true only before the last micro-batch of a step");
  make_up_backward();
  last_ = last;
  announced_ = true;
  announced_pass_ = pass_that_begins();
}

void UnitPasses::finish_reduction() {
  make_up_backward();
  forget_passes();
  if (context_->reduce_once) {  // a rank without micro-batches, or a last one that was not announced
    last_ = true;
    for (std::size_t use = uses_.size(); use-- > 0;)
      if (is_last_in_backward(use) && !reduced_[uses_[use]]) reduce(uses_[use]);
    reduced_.assign(units_.size(), false);
  }
  last_ = false;
  wait_for_reductions();
  context_->waited.during([&] {
    for (ShardedUnit& unit : units_)
      for (auto& flat : unit.flats) flat->sum_over_replicas();
  });
  for (ShardedUnit& unit : units_)
    for (auto& flat : unit.flats) {
      flat->wait();
      flat->to_host();
      flat->check_in_place();
      flat->take_over_between_calls();
    }
  may_be_updated_ = true;
  if (!held_)  // a forward without backward has left something whole, which the update would make stale
    for (std::size_t unit = 0; unit < units_.size(); ++unit) free_unit(unit);
  // Nobody reads the one copy any more, so that its owners may write to it.
  if (context_->parameters_shared) context_->waited.during([&] { context_->sharers.meet(); });
}

void UnitPasses::close() {
  closed_ = true;
  abandon();
}

bool UnitPasses::needs_even_micro_batches() const { return context_->even_micro_batches; }

void UnitPasses::zero_gradients() {
  forget_passes();
  wait_for_reductions();
  last_ = false;
  reduced_.assign(units_.size(), false);
  may_be_updated_ = false;
  for (ShardedUnit& unit : units_)
    for (auto& flat : unit.flats) {
      flat->check_in_place();
      flat->take_over_between_calls();
      flat->zero();
    }
}

// The loss of the backward that was announced is a constant on this rank, or its model was not even called.
// The other ranks gather and reduce: so does this one, with zeros.
void UnitPasses::make_up_backward() {
  if (!announced_ || !needs_even_micro_batches()) {
    announced_ = false;
    return;
  }
  announced_ = !exchanging_;
  if (exchanging_)
    refuse(fmt::format("sharded unit '{}'", unit_name(*exchanging_)),
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

void UnitPasses::forget_passes() {
  announced_ = false;
  forwards_ = 0;
  exchanging_.reset();
}

void UnitPasses::take_over_writes(const std::set<std::string>& excluded) {
  for (ShardedUnit& unit : units_)
    for (auto& flat : unit.flats) flat->take_over_writes(excluded);
}

void UnitPasses::forget_writes(const std::set<std::string>& names) {
  for (ShardedUnit& unit : units_)
    for (auto& flat : unit.flats) flat->forget_writes(names);
}

void UnitPasses::check_writable() const {
  const bool held = held_ && !storages_.empty();
  if (!held && !in_forward_ && !in_backward_) return;
  refuse("write()",
         held ? "a call while whole_parameters() is held" : "a call during the model's forward or backward",
         "a call between steps, of which parameters are gathered afterwards",
         held ? "Let go of whole_parameters() before, or write in place while it is held, the same on "
                "every rank"
              : "Call it outside of the model");
}

// A gather reads a shard only after its owner has taken part in it, hence after the owner's update: nothing
// to wait for here unless parameters are read without being gathered.
void UnitPasses::publish_parameters() {
  if (held_ && !storages_.empty())
    refuse("publish_parameters", "an update while whole_parameters() is held",
           "parameters that are gathered after it",
           "Let go of whole_parameters() before the optimizer's update");
  const bool updated = std::exchange(may_be_updated_, false);
  for (ShardedUnit& unit : units_)
    for (auto& flat : unit.flats) {
      updated ? flat->refuse_lost_writes() : flat->take_over_between_calls();
      flat->to_device();
    }
  if (!held_)  // a forward without backward has left something whole, which is stale now
    for (std::size_t unit = 0; unit < units_.size(); ++unit) free_unit(unit);
  if (context_->parameters_shared) context_->waited.during([&] { context_->sharers.meet(); });
}

void UnitPasses::hold_everything() {
  if (in_forward_ || in_backward_ || held_)
    refuse("whole_parameters", held_ ? "a second one at the same time" : "a call during forward or backward",
           "one at a time, between passes", "Let go of the first before, and call it outside of the model");
  take_over_writes({});
  kept_by_steps_ = context_->pool.kept_bytes();
  for (std::size_t unit = 0; unit < units_.size(); ++unit) {
    for (auto& flat : units_[unit].flats) flat->begin_gather();
    for (auto& flat : units_[unit].flats) flat->finish_gather();
  }
  held_ = true;
}

void UnitPasses::release_everything() {
  held_ = false;
  for (std::size_t unit = 0; unit < units_.size(); ++unit) free_unit(unit);
  context_->pool.keep(kept_by_steps_);  // no step needs the whole model
}

}  // namespace isograd
