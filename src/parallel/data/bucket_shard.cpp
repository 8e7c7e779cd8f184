#include "parallel/data/bucket_shard.hpp"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "base/refuse.hpp"
#include "isograd/error.hpp"
#include "layout/flat.hpp"

namespace isograd {
namespace {

at::Tensor in_host_memory(const at::Tensor& flat) {
  const at::Tensor copy = flat.to(at::kCPU);
  return flat.is_cuda() ? copy.pin_memory() : copy;
}

}  // namespace

void check_can_be_offloaded(at::Device parameters) {
  if (!parameters.is_cpu()) return;
  refuse("offload", "parameters on the CPU",
         "parameters on another device: offload moves states and gradients to host memory, where "
         "they already are",
         "Leave offload out, or move the model to a GPU first");
}

void refuse_write_to_shared_parameters(const std::string& parameter, int ranks) {
  refuse(fmt::format("parameter '{}'", parameter),
         fmt::format("an in-place operation on the one copy that {} ranks share, to which each rank's would "
                     "be applied",
                     ranks),
         "values written by the layout",
         "Call write() of the layout on every rank, or set share_parameters to off");
}

at::Tensor as_dense(const at::Tensor& gradient) {
  return gradient.layout() == at::kStrided ? gradient : gradient.to_dense();
}

BucketShard::BucketShard(Bucket& bucket, bool offload, bool gradients_on_device)
    : parameters_(bucket.parameters), gradients_(bucket.gradients) {
  if (!offload) return;
  const at::NoGradGuard no_grad;
  const bool own_master = bucket.master.scalar_type() != bucket.parameters.scalar_type();
  bucket.parameters = host_parameters_ = in_host_memory(parameters_);
  bucket.master = own_master ? bucket.master.to(at::kCPU) : bucket.parameters;
  bucket.gradients = host_gradients_ = in_host_memory(gradients_);
  if (!gradients_on_device) gradients_ = at::Tensor();
}

bool BucketShard::keeps_copies(const Bucket& bucket) const {
  return host_parameters_.defined() || bucket.master.scalar_type() != bucket.parameters.scalar_type();
}

void BucketShard::refuse_lost_writes(const Bucket& bucket, const Writes& writes) const {
  if (!keeps_copies(bucket)) return;
  for (std::size_t place : writes.written())
    refuse(fmt::format("parameter '{}'", bucket.plan.slots[place].name),
           "values written between finish_reduction() and publish_parameters()",
           "none: the update has replaced them by those of its own copy",
           "Write values after publish_parameters(), before the next step");
}

void BucketShard::take_over(const Bucket& bucket, const Slot& slot) const {
  const Range own = within(bucket.held, slot);
  if (own.size() == 0 || !keeps_copies(bucket)) return;
  const at::NoGradGuard no_grad;
  const auto part = [&](const at::Tensor& flat) {
    return flat.narrow(0, own.begin - bucket.held.begin, own.size());
  };
  const at::Tensor written = part(parameters_);
  if (host_parameters_.defined()) part(host_parameters_).copy_(written);
  if (bucket.master.scalar_type() == bucket.parameters.scalar_type()) return;
  const at::Tensor master = part(bucket.master), values = written.to(master.options());
  master.copy_(
      at::where(master.to(written.scalar_type()).to(master.scalar_type()).eq(values), master, values));
}

void BucketShard::gradients_to_host() const {
  const at::NoGradGuard no_grad;
  if (host_gradients_.defined() && gradients_.defined()) host_gradients_.copy_(gradients_);
}

void BucketShard::parameters_to_device() const {
  const at::NoGradGuard no_grad;
  if (host_parameters_.defined()) parameters_.copy_(host_parameters_);
}

}  // namespace isograd
