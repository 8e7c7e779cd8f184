// Gradients in buckets of shared memory, reduced inside backward as soon as they are complete.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "base/refuse.hpp"
#include "isograd/data_parallel.hpp"
#include "isograd/error.hpp"
#include "layout/flat.hpp"
#include "layout/storage.hpp"
#include "parallel/data/flat_bucket.hpp"
#include "parallel/data/planned_bucket.hpp"
#include "parallel/data/same_parameters.hpp"

namespace isograd {
namespace {

class Bucketed final : public DataParallel {
 public:
  Bucketed(TrainableParameters parameters, const Mesh& mesh, const DataParallelOptions& options);
  ~Bucketed() override;
  Bucketed(const Bucketed&) = delete;
  Bucketed& operator=(const Bucketed&) = delete;

  void zero_gradients() override;
  void begin_backward(bool last) override;
  void finish_reduction() override {
    finish_reduction_with([](const Bucket&, std::optional<double>) {});
  }
  void finish_reduction_with(const Reduced& reduced) override;
  void publish_parameters() override;
  bool needs_even_micro_batches() const override {
    return policy_.reduces_each_micro_batch || cut_along_data_;
  }
  std::vector<Bucket>& buckets() override {
    complete();  // for whoever looks in mid-step
    return buckets_;
  }
  std::vector<std::size_t> launch_order() override { return launch_order_; }
  const Mesh& mesh() const override { return policy_.mesh; }
  std::int64_t bytes_sent() override {
    std::vector<Group> groups{policy_.groups.summed, policy_.groups.shard, policy_.groups.replicate};
    for (const auto& flat : flats_) {
      const RoleGroups& own = flat->groups();
      groups.insert(groups.end(), {own.summed, own.shard, own.replicate});
    }
    return isograd::bytes_sent(groups) - asking_bytes_;
  }
  double exposed_seconds() const override { return policy_.waited.seconds(); }
  bool gradients_can_be_replayed() override {
    return !reduces_ && !policy_.reduces_each_micro_batch && !offload_ && !buckets_.empty() &&
           std::ranges::all_of(buckets_, [](const Bucket& bucket) { return bucket.plan.device.is_cuda(); });
  }
  std::vector<std::uint64_t> gradient_places() const override {
    std::vector<std::uint64_t> words;
    for (const auto& flat : flats_) std::as_const(*flat).slot_gradients()->append_places(parameters_, words);
    return words;
  }
  void restore_places(const std::vector<std::uint64_t>& places) override {
    std::size_t word = 0;
    for (auto& flat : flats_) flat->slot_gradients()->restore_places(parameters_, places, word);
  }
  void arrive_again() override {
    for (auto& flat : flats_) flat->slot_gradients()->arrive_again(parameters_);
  }
  bool all_gradients_arrived() const override {
    return std::ranges::all_of(flats_, [&](const auto& flat) {
      return std::as_const(*flat).slot_gradients()->all_arrived(parameters_);
    });
  }
  void take_over_writes(const std::set<std::string>& excluded) override {
    for (auto& flat : flats_) flat->take_over_writes(excluded);
  }
  void compare_writes() override { policy_.written.compare(parameters_); }

 protected:
  Frozen frozen() override { return {.buckets = {}, .tensors = parameters_.frozen}; }
  void forget_writes(const std::set<std::string>& names) override {
    for (auto& flat : flats_) flat->forget_writes(names);
  }

 private:
  struct Hook;
  // A bucket's gradients that have arrived in the backward that is to be reduced.
  struct Arrivals {
    std::vector<bool> slots;  // whose gradient is complete
    std::size_t missing = 0;
  };

  void refuse_early(const std::vector<NamedParameter>& parameters);
  void add_buckets(std::vector<BucketPlan> plans);
  void connect(std::size_t bucket);
  void complete() {  // from here on buckets can be read
    for (auto& flat : flats_) flat->complete(parameters_);
  }
  void follow();
  void join(const std::vector<NamedParameter>& unfrozen);
  void reduce_joined(std::size_t bucket);
  void learn_order();
  void on_gradient(std::size_t bucket, std::size_t slot, const at::Tensor& parameter);
  void launch_next();
  void finish_round(const Reduced& reduced = [](const Bucket&, std::optional<double>) {});
  void check_views() const;
  bool has_hooks() const { return !policy_.reduces_each_micro_batch || (reduces_ && overlap_); }

