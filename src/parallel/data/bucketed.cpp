// Gradients in buckets of shared memory, reduced inside backward as soon as they are complete.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "isograd/data_parallel.hpp"
#include "isograd/error.hpp"
#include "layout/flat.hpp"
#include "parallel/data/bucket_order.hpp"
#include "parallel/data/flat_bucket.hpp"
#include "parallel/data/same_parameters.hpp"

namespace isograd {
namespace {

class Bucketed final : public DataParallel {
 public:
  Bucketed(std::vector<NamedParameter> parameters, DataGroups groups, const DataParallelOptions& options);
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
  bool takes_every_round() const override { return policy_.every_round; }
  std::vector<Bucket>& buckets() override { return buckets_; }
  void keep_buckets() override { watches_order_ = false; }
  Group& group() override { return policy_.groups.all; }
  Group& shard_group() override { return policy_.groups.shard; }
  std::int64_t bytes_sent() override {
    return isograd::bytes_sent(policy_.groups.all, policy_.groups.shard, policy_.groups.replicate) -
           rebuilding_bytes_;
  }
  double exposed_seconds() const override { return policy_.waited.seconds(); }

 private:
  struct Hook;
  // What is known of a bucket's gradients in the backward that is to be reduced.
  struct Arrivals {
    std::vector<bool> slots;  // whose gradient is complete
    std::size_t missing = 0;
  };

  void build(const std::vector<std::size_t>& order);
  void rebuild();
  void connect();
  void disconnect();
  void on_gradient(std::size_t bucket, std::size_t slot, const at::Tensor& parameter);
  void launch_next();
  void finish_round(const Reduced& reduced = [](const Bucket&, std::optional<double>) {});
  void check_views() const;
  bool reduces() const { return policy_.groups.all.size() > 1; }

