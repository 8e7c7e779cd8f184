// What is done with units between passes: gradients zeroed, updates published, values written, everything
// held.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "parallel/data/unit_passes.hpp"

namespace isograd {

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

void UnitPasses::take_over_writes(const std::set<std::string>& but_of) {
  for (ShardedUnit& unit : units_)
    for (auto& flat : unit.flats) flat->take_over_writes(but_of);
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
