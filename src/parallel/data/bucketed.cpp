// Gradients in buckets of shared memory, reduced inside backward as soon as they are complete.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>

#include "base/refuse.hpp"
#include "comm/autograd.hpp"
#include "comm/squares.hpp"
#include "isograd/data_parallel.hpp"
#include "layout/flat.hpp"
#include "layout/storage.hpp"
#include "parallel/data/flat_parameters.hpp"

namespace isograd {
namespace {

using differentiable::GradientPlace;

// The gradients of one bucket's parameters, from micro-batch to micro-batch.
// The first gradient of a step is written to its slot, later ones are added: nothing is set to zero but slots
// whose gradient does not come. Between a step's beginning and a parameter's first gradient its .grad is
// undefined; from then on it is the view of its slot.
class SlotGradients {
 public:
  // `memory` [plan.numel], zeros. .grad of the parameters becomes views of it. `parameters` outlives this.
  SlotGradients(const BucketPlan& plan, at::Tensor memory, std::vector<NamedParameter>& parameters)
      : parameters_(parameters), memory_(std::move(memory)) {
    for (const Slot& slot : plan.slots) {
      places_.push_back({.slot = slot});
      grad(places_.back()) = view(places_.back());
    }
  }

  // A step begins.
  void forget() {
    for (Place& place : places_) {
      grad(place) = at::Tensor();
      place.written = place.taken = false;
    }
    complete_ = false;
  }

  // Autograd has put a gradient into .grad, the first one or one that it has added to it. ConfigError where
  // it has replaced the view (create_graph).
  void arrived(std::size_t slot) {
    Place& place = places_[slot];
    at::Tensor& gradient = grad(place);
    if (!gradient.defined() && !place.written && !place.taken) return;  // a backward without one
    const bool replaces = !place.written || place.taken;                // and does not add to what is there
    if (!is_slot_view(gradient, memory_, place.slot)) {
      if (!replaces || !gradient.defined() || gradient.requires_grad()) refuse_lost(place);
      const at::NoGradGuard no_grad;
      const at::Tensor own = view(place);
      own.copy_(as_dense(gradient));
      gradient = own;
    }
    place.written = true;
    place.taken = false;
  }

  GradientPlace::Taken take(std::size_t slot, at::ScalarType type) {
    Place& place = places_[slot];
    if (place.taken || memory_.scalar_type() != type) return {};
    if (place.written && !is_slot_view(grad(place), memory_, place.slot)) refuse_lost(place);
    place.taken = true;
    // The gradient given to autograd takes the place of .grad, or of another type (gradient_in) is added to
    // it.
    grad(place) = type == parameter(place).scalar_type() ? at::Tensor() : view(place);
    return {.memory = view(place), .adds = place.written};
  }

  // Slots without a gradient get zeros; from then on all of the memory can be read.
  void complete() {
    if (complete_) return;  // unwritten: another thread may read
    complete_ = true;
    const at::NoGradGuard no_grad;
    for (Place& place : places_) {
      if (std::exchange(place.written, true)) continue;
      place.taken = false;  // by a backward that was given up
      grad(place) = view(place).zero_();
    }
  }

  // For a backward that is replayed (DataParallel::gradient_places()): two bits a place, whether it is
  // written and whether its parameter is trained.
  void append_places(std::vector<std::uint64_t>& words) const {
    for (std::size_t i = 0; i < places_.size(); ++i) {
      if (i % 32 == 0) words.push_back(0);
      const std::uint64_t trained = parameter(places_[i]).requires_grad();
      words.back() |= (std::uint64_t{places_[i].written} | trained << 1) << (2 * (i % 32));
    }
  }
  void restore_places(const std::vector<std::uint64_t>& words, std::size_t& word) {
    for (std::size_t i = 0; i < places_.size(); ++i) {
      if (i % 32 == 0) ++word;
      Place& place = places_[i];
      place.written = words[word - 1] >> (2 * (i % 32)) & 1;
      place.taken = false;
      grad(place) = place.written ? view(place) : at::Tensor();
    }
  }
  void arrive_again() {
    for (Place& place : places_) {
      if (!parameter(place).requires_grad()) continue;
      if (!std::exchange(place.written, true)) grad(place) = view(place);
      place.taken = false;
    }
  }
  bool all_arrived() const {
    return std::ranges::all_of(places_, [&](const Place& place) {
      return !parameter(place).requires_grad() || (place.written && !place.taken);
    });
  }

