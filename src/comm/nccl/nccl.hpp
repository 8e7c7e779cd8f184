// NCCL through c10d, without its headers: a build on a LibTorch without CUDA answers with a ConfigError that
// says how to get one (absent.cpp).
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace isograd::nccl {

bool built();
// The GPU that a backend moves memory of, if it is NCCL's.
std::optional<at::Device> device_of(const c10d::Backend& backend);
// NCCL refuses two ranks of one host on one GPU. NCCL_HOSTID, a variable of NCCL's own that names the host of
// a rank, is set: NCCL believes it, and ranks of different names may share a GPU. For checks (./dev
// gpu-check).
inline bool ranks_share_gpus() {
  const char* host = std::getenv("NCCL_HOSTID");
  return host && *host;
}
// Rank `local_rank` of its host takes the GPU of that number, modulo their number where ranks share GPUs.
// ConfigError in a build without CUDA, and where the host has fewer GPUs than ranks that do not share them.
void take_device(int local_rank);

// Collective over the ranks of `store`, each with the GPU that it took. c10d's watchdog ends a process whose
// collective has not come to its end within `timeout`.
c10::intrusive_ptr<c10d::Backend> make(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                       const std::string& name, std::chrono::milliseconds timeout);

}  // namespace isograd::nccl
