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
#include "isograd/random.hpp"
#include "train/config_table.hpp"

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

std::string device_kind(const RunConfig& config, const FindGpus& find) {
  const std::string& asked = config.parallel.device;
  return asked != "auto" ? asked : find().count > 0 ? "cuda" : "cpu";
}

std::string backend_of(const RunConfig& config, int ranks, const FindGpus& find) {
  if (config.parallel.backend != "auto") return config.parallel.backend;
  return ranks > 1 && device_kind(config, find) == "cuda" ? "nccl" : "shm";
}

void check_device(const RunConfig& config, int ranks, const FindGpus& find) {
  const auto& parallel = config.parallel;
  if (parallel.device == "cpu" && parallel.backend != "nccl" && !parallel.offload) return;
  const FoundGpus gpus = find();
  const auto found = [&] { return gpus; };
  const auto refuse_if = [](bool wrong, std::string where, std::string what, std::string expected,
                            std::string action) {
    if (wrong) refuse(std::move(where), std::move(what), std::move(expected), std::move(action));
  };
  const std::string asked = fmt::format("\"{}\"", parallel.device),
                    backend = backend_of(config, ranks, found);
  const std::string asked_here = fmt::format("{} and {}", asked, gpus.text());
  if (device_kind(config, found) != "cuda") {
    refuse_if(backend == "nccl", "parallel.backend", fmt::format("\"nccl\" with {} = {}", kKey, asked_here),
              "ranks on GPUs, which alone NCCL joins",
              "Set parallel.device = \"cuda\" where there are GPUs, or parallel.backend = \"shm\"");
    refuse_if(
        parallel.offload, "parallel.offload", fmt::format("true with {} = {}", kKey, asked_here),
        "parameters on a GPU: offload moves states and gradients to host memory, where they already are",
        "Leave parallel.offload out, or set parallel.device = \"cuda\" where there are GPUs");
    return;
  }
  refuse_if(!gpus.built, kKey, asked_here, "a LibTorch with CUDA, and a GPU",
            "Build isograd with torch 2.13.0 for CUDA (docs/gpu.md), or set parallel.device = \"cpu\"");
  refuse_if(gpus.count == 0, kKey, asked_here, "a GPU that LibTorch can use",
            "See nvidia-smi and CUDA_VISIBLE_DEVICES, or set parallel.device = \"cpu\"");
  const TaskKind& kind = kind_of(config);
  refuse_if(!kind.on_gpu, kKey, fmt::format("{} with model.kind = \"{}\"", asked, kind.name),
            fmt::format("\"cpu\": a {} has no code for a GPU yet", kind.name),
            "Set parallel.device = \"cpu\"");
  refuse_if(parallel.share_parameters == "on", "parallel.share_parameters",
            fmt::format("\"on\" with {} = {}", kKey, asked),
            "\"off\": one copy of the parameters is host memory",
            "Set parallel.share_parameters = \"off\", or parallel.device = \"cpu\"");
  if (backend != "nccl" || ranks == 1) return;
  refuse_if(!gpus.nccl, "parallel.backend", "\"nccl\" in a build of isograd without it",
            "a build with the headers of CUDA and NCCL",
            "Build with -DISOGRAD_CUDA=ON (docs/gpu.md), or set parallel.backend = \"shm\"");
  refuse_if(ranks > gpus.count && !gpus.shared, fmt::format("--ranks {}", ranks), gpus.text(),
            "a GPU for each rank, as NCCL refuses two ranks on one",
            fmt::format("Start {} ranks, or set parallel.backend = \"shm\", which goes through host memory",
                        gpus.count));
}

at::Device device_of(const RunConfig& config, const World& world) {
  if (device_kind(config) != "cuda") return at::kCPU;
  const FoundGpus gpus = find_gpus();
  check_device(config, world.size, [&] { return gpus; });
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(rank_on_host(world) % gpus.count));
}

}  // namespace isograd
