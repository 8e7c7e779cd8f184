// The parameters of one type in one unit: this rank's shard of them, their gathering and the reduction of
// their gradients.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "isograd/data_parallel.hpp"
#include "layout/storage.hpp"
#include "parallel/data/bucket_shard.hpp"
#include "parallel/data/flat_bucket.hpp"
#include "parallel/data/unit_storage.hpp"
#include "parallel/data/written.hpp"

namespace isograd {

// Memory for gathered parameters, used again and counted. In use and spare together are never more than what
// was once in use, and less again after keep().
class GatherPool {
 public:
  at::Tensor take(at::ScalarType dtype, std::int64_t numel, at::Device device);
  void give(at::Tensor memory);
  std::int64_t bytes() const { return bytes_; }  // in use
  std::int64_t most_bytes() const { return most_bytes_; }
  std::int64_t kept_bytes() const { return kept_bytes_; }  // how much stays, in use or spare, at most
  void keep(std::int64_t bytes);                           // gives back spare memory beyond that

 private:
  void trim();
  std::deque<at::Tensor> spare_;  // the longest unused first
  std::int64_t bytes_ = 0, most_bytes_ = 0, kept_bytes_ = 0, spare_bytes_ = 0;
};

// Shared by all shards of a layout.
struct ShardContext {
  Mesh mesh;
  RoleGroups groups;                // of parameters that every rank has a copy of
  AxisSet sharded_axes;             // as asked
  bool parameters_shared = false;   // of the parameters, in memory that the shard group shares
  bool reduce_once = false;         // whole gradients are kept until the last micro-batch
  bool offload = false;             // what is held lies in host memory, the parameters do not
  bool even_micro_batches = false;  // all ranks make as many passes: something is exchanged in each
  GatherPool pool{};
  WaitClock waited{};
  WrittenValues written{mesh};
  Sharers sharers{};  // with one copy
};

class FlatShard {
 public:
  // Gives a parameter without values yet (on the meta device) its first ones.
  using Initialize = std::function<void(const std::string& name, at::Tensor& values)>;

  // Collective. Moves the parameters of `plan` (indices into `parameters`) into this rank's shard; from then
  // on they can be read only while whole. The plan is padded for the shards.
  FlatShard(BucketPlan plan, const std::vector<NamedParameter>& parameters, const std::string& unit,
            bool trained, bool fp32_gradients, const Initialize& initialize, ShardContext& context);

  const Bucket& bucket() const { return bucket_; }
  const RoleGroups& groups() const { return groups_; }
  bool trained() const { return trained_; }
  // Parameters that were frozen when the layout was made get gradients from here on. Collective.
  void train();
  const UnitStorage* storage() const { return storage_.get(); }  // none where always whole

  // Collective, in the same order on all ranks.
  void begin_gather();  // nothing unless freed
  void finish_gather();
  void free();           // nothing unless whole
  void drop() noexcept;  // whatever state it is in
  bool is_freed() const { return state_ == State::kFreed; }
  bool is_whole() const { return state_ == State::kWhole; }
  std::int64_t gathered_bytes() const;  // 0 where always whole
  void add(std::size_t slot, at::Tensor gradient);
  // Reduces what was added, zeros where nothing was. `buffer` is [numel] in memory that the shard group
  // shares and stays in use until wait() returns or progress() is true. Not read where whole gradients are
  // kept.
  void begin_reduction(at::Tensor buffer);
  bool needs_buffer() const { return shards() > 1 && !context_.reduce_once; }
  bool progress();  // of whatever is under way; true once it is complete
  void wait();
  void sum_over_replicas();  // begins it
  void to_host() const { held_.gradients_to_host(); }
  void to_device() const { held_.parameters_to_device(); }
  void zero();
  void forget();  // what was added and not reduced
  // Copies values that the user has written into the parameters while they are whole, except `excluded`.
  // Does nothing while they are not. ConfigError where ranks share one copy.
  void take_over_writes(const std::set<std::string>& excluded = {});
  void forget_writes(const std::set<std::string>& names);
  // The same between calls, of parameters that are whole all the time; and after an update that has been
  // computed without them.
  void take_over_between_calls();
  void refuse_lost_writes();
  void check_in_place() const { writes_.check_in_place(); }

 private:
  enum class State { kFreed, kGathering, kWhole };
  struct PartialSum {
    at::Tensor sum;
    bool own = false;  // memory nobody else sees
  };
  int shards() const { return groups_.shard.size(); }
  void make_gradients();
  void settle();
  void pack(const at::Tensor& buffer);

  ShardContext& context_;
  RoleGroups groups_;
  bool trained_, fp32_gradients_;
  Bucket bucket_;
  BucketShard held_;
  Writes writes_;
  std::unique_ptr<UnitStorage> storage_;
  State state_ = State::kFreed;
  at::Tensor memory_;               // gathered into
  at::Tensor whole_gradients_;      // [numel], where kept until the last micro-batch
  at::Tensor scattered_;            // this rank's part of a buffer under reduction
  std::vector<PartialSum> pieces_;  // by slot
  bool fresh_ = true;               // bucket_.gradients hold nothing of this step yet
  Pending gather_, reduction_;
};

}  // namespace isograd