  // ConfigError where a gradient has come, and .grad is not the view of it any more.
  void check() const {
    for (const Place& place : places_)
      if (place.written && !is_slot_view(parameter(place).grad(), memory_, place.slot)) refuse_lost(place);
  }

 private:
  struct Place {
    Slot slot;
    bool written = true;  // its memory is what .grad has, or is to have
    bool taken = false;   // by somebody who computes into it
  };
  const at::Tensor& parameter(const Place& place) const { return parameters_[place.slot.index].tensor; }
  at::Tensor& grad(const Place& place) { return parameters_[place.slot.index].tensor.mutable_grad(); }
  at::Tensor view(const Place& place) const { return slot_view(memory_, place.slot); }
  [[noreturn]] static void refuse_lost(const Place& place) {
    refuse(fmt::format("parameter '{}'", place.slot.name), "a .grad that is no longer the view of its bucket",
           "the gradient left in place",
           "Call zero_gradients() of the layout, not zero_grad() of the module (it drops "
           "gradients), and run backward without create_graph (it replaces them)");
  }

  std::vector<NamedParameter>& parameters_;
  std::vector<Place> places_{};
  at::Tensor memory_;
  bool complete_ = true;
};

// The consequences of the options for all buckets of a layout.
struct BucketContext : FlatContext {
  BucketContext(const Mesh& mesh, const DataParallelOptions& options, const BucketRules& rules_,
                const TrainableParameters& parameters)
      : FlatContext(mesh, options.sharded, options.offload, rules_.parameters_shared),
        rules(rules_),
        fp32_gradients(options.fp32_gradients),
        cut_along_data(any_cut_along_data(parameters, mesh.grid())) {}

  BucketRules rules;
  bool fp32_gradients;
  // Replicas then add up once everything has been launched: the replicas of one bucket may be the shard group
  // of another, and all ranks must issue the same order there.
  bool cut_along_data;
  PackBuffers buffers{};  // where gradients of each micro-batch are reduced

  // Buckets that may be under reduction at a time.
  std::size_t most_in_flight() const {
    return rules.reduces_each_micro_batch ? PackBuffers::kTurns : std::numeric_limits<std::size_t>::max();
  }
};

// One bucket: its memory, and the collectives that the stage asks for.
class FlatBucket final : public FlatParameters {
 public:
  // Collective: moves the parameters of `plan` into its memory. `parameters` outlives this.
  FlatBucket(BucketPlan plan, std::vector<NamedParameter>& parameters, BucketContext& context)
      : FlatParameters(plan, context), rules_(context.rules), bucket_context_(context), all_(parameters) {
    Group& shard = groups_.shard;
    const auto [held, owned, sharded] = groups_.roles.held_ranges(plan.numel, rules_.sharded);
    const auto write = [&](const at::Tensor& flat) { write_parameters(plan, parameters, flat); };
    const at::TensorOptions options = at::TensorOptions(plan.dtype).device(plan.device);
    if (rules_.parameters_shared && shards() > 1) {
      whole_ = shared_copy(plan, write);
    } else {
      whole_ = rules_.sharded ? shard.empty_shared(plan.numel, plan.dtype, plan.device)
                              : at::zeros({plan.numel}, options);
      write(whole_);
    }
    move_parameters(plan, parameters, whole_);
    const at::ScalarType type = gradient_type(plan.dtype, context.fp32_gradients);
    at::Tensor held_gradients;
    if (rules_.reduces_each_micro_batch) {
      held_gradients = at::zeros({held.size()}, options.dtype(type));
    } else {
      whole_gradients_ = (shards() > 1 && rules_.sharded ? shard : groups_.summed)
                             .empty_shared(plan.numel, type, plan.device);
      held_gradients = whole_gradients_.narrow(0, held.begin, held.size());
    }
    bucket_ = make_bucket(std::move(plan), whole_, held_gradients, owned, held);
    bucket_.sharded = sharded;
    place(context.offload, keeps_gradients());
    writes_ = Writes(bucket_.plan, parameters);
    if (keeps_gradients()) slots_ = std::make_unique<SlotGradients>(bucket_.plan, whole_gradients_, all_);
  }