  TrainableParameters parameters_;
  std::vector<Claim> claims_;
  BucketPolicy policy_;
  bool overlap_, offload_, check_parameters_;
  bool cut_along_data_ = false;
  bool reduces_ = false;  // whether ranks have anything to sum
  std::int64_t bucket_bytes_, first_bucket_bytes_;
  bool learns_order_ = false;        // in which gradients come
  std::vector<std::size_t> came_{};  // parameters, in that order, in the last backward that had any
  bool new_backward_ = false;        // none of its gradients has come
  std::int64_t asking_bytes_ = 0;    // once, to agree on that order
  std::vector<Bucket> buckets_;
  std::vector<std::unique_ptr<FlatBucket>> flats_;  // per bucket
  std::vector<Arrivals> arrivals_;                  // per bucket
  bool in_round_ = false;                           // a backward has begun whose gradients are to be reduced
  bool in_last_ = false;
  bool may_be_updated_ = false;  // between finish_reduction() and publish_parameters()
  // Launched strictly in this order, whatever order gradients arrive in, so that all ranks issue the same
  // sequence of collectives: its places [0, completed_) are reduced, [completed_, launched_) under way.
  std::vector<std::size_t> launch_order_;
  std::size_t completed_ = 0, launched_ = 0;
};

struct Bucketed::Hook final : differentiable::GradientPlace {
  Hook(Bucketed& owner_, std::size_t bucket_, std::size_t slot_)
      : owner(owner_), bucket(bucket_), slot(slot_) {}
  void operator()(const at::Tensor& parameter) override { owner.on_gradient(bucket, slot, parameter); }
  Taken take(const at::Tensor& parameter, at::ScalarType type) override {
    return owner.flats_[bucket]->take(slot, parameter, type);
  }
  Bucketed& owner;
  std::size_t bucket, slot;
};

std::string named(const std::string& name) { return fmt::format("parameter '{}'", name); }

TrainableParameters checked_and_placed(TrainableParameters parameters, const Mesh& mesh) {
  if (parameters.check) parameters.check();
  place_parameters(parameters, mesh.grid(), mesh.rank());
  return parameters;
}

Bucketed::Bucketed(TrainableParameters parameters, const Mesh& mesh, const DataParallelOptions& options)
    : parameters_(checked_and_placed(std::move(parameters), mesh)),
      policy_(mesh, options, parameters_),
      overlap_(options.overlap),
      offload_(options.offload),
      check_parameters_(options.check_parameters),
      bucket_bytes_(options.bucket_bytes),
      first_bucket_bytes_(options.first_bucket_bytes) {
  policy_.written.watch(parameters_.frozen);
  reduces_ = policy_.groups.summed.size() > 1;
  for (const auto* list : {static_cast<std::vector<NamedParameter>*>(&parameters_), &parameters_.frozen})
    for (const NamedParameter& parameter : *list) reduces_ |= mesh.size(parameter.sync.summed) > 1;
  cut_along_data_ = any_cut_along_data(parameters_, mesh.grid());
  learns_order_ = options.learn_order && overlap_ && reduces_;
  refuse_early(parameters_);
  add_buckets(plan_buckets(parameters_, bucket_bytes_, first_bucket_bytes_,
                           order_by_names(parameters_, options.order)));
}

// Everything that can refuse comes before the model is touched. Collective.
void Bucketed::refuse_early(const std::vector<NamedParameter>& parameters) {
  for (const NamedParameter& parameter : parameters)
    if (torch::autograd::impl::post_acc_grad_hooks(parameter.tensor))
      refuse(named(parameter.name), "a post-accumulate-gradient hook already there", "none",
             "Destroy the other layout of this model first");
  if (offload_)
    for (const NamedParameter& parameter : parameters) check_can_be_offloaded(parameter.tensor.device());
  claims_.emplace_back(parameters);
  if (check_parameters_) check_same_parameters(parameters, policy_.mesh);
}

void Bucketed::add_buckets(std::vector<BucketPlan> plans) {
  const std::size_t first = buckets_.size();
  for (BucketPlan& plan : plans) {
    pad_for(plan, policy_.mesh.size(plan.sync.summed));
    flats_.push_back(std::make_unique<FlatBucket>(std::move(plan), parameters_, policy_));
    launch_order_.push_back(buckets_.size());
    buckets_.push_back(flats_.back()->bucket());
  }
  policy_.make_transient(flats_);
  arrivals_.resize(buckets_.size());
  for (std::size_t bucket = first; bucket < buckets_.size(); ++bucket) connect(bucket);
}

void Bucketed::connect(std::size_t bucket) {
  const auto& slots = buckets_[bucket].plan.slots;
  for (std::size_t s = 0; s < slots.size(); ++s) {
    at::Tensor& parameter = parameters_[slots[s].index].tensor;
    if (!flats_[bucket]->keeps_gradients()) parameter.mutable_grad() = at::Tensor();
    if (has_hooks())
      torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Hook>(*this, bucket, s));
  }
}

Bucketed::~Bucketed() {
  for (NamedParameter& parameter : parameters_) {
    if (has_hooks()) torch::autograd::impl::post_acc_grad_hooks(parameter.tensor).reset();
    parameter.tensor.mutable_grad() = at::Tensor();  // the bucket's memory goes with the group
  }
}

// Follows parameters that were frozen or unfrozen, between steps or in the one that ends.
void Bucketed::follow() {
  const auto unfrozen = follow_freezing(parameters_, buckets_, policy_.mesh);
  if (!unfrozen.empty()) join(unfrozen);
}

// Unfrozen parameters, with whatever gradient has come for them meanwhile.
void Bucketed::join(const std::vector<NamedParameter>& unfrozen) {
  refuse_early(unfrozen);
  std::vector<BucketPlan> plans = plan_joined(parameters_, unfrozen, bucket_bytes_);
  std::vector<at::Tensor> came;
  for (const NamedParameter& parameter : parameters_) came.push_back(parameter.tensor.grad());
  const std::size_t first = buckets_.size();
  add_buckets(std::move(plans));
  for (std::size_t bucket = first; bucket < buckets_.size(); ++bucket) {
    for (const Slot& slot : buckets_[bucket].plan.slots) {
      if (!came[slot.index].defined()) continue;
      if (flats_[bucket]->keeps_gradients())
        slot_view(flats_[bucket]->gradients(), slot).copy_(as_dense(came[slot.index]));
      else
        parameters_[slot.index].tensor.mutable_grad() = came[slot.index];  // to be packed
    }
  }
}

void Bucketed::reduce_joined(std::size_t bucket) {
  FlatBucket& flat = *flats_[bucket];
  flat.launch(/*turn=*/0, parameters_);
  flat.wait();
  if (policy_.reduces_each_micro_batch) {
    flat.sum_over_replicas();
    flat.wait();
  }
  flat.to_host();
}

// Where a bucket's last gradient came, there it is sent from here on. All ranks follow the first that saw
// any.
void Bucketed::learn_order() {
  const std::int64_t before = bytes_sent();
  Group same_list = ranks_of_same_parameters(policy_.mesh);
  const auto order = agree_on_order(came_, parameters_.size(), same_list);
  asking_bytes_ += bytes_sent() - before;
  if (order.empty()) return;  // no rank had a gradient: the next step may tell
  learns_order_ = false;
  came_ = {};
  std::vector<std::size_t> place(parameters_.size()), complete(buckets_.size());
  for (std::size_t i = 0; i < order.size(); ++i) place[order[i]] = i;
  for (std::size_t b = 0; b < buckets_.size(); ++b)
    for (const Slot& slot : buckets_[b].plan.slots) complete[b] = std::max(complete[b], place[slot.index]);
  std::sort(launch_order_.begin(), launch_order_.end(),
            [&](std::size_t a, std::size_t b) { return complete[a] < complete[b]; });
}

void Bucketed::zero_gradients() {
  // Given up in mid-backward: ranks may have come differently far with it, yet all issue the same
  // collectives.
  if (in_round_) finish_round();
  if (parameters_.check) parameters_.check();
  check_views();
  take_over_writes({});
  in_round_ = in_last_ = may_be_updated_ = false;
  completed_ = launched_ = 0;
  came_.clear();
  for (auto& flat : flats_) flat->zero(parameters_);
  if (policy_.reduces_each_micro_batch)  // a backward whose gradients nobody has packed
    for (NamedParameter& parameter : parameters_) parameter.tensor.mutable_grad() = at::Tensor();
  for (NamedParameter& parameter : parameters_.frozen)
    if (parameter.tensor.requires_grad()) parameter.tensor.mutable_grad() = at::Tensor();  // about to join
  follow();  // what joins now adds up its micro-batches in the type of its bucket
}

void Bucketed::begin_backward(bool last) {
  if (in_last_)
    refuse("begin_backward", "a backward after the one announced as the last", "finish_reduction() next",
           "Pass last = true only before the last micro-batch of a step");
  if (!reduces_) return;
  if (in_round_) finish_round();
  new_backward_ = true;
  in_last_ = last;
  // Without overlap nothing happens before finish_reduction(), unless each micro-batch is reduced.
  if (!policy_.reduces_each_micro_batch && !(last && overlap_)) return;
  in_round_ = true;
  completed_ = launched_ = 0;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const auto& slots = buckets_[b].plan.slots;
    arrivals_[b].slots.assign(slots.size(), false);
    arrivals_[b].missing =
        static_cast<std::size_t>(std::count_if(slots.begin(), slots.end(), [&](const Slot& slot) {
          return parameters_[slot.index].tensor.requires_grad();
        }));
  }
}

