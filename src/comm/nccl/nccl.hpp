// NCCL through c10d, without its headers: a build on a LibTorch without CUDA answers with a ConfigError that
// says how to get one (absent.cpp).
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace isograd::nccl {

bool built();
// The GPU that a backend moves memory of, if it is NCCL's.
std::optional<at::Device> device_of(const c10d::Backend& backend);
// Rank `local_rank` of its host takes the GPU of that number. ConfigError in a build without CUDA, and where
// the host has fewer GPUs than ranks: NCCL refuses two ranks on one.
void take_device(int local_rank);

// Collective over the ranks of `store`, each with the GPU that it took. c10d's watchdog ends a process whose
// collective has not come to its end within `timeout`.
c10::intrusive_ptr<c10d::Backend> make(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                       const std::string& name, std::chrono::milliseconds timeout);

}  // namespace isograd::nccl
