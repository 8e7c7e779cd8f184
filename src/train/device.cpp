#include "train/device.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <bit>

#include "base/refuse.hpp"
#include "comm/nccl/nccl.hpp"
#include "isograd/batch.hpp"
#include "isograd/error.hpp"
#include "isograd/random.hpp"
#include "loss/checks.hpp"
#include "train/task_kind.hpp"

namespace isograd {
namespace {

constexpr const char* kKey = "parallel.device";

// Ranks of the same host before this one.
int rank_on_host(const World& world) {
  const auto own = std::bit_cast<std::int64_t>(hash_name(world.host));
  const at::Tensor all = Group(world.group).all_gather(at::full({1}, own, at::kLong)).reshape({-1});
  const auto* hosts = all.const_data_ptr<std::int64_t>();
  return static_cast<int>(std::count(hosts, hosts + world.rank, own));
}

}  // namespace

std::string FoundGpus::text() const {
  const std::string library = "LibTorch " TORCH_VERSION;
  if (!built) return library + " without CUDA";
  return count == 0 ? library + " with CUDA, which finds no GPU"
                    : fmt::format("{} with CUDA and {} GPU{}", library, count, count == 1 ? "" : "s");
}

FoundGpus find_gpus() {
  FoundGpus found;
  found.built = at::CUDAHooksRegistry()->Has("CUDAHooks");
  if (!found.built) return found;
  const auto& hooks = at::detail::getCUDAHooks();
  if (hooks.hasCUDA()) found.count = hooks.deviceCount();
  const auto built = backends();
  found.nccl = std::find(built.begin(), built.end(), "nccl") != built.end();
  found.shared = nccl::ranks_share_gpus();
  return found;
}

std::string device_kind(const RunConfig& config, const FoundGpus& gpus) {
  if (config.parallel.device != "auto") return config.parallel.device;
  return gpus.count > 0 ? "cuda" : "cpu";
}

std::string backend_of(const RunConfig& config, int ranks, const FoundGpus& gpus) {
  if (config.parallel.backend != "auto") return config.parallel.backend;
  return ranks > 1 && device_kind(config, gpus) == "cuda" ? "nccl" : "shm";
}

std::string device_kind(const RunConfig& config) {
  return config.parallel.device == "auto" ? device_kind(config, find_gpus()) : config.parallel.device;
}

std::string backend_of(const RunConfig& config, int ranks) {
  const bool said = config.parallel.backend != "auto" || ranks == 1 || config.parallel.device == "cpu";
  return backend_of(config, ranks, said ? FoundGpus{} : find_gpus());
}

void check_device(const RunConfig& config, int ranks) {
  const auto& asked = config.parallel;
  if (asked.device == "cpu" && asked.backend != "nccl" && !asked.offload) return;
  check_device(config, ranks, find_gpus());
}

void check_device(const RunConfig& config, int ranks, const FoundGpus& gpus) {
  const auto refuse = [](std::string where, std::string found, std::string expected, std::string action) {
    isograd::refuse(std::move(where), std::move(found), std::move(expected), std::move(action));
  };
  const std::string asked = fmt::format("\"{}\"", config.parallel.device);
  const std::string backend = backend_of(config, ranks, gpus);
  if (device_kind(config, gpus) != "cuda") {
    if (backend == "nccl")
      refuse("parallel.backend", fmt::format("\"nccl\" with {} = {} and {}", kKey, asked, gpus.text()),
             "ranks on GPUs, which alone NCCL joins",
             "Set parallel.device = \"cuda\" where there are GPUs, or parallel.backend = \"shm\"");
    if (config.parallel.offload)
      refuse("parallel.offload", fmt::format("true with {} = {} and {}", kKey, asked, gpus.text()),
             "parameters on a GPU: offload moves states and gradients to host memory, where they already are",
             "Leave parallel.offload out, or set parallel.device = \"cuda\" where there are GPUs");
    return;
  }
  if (!gpus.built)
    refuse(kKey, fmt::format("{} and {}", asked, gpus.text()), "a LibTorch with CUDA, and a GPU",
           "Build isograd with torch 2.13.0 for CUDA (docs/gpu.md), or set parallel.device = \"cpu\"");
  if (gpus.count == 0)
    refuse(kKey, fmt::format("{} and {}", asked, gpus.text()), "a GPU that LibTorch can use",
           "See nvidia-smi and CUDA_VISIBLE_DEVICES, or set parallel.device = \"cpu\"");
  if (const TaskKind& kind = kind_of(config); !kind.on_gpu)
    refuse(kKey, fmt::format("{} with model.kind = \"{}\"", asked, kind.name),
           fmt::format("\"cpu\": a {} has no code for a GPU yet", kind.name),
           "Set parallel.device = \"cpu\"");
  if (config.parallel.share_parameters == "on")
    refuse("parallel.share_parameters", fmt::format("\"on\" with {} = {}", kKey, asked),
           "\"off\": one copy of the parameters is host memory",
           "Set parallel.share_parameters = \"off\", or parallel.device = \"cpu\"");
  if (backend != "nccl" || ranks == 1) return;
  if (!gpus.nccl)
    refuse("parallel.backend", "\"nccl\" in a build of isograd without it",
           "a build with the headers of CUDA and NCCL",
           "Build with -DISOGRAD_CUDA=ON (docs/gpu.md), or set parallel.backend = \"shm\"");
  if (ranks > gpus.count && !gpus.shared)
    refuse(fmt::format("--ranks {}", ranks), gpus.text(),
           "a GPU for each rank, as NCCL refuses two ranks on one",
           fmt::format("Start {} ranks, or set parallel.backend = \"shm\", which goes through host memory",
                       gpus.count));
}

at::Device device_of(const RunConfig& config, const World& world) {
  if (device_kind(config) != "cuda") return at::kCPU;
  const FoundGpus gpus = find_gpus();
  check_device(config, world.size, gpus);
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(rank_on_host(world) % gpus.count));
}

ForwardLossTerms on_device(at::Device device, ForwardLossTerms forward) {
  if (device.is_cpu()) return forward;
  return [device, forward = std::move(forward)](const Batch& batch) {
    // Computing what has no loss as well costs less than asking the device how much of it there is.
    const FixedShapes mark(FixedShapes::wanted() || 2 * batch.num_targets() >= batch.num_tokens());
    return forward(to_device(batch, device));
  };
}

}  // namespace isograd
