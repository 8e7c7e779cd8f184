// Chooses a run's device and backend, from parallel.device and parallel.backend.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <string>

#include "isograd/world.hpp"
#include "train/config.hpp"

namespace isograd {

// The GPUs of this process as LibTorch reports them.
struct FoundGpus {
  bool built = false;   // LibTorch has CUDA
  bool nccl = false;    // and this build of isograd has NCCL
  int count = 0;        // GPUs that it can use
  bool shared = false;  // ranks may share one over NCCL (comm/nccl)

  std::string text() const;  // "LibTorch 2.13.0 without CUDA"
};
FoundGpus
find_gpus();  // wakes CUDA up: the functions below ask it only where the configuration is not enough
using FindGpus = std::function<FoundGpus()>;

// "cpu" or "cuda". parallel.device = "auto": the latter where LibTorch finds a GPU.
std::string device_kind(const RunConfig& config, const FindGpus& find = find_gpus);
// The backend between `ranks` ranks. parallel.backend = "auto": NCCL between ranks on GPUs, otherwise shm.
std::string backend_of(const RunConfig& config, int ranks, const FindGpus& find = find_gpus);

// ConfigError: the device or backend is missing, or part of the run has no code for a GPU.
void check_device(const RunConfig& config, int ranks, const FindGpus& find = find_gpus);

// The device of this rank: rank i of a host takes GPU i modulo the number of GPUs. Collective.
at::Device device_of(const RunConfig& config, const World& world);

}  // namespace isograd