  bool keeps_gradients() const { return !rules_.reduces_each_micro_batch; }
  const at::Tensor& gradients() const { return whole_gradients_; }  // [numel], where kept
  SlotGradients* slots() const { return slots_.get(); }             // where gradients are kept; else null

  // A step begins, without gradients.
  void zero() {
    if (slots_)
      slots_->forget();
    else
      bucket_.gradients.zero_();
  }
  void complete() {
    if (slots_) slots_->complete();
  }

  // Begins the reduction of the gradients that are there.
  void launch() {
    squares_ = nullptr;
    complete();
    if (!rules_.sharded) {
      pending_ = groups_.summed.all_reduce_async(whole_gradients_);
      return;
    }
    at::Tensor whole = whole_gradients_;
    if (!keeps_gradients()) {
      whole = bucket_context_.buffers.next({this});
      pack(whole, [&](std::size_t place) {
        const at::Tensor gradient =
            std::exchange(all_[bucket_.plan.slots[place].index].tensor.mutable_grad(), at::Tensor());
        return gradient.defined() ? as_dense(gradient) : gradient;
      });
    }
    const at::Tensor part = whole.narrow(0, bucket_.held.begin, bucket_.held.size());
    if (!keeps_gradients()) scattered_ = part;
    then_replicas_ = keeps_gradients() && groups_.replicate.size() > 1;
    if (shards() == 1) {  // experts without a copy among the data ranks: all of it is this rank's part
      pending_ = Pending();
      if (!bucket_context_.cut_along_data && std::exchange(then_replicas_, false)) sum_over_replicas();
      return;
    }
    // Final as it is written: nothing is added to it afterwards, and this rank owns all of it (with copies
    // along other axes the first of them does).
    if (keeps_gradients() && !then_replicas_ && bucket_.owned.size() == bucket_.held.size()) {
      auto squares = std::make_shared<double>(0);
      if (auto begun = reduce_scatter_with_squares(groups_.shard, part, whole, squares)) {
        pending_ = std::move(*begun);
        squares_ = std::move(squares);
        return;
      }
    }
    pending_ = groups_.shard.reduce_scatter_async(part, whole);
  }

  bool progress() {
    if (!FlatParameters::progress()) return false;
    if (!then_replicas_) return true;
    if (bucket_context_.cut_along_data) return false;
    then_replicas_ = false;
    sum_over_replicas();
    return pending_.progress();
  }
  void wait() {
    FlatParameters::wait();
    if (!std::exchange(then_replicas_, false)) return;
    context_.waited.during([&] {
      sum_over_replicas();
      pending_.wait();
    });
  }

  void gather_parameters() {
    if (shards() > 1)
      pending_ = groups_.shard.all_gather_async(whole_.view({shards(), bucket_.held.size()}), parameters_);
  }
  // Σ x² over bucket().owned of the sum, where the reduction took it on its way; until the next launch.
  std::optional<double> squares() const { return squares_ ? std::optional(*squares_) : std::nullopt; }

