#include <c10/cuda/CUDAFunctions.h>
#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/refuse.hpp"
#include "comm/nccl/nccl.hpp"
#include "isograd/error.hpp"

namespace isograd::nccl {

bool built() { return true; }

std::optional<at::Device> device_of(const c10d::Backend& backend) {
  if (!dynamic_cast<const c10d::ProcessGroupNCCL*>(&backend)) return std::nullopt;
  return at::Device(at::kCUDA, c10::cuda::current_device());
}

void take_device(int local_rank) {
  const int devices = c10::cuda::device_count();
  const bool shares = devices > 0 && ranks_share_gpus();
  if (local_rank >= devices && !shares)
    refuse("the backend 'nccl'", fmt::format("{} GPUs for rank {} of this host", devices, local_rank),
           "a GPU for each rank, as NCCL refuses two ranks on one",
           "Start fewer ranks, or use --backend shm, which goes through host memory");
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(shares ? local_rank % devices : local_rank));
}

c10::intrusive_ptr<c10d::Backend> make(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                       const std::string& name, std::chrono::milliseconds timeout) {
  const auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  options->group_name = name;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(std::move(store), rank, size, options);
}

}  // namespace isograd::nccl
