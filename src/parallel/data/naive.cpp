// The naive twin: ordinary gradients, added up after each backward, one all-reduce per parameter.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include "isograd/data_parallel.hpp"
#include "isograd/error.hpp"
#include "layout/flat.hpp"
#include "parallel/data/held_part.hpp"
#include "parallel/data/same_parameters.hpp"
#include "parallel/data/wait_clock.hpp"

namespace isograd {
namespace {

class Naive final : public DataParallel {
 public:
  Naive(std::vector<NamedParameter> parameters, DataGroups groups, const DataParallelOptions& options)
      : parameters_(std::move(parameters)), group_(std::move(groups.all)) {
    if (options.stage != 0 || options.share_parameters)
      throw ConfigError(
          {.where = "naive",
           .found = fmt::format("stage {}, share_parameters {}", options.stage, options.share_parameters),
           .expected = "stage 0 with parameters of each rank's own",
           .action = "Use bucketed() for sharded state or shared parameters"});
    if (options.offload)
      for (const NamedParameter& parameter : parameters_) check_can_be_offloaded(parameter.tensor.device());
    if (options.check_parameters) check_same_parameters(parameters_, group_);
    for (BucketPlan& plan : plan_buckets(parameters_, options.bucket_bytes)) {
      const at::ScalarType type = gradient_type(plan.dtype, options.fp32_gradients);
      at::Tensor gradients = at::zeros({plan.numel}, at::TensorOptions(type).device(plan.device));
      buckets_.push_back(make_bucket(std::move(plan), parameters_, gradients, group_.rank(), group_.size()));
      held_.emplace_back(buckets_.back(), options.offload, /*gradients_on_device=*/true);
    }
  }

  void zero_gradients() override {
    for (const HeldPart& held : held_) held.gradients().zero_();
    for (NamedParameter& parameter : parameters_) parameter.tensor.mutable_grad() = at::Tensor();
  }

  void begin_backward(bool) override { collect(); }

  void finish_reduction() override {
    collect();
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      waited_.during([&] {
        if (group_.size() > 1)
          for (const Slot& slot : buckets_[b].plan.slots)
            if (slot.numel > 0) group_.all_reduce(slot_view(held_[b].gradients(), slot));
      });
      held_[b].gradients_to_host();
    }
  }

  void publish_parameters() override {
    for (const HeldPart& held : held_) held.parameters_to_device();
  }

  std::vector<Bucket>& buckets() override { return buckets_; }
  Group& group() override { return group_; }
  double exposed_seconds() const override { return waited_.seconds(); }

 private:
  // Moves what the last backward left in .grad to the buckets, where micro-batches add up in their type.
  void collect() {
    at::NoGradGuard no_grad;
    for (std::size_t b = 0; b < buckets_.size(); ++b)
      for (const Slot& slot : buckets_[b].plan.slots) {
        at::Tensor& gradient = parameters_[slot.index].tensor.mutable_grad();
        if (!gradient.defined()) continue;  // unused in this backward
        slot_view(held_[b].gradients(), slot) += gradient.detach();
        gradient = at::Tensor();
      }
  }

  std::vector<NamedParameter> parameters_;
  Group group_;
  std::vector<Bucket> buckets_;
  std::vector<HeldPart> held_;  // per bucket
  WaitClock waited_;
};

}  // namespace

std::unique_ptr<DataParallel> naive(std::vector<NamedParameter> parameters, DataGroups groups,
                                    DataParallelOptions options) {
  return std::make_unique<Naive>(std::move(parameters), std::move(groups), options);
}

}  // namespace isograd
