// A build on a LibTorch without CUDA, or without the headers of its CUDA.
#include "comm/nccl/nccl.hpp"
#include "isograd/error.hpp"

namespace isograd::nccl {
namespace {

[[noreturn]] void refuse() {
  throw ConfigError({.where = "the backend 'nccl'",
                     .found = "a build of isograd without it",
                     .expected = "one that was made with a CUDA build of LibTorch",
                     .action =
                         "Install torch 2.13.0 for CUDA with the nvidia packages that it names, and build "
                         "again with -DISOGRAD_CUDA=ON, or use --backend shm"});
}

}  // namespace

bool built() {
  return false;
}

std::optional<at::Device> device_of(const c10d::Backend&) {
  return std::nullopt;
}

void take_device(int) {
  refuse();
}

c10::intrusive_ptr<c10d::Backend> make(c10::intrusive_ptr<c10d::Store>, int, int, const std::string&,
                                       std::chrono::milliseconds) {
  refuse();
}

}  // namespace isograd::nccl