 private:
  const BucketRules& rules_;
  BucketContext& bucket_context_;
  std::vector<NamedParameter>& all_;
  at::Tensor whole_, whole_gradients_;  // [numel]
  std::unique_ptr<SlotGradients> slots_{};
  bool then_replicas_ = false;
  std::shared_ptr<double> squares_{};  // null: the reduction does not take them
};

std::string named(const std::string& name) { return fmt::format("parameter '{}'", name); }

TrainableParameters checked_and_placed(TrainableParameters parameters, const Mesh& mesh) {
  if (parameters.check) parameters.check();
  place_parameters(parameters, mesh.grid(), mesh.rank());
  return parameters;
}

// The order in which gradients came (indices of parameters) on the first rank that saw any; those that did
// not come last, in reverse. Empty where no rank saw any. Collective.
std::vector<std::size_t> agree_on_order(const std::vector<std::size_t>& arrivals, std::size_t parameters,
                                        Group& group) {
  const auto count = static_cast<std::int64_t>(parameters);
  at::Tensor first = at::full({1}, arrivals.empty() ? group.size() : group.rank(), at::kLong);
  group.all_reduce(first, ReduceOp::kMin);
  const auto root = first.item<std::int64_t>();
  if (root == group.size()) return {};
  std::vector<std::int64_t> when(parameters, count);  // a gradient came, in which place
  for (std::size_t place = 0; place < arrivals.size(); ++place)
    when.at(arrivals[place]) = static_cast<std::int64_t>(place);
  at::Tensor message = at::tensor(when, at::kLong);
  group.broadcast(message, static_cast<int>(root));
  const auto* agreed = message.const_data_ptr<std::int64_t>();
  std::vector<std::size_t> order(parameters);
  std::iota(order.rbegin(), order.rend(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return agreed[a] < agreed[b]; });
  return order;
}

class Bucketed final : public DataParallel {
 public:
  Bucketed(TrainableParameters parameters, const Mesh& mesh, const DataParallelOptions& options)
      : parameters_(checked_and_placed(std::move(parameters), mesh)),
        context_(mesh, options, BucketRules(options, parameters_, mesh.grid()), parameters_),
        rules_(context_.rules),
        overlap_(options.overlap),
        check_parameters_(options.check_parameters),
        bucket_bytes_(options.bucket_bytes) {
    context_.written.watch(parameters_.frozen);
    reduces_ = context_.groups.summed.size() > 1;
    for (const NamedParameter* parameter : all_parameters(parameters_))
      reduces_ |= mesh.size(parameter->sync.summed) > 1;
    learns_order_ = options.learn_order && overlap_ && reduces_;
    refuse_early(parameters_);
    add_buckets(plan_buckets(parameters_, bucket_bytes_, options.first_bucket_bytes,
                             order_by_names(parameters_, options.order)));
  }
  ~Bucketed() override {
    for (NamedParameter& parameter : parameters_) {
      if (has_hooks()) torch::autograd::impl::post_acc_grad_hooks(parameter.tensor).reset();
      parameter.tensor.mutable_grad() = at::Tensor();  // the bucket's memory goes with the group
    }
  }
  Bucketed(const Bucketed&) = delete;
  Bucketed& operator=(const Bucketed&) = delete;

  void zero_gradients() override {
    // Given up in mid-backward: ranks may have come differently far with it, yet all issue the same
    // collectives.
    if (in_round_) finish_round();
    if (parameters_.check) parameters_.check();
    check_views();
    take_over_writes({});
    in_round_ = in_last_ = may_be_updated_ = false;
    completed_ = launched_ = 0;
    came_.clear();
    for (auto& flat : flats_) flat->zero();
    if (rules_.reduces_each_micro_batch)  // a backward whose gradients nobody has packed
      for (NamedParameter& parameter : parameters_) parameter.tensor.mutable_grad() = at::Tensor();
    for (NamedParameter& parameter : parameters_.frozen)
      if (parameter.tensor.requires_grad()) parameter.tensor.mutable_grad() = at::Tensor();  // about to join
    follow();  // what joins now adds up its micro-batches in the type of its bucket
  }

