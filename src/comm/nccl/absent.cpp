// NCCL's functions in a build without CUDA or without its headers: they refuse.
#include "base/refuse.hpp"
#include "comm/nccl/nccl.hpp"

namespace isograd::nccl {
namespace {

[[noreturn]] void refuse_nccl() {
  refuse("the backend 'nccl'", "a build of isograd without it",
         "one that was made with a CUDA build of LibTorch",
         "Install torch 2.13.0 for CUDA with the nvidia packages that it names, and build again "
         "with -DISOGRAD_CUDA=ON, or use --backend shm");
}

}  // namespace

bool built() { return false; }

std::optional<at::Device> device_of(const c10d::Backend&) { return std::nullopt; }

void take_device(int) { refuse_nccl(); }

c10::intrusive_ptr<c10d::Backend> make(c10::intrusive_ptr<c10d::Store>, int, int, const std::string&,
                                       std::chrono::milliseconds) {
  refuse_nccl();
}

}  // namespace isograd::nccl
