// Which device a run computes on and what carries its data: parallel.device and parallel.backend, read
// together.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "isograd/loss.hpp"
#include "isograd/world.hpp"
#include "train/config.hpp"

namespace isograd {

// What this process has, by LibTorch's own account.
struct FoundGpus {
  bool built = false;   // LibTorch has CUDA
  bool nccl = false;    // and this build of isograd has NCCL
  int count = 0;        // GPUs that it can use
  bool shared = false;  // ranks may share one over NCCL (comm/nccl)

  std::string text() const;  // "LibTorch 2.13.0 without CUDA"
};
FoundGpus find_gpus();  // wakes CUDA up: not asked where the configuration is enough

// "cpu" or "cuda". parallel.device = "auto": the latter where LibTorch finds a GPU.
std::string device_kind(const RunConfig& config);
std::string device_kind(const RunConfig& config, const FoundGpus& gpus);
// What carries data between that many ranks. parallel.backend = "auto": NCCL between ranks on GPUs, else shm.
std::string backend_of(const RunConfig& config, int ranks);
std::string backend_of(const RunConfig& config, int ranks, const FoundGpus& gpus);

// ConfigError where the device or the backend is not there, or where something of this run has no code for a
// GPU yet: that is named.
void check_device(const RunConfig& config, int ranks);
void check_device(const RunConfig& config, int ranks, const FoundGpus& gpus);

// Where this rank computes: rank i of a host takes GPU i modulo their number. Collective.
at::Device device_of(const RunConfig& config, const World& world);

// `forward` of batches that come on the CPU, where they were counted.
ForwardLossTerms on_device(at::Device device, ForwardLossTerms forward);

}  // namespace isograd