  void begin_backward(bool last) override {
    if (in_last_)
      refuse("begin_backward", "a backward after the one announced as the last", "finish_reduction() next",
             "Pass last = true only before the last micro-batch of a step");
    if (!reduces_) return;
    if (in_round_) finish_round();
    new_backward_ = true;
    in_last_ = last;
    // Without overlap nothing happens before finish_reduction(), unless each micro-batch is reduced.
    if (!rules_.reduces_each_micro_batch && !(last && overlap_)) return;
    in_round_ = true;
    completed_ = launched_ = 0;
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      const auto& slots = buckets_[b].plan.slots;
      arrivals_[b].slots.assign(slots.size(), false);
      arrivals_[b].missing = static_cast<std::size_t>(std::ranges::count_if(
          slots, [&](const Slot& slot) { return parameters_[slot.index].tensor.requires_grad(); }));
    }
  }

  void finish_reduction() override { finish_reduction_with(kNobody); }
  void finish_reduction_with(const Reduced& reduced) override {
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
      if (!rules_.reduces_each_micro_batch) {
        finish_round(reduced);
      } else {  // replicas add up once a step, not in every round
        finish_round();
        context_.waited.during([&] {
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
    if (reduces_ && rules_.parameters_shared) context_.meet();
    in_round_ = in_last_ = false;
    check_views();
    take_over_writes({});
    compare_writes();
    may_be_updated_ = true;
  }

  void publish_parameters() override {
    const bool updated = std::exchange(may_be_updated_, false);
    for (auto& flat : flats_) {
      updated ? flat->refuse_lost_writes() : flat->take_over_writes();
      flat->to_device();
    }
    if (!rules_.sharded) return;
    if (rules_.parameters_shared) return context_.meet();
    context_.waited.during([&] {
      for (auto& flat : flats_) flat->gather_parameters();
      for (auto& flat : flats_) flat->wait();
    });
  }

  bool needs_even_micro_batches() const override {
    return rules_.reduces_each_micro_batch || context_.cut_along_data;
  }
  std::vector<Bucket>& buckets() override {
    complete();  // for whoever looks in mid-step
    return buckets_;
  }
  std::vector<std::size_t> launch_order() override { return launch_order_; }
  const Mesh& mesh() const override { return context_.mesh; }
  std::int64_t bytes_sent() override { return context_.bytes_sent(flats_) - asking_bytes_; }
  double exposed_seconds() const override { return context_.waited.seconds(); }

  bool gradients_can_be_replayed() override {
    return !reduces_ && !rules_.reduces_each_micro_batch && !context_.offload && !buckets_.empty() &&
           std::ranges::all_of(buckets_, [](const Bucket& bucket) { return bucket.plan.device.is_cuda(); });
  }
  std::vector<std::uint64_t> gradient_places() const override {
    std::vector<std::uint64_t> words;
    for (const auto& flat : flats_) flat->slots()->append_places(words);
    return words;
  }
  void restore_places(const std::vector<std::uint64_t>& places) override {
    std::size_t word = 0;
    for (const auto& flat : flats_) flat->slots()->restore_places(places, word);
  }
  void arrive_again() override {
    for (const auto& flat : flats_) flat->slots()->arrive_again();
  }
  bool all_gradients_arrived() const override {
    return std::ranges::all_of(flats_, [](const auto& flat) { return flat->slots()->all_arrived(); });
  }

  void take_over_writes(const std::set<std::string>& excluded) override {
    for (auto& flat : flats_) flat->take_over_writes(excluded);
  }
  void compare_writes() override { context_.written.compare(parameters_); }

 protected:
  Frozen frozen() override { return {.buckets = {}, .tensors = parameters_.frozen}; }
  void forget_writes(const std::set<std::string>& names) override {
    for (auto& flat : flats_) flat->forget_writes(names);
  }

 private:
  struct Hook final : GradientPlace {
    Hook(Bucketed& owner_, std::size_t bucket_, std::size_t slot_)
        : owner(owner_), bucket(bucket_), slot(slot_) {}
    void operator()(const at::Tensor&) override { owner.on_gradient(bucket, slot); }
    Taken take(const at::Tensor&, at::ScalarType type) override {
      SlotGradients* slots = owner.flats_[bucket]->slots();
      return slots ? slots->take(slot, type) : Taken{};
    }
    Bucketed& owner;
    std::size_t bucket, slot;
  };
  // A bucket's gradients that have arrived in the backward that is to be reduced.
  struct Arrivals {
    std::vector<bool> slots;  // whose gradient is complete
    std::size_t missing = 0;
  };
  static inline const Reduced kNobody = [](const Bucket&, std::optional<double>) {};

  bool has_hooks() const { return !rules_.reduces_each_micro_batch || (reduces_ && overlap_); }

  // Everything that can refuse comes before the model is touched. Collective.
  void refuse_early(const std::vector<NamedParameter>& parameters) {
    for (const NamedParameter& parameter : parameters)
      if (torch::autograd::impl::post_acc_grad_hooks(parameter.tensor))
        refuse(named(parameter.name), "a post-accumulate-gradient hook already there", "none",
               "Destroy the other layout of this model first");
    if (context_.offload)
      for (const NamedParameter& parameter : parameters) check_can_be_offloaded(parameter.tensor.device());
    claims_.emplace_back(parameters);
    if (check_parameters_) check_same_parameters(parameters, mesh());
  }

  void add_buckets(std::vector<BucketPlan> plans) {
    const std::size_t first = buckets_.size();
    for (BucketPlan& plan : plans) {
      pad_for(plan, mesh().size(plan.sync.summed));
      flats_.push_back(std::make_unique<FlatBucket>(std::move(plan), parameters_, context_));
      launch_order_.push_back(buckets_.size());
      buckets_.push_back(flats_.back()->bucket());
    }
    if (rules_.reduces_each_micro_batch) {
      std::vector<PackBuffers::User> users;
      for (const auto& flat : flats_) users.push_back({flat.get()});
      context_.buffers.make(users);
    }
    arrivals_.resize(buckets_.size());
    for (std::size_t bucket = first; bucket < buckets_.size(); ++bucket)
      for (std::size_t s = 0; s < buckets_[bucket].plan.slots.size(); ++s) {
        at::Tensor& parameter = parameters_[buckets_[bucket].plan.slots[s].index].tensor;
        if (!flats_[bucket]->keeps_gradients()) parameter.mutable_grad() = at::Tensor();
        if (has_hooks())
          torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Hook>(*this, bucket, s));
      }
  }

  void complete() {  // from here on buckets can be read
    for (auto& flat : flats_) flat->complete();
  }

  // Follows parameters that were frozen or unfrozen, between steps or in the one that ends.
  void follow() {
    const auto unfrozen = follow_freezing(parameters_, buckets_, mesh());
    if (!unfrozen.empty()) join(unfrozen);
  }

  // Unfrozen parameters, with whatever gradient has come for them meanwhile.
  void join(const std::vector<NamedParameter>& unfrozen) {
    refuse_early(unfrozen);
    std::vector<BucketPlan> plans = plan_joined(parameters_, unfrozen, bucket_bytes_);
    std::vector<at::Tensor> came;
    for (const NamedParameter& parameter : parameters_) came.push_back(parameter.tensor.grad());
    const std::size_t first = buckets_.size();
    add_buckets(std::move(plans));
    for (std::size_t bucket = first; bucket < buckets_.size(); ++bucket)
      for (const Slot& slot : buckets_[bucket].plan.slots) {
        if (!came[slot.index].defined()) continue;
        if (flats_[bucket]->keeps_gradients())
          slot_view(flats_[bucket]->gradients(), slot).copy_(as_dense(came[slot.index]));
        else
          parameters_[slot.index].tensor.mutable_grad() = came[slot.index];  // to be packed
      }
  }

  void reduce_joined(std::size_t bucket) {
    FlatBucket& flat = *flats_[bucket];
    flat.launch();
    flat.wait();
    if (rules_.reduces_each_micro_batch) {
      flat.sum_over_replicas();
      flat.wait();
    }
    flat.to_host();
  }

  // A bucket is sent from here on where its last gradient came. All ranks follow the first that saw any.
  void learn_order() {
    const std::int64_t before = bytes_sent();
    Group same_list = ranks_of_same_parameters(mesh());
    const auto order = agree_on_order(came_, parameters_.size(), same_list);
    asking_bytes_ += bytes_sent() - before;
    if (order.empty()) return;  // no rank had a gradient: the next step may tell
    learns_order_ = false;
    came_ = {};
    std::vector<std::size_t> place(parameters_.size()), complete(buckets_.size());
    for (std::size_t i = 0; i < order.size(); ++i) place[order[i]] = i;
    for (std::size_t b = 0; b < buckets_.size(); ++b)
      for (const Slot& slot : buckets_[b].plan.slots) complete[b] = std::max(complete[b], place[slot.index]);
    std::ranges::sort(launch_order_, {}, [&](std::size_t bucket) { return complete[bucket]; });
  }

  void on_gradient(std::size_t bucket, std::size_t slot) {
    const Slot& place = buckets_[bucket].plan.slots[slot];
    if (SlotGradients* slots = flats_[bucket]->slots()) slots->arrived(slot);
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

  void launch_next() {
    // A buffer that buckets take turns with must be free again.
    while (launched_ - completed_ >= context_.most_in_flight()) flats_[launch_order_[completed_++]]->wait();
    flats_[launch_order_[launched_]]->launch();
    ++launched_;
  }

  // A bucket that is not launched yet misses a gradient: an unused parameter, or no micro-batch at all.
  // It takes part with zeros.
  void finish_round(const Reduced& reduced = kNobody) {
    // Nothing is computed meanwhile, and where the others are there already it is done when it is launched.
    context_.waited.during([&] {
      while (launched_ < buckets_.size()) launch_next();
    });
    // Handed over in the order of buckets(): what adds up by bucket has the same bits whatever was sent
    // first.
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

  // A view can be lost silently where no hook looks: an unused parameter, one rank alone, a model that was
  // moved.
  void check_views() const {
    for (const auto& flat : flats_) {
      if (flat->slots()) flat->slots()->check();
      flat->check_in_place();
    }
  }

  TrainableParameters parameters_;
  std::vector<Claim> claims_{};
  BucketContext context_;
  const BucketRules& rules_;
  bool overlap_, check_parameters_;
  bool reduces_ = false;  // whether ranks have anything to sum
  std::int64_t bucket_bytes_;
  bool learns_order_ = false;        // in which gradients come
  std::vector<std::size_t> came_{};  // parameters, in that order, in the last backward that had any
  bool new_backward_ = false;        // none of its gradients has come
  std::int64_t asking_bytes_ = 0;    // once, to agree on that order
  std::vector<Bucket> buckets_{};
  std::vector<std::unique_ptr<FlatBucket>> flats_{};  // per bucket
  std::vector<Arrivals> arrivals_{};                  // per bucket
  bool in_round_ = false;  // a backward has begun whose gradients are to be reduced
  bool in_last_ = false;
  bool may_be_updated_ = false;  // between finish_reduction() and publish_parameters()
  // Launched strictly in this order, whatever order gradients arrive in, so that all ranks issue the same
  // sequence of collectives: its places [0, completed_) are reduced, [completed_, launched_) under way.
  std::vector<std::size_t> launch_order_{};
  std::size_t completed_ = 0, launched_ = 0;
};

}  // namespace

std::unique_ptr<DataParallel> bucketed(TrainableParameters parameters, const Mesh& mesh,
                                       DataParallelOptions options) {
  return std::make_unique<Bucketed>(std::move(parameters), mesh, options);
}

}  // namespace isograd