void Bucketed::on_gradient(std::size_t bucket, std::size_t slot, const at::Tensor& parameter) {
  const Slot& place = buckets_[bucket].plan.slots[slot];
  flats_[bucket]->arrived(slot, parameter);
  if (learns_order_) {
    if (std::exchange(new_backward_, false)) came_.clear();
    came_.push_back(place.index);
  }
  if (!in_round_) return;
  Arrivals& arrived = arrivals_[bucket];
  if (arrived.slots[slot])
    refuse(named(place.name), "a second gradient in a backward whose gradients are being reduced",
           "one backward after begin_backward()", "Add the losses up and call backward once");
  arrived.slots[slot] = true;
  --arrived.missing;
  while (launched_ < buckets_.size() && arrivals_[launch_order_[launched_]].missing == 0) launch_next();
  while (completed_ < launched_ && flats_[launch_order_[completed_]]->progress()) ++completed_;
}

void Bucketed::launch_next() {
  // A buffer that buckets take turns with must be free again.
  while (launched_ - completed_ >= policy_.most_in_flight()) flats_[launch_order_[completed_++]]->wait();
  flats_[launch_order_[launched_]]->launch(launched_, parameters_);
  ++launched_;
}

// A bucket that is not launched yet misses a gradient: an unused parameter, or no micro-batch at all.
// It takes part with zeros.
void Bucketed::finish_round(const Reduced& reduced) {
  // Nothing is computed meanwhile, and where the others are there already it is done when it is launched.
  policy_.waited.during([&] {
    while (launched_ < buckets_.size()) launch_next();
  });
  // Handed over in the order of buckets(): what adds up by bucket has the same bits whatever was sent first.
  std::vector<bool> final(buckets_.size());
  std::size_t next = 0;
  for (std::size_t place = 0; place < launched_; ++place) {
    const std::size_t b = launch_order_[place];
    if (place == completed_) {
      flats_[b]->wait();
      ++completed_;
    }
    flats_[b]->to_host();
    for (final[b] = true; next < final.size() && final[next]; ++next)
      reduced(buckets_[next], flats_[next]->squares());
  }
  in_round_ = false;
}

