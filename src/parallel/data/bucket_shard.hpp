// A rank's part of a bucket, on the parameters' device. The bucket's own tensors are the same ones, or,
// with offload, copies in host memory.
#pragma once

#include "isograd/parameters.hpp"
#include "layout/storage.hpp"

namespace isograd {

// ConfigError where parameters are in host memory already.
void check_can_be_offloaded(at::Device parameters);

// One rank has written in place to a parameter of which `ranks` keep one copy. ConfigError.
[[noreturn]] void refuse_write_to_shared_parameters(const std::string& parameter, int ranks);

// Embeddings can make sparse gradients; buffers are dense.
at::Tensor as_dense(const at::Tensor& gradient);

class BucketShard {
 public:
  BucketShard() = default;
  // With `offload` the bucket gets copies in host memory, pinned, so that norms and updates are the CPU's;
  // gradients also stay on the device where backward needs them there.
  BucketShard(Bucket& bucket, bool offload, bool gradients_on_device);

  const at::Tensor& parameters() const { return parameters_; }  // what ranks gather
  // Where gradients are reduced. Undefined: rounds add up in host memory alone.
  const at::Tensor& gradients() const { return gradients_; }

  // Somebody has written to the slot's part of parameters(): copies of it in another type or place
  // take the values on. A master that rounds to them stays as it is.
  void take_over(const Bucket& bucket, const Slot& slot) const;
  // ConfigError where somebody has written to parameters whose update is computed from such copies already.
  void refuse_lost_writes(const Bucket& bucket, const Writes& writes) const;

  // Nothing without offload. Copies wait for the device.
  void gradients_to_host() const;     // once they are summed
  void parameters_to_device() const;  // once they are updated, in their own type

 private:
  bool keeps_copies(const Bucket& bucket) const;  // in another type or place

  at::Tensor parameters_, gradients_;
  at::Tensor host_parameters_, host_gradients_;  // the bucket's, with offload
};

}  // namespace isograd