  std::vector<NamedParameter> parameters_;
  BucketPolicy policy_;
  bool overlap_;
  std::int64_t bucket_bytes_, first_bucket_bytes_;
  bool watches_order_;  // in which gradients come, until buckets are made anew or an update has been made
  std::int64_t rebuilding_bytes_ = 0;
  std::vector<std::size_t> came_{};  // parameters, in that order, in the last backward that had any
  bool new_backward_ = false;        // none of its gradients has come
  std::vector<Bucket> buckets_;
  std::vector<std::unique_ptr<FlatBucket>> flats_;  // per bucket
  std::vector<Arrivals> arrivals_;                  // per bucket
  bool in_round_ = false;                           // a backward has begun whose gradients are to be reduced
  bool in_last_ = false;
  // Buckets [0, completed_) are reduced, [completed_, launched_) under way. Launched strictly in the plan's
  // order, whatever order gradients arrive in, so that all ranks issue the same sequence of collectives.
  std::size_t completed_ = 0, launched_ = 0;
};

struct Bucketed::Hook final : torch::autograd::PostAccumulateGradHook {
  Hook(Bucketed& owner_, std::size_t bucket_, std::size_t slot_)
      : owner(owner_), bucket(bucket_), slot(slot_) {}
  void operator()(const at::Tensor& parameter) override { owner.on_gradient(bucket, slot, parameter); }
  Bucketed& owner;
  std::size_t bucket, slot;
};

[[noreturn]] void refuse(const std::string& name, std::string found, std::string expected,
                         std::string action) {
  throw ConfigError({.where = fmt::format("parameter '{}'", name),
                     .found = std::move(found),
                     .expected = std::move(expected),
                     .action = std::move(action)});
}

[[noreturn]] void refuse_gradient(const std::string& name) {
  refuse(name, "a .grad that is no longer the view of its bucket", "the gradient left in place",
         "Call zero_gradients() of the layout, not zero_grad() of the module (it drops gradients), and run "
         "backward without create_graph (it replaces them)");
}

Bucketed::Bucketed(std::vector<NamedParameter> parameters, DataGroups groups,
                   const DataParallelOptions& options)
    : parameters_(std::move(parameters)),
      policy_(std::move(groups), options),
      overlap_(options.overlap),
      bucket_bytes_(options.bucket_bytes),
      first_bucket_bytes_(options.first_bucket_bytes),
      watches_order_(options.rebuild_buckets && options.order.empty() && overlap_ && reduces()) {
  // Everything that can refuse comes before the model is touched.
  for (const NamedParameter& parameter : parameters_)
    if (torch::autograd::impl::post_acc_grad_hooks(parameter.tensor))
      refuse(parameter.name, "a post-accumulate-gradient hook already there", "none",
             "Destroy the other layout of this model first");
  if (options.offload)
    for (const NamedParameter& parameter : parameters_) check_can_be_offloaded(parameter.tensor.device());
  if (options.check_parameters) check_same_parameters(parameters_, policy_.groups.all);
  build(order_by_names(parameters_, options.order));
  connect();
}

void Bucketed::build(const std::vector<std::size_t>& order) {
  auto plans = plan_buckets(parameters_, bucket_bytes_, first_bucket_bytes_, order);
  flats_.clear();
  buckets_.clear();
  for (BucketPlan& plan : plans) {
    pad_for(plan, policy_.groups.all.size());
    flats_.push_back(std::make_unique<FlatBucket>(std::move(plan), parameters_, policy_));
    buckets_.push_back(flats_.back()->bucket());
  }
  policy_.make_transient(buckets_);
  arrivals_.assign(buckets_.size(), {});
}

void Bucketed::connect() {
  for (std::size_t b = 0; b < buckets_.size(); ++b)
    for (std::size_t s = 0; s < buckets_[b].plan.slots.size(); ++s) {
      const Slot& slot = buckets_[b].plan.slots[s];
      at::Tensor& parameter = parameters_[slot.index].tensor;
      parameter.mutable_grad() =
          flats_[b]->keeps_gradients() ? slot_view(flats_[b]->gradients(), slot) : at::Tensor();
      if (reduces() && overlap_)
        torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Hook>(*this, b, s));
    }
}

void Bucketed::disconnect() {
  for (NamedParameter& parameter : parameters_) {
    if (reduces() && overlap_) torch::autograd::impl::post_acc_grad_hooks(parameter.tensor).reset();
    parameter.tensor.mutable_grad() = at::Tensor();  // the bucket's memory goes with the group
  }
}

Bucketed::~Bucketed() {
  disconnect();
}

// Between the sum and its first use. Old and new memory exist side by side for a moment.
void Bucketed::rebuild() {
  const auto order = agree_on_order(came_, parameters_.size(), policy_.groups.all);
  if (order.empty()) return;  // no rank had a gradient: the next step may tell
  watches_order_ = false;
  came_ = {};
  std::vector<std::string> names;
  for (std::size_t index : order) names.push_back(parameters_[index].name);
  if (names == bucket_order()) return;
  std::map<std::size_t, at::Tensor> sums;  // whole, by parameter
  for (const Bucket& bucket : buckets_) {
    const at::Tensor whole = gather_whole(bucket, bucket.gradients);
    for (const Slot& slot : bucket.plan.slots) sums[slot.index] = slot_view(whole, slot);
  }
  const auto old_flats = std::move(flats_);  // the sums may be views of them
  const auto old_buckets = std::move(buckets_);
  disconnect();
  build(order);
  for (const Bucket& bucket : buckets_)
    for (const Slot& slot : bucket.plan.slots)
      write_slot(bucket.gradients, bucket.held, slot, sums.at(slot.index));
  connect();
  // Nobody gives back what another still reads.
  policy_.groups.all.barrier();
}

void Bucketed::zero_gradients() {
  // Given up in mid-backward: ranks may have come differently far with it, yet all issue the same
  // collectives.
  if (in_round_) finish_round();
  check_views();
  in_round_ = in_last_ = false;
  completed_ = launched_ = 0;
  came_.clear();
  for (auto& flat : flats_) flat->zero();
  if (policy_.every_round)  // a backward whose gradients nobody has packed
    for (NamedParameter& parameter : parameters_) parameter.tensor.mutable_grad() = at::Tensor();
}

void Bucketed::begin_backward(bool last) {
  if (in_last_)
    throw ConfigError({.where = "begin_backward",
                       .found = "a backward after the one announced as the last",
                       .expected = "finish_reduction() next",
                       .action = "Pass last = true only before the last micro-batch of a step"});
  if (!reduces()) return;
  if (in_round_) finish_round();
  new_backward_ = true;
  in_last_ = last;
  // Without overlap nothing happens before finish_reduction(), unless each micro-batch is reduced.
  if (!policy_.every_round && !(last && overlap_)) return;
  in_round_ = true;
  completed_ = launched_ = 0;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    arrivals_[b].missing = buckets_[b].plan.slots.size();
    arrivals_[b].slots.assign(arrivals_[b].missing, false);
  }
}

