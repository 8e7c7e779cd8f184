// Gradients as views of buckets in shared memory, reduced inside backward as soon as they are complete.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "isograd/data_parallel.hpp"
#include "isograd/error.hpp"
#include "layout/flat.hpp"
#include "parallel/data/same_parameters.hpp"

namespace isograd {
namespace {

class Bucketed final : public DataParallel {
 public:
  Bucketed(std::vector<NamedParameter> parameters, Group group, const DataParallelOptions& options);
  ~Bucketed() override;
  Bucketed(const Bucketed&) = delete;
  Bucketed& operator=(const Bucketed&) = delete;

  void zero_gradients() override;
  void begin_backward(bool last) override;
  void finish_reduction() override;
  std::vector<Bucket>& buckets() override { return buckets_; }
  Group& group() override { return group_; }

 private:
  struct Hook;

  // What is known of a bucket's gradients in the last backward of a step.
  struct Arrivals {
    std::vector<bool> slots;  // whose gradient is complete
    std::size_t missing = 0;
    Pending pending;
  };

  void on_gradient(std::size_t bucket, std::size_t slot, const at::Tensor& parameter);
  void launch_next();
  void check_views() const;
  bool reduces() const { return group_.size() > 1; }

  std::vector<NamedParameter> parameters_;
  Group group_;
  bool overlap_;
  std::vector<Bucket> buckets_;
  std::vector<Arrivals> arrivals_;  // per bucket
  bool in_last_backward_ = false;
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
         "backward "
         "without create_graph (it replaces them)");
}

Bucketed::Bucketed(std::vector<NamedParameter> parameters, Group group, const DataParallelOptions& options)
    : parameters_(std::move(parameters)), group_(std::move(group)), overlap_(options.overlap) {
  // Everything that can refuse comes before the model is touched.
  for (const NamedParameter& parameter : parameters_)
    if (torch::autograd::impl::post_acc_grad_hooks(parameter.tensor))
      refuse(parameter.name, "a post-accumulate-gradient hook already there", "none",
             "Destroy the other layout of this model first");
  if (options.check_parameters) check_same_parameters(parameters_, group_);
  auto plans = plan_buckets(parameters_, options.bucket_bytes);
  for (BucketPlan& plan : plans) {
    at::Tensor gradients = group_.empty_shared(plan.numel, gradient_type(plan.dtype));
    buckets_.push_back(make_bucket(std::move(plan), parameters_, gradients, group_.rank(), group_.size()));
  }
  arrivals_.resize(buckets_.size());
  for (std::size_t b = 0; b < buckets_.size(); ++b)
    for (std::size_t s = 0; s < buckets_[b].plan.slots.size(); ++s) {
      const Slot& slot = buckets_[b].plan.slots[s];
      at::Tensor& parameter = parameters_[slot.index].tensor;
      parameter.mutable_grad() = slot_view(buckets_[b].gradients, slot);
      if (reduces() && overlap_)
        torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Hook>(*this, b, s));
    }
}

Bucketed::~Bucketed() {
  for (NamedParameter& parameter : parameters_) {
    if (reduces() && overlap_) torch::autograd::impl::post_acc_grad_hooks(parameter.tensor).reset();
    parameter.tensor.mutable_grad() = at::Tensor();  // the bucket's memory goes with the group
  }
}

void Bucketed::zero_gradients() {
  ISOGRAD_INVARIANT(launched_ == completed_,
                    fmt::format("{} buckets still being reduced", launched_ - completed_));
  check_views();
  in_last_backward_ = false;
  completed_ = launched_ = 0;
  for (Bucket& bucket : buckets_) bucket.gradients.zero_();
}

void Bucketed::begin_backward(bool last) {
  if (in_last_backward_)
    throw ConfigError({.where = "begin_backward",
                       .found = "a backward after the one announced as the last",
                       .expected = "finish_reduction() next",
                       .action = "Pass last = true only before the last micro-batch of a step"});
  if (!last || !reduces() || !overlap_) return;
  in_last_backward_ = true;
  completed_ = launched_ = 0;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    arrivals_[b].missing = buckets_[b].plan.slots.size();
    arrivals_[b].slots.assign(arrivals_[b].missing, false);
  }
}

void Bucketed::on_gradient(std::size_t bucket, std::size_t slot, const at::Tensor& parameter) {
  const Slot& place = buckets_[bucket].plan.slots[slot];
  if (!is_slot_view(parameter.grad(), buckets_[bucket].gradients, place)) refuse_gradient(place.name);
  if (!in_last_backward_) return;
  Arrivals& arrived = arrivals_[bucket];
  if (arrived.slots[slot])
    refuse(place.name, "a second gradient in the backward announced as the last",
           "one backward after begin_backward(true)", "Add the losses up and call backward once");
  arrived.slots[slot] = true;
  --arrived.missing;
  while (launched_ < buckets_.size() && arrivals_[launched_].missing == 0) launch_next();
  while (completed_ < launched_ && arrivals_[completed_].pending.progress()) ++completed_;
}

void Bucketed::launch_next() {
  Bucket& bucket = buckets_[launched_];
  arrivals_[launched_].pending = group_.all_reduce_async(bucket.gradients);
  ++launched_;
}

void Bucketed::finish_reduction() {
  // What is not launched yet has a gradient that did not come: an unused parameter, or no micro-batch at all.
  // It takes part with zeros.
  if (reduces()) {
    if (!in_last_backward_) completed_ = launched_ = 0;
    while (launched_ < buckets_.size()) launch_next();
    for (; completed_ < launched_; ++completed_) arrivals_[completed_].pending.wait();
  }
  in_last_backward_ = false;
  check_views();
}

// A view can be lost silently where no hook looks: an unused parameter, one rank alone, a model that was
// moved.
void Bucketed::check_views() const {
  for (const Bucket& bucket : buckets_)
    for (const Slot& slot : bucket.plan.slots) {
      const at::Tensor& parameter = parameters_[slot.index].tensor;
      if (!is_slot_view(parameter.grad(), bucket.gradients, slot)) refuse_gradient(slot.name);
      if (!is_slot_view(parameter, bucket.parameters, slot))
        refuse(slot.name, "values that no longer live in the layout's flat buffer",
               "the tensor left in place",
               "Convert, move and load the model before making the layout; afterwards copy values in place");
    }
}

}  // namespace

std::unique_ptr<DataParallel> bucketed(std::vector<NamedParameter> parameters, Group group,
                                       DataParallelOptions options) {
  return std::make_unique<Bucketed>(std::move(parameters), std::move(group), options);
}

}  // namespace isograd
