// One bucket of a data-parallel layout: its flat memory, and the collectives that its stage asks for.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "comm/autograd.hpp"
#include "isograd/data_parallel.hpp"
#include "layout/storage.hpp"
#include "parallel/data/bucket_shard.hpp"
#include "parallel/data/planned_bucket.hpp"
#include "parallel/data/rank_roles.hpp"
#include "parallel/data/wait_clock.hpp"
#include "parallel/data/written.hpp"

namespace isograd {

// The gradients of one bucket's parameters, from micro-batch to micro-batch.
// The first gradient of a step is written to its slot, later ones are added: nothing is set to zero but slots
// whose gradient does not come. Between a step's beginning and a parameter's first gradient its .grad is
// undefined; from then on it is the view of its slot.
class SlotGradients {
 public:
  // `memory` [plan.numel], zeros. .grad of the parameters becomes views of it.
  SlotGradients(const BucketPlan& plan, at::Tensor memory, const std::vector<NamedParameter>& parameters);

  // A step begins.
  void forget(const std::vector<NamedParameter>& parameters);
  // Autograd has put a gradient into .grad, the first one or one that it has added to it. ConfigError where
  // it has replaced the view (create_graph).
  void arrived(std::size_t slot, const at::Tensor& parameter);
  // differentiable::GradientPlace
  differentiable::GradientPlace::Taken take(std::size_t slot, const at::Tensor& parameter,
                                            at::ScalarType type);
  // Slots without a gradient get zeros; from then on all of the memory can be read.
  void complete(const std::vector<NamedParameter>& parameters);
  // For a backward that is replayed (DataParallel::gradient_places()): two bits a place, whether it is
  // written and whether its parameter is trained, appended to `words`; the state of earlier ones, from `word`
  // on; all of them written, as after a backward.
  void append_places(const std::vector<NamedParameter>& parameters, std::vector<std::uint64_t>& words) const;
  void restore_places(const std::vector<NamedParameter>& parameters, const std::vector<std::uint64_t>& words,
                      std::size_t& word);
  void arrive_again(const std::vector<NamedParameter>& parameters);
  bool all_arrived(const std::vector<NamedParameter>& parameters) const;
  // ConfigError where a gradient has come, and .grad is not the view of it any more.
  void check(const std::vector<NamedParameter>& parameters) const;

 private:
  struct Place {
    Slot slot;
    bool written = true;  // its memory is what .grad has, or is to have
    bool taken = false;   // by somebody who computes into it
  };
  at::Tensor view(const Place& place) const;
  [[noreturn]] void refuse_lost(const Place& place) const;

  std::vector<Place> places_;
  at::Tensor memory_;
  bool complete_ = true;
};

class FlatBucket;

// The consequences of the options for all buckets of a layout.
struct BucketPolicy : BucketRules {
  BucketPolicy(const Mesh& mesh, const DataParallelOptions& options, const TrainableParameters& parameters);

  Mesh mesh;
  AxisSet sharded_axes;  // as asked
  SyncAxes copied;       // of a parameter that every rank has a copy of
  RoleGroups groups;     // of such parameters
  bool offload = false;  // what is held lies in host memory, the parameters do not
  bool fp32_gradients = true;
  // Replicas add up once everything has been launched: where parameters are cut along data axes the replicas
  // of one bucket may be the shard group of another, and all ranks must issue the same order there.
  bool replicas_last = false;
  WaitClock waited;
  WrittenValues written;
  Sharers sharers{};  // with one copy

  // Buckets that may be under reduction at a time.
  std::size_t most_in_flight() const;
  // The buffers that buckets take turns with, where they keep no whole gradients. Collective.
  void make_transient(const std::vector<std::unique_ptr<FlatBucket>>& buckets);
  at::Tensor transient(std::size_t turn, const FlatBucket& bucket) const;
  void meet();  // all who keep one copy of something between them

 private:
  // By the axes along which the ranks lie that reach the memory, and by type.
  std::map<std::pair<AxisSet, at::ScalarType>, std::vector<at::Tensor>> transient_;
};

class FlatBucket {
 public:
  // Collective: moves the parameters of `plan` into its memory.
  FlatBucket(BucketPlan plan, const std::vector<NamedParameter>& parameters, BucketPolicy& policy);

  const Bucket& bucket() const { return bucket_; }
  const RoleGroups& groups() const { return groups_; }
  bool keeps_gradients() const { return !policy_.reduces_each_micro_batch; }
  const at::Tensor& parameters() const { return parameters_; }  // [numel], whole
  const at::Tensor& gradients() const { return gradients_; }    // [numel], whole, where kept

  // As of SlotGradients, where gradients are kept; otherwise nothing happens.
  void arrived(std::size_t slot, const at::Tensor& parameter) {
    if (slot_gradients_) slot_gradients_->arrived(slot, parameter);
  }
  differentiable::GradientPlace::Taken take(std::size_t slot, const at::Tensor& parameter,
                                            at::ScalarType type) {
    return slot_gradients_ ? slot_gradients_->take(slot, parameter, type)
                           : differentiable::GradientPlace::Taken{};
  }
  void complete(const std::vector<NamedParameter>& parameters) {
    if (slot_gradients_) slot_gradients_->complete(parameters);
  }

  SlotGradients* slot_gradients() { return slot_gradients_ ? &*slot_gradients_ : nullptr; }
  const SlotGradients* slot_gradients() const { return slot_gradients_ ? &*slot_gradients_ : nullptr; }

  // A step begins, without gradients.
  void zero(const std::vector<NamedParameter>& parameters);
  // Begins the reduction of the gradients that are there. `turn` counts the launches of a round.
  void launch(std::size_t turn, const std::vector<NamedParameter>& parameters);
  void sum_over_replicas();
  void to_host() const { held_.gradients_to_host(); }
  void to_device() const { held_.parameters_to_device(); }
  // Copies values that the user has written into the parameters into the masters, except `excluded`.
  // ConfigError where ranks share one copy.
  void take_over_writes(const std::set<std::string>& excluded = {});
  void forget_writes(const std::set<std::string>& names);
  void refuse_lost_writes();
  void check_in_place(const std::vector<NamedParameter>& parameters) const {
    if (slot_gradients_) slot_gradients_->check(parameters);
    writes_.check_in_place();
  }
  void gather_parameters();
  // Does what can be done now; true once all that was begun is complete.
  bool progress();
  void wait();
  // Σ x² over bucket().owned of the sum, where the reduction took it on its way; until the next launch.
  std::optional<double> squares() const { return squares_ ? std::optional(*squares_) : std::nullopt; }

 private:
  void pack(const at::Tensor& buffer, const std::vector<NamedParameter>& parameters) const;
  void settle();

  BucketPolicy& policy_;
  RoleGroups groups_;
  Bucket bucket_;
  BucketShard held_;
  Writes writes_;
  at::Tensor parameters_, gradients_;
  std::optional<SlotGradients> slot_gradients_{};
  at::Tensor scattered_;  // under reduction: this rank's part of a buffer that is not kept
  bool then_replicas_ = false;
  std::shared_ptr<double> squares_;  // null: the reduction does not take them
  Pending pending_;
};

}  // namespace isograd