void Bucketed::on_gradient(std::size_t bucket, std::size_t slot, const at::Tensor& parameter) {
  const Slot& place = buckets_[bucket].plan.slots[slot];
  if (flats_[bucket]->keeps_gradients() &&
      !is_slot_view(parameter.grad(), flats_[bucket]->gradients(), place))
    refuse_gradient(place.name);
  if (watches_order_) {
    if (std::exchange(new_backward_, false)) came_.clear();
    came_.push_back(place.index);
  }
  if (!in_round_) return;
  Arrivals& arrived = arrivals_[bucket];
  if (arrived.slots[slot])
    refuse(place.name, "a second gradient in a backward whose gradients are being reduced",
           "one backward after begin_backward()", "Add the losses up and call backward once");
  arrived.slots[slot] = true;
  --arrived.missing;
  while (launched_ < buckets_.size() && arrivals_[launched_].missing == 0) launch_next();
  while (completed_ < launched_ && flats_[completed_]->progress()) ++completed_;
}

void Bucketed::launch_next() {
  // A buffer that buckets take turns with must be free again.
  while (launched_ - completed_ >= policy_.most_in_flight()) flats_[completed_++]->wait();
  flats_[launched_]->launch(launched_, parameters_);
  ++launched_;
}

// What is not launched yet has a gradient that did not come: an unused parameter, or no micro-batch at all.
// It takes part with zeros.
void Bucketed::finish_round(const Reduced& reduced) {
  // Nothing is computed meanwhile, and where the others are there already it is done when it is launched.
  policy_.waited.during([&] {
    while (launched_ < buckets_.size()) launch_next();
  });
  for (std::size_t b = 0; b < launched_; ++b) {
    if (b == completed_) flats_[completed_++]->wait();
    flats_[b]->to_host();
    reduced(buckets_[b], flats_[b]->squares());
  }
  in_round_ = false;
}

void Bucketed::finish_reduction_with(const Reduced& reduced) {
  const auto all_reduced = [&] {
    for (const Bucket& bucket : buckets_) reduced(bucket, std::nullopt);
  };
  if (reduces()) {
    if (!in_round_) completed_ = launched_ = 0;
    in_last_ = true;
    const bool rebuilds = watches_order_;
    if (policy_.every_round || rebuilds) {  // replicas add up once a step, not in every round
      finish_round();
      if (policy_.every_round) {
        policy_.waited.during([&] {
          for (auto& flat : flats_) flat->sum_over_replicas();
          for (auto& flat : flats_) flat->wait();
        });
      }
      if (rebuilds) {
        const std::int64_t before = bytes_sent();
        rebuild();
        rebuilding_bytes_ += bytes_sent() - before;
      }
      all_reduced();
    } else {
      finish_round(reduced);
    }
    // Nobody reads parameters any more, so that their owners may write to them.
    if (policy_.one_copy) policy_.meet();
  } else {
    for (auto& flat : flats_) flat->to_host();
    all_reduced();
  }
  in_round_ = in_last_ = false;
  check_views();
}

void Bucketed::publish_parameters() {
  keep_buckets();  // the optimizer's state and the masters belong to them now
  for (auto& flat : flats_) flat->to_device();
  if (policy_.shards() == 1) return;
  if (policy_.one_copy) return policy_.meet();
  policy_.waited.during([&] {
    for (auto& flat : flats_) flat->gather_parameters();
    for (auto& flat : flats_) flat->wait();
  });
}

// A view can be lost silently where no hook looks: an unused parameter, one rank alone, a model that was
// moved.
void Bucketed::check_views() const {
  for (std::size_t b = 0; b < buckets_.size(); ++b)
    for (const Slot& slot : buckets_[b].plan.slots) {
      const at::Tensor& parameter = parameters_[slot.index].tensor;
      if (flats_[b]->keeps_gradients() && !is_slot_view(parameter.grad(), flats_[b]->gradients(), slot))
        refuse_gradient(slot.name);
      if (!is_slot_view(parameter, flats_[b]->parameters(), slot))
        refuse(slot.name, "values that no longer live in the layout's flat buffer",
               "the tensor left in place",
               "Convert, move and load the model before making the layout; afterwards copy values in place");
    }
}

}  // namespace

std::unique_ptr<DataParallel> bucketed(std::vector<NamedParameter> parameters, DataGroups groups,
                                       DataParallelOptions options) {
  return std::make_unique<Bucketed>(std::move(parameters), std::move(groups), options);
}

}  // namespace isograd
