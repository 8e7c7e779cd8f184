// The naive twin: ordinary gradients, added up after each backward, one all-reduce per parameter.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include "base/refuse.hpp"
#include "isograd/data_parallel.hpp"
#include "layout/flat.hpp"
#include "parallel/data/flat_parameters.hpp"

namespace isograd {
namespace {

class Naive final : public DataParallel {
 public:
  Naive(TrainableParameters parameters, const Mesh& mesh, const DataParallelOptions& options)
      : parameters_(std::move(parameters)), mesh_(mesh), options_(options), written_(mesh) {
    if (options.stage != 0 || options.share_parameters)
      refuse("naive", fmt::format("stage {}, share_parameters {}", options.stage, options.share_parameters),
             "stage 0 with parameters of each rank's own",
             "Use bucketed() for sharded state or shared parameters");
    if (parameters_.check) parameters_.check();
    place_parameters(parameters_, mesh_.grid(), mesh_.rank());
    written_.watch(parameters_.frozen);
    refuse_early(parameters_);
    cut_along_data_ = any_cut_along_data(parameters_, mesh_.grid());
    add_buckets(plan_buckets(parameters_, options.bucket_bytes));
  }

  void zero_gradients() override {
    for (const HeldBucket& held : held_) held.gradients_on_device().zero_();
    if (parameters_.check) parameters_.check();
    for (NamedParameter& parameter : parameters_) parameter.tensor.mutable_grad() = at::Tensor();
    for (NamedParameter& parameter : parameters_.frozen)
      if (parameter.tensor.requires_grad()) parameter.tensor.mutable_grad() = at::Tensor();  // about to join
    follow();  // what joins now adds up its micro-batches in the type of its bucket
    take_over_writes({});
    may_be_updated_ = false;
  }

  void begin_backward(bool) override { collect(); }

  void finish_reduction() override {
    const std::size_t known = buckets_.size();
    reduce_from(0);
    follow();
    if (buckets_.size() > known) reduce_from(known);
    take_over_writes({});
    compare_writes();
    may_be_updated_ = true;
  }

  void publish_parameters() override {
    if (!std::exchange(may_be_updated_, false)) take_over_writes({});
    for (const HeldBucket& held : held_) {
      held.refuse_lost_writes();
      held.to_device();
    }
  }

  bool needs_even_micro_batches() const override { return cut_along_data_; }
  std::vector<Bucket>& buckets() override { return buckets_; }
  const Mesh& mesh() const override { return mesh_; }
  std::int64_t bytes_sent() override {
    std::vector<Group> groups;
    for (const Bucket& bucket : buckets_) groups.push_back(mesh_.along(bucket.plan.sync.summed));
    return isograd::bytes_sent(groups);
  }
  double exposed_seconds() const override { return waited_.seconds(); }

  void take_over_writes(const std::set<std::string>& excluded) override {
    for (const HeldBucket& held : held_) held.check_in_place();
    for (HeldBucket& held : held_) held.take_over_writes(excluded);
  }
  void compare_writes() override { written_.compare(parameters_); }

 protected:
  Frozen frozen() override { return {.buckets = {}, .tensors = parameters_.frozen}; }
  void forget_writes(const std::set<std::string>& names) override {
    for (HeldBucket& held : held_) held.forget_writes(names);
  }

 private:
  void refuse_early(const std::vector<NamedParameter>& parameters) {
    if (options_.offload)
      for (const NamedParameter& parameter : parameters) check_can_be_offloaded(parameter.tensor.device());
    claims_.emplace_back(parameters);
    if (options_.check_parameters) check_same_parameters(parameters, mesh_);
  }

  void add_buckets(std::vector<BucketPlan> plans) {
    for (BucketPlan& plan : plans) {
      const at::ScalarType type = gradient_type(plan.dtype, options_.fp32_gradients);
      at::Tensor gradients = at::zeros({plan.numel}, at::TensorOptions(type).device(plan.device));
      const AxisSet copies = plan.sync.copies;
      held_.emplace_back(
          written_,
          make_bucket(std::move(plan), parameters_, gradients, mesh_.place(copies), mesh_.size(copies)),
          parameters_, options_.offload);
      buckets_.push_back(held_.back().bucket());
    }
  }

  void reduce_from(std::size_t first) {
    collect();
    for (std::size_t b = first; b < buckets_.size(); ++b) {
      waited_.during([&] {
        Group summed = mesh_.along(buckets_[b].plan.sync.summed);
        if (summed.size() > 1)
          for (const Slot& slot : buckets_[b].plan.slots)
            if (slot.numel > 0) summed.all_reduce(slot_view(held_[b].gradients_on_device(), slot));
      });
      held_[b].to_host();
    }
  }

  // Follows freezing. An unfrozen parameter joins in a bucket of its own.
  void follow() {
    const auto unfrozen = follow_freezing(parameters_, buckets_, mesh_);
    if (unfrozen.empty()) return;
    refuse_early(unfrozen);
    add_buckets(plan_joined(parameters_, unfrozen, options_.bucket_bytes));
  }

  // Moves what the last backward left in .grad to the buckets, where micro-batches add up in their type.
  void collect() {
    at::NoGradGuard no_grad;
    for (std::size_t b = 0; b < buckets_.size(); ++b)
      for (const Slot& slot : buckets_[b].plan.slots) {
        at::Tensor& gradient = parameters_[slot.index].tensor.mutable_grad();
        if (!gradient.defined()) continue;  // unused in this backward
        slot_view(held_[b].gradients_on_device(), slot) += as_dense(gradient.detach());
        gradient = at::Tensor();
      }
  }

  TrainableParameters parameters_;
  std::vector<Claim> claims_;
  Mesh mesh_;
  DataParallelOptions options_;
  std::vector<Bucket> buckets_;
  std::vector<HeldBucket> held_;  // per bucket
  bool may_be_updated_ = false;   // between finish_reduction() and publish_parameters()
  WrittenValues written_;
  WaitClock waited_;
  bool cut_along_data_ = false;
};

}  // namespace

std::unique_ptr<DataParallel> naive(TrainableParameters parameters, const Mesh& mesh,
                                    DataParallelOptions options) {
  return std::make_unique<Naive>(std::move(parameters), mesh, options);
}

}  // namespace isograd
