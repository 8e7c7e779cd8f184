// A rank's part of one flat buffer of parameters: the steps that are the same in every strategy.
#pragma once

#include <c10/util/ScopeExit.h>

#include <chrono>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "isograd/parameters.hpp"
#include "layout/storage.hpp"
#include "parallel/data/planned_bucket.hpp"
#include "parallel/data/same_parameters.hpp"

namespace isograd {

// The groups of a flat buffer, by role, from the axes that its parameters have in common.
struct RoleGroups {
  // Collective over the ranks of each group. `asked` as RankRoles takes it.
  RoleGroups(const Mesh& mesh, const SyncAxes& sync, const AxisSet& asked);

  RankRoles roles;  // of this rank
  Group summed;     // whose gradients add up
  Group shard;      // along roles.sharded
  Group replicate;  // of `summed` those that keep the same shard
};

// Sent by this rank in these groups, of which some may be the same.
std::int64_t bytes_sent(const std::vector<Group>& groups);

// ConfigError where parameters are in host memory already.
void check_can_be_offloaded(at::Device parameters);

// Embeddings can make sparse gradients; buffers are dense.
at::Tensor as_dense(const at::Tensor& gradient);

// Adds up the time in which communication was waited for: DataParallel::exposed_seconds(). Measurements
// inside of others count once.
class WaitClock {
 public:
  template <typename Action>
  void during(Action&& action) {
    if (running_) return action();
    running_ = true;
    const auto stopped = c10::make_scope_exit([this] { running_ = false; });  // by an exception, too
    const auto start = std::chrono::steady_clock::now();
    action();
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  double seconds() const { return seconds_; }

 private:
  bool running_ = false;
  double seconds_ = 0;
};

// A bucket and the memory of its parameters on their device. The bucket's own tensors are that memory or,
// with offload, pinned copies in host memory, so that norms and updates are the CPU's.
class HeldBucket {
 public:
  HeldBucket(WrittenValues& written, Bucket bucket, const std::vector<NamedParameter>& parameters,
             bool offload);
  virtual ~HeldBucket() = default;

  const Bucket& bucket() const { return bucket_; }
  // The part of the gradients that is reduced. Undefined: rounds add up in host memory alone.
  const at::Tensor& gradients_on_device() const { return gradients_; }

  // Copies values that users have written into parameters, except `excluded`, to masters and host memory. A
  // master that rounds to them stays as it is. ConfigError where ranks share one copy.
  virtual void take_over_writes(const std::set<std::string>& excluded = {});
  void forget_writes(const std::set<std::string>& names);
  // ConfigError where users have written to parameters whose update was computed from a copy already.
  void refuse_lost_writes() const;
  void check_in_place() const { writes_.check_in_place(); }
  // These do nothing without offload. Copies wait for the device.
  void to_host() const;    // gradients, once they are summed
  void to_device() const;  // parameters, once they are updated, in their own type

 protected:
  explicit HeldBucket(WrittenValues& written) : written_(written) {}
  // Called once `bucket_` is complete. `reduced_on_device`: backward needs the gradients on the device.
  void place(bool offload, bool reduced_on_device);

  Bucket bucket_;
  Writes writes_;
  at::Tensor parameters_, gradients_;  // [held.size()], on the device
  int sharers_ = 1;                    // ranks that have one copy of the parameters between them

 private:
  virtual void write_to_shard(const Slot&) {}  // where the parameter is not in the memory that is held
  void write_to_copies(const Slot& slot) const;
  bool keeps_copies() const;  // in another type or place

  WrittenValues& written_;
  at::Tensor host_parameters_, host_gradients_;  // the bucket's, with offload
};

// Shared by all flat buffers of a layout.
struct FlatContext {
  FlatContext(const Mesh& mesh, const AxisSet& sharded, bool offload = false, bool parameters_shared = false);

  Mesh mesh;
  AxisSet sharded_axes;    // as asked
  RoleGroups groups;       // of parameters that every rank has a copy of
  bool offload;            // what is held is in host memory, the parameters are not
  bool parameters_shared;  // one copy of the parameters, in memory that the shard group shares
  WaitClock waited{};
  WrittenValues written;
  // Groups that share one copy, each once: all ranks with the same copies have them in the same order.
  std::vector<Group> sharers{};

  void meet();  // returns once all ranks that share one copy of something have called it

  template <typename Flats>
  std::int64_t bytes_sent(const Flats& flats) const {
    std::vector<Group> all{groups.summed, groups.shard, groups.replicate};
    for (const auto& flat : flats)
      all.insert(all.end(), {flat->groups().summed, flat->groups().shard, flat->groups().replicate});
    return isograd::bytes_sent(all);
  }
};

class FlatParameters : public HeldBucket {
 public:
  FlatParameters(const BucketPlan& plan, FlatContext& context)
      : HeldBucket(context.written),
        context_(context),
        groups_(context.mesh, plan.sync, context.sharded_axes) {}

  const RoleGroups& groups() const { return groups_; }
  void sum_over_replicas();  // begins it
  // Does what can be done now; true once all that was begun is complete.
  bool progress();
  void wait();

 protected:
  int shards() const { return groups_.shard.size(); }
  // Memory for one copy of the parameters, which `write` fills on one rank. Collective.
  at::Tensor shared_copy(const BucketPlan& plan, const std::function<void(const at::Tensor&)>& write);
  // Gradients of one micro-batch, by slot, and zeros where `take` returns none: another bucket has used the
  // buffer. Those that were computed in their places stay there.
  void pack(const at::Tensor& buffer, const std::function<at::Tensor(std::size_t)>& take) const;

  FlatContext& context_;
  RoleGroups groups_;
  at::Tensor scattered_;  // this rank's part of a buffer under reduction
  bool fresh_ = false;    // the gradients hold nothing of this step yet
  Pending pending_;       // a reduction

 private:
  void settle();
};

// Buffers in which gradients are packed and reduced: while one is reduced the next is filled. More would only
// cost memory.
class PackBuffers {
 public:
  static constexpr std::size_t kTurns = 2;
  struct User {
    const FlatParameters* flat;
    bool single = false;  // is reduced alone: one buffer will do
  };
  void make(const std::vector<User>& users);  // collective
  at::Tensor next(const User& user);          // [plan.numel]

 private:
  // `single`, the axes along which the ranks are that share the memory, and the type.
  using Key = std::tuple<bool, AxisSet, at::ScalarType>;
  static Key key_of(const User& user);

  std::map<Key, std::vector<at::Tensor>> buffers_;
  std::size_t turn_ = 0;
};

}  // namespace isograd
