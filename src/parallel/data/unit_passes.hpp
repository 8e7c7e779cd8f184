// The order in which units are gathered, freed and reduced: one list of uses, walked forwards and backwards.
//
// All ranks issue the same collectives in the same order whatever their batches make them do, because that
// order follows from the list alone. Where a rank leaves a use out (a branch not taken) its part is made up
// for when it comes to the next one, and so is a whole backward that was announced and left out (a loss that
// is a constant) when it comes to the next pass or to the step's end.
#pragma once

#include <deque>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "parallel/data/flat_shard.hpp"
#include "parallel/data/unit_node.hpp"

namespace isograd {

struct ShardedUnit {
  std::string name;
  bool reshard = true;  // freed after forward and gathered again for backward
  std::vector<std::unique_ptr<FlatShard>> flats{};
};

// Places in the list of uses, without the root's.
struct UseRange {
  std::size_t begin = 1, end = 1;
};

struct PassOptions {
  bool prefetch = true;              // the next use is gathered while this one computes
  std::int64_t gather_limit = 0;     // bytes whole at a time; 0: no limit
  std::function<UseRange()> uses{};  // of the pass that begins; empty: all
};

class UnitPasses final : public UnitHost {
 public:
  // uses[0] is the root, then the blocks in the order in which forward uses them.
  UnitPasses(std::unique_ptr<ShardContext> context, std::vector<ShardedUnit> units,
             std::vector<std::size_t> uses, const std::vector<NamedParameter>& trained,
             const std::vector<NamedParameter>& frozen, PassOptions options);

  // Called by the layout.
  void zero_gradients();
  void begin_backward(bool last);
  void finish_reduction();
  void publish_parameters();
  void hold_everything();  // whole until release_everything(), collective
  void release_everything();
  // For parameters that are whole; nobody can write to the others.
  void take_over_writes(const std::set<std::string>& excluded);
  void forget_writes(const std::set<std::string>& names);
  void check_writable() const;
  void close();  // the layout is gone
  // `flat`, of parameters that were frozen so far, is trained from here on; its slots index `parameters`.
  // Collective, between steps.
  void train(FlatShard& flat, const std::vector<NamedParameter>& parameters);
  bool needs_even_micro_batches() const;
  std::int64_t gather_bound() const;
  std::int64_t whole_numel(bool experts_only) const;
  ShardContext& context() { return *context_; }
  std::vector<ShardedUnit>& units() { return units_; }

  const std::string& unit_name(std::size_t unit) const override { return units_[unit].name; }
  std::size_t enter_forward(std::size_t unit) override;
  void leave_forward(std::size_t use) override;
  void enter_backward(std::size_t use) override;
  void take_gradient(const at::Tensor& parameter, at::Tensor gradient) override;
  void leave_backward(std::size_t use) override;
  void exchanges(std::size_t unit) override {
    if (unit != kRootUnit || uses_.size() == 1) exchanging_ = unit;  // a root with blocks always holds units
  }
  bool everything_is_held() const override { return held_; }
  void abandon() noexcept override;
  bool is_trained(const c10::TensorImpl* leaf) const override { return places_.contains(leaf); }
  bool is_frozen(const c10::TensorImpl* leaf) const override { return frozen_.contains(leaf); }
  bool is_freed_memory(const c10::StorageImpl* storage) const override { return storages_.contains(storage); }

 private:
  struct Place {
    FlatShard* flat;
    std::size_t slot;
  };
  void add_places(FlatShard& flat, const std::vector<NamedParameter>& parameters);
  void make_buffers();
  std::size_t next_use(std::size_t unit) const;
  void hold(std::size_t use);
  void ahead(std::size_t use);
  void free_unit(std::size_t unit);
  void after_forward(std::size_t use);
  void after_backward(std::size_t use);
  void reduce(std::size_t unit);
  at::Tensor buffer_for(std::size_t unit, const FlatShard& flat);
  void wait_for_oldest();
  template <typename Which>
  void wait_while(const Which& which);  // a reduction under way is one of these
  void wait_for_reductions();
  void progress();
  bool is_last_in_backward(std::size_t use) const { return first_use_[uses_[use]] == use; }
  void make_up_backward();
  void forget_passes();

  std::unique_ptr<ShardContext> context_;
  std::vector<ShardedUnit> units_;
  std::vector<std::size_t> uses_;       // unit by use
  std::vector<std::size_t> first_use_;  // use by unit
  PassOptions options_;
  std::unordered_map<const c10::TensorImpl*, Place> places_;
  std::unordered_set<const c10::TensorImpl*> frozen_;
  std::unordered_set<const c10::StorageImpl*> storages_;

  // The pass that runs, and the backward that is announced.
  UseRange pass_{}, announced_pass_{};
  UseRange pass_that_begins() const { return options_.uses ? options_.uses() : UseRange{1, uses_.size()}; }
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
  std::deque<Reduction> under_way_;
  // Whether of the root, the axes along which the ranks lie that reach the memory, and the type.
  using BufferKey = std::tuple<bool, AxisSet, at::ScalarType>;
  BufferKey buffer_key(std::size_t unit, const FlatShard& flat) const;
  std::map<BufferKey, std::vector<at::Tensor>> buffers_;
  std::size_t turn_ = 0;
  bool last_ = false;
  bool may_be_updated_ = false;  // between finish_reduction() and publish_parameters()
  std::vector<bool> reduced_;    // by unit, where gradients are reduced once a step
};

}  // namespace isograd