void Bucketed::finish_reduction_with(const Reduced& reduced) {
  const auto hand_over_from = [&](std::size_t first) {
    for (std::size_t b = first; b < buckets_.size(); ++b) reduced(buckets_[b], std::nullopt);
  };
  const std::size_t known = buckets_.size();
  if (!reduces_) {
    complete();
    for (auto& flat : flats_) flat->to_host();
    hand_over_from(0);
  } else {
    if (!in_round_) completed_ = launched_ = 0;
    in_last_ = true;
    if (!policy_.reduces_each_micro_batch) {
      finish_round(reduced);
    } else {  // replicas add up once a step, not in every round
      finish_round();
      policy_.waited.during([&] {
        for (auto& flat : flats_) flat->sum_over_replicas();
        for (auto& flat : flats_) flat->wait();
      });
      hand_over_from(0);
    }
    if (learns_order_) learn_order();
  }
  follow();
  for (std::size_t b = known; b < buckets_.size(); ++b) reduces_ ? reduce_joined(b) : flats_[b]->to_host();
  hand_over_from(known);
  // Nobody reads parameters any more, so that their owners may write to them.
  if (reduces_ && policy_.parameters_shared) policy_.meet();
  in_round_ = in_last_ = false;
  check_views();
  take_over_writes({});
  compare_writes();
  may_be_updated_ = true;
}

void Bucketed::publish_parameters() {
  const bool updated = std::exchange(may_be_updated_, false);
  for (auto& flat : flats_) {
    updated ? flat->refuse_lost_writes() : flat->take_over_writes();
    flat->to_device();
  }
  if (!policy_.sharded) return;
  if (policy_.parameters_shared) return policy_.meet();
  policy_.waited.during([&] {
    for (auto& flat : flats_) flat->gather_parameters();
    for (auto& flat : flats_) flat->wait();
  });
}

// A view can be lost silently where no hook looks: an unused parameter, one rank alone, a model that was
// moved.
void Bucketed::check_views() const {
  for (const auto& flat : flats_) flat->check_in_place(parameters_);
}

}  // namespace

std::unique_ptr<DataParallel> bucketed(TrainableParameters parameters, const Mesh& mesh,
                                       DataParallelOptions options) {
  return std::make_unique<Bucketed>(std::move(parameters), mesh, options);
}

}  // namespace isograd
