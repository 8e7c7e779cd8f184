// NCCL through c10d, without its headers. In a build without CUDA the functions throw a ConfigError that
// explains how to get it (absent.cpp).
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
// The GPU whose memory a backend moves, if it is NCCL's.
std::optional<at::Device> device_of(const c10d::Backend& backend);
// NCCL refuses two ranks of one host on one GPU. It takes the host's name from its variable NCCL_HOSTID, so
// ranks with different names may share a GPU. Checks use this (./dev gpu-check).
inline bool ranks_share_gpus() {
  const char* host = std::getenv("NCCL_HOSTID");
  return host && *host;
}
// Selects the GPU with this rank's number on its host, modulo the number of GPUs where ranks share them.
// ConfigError in a build without CUDA, and where the host has fewer GPUs than ranks that do not share.
void take_device(int local_rank);

// Collective over the ranks of `store`, each with its selected GPU. c10d's watchdog ends a process whose
// collective does not complete within `timeout`.
c10::intrusive_ptr<c10d::Backend> make(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                       const std::string& name, std::chrono::milliseconds timeout);

}  // namespace isograd::nccl
